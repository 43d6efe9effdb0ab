"""Scale charges are what they say: <line, gradient>, the rate at which a stretched line moves the loss."""

from __future__ import annotations

import copy
import doctest
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from families import FAMILIES
from models import differing, relative_distance, snapshot
from odd_models import ODD
from small_models import Net, mlp, rows, sequences
from torch import Tensor, nn
from torch.nn import functional

import saggs.charges
from saggs.charges import ChargeTable, Lines, Probing, lines_of, scale_charges

MODELS = {**FAMILIES, **ODD}
Gradients = dict[str, tuple[Tensor, Tensor]]


def gradients(probing: Probing, seed: int = 3) -> Gradients:
    """Weights and gradients of one probe."""
    found: Gradients = {}
    probing.generator.manual_seed(seed)
    probing.probes(1, lambda probe, name, weight, gradient: found.update({name: (weight.clone(), gradient.clone())}))
    return found


def of(table: ChargeTable, lines: Lines) -> Tensor:
    return next(c for known, c in zip(table.lines, table.charges, strict=True) if known.key == lines.key)


def test_the_explanations_run_as_they_stand() -> None:
    assert doctest.testmod(saggs.charges).attempted > 5
    assert doctest.testmod(saggs.charges).failed == 0


def test_a_charge_is_the_rate_at_which_a_stretched_line_moves_the_loss() -> None:
    """Against a central difference in s of the loss at e^s times the row and its bias; in float64, to 1e-8."""
    probing = Probing(mlp(torch.tanh), rows())
    probing.draw(1.0)
    found, step = gradients(probing), 1e-5
    lines = next(k for k in lines_of(probing.parameters, probing.wiring) if (k.name, k.role) == ("up.weight", "out"))
    assert lines.bias == "up.bias"
    weight, bias = (found[name] for name in ("up.weight", "up.bias"))
    charge = lines.sums(weight[0] * weight[1]) + bias[0] * bias[1]
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            for name in ("up.weight", "up.bias"):
                probing.parameters[name].copy_(found[name][0])
                probing.parameters[name][4] *= math.exp(sign * step)
            outputs = probing.run()
        losses.append(float((outputs * torch.randn(outputs.shape, generator=torch.Generator().manual_seed(3),
                                                   dtype=torch.float64)).sum()))  # fmt: skip
    rate = (losses[0] - losses[1]) / (2 * step)
    assert rate == pytest.approx(float(charge[4]), rel=1e-8)
    assert rate != pytest.approx(float(charge[5]), rel=1e-2)


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi3", "mixtral", "t5", "whisper", "quarry", "carousel"])
def test_rows_less_biases_add_up_to_columns_in_every_matrix(name: str) -> None:
    """The trivial relation Σ rows = Σ columns + bias, to rounding; without the bias (the control) it fails."""
    family = MODELS[name]
    table = scale_charges(family.build(), family.inputs, family.output, probes_per_draw=2)
    matrices = {lines.name for lines in table.lines if len(lines.shape) > 1 and max(lines.dims) < 2}
    assert len(matrices) >= 8
    biased = 0
    for matrix in matrices:
        first, second = (k for k in table.lines if k.name == matrix)
        sums = {k.role: of(table, k).sum(1) for k in (first, second)}
        if set(sums) != {"out", "in"}:
            continue
        bias = next((k.bias for k in (first, second) if k.bias), None)
        own = table.of(bias, "entry").sum(1) if bias else torch.zeros(())
        size = torch.stack([*sums.values()]).abs().max()
        assert float((sums["out"] - own - sums["in"]).abs().max() / size) < 1e-11
        if bias and float(own.abs().max() / size) > 1e-6:  # a key's bias is dead
            biased += 1
            assert float((sums["out"] - sums["in"]).abs().max() / size) > 1e-6
    assert biased or name in ("llama", "phi3", "mixtral", "t5")


def test_the_charge_of_all_weights_is_the_same_however_it_is_cut() -> None:
    """Σ of all rows, Σ of all columns, Σ of all entries of a stack, by either numbering."""
    lines = [Lines("w", (3, 4, 5), dims, "out") for dims in ((0, 1), (0, 2), (0,), (1,), (0, 1, 2))]
    values = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    for one in lines:
        assert torch.allclose(one.sums(values).sum(1), values.sum((1, 2, 3)), rtol=1e-13)
        assert one.rows(values).shape == (2, one.count, 60 // one.count)
        assert torch.allclose(one.rows(values).sum(-1), one.sums(values), rtol=1e-13)


def test_charges_of_a_shared_weight_add() -> None:
    """A layer that is used twice has the sum of the charges of two layers with the same weights."""
    shared = Net(lambda n, x: n.a(torch.tanh(n.a(x))), a=nn.Linear(6, 6))
    apart = Net(lambda n, x: n.b(torch.tanh(n.a(x))), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    together, single = Probing(shared, rows()), Probing(apart, rows())
    with torch.no_grad():
        for name, parameter in single.parameters.items():
            parameter.copy_(together.parameters[f"a.{name.partition('.')[2]}"])
    once, each = gradients(together), gradients(single)
    for leaf in ("weight", "bias"):
        total = each[f"a.{leaf}"][1] + each[f"b.{leaf}"][1]
        assert relative_distance(once[f"a.{leaf}"][1], total) < 1e-14
        assert relative_distance(once[f"a.{leaf}"][1], each[f"a.{leaf}"][1]) > 1e-2


@pytest.mark.parametrize("offset", [0, 1])
def test_a_gain_balances_its_reader_as_w_or_as_one_plus_w(offset: int) -> None:
    """The charge <o + w, dL/dw> equals that of the reader's columns for the right o, and not for the other."""
    net = Net(lambda n, x: n.out((offset + n.gain) * x), gain=(6,), out=nn.Linear(6, 3))
    table = scale_charges(net, rows())
    columns = table.of("out.weight", "in")
    both = {k.offset: of(table, k) for k in table.lines if k.name == "gain"}
    assert relative_distance(both[offset], columns) < 1e-12
    assert relative_distance(both[1 - offset], columns) > 1e-2


def test_what_is_added_has_no_charge_as_one_plus_w() -> None:
    """A bias is no gain: 1 + b of an activation that is shifted means nothing."""
    table = scale_charges(Net(lambda n, x: n.gain * x + n.shift, gain=(6,), shift=(6,)), rows())
    offsets = {name: [k.offset for k in table.lines if k.name == name] for name in ("gain", "shift")}
    assert offsets == {"gain": [0, 1], "shift": [0]}


class Looped(torch.autograd.Function):
    """x²/2, without a rule for batches of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square() / 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * torch.from_numpy(x.detach().numpy())


@pytest.mark.parametrize("name", ["llama", "mixtral", "whisper", "without a batching rule"])
def test_batched_probes_equal_looped_ones(name: str) -> None:
    """Gradient by gradient, to rounding; other losses (the control) give other gradients."""
    if name in MODELS:
        family = MODELS[name]
        model, inputs, output = family.build(), family.inputs, family.output
    else:
        model, inputs, output = mlp(Looped.apply), rows(), None
    probing = Probing(model, inputs, output, samples=2)
    probing.draw(1.0)
    looped: list[dict[str, Tensor]] = [{}, {}, {}]
    probing.generator.manual_seed(5)
    probing.probes(3, lambda probe, name, weight, gradient: looped[probe].update({name: gradient.clone()}))
    names = sorted(looped[0])
    one_by_one = torch.cat([torch.stack([probe[n] for probe in looped]).flatten() for n in names])
    for seed in (5, 6):
        probing.generator.manual_seed(seed)
        (found,) = probing.batched_probes(3)
        assert sorted(found) == names
        distance = relative_distance(torch.cat([found[n][1].flatten() for n in names]), one_by_one)
        assert distance < 1e-12 if seed == 5 else distance > 1e-2


def test_measuring_changes_no_bit_of_the_model_its_gradients_mode_or_the_random_state() -> None:
    family = FAMILIES["gemma2"]
    model = family.build().train()
    model.model.embed_tokens.weight.grad = torch.ones(50, 36)  # type: ignore[union-attr]
    model.model.norm.weight.requires_grad_(False)  # type: ignore[union-attr]
    before, state = snapshot(model), torch.get_rng_state()
    eps = [v for m in model.modules() for v in vars(m).values() if isinstance(v, float)]
    scale_charges(model, family.inputs, family.output, probes_per_draw=1)
    assert differing(before, snapshot(model)) == []
    assert model.training
    assert [p.requires_grad for n, p in model.named_parameters() if n == "model.norm.weight"] == [False]
    assert [v for m in model.modules() for v in vars(m).values() if isinstance(v, float)] == eps
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32


def test_the_same_seed_gives_the_same_charges_bit_for_bit() -> None:
    first, again, other = (
        torch.cat(scale_charges(mlp(torch.relu), rows(), seed=seed).charges, dim=1) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_layer_scales_in_float64_although_its_code_asks_for_float32() -> None:
    """x.float() in the middle would show 1e-7 between equal charges; under the all-float64 mode they agree to 1e-13."""
    net = mlp(lambda x: functional.relu(x.float()).to(torch.float32))
    table = scale_charges(net, rows())
    assert relative_distance(table.of("up.weight", "out"), table.of("down.weight", "in")) < 1e-13
    narrow = copy.deepcopy(net).double()
    x = torch.randn(16, 6, dtype=torch.float64)
    narrow.function = lambda n, x: n.down(functional.relu(n.up(x)).float().double())  # the control: truly rounded
    narrow(x).backward(torch.randn(16, 5, dtype=torch.float64))
    up, bias, down = narrow.up, narrow.up.bias, narrow.down.weight
    row = (up.weight * up.weight.grad).sum(1) + bias * bias.grad
    assert relative_distance(row, (down * down.grad).sum(0)) > 1e-10


@pytest.mark.parametrize(
    ("net", "inputs", "message"),
    [
        (Net(lambda n, x: x * 2, w=(6,)), rows(), "depends on no parameter; pass output="),
        (Net(lambda n, x: x @ n.w.log(), w=(6, 6)), rows(), "outputs are not finite at random weights"),
        (mlp(torch.relu), None, "pass inputs=, a callable of"),
        (mlp(torch.relu).to("meta"), rows(), "'up.weight' is on the meta device; load real weights"),
    ],
    ids=["no_parameter", "not_finite", "no_inputs", "meta"],
)
def test_a_model_that_cannot_be_measured_is_refused_with_the_remedy(net: Any, inputs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scale_charges(net, inputs)


def test_charges_are_asked_for_by_name_and_role() -> None:
    table = scale_charges(mlp(torch.relu), rows())
    assert table.of("up.weight", "in").shape == (12, 6)
    with pytest.raises(KeyError, match=r"up\.weight has no lines of role 'entry'"):
        table.of("up.weight", "entry")


def test_a_stack_of_matrices_has_a_line_for_each_row_of_each() -> None:
    """With the biases of a stack: [experts, neurons] beside [experts, neurons, width]."""

    def experts(net: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(torch.einsum("bti,efi->betf", x, net.ups) + net.dust[:, None])
        return torch.einsum("betf,eof->bto", hidden, net.downs)

    def inputs(generator: torch.Generator, count: int) -> Mapping[str, Tensor]:
        return sequences()(generator, count)

    net = Net(lambda n, x: experts(n, x), ups=(3, 9, 6), dust=(3, 9), downs=(3, 5, 9))
    table = scale_charges(net, inputs)
    assert table.of("ups", "out").shape == (12, 27)
    assert table.of("downs", "in").shape == (12, 27)
    (lines,) = [k for k in table.lines if k.name == "ups" and k.role == "out"]
    assert (lines.dims, lines.bias) == ((0, 1), "dust")
    assert relative_distance(table.of("ups", "out"), table.of("downs", "in")) < 1e-12
