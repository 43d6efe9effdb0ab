"""Summaries, paired tests, corrections and equivalence over seeds, held against scipy and against hand results."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from experiments.analysis.statistics import assess_equivalence, compare, holm, recovered, summarize

CONTROL = {0: 352.8, 1: 349.1, 2: 355.6, 3: 351.0, 4: 350.2}
IMBALANCED = {0: 501.3, 1: 489.9, 2: 510.7, 3: 498.2, 4: 492.5}
SAGGS = {0: 360.2, 1: 354.0, 2: 359.9, 3: 357.1, 4: 352.8}


def logs(values: dict[int, float]) -> list[float]:
    return [math.log(values[seed]) for seed in sorted(values)]


def test_standard_deviation_is_the_sample_one_with_ddof_1() -> None:
    summary = summarize({0: 1.0, 1: 2.0, 2: 3.0})
    assert (summary.mean, summary.std, summary.n, summary.n_seeds) == (2.0, 1.0, 3, 3)
    assert summary.std != pytest.approx(np.std([1.0, 2.0, 3.0]))  # ddof = 0 gives 0.816
    assert summarize(CONTROL).std == pytest.approx(stats.tstd(list(CONTROL.values())), rel=1e-14)


def test_two_seeds_have_a_standard_deviation() -> None:
    assert summarize({0: 1.0, 1: 3.0}).std == pytest.approx(math.sqrt(2))


def test_one_seed_has_no_standard_deviation() -> None:
    summary = summarize({0: 352.8})
    assert (summary.mean, summary.std, summary.n) == (352.8, None, 1)


def test_no_seed_has_neither_mean_nor_standard_deviation() -> None:
    summary = summarize({})
    assert (summary.mean, summary.std, summary.n, summary.n_seeds) == (None, None, 0, 0)


@pytest.mark.parametrize("no_number", [None, math.nan, math.inf])
def test_a_seed_without_a_number_is_counted_and_never_averaged(no_number: float | None) -> None:
    summary = summarize({0: 1.0, 1: no_number, 2: 3.0})
    assert (summary.mean, summary.n, summary.n_seeds, summary.missing) == (2.0, 2, 3, (1,))
    assert summarize({0: 1.0, 1: 99.0, 2: 3.0}).mean != 2.0  # a number, however bad, is averaged


def test_seed_zero_is_a_seed_like_any_other() -> None:
    assert summarize({0: 5.0, 1: 7.0}).mean == 6.0
    assert compare({0: 5.0, 1: 7.0}, {0: 4.0, 1: 6.5}).difference.per_seed == {0: 1.0, 1: 0.5}


def test_paired_test_is_scipys_on_log_perplexity() -> None:
    comparison = compare(SAGGS, CONTROL)
    expected = stats.ttest_rel(logs(SAGGS), logs(CONTROL))
    assert comparison.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    assert comparison.p_value != pytest.approx(
        stats.ttest_rel(list(SAGGS.values()), list(CONTROL.values())).pvalue, rel=1e-3
    )
    assert comparison.p_value != pytest.approx(stats.ttest_ind(logs(SAGGS), logs(CONTROL)).pvalue, rel=1e-1)
    assert (comparison.identical, comparison.reason) == (False, None)


def test_intervals_are_scipys_for_perplexity_and_log_perplexity() -> None:
    comparison = compare(SAGGS, CONTROL)
    for difference, first, second in (
        (comparison.difference, list(SAGGS.values()), list(CONTROL.values())),
        (comparison.log_difference, logs(SAGGS), logs(CONTROL)),
    ):
        expected = stats.ttest_rel(first, second).confidence_interval(0.95)
        assert difference.interval == pytest.approx((expected.low, expected.high), rel=1e-9)
        assert difference.mean == pytest.approx(np.mean(np.subtract(first, second)), rel=1e-12)
        assert difference.std == pytest.approx(np.std(np.subtract(first, second), ddof=1), rel=1e-12)


def test_half_width_at_five_seeds_is_1_24_standard_deviations() -> None:
    difference = compare(SAGGS, CONTROL).difference
    assert difference.interval is not None
    assert difference.mean is not None
    assert difference.std is not None
    assert (difference.interval[1] - difference.mean) / difference.std == pytest.approx(1.2417, abs=1e-4)


def test_pairing_is_by_seed_and_not_by_position() -> None:
    backwards = {seed: CONTROL[seed] for seed in reversed(CONTROL)}
    assert compare(SAGGS, backwards) == compare(SAGGS, CONTROL)
    shifted = {seed: CONTROL[(seed + 1) % 5] for seed in CONTROL}
    assert compare(SAGGS, shifted).p_value != compare(SAGGS, CONTROL).p_value


def test_identical_arms_have_no_p_and_one_changed_bit_ends_identity() -> None:
    comparison = compare(CONTROL, dict(CONTROL))
    assert (comparison.identical, comparison.p_value, comparison.reason) == (True, None, "identical")
    assert (comparison.difference.mean, comparison.difference.std) == (0.0, 0.0)
    changed = {**CONTROL, 3: math.nextafter(CONTROL[3], math.inf)}
    assert compare(changed, CONTROL).identical is False


def test_an_arm_with_a_diverged_seed_gets_no_test_and_no_interval() -> None:
    diverged = {**SAGGS, 3: None}
    comparison = compare(diverged, CONTROL, first_status={3: "diverged"})
    assert comparison.p_value is None
    assert comparison.difference.interval is None
    assert comparison.log_difference.interval is None
    assert comparison.reason == "first arm: seed 3 diverged"
    assert (comparison.difference.n, comparison.n_seeds) == (4, 5)
    assert compare(SAGGS, CONTROL, first_status=dict.fromkeys(SAGGS, "done")).p_value is not None


def test_a_number_left_by_a_failed_run_is_not_tested() -> None:
    assert compare(SAGGS, CONTROL, second_status={1: "failed"}).reason == "second arm: seed 1 failed"


def test_arms_of_different_seeds_get_no_test() -> None:
    comparison = compare(SAGGS, {seed: CONTROL[seed] for seed in (0, 1, 2)})
    assert comparison.reason == "only one arm has seed 3, 4"
    assert comparison.difference.n == 3


def test_one_pair_gets_no_test() -> None:
    comparison = compare({0: 3.0}, {0: 2.0})
    assert (comparison.p_value, comparison.difference.std, comparison.difference.interval) == (None, None, None)
    assert comparison.reason == "n = 1: a test needs two seeds or more"


def test_differences_without_spread_give_no_p_of_rounding_errors() -> None:
    doubled = {seed: 2 * value for seed, value in CONTROL.items()}
    comparison = compare(doubled, CONTROL)
    assert (comparison.p_value, comparison.reason) == (None, "the paired differences have no spread")
    assert assess_equivalence(doubled, CONTROL).equivalent is False
    nearly = {seed: value * (1 + 1e-15) for seed, value in CONTROL.items()}
    assert assess_equivalence(nearly, CONTROL).equivalent is True


def test_a_perplexity_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seed 1 has perplexity -2\.0"):
        compare({0: 3.0, 1: -2.0}, {0: 3.0, 1: 2.0})


def test_holm_gives_the_textbook_values() -> None:
    """Holm (1979), as `p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm")` of R."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_holm_lies_between_no_correction_and_bonferroni_and_keeps_the_order() -> None:
    for p_values in itertools.permutations([0.001, 0.02, 0.021, 0.4, 0.9]):
        corrected = [value for value in holm(p_values) if value is not None]
        assert all(p <= value <= min(1.0, 5 * p) for p, value in zip(p_values, corrected, strict=True))
        assert [corrected[i] for i in np.argsort(p_values)] == sorted(corrected)
    assert holm([0.02, 0.02, 0.02]) == pytest.approx([0.06, 0.06, 0.06])


def test_holm_passes_none_through_and_the_family_stays_as_large_as_it_was_planned() -> None:
    assert holm([0.01, None, 0.04]) == pytest.approx([0.03, None, 0.08])
    assert holm([0.01, 0.04]) == pytest.approx([0.02, 0.04])
    assert holm([]) == []
    assert holm([None]) == [None]


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan])
def test_holm_refuses_what_is_no_probability(bad: float) -> None:
    with pytest.raises(ValueError, match="outside"):
        holm([0.5, bad])


def test_equivalence_is_scipys_two_one_sided_tests() -> None:
    near = {0: 353.9, 1: 348.5, 2: 356.0, 3: 351.9, 4: 349.8}
    result = assess_equivalence(near, CONTROL)
    d, delta = np.subtract(logs(near), logs(CONTROL)), math.log1p(0.01)
    expected = max(
        stats.ttest_1samp(d, -delta, alternative="greater").pvalue,
        stats.ttest_1samp(d, delta, alternative="less").pvalue,
    )
    assert result.p_value == pytest.approx(expected, rel=1e-9)
    assert (result.equivalent, result.log_margin) == (True, delta)


def test_equivalence_does_not_depend_on_which_arm_comes_first() -> None:
    one, other = assess_equivalence(SAGGS, CONTROL), assess_equivalence(CONTROL, SAGGS)
    assert one.p_value == pytest.approx(other.p_value, rel=1e-9)


def test_equivalence_is_the_ninety_percent_interval_inside_the_margin() -> None:
    rng = np.random.default_rng(0)
    answers = set()
    for _ in range(200):
        other = {seed: value * math.exp(rng.normal(0.003, 0.008)) for seed, value in CONTROL.items()}
        result = assess_equivalence(other, CONTROL)
        interval = stats.ttest_rel(logs(other), logs(CONTROL)).confidence_interval(0.90)
        assert result.equivalent is bool(-result.log_margin < interval.low and interval.high < result.log_margin)
        answers.add(result.equivalent)
    assert answers == {True, False}


def test_a_difference_that_is_not_significant_proves_no_equivalence() -> None:
    noisy = {0: 380.0, 1: 330.0, 2: 372.0, 3: 335.0, 4: 349.0}
    p_value = compare(noisy, CONTROL).p_value
    assert p_value is not None
    assert p_value > 0.5
    assert assess_equivalence(noisy, CONTROL).equivalent is False


def test_identical_arms_are_equivalent_and_a_diverged_one_is_undecided() -> None:
    assert assess_equivalence(CONTROL, CONTROL).equivalent is True
    undecided = assess_equivalence({**CONTROL, 2: None}, CONTROL, first_status={2: "diverged"})
    assert (undecided.equivalent, undecided.reason) == (None, "first arm: seed 2 diverged")


def test_equivalence_needs_a_positive_margin() -> None:
    with pytest.raises(ValueError, match=r"margin 0\.0 is not positive"):
        assess_equivalence(CONTROL, CONTROL, margin=0.0)


def test_recovery_is_the_ratio_of_mean_gaps_and_not_the_mean_of_ratios() -> None:
    control, imbalanced, saggs = {0: 10.0, 1: 10.0}, {0: 11.0, 1: 30.0}, {0: 11.0, 1: 10.0}
    recovery = recovered(control, imbalanced, saggs)
    assert recovery.fraction == pytest.approx(20 / 21)
    assert recovery.per_seed == {0: 0.0, 1: 1.0}
    assert recovery.fraction != pytest.approx(0.5)


def test_recovery_is_one_at_control_and_zero_at_imbalanced() -> None:
    assert recovered(CONTROL, IMBALANCED, CONTROL).fraction == pytest.approx(1.0)
    assert recovered(CONTROL, IMBALANCED, IMBALANCED).fraction == 0.0
    partly = recovered(CONTROL, IMBALANCED, SAGGS).fraction
    assert partly is not None
    assert 0.9 < partly < 1.0


def test_recovery_leaves_out_a_diverged_seed_and_counts_it() -> None:
    recovery = recovered(CONTROL, {**IMBALANCED, 4: None}, SAGGS)
    assert (recovery.n, recovery.n_seeds) == (4, 5)
    assert 4 not in recovery.per_seed


def test_without_damage_there_is_nothing_to_recover() -> None:
    recovery = recovered(CONTROL, CONTROL, SAGGS)
    assert recovery.fraction is None
    assert recovery.reason is not None
    assert "nothing to recover" in recovery.reason
    assert set(recovery.per_seed.values()) == {None}
    assert recovered({0: None}, {0: 1.0}, {0: 1.0}).reason == "no seed has a value in all three arms"
