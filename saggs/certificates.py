"""Numerical proof that a pair is exact on this very model, with a control that must fail.

The model is cloned in float64, its biases and gains are drawn at random (a fresh model has zero biases and unit gains,
and would not notice a forgotten bias), and run under the all-float64 mode. A pair is exact where rescaling by 2^6,
2^-6, an odd factor, and a negative one if it claims any sign, changes the outputs by less than 1e-10 relative to
their largest entry. That is asked at the model's own weights and again at matrices of standard deviation 0.4 and 2,
since a clamp looks linear until something reaches it. Scaling the left side alone has to change the outputs: a check
that cannot fail proves nothing.

It is a proof at three points, on random inputs, not for all of them: what no input and no draw reaches (a clamp beyond
a thousand times the activations, an expert that no token is routed to) it cannot see.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from saggs.inputs import Inputs, Output, default_inputs, default_output
from saggs.pairs import Certificate, ParameterSlice, ScalePair, named_parameters, parameter_of, unwrap
from saggs.precision import float64_everywhere

TOLERANCE = 1e-10
CONTROL = 1e-6
FACTORS = (64.0, 1 / 64, 3.7)
# Wide draws condition the network worse, so that rounding shows more; a clamp or a wrong slice shows as 1e-3 and above.
SPREADS = (0.4, 2.0)
SPREAD_TOLERANCE = 1e-7
_SAMPLES = 2


class CertificationError(ValueError):
    """A pair changes the model's outputs, or its control does not."""


def certify(
    model: nn.Module,
    pairs: Sequence[ScalePair],
    inputs: Inputs | None = None,
    output: Output | None = None,
) -> list[ScalePair]:
    """Prove every pair on a float64 clone of the model; returns the pairs with their certificates.

    Args:
        model: the model; it is not changed. Its clone takes twice the memory of a float32 model.
        pairs: what to prove.
        inputs: callable (generator, count) -> keyword arguments; random tokens for a causal language model.
        output: callable (result) -> tensor; the logits by default.

    Raises:
        CertificationError: naming the pair, the factor and the change of the outputs.
        ValueError: the model cannot be run (meta tensors, no `inputs` for a plain module, non-finite outputs).
    """
    if not pairs:
        return []
    certified = []
    for found in Certifier(model, inputs, output).examine(pairs):
        if isinstance(found, CertificationError):
            raise found
        certified.append(found)
    return certified


class Certifier:
    """A float64 clone of one model, to be used once: `examine` leaves other weights in it."""

    def __init__(self, model: nn.Module, inputs: Inputs | None, output: Output | None) -> None:
        source = unwrap(model)
        _require_real(source)
        self._output = output or default_output
        self._model = copy.deepcopy(source).double().eval().requires_grad_(False).cpu()
        self._parameters = named_parameters(self._model)
        self._generator = torch.Generator().manual_seed(0)
        _randomise_degenerate(self._parameters, self._generator)
        self._arguments = dict((inputs or default_inputs(source))(self._generator, _SAMPLES))
        if not self._take_reference():
            raise ValueError(f"{type(source).__name__}'s outputs are not finite; nothing can be certified on it")

    def examine(self, pairs: Sequence[ScalePair]) -> list[ScalePair | CertificationError]:
        """Every pair with its certificate, or the error that says why it has none."""
        found: list[ScalePair | CertificationError] = [self._at_own_weights(pair) for pair in pairs]
        for spread in SPREADS:
            _redraw(self._parameters, spread, self._generator)
            if not self._take_reference():  # overflow: this model cannot be run so wide, and wider still is no use
                break
            found = [self._at_spread(f, spread) if isinstance(f, ScalePair) else f for f in found]
        return found

    def _at_own_weights(self, pair: ScalePair) -> ScalePair | CertificationError:
        try:
            residual = self._residual(pair, TOLERANCE, "at its own weights")
        except CertificationError as error:
            return error
        control = self._change(pair.left, FACTORS[0])
        if not control > CONTROL:
            return CertificationError(
                f"{pair} proves nothing: scaling its left side alone by {FACTORS[0]:g} changes the outputs by only "
                f"{control:.1e}. The inputs do not exercise it; pass other inputs="
            )
        return dataclasses.replace(pair, certificate=Certificate(residual, control, TOLERANCE, _factors(pair)))

    def _at_spread(self, pair: ScalePair, spread: float) -> ScalePair | CertificationError:
        try:
            self._residual(pair, SPREAD_TOLERANCE, f"at weights of standard deviation {spread:g}")
        except CertificationError as error:
            return error
        assert pair.certificate is not None
        spreads = (*pair.certificate.spreads, spread)
        return dataclasses.replace(pair, certificate=dataclasses.replace(pair.certificate, spreads=spreads))

    def _residual(self, pair: ScalePair, tolerance: float, where: str) -> float:
        """Largest change of the outputs over the factors; a CertificationError above the tolerance."""
        residual = 0.0
        for factor in _factors(pair):
            change = self._change(pair.slices, factor)
            if not change <= tolerance:
                raise CertificationError(
                    f"{pair} is not exact: factor {factor:g} changes the outputs by {change:.1e} {where} (relative; "
                    f"{tolerance:g} allowed). Leave it out, or list all its consumers"
                )
            residual = max(residual, change)
        return residual

    def _change(self, slices: Sequence[ParameterSlice], factor: float) -> float:
        """Relative change of the outputs when the slices are scaled; the clone is restored bit for bit."""
        views = [part.view(parameter_of(self._parameters, part).detach()) for part in slices]
        kept = [view.clone() for view in views]
        try:
            for part, view in zip(slices, views, strict=True):
                multiplier = factor**part.exponent
                view.mul_(multiplier).add_((multiplier - 1) * part.offset)
            change = (self._run() - self._reference).abs().max() / self._scale
        finally:
            for view, before in zip(views, kept, strict=True):
                view.copy_(before)
        return float(change)

    def _take_reference(self) -> bool:
        """Run the clone as it is; whether its outputs are finite."""
        self._reference = self._run()
        self._scale = float(self._reference.abs().max())
        return bool(torch.isfinite(self._reference).all())

    def _run(self) -> Tensor:
        with torch.no_grad(), float64_everywhere():
            return self._output(self._model(**self._arguments)).double()


def _factors(pair: ScalePair) -> tuple[float, ...]:
    return FACTORS + ((-1.5,) if pair.signs == "any" else ())


def _redraw(parameters: Mapping[str, nn.Parameter], spread: float, generator: torch.Generator) -> None:
    """Matrices from a normal law of this standard deviation; biases and gains are random already and stay."""
    with torch.no_grad():
        for parameter in parameters.values():
            if parameter.dim() >= 2:
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def _require_real(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device; load real weights before certifying")
        if not parameter.is_floating_point() and not parameter.is_complex():
            raise ValueError(f"parameter {name!r} is {parameter.dtype}: quantised weights cannot be certified")


def _randomise_degenerate(parameters: Mapping[str, nn.Parameter], generator: torch.Generator) -> None:
    """Draw biases and gains (1-D), and constant tensors of any shape, from a normal law: zeros and ones hide faults."""
    with torch.no_grad():
        for parameter in parameters.values():
            constant = parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all())
            if parameter.dim() <= 1 or constant:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.copy_(parameter + 0.4 * noise)


__all__ = ["CONTROL", "FACTORS", "TOLERANCE", "CertificationError", "Certifier", "certify"]
