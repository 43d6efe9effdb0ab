"""What a table or figure is: what it claims, which sweep feeds it at each scale, how its runs become rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.analysis import figures
from experiments.analysis.collect import collect
from experiments.analysis.tables import Table, write_table
from experiments.analysis.verdict import Verdict, judge
from experiments.checks import ConfigError
from experiments.sweep import SweepRun, expand


@dataclass(frozen=True)
class Rows:
    """The runs of a sweep, read from a store: one row a run that is there, relabelled by identity.

    Attributes:
        frame: as `collect` gives it; `model` and `arm` are those of the sweep, whatever another sweep called the run.
        sweep: every run the artifact needs, whether or not it is there.
        scale: of the sweep.
    """

    frame: pd.DataFrame
    sweep: Sequence[SweepRun]
    scale: str

    @property
    def models(self) -> list[str]:
        """Models in the order of the sweep."""
        return list(dict.fromkeys(run.cell[0] for run in self.sweep))

    @property
    def seeds(self) -> list[int]:
        """The seeds fixed beforehand, in order."""
        return sorted({run.config.seed for run in self.sweep})

    @property
    def arms(self) -> list[str]:
        """Arms in the order of the sweep."""
        return list(dict.fromkeys(run.cell[1] for run in self.sweep))

    def relabelled(self, other: pd.DataFrame) -> Rows:
        """The rows of this sweep among other runs, under the sweep's own labels."""
        return Rows(_labelled(other, self.sweep), self.sweep, self.scale)

    @property
    def missing(self) -> list[SweepRun]:
        """Runs of the sweep without a finished result."""
        done = set(self.frame.loc[self.frame["status"] == "done", "run_id"])
        return [run for run in self.sweep if run.run_id not in done]


def by_perplexity(rows: Rows, committed: pd.DataFrame) -> list[Verdict]:
    """The verdict of every (model, arm), seed by seed."""
    return judge(rows.frame, committed, len(rows.seeds))


@dataclass(frozen=True)
class Artifact:
    """A table with its figures.

    Attributes:
        name: after `make reproduce-`.
        claim: what the paper says and what is shown here, in a sentence or two.
        experiments: the experiment files that feed it at each scale.
        build_table: rows -> (table as printed, table as CSV).
        build_figures: rows -> figures by name.
        verdicts: (rows, committed runs) -> does each cell agree with the committed one?
    """

    name: str
    claim: str
    experiments: Mapping[str, str | Sequence[str]]
    build_table: Callable[[Rows], tuple[Table, Table]]
    build_figures: Callable[[Rows], dict[str, Figure]]
    verdicts: Callable[[Rows, pd.DataFrame], list[Verdict]] = by_perplexity

    def sweep(self, scale: str, overrides: Sequence[str] = ()) -> list[SweepRun]:
        """Every run the artifact needs at a scale, with further overrides (`seed=0,1`) on top."""
        runs = [run for command in self.commands(scale, overrides) for run in expand(command)]
        return list({run.run_id: run for run in runs}.values())

    def commands(self, scale: str, overrides: Sequence[str] = ()) -> list[list[str]]:
        """What follows `python train.py -m` for this artifact, one command an experiment file."""
        if scale not in self.experiments:
            raise ConfigError(f"scale={scale}: {self.name} is made at {', '.join(self.experiments)}")
        files = self.experiments[scale]
        return [[f"experiment={file}", *overrides] for file in ([files] if isinstance(files, str) else files)]

    def stem(self, scale: str) -> str:
        """The name of its files: mini scale, which is committed, has the plain one."""
        return self.name if scale == "mini" else f"{self.name}_{scale}"

    def write(self, rows: Rows, tables_at: Path, figures_at: Path) -> list[Path]:
        """Write the table (.csv .md .tex) and the figures (.pdf .svg .png); returns all paths."""
        printed, csv = self.build_table(rows)
        paths = write_table(tables_at, self.stem(rows.scale), printed, csv)
        for name, figure in self.build_figures(rows).items():
            paths += figures.save(figure, figures_at, name.replace(self.name, self.stem(rows.scale), 1))
        return paths


def read_rows(sweep: Sequence[SweepRun], scale: str, live: Path | None = None, committed: Path | None = None) -> Rows:
    """The runs of a sweep from the live store, and from the committed one where the live store has none of them."""
    parts = []
    for source in ({"live": live}, {"committed": committed}):
        directory = next(iter(source.values()))
        if directory is not None and directory.is_dir():
            parts.append(_labelled(collect(**source), sweep))
    frame = pd.concat(parts, ignore_index=True) if parts else _labelled(collect(), sweep)
    frame = frame.drop_duplicates("run_id", keep="first").reset_index(drop=True)
    return Rows(frame, sweep, scale)


def _labelled(frame: pd.DataFrame, sweep: Sequence[SweepRun]) -> pd.DataFrame:
    """The rows of a sweep's runs, with the sweep's names of their cells."""
    cells = {run.run_id: run.cell for run in sweep}
    own = frame[frame["run_id"].isin(cells)].copy()
    for place, name in enumerate(("model", "arm")):
        own[name] = [cells[run_id][place] for run_id in own["run_id"]]
    return own
