"""Which version of this code runs: the commit, and whether files differ from it.

Asked once a process, when it starts: what is on disk later is not what has been imported.
"""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_SOURCES = ("saggs", "experiments", "train.py", "configs")


@functools.cache
def code_version() -> dict[str, Any]:
    """{"commit": hash or None outside a checkout, "dirty": whether sources differ from it}."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(_git("status", "--porcelain", "--", *_SOURCES))}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
