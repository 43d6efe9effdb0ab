"""The atlas of optimizers as a figure: every name in the cell of its two verdicts, degree against rotation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

STYLE = Path(__file__).with_name("style.mplstyle")
# Okabe and Ito (2008).
COLORS = {"torch.optim": "#D55E00", "pytorch_optimizer": "#202020", "reference": "#0072B2"}
LABELS = {"torch.optim": "torch.optim", "pytorch_optimizer": "pytorch_optimizer", "reference": "the rules as published"}
FOLLOWS = "#E3F1EA"
INK, FAINT = "#202020", "#6E6E6E"

_WIDTH, _LEFT, _RIGHT, _PAD, _LINE, _FONT = 520.0, 50.0, 4.0, 4.0, 8.2, 6.0
_HEAD, _FOOT = 34.0, 18.0

Name = tuple[str, str]
"""(text, library)"""


def grid(
    cells: Mapping[tuple[str, str], Sequence[Name]],
    columns: Mapping[str, tuple[str, float]],
    rows: Mapping[str, str],
    follows: tuple[str, str],
) -> Figure:
    """Names in a grid, each cell's flowing from left to right in the order given; a row is as high as its fullest cell.

    Args:
        cells: (row, column) -> names.
        columns: key -> (title, share of the width).
        rows: key -> title.
        follows: the row and the column that are shaded, where a rule follows the reparameterisation.
    """
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(_WIDTH / 72, 1))
        figure.set_layout_engine("none")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        widths = {key: share * (_WIDTH - _LEFT - _RIGHT) for key, (_, share) in columns.items()}
        placed = {key: _flow(axes, names, widths[key[1]] - 2 * _PAD) for key, names in cells.items()}
        lines = {row: max(1, *(1 + max((p[1] for p in placed.get((row, c), [])), default=0) for c in columns))
                 for row in rows}  # fmt: skip
        height = _HEAD + _FOOT + sum(_height(n) for n in lines.values())
        figure.set_size_inches(_WIDTH / 72, height / 72)
        axes.set(xlim=(0, _WIDTH), ylim=(height, 0))
        top = _HEAD
        for row, title in rows.items():
            left = _LEFT
            axes.text(_PAD, top + _PAD + 1, title, fontsize=7, va="top", ha="left", color=INK, linespacing=1.2)
            for column in columns:
                shaded = row == follows[0] or column == follows[1]
                axes.add_patch(Rectangle((left, top), widths[column], _height(lines[row]), linewidth=0.5,
                                         edgecolor="#B0B0B0", facecolor=FOLLOWS if shaded else "white"))  # fmt: skip
                for x, line, text, library in placed.get((row, column), []):
                    axes.text(left + _PAD + x, top + _PAD + 2 + line * _LINE, text, fontsize=_FONT, va="top", ha="left",
                              color=COLORS[library])  # fmt: skip
                left += widths[column]
            top += _height(lines[row])
        left = _LEFT
        for column, (title, _) in columns.items():
            count = sum(len(cells.get((row, column), [])) for row in rows)
            axes.text(left + widths[column] / 2, _HEAD - 5, f"{title}\n{count}", fontsize=7, ha="center", va="bottom",
                      color=INK, linespacing=1.2)  # fmt: skip
            left += widths[column]
        _legend(axes, top + 6)
    return figure


def _height(lines: int) -> float:
    return lines * _LINE + 2 * _PAD + 2


def _flow(axes: Axes, names: Sequence[Name], width: float) -> list[tuple[float, int, str, str]]:
    """(x, line, text, library) of every name; a name that does not fit a line begins the next one."""
    placed, x, line = [], 0.0, 0
    for text, library in names:
        needed = _text_width(axes, text)
        if x > 0 and x + needed > width:
            x, line = 0.0, line + 1
        placed.append((x, line, text, library))
        x += needed + 6.0
    return placed


def _text_width(axes: Axes, text: str) -> float:
    """In points."""
    drawn = axes.text(0, 0, text, fontsize=_FONT)
    figure = axes.figure
    width = float(drawn.get_window_extent().width) * 72 / figure.dpi
    drawn.remove()
    return width


def _legend(axes: Axes, top: float) -> None:
    x = _LEFT
    for library, label in LABELS.items():
        axes.text(x, top, f"■ {label}", fontsize=_FONT, va="top", color=COLORS[library])
        x += _text_width(axes, f"■ {label}") + 14
    axes.add_patch(Rectangle((x, top), 7, 6, linewidth=0.4, edgecolor="#B0B0B0", facecolor=FOLLOWS))
    axes.text(x + 10, top, "follows the reparameterisation", fontsize=_FONT, va="top", color=FAINT)
