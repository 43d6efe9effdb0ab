"""How an optimizer answers a reparameterisation of its weights: three families, each with its own verdict.

    print(saggs.probe(lambda p: torch.optim.AdamW(p, lr=1e-3), name="AdamW"))

* *Rescaling*, (W, G) -> (c W, G / c). The update is c^e times itself; e is the rule's degree. With e = 1 an update
  follows its weight (equivariant). e = -1 for gradient descent, 0 for Adam, Lion, Muon, +1 for LARS.
* *Rotation*, (W, G) -> (W Q, G Q), from the right, from the left, and of a pair (U Q, V Q) in one optimizer.
* *Signed permutation* of rows and columns.

A rule may follow one family and break another (gradient descent follows rotations and not rescalings, LAMB the other
way round), so nothing here is a sum over families. Each verdict stands beside the residual it was made from.

Source: the SAGGS paper (Kim, 2026) for rescaling, Singh (2026) for rotations, arXiv 2606.31963 for signed permutations;
the measurements are ours (`saggs.responses`, `saggs.state_rules`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from saggs.rehearsal import Build, RehearsalError
from saggs.responses import SHAPES, Responses, periods, steps_for
from saggs.state_rules import StateRules, measure

COARSE = 5e-2
"""A rule whose own rounding moves its updates by more than this cannot be told equivariant from not."""
_ROUNDINGS, _OPEN = 4.0, 1e-5


@dataclass(frozen=True)
class Scaling:
    """The rescaling family, (W, G) -> (c W, G / c) at c = 2^6 and 2^-6.

    Attributes:
        degree: e of the last update at one learning rate; None where an update vanishes.
        residual: the largest |update' - c^e update| / |c^e update| over all steps; infinite where there is no degree.
        rows: degrees of the rescaled rows and of the rest where only a third of the rows is rescaled.
        coupling: the largest relative change of another weight's update.
        rounding: the residual at c = 3, where the rule's own rounding shows.
    """

    degree: float | None
    residual: float
    rows: tuple[float | None, float | None]
    coupling: float
    rounding: float


@dataclass(frozen=True)
class Rotation:
    """The rotation family: the largest |update' - (update) Q| / |update| over all steps, for three ways to act."""

    right: float
    left: float
    pair: float

    @property
    def largest(self) -> float:
        """Of the weight alone and of the pair, from the right: the symmetry of a product U V^T."""
        return max(self.right, self.pair)


@dataclass(frozen=True)
class Settings:
    """What settings do to the rescaling degree: its residual with each of them on, the others off.

    Attributes:
        eps: as it is set; None where there is none, or the rule cannot do without.
        clipping: gradients clipped to a norm of 1 beforehand.
        decay: its own weight decay at 0.1, learning rate times decay kept; zero for a decoupled one. None where there
            is none.
        coupled_decay: a decay of 0.1 in the gradient, as a penalty on the loss puts it there.
    """

    eps: float | None
    clipping: float
    decay: float | None
    coupled_decay: float


@dataclass(frozen=True)
class OptimizerProbe:
    """What was measured of one optimizer with one set of settings.

    Attributes:
        name: of the optimizer.
        steps: of every run.
        dtype: "float64"; "float32" for a rule that knows nothing else.
        exact: what counts as zero in that format.
        scaling, rotation, signed_permutation, settings: one family each; the numbers are residuals.
        eps_removed: eps was 0 in the three families; otherwise the rule needs it.
        random: the rule draws random numbers; both runs of a comparison had the same draws.
        beyond: refresh periods longer than the runs: what they do was not seen.
        states: the transport rules; None where they could not be measured, with the reason in `states_error`.
    """

    name: str
    steps: int
    dtype: str
    exact: float
    scaling: Scaling
    rotation: Rotation
    signed_permutation: float
    settings: Settings
    eps_removed: bool
    random: bool
    beyond: dict[str, int]
    states: StateRules | None
    states_error: str

    @property
    def homogeneous(self) -> bool:
        """Whether the update has a degree: exactly c^e times itself at every step."""
        return self.scaling.degree is not None and self.scaling.residual <= self.exact

    @property
    def scale_equivariant(self) -> bool:
        """Degree +1, exactly."""
        return self.homogeneous and self.scaling.degree == 1

    @property
    def rounding(self) -> float:
        """How far the rule's own rounding moves its updates; 0 where only an exact degree could tell."""
        return self.scaling.rounding if self.homogeneous and self.scaling.rounding > self.exact else 0.0

    @property
    def couples(self) -> bool:
        """Whether another weight's update changes, by more than what single precision leaves open inside a rule."""
        return self.scaling.coupling > max(self.exact, _OPEN)

    def follows(self, residual: float) -> bool | None:
        """Whether a residual of rotations or permutations is zero; None where rounding alone is as large."""
        if residual <= self.exact:
            return True
        if residual > _ROUNDINGS * self.rounding:
            return False
        return True if self.rounding <= COARSE else None

    def to_json(self) -> dict[str, Any]:
        """Plain values; infinite residuals are null."""
        scaling, settings = self.scaling, self.settings
        return {
            "name": self.name,
            "steps": self.steps,
            "dtype": self.dtype,
            "exact": self.exact,
            "rounding": _plain(self.rounding),
            "scaling": {
                "degree": scaling.degree,
                "residual": _plain(scaling.residual),
                "equivariant": self.scale_equivariant,
                "rows": list(scaling.rows),
                "coupling": _plain(scaling.coupling),
                "rounding": _plain(scaling.rounding),
            },
            "rotation": {
                "right": _plain(self.rotation.right),
                "left": _plain(self.rotation.left),
                "pair": _plain(self.rotation.pair),
                "equivariant": self.follows(self.rotation.largest),
            },
            "signed_permutation": {
                "residual": _plain(self.signed_permutation),
                "equivariant": self.follows(self.signed_permutation),
            },
            "settings": {
                "eps": _plain(settings.eps),
                "clipping": _plain(settings.clipping),
                "decay": _plain(settings.decay),
                "coupled_decay": _plain(settings.coupled_decay),
            },
            "eps_removed": self.eps_removed,
            "random": self.random,
            "beyond": self.beyond,
            "states": _states_json(self.states),
            "states_error": self.states_error,
        }

    def __str__(self) -> str:
        return "\n".join([*self._families(), "", *self._settings(), "", *self._transport(), *self._remarks()])

    def _families(self) -> list[str]:
        scaling, rotation = self.scaling, self.rotation
        inside, rest = (degree_text(d) for d in scaling.rows)
        what = "degree +1" if self.scale_equivariant else f"degree {degree_text(scaling.degree)}"
        rows = [
            (f"{self.name}, {self.steps} steps in {self.dtype}", "residual", "verdict"),
            ("rescaling (c W, G / c)", _number(scaling.residual), f"{self._scale_verdict()}; {what}"),
            ("  a third of the rows", "", f"degree {inside} of these, {rest} of the rest; wanted +1, +0"),
            ("  another weight", _number(scaling.coupling), self._coupling_verdict()),
            ("rotation (W Q, G Q)", _number(rotation.right), self._verdict(rotation.right)),
            ("  from the left", _number(rotation.left), self._verdict(rotation.left)),
            ("  of a pair (U Q, V Q)", _number(rotation.pair), self._verdict(rotation.pair)),
            ("signed permutation", _number(self.signed_permutation), self._verdict(self.signed_permutation)),
        ]
        return _aligned(rows)

    def _scale_verdict(self) -> str:
        if self.scale_equivariant:
            return "equivariant"
        return "not equivariant" if self.scaling.residual <= COARSE else "not equivariant, no one degree"

    def _coupling_verdict(self) -> str:
        return "coupled: its update changes" if self.couples else "keeps its update"

    def _verdict(self, residual: float) -> str:
        found = self.follows(residual)
        if found is None:
            return f"not told apart from its rounding, {self.rounding:.0e}"
        if found and residual > self.exact:
            return f"equivariant to its rounding, {self.rounding:.0e}"
        return "equivariant" if found else "not equivariant"

    def _settings(self) -> list[str]:
        settings = self.settings
        decay = "exact with lr · decay kept" if (settings.decay or 0.0) <= self.exact else "mixed into the gradient"
        rows = [("what settings do to the degree", "residual", "")]
        if not self.eps_removed:
            rows.append(("eps", "", "cannot be 0 here; it is in every number above"))
        elif settings.eps is None:
            rows.append(("eps", "", "none"))
        else:
            rows.append(("eps as it is set", _number(settings.eps), "0 in the numbers above"))
        rows.append(("gradients clipped to norm 1", _number(settings.clipping), ""))
        rows.append(("its own weight decay 0.1", _number(settings.decay), "none" if settings.decay is None else decay))
        rows.append(("a decay of 0.1 in the gradient", _number(settings.coupled_decay), ""))
        return _aligned(rows)

    def _transport(self) -> list[str]:
        if self.states is None:
            return [f"transport: not measured ({self.states_error})"]
        rows = [("when W becomes c W, its state", "becomes", "slices", "c < 0")]
        for name, rule in self.states.entries.items():
            if rule.moves and not rule.empty:
                power = "? " if rule.degree is None else power_text(rule.degree)
                rows.append((f"  {name}", power, "yes" if rule.sliced else "no", "yes" if rule.signed == "c" else "no"))
        lines = _aligned(rows) if len(rows) > 1 else ["no state to carry"]
        if reason := self.states.refusal():
            lines.append(f"cannot be carried: {reason}")
        return lines

    def _remarks(self) -> list[str]:
        remarks = []
        if self.random:
            remarks.append("draws random numbers; the runs compared had the same draws")
        for name, period in self.beyond.items():
            remarks.append(f"{name} = {period} is longer than the runs; what it does was not seen")
        return [""] * bool(remarks) + remarks


def probe(build: Build, *, name: str, steps: int | None = None, seed: int = 0) -> OptimizerProbe:
    """Measure how an optimizer answers rescaling, rotation and signed permutation, and what its settings do to it.

    Args:
        build: makes a fresh optimizer from its parameters: `lambda p: cls(p, lr=…)`.
        name: what to call it.
        steps: of every run; by default more than any refresh period that its param group names, up to 260.
        seed: of the weights and gradients.

    Raises:
        RehearsalError: the optimizer cannot be built or run, or does not move a weight; the message says why.
        ValueError: steps below 2.
    """
    if steps is not None and steps < 2:
        raise ValueError(f"steps={steps}: at least 2, for a state to have an effect")
    kept = random.getstate()
    try:
        return _probe(_seeded(build), name, steps, seed)
    finally:
        random.setstate(kept)


def _seeded(build: Build) -> Build:
    """With Python's own random numbers the same in every run, as a rehearsal has PyTorch's."""

    def seeded(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        random.seed(0)
        return build(parameters)

    return seeded


def _probe(build: Build, name: str, steps: int | None, seed: int) -> OptimizerProbe:
    found = periods(build)
    chosen = steps_for(found) if steps is None else steps
    try:
        responses = Responses(build, chosen, seed, torch.float64)
    except RehearsalError as first:
        try:  # some classes know float32 only
            responses = Responses(build, chosen, seed, torch.float32)
        except RehearsalError:
            raise first from None
    states, error = _states(build, chosen)
    return OptimizerProbe(
        name=name,
        steps=chosen,
        dtype=str(responses.base.weights[0].dtype).removeprefix("torch."),
        exact=responses.exact,
        scaling=Scaling(
            responses.degree, responses.scaling(), responses.rows(), responses.coupling(), responses.rounding()
        ),
        rotation=Rotation(responses.rotation(False), responses.rotation(True), responses.rotation_of_pair()),
        signed_permutation=responses.signed_permutation(),
        settings=Settings(responses.eps(), responses.clipping(), responses.decay(), responses.coupled_decay()),
        eps_removed=responses.eps_removed,
        random=responses.random(),
        beyond={n: period for n, period in found.items() if period >= chosen},
        states=states,
        states_error=error,
    )


def _states(build: Build, steps: int) -> tuple[StateRules | None, str]:
    try:
        return measure(build, SHAPES[0], steps), ""
    except RehearsalError as error:
        return None, str(error)


def _states_json(states: StateRules | None) -> dict[str, Any] | None:
    if states is None:
        return None
    return {
        "entries": {
            name: {"degree": r.degree, "residual": _plain(r.residual), "slices": r.sliced, "signed": r.signed}
            for name, r in states.entries.items()
            if r.moves and not r.empty
        },
        "coupled": states.coupled,
        "decay_mixes": states.decay_mixes,
        "refusal": states.refusal(),
        "refusal_of_slices": states.refusal(sliced=True),
    }


def degree_text(degree: float | None) -> str:
    """ "+1", "-0.5", "+0.93"; "?" where there is none."""
    if degree is None:
        return "?"
    text = f"{degree:+.2f}".rstrip("0").rstrip(".")
    return "+0" if text in ("-0", "+0") else text


def power_text(degree: int) -> str:
    """ "c^-1", or "the same"."""
    return f"c^{degree:+d}" if degree else "the same"


def _plain(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.1e}" if math.isfinite(value) else "none"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["   ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


__all__ = ["COARSE", "OptimizerProbe", "Rotation", "Scaling", "Settings", "probe"]
