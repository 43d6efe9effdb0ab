"""Figures from committed summaries alone.

python scripts/plot.py table2
"""

from __future__ import annotations

import argparse
from pathlib import Path

from _door import ROOT, enter


def main() -> int:
    """Exit code 1 where a run of a figure is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+")
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--runs", type=Path, default=ROOT / "results" / "runs")
    parser.add_argument("--figures", type=Path, default=ROOT / "results" / "figures")
    chosen = parser.parse_intermixed_args()
    if not chosen.runs.is_dir():
        raise ValueError(f"--runs {chosen.runs}: there is no such folder")

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
