"""Every run of a sweep: done, running, interrupted, failed with its traceback's place, diverged, missing.

python scripts/status.py table2 --scale mini
python scripts/status.py -- experiment=tune_table2          # any sweep of train.py -m
"""

from __future__ import annotations

import argparse

from _door import enter, wide_console


def main() -> int:
    """Exit code 0 only if every run is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", help="an artifact's name, or the overrides of a sweep")
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--unfinished", action="store_true", help="leave out the runs that are done")
    chosen = parser.parse_intermixed_args()

    from experiments import sweep
    from experiments.artifacts import get

    artifact, *rest = chosen.what
    runs = sweep.expand(chosen.what) if "=" in artifact else get(artifact).sweep(chosen.scale, rest)
    sweep.print_states(runs, wide_console(), chosen.unfinished)
    return 0 if all(sweep.state_of(run).status == "done" for run in runs) else 1


enter(main)
