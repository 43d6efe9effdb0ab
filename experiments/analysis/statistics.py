"""How numbers from several seeds are summarised, compared and tested.

Every function is pure and takes ``{seed: value}``. A value that is None or not finite belongs to a seed that gave no
number (failed, diverged, unfinished): it is counted in ``n_seeds``, never averaged. Values are perplexities unless said
otherwise; tests are made on log-perplexity, because a change of perplexity is a ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

Values = Mapping[int, float | None]

CONFIDENCE = 0.95
EQUIVALENCE_MARGIN = 0.01
SIGNIFICANCE = 0.05
IDENTICAL = "identical"
NO_SPREAD = "the paired differences have no spread"


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation over the seeds that have a value; ``n`` of ``n_seeds`` have one."""

    mean: float | None
    std: float | None
    n: int
    n_seeds: int
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class Differences:
    """Paired differences over the seeds both arms have; ``interval`` is the 95 % t-interval of their mean."""

    mean: float | None
    std: float | None
    n: int
    interval: tuple[float, float] | None
    per_seed: dict[int, float]


@dataclass(frozen=True)
class Comparison:
    """One arm against another: ``first - second`` in perplexity and in log-perplexity, and the paired t-test.

    ``p_value`` is two-sided, on log-perplexity and not corrected (see `holm`). It is None where no test is made;
    ``reason`` then says why. ``identical`` is True where the values of every seed are bitwise equal.
    """

    difference: Differences
    log_difference: Differences
    n_seeds: int
    p_value: float | None
    identical: bool
    reason: str | None


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests; ``equivalent`` is None where no test is made, and ``reason`` says why."""

    equivalent: bool | None
    p_value: float | None
    margin: float
    log_margin: float
    identical: bool
    n: int
    reason: str | None


@dataclass(frozen=True)
class Recovery:
    """The share of the damage that a method undoes; 1 is all of it, 0 none, negative is further harm."""

    fraction: float | None
    per_seed: dict[int, float | None]
    n: int
    n_seeds: int
    reason: str | None


def summarize(values: Values) -> Summary:
    """Mean x̄ = Σxᵢ / n and standard deviation s = √(Σ(xᵢ − x̄)² / (n − 1)) over seeds (ddof = 1).

    With one value s is None, with none the mean too: a single run says nothing about the spread of runs.
    """
    present = _present(values)
    mean, std = _mean_and_std(list(present.values()))
    missing = tuple(sorted(seed for seed in values if seed not in present))
    return Summary(mean, std, len(present), len(values), missing)


def compare(
    first: Values,
    second: Values,
    first_status: Mapping[int, str] | None = None,
    second_status: Mapping[int, str] | None = None,
) -> Comparison:
    """Paired comparison of two arms, dᵢ = firstᵢ − secondᵢ over the seeds i both have.

    Mean and standard deviation (ddof = 1) of dᵢ; the 95 % interval d̄ ± t₀.₉₇₅,ₙ₋₁ · s / √n; and the paired t-test,
    t = d̄ / (s / √n) with n − 1 degrees of freedom (Student, Biometrika 1908), on log-perplexity.

    No test, and no interval (which is a test by another name), where a seed of either arm has no value or where the
    arms do not have the same seeds: the survivors of a divergence are not a sample of all runs. ``first_status`` and
    ``second_status`` give each seed's status, so that ``reason`` can say "diverged".

    Raises ValueError for a perplexity that is not positive.
    """
    left, right = _present(first), _present(second)
    common = sorted(left.keys() & right.keys())
    logs_left, logs_right = _logarithms(left), _logarithms(right)
    plain = {seed: left[seed] - right[seed] for seed in common}
    logs = {seed: logs_left[seed] - logs_right[seed] for seed in common}
    identical = bool(common) and left == right
    reason = _reason_not_to_test(first, second, first_status or {}, second_status or {})
    if reason is None and identical:
        reason = IDENTICAL
    if reason is None and _has_no_spread(list(logs.values())):
        reason = NO_SPREAD
    p_value = None
    if reason is None:
        mean, error, freedom = _standard_error(list(logs.values()))
        p_value = float(2 * stats.t.sf(abs(mean / error), freedom))
    return Comparison(
        difference=_differences(plain, reason is None),
        log_difference=_differences(logs, reason is None),
        n_seeds=len(first.keys() | second.keys()),
        p_value=p_value,
        identical=identical,
        reason=reason,
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p-values of one family corrected by Holm's step-down method (Scandinavian Journal of Statistics 1979).

    With p₍₁₎ ≤ … ≤ p₍ₘ₎, the corrected value is max over j ≤ i of min(1, (m − j + 1) · p₍ⱼ₎). A None passes through
    and still counts in m: the family was fixed beforehand, so an arm that diverged must not make the other
    contrasts look more significant.

    Raises ValueError for a p-value outside [0, 1].
    """
    for p_value in p_values:
        if p_value is not None and not 0 <= p_value <= 1:
            raise ValueError(f"p-value {p_value} is outside [0, 1]; pass None for a contrast without a test")
    corrected: list[float | None] = [None] * len(p_values)
    ordered = sorted((p_value, index) for index, p_value in enumerate(p_values) if p_value is not None)
    largest = 0.0
    for rank, (p_value, index) in enumerate(ordered):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_value))
        corrected[index] = largest
    return corrected


def assess_equivalence(
    first: Values,
    second: Values,
    margin: float = EQUIVALENCE_MARGIN,
    first_status: Mapping[int, str] | None = None,
    second_status: Mapping[int, str] | None = None,
) -> Equivalence:
    """Whether two arms are the same within ``margin`` (a fraction of perplexity), by two one-sided tests.

    With δ = ln(1 + margin) and d̄ the mean paired difference of log-perplexity, the tests reject d̄ ≤ −δ and d̄ ≥ δ;
    the p-value is the larger of the two (Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 1987). The margin
    is symmetric in the logarithm, so the answer does not depend on which arm comes first. ``equivalent`` is p < 0.05;
    differences without any spread (equal up to rounding) need no p-value: they are inside the margin or not.

    Raises ValueError for a margin that is not positive.
    """
    if not margin > 0:
        raise ValueError(f"equivalence margin {margin} is not positive; give a fraction of perplexity, such as 0.01")
    log_margin = math.log1p(margin)
    comparison = compare(first, second, first_status, second_status)
    n = comparison.difference.n
    if comparison.reason == IDENTICAL:
        return Equivalence(True, None, margin, log_margin, True, n, IDENTICAL)
    if comparison.reason == NO_SPREAD:
        inside = abs(comparison.log_difference.mean or 0.0) < log_margin
        return Equivalence(inside, None, margin, log_margin, False, n, NO_SPREAD)
    if comparison.reason is not None:
        return Equivalence(None, None, margin, log_margin, comparison.identical, n, comparison.reason)
    mean, error, freedom = _standard_error(list(comparison.log_difference.per_seed.values()))
    above_lower = float(stats.t.sf((mean + log_margin) / error, freedom))
    below_upper = float(stats.t.cdf((mean - log_margin) / error, freedom))
    p_value = max(above_lower, below_upper)
    return Equivalence(p_value < SIGNIFICANCE, p_value, margin, log_margin, False, n, None)


def recovered(control: Values, imbalanced: Values, rebalanced: Values) -> Recovery:
    """The fraction of the gap between imbalanced and control that the rebalanced arm closes (ours).

    Over the seeds i all three arms have, Σ(imbalancedᵢ − rebalancedᵢ) / Σ(imbalancedᵢ − controlᵢ): the ratio of the
    mean gaps, which one seed with a gap near zero cannot blow up as it would a mean of ratios. ``per_seed`` holds each
    seed's own ratio, None where that seed has no positive gap. The fraction is None where the mean gap is not positive:
    there was no damage to undo.
    """
    a, b, c = _present(control), _present(imbalanced), _present(rebalanced)
    common = sorted(a.keys() & b.keys() & c.keys())
    n_seeds = len(control.keys() | imbalanced.keys() | rebalanced.keys())
    per_seed = {seed: (b[seed] - c[seed]) / (b[seed] - a[seed]) if b[seed] > a[seed] else None for seed in common}
    if not common:
        return Recovery(None, per_seed, 0, n_seeds, "no seed has a value in all three arms")
    gap = float(np.mean([b[seed] - a[seed] for seed in common]))
    if gap <= 0:
        reason = f"the mean gap between imbalanced and control is {gap:.6g}, so there is nothing to recover"
        return Recovery(None, per_seed, len(common), n_seeds, reason)
    closed = float(np.mean([b[seed] - c[seed] for seed in common]))
    return Recovery(closed / gap, per_seed, len(common), n_seeds, None)


def _present(values: Values) -> dict[int, float]:
    """The seeds with a finite number, in order; None, NaN and infinity mean that the seed gave none."""
    return {seed: float(value) for seed, value in sorted(values.items()) if value is not None and math.isfinite(value)}


def _mean_and_std(values: list[float]) -> tuple[float | None, float | None]:
    mean = float(np.mean(values)) if values else None
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return mean, std


def _standard_error(differences: list[float]) -> tuple[float, float, int]:
    """Mean, s / √n and the n − 1 degrees of freedom of two or more differences."""
    n = len(differences)
    return float(np.mean(differences)), float(np.std(differences, ddof=1)) / math.sqrt(n), n - 1


def _differences(per_seed: dict[int, float], with_interval: bool) -> Differences:
    values = list(per_seed.values())
    mean, std = _mean_and_std(values)
    interval = None
    if with_interval and len(values) > 1:
        centre, error, freedom = _standard_error(values)
        half_width = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
        interval = (centre - half_width, centre + half_width)
    return Differences(mean, std, len(values), interval, per_seed)


def _logarithms(perplexities: dict[int, float]) -> dict[int, float]:
    for seed, value in perplexities.items():
        if value <= 0:
            raise ValueError(f"seed {seed} has perplexity {value}; a perplexity is positive: pass exp(nats per token)")
    return {seed: math.log(value) for seed, value in perplexities.items()}


def _has_no_spread(differences: list[float]) -> bool:
    """Whether the differences are equal up to rounding: their t statistic would be made of rounding errors."""
    rounding = 16 * float(np.finfo(float).eps) * max(1.0, *map(abs, differences))
    return max(differences) - min(differences) <= rounding


def _reason_not_to_test(
    first: Values, second: Values, first_status: Mapping[int, str], second_status: Mapping[int, str]
) -> str | None:
    reasons = []
    for arm, values, status in (("first", first, first_status), ("second", second, second_status)):
        present = _present(values)
        for seed in sorted(values.keys() | status.keys()):
            state = status.get(seed, "done")
            if seed not in present or state != "done":
                reasons.append(f"{arm} arm: seed {seed} {'has no value' if state == 'done' else state}")
    unpaired = sorted(first.keys() ^ second.keys())
    if unpaired and not reasons:
        seeds = ", ".join(map(str, unpaired))
        reasons.append(f"only one arm has seed {seeds}")
    if reasons:
        return "; ".join(reasons)
    if len(first) < 2:
        return f"n = {len(first)}: a test needs two seeds or more"
    return None
