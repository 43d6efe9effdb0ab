"""One forward pass tells which dimension of a matrix reads, which bias follows it and what is added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Net, mlp, rows, sequences
from torch import Tensor, nn
from torch.nn import functional

import saggs
from saggs.wiring import Wiring, observe


def seen(net: nn.Module, x: Tensor) -> Wiring:
    return observe(net, lambda: net(x))


OUT_IN, IN_OUT = (5, 6), (6, 5)
Call = Callable[[Any, Tensor], Tensor]
# name: (shape of w, the dimension that reads, whether the bias b follows, the call)
CALLS: dict[str, tuple[tuple[int, ...], int, bool, Call]] = {
    "linear": (OUT_IN, 1, True, lambda n, x: functional.linear(x, n.w, n.b)),
    "linear by keyword": (OUT_IN, 1, True, lambda n, x: functional.linear(x, bias=n.b, weight=n.w)),
    "linear of a transposed matrix": (IN_OUT, 0, True, lambda n, x: functional.linear(x, n.w.T, n.b)),
    "addmm": (IN_OUT, 0, True, lambda n, x: torch.addmm(n.b, x, n.w)),
    "addmm of a transposed matrix": (OUT_IN, 1, True, lambda n, x: torch.addmm(n.b, x, n.w.T)),
    "@ from the right": (IN_OUT, 0, False, lambda n, x: x @ n.w),
    "@ from the right, transposed": (OUT_IN, 1, False, lambda n, x: x @ n.w.T),
    "@ from the left": (OUT_IN, 1, False, lambda n, x: n.w @ x.T),
    "@ from the left, transposed": (IN_OUT, 0, False, lambda n, x: n.w.T @ x.T),
    "matmul": (IN_OUT, 0, False, lambda n, x: torch.matmul(x, n.w)),
    "method matmul": (OUT_IN, 1, False, lambda n, x: n.w.matmul(x.T)),
    "mm": (IN_OUT, 0, False, lambda n, x: torch.mm(x, n.w)),
    "bias added": (IN_OUT, 0, True, lambda n, x: x @ n.w + n.b),
    "bias in front": (IN_OUT, 0, True, lambda n, x: n.b + x @ n.w),
    "bias added in place": (IN_OUT, 0, True, lambda n, x: (x @ n.w).add_(n.b)),
    "bias by torch.add": (IN_OUT, 0, True, lambda n, x: torch.add(x @ n.w, n.b)),
    "einsum bi,oi": (OUT_IN, 1, False, lambda n, x: torch.einsum("bi,oi->bo", x, n.w)),
    "einsum bi,io": (IN_OUT, 0, False, lambda n, x: torch.einsum("bi,io->bo", x, n.w)),
    "einsum io,bi": (IN_OUT, 0, False, lambda n, x: torch.einsum("io,bi->bo", n.w, x)),
    "einsum with dots and spaces": (IN_OUT, 0, True, lambda n, x: torch.einsum("... i, i o -> ... o", x, n.w) + n.b),
    "einsum transposed result": (OUT_IN, 1, False, lambda n, x: torch.einsum("oi,bi->ob", n.w, x)),
    "einsum of a list": (OUT_IN, 1, False, lambda n, x: torch.einsum("bi,oi->bo", [x, n.w])),
    "a slice of a larger one": ((8, 6), 1, False, lambda n, x: functional.linear(x, n.w[2:7])),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_tells_which_dimension_reads_and_which_bias_follows(name: str) -> None:
    shape, reads, follows, call = CALLS[name]
    found = seen(Net(call, w=shape, b=(5,)), torch.randn(7, 6))
    assert found.reads["w"] == reads
    assert found.bias == ({"w": "b"} if follows else {})
    assert found.additive == ({"b"} if follows else set())


def test_an_einsum_without_an_arrow_sums_the_letter_that_stands_twice() -> None:
    assert seen(Net(lambda n, x: torch.einsum("bi,io", x, n.w), w=IN_OUT), torch.randn(7, 6)).reads["w"] == 0


@pytest.mark.parametrize("name", ["experts of a stack", "einsum over a stack", "baddbmm", "bmm"])
def test_a_stack_of_matrices_is_read_matrix_by_matrix(name: str) -> None:
    calls: dict[str, tuple[tuple[int, ...], int, Call]] = {
        "experts of a stack": ((3, 5, 6), 2, lambda n, x: functional.linear(x, n.w[1], n.b[1])),
        "einsum over a stack": ((3, 6, 5), 1, lambda n, x: torch.einsum("bi,eio->beo", x, n.w) + n.b),
        "bmm": ((3, 6, 5), 1, lambda n, x: torch.bmm(x.expand(3, -1, -1), n.w) + n.b[:, None]),
        "baddbmm": ((3, 6, 5), 1, lambda n, x: torch.baddbmm(n.b[:, None], x.expand(3, -1, -1), n.w)),
    }
    shape, reads, call = calls[name]
    found = seen(Net(call, w=shape, b=(3, 5)), torch.randn(7, 6))
    assert found.reads["w"] == reads
    assert found.bias == {"w": "b"}


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_convolution_reads_its_second_dimension_and_is_a_kernel(dims: int) -> None:
    layer = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1](4, 5, 2)
    found = seen(layer, torch.randn(1, 4, *(3,) * dims))
    assert (found.reads["weight"], found.bias, found.kernels) == (1, {"weight": "bias"}, {"weight"})


def test_a_convolution_of_one_channel_reads_its_second_dimension_too() -> None:
    assert seen(nn.Conv1d(1, 5, 3), torch.randn(2, 1, 9)).reads.get("weight", 1) == 1


def test_an_embedding_is_looked_up_and_its_tied_head_reads_the_other_dimension() -> None:
    tokens = torch.randint(0, 9, (2, 4))
    table = nn.Embedding(9, 6)
    found = observe(table, lambda: table(tokens))
    assert (found.looked_up, found.reads) == ({"weight"}, {"weight": 0})
    found = observe(table, lambda: functional.linear(table(tokens), table.weight))
    assert found.looked_up == {"weight"}


def test_gains_are_no_biases_and_biases_of_norms_are_additive() -> None:
    norm = nn.LayerNorm(6)
    assert seen(norm, torch.randn(2, 6)).additive == {"bias"}
    found = seen(Net(lambda n, x: (1 + n.g) * x + n.shift, g=(6,), shift=(6,)), torch.randn(2, 6))
    assert (found.additive, found.bias, found.reads) == ({"shift"}, {}, {})


def test_what_is_added_to_a_product_without_being_a_parameter_is_no_bias() -> None:
    net = Net(lambda n, x: x @ n.w + x.sum(-1, keepdim=True) + 1, w=IN_OUT)
    assert (seen(net, torch.randn(7, 6)).bias, seen(net, torch.randn(7, 6)).additive) == ({}, set())


def test_looking_changes_neither_results_nor_weights() -> None:
    net, x = mlp(torch.relu), torch.randn(4, 6)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    results: list[Tensor] = []
    observe(net, lambda: results.append(net(x)))
    assert torch.equal(results[0], net(x))
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


@pytest.mark.parametrize("name", ["linear", "addmm", "matmul", "left", "einsum", "bare"])
def test_one_network_has_one_pair_however_it_is_written(name: str) -> None:
    """Rows and bias of `up` against columns of `down`, in each of six layouts; with GELU (the control) none."""

    def rows_of(x: Tensor, up: Tensor) -> Tensor:
        return torch.einsum("bi,fi->bf", x, up)

    def network(activation: Callable[[Tensor], Tensor]) -> Net:
        written: dict[str, tuple[Call, bool]] = {
            "linear": (lambda n, x: functional.linear(activation(functional.linear(x, n.up, n.b)), n.down), False),
            "addmm": (lambda n, x: torch.addmm(n.end, activation(torch.addmm(n.b, x, n.up)), n.down), True),
            "matmul": (lambda n, x: torch.matmul(activation(torch.matmul(x, n.up) + n.b), n.down), True),
            "left": (lambda n, x: (n.down @ activation(n.up @ x.T + n.b[:, None])).T, False),
            "einsum": (lambda n, x: torch.einsum("of,bf->bo", n.down, activation(rows_of(x, n.up) + n.b)), False),
            "bare": (lambda n, x: activation(n.b + x @ n.up.T) @ n.down.T + n.end, False),
        }  # fmt: skip
        call, in_out = written[name]
        shapes = {"up": (9, 6), "down": (5, 9)}
        return Net(call, b=(9,), end=(5,), **{k: s[::-1] if in_out else s for k, s in shapes.items()})

    (pair,) = saggs.find_pairs(network(torch.relu), inputs=rows())
    assert (pair.kind, pair.signs) == ("up_down", "positive")
    assert [(s.name, s.exponent, s.bias) for s in pair.slices] == [
        ("up", 1, False),
        ("b", 1, True),
        ("down", -1, False),
    ]
    assert saggs.find_pairs(network(functional.gelu), inputs=rows()) == []


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_the_attention_that_torch_ships_has_both_its_pairs(bias: bool) -> None:
    layer = nn.MultiheadAttention(8, 2, bias=bias, batch_first=True)
    net = Net(lambda n, x: n.attention(x, x, x, need_weights=False)[0], attention=layer)
    found = saggs.find_pairs(net, inputs=sequences(8), granularity="head")
    assert [pair.kind for pair in found] == ["query_key", "query_key", "value_output", "value_output"]


def test_convolutions_scale_channel_by_channel() -> None:
    net = Net(lambda n, x: n.second(torch.relu(n.first(x))), first=nn.Conv1d(8, 5, 3), second=nn.Conv1d(5, 4, 2))
    (pair,) = saggs.find_pairs(net, inputs=sequences())
    assert pair.kind == "up_down"
    assert [str(s) for s in pair.slices] == ["first.weight", "first.bias", "second.weight"]
    assert len(saggs.find_pairs(net, inputs=sequences(), granularity="channel")) == 5
