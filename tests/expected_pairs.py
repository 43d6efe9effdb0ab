"""The exact scaling pairs of every model of `families.py` and `odd_models.py`, written by hand from their source code.

One function a model states what is exact, by the rules of `expected_rules.py`; what it does not state has no exact
scaling. `test_expectations.py` proves both by rescaling. Only the standard library is needed here.
"""

from __future__ import annotations

from collections.abc import Callable

import expected_families as library
from expected_layouts import SIZES, Sizes, fused, linear, separate
from expected_rules import Gain, Generator, Linear, Pair, Part, norm_gain, pairs, query_key_gain, starts, up_down

__all__ = ["SIZES", "Pair", "Part", "Sizes", "expected"]


def braid(s: Sizes) -> list[Generator]:
    """One matrix holds value, key, queries of each group; interleaved RoPE on the first channels; up | gate; 1 + w."""
    found = []
    share = s.heads // s.groups
    for i in range(s.layers):
        at = f"strands.{i}"
        skein = linear(f"{at}.plait.skein", (s.heads + 2 * s.groups) * s.size, s.width, bias=True)
        hem = linear(f"{at}.plait.hem", s.width, s.heads * s.size, bias=True)
        loom = linear(f"{at}.tuft.loom", 2 * s.neurons, s.width, bias=True)
        stride = (share + 2) * s.size
        values, keys = (starts(s.groups, stride, before * s.size) for before in (0, 1))
        queries = [first for g in range(s.groups) for first in starts(share, s.size, g * stride + 2 * s.size)]
        found += fused(skein, hem, s, (queries, keys, values), interleaved=True)
        found += up_down(loom, 0, linear(f"{at}.tuft.fringe", s.width, s.neurons, bias=True))
        found += norm_gain(Gain(f"{at}.zig.knot", s.width, offset=1), [skein])
        found += norm_gain(Gain(f"{at}.zag.knot", s.width, offset=1), [loom])
    return found + norm_gain(Gain("tassel.knot", s.width, offset=1), [linear("shears", s.vocabulary, s.width)])


def quarry(s: Sizes) -> list[Generator]:
    """Bare [in, out] matrices; no RoPE; one norm before attention and a squared ReLU side by side; untied head."""

    def bare(name: str, outs: int, ins: int) -> Linear:
        return Linear(name, outs, ins, f"{name}_dust", in_out=True)

    found = []
    inner = s.heads * s.size
    for i in range(s.layers):
        at = f"seams.{i}"
        q, k, v = (bare(f"{at}.{name}", inner, s.width) for name in ("flint", "slate", "chalk"))
        pick, shovel = bare(f"{at}.pick", s.neurons, s.width), bare(f"{at}.shovel", s.width, s.neurons)
        found += separate(q, k, v, bare(f"{at}.marl", s.width, inner), s)
        found += up_down(pick, 0, shovel, degree=2, signs="positive")
        found += norm_gain(Gain(f"{at}.grit", s.width, f"{at}.grit_dust"), [q, k, v, pick])
    scree = Linear("scree", s.vocabulary, s.width, in_out=True)
    return found + norm_gain(Gain("grit", s.width, "grit_dust"), [scree])


def carousel(s: Sizes) -> list[Generator]:
    """One block goes round three times, each time behind another norm: those three gains scale only together.

    Queries and keys are normalised head by head, so their gains scale; ReLU; untied head.
    """
    at = "horse"
    q = linear(f"{at}.mane", s.heads * s.size, s.width)
    k = linear(f"{at}.brass", s.groups * s.size, s.width)
    v = linear(f"{at}.saddle", s.groups * s.size, s.width, bias=True)
    pole = linear(f"{at}.pole", s.width, s.heads * s.size, bias=True)
    crank = linear(f"{at}.crank", s.neurons, s.width, bias=True)
    pedal = linear(f"{at}.pedal", s.width, s.neurons, bias=True)
    bit, bridle = (Gain(f"{at}.{name}.level", s.size) for name in ("bit", "bridle"))
    entrances = [Gain(f"entrances.{i}.level", s.width) for i in range(s.layers)]
    return [
        *separate(q, k, v, pole, s, exact_query_key=False),
        *query_key_gain(bit, (0,), bridle, (0,), s.size, s.rotated),
        *up_down(crank, 0, pedal, signs="positive"),
        *norm_gain(entrances, [q, k, v]),
        *norm_gain(Gain(f"{at}.lull.level", s.width), [crank]),
        *norm_gain(Gain("bell.level", s.width), [linear("exit", s.vocabulary, s.width)]),
    ]


_RULES: dict[str, Callable[[Sizes], list[Generator]]] = {
    **{name: getattr(library, name) for name in SIZES if hasattr(library, name)},
    "braid": braid, "quarry": quarry, "carousel": carousel,
}  # fmt: skip


def expected(family: str, granularity: str) -> list[Pair]:
    """All exact pairs of a tiny model at "matrix", "head" or "channel" granularity."""
    return pairs(_RULES[family](SIZES[family]), granularity)
