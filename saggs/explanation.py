"""Why a matrix is in a pair, or in none: one line for what it makes and one for what it reads.

The answer is measured, not looked up. A side without a pair is one of these:

    tied            the tensor has another use, whose charges are added to this one's
    scale-free      a norm divides its scale out, up to the norm's eps: approximate, with the size of the change
    near miss       the nearest partner's charges differ by so much: what lies between is not homogeneous (GELU, a
                    gate), or something else reads the same values (the residual stream behind a post-norm)
    no partner      nothing scales along: it writes into the residual stream, or reads from it
    unknown         no probe reached it (an expert without tokens, an unused embedding), or it is quantised
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from saggs.charges import Probing, charges_of
from saggs.inputs import Inputs, Output
from saggs.kinds import Generators
from saggs.ledger import Relations
from saggs.lifting import NARROW, analyse
from saggs.pairs import canonical_names, named_parameters, unwrap
from saggs.relations import find_relations
from saggs.twin import indexless, small_twin

_PROBES_PER_DRAW = 40
_FAR = 0.5
_FREE = 1e-2
_FACTOR = 1.5
_SOME = 8


@dataclass(frozen=True)
class Reason:
    """Where one side of a parameter stands.

    Attributes:
        name: the parameter.
        side: "makes" (rows: its outputs), "reads" (columns: its inputs), or "gain".
        pairs: kinds of the pairs that it is part of.
        why: why in none; empty where it is in one.
    """

    name: str
    side: str
    pairs: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Explanation:
    """A reason for every side of every matrix and for every gain, in the order of the model."""

    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        rows = [("parameter", "side", "pair, or why in none")]
        rows += [(r.name, r.side, ", ".join(r.pairs) or f"— {r.why}") for r in self.reasons]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        return "\n".join(f"{a.ljust(widths[0])}  {b.ljust(widths[1])}  {c}" for a, b, c in rows)

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values."""
        return [asdict(reason) for reason in self.reasons]


def explain(model: nn.Module, inputs: Inputs | None = None, output: Output | None = None) -> Explanation:
    """For every matrix and gain of a model: in which kinds of pairs it is, or why in none.

    Args:
        model: any module; it is not changed.
        inputs: callable (generator, count) -> keyword arguments; random tokens for a causal language model.
        output: callable (result) -> tensor; the logits by default.

    Raises:
        ValueError: a model that cannot be run.
    """
    source = unwrap(model)
    if quantised := [n for n, p in source.named_parameters() if not p.is_floating_point()]:
        return Explanation(tuple(Reason(name, "makes", (), _of_quantised(name, quantised)) for name in _all(source)))
    analysis = analyse(source, inputs, output)
    held = _sides_in_pairs(analysis.generators)
    reference = _Reference(source, inputs, output)
    uses = _uses(source)
    reasons = []
    for name, parameter in named_parameters(source).items():
        for role, side in _ROLES:
            if not reference.has(name, role):
                continue
            pairs = tuple(sorted(held.get((name, role), ())))
            why = "" if pairs else reference.why(name, role, uses[name], parameter)
            reasons.append(Reason(name, side, pairs, why))
    return Explanation(tuple(reasons))


_ROLES = (("out", "makes"), ("in", "reads"), ("entry", "gain"))


def _all(model: nn.Module) -> Iterable[str]:
    return named_parameters(model)


def _of_quantised(name: str, quantised: list[str]) -> str:
    if name in quantised:
        return "unknown: quantised weights have no float64 copy that runs; ask before quantising"
    return f"unknown: the model holds quantised weights ({quantised[0]})"


def _sides_in_pairs(generators: Iterable[Generators]) -> dict[tuple[str, str], set[str]]:
    held: dict[tuple[str, str], set[str]] = {}
    for g in generators:
        for side in g.relation.sides:
            held.setdefault((side.lines.name, side.lines.role), set()).add(g.kind)
    return held


def _uses(model: nn.Module) -> dict[str, list[str]]:
    uses: dict[str, list[str]] = {}
    for alias, name in canonical_names(model).items():
        uses.setdefault(name, []).append(alias)
    return uses


class _Reference:
    """The model, or its narrow twin, with enough probes to tell a near miss from chance."""

    def __init__(self, model: nn.Module, inputs: Inputs | None, output: Output | None) -> None:
        small = sum(p.numel() for p in model.parameters()) <= NARROW
        twin = None if small else small_twin(model, inputs, output)
        self._measured = model if twin is None else twin
        probing = Probing(self._measured, inputs, output)
        self._found: Relations = find_relations(
            charges_of(probing, _PROBES_PER_DRAW, batched=True), lambda lines: False
        )
        self._indexless = twin is not None
        self._names: dict[str, list[int]] = {}
        additive = {self._key(n) for n in probing.wiring.additive}
        for f, lines in enumerate(self._found.lines):
            if not (lines.role == "entry" and (lines.offset or self._key(lines.name) in additive)):
                self._names.setdefault(self._key(lines.name), []).append(f)
        charges = torch.cat(self._found.charges, dim=1).T
        self._directions = charges / charges.norm(dim=1, keepdim=True).clamp_min(1e-300)
        self._owner = [f for f, lines in enumerate(self._found.lines) for _ in range(lines.count)]
        self._start = torch.tensor([0, *(lines.count for lines in self._found.lines)]).cumsum(0)
        self._trial = _Free(self._measured, inputs, output)

    def _key(self, name: str) -> str:
        return indexless(name) if self._indexless else name

    def has(self, name: str, role: str) -> bool:
        """Whether the parameter has lines of this role; biases have none of their own."""
        return any(self._found.lines[f].role == role for f in self._names.get(self._key(name), ()))

    def why(self, name: str, role: str, uses: list[str], parameter: nn.Parameter) -> str:
        """Why this side is in no pair."""
        families = [f for f in self._names[self._key(name)] if self._found.lines[f].role == role]
        family = families[-1]  # of a twin's blocks, the last
        if not bool(self._found.exercised[family].any()):
            return "unknown: no probe reached it"
        if len(uses) > 1:
            return f"tied: it is {' and '.join(uses)} at once; what scales the one use breaks the other"
        if (change := self._trial.change_if_free(self._found.lines[family].name)) is not None:
            return f"scale-free: a norm divides its scale out, up to the norm's eps (approximate: {change:.0e})"
        partner, off = self._nearest(family)
        if partner is None or off > _FAR:
            return {
                "out": "no partner: it writes into the residual stream, or through a function that is not homogeneous",
                "in": "no partner: it reads the residual stream, or a function that is not homogeneous",
                "entry": "no partner: what it scales has a reader that cannot scale back (a tied head, the residual "
                "stream behind a post-norm), or is divided out",
            }[role]
        if self._indexless:  # a block of the twin stands for this parameter's own
            numbers = iter(re.findall(r"(?<=\.)\d+(?=\.)", name))
            partner = re.sub("#", lambda _: next(numbers, "#"), indexless(partner))
        return (
            f"near miss: {partner} differs by {off:.1e}; what lies between is not homogeneous (GELU, a gate), or has "
            "another reader"
        )

    def _nearest(self, family: int) -> tuple[str | None, float]:
        """The parameter whose lines come nearest to being proportional, and by how much they miss."""
        lines = slice(int(self._start[family]), int(self._start[family]) + _SOME)
        own = self._found.lines[family].name
        alike = (self._directions[lines] @ self._directions.T).clamp(-1, 1)
        usable = {f for families in self._names.values() for f in families}
        others = torch.tensor([f in usable and self._found.lines[f].name != own for f in self._owner])
        alive = torch.cat(self._found.exercised)
        alike[:, ~(others & alive)] = -1
        best, place = alike.max(dim=1)
        miss = float(torch.sqrt((1 - best.square()).clamp_min(0)).median())
        counts = torch.bincount(torch.tensor([self._owner[int(i)] for i in place]))
        return self._found.lines[int(counts.argmax())].name, miss


class _Free:
    """What scaling one whole parameter changes, at the weights of the model and at its own eps.

    It is free where that is next to nothing beside what scaling every other entry changes.
    """

    def __init__(self, model: nn.Module, inputs: Inputs | None, output: Output | None) -> None:
        self._probing = Probing(model, inputs, output, samples=2, keep_eps=True)
        weights = named_parameters(model)
        with torch.no_grad():
            for name, parameter in self._probing.parameters.items():
                parameter.copy_(weights[name])
            self._before = self._probing.run()
        self._known: dict[str, float | None] = {}

    def change_if_free(self, name: str) -> float | None:
        """The change relative to the largest output; None where the parameter's scale matters."""
        if name not in self._known:
            whole = self._measure(self._probing.parameters, name, 1)
            free = whole < _FREE * self._measure(self._probing.parameters, name, 2)
            self._known[name] = whole if free else None
        return self._known[name]

    def _measure(self, parameters: Mapping[str, nn.Parameter], name: str, step: int) -> float:
        moved = [parameters[n] for n in (name, self._probing.wiring.bias.get(name)) if n is not None]
        kept: list[Tensor] = copy.deepcopy([p.detach() for p in moved])
        with torch.no_grad():
            for parameter in moved:
                parameter.view(-1)[::step].mul_(_FACTOR)
            after = self._probing.run()
            for parameter, before in zip(moved, kept, strict=True):
                parameter.copy_(before)
        return float((after - self._before).abs().max() / self._before.abs().max().clamp_min(1e-300))


__all__ = ["Explanation", "Reason", "explain"]
