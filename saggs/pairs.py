"""What a pair is: slices of parameters that can be rescaled against each other without changing the function.

A pair joins a left and a right set of slices. With a factor c, every slice w of exponent e becomes

    w -> c^e w            (or, for a gain used as 1 + w:   1 + w -> c^e (1 + w)),

left exponents being positive and right ones negative. The model's outputs are the same for every input and every
allowed c: (Q, K) -> (cQ, K/c) keeps Q K^T, (V, O) -> (cV, O/c) keeps O V, (up, down) -> (c up, down/c) keeps a
gated MLP. Pairs are keyed by parameter names, never by positions, and names are those of the unwrapped model: a
`torch.compile` or `DistributedDataParallel` wrapper changes neither a pair nor what it acts on.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor, nn

Kind = Literal["query_key", "value_output", "up_down", "norm_gain", "query_key_gain"]
Signs = Literal["any", "positive"]
KINDS: tuple[Kind, ...] = ("query_key", "value_output", "up_down", "norm_gain", "query_key_gain")
# Those that the papers balance. No two of them share an entry; a gain shares the columns of all that reads it.
BALANCED_KINDS: tuple[Kind, ...] = ("query_key", "value_output", "up_down")

_WRAPPER_PREFIXES = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


@dataclass(frozen=True)
class ParameterSlice:
    """A rectangular part of one parameter, and how it answers the pair's factor.

    Attributes:
        name: the parameter's name in the unwrapped model.
        ranges: one entry a dimension: None for all of it, or (start, stop).
        exponent: the slice is multiplied by factor ** exponent.
        bias: rides along with its weight but counts in no norm. (A key bias has no effect on attention, so its
            gradient is round-off; norms with it in them drift apart between runs that should agree.)
        offset: 1 where the model uses 1 + w (Gemma's norm gains), else 0.
        shape: of the whole parameter; a model whose parameter has another one is not the model of this pair.
    """

    name: str
    ranges: tuple[tuple[int, int] | None, ...]
    exponent: int
    bias: bool = False
    offset: int = 0
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.exponent, bool) or not isinstance(self.exponent, int):
            raise ValueError(f"{self.name}: exponent {self.exponent!r} is no whole number")
        if self.exponent == 0:
            raise ValueError(f"{self.name}: exponent 0 would leave the slice alone; leave it out of the pair")
        if self.offset not in (0, 1):
            raise ValueError(f"{self.name}: offset {self.offset} is not 0 (used as w) or 1 (used as 1 + w)")

    def view(self, tensor: Tensor) -> Tensor:
        """The slice of `tensor` (the parameter, or a tensor of its shape): a view, so that writes go through."""
        if self.shape is not None and tuple(tensor.shape) != self.shape:
            raise ValueError(
                f"{self.name} has shape {tuple(tensor.shape)}, the pair was found on one of {self.shape}; "
                "find the pairs of this model anew"
            )
        if tensor.dim() != len(self.ranges):
            raise ValueError(
                f"{self.name}: a tensor of shape {tuple(tensor.shape)} has {tensor.dim()} dimensions, "
                f"the slice has {len(self.ranges)}; find the pairs of this model anew"
            )
        for dim, bounds in enumerate(self.ranges):
            if bounds is None:
                continue
            start, stop = bounds
            if not 0 <= start < stop <= tensor.shape[dim]:
                raise ValueError(
                    f"{self.name}: range {start}:{stop} lies outside dimension {dim} of {tuple(tensor.shape)}; "
                    "find the pairs of this model anew"
                )
            tensor = tensor.narrow(dim, start, stop - start)
        return tensor

    def is_whole(self) -> bool:
        """True where the slice is all of its parameter."""
        return all(bounds is None for bounds in self.ranges)

    def overlaps(self, other: ParameterSlice) -> bool:
        """True where both slices hold a common entry of one parameter."""
        return self.name == other.name and all(
            a is None or b is None or (a[0] < b[1] and b[0] < a[1])
            for a, b in zip(self.ranges, other.ranges, strict=True)
        )

    def __str__(self) -> str:
        inside = ", ".join(":" if r is None else f"{r[0]}:{r[1]}" for r in self.ranges)
        return self.name if self.is_whole() else f"{self.name}[{inside}]"


@dataclass(frozen=True)
class Certificate:
    """The numerical proof of a pair on one model (see `saggs.certificates`).

    Attributes:
        residual: largest relative change of the outputs under the tried factors.
        control: relative change when the left side alone is scaled: what a wrong pair would show. Of many pairs of
            one kind in one module: to first order.
        tolerance: the residual had to stay below this.
        factors: the factors tried.
        spreads: standard deviations of random weights at which the pair held too, beside the model's own weights.
    """

    residual: float
    control: float
    tolerance: float
    factors: tuple[float, ...]
    spreads: tuple[float, ...] = ()


@dataclass(frozen=True)
class ScalePair:
    """Left and right slices whose reciprocal rescaling keeps the model's function.

    Attributes:
        kind: one of `KINDS`.
        path: the module the pair belongs to, such as "model.layers.0.self_attn".
        left: slices of positive exponent, multiplied by factor ** exponent.
        right: slices of negative exponent.
        signs: "any", or "positive" where an activation between the two sides forbids negative factors.
        certificate: the proof on the model the pair was found on, or None.
    """

    kind: Kind
    path: str
    left: tuple[ParameterSlice, ...]
    right: tuple[ParameterSlice, ...]
    signs: Signs = "any"
    certificate: Certificate | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.signs not in ("any", "positive"):
            raise ValueError(
                f"kind={self.kind!r}, signs={self.signs!r}: kinds are {', '.join(KINDS)}; signs any, positive"
            )
        for side, slices, sign in (("left", self.left, 1), ("right", self.right, -1)):
            if not any(not s.bias for s in slices):
                raise ValueError(f"{self}: the {side} side holds no weight")
            wrong = [s for s in slices if s.exponent * sign < 0]
            if wrong:
                raise ValueError(f"{self}: exponent {wrong[0].exponent} of {wrong[0]} has the wrong sign for {side}")

    @property
    def slices(self) -> tuple[ParameterSlice, ...]:
        """All slices, left ones first."""
        return self.left + self.right

    def check_factor(self, factor: float) -> None:
        """Raise a ValueError where `factor` is zero, not finite, or negative though only positive ones are exact."""
        if isinstance(factor, str | bool):
            raise ValueError(f"{self}: factor {factor!r} is no number")
        if not abs(factor) > 0 or abs(factor) == float("inf"):
            raise ValueError(f"{self}: factor {factor} must be finite and not zero")
        if factor < 0 and self.signs == "positive":
            raise ValueError(f"{self}: factor {factor} is negative; only positive factors keep this pair's function")

    def __str__(self) -> str:
        return f"{self.kind} of {self.path or 'the model'}"

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values; `ScalePair.from_json` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ScalePair:
        """The pair that `to_json` wrote, also through JSON text. Raises a ValueError where a key is missing."""
        try:
            return cls._from_json(data)
        except (KeyError, TypeError) as error:
            raise ValueError(f"no pair: {error} is missing or wrong in {str(data)[:200]}") from None

    @classmethod
    def _from_json(cls, data: Mapping[str, Any]) -> ScalePair:
        def slices(items: Iterable[Mapping[str, Any]]) -> tuple[ParameterSlice, ...]:
            return tuple(ParameterSlice(**{**item, **tuples(item)}) for item in items)

        def tuples(item: Mapping[str, Any]) -> dict[str, Any]:
            shape = item.get("shape")
            ranges = tuple(None if r is None else (r[0], r[1]) for r in item["ranges"])
            return {"ranges": ranges, "shape": None if shape is None else tuple(shape)}

        certificate = data.get("certificate")
        if certificate is not None:
            lists = {name: tuple(certificate.get(name, ())) for name in ("factors", "spreads")}
            certificate = Certificate(**{**certificate, **lists})
        return cls(
            kind=data["kind"],
            path=data["path"],
            left=slices(data["left"]),
            right=slices(data["right"]),
            signs=data["signs"],
            certificate=certificate,
        )


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile` and data-parallel wrappers; the model itself where there is none."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def unwrapped_name(name: str) -> str:
    """`name` without the parts that wrappers around submodules add."""
    return _WRAPPER_PREFIXES.sub(r"\1", name).replace("..", ".").strip(".")


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter once, by its unwrapped name. A tied parameter stands under the first of its names."""
    return {unwrapped_name(name): parameter for name, parameter in unwrap(model).named_parameters()}


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the one it has in `named_parameters`: a tied one has several."""
    first = {id(parameter): name for name, parameter in named_parameters(model).items()}
    every = unwrap(model).named_parameters(remove_duplicate=False)
    return {unwrapped_name(name): first[id(parameter)] for name, parameter in every}


def parameter_of(parameters: Mapping[str, nn.Parameter], part: ParameterSlice) -> nn.Parameter:
    """The parameter that `part` names; a ValueError that names the nearest one where there is none."""
    try:
        return parameters[part.name]
    except KeyError:
        near = difflib.get_close_matches(part.name, list(parameters), n=1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ValueError(f"the model has no parameter {part.name!r}{hint}. Pairs belong to one model") from None
