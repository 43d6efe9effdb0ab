"""Numerical proof that a pair is exact on this very model, with a control that must fail.

A pair changes nothing outside the innermost module that holds all its parameters, so it is proved there: the real model
is run once to record what that module is given, the module is cloned in float64, its biases and gains are drawn at
random (a fresh model has zero biases and unit gains, and would not notice a forgotten bias), and it is run under the
all-float64 mode. A pair is exact where rescaling by 2^6, 2^-6, an odd factor, and a negative one if it claims any sign,
changes the module's outputs by less than 1e-10 relative to their largest entry; pairs of one module are rescaled
together, each by its own factor, and told apart by halving where that fails. It is asked at the model's own weights and
again at matrices of standard deviation 0.4 and 2, since a clamp looks linear until something reaches it. Scaling the
left side alone has to change the outputs: a check that cannot fail proves nothing.

One module at a time is held in float64, so a model of a billion parameters needs little beyond itself. Where a pair
fails within its module, the whole model has the last word.

It is a proof at three points, on random inputs, not for all of them: what no input and no draw reaches (a clamp beyond
a thousand times the activations, an expert that no token is routed to) it cannot see.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from saggs.charges import require_real
from saggs.inputs import Inputs, Output, default_inputs, default_output, on_device, widened
from saggs.pairs import (
    Certificate,
    ParameterSlice,
    ScalePair,
    canonical_names,
    named_parameters,
    parameter_of,
    unwrap,
    unwrapped_name,
)
from saggs.precision import float64_everywhere, use_plain_kernels

TOLERANCE = 1e-10
CONTROL = 1e-6
FACTORS = (64.0, 1 / 64, 3.7)
NEGATIVE = -1.5
# Wide draws condition the network worse, so that rounding shows more; a clamp or a wrong slice shows as 1e-3 and above.
SPREADS = (0.4, 2.0)
SPREAD_TOLERANCE = 1e-7
_SAMPLES = 2
_CONTROLS_ONE_BY_ONE = 16


class CertificationError(ValueError):
    """A pair changes the model's outputs, or its control does not."""


def certify(
    model: nn.Module,
    pairs: Sequence[ScalePair],
    inputs: Inputs | None = None,
    output: Output | None = None,
) -> list[ScalePair]:
    """Prove every pair on float64 clones of the modules that hold them; returns the pairs with their certificates.

    Args:
        model: the model; it is not changed. One of its modules at a time is cloned in float64.
        pairs: what to prove.
        inputs: callable (generator, count) -> keyword arguments; random tokens for a causal language model.
        output: callable (result) -> tensor; the logits by default.

    Raises:
        CertificationError: naming the pair, the factor and the change of the outputs.
        ValueError: the model cannot be run (meta tensors, no `inputs` for a plain module, non-finite outputs).
    """
    certified = []
    for found in examine(model, pairs, inputs, output):
        if isinstance(found, CertificationError):
            raise found
        certified.append(found)
    return certified


def examine(
    model: nn.Module,
    pairs: Sequence[ScalePair],
    inputs: Inputs | None = None,
    output: Output | None = None,
) -> list[ScalePair | CertificationError]:
    """As `certify`, but a pair that fails yields its error in the place of the pair."""
    if not pairs:
        return []
    source = unwrap(model)
    require_real(source)
    generator = torch.Generator().manual_seed(0)
    arguments = dict((inputs or default_inputs(source))(generator, _SAMPLES))
    by_home: dict[str, list[int]] = {}
    homes = _Homes(source)
    for position, pair in enumerate(pairs):
        by_home.setdefault(homes.of(pair), []).append(position)
    calls = _recorded(source, [name for name in by_home if name], arguments, output or default_output)
    found: list[ScalePair | CertificationError] = list(pairs)
    for home, members in by_home.items():
        trial = _Trial(source, home, calls.get(home, [((), arguments)]), output or default_output)
        for position, result in zip(members, trial.examine([pairs[i] for i in members]), strict=True):
            found[position] = result
        del trial
    failed = [i for i, f in enumerate(found) if isinstance(f, CertificationError) and homes.of(pairs[i])]
    if failed:
        trial = _Trial(source, "", [((), arguments)], output or default_output)
        for position, result in zip(failed, trial.examine([pairs[i] for i in failed]), strict=True):
            found[position] = result
    return found


# --- where a pair lives -----------------------------------------------------------------------------------------------


class _Homes:
    """For each pair the innermost module whose forward pass uses all its parameters, and that alone uses them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {
            unwrapped_name(name)
            for name, module in model.named_modules()
            if type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        }
        self._aliases: dict[str, list[str]] = {}
        for alias, name in canonical_names(model).items():
            self._aliases.setdefault(name, []).append(alias)

    def of(self, pair: ScalePair) -> str:
        """The module's name; "" is the whole model."""
        names = [alias for part in pair.slices for alias in self._aliases.get(part.name, [part.name])]
        common = names[0].split(".")[:-1]
        for name in names[1:]:
            parts = name.split(".")[:-1]
            agree = next((i for i, (a, b) in enumerate(zip(common, parts, strict=False)) if a != b), None)
            common = common[: min(len(common), len(parts)) if agree is None else agree]
        layer = len({part.name for part in pair.slices if not part.bias}) == 1
        if layer and common:  # both sides in one layer: the layer's own output is what gets scaled
            common = common[:-1]
        while common and ".".join(common) not in self._modules:
            common.pop()
        return ".".join(common)


_Call = tuple[tuple[Any, ...], Mapping[str, Any]]


def _recorded(
    model: nn.Module, names: Sequence[str], arguments: Mapping[str, Any], output: Output
) -> dict[str, list[_Call]]:
    """What every named module is called with in one forward pass of the model, as it is. Its mode is restored."""
    calls: dict[str, list[_Call]] = {}
    modules = {unwrapped_name(name): module for name, module in model.named_modules()}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, []).append(copy.deepcopy(_detached((args, kwargs))))

        return hook

    training = {module: module.training for module in model.modules()}
    handles = [modules[name].register_forward_pre_hook(keep(name), with_kwargs=True) for name in names]
    try:
        model.eval()
        with torch.no_grad():
            try:
                outputs = output(model(**on_device(dict(arguments), device, _dtype_of(model))))
            except (RuntimeError, TypeError, IndexError, KeyError, AttributeError, AssertionError) as error:
                raise ValueError(
                    f"{type(model).__name__}'s forward pass failed on the probing inputs ({error}); pass inputs= that "
                    "it accepts"
                ) from error
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in training.items():
            module.training = mode
    if not bool(torch.isfinite(outputs).all()):
        raise ValueError(f"{type(model).__name__}'s outputs are not finite; nothing can be certified on it")
    return calls


def _dtype_of(model: nn.Module) -> torch.dtype | None:
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else None


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(_detached(v) for v in value)
    if type(value) is dict:
        return {k: _detached(v) for k, v in value.items()}
    return value


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


# --- the trial --------------------------------------------------------------------------------------------------------


class _Trial:
    """A float64 clone of one module with what it is called with. To be used once: other weights are left in it."""

    def __init__(self, model: nn.Module, home: str, calls: Sequence[_Call], output: Output) -> None:
        modules = {unwrapped_name(name): module for name, module in model.named_modules()}
        self._module = copy.deepcopy(modules[home]).double().eval().requires_grad_(False).cpu()
        use_plain_kernels(self._module)
        self._calls = [widened(on_device(call, torch.device("cpu"), None)) for call in calls]
        self._output = output if not home else None
        own = named_parameters(self._module)
        names = canonical_names(model)
        self._parameters = {names[f"{home}.{name}" if home else name]: p for name, p in own.items()}
        self._generator = torch.Generator().manual_seed(0)
        _randomise_degenerate(self._parameters, self._generator)
        if not self._take_reference():
            raise ValueError(f"{type(model).__name__}'s outputs are not finite; nothing can be certified on it")

    def examine(self, pairs: Sequence[ScalePair]) -> list[ScalePair | CertificationError]:
        """Every pair with its certificate, or the error that says why it has none."""
        found: list[ScalePair | CertificationError] = self._at_own_weights(pairs)
        for spread in SPREADS:
            _redraw(self._parameters, spread, self._generator)
            if not self._take_reference():  # overflow: this module cannot be run so wide, and wider still is no use
                break
            where = f"at weights of standard deviation {spread:g}"
            proved = [i for i, f in enumerate(found) if isinstance(f, ScalePair)]
            residuals = self._residuals([pairs[i] for i in proved], SPREAD_TOLERANCE, where)
            for i, residual in zip(proved, residuals, strict=True):
                before = found[i]
                if isinstance(residual, CertificationError):
                    found[i] = residual
                elif isinstance(before, ScalePair) and before.certificate is not None:
                    proof = dataclasses.replace(before.certificate, spreads=(*before.certificate.spreads, spread))
                    found[i] = dataclasses.replace(before, certificate=proof)
        return found

    def _at_own_weights(self, pairs: Sequence[ScalePair]) -> list[ScalePair | CertificationError]:
        residuals = self._residuals(pairs, TOLERANCE, "at its own weights")
        controls = self._controls(pairs)
        found: list[ScalePair | CertificationError] = []
        for pair, residual, control in zip(pairs, residuals, controls, strict=True):
            if isinstance(residual, CertificationError):
                found.append(residual)
            elif not control > CONTROL:
                found.append(CertificationError(
                    f"{pair} proves nothing: scaling its left side alone by {FACTORS[0]:g} changes the outputs by only "
                    f"{control:.1e}. The inputs do not exercise it; pass other inputs="
                ))  # fmt: skip
            else:
                certificate = Certificate(residual, control, TOLERANCE, _factors(pair))
                found.append(dataclasses.replace(pair, certificate=certificate))
        return found

    def _controls(self, pairs: Sequence[ScalePair]) -> list[float]:
        """What scaling each left side alone changes. The many pairs of a fine granularity answer together."""
        families: dict[tuple[str, str], list[int]] = {}
        for i, pair in enumerate(pairs):
            families.setdefault((pair.kind, pair.path), []).append(i)
        controls = [0.0] * len(pairs)
        for members in families.values():
            apart = len(members) <= _CONTROLS_ONE_BY_ONE
            for unit in [[i] for i in members] if apart else [members]:
                scalings = [(pairs[i].left, FACTORS[0]) for i in unit]
                change = self._change(scalings)
                if not change > CONTROL:  # what a later norm divides out: every other entry is not divided out
                    change = self._change(scalings, every_other=True)
                for i in unit:
                    controls[i] = change
        return controls

    def _residuals(self, pairs: Sequence[ScalePair], tolerance: float, where: str) -> list[float | CertificationError]:
        """The largest change of the outputs over the factors, of all pairs together; halved where that is too much."""
        if not pairs:
            return []
        if len(pairs) == 1:
            return [self._residual(pairs[0], tolerance, where)]
        residual = 0.0
        for turn in range(max(len(_factors(pair)) for pair in pairs)):
            factors = [_factors(pair)[(turn + i) % len(_factors(pair))] for i, pair in enumerate(pairs)]
            residual = max(residual, self._change([(p.slices, f) for p, f in zip(pairs, factors, strict=True)]))
            if not residual <= tolerance:
                middle = len(pairs) // 2
                return [
                    *self._residuals(pairs[:middle], tolerance, where),
                    *self._residuals(pairs[middle:], tolerance, where),
                ]
        return [residual] * len(pairs)

    def _residual(self, pair: ScalePair, tolerance: float, where: str) -> float | CertificationError:
        residual = 0.0
        for factor in _factors(pair):
            change = self._change([(pair.slices, factor)])
            if not change <= tolerance:
                return CertificationError(
                    f"{pair} is not exact: factor {factor:g} changes the outputs by {change:.1e} {where} (relative; "
                    f"{tolerance:g} allowed). Leave it out, or list all its consumers"
                )
            residual = max(residual, change)
        return residual

    def _change(
        self, scalings: Sequence[tuple[Sequence[ParameterSlice], float]], *, every_other: bool = False
    ) -> float:
        """Relative change of the outputs when the slices are scaled; the clone is restored bit for bit.

        With `every_other`, only every other entry of each slice is.
        """
        names = {part.name for slices, _ in scalings for part in slices}
        kept = {name: self._parameters[name].detach().clone() for name in names if name in self._parameters}
        try:
            for slices, factor in scalings:
                for part in slices:
                    view = part.view(parameter_of(self._parameters, part).detach())
                    multiplier = torch.tensor(factor**part.exponent, dtype=view.dtype)
                    if every_other:
                        odd = (torch.arange(view.numel()) % 2 == 1).reshape(view.shape)
                        multiplier = torch.where(odd, torch.ones_like(multiplier), multiplier)
                    view.mul_(multiplier).add_((multiplier - 1) * part.offset)
            outputs = self._run()
        finally:
            for name, before in kept.items():
                self._parameters[name].detach().copy_(before)
        if len(outputs) != len(self._reference):
            return float("inf")
        changes = [
            float((now - before).abs().max() / before.abs().max().clamp_min(1e-300)) if now.numel() else 0.0
            for now, before in zip(outputs, self._reference, strict=True)
        ]
        return float("nan") if any(c != c for c in changes) else max(changes)

    def _take_reference(self) -> bool:
        """Run the clone as it is; whether its outputs are finite."""
        self._reference = self._run()
        return bool(self._reference) and all(bool(torch.isfinite(r[r > -1e30]).all()) for r in self._reference)

    def _run(self) -> list[Tensor]:
        results: list[Tensor] = []
        with torch.no_grad(), float64_everywhere():
            for args, kwargs in self._calls:
                args, kwargs = copy.deepcopy((args, kwargs))  # a module may write into what it is given
                result = self._module(*args, **kwargs)
                results += [self._output(result)] if self._output is not None else _tensors(result)
        return [r.double() for r in results]


def _factors(pair: ScalePair) -> tuple[float, ...]:
    return FACTORS + ((NEGATIVE,) if pair.signs == "any" else ())


def _redraw(parameters: Mapping[str, nn.Parameter], spread: float, generator: torch.Generator) -> None:
    """Matrices from a normal law of this standard deviation; biases and gains are random already and stay."""
    with torch.no_grad():
        for parameter in parameters.values():
            if parameter.dim() >= 2:
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def _randomise_degenerate(parameters: Mapping[str, nn.Parameter], generator: torch.Generator) -> None:
    """Draw biases and gains (1-D), and constant tensors of any shape, from a normal law: zeros and ones hide faults."""
    with torch.no_grad():
        for parameter in parameters.values():
            constant = parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all())
            if parameter.dim() <= 1 or constant:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.copy_(parameter + 0.4 * noise)


__all__ = ["CONTROL", "FACTORS", "TOLERANCE", "CertificationError", "certify", "examine"]
