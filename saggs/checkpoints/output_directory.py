"""A directory that appears whole or not at all.

Its files are written into a hidden sibling, each synced, and the sibling is renamed at the end. Whatever goes wrong
before that removes the sibling; a process that is killed outright leaves it, under a name that says what it is.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from saggs.checkpoints.shards import CheckpointError


def check_output(out: Path, source: Path) -> None:
    """Raise a CheckpointError where `out` exists, or lies in `source` or around it."""
    if os.path.lexists(out):
        raise CheckpointError(f"{out} exists; name a directory that does not")
    if out.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{out} lies inside {source}; name a directory outside of it")


def leftovers(out: Path) -> list[Path]:
    """What calls that were killed while they wrote `out` left behind."""
    return sorted(out.absolute().parent.glob(f".{out.name}.unfinished-*"))


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A directory to write into; it becomes `out` when the block ends well, and is removed when it does not.

    Raises:
        CheckpointError: `out` came into being meanwhile.
        OSError: the disk is full or not writable; nothing is left behind.
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.unfinished-{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        for folder, _, _ in os.walk(temporary):
            sync_directory(Path(folder))
        if os.path.lexists(out):
            raise CheckpointError(f"{out} came into being while it was written; name another directory")
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(out.parent)


def sync_directory(path: Path) -> None:
    """Make what was created or renamed in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
