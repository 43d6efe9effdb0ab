"""A run's model as transformers saves it."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from omegaconf import OmegaConf

from experiments import config as schema
from experiments.checks import validated
from experiments.config import Config
from experiments.files import read_json
from experiments.language_model import checkpoint
from experiments.language_model.data import load_data
from experiments.language_model.model import build_model
from experiments.language_model.tokens import save_tokenizer
from experiments.study_config import IndianPines, ModularAddition


def export(run: Path, folder: Path) -> int:
    """Write the newest intact checkpoint of a run with `save_pretrained`, tokenizer included; returns its step.

    Args:
        run: the run's directory.
        folder: must not exist; it appears whole or not at all.

    Raises:
        ValueError: `folder` exists, or the run has no intact checkpoint.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists; name a folder that does not")
    config = config_of(run)
    saved = checkpoint.load_newest(run / "checkpoints")
    if saved is None:
        raise ValueError(f"{run} has no intact checkpoint to export")
    data = load_data(config)
    model = build_model(config, data.end_of_text_id)
    checkpoint.load_weights(model, saved["weights"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        inside = Path(temporary) / "model"
        model.save_pretrained(inside)  # type: ignore[operator]
        save_tokenizer(data, inside)
        inside.rename(folder)
    return int(saved["state"]["step"])


def config_of(run: Path) -> Config:
    """The configuration of a run, from its manifest."""
    stored = read_json(run / "manifest.json")["config"]
    typed = {group: _option(group, stored[group]) for group in schema.OPTIONS if group in stored}
    plain = {key: value for key, value in stored.items() if key not in typed}
    # What belongs to other tasks is not in the manifest, and may be anything.
    base = OmegaConf.structured(Config(scene=IndianPines(), attention=ModularAddition(steps=1)))
    return validated(OmegaConf.merge(base, plain, {k: OmegaConf.structured(v) for k, v in typed.items()}))  # type: ignore[arg-type]


def _option(group: str, values: dict[str, object]) -> object:
    """The option of a group whose settings are exactly these."""
    for node in schema.OPTIONS[group].values():
        if {f.name for f in dataclasses.fields(node)} == values.keys():
            return node(**values)
    raise ValueError(f"no option of {group} has the settings {sorted(values)}; the run is of another code version")
