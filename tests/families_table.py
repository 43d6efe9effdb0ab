"""What `find_pairs` finds in every family, compared with the pairs written by hand, and as a table for the page.

`python tests/families_table.py --write` renders the table anew, between the markers in docs/symmetries.md.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from expected_pairs import SIZES, Pair, Part, Sizes
from families import FAMILIES, Family
from odd_models import ODD
from torch import nn

import saggs
from saggs import ParameterSlice, ScalePair
from saggs.assembly import GRANULARITIES, Granularity
from saggs.pairs import KINDS, named_parameters

MODELS: dict[str, Family] = {**FAMILIES, **ODD}
PAGE = Path(__file__).resolve().parents[1] / "docs" / "symmetries.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"

# Queries and keys that are normalised and rotated, as many heads of each: nothing tells which of the gains is whose.
EITHER_WAY = ("carousel", "query_key_gain")

# (parameter, exponent, offset, bias, cells): the cells are flat numbers, each as often as the side multiplies it.
Block = tuple[str, int, int, bool, tuple[int, ...]]


@dataclass(frozen=True)
class Form:
    """A pair without the accidents of writing it: which cells go to which power."""

    kind: str
    signs: str
    left: frozenset[Block]
    right: frozenset[Block]

    def swapped(self) -> Form:
        """The same pair under the inverse factor."""
        left, right = (
            frozenset((name, -exponent, *rest) for name, exponent, *rest in side) for side in (self.left, self.right)
        )
        return Form(self.kind, self.signs, right, left)  # type: ignore[arg-type]


def form(pair: Pair | ScalePair, shapes: dict[str, torch.Size]) -> Form:
    """The canonical form of a pair, found or written by hand."""
    return Form(pair.kind, pair.signs, _side(pair.left, shapes), _side(pair.right, shapes))


def _side(parts: Iterable[Part | ParameterSlice], shapes: dict[str, torch.Size]) -> frozenset[Block]:
    cells: dict[tuple[str, int, int, bool], list[int]] = {}
    for part in parts:
        numbers = torch.arange(shapes[part.name].numel()).reshape(shapes[part.name])
        chosen = numbers[tuple(slice(None) if r is None else slice(*r) for r in part.ranges)]
        key = part.name, part.exponent, part.offset, part.bias
        cells.setdefault(key, []).extend(chosen.flatten().tolist())
    return frozenset((*key, tuple(sorted(numbers))) for key, numbers in cells.items())


def differences(
    model: nn.Module,
    found: Sequence[Pair | ScalePair],
    wanted: Sequence[Pair | ScalePair],
    either_way: Sequence[str] = (),
) -> list[str]:
    """What is missing, too much or found twice; of kinds in `either_way` a pair with swapped sides is the same."""
    shapes = {name: p.shape for name, p in named_parameters(model).items()}

    def settled(pair: Pair | ScalePair) -> Form:
        one = form(pair, shapes)
        return min(one, one.swapped(), key=lambda f: sorted(f.left)) if one.kind in either_way else one

    have, want = Counter(map(settled, found)), Counter(map(settled, wanted))
    return [f"{n} x {what}: {_short(f)}" for what, more in (("missing", want - have), ("too much", have - want))
            for f, n in more.items()]  # fmt: skip


def _short(one: Form) -> str:
    def side(blocks: frozenset[Block]) -> str:
        return ", ".join(f"{name}^{exponent} ({len(cells)} cells)" for name, exponent, _, _, cells in sorted(blocks))

    return f"{one.kind} ({one.signs}) {side(one.left)} | {side(one.right)}"


def either_way(name: str) -> Sequence[str]:
    """The kinds of a family whose two sides are alike."""
    return [kind for family, kind in (EITHER_WAY,) if family == name]


@functools.cache
def built(name: str) -> nn.Module:
    """A family's model, once for all that only look at it."""
    return MODELS[name].build()


@functools.cache
def discovered(name: str, granularity: Granularity) -> tuple[ScalePair, ...]:
    """What `find_pairs` finds, once for all tests. A candidate that fails its certificate is an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        family = MODELS[name]
        pairs = saggs.find_pairs(built(name), granularity=granularity, inputs=family.inputs, output=family.output)
    return tuple(pairs)


# --- the table --------------------------------------------------------------------------------------------------------

TITLES = {
    "gpt2": "GPT-2", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi-3",
    "gemma2": "Gemma 2", "gemma3": "Gemma 3", "gpt_neox": "GPT-NeoX", "opt": "OPT",
    "opt_post_norm": "OPT, norms behind (350M)", "falcon_7b": "Falcon 7B", "falcon_40b": "Falcon 40B",
    "olmo2": "OLMo 2", "mixtral": "Mixtral", "deepseek_v3": "DeepSeek-V3", "t5": "T5", "t5_v1_1": "T5 v1.1",
    "bert": "BERT", "vit": "ViT", "whisper": "Whisper", "braid": "*Braid*", "quarry": "*Quarry*",
    "carousel": "*Carousel*",
}  # fmt: skip
HEADINGS = ("query–key", "value–output", "up–down", "norm gain", "query–key gain")


def render() -> str:
    """The table as Markdown. Residuals and controls are bounds in powers of ten, so that it is the same everywhere."""
    rows = [
        ("model", "layers, width, heads", *HEADINGS, "change", "control"),
        (":---", ":---", *("---:" for _ in HEADINGS), "---:", "---:"),
        *(_row(name) for name in MODELS),
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _row(name: str) -> tuple[str, ...]:
    found = [discovered(name, granularity) for granularity in GRANULARITIES]
    proofs = [p.certificate for pairs in found for p in pairs if p.certificate is not None]
    counts = []
    for kind in KINDS:
        numbers = [sum(pair.kind == kind for pair in pairs) for pairs in found]
        counts.append(" / ".join(map(str, numbers)) if any(numbers) else "–")
    largest, smallest = max(p.residual for p in proofs), min(p.control for p in proofs)
    bounds = f"≤ 1e{_at_most(largest)}", f"≥ 1e{math.floor(math.log10(smallest))}"
    return TITLES[name], _shape(SIZES[name]), *counts, *bounds


def _at_most(residual: float) -> int:
    """A power of ten with room for the rounding of another machine: 1e-13 stands for anything up to 2e-14."""
    return max(-13, math.ceil(math.log10(5 * residual)))


def _shape(s: Sizes) -> str:
    heads = f"{s.heads}" if s.heads == s.groups else f"{s.heads} on {s.groups}"
    experts = f", {s.experts} experts" if s.experts else ""
    return f"{s.layers}, {s.width}, {heads} × {s.size}{experts}"


def table_of(page: str) -> str:
    """What stands between the markers of a page."""
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def with_table(page: str, table: str) -> str:
    """The page with this table between its markers."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    fresh = render()
    if "--write" in sys.argv[1:]:
        PAGE.write_text(with_table(PAGE.read_text(), fresh))
    else:
        print(fresh)
