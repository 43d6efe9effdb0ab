"""A finished run's model in Hugging Face's format: `save_pretrained`, with its tokenizer.

python scripts/export.py outputs/runs/RUN_ID FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

from _door import enter


def main() -> int:
    """Raises where the run has no intact checkpoint or FOLDER exists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_intermixed_args()

    from experiments.language_model.export import export

    step = export(chosen.run, chosen.folder)
    print(f"written: {chosen.folder}, the weights of step {step}")
    return 0


enter(main)
