"""Balancing from sums of cells is balancing, however slices cut a tensor and whatever they share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from saggs import ParameterSlice, ScalePair
from saggs.checkpoints.cells import CellPlan, scale_rows
from saggs.checkpoints.shards import CheckpointError


def part(name: str, *ranges: tuple[int, int] | None, exponent: int = 1, **more: int) -> ParameterSlice:
    return ParameterSlice(name, ranges, exponent, **more)  # type: ignore[arg-type]


def pair(left: list[ParameterSlice], right: list[ParameterSlice], kind: str = "up_down") -> ScalePair:
    return ScalePair(kind, "", tuple(left), tuple(right))  # type: ignore[arg-type]


def drawn(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(shape, generator=generator, dtype=torch.float64) for n, shape in shapes.items()}


def plan_of(pairs: list[ScalePair], weights: dict[str, Tensor]) -> CellPlan:
    return CellPlan(pairs, {name: tuple(tensor.shape) for name, tensor in weights.items()})


def sums_of(plan: CellPlan, weights: dict[str, Tensor], order: int, rows: int = 3) -> Tensor:
    sums = plan.new_sums()
    for name, grid in plan.grids.items():
        tensor = weights[name]
        if tensor.dim() == 0:
            grid.add_sums(tensor, 0, order, sums)
        for first in range(0, len(tensor) if tensor.dim() else 0, rows):
            grid.add_sums(tensor[first : first + rows], first, order, sums)
    return sums


def factors_of(pairs: list[ScalePair], weights: dict[str, Tensor], order: int = 2) -> Tensor:
    plan = plan_of(pairs, weights)
    none = torch.zeros(len(pairs), dtype=torch.bool)
    found = plan.balance(sums_of(plan, weights, order), order, 1.0, none, torch.zeros(len(pairs), dtype=torch.float64))
    return found.factors


def applied(pairs: list[ScalePair], weights: dict[str, Tensor], factors: Tensor) -> dict[str, Tensor]:
    """Literally: one slice after the other."""
    result = {name: tensor.clone() for name, tensor in weights.items()}
    for one, factor in zip(pairs, factors.tolist(), strict=True):
        for piece in one.slices:
            view = piece.view(result[piece.name])
            view.add_(piece.offset).mul_(factor**piece.exponent).sub_(piece.offset)
    return result


def objective(pairs: list[ScalePair], weights: dict[str, Tensor], order: int) -> float:
    """Every entry that any pair holds, once, by its size as it is used."""
    held: dict[str, Tensor] = {}
    offsets = {piece.name: piece.offset for one in pairs for piece in one.slices}
    for one in pairs:
        for piece in one.slices:
            if not piece.bias:
                mask = held.setdefault(piece.name, torch.zeros_like(weights[piece.name]))
                piece.view(mask).fill_(1)
    return sum(float(((weights[n] + offsets[n]).abs() ** order * mask).sum()) for n, mask in held.items())


CASES = {
    "thirds of a fused matrix and its bias": [
        pair(
            [part("fused", None, (0, 4)), part("bias", (0, 4), bias=True)],
            [part("fused", None, (4, 8), exponent=-1), part("bias", (4, 8), bias=True, exponent=-1)],
        ),
        pair([part("fused", None, (8, 12))], [part("out", None, None, exponent=-1)]),
    ],
    "rows against columns": [
        pair([part("up", (i, i + 1), None)], [part("down", None, (i, i + 1), exponent=-1)]) for i in range(7)
    ],
    "two rows a channel, experts in three dimensions": [
        pair(
            [part("up", (i, i + 1), None), part("up", (i + 4, i + 5), None)],
            [part("expert", (1, 2), (i, i + 2), None, exponent=-2)],
        )
        for i in (0, 2)
    ],
    "a gain used as 1 + w": [pair([part("gain", (0, 3), offset=1)], [part("down", None, (0, 3), exponent=-1)])],
    "exponents mixed in a side": [
        pair([part("up", None, None), part("out", None, None, exponent=2)], [part("down", None, None, exponent=-1)])
    ],
}
SHARED = {
    "a gain, rows and columns": [
        pair([part("gain", None)], [part("up", None, None, exponent=-1)], "norm_gain"),
        pair([part("up", None, None)], [part("down", None, None, exponent=-1)]),
    ],
    "channels crossing in one tensor": [
        *(pair([part("gain", (j, j + 1))], [part("up", None, (j, j + 1), exponent=-1)], "norm_gain") for j in range(5)),
        *(pair([part("up", (i, i + 1), None)], [part("down", None, (i, i + 1), exponent=-1)]) for i in range(7)),
    ],
}


def weights_of() -> dict[str, Tensor]:
    return drawn(fused=(5, 12), bias=(12,), out=(6, 5), up=(7, 5), down=(6, 7), gain=(5,), expert=(3, 5, 4))


@pytest.mark.parametrize("order", [2, 1])
@pytest.mark.parametrize("name", [*CASES, *SHARED])
def test_factors_minimise_what_balancing_minimises(name: str, order: int) -> None:
    """At the found factors no single factor can be changed, up or down, without making the weights larger."""
    pairs, weights = (CASES | SHARED)[name], weights_of()
    factors = factors_of(pairs, weights, order)
    least = objective(pairs, applied(pairs, weights, factors), order)
    for index in range(len(pairs)):
        for change in (1.01, 1 / 1.01):
            moved = factors.clone()
            moved[index] *= change
            assert objective(pairs, applied(pairs, weights, moved), order) > least
    assert least < objective(pairs, weights, order)


@pytest.mark.parametrize(
    ("name", "degree"),
    [(n, d) for n in [*CASES, *SHARED] for d in (1, -1, -2) if d == 1 or "1 + w" not in n],  # states have no offset
)
def test_multipliers_are_what_slice_after_slice_gives(name: str, degree: int) -> None:
    """Also of a chunk of rows at a time, and of bits for powers of two."""
    pairs, weights = (CASES | SHARED)[name], weights_of()
    plan = plan_of(pairs, weights)
    factors = 2.0 ** torch.arange(-2, len(pairs) - 2, dtype=torch.float64)
    multipliers = plan.multipliers(factors, degree)
    wanted = applied(pairs, weights, factors**degree)
    for held, grid in plan.grids.items():
        result, expanded = weights[held].clone(), grid.expanded(multipliers)
        for first in range(0, len(result), 2):
            rows = result[first : first + 2]
            scale_rows(rows, grid.rows_of(expanded, first, len(rows)), grid.offset)
        assert torch.equal(result, wanted[held])


def test_pairs_that_share_nothing_need_no_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that do, do: the control."""
    monkeypatch.setattr("saggs.checkpoints.cells._SWEEPS", 0)
    for name, pairs in CASES.items():
        assert len(factors_of(pairs, weights_of())) == len(CASES[name])
    for pairs in SHARED.values():
        with pytest.raises(CheckpointError, match="did not settle in 0 sweeps"):
            factors_of(pairs, weights_of())


def test_crossing_channels_of_a_large_matrix_are_refused_by_name() -> None:
    shapes = {"up": (2000, 2000), "down": (2000, 2000), "gain": (2000,)}
    rows = [pair([part("up", (i, i + 1), None)], [part("down", None, (i, i + 1), exponent=-1)]) for i in range(2000)]
    gains = [pair([part("gain", (j, j + 1))], [part("up", None, (j, j + 1), exponent=-1)]) for j in range(2000)]
    for fitting in (rows, gains):
        assert CellPlan(fitting, shapes).cells < 10_000
    with pytest.raises(CheckpointError, match="up: the pairs cut it into 4000000 cells"):
        CellPlan(rows + gains, shapes)


def test_an_entry_held_twice_by_one_pair_is_refused() -> None:
    twice = pair([part("up", (0, 2), None), part("up", (1, 3), None)], [part("down", None, None, exponent=-1)])
    with pytest.raises(CheckpointError, match="holds an entry of a tensor twice"):
        plan_of([twice], weights_of())


def test_a_tensor_of_another_shape_is_refused() -> None:
    wrong = pair([ParameterSlice("up", (None, None), 1, shape=(9, 9))], [part("down", None, None, exponent=-1)])
    with pytest.raises(CheckpointError, match=r"up has shape \(7, 5\), the pair expects \(9, 9\)"):
        plan_of([wrong], weights_of())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_weight_is_rounded_once(dtype: torch.dtype) -> None:
    """Of the exact product, computed in float64; a factor rounded beforehand would miss it."""
    weights = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    factor = torch.tensor([[1.2345678901234]], dtype=torch.float64)
    wide = factor if dtype == torch.float32 else factor.float().double()
    wanted = (weights.double() * wide).to(dtype)
    rounded_factor = (weights.double() * factor.to(dtype).double()).to(dtype)
    scaled = weights.clone()
    scale_rows(scaled, factor, 0)
    assert torch.equal(scaled, wanted)
    assert not torch.equal(scaled, rounded_factor)
