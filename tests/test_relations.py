"""Equations between charges are read off as whole numbers, of every shape; what is not an equation is not read."""

from __future__ import annotations

import doctest
import math

import pytest
import torch
from families import FAMILIES
from small_models import Net, attended, mlp, rows, sequences
from torch import Tensor, nn

import saggs.relations
from saggs.charges import ChargeTable, Lines, scale_charges
from saggs.ledger import EXACT, Relation, Relations
from saggs.relations import find_relations, integer_null_vectors
from saggs.wiring import Wiring

PROBES = 12


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spans(vectors: list[list[int]], solutions: list[list[float]]) -> bool:
    """Whether both span the same space."""
    ranks = [int(torch.linalg.matrix_rank(torch.tensor(v, dtype=torch.float64)))
             for v in (vectors, solutions, [*vectors, *solutions])]  # fmt: skip
    return len(set(ranks)) == 1 and ranks[0] == len(vectors)


def test_the_explanations_run_as_they_stand() -> None:
    assert doctest.testmod(saggs.relations).attempted > 5
    assert doctest.testmod(saggs.relations).failed == 0


# Each column is a combination of independent ones; the solutions are those of Σ a_i column_i = 0.
A, B, C, D = noise(4, PROBES)
SOLVED: dict[str, tuple[list[Tensor], list[list[float]]]] = {
    "two equal": ([A, B, A], [[1, 0, -1]]),
    "ReLU²: twice the other": ([2 * A, A, B], [[1, -2, 0]]),
    "three to four": ([4 * A, 3 * A], [[3, -4]]),
    "a gain and two readers": ([A + B, A, B, C], [[1, -1, -1, 0]]),
    "a gain, its bias and three readers": ([A, B, C, D, A + B - C - D], [[1, 1, -1, -1, -1]]),
    "a chain of three": ([A, A, A, B], [[1, -1, 0, 0], [0, 1, -1, 0]]),
    "a chain of four with powers": ([A, 2 * A, A, 4 * A], [[2, -1, 0, 0], [1, 0, -1, 0], [4, 0, 0, -1]]),
    "two at once": ([A, B, B, A + C, C], [[0, 1, -1, 0, 0], [1, 0, 0, -1, 1]]),
    "of very different sizes": ([1e6 * A, 1e6 * A + 1e-3 * B, 1e-3 * B], [[1, -1, 1]]),
}


@pytest.mark.parametrize("name", SOLVED)
def test_whole_solutions_are_found(name: str) -> None:
    columns, solutions = SOLVED[name]
    found = integer_null_vectors(torch.stack(columns, dim=1))
    assert spans(found, solutions)
    assert all(math.gcd(*vector) == 1 for vector in found)


@pytest.mark.parametrize(
    "columns",
    [
        [A, B, C],
        [A, math.pi * A],
        [A, 9 * A],
        [A, A + 1e-6 * B],
        [A, torch.zeros(PROBES, dtype=torch.float64)],
        [],
    ],
    ids=["independent", "no whole ratio", "ratio above eight", "nearly equal", "a dead column", "nothing"],
)
def test_what_has_no_whole_solution_has_none(columns: list[Tensor]) -> None:
    stacked = torch.stack(columns, dim=1) if columns else torch.zeros(PROBES, 0, dtype=torch.float64)
    assert integer_null_vectors(stacked) == []


@pytest.mark.parametrize("seed", range(8))
def test_sparse_solutions_among_random_columns_are_found(seed: int) -> None:
    """Three planted equations of random whole coefficients among twelve columns; with one column shaken, two."""
    generator = torch.Generator().manual_seed(seed)
    free = noise(9, 40, seed=seed)
    planted, columns = [], list(free)
    for i in range(3):
        members = free[3 * i : 3 * i + 3]
        weights = torch.randint(1, 4, (3,), generator=generator).double()
        columns.append((weights[:, None] * members).sum(0))
        planted.append([0.0] * (3 * i) + weights.tolist() + [0.0] * (6 - 3 * i) + [-float(j == i) for j in range(3)])
    assert spans(integer_null_vectors(torch.stack(columns, 1)), planted)
    columns[-1] = columns[-1] + 1e-5 * noise(40, seed=99)
    assert spans(integer_null_vectors(torch.stack(columns, 1)), planted[:2])


# --- shapes, on charges made by hand ----------------------------------------------------------------------------------


def table(**families: tuple[str, Tensor]) -> ChargeTable:
    """Charges by parameter: (role, numbers of shape (probes, lines))."""
    lines = []
    for name, (role, charges) in families.items():
        count = charges.shape[1]
        shape, dims = (
            ((count,), (0,)) if role == "entry" else ((count, 5), (0,)) if role == "out" else ((5, count), (1,))
        )
        lines.append(Lines(name, shape, dims, role))  # type: ignore[arg-type]
    return ChargeTable(tuple(lines), tuple(c for _, c in families.values()), Wiring())


def form(relation: Relation) -> dict[str, tuple[int, list[list[int]]]]:
    return {s.lines.name: (s.exponent, s.index.tolist()) for s in relation.sides}


def test_equal_lines_are_found_in_any_order() -> None:
    """Seven neurons, their columns permuted, beside five lines that equal nothing."""
    q, order = noise(PROBES, 7), [3, 0, 6, 1, 5, 2, 4]
    up = torch.cat([q, noise(PROBES, 5, seed=1)], 1)
    (found,) = find_relations(table(up=("out", up), down=("in", q[:, order])))
    assert form(found) == {"up": (1, [[i] for i in range(7)]), "down": (-1, [[order.index(i)] for i in range(7)])}


@pytest.mark.parametrize(("p", "q"), [(1, 1), (1, 2), (1, 3), (2, 3), (1, 8)])
def test_proportional_lines_have_their_exponents(p: int, q: int) -> None:
    """p up = q down, as for a power of ReLU; two or three more neurons do not confuse it."""
    down = noise(PROBES, 4)
    (found,) = find_relations(table(up=("out", q / p * down), down=("in", down)))
    assert [s.exponent for s in found.sides] == [p, -q]


@pytest.mark.parametrize("disturbed", [0.0, 1e-7, 1e-3])
def test_nearly_equal_lines_are_no_relation(disturbed: float) -> None:
    """What a norm's eps of 0.01 leaves is 1e-4 and more; 1e-7 is not exact either."""
    q = noise(PROBES, 4)
    found = find_relations(table(up=("out", q), down=("in", q * (1 + disturbed * noise(PROBES, 4, seed=2)))))
    assert len(found) == (0 if disturbed else 1)
    assert all(bool(mask.all()) == (not disturbed) for mask in found.explained)


def test_dead_lines_take_part_in_nothing() -> None:
    """Two lines that no probe reaches are equal, and that says nothing."""
    q = noise(PROBES, 4)
    q[:, 2] = 0
    (found,) = (relations_ := find_relations(table(up=("out", q), down=("in", q))))
    assert form(found)["up"] == (1, [[0], [1], [3]])
    assert [mask.tolist() for mask in relations_.exercised] == [[True, True, False, True]] * 2


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_sums_over_the_heads_of_a_group_are_found_with_their_rotary_partners(heads: int, offset: int) -> None:
    """Two groups of `heads` heads of four channels: Σ_h (q[h, i] + q[h, i + o]) = k[i] + k[i + o]."""
    size, groups = 4, 2
    many = noise(PROBES, groups, heads, size)
    few = many.sum(2)
    if offset:  # only the sum over a rotary pair is the same
        partner = {1: [1, 0, 3, 2], 2: [2, 3, 0, 1]}[offset]
        shift = noise(PROBES, groups, size, seed=5)
        few = few + shift - shift[..., partner]
    found = find_relations(table(q=("out", many.flatten(1)), k=("out", few.flatten(1))))
    assert all(mask.all() for mask in found.explained)
    (comb,) = found
    assert (comb.heads, comb.offset, comb.count) == (heads, offset, groups * size // (2 if offset else 1))
    assert {s.lines.name: s.exponent for s in comb.sides} == {"q": 1, "k": -1}
    wrong = noise(PROBES, groups * size, seed=9)
    assert find_relations(table(q=("out", many.flatten(1)), k=("out", wrong))) == []


def test_gains_and_all_their_readers_are_one_relation_for_all_entries() -> None:
    """gain + bias = two readers, entry by entry; each of the four is needed."""
    first, second, bias = (noise(PROBES, 6, seed=s) for s in range(3))
    parts = {"gain": ("entry", first + second - bias), "bias": ("entry", bias), "a": ("in", first), "b": ("in", second)}
    (found,) = find_relations(table(**parts))
    whole = [[i] for i in range(6)]
    assert form(found) == {"gain": (1, whole), "bias": (1, whole), "a": (-1, whole), "b": (-1, whole)}
    for name in parts:
        assert find_relations(table(**{n: p for n, p in parts.items() if n != name})) == []


def test_rows_and_columns_of_one_matrix_are_never_a_pair() -> None:
    """Equal where one line alone is alive: the trivial relation, which moves nothing."""
    w = torch.zeros(PROBES, 4, dtype=torch.float64)
    w[:, 1] = noise(PROBES)
    sides = table(rows=("out", w), columns=("in", w))
    lines = (sides.lines[0], Lines("rows", (4, 4), (1,), "in"))
    assert find_relations(ChargeTable(lines, sides.charges, Wiring())) == []
    assert len(find_relations(sides)) == 1


def test_one_scale_a_probe_keeps_relations_and_lets_no_draw_drown_another() -> None:
    """A draw with charges of 1e12 does not hide that the others disagree."""
    q, other = noise(PROBES, 4), noise(PROBES, 4, seed=1)
    other[:4] = q[:4]
    size = torch.ones(PROBES, 1, dtype=torch.float64)
    size[:4] = 1e12
    assert find_relations(table(up=("out", q * size), down=("in", other * size))) == []
    assert len(find_relations(table(up=("out", q * size), down=("in", q * size)))) == 1


# --- on networks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("power", "exponents"), [(1, [1, -1]), (1.5, [2, -3]), (2, [1, -2]), (3, [1, -3])])
def test_the_exponents_of_a_power_of_relu_come_out_as_numbers(power: float, exponents: list[int]) -> None:
    (found,) = find_relations(scale_charges(mlp(lambda x: torch.relu(x) ** power), rows()))
    assert [s.exponent for s in found.sides] == exponents
    assert found.residual < 1e-12


def test_a_power_that_is_no_ratio_of_small_numbers_is_left_out() -> None:
    assert find_relations(scale_charges(mlp(lambda x: torch.relu(x) ** math.pi), rows())) == []


def test_three_linear_maps_in_a_product_are_a_chain() -> None:
    """down(up · gate): of three equal charges two equations are read, which span them."""
    net = Net(lambda n, x: n.down(n.up(x) * n.gate(x)), up=nn.Linear(6, 9), gate=nn.Linear(6, 9), down=nn.Linear(9, 5))
    found = find_relations(scale_charges(net, rows()))
    assert [r.count for r in found] == [9, 9]
    assert {s.lines.name for r in found for s in r.sides} == {"up.weight", "gate.weight", "down.weight"}


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3", "t5", "olmo2"])
def test_relations_of_a_family_lie_at_rounding_and_nothing_lies_between(name: str) -> None:
    """Residuals below 1e-11; and 1e-9 as the limit, which nothing comes near, separates them from all others."""
    family = FAMILIES[name]
    found = find_relations(scale_charges(family.build(), family.inputs, family.output))
    assert found
    assert max(relation.residual for relation in found) < 1e-11
    for relation in found:
        wrong = [(found.position(s.lines), s.index.roll(1, 0), s.exponent) if s is relation.sides[0]
                 else (found.position(s.lines), s.index, s.exponent) for s in relation.sides]  # fmt: skip
        assert relation.count == 1 or float(found.residual_of(wrong).min()) > 1e4 * EXACT


def test_attention_whose_heads_share_keys_is_a_comb() -> None:
    """Four query heads on two key heads of three channels, no rotary positions."""

    def forward(net: Net, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 3)).transpose(1, 2) for part in (net.q, net.k, net.v))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return net.o(attended(q, k, v).transpose(1, 2).flatten(2))

    sizes = {"q": (6, 12), "k": (6, 6), "v": (6, 6), "o": (12, 6)}
    net = Net(forward, **{name: nn.Linear(*size) for name, size in sizes.items()})
    found: Relations = find_relations(scale_charges(net, sequences()))
    assert [(r.shape, r.heads, r.stride, r.offset, r.count) for r in found] == [("comb", 2, 3, 0, 6)] * 2
    assert {s.lines.name for s in found[0].sides} | {s.lines.name for s in found[1].sides} == {
        f"{name}.weight" for name in sizes
    }
