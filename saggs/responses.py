"""What an optimizer's updates do when the function stays and its weights are written differently: the runs behind
`saggs.probes`.

Three groups act on a weight W with its gradient G, and never mix here, for a rule may follow one and break another:

    rescaling            (W, G) -> (c W, G / c)         the update should become c times itself (degree +1)
    rotation             (W, G) -> (W Q, G Q)           Q orthogonal: the update should become (update) Q
    signed permutation   (W, G) -> (P W R, P G R)       P, R permutations with signs

Every run is a rehearsal (`saggs.rehearsal`): fixed gradients, a fresh optimizer, all its steps. So states that a rule
carries arise in both runs by themselves, which is what carrying them by the measured rules comes to.

Source: degrees as in the SAGGS paper (Kim, 2026), rotations as in Singh (2026), signed permutations as in
arXiv 2606.31963; the measurements are ours.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from saggs.rehearsal import Build, Rehearsal, RehearsalError, draw, entries, rehearse
from saggs.state_rules import DECAY, EPS, EXACT, FACTORS, STEPS

SHAPES = ((12, 10), (9, 10))
"""Of the weight, and of a second one that shares its last dimension, as a pair of factors does."""
SINGLE = 1e-4
"""What counts as exact for a rule that runs in float32 only."""
MOST_STEPS = 260
DECAY_VALUE, CLIP_NORM = 0.1, 1.0
_PERIOD = re.compile(r".*(freq|interval|period|gap|every|compute_steps|preconditioning_step|update_steps)")

Action = Callable[[Tensor], Tensor]
Settings = Mapping[re.Pattern[str], float]


def periods(build: Build) -> dict[str, int]:
    """Whole numbers in an optimizer's param groups, and of its own, whose names say how often it refreshes something.

    Raises:
        RehearsalError: the optimizer cannot be built.
    """
    weight = nn.Parameter(draw(SHAPES[:1], 1)[0][0])
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = build([weight])
    except Exception as error:  # whatever a class may raise; it is named
        raise RehearsalError(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}") from error
    return {
        name: int(value)
        for holder in (vars(optimizer), *optimizer.param_groups)
        for name, value in holder.items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 1 and _PERIOD.match(name)
    }


def steps_for(found: Mapping[str, int], least: int = STEPS) -> int:
    """More steps than any period, as far as `MOST_STEPS` allows: what a period does shows only after it."""
    return max(least, min(MOST_STEPS, 2 * max(found.values(), default=0) + 4))


class Responses:
    """The runs of one optimizer, and how they compare."""

    def __init__(self, build: Build, steps: int, seed: int, dtype: torch.dtype) -> None:
        self._build, self._seed, self._dtype = build, seed, dtype
        self.exact = EXACT if dtype == torch.float64 else SINGLE
        self._weights, self._gradients = draw(SHAPES, steps, dtype, seed)
        self._generator = torch.Generator().manual_seed(seed + 1)
        self._quiet: Settings = {DECAY: 0.0}
        self._plain: Settings = {DECAY: 0.0, EPS: 0.0}
        self.eps_removed = True
        self.base = self._run()
        if not (self.base.finite and _moved(self.base)):  # 0 / 0, or 0 for ever: then with eps as it is
            self._plain, self.eps_removed = self._quiet, False
            self.base = self._run()
        if not self.base.finite or not _moved(self.base):
            what = "no step moved the weight" if self.base.finite else "its weights or states are not finite"
            raise RehearsalError(f"{what} in {steps} steps")
        self.degree, self.spread = self._degrees([self._run(c) for c in FACTORS], self.base)

    # --- rescaling -----------------------------------------------------------------------------------------------

    def scaling(self) -> float:
        """How far the updates of the rescaled runs are from c^e times those of the first, over all steps.

        Both at the same learning rate and at lr c^(1 - e), where W' = c W at every step; the better one counts, since
        a rule whose updates depend on its weights has a degree only where the weights stay in step.
        """
        if self.degree is None:
            return math.inf
        fixed = max(self._distance(self._run(c), c**self.degree) for c in FACTORS)
        return min(fixed, max(self._matched(c, self._plain) for c in FACTORS))

    def rounding(self) -> float:
        """The same at c = 3, which no binary format multiplies by exactly: how coarsely the rule itself computes."""
        return min(self._matched(3.0, self._plain), math.inf if self.degree is None else self._fixed_at_three())

    def rows(self) -> tuple[float | None, float | None]:
        """Degrees of the last update where only the first third of the rows is rescaled: of these, and of the rest."""
        count = SHAPES[0][0] // 3
        inside = (torch.arange(SHAPES[0][0]) < count).unsqueeze(1)
        one = torch.ones((), dtype=self._dtype)
        runs = [self._run(torch.where(inside, c * one, one)) for c in FACTORS]
        parts = (slice(0, count), slice(count, None))
        return self._degrees(runs, self.base, parts[0])[0], self._degrees(runs, self.base, parts[1])[0]

    def coupling(self) -> float:
        """By how much the updates of a second weight change where only the first one is rescaled."""
        both = self._pair(lambda w: w)
        scaled = [self._scaled_first(c) for c in FACTORS]
        return max(_largest([(u[1], b[1]) for u, b in zip(run.updates, both.updates, strict=True)]) for run in scaled)

    # --- rotation and signed permutation -------------------------------------------------------------------------

    def rotation(self, left: bool) -> float:
        """|update' - (update) Q| / |update|, the largest over all steps; Q from the left where asked."""
        matrix = self._orthogonal(SHAPES[0][0 if left else 1])
        return self._moved_by((lambda w: matrix @ w) if left else (lambda w: w @ matrix))

    def rotation_of_pair(self) -> float:
        """The same for (U, V) -> (U Q, V Q), both in one optimizer: the symmetry of a product U V^T."""
        matrix = self._orthogonal(SHAPES[0][1])
        first, second = self._pair(lambda w: w), self._pair(lambda w: w @ matrix)
        return _largest(
            [
                (torch.cat(b), torch.cat([u @ matrix for u in a]))
                for a, b in zip(first.updates, second.updates, strict=True)
            ]
        )

    def signed_permutation(self) -> float:
        """The same for rows and columns permuted and given signs."""
        rows, columns = (self._signed(size) for size in SHAPES[0])
        return self._moved_by(lambda w: rows[1] * columns[1].T * w[rows[0]][:, columns[0]])

    # --- settings ------------------------------------------------------------------------------------------------

    def eps(self) -> float | None:
        """The residual of the degree with eps as it is; None where there is none, or it cannot be set to 0."""
        if not self.eps_removed or not self._has(EPS):
            return None
        return max(self._matched(c, self._quiet) for c in FACTORS)

    def clipping(self) -> float:
        """The residual of the degree where gradients are clipped to a norm of 1, as they come, in both runs."""
        return self._with_gradients(clip=True)

    def coupled_decay(self) -> float:
        """The same where decay times the first weight is added to every gradient, as a penalty on the loss does."""
        return self._with_gradients(decay=DECAY_VALUE)

    def _with_gradients(self, clip: bool = False, decay: float = 0.0) -> float:
        if self.degree is None:
            return math.inf
        base, distances = self._run(clip=clip, decay=decay), []
        for c in FACTORS:
            run = self._run(c, c ** (1 - self.degree), clip=clip, decay=decay)
            distances.append(_compared(run, base, partial(torch.mul, c)))
        return max(distances)

    def decay(self) -> float | None:
        """The residual of the degree with weight decay, lr times decay kept; None where there is no such setting.

        Zero for a decay that is decoupled from the gradient: then it shrinks c W as it shrinks W.
        """
        if self.degree is None:
            return math.inf if self._has(DECAY) else None
        found = self._run(settings={**self._plain, DECAY: DECAY_VALUE})
        if _compared(found, self.base, lambda u: u) == 0:
            return None
        distances = []
        for c in FACTORS:
            rate = c ** (1 - self.degree)
            settings = {**self._plain, DECAY: DECAY_VALUE / rate}
            distances.append(_compared(self._run(c, rate, settings), found, partial(torch.mul, c)))
        return max(distances)

    def random(self) -> bool:
        """Whether the updates depend on a seed: everything else here is measured with the same draws in both runs."""

        def reseeded(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            torch.manual_seed(12345)
            optimizer = self._build(parameters)
            random.seed(12345)  # after it, since it seeds Python's numbers itself
            return optimizer

        other = rehearse(reseeded, self._weights[:1], [g[:1] for g in self._gradients], settings=self._plain)
        return _compared(other, self.base, lambda u: u) > self.exact

    # --- runs ----------------------------------------------------------------------------------------------------

    def _run(
        self,
        factor: float | Tensor = 1.0,
        rate: float = 1.0,
        settings: Settings | None = None,
        clip: bool = False,
        decay: float = 0.0,
    ) -> Rehearsal:
        weight = self._weights[0] * factor
        gradients = [[g[0] / factor + decay * weight] for g in self._gradients]
        if clip:
            gradients = [[g * min(1.0, CLIP_NORM / float(g.norm()))] for [g] in gradients]
        chosen = self._plain if settings is None else settings
        return rehearse(self._build, [weight], gradients, rate=rate, settings=chosen)

    def _pair(self, action: Action) -> Rehearsal:
        gradients = [[action(g) for g in each] for each in self._gradients]
        return rehearse(self._build, [action(w) for w in self._weights], gradients, settings=self._plain)

    def _scaled_first(self, factor: float) -> Rehearsal:
        weights = [self._weights[0] * factor, self._weights[1]]
        gradients = [[g[0] / factor, g[1]] for g in self._gradients]
        return rehearse(self._build, weights, gradients, settings=self._plain)

    def _moved_by(self, action: Action) -> float:
        gradients = [[action(g[0])] for g in self._gradients]
        moved = rehearse(self._build, [action(self._weights[0])], gradients, settings=self._plain)
        return _compared(moved, self.base, action)

    def _matched(self, factor: float, settings: Settings) -> float:
        if self.degree is None:
            return math.inf
        base = self.base if settings is self._plain else self._run(settings=settings)
        return _compared(self._run(factor, factor ** (1 - self.degree), settings), base, lambda u: factor * u)

    def _fixed_at_three(self) -> float:
        assert self.degree is not None
        return self._distance(self._run(3.0), 3.0**self.degree)

    def _distance(self, run: Rehearsal, factor: float) -> float:
        return _compared(run, self.base, lambda u: factor * u)

    def _degrees(
        self, runs: Sequence[Rehearsal], base: Rehearsal, rows: slice = slice(None)
    ) -> tuple[float | None, float]:
        """The degree of the last update that moved, and how far its values at the two factors are apart."""
        last = max(t for t, (u,) in enumerate(base.updates) if u.norm() > 0)
        size = float(base.updates[last][0][rows].norm())
        found = [float(run.updates[last][0][rows].norm()) for run in runs]
        if not all(0 < s < math.inf for s in (size, *found)):
            return None, math.inf
        degrees = [math.log(s / size) / math.log(c) for s, c in zip(found, FACTORS, strict=True)]
        spread, mean = abs(degrees[0] - degrees[1]), sum(degrees) / 2
        # Halves, thirds and the like are meant where a value is as near to one as rounding lets it be.
        near = 1e-6 if self._dtype == torch.float64 else 1e-2
        twelfth = round(mean * 12) / 12
        return (twelfth if max(abs(mean - twelfth), spread) < near else mean), spread

    def _has(self, pattern: re.Pattern[str]) -> bool:
        """Whether a param group has a number of this name that is not 0, or could be another."""
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            groups = self._build([nn.Parameter(self._weights[0].clone())]).param_groups
        return any(pattern.match(n) and list(entries(v)) for group in groups for n, v in group.items())

    def _orthogonal(self, size: int) -> Tensor:
        drawn = torch.randn(size, size, generator=self._generator, dtype=torch.float64)
        matrix, upper = torch.linalg.qr(drawn)
        signed: Tensor = matrix * upper.diagonal().sign()
        return signed.to(self._dtype)

    def _signed(self, size: int) -> tuple[Tensor, Tensor]:
        order = torch.randperm(size, generator=self._generator)
        signs = torch.randint(0, 2, (size, 1), generator=self._generator).to(self._dtype) * 2 - 1
        return order, signs


def _moved(run: Rehearsal) -> bool:
    return any(u.norm() > 0 for each in run.updates for u in each)


def _compared(run: Rehearsal, base: Rehearsal, action: Action) -> float:
    """The largest relative distance between updates and those of the base, acted on."""
    return _largest([(u[0], action(b[0])) for u, b in zip(run.updates, base.updates, strict=True)])


def _largest(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """max |a - b| / |b| over all steps. A step that hardly moves counts by a thousandth of the largest one."""
    floor = 1e-3 * max(float(b.norm()) for _, b in pairs)
    if not 0 < floor < math.inf:
        return math.inf
    distances = [float((a - b).norm()) / max(float(b.norm()), floor) for a, b in pairs]
    return max(d if d == d else math.inf for d in distances)


__all__ = ["MOST_STEPS", "SHAPES", "Responses", "periods", "steps_for"]
