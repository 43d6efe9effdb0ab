"""What every script does first: find the project, speak plainly of errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def enter(main: Callable[[], int]) -> None:
    """Run `main`; a user's error is one line on stderr and exit code 2."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
    except (HydraException, OmegaConfBaseException) as error:
        from experiments.command_line import explain

        print(f"refused: {explain(error)}", file=sys.stderr)
        code = 2
    except ValueError as error:
        print(f"refused: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)
