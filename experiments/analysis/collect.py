"""Runs on disk become one data frame, one row a run; `one_value_per_seed` holds the frame to what may be averaged.

Two stores give the same rows: the live one, ``outputs/runs/<run_id>/{manifest,status,summary}.json``, and the committed
one, ``results/runs/<run_id>.json``. What cannot be read is a row with status "unreadable" and the reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

Json = dict[str, Any]

IDENTIFYING = (
    *("run_id", "identity", "group", "numerics_version", "model", "arm", "scale", "optimizer", "seed"),
    "learning_rate",
)
MEASUREMENTS = (
    "nll_nats",
    "tokens",
    "nll_per_token",
    "perplexity",
    "words",
    "word_perplexity",
    "bytes",
    "bits_per_byte",
    "context",
    "stride",
)
VALUES = tuple(f"{split}_{name}" for split in ("validation", "test") for name in MEASUREMENTS)
OBJECTS = ("curve", "config", "data", "environment")
COLUMNS = (
    *IDENTIFYING,
    *("status", "message", "steps", "commit", "dirty", "code_versions", "last_written"),
    *VALUES,
    *OBJECTS,
    *("source", "path"),
)
# What a result may hold beside a language model's figures.
PARTS = ("arms", "optimizers", "members", "reference", "truth", "scene", "examples", "ratios")
STATUSES = ("running", "done", "failed", "diverged", "interrupted", "unreadable")
CELL = ("model", "arm")

_INTEGERS = ("numerics_version", "seed", "steps")
_REQUIRED_TYPES: dict[str, type | tuple[type, ...]] = {
    "run_id": str,
    "identity": str,
    "group": str,
    "numerics_version": int,
    "seed": int,
    "config": dict,
}


class _UnreadableError(Exception):
    """Why a file cannot be used; becomes the row's message."""


def collect(live: Path | None = None, committed: Path | None = None) -> pd.DataFrame:
    """All runs of the two stores, one row a run, with the columns `COLUMNS` (and any further numbers of a result).

    A committed copy of the same summary is the same run and gives one row; copies that differ give two, which
    `one_value_per_seed` reports as a repeated run. Raises ValueError if a directory that was named does not exist.
    """
    rows: list[Json] = []
    published: dict[str, str] = {}
    for directory, read in ((live, _read_live_run), (committed, _read_committed_run)):
        if directory is None:
            continue
        if not Path(directory).is_dir():
            raise ValueError(f"no directory {directory}; name the folder that holds the runs, or None to leave it out")
        for path in sorted(Path(directory).iterdir()):
            if path.name.startswith(".") or (path.suffix != ".json" if read is _read_committed_run else path.is_file()):
                continue
            row, digest = read(path)
            if digest and published.get(row["run_id"]) == digest:
                continue
            published[row["run_id"]] = digest
            rows.append(row)
    return _frame(rows)


def one_value_per_seed(
    frame: pd.DataFrame, cell: Sequence[str] = CELL, value: str | None = "test_perplexity"
) -> tuple[pd.DataFrame, list[str]]:
    """The frame with one row for each (cell, group, seed), and notes for people on everything that was not plain.

    A repeated run (same group and seed) keeps the latest complete one, else the latest. Runs that are not done stay as
    rows without values, so that n = 4/5 can be printed and nothing of them averaged. Code commits that differ within a
    cell are noted. ``cell`` names the columns within which only the seed may differ: add "learning_rate" for a sweep.
    ``value`` is what every run that is done should have; None where that is not one number.

    Raises ValueError if the runs of a cell differ in anything but the seed, naming the keys and both values.
    """
    unidentified = frame["group"].isna() | frame["seed"].isna() | frame[list(cell)].isna().any(axis=1)
    notes = [
        f"{row['run_id']}: {row['status']}, belongs to no cell ({_text(row['message'])}; {row['path']})"
        for _, row in frame[unidentified].iterrows()
    ]
    kept: list[Any] = []
    cells_of_group: dict[str, set[str]] = {}
    for key, members in frame[~unidentified].groupby(list(cell), sort=True):
        label = " ".join(map(str, key))
        _check_same_configuration(members, label)
        _check_same_data(members, label)
        cells_of_group.setdefault(members["group"].iloc[0], set()).add(label)
        chosen = []
        for seed, repeats in members.groupby("seed", sort=True):
            index, note = _choose(repeats, f"{label} seed {seed}")
            chosen.append(index)
            notes += note
        notes += (
            _environment_notes(members.loc[chosen], label)
            + _code_notes(members.loc[chosen], label)
            + _status_notes(members.loc[chosen], label, value)
        )
        kept += chosen
    for labels in cells_of_group.values():
        if len(labels) > 1:
            notes.append(f"{', '.join(sorted(labels))}: the same configuration under {len(labels)} names")
    result = frame.loc[[*kept, *frame.index[unidentified]]].copy().reset_index(drop=True)
    numbers = [name for name in result.columns if name.startswith(("validation_", "test_"))]
    result.loc[result["status"] != "done", numbers] = math.nan
    return result, notes


def values_by_seed(
    frame: pd.DataFrame, column: str = "test_perplexity", seeds: Iterable[int] | None = None
) -> dict[int, float | None]:
    """{seed: value} of one cell's rows, None where a run has no value or a seed of ``seeds`` has no run.

    ``seeds`` is the list fixed beforehand; other seeds are left out. Raises ValueError if a seed has two rows.
    """
    rows = _rows_by_seed(frame)
    wanted = sorted(rows) if seeds is None else list(seeds)
    values: dict[int, float | None] = {}
    for seed in wanted:
        row = rows.get(seed)
        usable = row is not None and row["status"] == "done" and not pd.isna(row[column])
        values[seed] = float(row[column]) if row is not None and usable else None
    return values


def statuses_by_seed(frame: pd.DataFrame, seeds: Iterable[int] | None = None) -> dict[int, str]:
    """{seed: status} of one cell's rows; "not run" where a seed of ``seeds`` has no run."""
    rows = _rows_by_seed(frame)
    wanted = sorted(rows) if seeds is None else list(seeds)
    return {seed: str(rows[seed]["status"]) if seed in rows else "not run" for seed in wanted}


def _rows_by_seed(frame: pd.DataFrame) -> dict[int, Any]:
    rows: dict[int, Any] = {}
    for _, row in frame[frame["seed"].notna()].iterrows():
        if int(row["seed"]) in rows:
            raise ValueError(f"seed {row['seed']} has two rows; select one cell and pass it through one_value_per_seed")
        rows[int(row["seed"])] = row
    return rows


def _frame(rows: list[Json]) -> pd.DataFrame:
    extra = sorted({name for row in rows for name in row} - set(COLUMNS))
    frame = pd.DataFrame(rows, columns=[*COLUMNS, *extra])
    for name in _INTEGERS:  # a missing seed must not turn the others into floats
        frame[name] = frame[name].astype("Int64")
    for name in (*VALUES, "learning_rate", "last_written"):
        frame[name] = frame[name].astype("float64")
    return frame


def _read_committed_run(path: Path) -> tuple[Json, str]:
    row: Json = {"run_id": path.stem, "source": "committed", "path": path.as_posix(), "status": "unreadable"}
    try:
        summary = _load(path)
        _fill_identity(row, summary, path.name)
        _fill_result(row, summary, path.name)
    except _UnreadableError as problem:
        row.update(status="unreadable", message=str(problem))
        return row, ""
    return row, json.dumps(summary, sort_keys=True)


def _read_live_run(path: Path) -> tuple[Json, str]:
    row: Json = {"run_id": path.name, "source": "live", "path": path.as_posix(), "status": "unreadable"}
    try:
        _fill_identity(row, _load(path / "manifest.json"), "manifest.json")
        status = _load(path / "status.json")
        row.update(message=status.get("message"), steps=_integer(status.get("step")))
        row["last_written"] = _unix_time(status.get("heartbeat")) or row["last_written"]
        row["status"] = _known_status(status, "status.json")
        ended = row["status"] in ("done", "failed", "diverged")
        if not (path / "summary.json").exists() and row["status"] != "done":
            return row, ""
        summary = _load(path / "summary.json")
        for name in ("run_id", "identity", "group", "seed"):
            _check_agreement(name, summary.get(name), row[name], "manifest.json")
        if not ended:  # a summary from before the run was started again: the status is the truth
            return row, ""
        _check_agreement("status", summary.get("status"), row["status"], "status.json")
        _fill_result(row, summary, "summary.json")
    except _UnreadableError as problem:
        row.update(status="unreadable", message=str(problem))
        return row, ""
    return row, json.dumps(summary, sort_keys=True)


def _check_agreement(field: str, in_summary: object, elsewhere: object, name: str) -> None:
    if in_summary != elsewhere:
        raise _UnreadableError(f"{field} is {in_summary!r} in summary.json but {elsewhere!r} in {name}")


def _load(path: Path) -> Json:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _UnreadableError(f"{path.name} is missing") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise _UnreadableError(f"{path.name}: {problem}") from None
    if not isinstance(value, dict):
        raise _UnreadableError(f"{path.name} holds a {type(value).__name__}, not an object")
    return value


def _fill_identity(row: Json, record: Json, name: str) -> None:
    for field, kind in _REQUIRED_TYPES.items():
        value = record.get(field)
        if not isinstance(value, kind) or isinstance(value, bool):
            problem = f"is {value!r}" if field in record else "is missing"
            raise _UnreadableError(f"{name}: field {field!r} {problem}")
    row.update({field: record.get(field) for field in IDENTIFYING})
    row["learning_rate"] = _number(record.get("learning_rate"))
    code = record.get("code") if isinstance(record.get("code"), dict) else {}
    row.update(commit=(code or {}).get("commit"), dirty=(code or {}).get("dirty"))
    row["code_versions"] = len(record.get("code_history") or [code])
    row["last_written"] = _unix_time(record.get("created"))
    row.update({field: record.get(field) for field in ("config", "data", "environment")})


def _fill_result(row: Json, summary: Json, name: str) -> None:
    row["status"] = _known_status(summary, name)
    row.update(steps=_integer(summary.get("steps")), message=summary.get("message"), curve=summary.get("curve"))
    result = summary.get("result")
    if result is not None and not isinstance(result, dict):
        raise _UnreadableError(f"{name}: result is {result!r}, not an object or null")
    for key in PARTS:
        if isinstance(part := (result or {}).get(key), dict | list):
            row[key] = part
    for split in ("validation", "test"):
        numbers = (result or {}).get(split)
        for key, value in (numbers if isinstance(numbers, dict) else {}).items():
            if (number := _number(value)) is not None:
                row[f"{split}_{key}"] = number


def _known_status(record: Json, name: str) -> str:
    status = record.get("status")
    if status not in STATUSES:
        raise _UnreadableError(f"{name}: status is {status!r}, not one of {', '.join(STATUSES[:-1])}")
    return str(status)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _unix_time(value: object) -> float | None:
    """Seconds since 1970 of a unix time or of an ISO 8601 text, taken as UTC where it names no zone."""
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            return None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return _number(value)


def _check_same_configuration(members: pd.DataFrame, label: str) -> None:
    reference = members.iloc[0]
    for _, other in members.iterrows():
        if other["group"] == reference["group"]:
            continue
        first, second = (_settings(row) for row in (reference, other))
        differing = [key for key in sorted(first.keys() | second.keys()) if first.get(key) != second.get(key)]
        detail = "; ".join(
            f"{key} = {_shown(first, key)} in {reference['run_id']}, {_shown(second, key)} in {other['run_id']}"
            for key in differing
        )
        raise ValueError(
            f"the runs of {label} differ in more than the seed: "
            + (detail or f"group {reference['group'][:12]} against {other['group'][:12]}")
            + ". Give the second configuration an arm of its own, or collect the two separately."
        )


def _check_same_data(members: pd.DataFrame, label: str) -> None:
    """A path says where the data lay, not what was in it: the fingerprint does."""
    by_print: dict[str, str] = {}
    for _, row in members[members["status"] == "done"].iterrows():
        found = (row["data"] or {}).get("fingerprint") if isinstance(row["data"], dict) else None
        by_print.setdefault(str(found), row["run_id"])
    if len(by_print) > 1:
        detail = ", ".join(f"{found[:12]} in {run_id}" for found, run_id in by_print.items())
        raise ValueError(f"the runs of {label} saw different data ({detail}); run those of one data set again")


def _environment_notes(members: pd.DataFrame, label: str) -> list[str]:
    notes = []
    for key in ("device", "torch", "transformers"):
        values = {
            str(row["environment"].get(key)) for _, row in members.iterrows() if isinstance(row["environment"], dict)
        }
        if len(values) > 1:
            notes.append(f"{label}: runs with different {key}, {', '.join(sorted(values))}")
    return notes


def _settings(row: Any) -> Json:
    """The flattened configuration less every key named "seed" that holds the run's own seed."""
    settings = {"numerics_version": int(row["numerics_version"]), **_flatten(row["config"])}
    return {
        key: value for key, value in settings.items() if not (key.rpartition(".")[2] == "seed" and value == row["seed"])
    }


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Json:
    flat: Json = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _shown(settings: Json, key: str) -> str:
    return repr(settings[key]) if key in settings else "absent"


def _choose(repeats: pd.DataFrame, label: str) -> tuple[Any, list[str]]:
    """The row to keep among runs of one configuration and seed: the latest complete one, else the latest."""
    order = repeats.assign(
        _complete=repeats["status"] == "done",
        _time=repeats["last_written"].fillna(-math.inf),
        _live=repeats["source"] == "live",  # committed summaries are published from live runs, so they are older
    ).sort_values(["_complete", "_time", "_live", "path"], kind="stable")
    index = order.index[-1]
    if len(repeats) == 1:
        return index, []
    described = ", ".join(
        f"{row['path']} ({row['status']}"
        + (f", test perplexity {row['test_perplexity']:.6g})" if not pd.isna(row["test_perplexity"]) else ")")
        for _, row in order.iterrows()
    )
    choice = "the latest complete one" if order.loc[index, "_complete"] else "the latest (none is complete)"
    return index, [f"{label}: {len(repeats)} runs, {described}; kept {choice}, {order.loc[index, 'path']}"]


def _code_notes(members: pd.DataFrame, label: str) -> list[str]:
    notes = []
    by_commit: dict[str, list[str]] = {}
    for _, row in members.iterrows():
        commit = "an unknown commit" if pd.isna(row["commit"]) else str(row["commit"])[:12]
        by_commit.setdefault(commit, []).append(str(row["seed"]))
    if len(by_commit) > 1:
        parts = [f"{commit} (seed {', '.join(seeds)})" for commit, seeds in sorted(by_commit.items())]
        notes.append(f"{label}: runs from different code, {'; '.join(parts)}")
    dirty = [str(row["seed"]) for _, row in members.iterrows() if row["dirty"] is True or row["dirty"] == 1]
    mixed = [str(row["seed"]) for _, row in members.iterrows() if row["code_versions"] > 1]
    if mixed:
        notes.append(f"{label}: more than one version of the code had a part in seed {', '.join(mixed)}")
    if dirty:
        notes.append(f"{label}: uncommitted changes in the code of seed {', '.join(dirty)}")
    return notes


def _status_notes(members: pd.DataFrame, label: str, value: str | None) -> list[str]:
    notes = []
    for _, row in members.iterrows():
        if row["status"] != "done":
            notes.append(f"{label} seed {row['seed']}: {row['status']}, no value ({_text(row['message'])})")
        elif value is not None and not math.isfinite(row[value]):
            notes.append(f"{label} seed {row['seed']}: done but without a finite {value.replace('_', ' ')}")
    return notes


def _text(value: object) -> str:
    return "no message" if value is None or pd.isna(value) else str(value)
