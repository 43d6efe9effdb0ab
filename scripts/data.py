"""Fetch or build, tokenise and verify the data of a scale, before any run needs it.

python scripts/data.py --scale mini
"""

from __future__ import annotations

import argparse

from _door import enter


def main() -> int:
    """Raises where the data is missing, saying how to get it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="mini")
    parser.add_argument("overrides", nargs="*")
    chosen = parser.parse_intermixed_args()

    from experiments.language_model.data import load_data
    from experiments.sweep import expand

    data = load_data(expand([f"scale={chosen.scale}", *chosen.overrides])[0].config)
    print(f"{data.name} ({data.variant}), {data.licence}; {data.tokenizer}")
    for split, counts in data.counts.items():
        print(f"  {split:<11}{counts.documents:>9,} documents {counts.words:>12,} words {counts.tokens:>12,} tokens")
    print(f"  sha256 {data.fingerprint}, verified; in {data.directory}")
    return 0


enter(main)
