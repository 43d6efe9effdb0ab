"""What `saggs` shows of a checkpoint's pairs: a table, JSON, a picture, and a progress line."""

from __future__ import annotations

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from saggs.checkpoints.operations import PairReport
from saggs.checkpoints.shards import CheckpointError
from saggs.nullspace import Algebra
from saggs.pairs import ScalePair

# Okabe and Ito's colours, told apart by every common kind of colour vision; the markers differ too.
_STYLES = {
    "query_key": ("#0072B2", "o"),
    "value_output": ("#D55E00", "s"),
    "up_down": ("#009E73", "^"),
    "norm_gain": ("#CC79A7", "D"),
    "query_key_gain": ("#000000", "v"),
}


def layer_of(pair: ScalePair) -> int | None:
    """The first number in the pair's path; None where there is none."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", pair.path)
    return int(found.group(1)) if found else None


def labels(pairs: Sequence[ScalePair]) -> list[str]:
    """The path of every pair, with its first left slice where a path has several pairs of one kind."""
    several = Counter((pair.kind, pair.path) for pair in pairs)
    return [
        f"{pair.path}  {str(pair.left[0]).removeprefix(f'{pair.path}.')}"
        if several[pair.kind, pair.path] > 1
        else pair.path or "(the model)"
        for pair in pairs
    ]


def worst_first(reports: Sequence[PairReport]) -> list[PairReport]:
    """By how far the balancing factor is from 1; pairs with a zero side last."""

    def distance(report: PairReport) -> float:
        return math.inf if report.log2_ratio is None else -abs(math.log2(report.factor))

    return sorted(reports, key=distance)


def table(reports: Sequence[PairReport], top: int) -> str:
    """The worst `top` pairs, one a line, and how many more there are."""
    ordered = worst_first(reports)
    shown = ordered[:top] if top else ordered
    named = labels([report.pair for report in ordered])
    rows = [("log2 |left|/|right|", "balanced by", "kind", "pair")]
    for report, label in zip(shown, named, strict=False):
        ratio = "a side is zero" if report.log2_ratio is None else f"{round(report.log2_ratio, 3) + 0.0:+.3f}"
        rows.append((ratio, f"x {report.factor:.4g}", report.pair.kind, label))
    lines = _aligned(rows, right=(0, 1))
    if len(shown) < len(ordered):
        lines.append(f"… and {len(ordered) - len(shown)} more; --top 0 shows all {len(ordered)}")
    return "\n".join(lines)


def certificates(examined: Sequence[tuple[ScalePair, Exception | None]]) -> str:
    """One line a pair: its residual and its control, or why it failed."""
    rows = [("verdict", "residual", "control", "kind", "pair")]
    for (pair, error), label in zip(examined, labels([pair for pair, _ in examined]), strict=True):
        proof = pair.certificate
        if error is not None or proof is None:
            rows.append(("FAILED", "", "", pair.kind, f"{label}: {error}"))
        else:
            rows.append(("exact", f"{proof.residual:.1e}", f"{proof.control:.1e}", pair.kind, label))
    return "\n".join(_aligned(rows, right=(1, 2)))


def _aligned(rows: Sequence[tuple[str, ...]], right: tuple[int, ...]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def as_json(reports: Sequence[PairReport]) -> list[dict[str, Any]]:
    """Plain values, worst first."""
    return [
        {
            "kind": report.pair.kind,
            "path": report.pair.path,
            "layer": layer_of(report.pair),
            "left": [str(part) for part in report.pair.left],
            "right": [str(part) for part in report.pair.right],
            "log2_ratio": report.log2_ratio,
            "log2_ratio_after": report.log2_ratio_after,
            "factor": report.factor,
            "power_of_two": report.rounded,
            "residual": report.pair.certificate.residual if report.pair.certificate else None,
            "control": report.pair.certificate.control if report.pair.certificate else None,
        }
        for report in worst_first(reports)
    ]


def plot(reports: Sequence[PairReport], target: Path, title: str) -> None:
    """Norm ratio against layer, one colour and marker a kind; with many pairs a layer, their median as a line.

    Raises:
        CheckpointError: no matplotlib, or a file name whose ending it does not know.
    """
    figure = _figure(target)
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_subplot()
    last = max((layer_of(report.pair) or 0 for report in reports), default=0)
    points: dict[str, dict[int, list[float]]] = {}
    for report in reports:
        layer = layer_of(report.pair)
        if report.log2_ratio is not None:
            own = points.setdefault(report.pair.kind, {})
            own.setdefault(last + 1 if layer is None else layer, []).append(report.log2_ratio)
    axes.axhline(0, color="0.6", linewidth=1, zorder=1)
    for kind, by_layer in points.items():
        colour, marker = _STYLES.get(kind, ("0.3", "x"))
        layers = sorted(by_layer)
        middle = [median(by_layer[layer]) for layer in layers]
        name = kind.replace("_", "–")
        if any(len(values) > 1 for values in by_layer.values()):
            name += " (median)"
            x, y = zip(*((layer, value) for layer in layers for value in by_layer[layer]), strict=True)
            axes.scatter(x, y, s=9, color=colour, alpha=0.25, linewidths=0, zorder=2)
        inside = sum(layer <= last for layer in layers)
        axes.plot(layers[:inside], middle[:inside], color=colour, linewidth=1.2, zorder=3)
        axes.plot(layers, middle, color=colour, marker=marker, markersize=5, linestyle="none", label=name, zorder=4)
    axes.set_xlabel("layer")
    axes.set_ylabel("log₂ ( ‖left‖ / ‖right‖ )")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if any(last + 1 in by_layer for by_layer in points.values()):  # such as the last norm and the output matrix
        axes.axvline(last + 0.5, color="0.8", linewidth=1, linestyle=":")
        axes.xaxis.set_major_formatter(lambda x, _: "no layer" if x == last + 1 else f"{x:g}" if x <= last else "")
        axes.set_xticks([*(t for t in axes.get_xticks() if 0 <= t <= last - last / 12), last + 1])
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10, loc="left")
    axes.annotate("balanced", (1, 0), xycoords=("axes fraction", "data"), xytext=(-2, 3),
                  textcoords="offset points", ha="right", fontsize=8, color="0.4")  # fmt: skip
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(target)


def plot_algebra(found: Algebra, target: Path, title: str) -> None:
    """How many generators each block has, by kind; and the singular values that separate exact from not.

    Raises:
        CheckpointError: no matplotlib, or a file name whose ending it does not know.
    """
    figure = _figure(target)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    blocks: dict[str, dict[str, int]] = {}
    for (path, of_kind), count in found.by_place.items():
        place = re.match(r"(?:.*?\.)?(\d+)(?=\.|$)", path)
        own = blocks.setdefault(place.group(0) if place else path or "(the model)", {})
        own[of_kind] = own.get(of_kind, 0) + count
    bottom = [0] * len(blocks)
    for kind, (colour, _) in _STYLES.items():
        counts = [own.get(kind, 0) for own in blocks.values()]
        if any(counts):
            left.bar(range(len(blocks)), counts, bottom=bottom, color=colour, width=0.8, label=kind.replace("_", "–"))
            bottom = [b + c for b, c in zip(bottom, counts, strict=True)]
    step = max(1, len(blocks) // 12)
    names = [".".join(name.split(".")[-2:]) for name in blocks]
    left.set_xticks(range(0, len(blocks), step), names[::step], rotation=45, ha="right", fontsize=8)
    left.set_ylabel("exact generators")
    left.set_title(f"{title}: {found.dimension}", fontsize=10, loc="left")
    if blocks:
        left.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3)
    space = found.null_space
    values = [max(v, 1e-18) for v in space.singular_values]
    exact = len(values) - space.nullity
    right.semilogy(range(exact), values[:exact], color="0.45", linewidth=1.5)
    right.semilogy(range(exact, len(values)), values[exact:], color="#D55E00", linewidth=0, marker=".", markersize=3)
    right.annotate(f"null space: {space.nullity}", (exact, values[-1]), xytext=(-6, 6),
                   textcoords="offset points", ha="right", fontsize=8, color="#D55E00")  # fmt: skip
    right.set_xlabel("number")
    right.set_title(f"singular values, {space.measured_on}", fontsize=10, loc="left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target)


def _figure(target: Path) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise CheckpointError("a plot needs matplotlib: pip install 'saggs[plot]'") from None
    known = FigureCanvasAgg.get_supported_filetypes()
    if target.suffix[1:] not in known:
        raise CheckpointError(f"--plot {target}: the name has to end in one of {', '.join(sorted(known))}")
    return Figure(figsize=(8, 4.5), dpi=150, layout="constrained")


class ProgressLine:
    """One line on a terminal that is overwritten: what, how much, how long still. Nothing where it is no terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._visible = self._stream.isatty()
        self._what, self._started, self._shown = "", 0.0, 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what:
            self._what, self._started, self._shown = what, now, 0.0
        if self._visible and (now - self._shown > 0.2 or done == total):
            self._shown = now
            self._stream.write(f"\r\x1b[K{self._text(done, total, now - self._started)}")
            self._stream.flush()

    def _text(self, done: int, total: int, seconds: float) -> str:
        if not total:
            return f"{self._what} …"
        left = "" if not done else f", {_duration(seconds * (total - done) / done)} left"
        return f"{self._what}: {100 * done // total} % of {total / 1e9:.2f} GB{left}"

    def clear(self) -> None:
        """Leave an empty line."""
        if self._visible:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
