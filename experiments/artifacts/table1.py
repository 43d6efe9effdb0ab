"""Table 1: the atlas of optimizers. How does each answer a rescaling, a rotation, a signed permutation of its weights?

The paper claims that no standard optimizer is equivariant to rescaling: its update does not scale with the weight. Here
that is measured, for every class of torch.optim and of pytorch_optimizer. What is equivariant all the same (degree +1)
is named.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from experiments.analysis import atlas
from experiments.analysis.tables import Column, Table
from experiments.analysis.verdict import Verdict
from experiments.artifacts.artifact import Artifact, Rows

Record = Mapping[str, str]

COLUMNS = {
    "optimizer": "optimizer",
    "library": "library",
    "exponent": "degree",
    "exponent_residual": "residual of the degree",
    "rotation_residual": "rotation",
    "signed_permutation_residual": "signed permutation",
    "transport": "states that move, with their degrees",
    "slices": "a third of the rows rescaled",
    "coupling": "couples weights",
    "eps": "eps as it is set",
    "setting": "setting",
    "error": "remark",
}
"""Column of the CSV -> its printed header, in order."""
# Bounds up to which a rule has a degree, or follows a group, for the figure and the notes.
_SMALL = ("exact", "rounding", "1e-06", "1e-04", "1e-03")


def records(frame: pd.DataFrame) -> list[Record]:
    """The rows of the atlas, from the one run of its sweep that is done; empty where it is not."""
    done = frame[frame["status"] == "done"]
    found: list[Record] = [] if done.empty else list(done.iloc[0]["optimizers"])
    return found


def is_measured(record: Record) -> bool:
    """Whether it could be built and run."""
    return record["exponent"] != ""


def classes(found: list[Record]) -> set[tuple[str, str]]:
    """(library, class) of the rows; the published rules are no classes of a library."""
    return {(r["library"], r["optimizer"]) for r in found if r["library"] != "reference"}


def is_equivariant(record: Record) -> bool:
    """Whether the update has degree +1 at every step."""
    return record["exponent"] == "+1" and record["exponent_residual"] == "exact"


def build_table(rows: Rows) -> tuple[Table, Table]:
    """(as printed, as CSV): one row an optimizer and setting."""
    found = records(rows.frame)
    cells = [{name: record[name] or None for name in COLUMNS} for record in found]
    printed = Table([Column(name, header) for name, header in COLUMNS.items()], cells,
                    "Table 1: how optimizers answer reparameterisations", _notes(rows, found))  # fmt: skip
    return printed, Table([Column(name, name) for name in COLUMNS], cells)


def _notes(rows: Rows, found: list[Record]) -> list[str]:
    if not found:
        return []
    measured = [r for r in found if is_measured(r)]
    refused = [r for r in found if not is_measured(r) and r["library"] != "reference"]
    libraries, published = ("torch.optim", "pytorch_optimizer"), ("reference",)
    nearly = ", ".join(r["optimizer"] for r in measured if r["exponent"] == "+1" and not is_equivariant(r))
    environment = rows.frame.iloc[0]["environment"]
    return [
        f"{len(classes(measured))} of {len(classes(found))} classes of torch {environment['torch'].partition('+')[0]} "
        f"and pytorch_optimizer {environment['pytorch_optimizer']} measured; not: "
        f"{', '.join(r['optimizer'] for r in refused)} (the reason is in the last column).",
        f"Degree +1 at every step, as equivariance to rescaling asks: "
        f"{_names([r for r in measured if is_equivariant(r)], libraries)}; of the published rules "
        f"{_names([r for r in measured if is_equivariant(r)], published)}. No other row has it"
        + (f"; nearly, {nearly}." if nearly else "."),
        "Degree: e where the last update is c^e times itself under (W, G) -> (c W, G / c), c = 2^6 and 2^-6, with eps "
        "and weight decay at 0. Its residual is over all steps, at a learning rate at which W stays in step. The three "
        "groups are three questions, and no verdict is a sum of them.",
        "Residuals are relative and bounded by a power of ten; 'exact' is below 1e-9 (1e-4 for a rule in float32). "
        "'rounding': no larger than what the rule's own low precision does; 'unsettled': that is above 5 %. Rotations "
        "are those from the right, of a weight and of a pair (U Q, V Q) in one optimizer.",
        "Rows: degrees of the update of the rescaled rows and of the rest (wanted +1, +0), and whether the state can "
        "follow. eps: the residual of the degree with eps as the library sets it, at gradients of order 1; 'needed' "
        "where the rule does not move without. 'refused': the state cannot be carried.",
        "Gradients are drawn beforehand and do not depend on the weights, so LBFGS has no curvature to find here. "
        "Those that ask for gradients elsewhere or for curvature get those of <G, D> + tr((G^T D)^2) / 2.",
    ]


def _names(found: list[Record], libraries: tuple[str, ...]) -> str:
    return ", ".join(dict.fromkeys(_label(r) for r in found if r["library"] in libraries))


def build_figures(rows: Rows) -> dict[str, Figure]:
    """Every optimizer by name: degree against rotation."""
    found = [r for r in records(rows.frame) if is_measured(r)]
    if not found:
        return {}
    cells: dict[tuple[str, str], list[atlas.Name]] = {}
    for record in sorted(found, key=lambda r: (r["optimizer"].lower(), len(r["setting"]))):
        names = cells.setdefault((_row_of(record), _column_of(record)), [])
        plain, name = ((text, record["library"]) for text in (record["optimizer"], _label(record)))
        if plain not in names and name not in names:  # a setting that changes neither verdict is no second name
            names.append(name)
    columns = {
        "-1": ("degree −1\n(as SGD)", 0.15),
        "between": ("between", 0.10),
        "0": ("degree 0\n(as Adam)", 0.36),
        "none": ("no one degree", 0.22),
        "+1": ("degree +1\n(follows rescaling)", 0.17),
    }
    titles = {"yes": "follows\nrotations", "unsettled": "unsettled", "no": "does not\nfollow\nrotations"}
    present = {key: title for key, title in titles.items() if any(row == key for row, _ in cells)}
    return {"table1": atlas.grid(cells, columns, present, ("yes", "+1"))}


def _row_of(record: Record) -> str:
    residual = record["rotation_residual"]
    return residual if residual == "unsettled" else "yes" if residual in _SMALL else "no"


def _column_of(record: Record) -> str:
    if record["exponent_residual"] not in _SMALL:
        return "none"
    degree = record["exponent"]
    return {"-1": "-1", "+0": "0", "+1": "+1"}.get(degree, "between")


def _label(record: Record) -> str:
    """The name, and the setting where it is not what the class cannot do without."""
    setting = record["setting"].removeprefix("attribute ").partition(",")[0].replace(" in the param group", "")
    needless = ("around AdamW", "use_muon", "num_", "threshold", "gradients as", "momentum", "damping", "floor")
    if record["exponent"] == "+1" and not is_equivariant(record):
        return f"{record['optimizer']} (nearly)"
    if not setting or setting.startswith(needless) or record["library"] == "reference":
        return record["optimizer"]
    return f"{record['optimizer']} ({'scale_parameter=False' if 'scale_parameter' in record['setting'] else setting})"


def verdicts(rows: Rows, committed: pd.DataFrame) -> list[Verdict]:
    """For each library: do the rows made here say what the committed ones say, word for word?"""
    here = records(rows.frame[rows.frame["source"] == "live"])
    there = records(committed[committed["run_id"].isin(rows.frame["run_id"])])
    found = []
    for library in dict.fromkeys(r["library"] for r in here):
        mine, theirs = ([dict(r) for r in each if r["library"] == library] for each in (here, there))
        differing = sorted(
            {r["optimizer"] for r in mine if r not in theirs} | {r["optimizer"] for r in theirs if r not in mine}
        )
        if not theirs:
            found.append(Verdict(library, "atlas", None, None, "no committed cell"))
        elif differing:
            found.append(Verdict(library, "atlas", False, None, f"not reproduced: {', '.join(differing)}"))
        else:
            found.append(Verdict(library, "atlas", True, 0.0, f"reproduced ({len(mine)} rows, word for word)"))
    if not here and not rows.frame.empty:
        found.append(Verdict("", "atlas", None, None, "committed, not run here"))
    return found


ARTIFACT = Artifact(
    name="table1",
    claim="No optimizer in common use scales its updates with its weights; the few that do are named.",
    experiments={"mini": "table1"},
    build_table=build_table,
    build_figures=build_figures,
    verdicts=verdicts,
)
