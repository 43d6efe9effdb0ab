"""Figures from committed summaries alone.

python scripts/plot.py table2
"""

from __future__ import annotations

from pathlib import Path

from _door import ROOT, committed_parser, enter


def main() -> int:
    """Exit code 1 where a run of a figure is missing."""
    parser = committed_parser(__doc__)
    parser.add_argument("--figures", type=Path, default=ROOT / "results" / "figures")
    chosen = parser.parse_intermixed_args()

    from experiments.analysis import figures
    from experiments.artifacts import get
    from experiments.artifacts.artifact import read_rows

    complete = True
    for name in chosen.artifacts:
        artifact = get(name)
        rows = read_rows(artifact.sweep(chosen.scale), chosen.scale, committed=chosen.runs)
        complete &= not rows.missing
        for stem, figure in artifact.build_figures(rows).items():
            for path in figures.save(figure, chosen.figures, stem.replace(name, artifact.stem(chosen.scale), 1)):
                print(f"written: {path}")
    return 0 if complete else 1


enter(main)
