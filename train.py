"""Train one run, or a sweep of them: the single entry point of every run of every task.

    python train.py model=mini_llama arm=saggs seed=3
    python train.py -m experiment=table2 hydra/launcher=joblib

The same command again skips a finished run, resumes an interrupted one, and leaves one alone that is alive.
`python train.py --help` lists the choices; docs/configuration.md explains them.
"""

from __future__ import annotations

import sys

try:
    import hydra
    from omegaconf import DictConfig
except ImportError as error:
    sys.exit(f"{error.name} is not installed here: run `make setup`, then `source .venv/bin/activate`")

from experiments import command_line, config

config.register()


@hydra.main(version_base="1.3", config_path="configs", config_name="config")
def main(settings: DictConfig) -> str:
    """One run; returns how it ended: "done", "skipped", "alive"."""
    return command_line.run(settings)


if __name__ == "__main__":
    sys.exit(command_line.main(main, sys.argv[1:]))
