"""Numerical proof that a pair is exact on this very model, with a control that must fail.

The model is cloned in float64, its biases and gains are drawn at random (a fresh model has zero biases and unit gains,
and would not notice a forgotten bias), and run under the all-float64 mode. A pair is exact where rescaling by 2^6,
2^-6, an odd factor, and a negative one if it claims any sign, changes the outputs by less than 1e-10 relative to
their largest entry. Scaling the left side alone has to change them: a check that cannot fail proves nothing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from saggs.inputs import Inputs, Output, default_inputs, default_output
from saggs.pairs import Certificate, ParameterSlice, ScalePair, named_parameters, parameter_of, unwrap
from saggs.precision import float64_everywhere

TOLERANCE = 1e-10
CONTROL = 1e-6
FACTORS = (64.0, 1 / 64, 3.7)
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
    certifier = Certifier(model, inputs, output)
    return [certifier.certify(pair) for pair in pairs]


class Certifier:
    """A float64 clone of one model with its reference output: certifies any number of pairs of that model."""

    def __init__(self, model: nn.Module, inputs: Inputs | None, output: Output | None) -> None:
        source = unwrap(model)
        _require_real(source)
        self._output = output or default_output
        self._model = copy.deepcopy(source).double().eval().requires_grad_(False).cpu()
        self._parameters = named_parameters(self._model)
        generator = torch.Generator().manual_seed(0)
        _randomise_degenerate(self._parameters, generator)
        self._arguments = dict((inputs or default_inputs(source))(generator, _SAMPLES))
        self._reference = self._run()
        if not bool(torch.isfinite(self._reference).all()):
            raise ValueError(f"{type(source).__name__}'s outputs are not finite; nothing can be certified on it")
        self._scale = float(self._reference.abs().max())

    def certify(self, pair: ScalePair) -> ScalePair:
        """The pair with its certificate; raises CertificationError where it is not exact on this model."""
        factors = FACTORS + ((-1.5,) if pair.signs == "any" else ())
        residual = 0.0
        for factor in factors:
            change = self._change(pair.slices, pair, factor)
            if not change <= TOLERANCE:
                raise CertificationError(
                    f"{pair} is not exact: factor {factor:g} changes the outputs by {change:.1e} (relative; "
                    f"{TOLERANCE:g} allowed). Leave it out, or list all its consumers"
                )
            residual = max(residual, change)
        control = self._change(pair.left, pair, FACTORS[0])
        if not control > CONTROL:
            raise CertificationError(
                f"{pair} proves nothing: scaling its left side alone by {FACTORS[0]:g} changes the outputs by only "
                f"{control:.1e}. The inputs do not exercise it; pass other inputs="
            )
        return dataclasses.replace(pair, certificate=Certificate(residual, control, TOLERANCE, factors))

    def _change(self, slices: Iterable[ParameterSlice], pair: ScalePair, factor: float) -> float:
        """Relative change of the outputs when `slices` of the pair are scaled; the clone is restored bit for bit."""
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

    def _run(self) -> Tensor:
        with torch.no_grad(), float64_everywhere():
            return self._output(self._model(**self._arguments)).double()


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
