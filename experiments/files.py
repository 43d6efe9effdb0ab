"""Writing files so that a reader sees the old or the new one, never half of one."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_atomically(path: Path, data: bytes) -> None:
    """Write to a temporary sibling, sync it to disk, rename it over `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON, atomically. NaN and infinities are refused: they are not JSON."""
    write_atomically(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """The value of a JSON file; a ValueError naming the file where it is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON ({error}); it was damaged after it was written") from None


def sync_directory(path: Path) -> None:
    """Make a rename in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
