"""Tables from committed summaries alone: no training, no data, no GPU, the same bytes every time.

python scripts/aggregate.py table2
"""

from __future__ import annotations

from pathlib import Path

from _door import ROOT, committed_parser, enter, wide_console


def main() -> int:
    """Exit code 1 where a run of the table is missing; with --strict nothing is written then."""
    parser = committed_parser(__doc__)
    parser.add_argument("--tables", type=Path, default=ROOT / "results" / "tables")
    parser.add_argument("--strict", action="store_true", help="write nothing unless every run is there")
    chosen = parser.parse_intermixed_args()

    from experiments.analysis.tables import write_table
    from experiments.artifacts import get
    from experiments.artifacts.artifact import read_rows

    complete = True
    for name in chosen.artifacts:
        artifact = get(name)
        rows = read_rows(artifact.sweep(chosen.scale), chosen.scale, committed=chosen.runs)
        for run in rows.missing:
            print(f"missing: {run.run_id}")
        complete &= not rows.missing
        if rows.missing and chosen.strict:
            continue
        printed, csv = artifact.build_table(rows)
        printed.print_terminal(wide_console())
        for path in write_table(chosen.tables, artifact.stem(chosen.scale), printed, csv):
            print(f"written: {path}")
    return 0 if complete else 1


enter(main)
