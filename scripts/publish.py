"""Copy the summaries of an artifact's finished runs into results/runs, to be committed.

python scripts/publish.py table2 --scale mini
"""

from __future__ import annotations

import argparse

from _door import ROOT, enter


def main() -> int:
    """Exit code 0 only if every run of the sweep could be published."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--scale", default="mini")
    parser.add_argument("overrides", nargs="*")
    chosen = parser.parse_intermixed_args()

    from experiments.artifacts import get
    from experiments.files import write_atomically
    from experiments.run import ENDED, peek

    runs = get(chosen.artifact).sweep(chosen.scale, chosen.overrides)
    ended = [run for run in runs if peek(run.directory).status in ENDED]
    for run in ended:
        source = run.directory / "summary.json"
        write_atomically(ROOT / "results" / "runs" / f"{run.run_id}.json", source.read_bytes())
    print(f"{len(ended)} of {len(runs)} runs published in results/runs")
    return 0 if len(ended) == len(runs) else 1


enter(main)
