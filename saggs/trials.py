"""The trial that a pair is put to: a module cloned in float64, run with its weights rescaled, and put back.

See `saggs.certificates` for what is asked of a pair and why. `Trial` works on a clone; `InPlaceTrial` on a model that
is too large for one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from saggs.copies import cloned, draw_statistics
from saggs.inputs import Output, on_device, widened
from saggs.pairs import (
    Certificate,
    ParameterSlice,
    ScalePair,
    canonical_names,
    named_parameters,
    parameter_of,
    unwrapped_name,
)
from saggs.plan import ScalingPlan
from saggs.precision import float64_everywhere, use_plain_kernels
from saggs.rescaling import apply

TOLERANCE = 1e-10
CONTROL = 1e-6
FACTORS = (64.0, 1 / 64, 3.7)
NEGATIVE = -1.5
# Wide draws condition the network worse, so that rounding shows more; a clamp or a wrong slice shows as 1e-3 and above.
SPREADS = (0.4, 2.0)
SPREAD_TOLERANCE = 1e-7
_CONTROLS_ONE_BY_ONE = 16

Scalings = Sequence[tuple[Sequence[ParameterSlice], float]]
Call = tuple[tuple[Any, ...], Mapping[str, Any]]


class CertificationError(ValueError):
    """A pair changes the model's outputs, or its control does not."""


class Trial:
    """A float64 clone of one module with what it is called with. To be used once: other weights are left in it."""

    def __init__(
        self, model: nn.Module, home: str, calls: Sequence[Call], output: Output, pairs: Sequence[ScalePair]
    ) -> None:
        self._moving = {part.name for pair in pairs for part in pair.slices}
        modules = {unwrapped_name(name): module for name, module in model.named_modules()}
        self._module = cloned(modules[home]).requires_grad_(False)
        use_plain_kernels(self._module)
        self._calls = [widened(on_device(call, torch.device("cpu"), None)) for call in calls]
        self._output = output if not home else None
        own = named_parameters(self._module)
        names = canonical_names(model)
        self._parameters = {names[f"{home}.{name}" if home else name]: p for name, p in own.items()}
        self._generator = torch.Generator().manual_seed(0)
        _randomise_degenerate(self._parameters, self._generator)
        draw_statistics(self._module, self._generator)
        if not self._take_reference():
            raise ValueError(f"{type(model).__name__}'s outputs are not finite; nothing can be certified on it")

    def examine(self, pairs: Sequence[ScalePair], spreads: Sequence[float]) -> list[ScalePair | CertificationError]:
        """Every pair with its certificate, or the error that says why it has none."""
        found: list[ScalePair | CertificationError] = self._at_own_weights(pairs, TOLERANCE, _factors)
        last = 0.0
        for spread in spreads:
            _redraw(self._parameters, spread, last, self._generator)
            last = spread
            if not self._take_reference():  # overflow: this module cannot be run so wide, and wider still is no use
                break
            where = f"at weights of standard deviation {spread:g}"
            proved = [i for i, f in enumerate(found) if isinstance(f, ScalePair)]
            residuals = self._residuals([pairs[i] for i in proved], SPREAD_TOLERANCE, where, _factors, turns=1)
            for i, residual in zip(proved, residuals, strict=True):
                before = found[i]
                if isinstance(residual, CertificationError):
                    found[i] = residual
                elif isinstance(before, ScalePair) and before.certificate is not None:
                    proof = dataclasses.replace(before.certificate, spreads=(*before.certificate.spreads, spread))
                    found[i] = dataclasses.replace(before, certificate=proof)
        return found

    def joint_residual(self, pairs: Sequence[ScalePair]) -> float:
        """Change of the outputs when all pairs are rescaled at once, each by a random factor of its own."""
        scales = torch.tensor(self._random_factors(pairs), dtype=torch.float64)
        return self._change(partial(apply, ScalingPlan(pairs, self._parameters), scales, self._parameters))

    def _at_own_weights(
        self, pairs: Sequence[ScalePair], tolerance: float, factors_of: Callable[[ScalePair], tuple[float, ...]]
    ) -> list[ScalePair | CertificationError]:
        residuals = self._residuals(pairs, tolerance, "at its own weights", factors_of)
        controls = self._controls(pairs)
        found: list[ScalePair | CertificationError] = []
        for pair, residual, control in zip(pairs, residuals, controls, strict=True):
            if isinstance(residual, CertificationError):
                found.append(residual)
            elif not control > max(CONTROL, 100 * tolerance):
                found.append(CertificationError(
                    f"{pair} proves nothing: scaling its left side alone by {FACTORS[0]:g} changes the outputs by only "
                    f"{control:.1e}. The inputs do not exercise it; pass other inputs="
                ))  # fmt: skip
            else:
                certificate = Certificate(residual, control, tolerance, factors_of(pair))
                found.append(dataclasses.replace(pair, certificate=certificate))
        return found

    def _controls(self, pairs: Sequence[ScalePair]) -> list[float]:
        """What scaling each left side alone changes. Of the many pairs of a fine granularity some answer for all."""
        families: dict[tuple[str, str], list[int]] = {}
        for i, pair in enumerate(pairs):
            families.setdefault((pair.kind, pair.path), []).append(i)
        controls = [0.0] * len(pairs)
        for members in families.values():
            apart = len(members) <= _CONTROLS_ONE_BY_ONE
            for unit in [[i] for i in members] if apart else [members]:
                some = unit[:: max(1, len(unit) // _CONTROLS_ONE_BY_ONE)]
                scalings = [(pairs[i].left, FACTORS[0]) for i in some]
                change = self._change(partial(self._scale, scalings))
                if not change > CONTROL:  # what a later norm divides out: every other entry is not divided out
                    change = self._change(partial(self._scale, scalings, every_other=True))
                for i in unit:
                    controls[i] = change
        return controls

    def _residuals(
        self,
        pairs: Sequence[ScalePair],
        tolerance: float,
        where: str,
        factors_of: Callable[[ScalePair], tuple[float, ...]],
        turns: int = len(FACTORS) + 1,
    ) -> list[float | CertificationError]:
        """The largest change of the outputs over the factors, of all pairs together; halved where that is too much.

        In each of `turns` turns every pair has another one of its factors, in an order of its own; in one more, random
        factors, so that two wrong pairs cannot make up for each other.
        """
        if not pairs:
            return []
        if len(pairs) == 1:
            return [self._residual(pairs[0], tolerance, where, factors_of)]
        orders = [
            [factors[k] for k in torch.randperm(len(factors), generator=self._generator).tolist()]
            for factors in map(factors_of, pairs)
        ]
        trials = [[order[turn % len(order)] for order in orders] for turn in range(turns)]
        if factors_of is _factors:
            trials.append(self._random_factors(pairs))
        plan = ScalingPlan(pairs, self._parameters)
        residual = 0.0
        for factors in trials:
            scales = torch.tensor(factors, dtype=torch.float64)
            residual = max(residual, self._change(partial(apply, plan, scales, self._parameters)))
            if not residual <= tolerance:
                middle = len(pairs) // 2
                return [
                    *self._residuals(pairs[:middle], tolerance, where, factors_of, turns),
                    *self._residuals(pairs[middle:], tolerance, where, factors_of, turns),
                ]
        return [residual] * len(pairs)

    def _random_factors(self, pairs: Sequence[ScalePair]) -> list[float]:
        size = 2 ** (6 * torch.rand(len(pairs), generator=self._generator, dtype=torch.float64) - 3)
        flips = torch.rand(len(pairs), generator=self._generator) < 0.5
        return [
            -f if flip and pair.signs == "any" else f
            for pair, f, flip in zip(pairs, size.tolist(), flips.tolist(), strict=True)
        ]

    def _residual(
        self,
        pair: ScalePair,
        tolerance: float,
        where: str,
        factors_of: Callable[[ScalePair], tuple[float, ...]],
    ) -> float | CertificationError:
        residual = 0.0
        for factor in factors_of(pair):
            change = self._change(partial(self._scale, [(pair.slices, factor)]))
            if not change <= tolerance:
                return CertificationError(
                    f"{pair} is not exact: factor {factor:g} changes the outputs by {change:.1e} {where} (relative; "
                    f"{tolerance:g} allowed). Leave it out, or list all its consumers"
                )
            residual = max(residual, change)
        return residual

    def _scale(self, scalings: Scalings, *, every_other: bool = False) -> None:
        """Multiply slices in place; with `every_other`, only every other entry of each."""
        for slices, factor in scalings:
            for part in slices:
                view = part.view(parameter_of(self._parameters, part).detach())
                multiplier = torch.tensor(factor**part.exponent, dtype=view.dtype, device=view.device)
                if every_other:
                    odd = (torch.arange(view.numel(), device=view.device) % 2 == 1).reshape(view.shape)
                    multiplier = torch.where(odd, torch.ones_like(multiplier), multiplier)
                view.mul_(multiplier).add_((multiplier - 1) * part.offset)

    def _change(self, rescaled: Callable[[], None]) -> float:
        """Relative change of the outputs by a rescaling of the clone, which is then restored bit for bit."""
        try:
            with torch.no_grad():
                rescaled()
                outputs = self._run()
        finally:
            for name, before in self._kept.items():
                self._parameters[name].detach().copy_(before)
        if len(outputs) != len(self._reference):
            return float("inf")
        changes = [
            float((now - before).abs().max() / before.abs().max().clamp_min(1e-300)) if now.numel() else 0.0
            for now, before in zip(outputs, self._reference, strict=True)
        ]
        return float("nan") if any(c != c for c in changes) else max(changes)

    def _take_reference(self) -> bool:
        """Run the clone as it is, and keep its weights; whether its outputs are finite."""
        self._kept = {name: p.detach().clone() for name, p in self._parameters.items() if name in self._moving}
        self._reference = self._run()
        return bool(self._reference) and all(bool(torch.isfinite(r).all()) for r in self._reference)

    def _run(self) -> list[Tensor]:
        results: list[Tensor] = []
        with torch.no_grad(), float64_everywhere():
            for args, kwargs in self._calls:
                args, kwargs = copy.deepcopy((args, kwargs))  # a module may write into what it is given
                result = self._module(*args, **kwargs)
                results += [self._output(result)] if self._output is not None else _tensors(result)
        return [r.double() for r in results]


class InPlaceTrial(Trial):
    """A model too large to clone, as it is: in its own precision, by powers of two, which are exact there."""

    def __init__(
        self, model: nn.Module, arguments: Mapping[str, Any], output: Output, pairs: Sequence[ScalePair]
    ) -> None:
        self._module = model
        self._parameters = named_parameters(model)
        device = next(iter(self._parameters.values())).device
        self._calls = [((), on_device(dict(arguments), device, dtype_of(model)))]
        self._read = output
        self._generator = torch.Generator().manual_seed(0)
        self._moving = {part.name for pair in pairs for part in pair.slices}
        if not self._take_reference():
            raise ValueError(f"{type(model).__name__}'s outputs are not finite; nothing can be certified on it")

    def examine(
        self, pairs: Sequence[ScalePair], spreads: Sequence[float] = ()
    ) -> list[ScalePair | CertificationError]:
        """Every pair with its certificate, or the error that says why it has none. `spreads` have no meaning here."""
        found: list[ScalePair | CertificationError] = []
        for pair in pairs:
            # Powers of two change no bit, but for gains used as 1 + w, which round.
            eps = max(torch.finfo(self._parameters[part.name].dtype).eps for part in pair.slices)
            tolerance = 64 * eps if any(part.offset for part in pair.slices) else 1e-6
            found += self._at_own_weights([pair], tolerance, _powers_of_two)
        return found

    def _run(self) -> list[Tensor]:
        training = {module: module.training for module in self._module.modules()}
        self._module.eval()
        try:
            with torch.no_grad():
                return [self._read(self._module(*args, **kwargs)).double() for args, kwargs in self._calls]
        finally:
            for module, mode in training.items():
                module.training = mode


def _powers_of_two(pair: ScalePair) -> tuple[float, ...]:
    return (64.0, 1 / 64) + ((-2.0,) if pair.signs == "any" else ())


def _factors(pair: ScalePair) -> tuple[float, ...]:
    return FACTORS + ((NEGATIVE,) if pair.signs == "any" else ())


def _redraw(parameters: Mapping[str, nn.Parameter], spread: float, last: float, generator: torch.Generator) -> None:
    """Matrices from a normal law of this standard deviation; biases and gains are random already and stay.

    Where they are from such a law already, of standard deviation `last`, the same draw is stretched.
    """
    with torch.no_grad():
        for parameter in parameters.values():
            if parameter.dim() < 2:
                continue
            if last:
                parameter.mul_(spread / last)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(spread))


def _randomise_degenerate(parameters: Mapping[str, nn.Parameter], generator: torch.Generator) -> None:
    """Draw biases and gains (1-D), and constant tensors of any shape, from a normal law: zeros and ones hide faults."""
    with torch.no_grad():
        for parameter in parameters.values():
            constant = parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all())
            if parameter.dim() <= 1 or constant:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.copy_(parameter + 0.4 * noise)


def dtype_of(model: nn.Module) -> torch.dtype | None:
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else None


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every floating tensor in the result of a forward pass."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


__all__ = [
    "CONTROL",
    "FACTORS",
    "SPREADS",
    "TOLERANCE",
    "Call",
    "CertificationError",
    "InPlaceTrial",
    "Trial",
    "dtype_of",
]
