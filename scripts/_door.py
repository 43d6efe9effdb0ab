"""What every script does first: find the project, speak plainly of errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def enter(main: Callable[[], int]) -> None:
    """Run `main`; a user's error is one line on stderr and exit code 2."""
    try:
        from experiments.command_line import guarded
    except ImportError as error:
        sys.exit(f"{error.name} is not installed here: run `make setup`, then `source .venv/bin/activate`")
    codes: list[int] = []
    refused = guarded(lambda: codes.append(main()))
    sys.exit(codes[0] if codes else refused)


def committed_parser(description: str | None) -> argparse.ArgumentParser:
    """What every script takes that works from committed summaries alone."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+")
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--runs", type=folder, default=ROOT / "results" / "runs")
    return parser


def folder(text: str) -> Path:
    """A folder that exists; anything else is refused with its name."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such folder")
    return Path(text)


def wide_console() -> Console:
    """A console that does not fold tables where the output is no terminal."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=180)
