"""The trial that a pair is put to: a module cloned in float64, run with its weights rescaled, and put back.

See `saggs.certificates` for what is asked of a pair and why. `Trial` works on a clone; `InPlaceTrial` on a model that
is too large for one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from saggs.copies import cloned, draw_degenerate, draw_statistics, dtype_of, redraw
from saggs.inputs import Output, floating_tensors, on_device, widened
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


@dataclasses.dataclass
class _Verdict:
    """What has been found about one pair so far.

    Attributes:
        residual: the largest change of the outputs at the own weights.
        spreads: wider weights at which the pair held, too.
        failure: it is not exact.
        control: what scaling its left side alone changes.
        idle: what of it changes nothing, so that it proves nothing; None where there is nothing such.
    """

    residual: float = 0.0
    spreads: tuple[float, ...] = ()
    failure: CertificationError | None = None
    control: float = 0.0
    idle: str | None = None

    def hear(self, residual: float | CertificationError, spread: float | None = None) -> None:
        if isinstance(residual, CertificationError):
            self.failure = residual
        elif spread is None:
            self.residual = residual
        else:
            self.spreads = (*self.spreads, spread)

    def on(self, pair: ScalePair, tolerance: float, factors: tuple[float, ...]) -> ScalePair | CertificationError:
        """The pair with its certificate, or why it has none."""
        if self.failure is not None:
            return self.failure
        if self.idle is not None:
            return CertificationError(
                f"{pair} proves nothing: {self.idle}. The inputs do not exercise it; pass other inputs="
            )
        certificate = Certificate(self.residual, self.control, tolerance, factors, self.spreads)
        return dataclasses.replace(pair, certificate=certificate)


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
        draw_degenerate(self._parameters, self._generator)
        draw_statistics(self._module, self._generator)
        if not self._take_reference():
            raise ValueError(f"{type(model).__name__}'s outputs are not finite; nothing can be certified on it")

    def examine(self, pairs: Sequence[ScalePair], *, everywhere: bool = True) -> list[ScalePair | CertificationError]:
        """Every pair with its certificate, or the error that says why it has none.

        With `everywhere`, at the wider weights too; without, only those pairs that nothing exercises at the own ones
        (a neuron that is dead there): what is to be proved and the control have to hold at the same weights.
        """
        verdicts = self._at_own_weights(pairs, TOLERANCE, _factors)
        last = 0.0
        for spread in SPREADS:
            asked = [i for i, v in enumerate(verdicts) if v.failure is None and (everywhere or v.idle is not None)]
            if not asked:
                continue
            redraw(self._parameters, spread, last, self._generator)
            last = spread
            if not self._take_reference():  # overflow: this module cannot be run so wide, and wider still is no use
                break
            where = f"at weights of standard deviation {spread:g}"
            here = [pairs[i] for i in asked]
            residuals = self._residuals(here, SPREAD_TOLERANCE, where, _factors, turns=1)
            for i, residual in zip(asked, residuals, strict=True):
                verdicts[i].hear(residual, spread)
            still = [i for i in asked if verdicts[i].failure is None and verdicts[i].idle is not None]
            self._control([pairs[i] for i in still], [verdicts[i] for i in still])
        return [verdict.on(pair, TOLERANCE, _factors(pair)) for pair, verdict in zip(pairs, verdicts, strict=True)]

    def joint_residual(self, pairs: Sequence[ScalePair]) -> float:
        """Change of the outputs when all pairs are rescaled at once, each by a random factor of its own."""
        scales = torch.tensor(self._random_factors(pairs), dtype=torch.float64)
        return self._change(partial(apply, ScalingPlan(pairs, self._parameters), scales, self._parameters))

    def _at_own_weights(
        self, pairs: Sequence[ScalePair], tolerance: float, factors_of: Callable[[ScalePair], tuple[float, ...]]
    ) -> list[_Verdict]:
        verdicts = [_Verdict() for _ in pairs]
        residuals = self._residuals(pairs, tolerance, "at its own weights", factors_of)
        for verdict, residual in zip(verdicts, residuals, strict=True):
            verdict.hear(residual)
        held = [i for i, verdict in enumerate(verdicts) if verdict.failure is None]
        self._control([pairs[i] for i in held], [verdicts[i] for i in held], max(CONTROL, 100 * tolerance))
        return verdicts

    def _control(self, pairs: Sequence[ScalePair], verdicts: Sequence[_Verdict], least: float = CONTROL) -> None:
        """Find out whether every slice of every pair matters to the outputs, and what the left side alone changes.

        One backward pass tells it of all slices to first order; what has no gradient is scaled, to see. Scaled by
        itself is the left side of every pair, too, where there are few: of tens of thousands of channels, first order
        is what is asked.
        """
        if not pairs:
            return
        charges = self._charges([part for pair in pairs for part in pair.slices if not part.bias])
        families = Counter((pair.kind, pair.path) for pair in pairs)
        for pair, verdict in zip(pairs, verdicts, strict=True):
            if families[pair.kind, pair.path] > _CONTROLS_ONE_BY_ONE:
                control = sum(charges[part] for part in pair.left if not part.bias)
            else:
                control = self._change(partial(self._scale, [(pair.left, FACTORS[0])]))
                if not control > CONTROL:  # what a later norm divides out: every other entry is not divided out
                    control = self._change(partial(self._scale, [(pair.left, FACTORS[0])], every_other=True))
            verdict.control = control
            idle = [part for part in pair.slices if not part.bias and not charges[part] > CONTROL]
            verdict.idle = None
            if not control > least:
                verdict.idle = (
                    f"scaling its left side alone by {FACTORS[0]:g} changes the outputs by only {control:.1e}"
                )
            elif idle:
                verdict.idle = f"{idle[0]} changes the outputs by only {charges[idle[0]]:.1e}"

    def _charges(self, parts: Sequence[ParameterSlice]) -> dict[ParameterSlice, float]:
        """How much every slice matters: Σ |w ∂L/∂w| for a random L of the outputs, which are of order 1 in it.

        Of slices that show nothing so, what scaling them changes.
        """
        names = sorted({part.name for part in parts})
        moving = [self._parameters[name] for name in names]
        flags = [p.requires_grad for p in moving]
        gradients: Sequence[Tensor | None] = [None] * len(names)
        try:
            for parameter in moving:
                parameter.requires_grad_(True)
            with torch.enable_grad():
                gradients = torch.autograd.grad(self._loss(self._run()), moving, allow_unused=True)
        except RuntimeError:  # no gradient to be had: then all of them are scaled, to see
            pass
        finally:
            for parameter, flag in zip(moving, flags, strict=True):
                parameter.requires_grad_(flag)
        charges = dict.fromkeys(parts, 0.0)
        measured: dict[tuple[object, ...], float] = {}  # a matrix whole, as several pairs may hold it: once
        with torch.no_grad():
            moved = {n: g if g is None else g.mul_(p) for n, g, p in zip(names, gradients, moving, strict=True)}
            for part in charges:
                if (product := moved[part.name]) is not None:
                    where = part.name, part.ranges
                    if where not in measured:
                        measured[where] = float(torch.linalg.vector_norm(part.view(product), 1))
                    charges[part] = measured[where]
        idle = [part for part, charge in charges.items() if not charge > CONTROL]
        charges.update(zip(idle, self._moved_by(idle), strict=True))
        return charges

    def _loss(self, outputs: Sequence[Tensor]) -> Tensor:
        """A random linear functional of the outputs, in units of their largest entries."""
        loss = torch.zeros((), dtype=torch.float64, device=outputs[0].device)
        for now, before in zip(outputs, self._reference, strict=True):
            weights = torch.randn(now.shape, generator=self._generator, dtype=torch.float64).to(now.device)
            loss = loss + (weights * now).sum() / before.abs().max().clamp_min(1e-300)
        return loss

    def _moved_by(self, parts: Sequence[ParameterSlice]) -> list[float]:
        """What scaling each slice changes: all at once, and by halves where that changes anything."""
        if not parts:
            return []
        scalings = [((part,), FACTORS[(i % 2) * 2]) for i, part in enumerate(parts)]
        change = self._change(partial(self._scale, scalings))
        if not change > CONTROL:
            change = self._change(partial(self._scale, scalings, every_other=True))
        if len(parts) == 1 or not change > CONTROL:
            return [change] * len(parts)
        middle = len(parts) // 2
        return [*self._moved_by(parts[:middle]), *self._moved_by(parts[middle:])]

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
        with torch.no_grad():
            self._reference = self._run()
        return bool(self._reference) and all(bool(torch.isfinite(r).all()) for r in self._reference)

    def _run(self) -> list[Tensor]:
        results: list[Tensor] = []
        with float64_everywhere():
            for args, kwargs in self._calls:
                args, kwargs = copy.deepcopy((args, kwargs))  # a module may write into what it is given
                result = self._module(*args, **kwargs)
                results += [self._output(result)] if self._output is not None else floating_tensors(result)
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

    def examine(self, pairs: Sequence[ScalePair], *, everywhere: bool = False) -> list[ScalePair | CertificationError]:
        """Every pair with its certificate, or the error that says why it has none. At the own weights, whatever."""
        tolerances = [self._tolerance(pair) for pair in pairs]
        found: list[ScalePair | CertificationError] = list(pairs)
        for tolerance in sorted(set(tolerances)):
            asked = [i for i, t in enumerate(tolerances) if t == tolerance]
            verdicts = self._at_own_weights([pairs[i] for i in asked], tolerance, _powers_of_two)
            for i, verdict in zip(asked, verdicts, strict=True):
                found[i] = verdict.on(pairs[i], tolerance, _powers_of_two(pairs[i]))
        return found

    def _tolerance(self, pair: ScalePair) -> float:
        """Powers of two change no bit, but for gains used as 1 + w, which round."""
        eps = max(torch.finfo(self._parameters[part.name].dtype).eps for part in pair.slices)
        return 64 * eps if any(part.offset for part in pair.slices) else 1e-6

    def _run(self) -> list[Tensor]:
        training = {module: module.training for module in self._module.modules()}
        self._module.eval()
        try:
            return [self._read(self._module(*args, **kwargs)).double() for args, kwargs in self._calls]
        finally:
            for module, mode in training.items():
                module.training = mode


def _powers_of_two(pair: ScalePair) -> tuple[float, ...]:
    return (64.0, 1 / 64) + ((-2.0,) if pair.signs == "any" else ())


def _factors(pair: ScalePair) -> tuple[float, ...]:
    return FACTORS + ((NEGATIVE,) if pair.signs == "any" else ())


__all__ = [
    "CONTROL",
    "FACTORS",
    "SPREADS",
    "TOLERANCE",
    "Call",
    "CertificationError",
    "InPlaceTrial",
    "Trial",
]
