"""What a relation is, by what it does and not by its names; and what only looks like one is not offered."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from expected_pairs import expected
from families import FAMILIES
from families_table import differences
from models import VOCABULARY, randomised, tiny_llama, tiny_qwen3
from odd_models import ODD
from random_models import Scale
from small_models import Net, attended, mlp, rows, sequences
from torch import Tensor, nn
from torch.nn import functional

import saggs
from saggs import CertificationError, ParameterSlice, ScalePair
from saggs.charges import Probing, charges_of
from saggs.kinds import Generators, classify
from saggs.relations import find_relations

MODELS = {**FAMILIES, **ODD}
Inputs = Callable[[torch.Generator, int], Mapping[str, Any]]


def classified(model: nn.Module, inputs: Inputs, output: Any = None) -> list[Generators]:
    probing = Probing(model, inputs, output)
    return classify(find_relations(charges_of(probing)), probing)


def kinds(model: nn.Module, inputs: Inputs) -> list[str]:
    return [pair.kind for pair in saggs.find_pairs(model, inputs=inputs)]


# --- kinds ------------------------------------------------------------------------------------------------------------


def test_attention_and_a_linear_mlp_mix_channels_and_a_gated_one_does_not() -> None:
    """The same two matrices as a linear bottleneck, which is what values and their reader are, or as neurons."""
    parts = {"up": nn.Linear(6, 9), "down": nn.Linear(9, 5)}
    linear = Net(lambda n, x: n.down(n.up(x)), **parts)
    gated = Net(lambda n, x: n.down(n.up(x) * functional.silu(n.gate(x))), gate=nn.Linear(6, 9), **parts)
    assert kinds(linear, rows()) == ["value_output"]
    assert kinds(gated, rows()) == ["up_down"]


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi3", "gpt_neox", "falcon_7b", "mixtral", "braid", "quarry"])
def test_heads_are_counted_without_a_configuration(name: str) -> None:
    """As many heads of values as the expectation has groups, each with as many channels."""
    family = MODELS[name]
    found = [g for g in classified(family.build(), family.inputs, family.output) if g.kind == "value_output"]
    per_head = sorted(size for g in found if g.head is not None for size in g.head.bincount().tolist())
    values = [p for p in expected(name, "head") if p.kind == "value_output"]
    channels = [p for p in expected(name, "channel") if p.kind == "value_output"]
    assert len(per_head) == len(values)
    assert sum(per_head) == len(channels)
    assert len(set(per_head)) == 1


def test_left_is_what_makes_queries_values_or_neurons() -> None:
    """In the order of the kinds' definitions, whatever the order of the parameters."""
    family = ODD["braid"]
    for found in classified(family.build(), family.inputs, family.output):
        assert all(s.exponent > 0 for s in found.left)
        assert all(s.exponent < 0 for s in found.right)
        if found.kind in ("value_output", "up_down"):
            assert {s.lines.role for s in found.left} == {"out"}
            assert {s.lines.role for s in found.right} == {"in"}
        if found.kind == "norm_gain":
            assert {s.lines.role for s in found.left} == {"entry"}


# --- activations ------------------------------------------------------------------------------------------------------


def clamped(limit: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x.clamp(-limit, limit)


# activation -> (exponents, signs) of its pair, or None where it has none
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[list[int], str] | None]] = {
    "relu": (torch.relu, ([1, -1], "positive")),
    "leaky relu": (functional.leaky_relu, ([1, -1], "positive")),
    "absolute value": (torch.abs, ([1, -1], "positive")),
    "relu squared": (lambda x: torch.relu(x) ** 2, ([1, -2], "positive")),
    "square": (torch.square, ([1, -2], "any")),
    "cube": (lambda x: x**3, ([1, -3], "any")),
    "gelu": (functional.gelu, None),
    "gelu by tanh": (lambda x: functional.gelu(x, approximate="tanh"), None),
    "silu": (functional.silu, None),
    "tanh": (torch.tanh, None),
    "softplus": (functional.softplus, None),
    "hardswish": (functional.hardswish, None),
    "elu": (functional.elu, None),
    "relu6": (functional.relu6, None),
    "clamp at 7": (clamped(7), None),
    "clamp at 200": (clamped(200), None),
    "dead zone": (functional.hardshrink, None),
    "relu of x - 0.1": (lambda x: torch.relu(x - 0.1), None),
}


@pytest.mark.parametrize("spread", [0.02, 0.5])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_has_the_pair_of_its_homogeneity_at_small_weights_too(name: str, spread: float) -> None:
    """At weights of 0.02 nothing reaches an edge at 6, 7 or 200; the wider draws of the proof do."""
    activation, wanted = ACTIVATIONS[name]
    net = mlp(activation)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(spread / 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what was a candidate and failed is named there
        found = saggs.find_pairs(net, inputs=rows())
    if wanted is None:
        assert found == []
    else:
        (pair,) = found
        assert ([s.exponent for s in pair.slices if not s.bias], pair.signs) == wanted
        assert {str(s) for s in pair.left} == {"up.weight", "up.bias"}


@pytest.mark.parametrize("limit", [7.0, 200.0])
def test_a_clamped_gate_is_refused_where_its_own_weights_see_no_clamp(limit: float) -> None:
    """down(silu(gate) · clamp(up)): the false pair is refused by name at weights of 0.02; unclamped it is exact."""

    def network(edge: float) -> Net:
        parts = {"gate": nn.Linear(6, 9), "up": nn.Linear(6, 9), "down": nn.Linear(9, 5)}
        net = Net(lambda n, x: n.down(functional.silu(n.gate(x)) * n.up(x).clamp(-edge, edge)), **parts)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.04)
        return net

    left = (ParameterSlice("up.weight", (None, None), 1), ParameterSlice("up.bias", (None,), 1, bias=True))
    pair = ScalePair("up_down", "", left, (ParameterSlice("down.weight", (None, None), -1),))
    with pytest.raises(CertificationError, match=r"up_down of the model is not exact: factor 64"):
        saggs.certify(network(limit), [pair], inputs=rows())
    assert saggs.certify(network(float("inf")), [pair], inputs=rows())[0].certificate is not None


# --- nearly exact -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8, 1e-12])
def test_normalised_queries_and_keys_are_not_exact_however_small_the_eps(eps: float) -> None:
    """Scaling W_Q alone moves the outputs by the eps only, 1e-12 at the last; W_Q against W_K is not offered."""
    model = tiny_qwen3()
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            vars(module).update(variance_epsilon=eps)
    found = saggs.find_pairs(model)
    assert {pair.kind for pair in found} == {"value_output", "up_down", "norm_gain", "query_key_gain"}
    assert not {"q_proj", "k_proj"} & {s.name.split(".")[-2] for p in found if p.kind != "norm_gain" for s in p.slices}
    assert "query_key" in {pair.kind for pair in saggs.find_pairs(tiny_llama())}


@pytest.mark.parametrize("eps", [1e-3, 1e-6, 1e-12])
def test_a_matrix_before_a_norm_is_free_only_nearly(eps: float) -> None:
    """norm(up(x)) forgets the scale of up but for its eps; a candidate of one side would be no pair anyway."""

    class Sandwich(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(6, 9, bias=False), Scale(9, 0), nn.Linear(9, 5)
            self.norm.eps = eps
            randomised(self, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.down(self.norm(self.up(x)))
            return result

    (pair,) = saggs.find_pairs(Sandwich(), inputs=rows())
    assert (pair.kind, [s.name for s in pair.slices]) == ("norm_gain", ["norm.weight", "down.weight"])


# --- what no probe exercises ------------------------------------------------------------------------------------------


class Routed(nn.Module):
    """Three experts of which only those in `open` are ever chosen."""

    def __init__(self, open_: Sequence[int]) -> None:
        super().__init__()
        self.ups, self.downs = nn.Parameter(torch.zeros(3, 7, 6)), nn.Parameter(torch.zeros(3, 5, 7))
        self.router, self.open = nn.Linear(6, 3, bias=False), list(open_)
        randomised(self, 3, spread=0.5)

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x)[..., self.open].softmax(-1)
        experts = [functional.linear(torch.relu(functional.linear(x, self.ups[e])), self.downs[e]) for e in self.open]
        return torch.stack([share[..., i : i + 1] * y for i, y in enumerate(experts)]).sum(0)


def test_an_expert_that_no_token_is_routed_to_is_not_offered() -> None:
    """Unknown, hence left out; not free. With all three open (the control) all three are offered."""
    for open_ in ([0, 2], [0, 1, 2]):
        found = saggs.find_pairs(Routed(open_), inputs=sequences())
        assert [pair.left[0].ranges[0] for pair in found] == [(e, e + 1) for e in open_]
        assert {pair.kind for pair in found} == {"up_down"}


def test_a_token_that_no_input_uses_and_a_module_that_never_runs_are_not_offered() -> None:
    """Rows of unused tokens have no charge; so have the parameters of a module on no path to the outputs."""
    model = tiny_llama()
    model.model.layers[0].mlp.spare = nn.Linear(4, 4)

    def few(generator: torch.Generator, count: int) -> Mapping[str, Tensor]:
        return {"input_ids": torch.randint(0, VOCABULARY // 2, (count, 16), generator=generator)}

    found = saggs.find_pairs(model, granularity="channel", inputs=few)
    names = {part.name for pair in found for part in pair.slices}
    assert not any("spare" in name or "embed_tokens" in name for name in names)
    assert differences(tiny_llama(), found, saggs.find_pairs(tiny_llama(), granularity="channel")) == []


def one_token(generator: torch.Generator, count: int) -> Mapping[str, Tensor]:
    return {"input_ids": torch.randint(0, VOCABULARY, (count, 1), generator=generator)}


def test_inputs_of_one_token_leave_queries_and_keys_unknown() -> None:
    """Attention over one position is one whatever the scores; values are exercised all the same."""
    found = saggs.find_pairs(tiny_llama(), inputs=one_token)
    assert "query_key" not in {pair.kind for pair in found}
    assert {"value_output", "up_down"} <= {pair.kind for pair in found}


def test_a_gain_with_a_reader_that_the_inputs_do_not_exercise_is_not_offered() -> None:
    """On one token only the values read the norm; on two, the pair would be wrong."""
    found = saggs.find_pairs(tiny_llama(), ["norm_gain"], inputs=one_token)
    assert not any("input_layernorm" in pair.left[0].name for pair in found)


def test_a_gain_before_an_expert_that_no_token_is_routed_to_is_not_offered() -> None:
    """Other inputs might be routed there. With all experts open (the control) the gain is paired with them all."""
    for open_ in ([0, 1, 2], [0, 2]):
        experts = nn.ModuleList(nn.Linear(6, 5) for _ in range(3))
        parts = {"norm": nn.LayerNorm(6), "router": nn.Linear(6, 3, bias=False), "experts": experts}

        def forward(n: Net, x: Tensor, chosen: Sequence[int]) -> Tensor:
            x = n.norm(x)
            share = n.router(x)[..., chosen].softmax(-1)
            return torch.stack([share[..., i : i + 1] * n.experts[e](x).tanh() for i, e in enumerate(chosen)]).sum(0)

        found = saggs.find_pairs(Net(functools.partial(forward, chosen=open_), **parts), inputs=sequences())
        assert [pair.kind for pair in found] == (["norm_gain"] if len(open_) == 3 else [])


# --- readers ----------------------------------------------------------------------------------------------------------


def test_a_second_reader_takes_a_pair_away_and_a_scale_free_one_does_not() -> None:
    """relu(up x) read by two matrices is a pair with both; read by the output as well, it is none."""
    parts = {"up": nn.Linear(6, 9), "down": nn.Linear(9, 5)}

    def hidden(n: Net, x: Tensor) -> Tensor:
        return torch.relu(n.up(x))

    assert kinds(Net(lambda n, x: n.down(hidden(n, x)), **parts), rows()) == ["up_down"]
    assert kinds(Net(lambda n, x: n.down(hidden(n, x)) + hidden(n, x).sum(-1, True), **parts), rows()) == []


def test_an_adapter_has_a_pair_of_its_own_and_hides_that_of_the_layer() -> None:
    """y = W x + B A x: A against B mixes like a bottleneck; the rows of W and B together are no two lines."""
    parts = {"up": nn.Linear(6, 9), "down": nn.Linear(9, 5), "a": (3, 6), "b": (9, 3)}
    net = Net(lambda n, x: n.down(torch.relu(n.up(x) + x @ n.a.T @ n.b.T)), **parts)
    (pair,) = saggs.find_pairs(net, inputs=rows())
    assert (pair.kind, [str(s) for s in pair.slices]) == ("value_output", ["a", "b"])


def test_tied_matrices_have_no_pair_that_would_scale_one_of_them() -> None:
    """down is up transposed: c W and W / c at once is impossible."""
    assert kinds(Net(lambda n, x: torch.relu(x @ n.w.T) @ n.w, w=(9, 6)), rows()) == []
    assert kinds(Net(lambda n, x: torch.relu(x @ n.w.T) @ n.v, w=(9, 6), v=(9, 6)), rows()) == ["up_down"]


def test_attention_over_shared_heads_is_found_in_a_plain_module_and_named_by_its_function() -> None:
    """Bare parameters x, y, z, t; four query heads on two key heads."""

    def forward(n: Net, a: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bti,hid->bhtd", a, w) for w in (n.x, n.y, n.z))
        mixed = attended(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        return torch.einsum("bhtd,hdo->bto", mixed, n.t)

    net = Net(forward, x=(4, 6, 3), y=(2, 6, 3), z=(2, 6, 3), t=(4, 3, 6))
    found = saggs.find_pairs(net, inputs=sequences(), granularity="head")
    assert sorted(pair.kind for pair in found) == ["query_key"] * 2 + ["value_output"] * 2
    assert {s.name for pair in found if pair.kind == "query_key" for s in pair.left} == {"x"}
