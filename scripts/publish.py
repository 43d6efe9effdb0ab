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
    from experiments.files import read_json, write_json
    from experiments.run import ENDED, peek

    runs = get(chosen.artifact).sweep(chosen.scale, chosen.overrides)
    ended = [run for run in runs if peek(run.directory).status in ENDED]
    for run in ended:
        summary = read_json(run.directory / "summary.json")
        if summary["identity"] != run.identity.full:
            raise ValueError(f"{run.directory / 'summary.json'} is of another run; nothing of it was published")
        write_json(ROOT / "results" / "runs" / f"{run.run_id}.json", summary)
    print(f"{len(ended)} of {len(runs)} runs published in results/runs")
    return 0 if len(ended) == len(runs) else 1


enter(main)
