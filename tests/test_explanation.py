"""Every matrix and gain has a line: the pair it is in, or a measured reason why in none."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from deep_models import DEEP
from expected_pairs import Pair, expected
from families import randomised
from families_table import MODELS, built
from models import GatedMlp, differing, snapshot, vectors
from small_models import Net, mlp, rows
from torch import Tensor, nn
from torch.nn import functional

import saggs
from saggs import ScalePair, explain
from saggs.explanation import Explanation, Reason
from saggs.pairs import named_parameters

SIDES = {
    "query_key": ("makes", "makes"), "value_output": ("makes", "reads"), "up_down": ("makes", "reads"),
    "norm_gain": ("gain", "reads"), "query_key_gain": ("gain", "gain"),
}  # fmt: skip


@functools.cache
def of_family(name: str) -> Explanation:
    family = MODELS[name]
    return explain(built(name), family.inputs, family.output)


def sides_of(pairs: Sequence[Pair | ScalePair]) -> dict[tuple[str, str], set[str]]:
    """(parameter, side) -> kinds of the pairs that it is in; biases ride along and have no line."""
    held: dict[tuple[str, str], set[str]] = {}
    for pair in pairs:
        for parts, side in zip((pair.left, pair.right), SIDES[pair.kind], strict=True):
            for part in parts:
                if not part.bias:
                    held.setdefault((part.name, side), set()).add(pair.kind)
    return held


def told(found: Explanation) -> dict[tuple[str, str], set[str]]:
    return {(r.name, r.side): set(r.pairs) for r in found.reasons if r.pairs}


def reason(found: Explanation, name: str, side: str) -> Reason:
    (one,) = [r for r in found.reasons if (r.name, r.side) == (name, side)]
    return one


def number(why: str) -> float:
    """The measured number in a reason."""
    (found,) = re.findall(r"\d(?:\.\d)?e[-+]\d\d", why)
    return float(found)


@pytest.mark.parametrize("name", MODELS)
def test_the_sides_in_pairs_are_those_of_the_pairs_and_every_other_side_has_a_reason(name: str) -> None:
    """No disagreement in either direction; every matrix has two lines, every gain one, and no bias any."""
    found = of_family(name)
    assert told(found) == sides_of(expected(name, "matrix"))
    assert all(bool(r.pairs) != bool(r.why) for r in found.reasons)
    shapes = {n: sum(size > 1 for size in p.shape) for n, p in named_parameters(built(name)).items()}
    sides: dict[str, list[str]] = {}
    for r in found.reasons:
        sides.setdefault(r.name, []).append(r.side)
    assert {n: s for n, s in sides.items() if shapes[n] > 1} == {n: ["makes", "reads"] for n in shapes if shapes[n] > 1}
    assert {n for n in sides if shapes[n] == 1} == {n for n in shapes if shapes[n] == 1 and not _is_bias(n)}
    assert all(s == ["gain"] for n, s in sides.items() if shapes[n] == 1)
    assert list(sides) == [n for n in shapes if n in sides]  # in the order of the model


def _is_bias(name: str) -> bool:
    return name.endswith(("bias", "_dust"))


@pytest.mark.parametrize("name", ["gpt2", "carousel"])
def test_the_comparison_sees_a_side_that_is_forgotten_or_made_up(name: str) -> None:
    pairs = expected(name, "matrix")
    assert told(of_family(name)) != sides_of(pairs[1:])
    assert sides_of(saggs.find_pairs(built(name), inputs=MODELS[name].inputs, output=MODELS[name].output)) == sides_of(
        pairs
    )
    right = [p for p in pairs if p.kind != "up_down"]
    assert (told(of_family(name)) == sides_of(right)) == (len(right) == len(pairs))


def test_gpt2_is_explained() -> None:
    """Tied embeddings, a GELU between c_fc and c_proj, and a fused matrix that makes queries, keys and values."""
    found = of_family("gpt2")
    for side in ("makes", "reads"):
        why = reason(found, "transformer.wte.weight", side).why
        assert why.startswith("tied: it is transformer.wte.weight and lm_head.weight at once")
    for layer in ("transformer.h.0", "transformer.h.1"):
        assert reason(found, f"{layer}.attn.c_attn.weight", "makes").pairs == ("query_key", "value_output")
        assert reason(found, f"{layer}.attn.c_attn.weight", "reads").pairs == ("norm_gain",)
        up = reason(found, f"{layer}.mlp.c_fc.weight", "makes").why
        down = reason(found, f"{layer}.mlp.c_proj.weight", "reads").why
        assert up.startswith(f"near miss: {layer}.mlp.c_proj.weight differs by")
        assert down.startswith(f"near miss: {layer}.mlp.c_fc.weight differs by")
        assert 1e-3 < number(up) < 0.5
        assert reason(found, f"{layer}.mlp.c_proj.weight", "makes").why.startswith("no partner: it writes into")
    assert reason(found, "transformer.ln_f.weight", "gain").why.startswith("no partner: ")


@pytest.mark.parametrize(
    ("activation", "word"),
    [(torch.relu, ""), (functional.gelu, "near miss"), (functional.silu, "near miss"), (torch.cos, "no partner")],
)
def test_a_near_miss_is_what_an_activation_nearly_lets_through(activation: Any, word: str) -> None:
    """A ReLU lets it through, a GELU nearly, a cosine not at all."""
    found = explain(mlp(activation), rows())
    for name, side in (("up.weight", "makes"), ("down.weight", "reads")):
        one = reason(found, name, side)
        assert one.pairs == (() if word else ("up_down",))
        assert one.why.startswith(word)
    assert reason(found, "up.weight", "reads").why.startswith("no partner: ")


def test_queries_and_keys_of_qwen3_are_free_of_scale_but_for_an_eps() -> None:
    """With the size of the change; what the same model's values make is in a pair, and is not free."""
    found = of_family("qwen3")
    for layer in (0, 1):
        for matrix in ("q_proj", "k_proj"):
            why = reason(found, f"model.layers.{layer}.self_attn.{matrix}.weight", "makes").why
            assert why.startswith("scale-free: a norm divides its scale out, up to the norm's eps")
            assert 0 < number(why) < 1e-3
        assert reason(found, f"model.layers.{layer}.self_attn.v_proj.weight", "makes").pairs == ("value_output",)
        assert reason(found, f"model.layers.{layer}.self_attn.q_norm.weight", "gain").pairs == ("query_key_gain",)
    assert not any(r.why.startswith("scale-free") for r in of_family("llama").reasons)


def test_gains_behind_the_blocks_of_bert_are_read_by_the_residual_stream_too() -> None:
    """But for the very last, which a matrix alone reads. All gains of a model with norms in front are in pairs."""
    gains = {r.name: r for r in of_family("bert").reasons if r.side == "gain"}
    paired = [name for name, r in gains.items() if r.pairs]
    assert paired == ["bert.encoder.layer.1.output.LayerNorm.weight"]
    assert len(gains) == 6
    for name, r in gains.items():
        assert name in paired or r.why.startswith(("near miss: ", "no partner: what it scales has a reader that"))
    assert all(r.pairs for r in of_family("llama").reasons if r.side == "gain")


# --- what is unknown --------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Each row goes to the expert of its largest score; one of the experts may be closed."""

    def __init__(self, closed: int | None) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3, bias=False)
        self.ups = nn.ModuleList(nn.Linear(6, 9) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(9, 5) for _ in range(3))
        self.closed = closed
        randomised(self, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        if self.closed is not None:
            scores = scores.index_fill(-1, torch.tensor([self.closed]), float("-inf"))
        weight, chosen = scores.softmax(-1).max(-1)
        y = torch.zeros(len(x), 5, dtype=x.dtype)
        for i, (up, down) in enumerate(zip(self.ups, self.downs, strict=True)):
            mine = chosen == i
            if bool(mine.any()):
                y[mine] = weight[mine, None] * down(torch.relu(up(x[mine])))
        return y


@pytest.mark.parametrize("closed", [None, 1])
def test_an_expert_that_no_token_reaches_is_unknown(closed: int | None) -> None:
    """Its matrices are neither called free nor without a partner; open, all three have their pairs."""
    found = explain(Mixture(closed), rows())
    for i in range(3):
        up, down = reason(found, f"ups.{i}.weight", "makes"), reason(found, f"downs.{i}.weight", "reads")
        if i == closed:
            assert up.why == down.why == "unknown: no probe reached it"
            assert reason(found, f"ups.{i}.weight", "reads").why == "unknown: no probe reached it"
        else:
            assert up.pairs == down.pairs == ("up_down",)
    assert (closed is None) == ("unknown" not in str(found))


def test_quantised_weights_are_named_as_such() -> None:
    """They have no float64 copy that runs: nothing is claimed of them, nor of the rest of their model."""
    model = GatedMlp()
    assert not any(r.why.startswith("unknown") for r in explain(model, vectors).reasons)
    model.up_proj.weight = nn.Parameter(torch.ones(9, 6, dtype=torch.int8), requires_grad=False)
    found = explain(model, vectors)
    assert {r.name for r in found.reasons} == set(named_parameters(model))
    for r in found.reasons:
        assert r.pairs == ()
        if r.name == "up_proj.weight":
            assert r.why.startswith("unknown: quantised weights have no float64 copy that runs")
        else:
            assert r.why == "unknown: the model holds quantised weights (up_proj.weight)"


def test_a_table_that_is_never_used_is_unknown_and_not_without_a_partner() -> None:
    net = Net(lambda n, x: n.down(torch.relu(n.up(x))), up=nn.Linear(6, 9), down=nn.Linear(9, 5), spare=(4, 6))
    found = explain(net, rows())
    assert {r.why for r in found.reasons if r.name == "spare"} == {"unknown: no probe reached it"}
    assert reason(found, "up.weight", "makes").pairs == ("up_down",)


# --- models that are not tiny, and the form of the answer -------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_with_a_twin_is_explained_in_its_own_names(name: str) -> None:
    """Five blocks of width 96: the same sides in pairs as `find_pairs`, and near misses in their own block."""
    torch.manual_seed(0)
    model = randomised(DEEP[name][0](96, 5, 6), 0)
    found = explain(model)
    assert told(found) == sides_of(saggs.find_pairs(model))
    near = [r for r in found.reasons if r.why.startswith("near miss")]
    assert len({re.findall(r"\.\d+\.", r.name)[0] for r in near}) == 5
    for r in near:
        assert re.findall(r"\.\d+\.", r.why)[0] in r.name
        assert "#" not in r.why
    partners = {re.findall(r"near miss: (\S+)", r.why)[0] for r in near}
    assert partners <= set(named_parameters(model))


def test_explaining_changes_nothing_and_says_the_same_again() -> None:
    model = built("carousel")
    before, state = snapshot(model), torch.get_rng_state()
    found = of_family("carousel")
    assert explain(model, MODELS["carousel"].inputs, MODELS["carousel"].output) == found
    assert differing(before, snapshot(model)) == []
    assert torch.equal(torch.get_rng_state(), state)


def test_the_table_and_the_json_hold_every_reason() -> None:
    found = of_family("llama")
    lines = str(found).splitlines()
    assert len(lines) == len(found.reasons) + 1
    assert lines[0].split() == ["parameter", "side", "pair,", "or", "why", "in", "none"]
    for line, r in zip(lines[1:], found.reasons, strict=True):
        assert line.split()[:2] == [r.name, r.side]
        assert line.endswith(", ".join(r.pairs) or f"— {r.why}")
    again = json.loads(json.dumps(found.to_json()))
    assert [Reason(**{**r, "pairs": tuple(r["pairs"])}) for r in again] == list(found.reasons)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "no_inputs": (lambda: mlp(torch.relu), None, "pass inputs="),
    "not_finite": (lambda: mlp(torch.log), rows(), "not finite"),
    "meta": (lambda: mlp(torch.relu).to("meta"), rows(), "meta device"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_model_that_cannot_be_run_is_refused(why: str) -> None:
    build, inputs, message = REFUSED[why]
    with pytest.raises(ValueError, match=message):
        explain(build(), inputs)
