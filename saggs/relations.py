"""Relations among scale charges: every way to stretch some lines and shrink others that changes no output.

The idea
--------
`saggs.charges` gives a table of numbers, one column a line of weights. Where Σ a_i q_i = 0 in every row of the table,
multiplying line i by c^(a_i) changes no output, for any c > 0. The solutions a are the null space of the table, and the
whole numbers in a sparse basis of it are the exponents. Most solutions have one of three shapes, and those are found at
any width, with a dozen probes, by looking for equal columns:

    two equal lines     q[i] = k[i]                          a channel of attention without rotary positions,
                        up[i] = p · down[i]                  a neuron; ReLU² has p = 2,
    equal sums (combs)  Σ_h v-reader o[h, t] = v[t]          a value channel read by the heads of its group,
                        Σ_h (q[h, i] + q[h, i + o]) = k[i] + k[i + o]
                                                             a rotary frequency: two channels that turn together,
    aligned families    gain[j] (+ bias[j]) = Σ_m W_m[:, j]  a norm's gain and the columns of all its readers,
                        the same coefficients for every j.

What a shape explains, the null space of a small model counts (`saggs.nullspace`): nothing may be left over.

A worked example, the network of `saggs.charges` with ReLU²: stretching a neuron's row by c stretches its activation by
c², so its column must shrink by c². The exponents come out as numbers, not from a rule about ReLU².

    >>> import torch
    >>> from torch import nn
    >>> from saggs.charges import scale_charges
    >>> class Squared(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up, self.down = nn.Linear(2, 3), nn.Linear(3, 2)
    ...     def forward(self, x):
    ...         return self.down(torch.relu(self.up(x)) ** 2)
    >>> def inputs(generator, count):
    ...     return {"x": torch.randn(count, 2, generator=generator)}
    >>> (neurons,) = find_relations(scale_charges(Squared(), inputs=inputs))
    >>> for side in neurons.sides:
    ...     print(side.lines.name, side.lines.role, side.index.flatten().tolist(), "exponent", side.exponent)
    up.weight out [0, 1, 2] exponent 1
    down.weight in [0, 1, 2] exponent -2
    >>> neurons.residual < 1e-12
    True

Off-diagonal charges <a, dL/db> of two lines a, b tell which lines may also be *mixed*: values and their readers by any
invertible matrix within a head (so heads show as blocks), the neurons of an MLP not at all. That tells a value-output
pair from an MLP's, and delimits heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from saggs.charges import ChargeTable, Lines
from saggs.combs import find_equal_sums
from saggs.ledger import EXACT, Relation, Relations, Side, admit, crosses

_LARGEST_EXPONENT = 8
_FAINT = 1e-7  # of the largest charge: below it, rounding hides whether two lines are equal


def find_relations(table: ChargeTable, summed: Callable[[Lines], bool] | None = None) -> Relations:
    """Every relation of the three shapes among the charges of a table, finest first.

    Args:
        table: from `saggs.charges.scale_charges`.
        summed: which families may take part in sums of lines; all where None.
    """
    found = Relations(table)
    _aligned_families(found)
    _equal_lines(found)
    find_equal_sums(found, summed or (lambda lines: True))
    return found


# --- aligned families -------------------------------------------------------------------------------------------------


def _aligned_families(found: Relations) -> None:
    """Relations with the same coefficients for every line: Σ_m a_m q_m[j] = 0 for all j. They explain norm gains."""
    by_length: dict[int, list[int]] = {}
    for family, lines in enumerate(found.lines):
        if lines.role != "out" and lines.count > 0 and _marginal_count(lines) > 0:
            by_length.setdefault(_marginal_count(lines), []).append(family)
    for length, families in by_length.items():
        alive = [f for f in families if bool(found.exercised[f].all())]
        equations = len(found.charges[0]) * length
        if not any(found.lines[f].role == "entry" for f in alive) or equations < len(alive) + 8:
            continue  # with too few equations anything is a solution
        columns = torch.stack([_marginal(found.lines[f], found.charges[f]).flatten() for f in alive], dim=1)
        for vector in integer_null_vectors(columns):
            chosen = [i for i in range(len(alive)) if vector[i]]
            gains = [i for i in chosen if found.lines[alive[i]].role == "entry"]
            names = [found.lines[alive[i]].name for i in chosen]
            if not gains or len({vector[i] > 0 for i in chosen}) < 2 or len(set(names)) < len(names):
                continue
            sign = 1 if vector[gains[0]] > 0 else -1
            exponents = [(alive[i], sign * vector[i]) for i in chosen]
            exponents.sort(key=lambda e: (e[1] < 0, e[0]))
            sides = [Side(found.lines[f], _marginal_index(found.lines[f]), a) for f, a in exponents]
            residual = found.residual_of((f, s.index, s.exponent) for (f, _), s in zip(exponents, sides, strict=True))
            if unseen := _unseen_readers(found, families, names):
                gain = names[chosen.index(gains[0])]
                found.doubts.append(
                    f"norm_gain of {gain}: no probe reached {unseen[0]}, which may read it; pass inputs= that do"
                )
                for family, lines in enumerate(found.lines):  # nor is it to be paired line by line
                    if lines.name == gain:
                        found.explained[family][:] = True
                continue
            found.admit(Relation(tuple(sides), float(residual.max()), "aligned"))


def _unseen_readers(found: Relations, families: Sequence[int], names: Sequence[str]) -> list[str]:
    """Matrices of the right size near these parameters, none of whose use was seen on any probe."""
    levels = zip(*(name.split(".") for name in names), strict=False)
    near = [level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels)]
    return [
        found.lines[f].name
        for f in families
        if found.lines[f].role == "in"
        and not bool(found.exercised[f].all())
        and found.lines[f].name not in found.wiring.looked_up
        and found.lines[f].name.split(".")[: len(near)] == near
    ]


def _marginal_count(lines: Lines) -> int:
    """The size of the last numbered dimension: a stack of matrices is read by one input together."""
    return lines.shape[lines.dims[-1]] if lines.dims else 1


def _marginal(lines: Lines, charges: Tensor) -> Tensor:
    return charges.reshape(len(charges), -1, _marginal_count(lines)).sum(dim=1)


def _marginal_index(lines: Lines) -> Tensor:
    return torch.arange(lines.count).reshape(-1, _marginal_count(lines)).T.contiguous()


def integer_null_vectors(columns: Tensor) -> list[list[int]]:
    """A sparse basis in small whole numbers of the null space of `columns`, shape (equations, unknowns).

    Vectors that are no multiple of whole numbers up to 8 are left out. Columns may be of very different sizes.
    """
    sizes = columns.norm(dim=0)
    if columns.shape[1] == 0 or not bool((sizes > 0).all()):
        return []
    triangle = torch.linalg.qr(columns / sizes, mode="r").R
    _, values, right = torch.linalg.svd(triangle)
    rank = int((values > EXACT * values[0]).sum())
    if rank == len(right):
        return []
    basis = _echelon(right[rank:]) / sizes
    return [whole for vector in basis if (whole := _whole_numbers(vector)) is not None]


def _echelon(basis: Tensor) -> Tensor:
    """Reduced echelon form with the largest entry of the whole as pivot: disjoint solutions come out one by one."""
    basis = basis.clone()
    rest = list(range(len(basis)))
    for _ in range(len(basis)):
        row, column = divmod(int(basis[rest].abs().argmax()), basis.shape[1])
        pivot = rest.pop(row)
        basis[pivot] = basis[pivot] / basis[pivot, column].clone()
        others = [i for i in range(len(basis)) if i != pivot]
        basis[others] -= basis[others, column, None] * basis[pivot]
    return basis


def _whole_numbers(vector: Tensor, tolerance: float = 1e-6) -> list[int] | None:
    """The vector times the smallest factor that makes all entries whole and at most 8; None where none does."""
    size = vector.abs().max()
    kept = torch.where(vector.abs() > tolerance * size, vector, torch.zeros_like(vector))
    smallest = kept.abs()[kept != 0].min()
    for factor in range(1, _LARGEST_EXPONENT + 1):
        scaled = kept / smallest * factor
        whole = scaled.round()
        if bool(((scaled - whole).abs() < tolerance * factor * 10).all()) and whole.abs().max() <= _LARGEST_EXPONENT:
            return [int(v) for v in whole.tolist()]
    return None


# --- two equal lines --------------------------------------------------------------------------------------------------


def _equal_lines(found: Relations) -> None:
    """Lines whose charges are proportional on every probe: hashed, so that the work is that of sorting them."""
    # Biases ride with their rows: for a neuron that is active on one token alone they would look like one more line.
    free = [found.free(f) & (lines.name not in found.wiring.additive) for f, lines in enumerate(found.lines)]
    family, line = _numbered(free)
    if not len(line):
        return
    charges = torch.cat([found.charges[f][:, mask] for f, mask in enumerate(free)], dim=1).T
    norms = charges.norm(dim=1)
    label = _clusters(charges / norms[:, None])
    order = torch.argsort(label, stable=True)
    pairs: dict[tuple[int, int, int, int, bool], list[tuple[int, int]]] = {}
    for members in _runs(label[order]):
        chain = order[members[0] : members[1]].tolist()
        if len(chain) > 2 and len({int(family[m]) for m in chain}) == 1:
            continue
        for a, b in itertools.pairwise(chain):
            ratio = Fraction(float(norms[a] / norms[b])).limit_denominator(_LARGEST_EXPONENT)
            if abs(float(ratio) - float(norms[a] / norms[b])) > 1e-6 or ratio.numerator > _LARGEST_EXPONENT:
                continue
            # a · q_a = b · q_b with q_a / q_b = ratio
            key = (int(family[a]), int(family[b]), ratio.denominator, ratio.numerator, len(chain) > 2)
            pairs.setdefault(key, []).append((int(line[a]), int(line[b])))
    for (first, second, p, q, chained), matches in pairs.items():
        if found.lines[first].role == "in" and found.lines[second].role != "in":
            first, second, p, q, matches = second, first, q, p, [(b, a) for a, b in matches]
        if crosses(found.lines[first], found.lines[second]):
            continue
        index = _with_unreached(found, first, second, torch.tensor(sorted(matches)))
        sides = ((first, index[:, :1], p), (second, index[:, 1:], -q))
        faint = (found.norms[first][index[:, 0]] <= _FAINT) & (found.norms[second][index[:, 1]] <= _FAINT)
        good = (found.residual_of(sides) <= EXACT) | faint
        if bool(good.any()):
            admit(found, [(f, i[good], a) for f, i, a in sides], "chain" if chained else "lines")


def _with_unreached(found: Relations, first: int, second: int, index: Tensor) -> Tensor:
    """With the few lines between the matched ones that hardly a probe reached on either side: neurons that sleep.

    They are what their neighbours are, or certification will say so.
    """
    shift = index[:, 1] - index[:, 0]
    if bool((shift != shift[0]).any()) or 10 * len(index) < 9 * int(index[-1, 0] - index[0, 0] + 1):
        return index
    one, two = (found.norms[f] > _FAINT for f in (first, second))
    own = torch.arange(max(0, -int(shift[0])), min(len(one), len(two) - int(shift[0])))
    dead = own[~one[own] & ~two[own + shift[0]]]
    both = torch.cat([index, torch.stack([dead, dead + shift[0]], dim=1)])
    return both[torch.argsort(both[:, 0])]


def _numbered(masks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(family, line) of every marked line, families in order."""
    lines = [mask.nonzero().flatten() for mask in masks]
    return torch.cat([torch.full_like(line, f) for f, line in enumerate(lines)]), torch.cat(lines)


def _clusters(vectors: Tensor) -> Tensor:
    """A label for each row of `vectors`; rows within 1e-8 of each other have the same one. Sorts three projections."""
    generator = torch.Generator().manual_seed(1)
    label = torch.zeros(len(vectors), dtype=torch.int64)
    for _ in range(3):
        key = vectors @ torch.randn(vectors.shape[1], generator=generator, dtype=vectors.dtype)
        order = torch.argsort(key, stable=True)
        order = order[torch.argsort(label[order], stable=True)]
        fresh = (key[order].diff() > 1e-8) | (label[order].diff() != 0)
        label = torch.empty_like(label).scatter_(0, order, torch.cat([fresh.new_zeros(1), fresh]).cumsum(0))
    return label


def _runs(sorted_labels: Tensor) -> list[tuple[int, int]]:
    """(start, stop) of every run of equal labels that is longer than one."""
    edges = torch.cat([torch.ones(1, dtype=torch.bool), sorted_labels.diff() != 0, torch.ones(1, dtype=torch.bool)])
    bounds = edges.nonzero().flatten()
    wide = bounds.diff() > 1
    return list(zip(bounds[:-1][wide].tolist(), bounds[1:][wide].tolist(), strict=True))


__all__ = ["find_relations", "integer_null_vectors"]
