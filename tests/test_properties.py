"""Architectures drawn at random: no false pair, no missed pair, whatever they are made of."""

from __future__ import annotations

import warnings

import pytest
from expected_rules import pairs
from families_table import differences
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import Recipe, built, generators, ids, recipes

import saggs
from saggs.assembly import GRANULARITIES, Granularity

UNDISTURBED = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def errors(recipe: Recipe, granularity: Granularity, described: Recipe | None = None) -> list[str]:
    """How the pairs that are found differ from those in closed form (of `described`, where that is another recipe).

    A neuron that two random inputs leave dead, or an expert that no token is routed to, is named in a warning; any
    other candidate that fails its certificate is an error.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = built(recipe)
        found = saggs.find_pairs(model, granularity=granularity, inputs=ids)
    said = [str(w.message) for w in caught]
    unproved = [line for line in said if line.startswith("left out: up_down") and "proves nothing" in line]
    # With as many key heads as query heads the two sides of a score are alike.
    alike = ("query_key", "query_key_gain") if recipe.share == 1 else ("query_key_gain",)
    wrong = differences(model, found, pairs(generators(described or recipe), granularity), alike)
    missing = [line for line in wrong if line.startswith("1 x missing: up_down")]
    if len(missing) == len(unproved) and len(unproved) < len(found):
        wrong = [line for line in wrong if line not in missing]
    return wrong + [line for line in said if line not in unproved]


@settings(max_examples=30, **UNDISTURBED)  # type: ignore[arg-type]
@given(recipe=recipes(), granularity=st.sampled_from(GRANULARITIES))
def test_a_random_architecture_has_the_pairs_of_its_closed_form(recipe: Recipe, granularity: Granularity) -> None:
    assert errors(recipe, granularity) == []


@pytest.mark.slow
@settings(max_examples=300, **UNDISTURBED)  # type: ignore[arg-type]
@given(recipe=recipes(), granularity=st.sampled_from(GRANULARITIES))
def test_many_random_architectures_have_the_pairs_of_their_closed_form(
    recipe: Recipe, granularity: Granularity
) -> None:
    assert errors(recipe, granularity) == []


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("neighbours", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("storage", ["separate", "fused", "interleaved"])
def test_one_channel_a_head_without_positions_is_a_channel_of_attention(
    storage: str, neighbours: bool, granularity: Granularity
) -> None:
    """It mixes with no other, as a neuron does; but two rows against each other are never an MLP's."""
    recipe = Recipe(size=5, rotary="neighbours" if neighbours else "halves", rotated=4, storage=storage)  # type: ignore[arg-type]
    assert errors(recipe, granularity) == []


@pytest.mark.parametrize("granularity", ["matrix", "head"])
@pytest.mark.parametrize("keys_first", [pytest.param(False, id="queries_first"), pytest.param(True, id="keys_first")])
@pytest.mark.parametrize("storage", ["separate", "fused", "interleaved"])
def test_channels_with_and_without_positions_agree_on_which_side_is_the_query(
    storage: str, keys_first: bool, granularity: Granularity
) -> None:
    """Only without positions does a dead bias tell the key: all channels of two matrices go by it."""
    recipe = Recipe(size=6, rotary="halves", rotated=2, storage=storage, keys_first=keys_first)  # type: ignore[arg-type]
    assert errors(recipe, granularity) == []


OTHERS = [
    (Recipe(), Recipe(activation="relu2"), "exponent of ReLU²"),
    (Recipe(activation="gelu"), Recipe(activation="relu"), "GELU is no ReLU"),
    (Recipe(activation="gated"), Recipe(activation="relu"), "signs, and the gate reads the norm"),
    (Recipe(norm="rms1"), Recipe(norm="rms"), "1 + w"),
    (Recipe(norm="layer"), Recipe(norm="rms"), "bias of the norm"),
    (Recipe(tied=True), Recipe(tied=False), "tied head"),
    (Recipe(norm_first=False), Recipe(norm_first=True), "norms behind"),
    (Recipe(normalised=True), Recipe(normalised=False), "normalised queries and keys"),
    (Recipe(rotary="halves", rotated=4), Recipe(rotary="neighbours", rotated=4), "which channels turn together"),
    (Recipe(rotary="halves", rotated=2), Recipe(rotary="halves", rotated=4), "how many channels turn"),
    (Recipe(groups=2, share=2), Recipe(groups=4, share=1), "grouped queries"),
    (Recipe(attention_bias=False), Recipe(attention_bias=True), "biases"),
    (Recipe(storage="interleaved"), Recipe(storage="fused"), "heads in turn"),
    (Recipe(mixture="soft"), Recipe(mixture="soft", stacked=True), "one tensor for all experts"),
    (Recipe(parallel=True), Recipe(), "one norm for both"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "other"), [o[:2] for o in OTHERS], ids=[o[2] for o in OTHERS])
def test_the_closed_form_of_another_architecture_does_not_fit(recipe: Recipe, other: Recipe) -> None:
    """The control: what a property tells apart. The closed form of the recipe itself fits."""
    assert errors(recipe, "channel") == []
    try:
        wrong = errors(recipe, "channel", described=other)
    except (KeyError, IndexError):  # the other architecture has parameters that this one lacks
        return
    assert wrong
