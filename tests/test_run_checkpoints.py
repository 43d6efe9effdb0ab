"""A checkpoint of this project's runs: its model is rebuilt from the manifest, and the run goes on from the result."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from models import tokens
from saved import contents, remains
from torch import nn

import saggs
from experiments.config import Config
from experiments.language_model import checkpoint
from experiments.language_model.model import build_model
from experiments.sweep import expand
from saggs.checkpoints import CheckpointError, inspect_checkpoint, open_checkpoint, rebalance_checkpoint
from saggs.checkpoints import operations as checkpoints
from saggs.checkpoints.model import load_model, pairs_of_checkpoint
from saggs.pairs import BALANCED_KINDS

MODELS = ["debug_gpt2", "debug_llama"]


@functools.cache
def pairs_of(name: str) -> tuple[saggs.ScalePair, ...]:
    config: Config = expand([f"model={name}", "scale=debug"])[0].config
    return tuple(saggs.find_pairs(build_model(config, end_of_text=3), BALANCED_KINDS))


def a_run(folder: Path, name: str) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    """A run's directory with two checkpoints, its model and its optimizer at the newer one."""
    config: Config = expand([f"model={name}", "scale=debug"])[0].config
    model = build_model(config, end_of_text=3)
    for pair in pairs_of(name):
        saggs.rescale(model, pair, 8.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"config": dataclasses.asdict(config)}))
    for step in (2, 4):
        ids = tokens(step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(folder / "checkpoints", model, optimizer, {"step": step, "rebalancer": None}, keep=2)
    return folder, model, optimizer


@pytest.mark.parametrize("name", MODELS)
def test_the_model_of_the_manifest_is_the_runs(name: str, tmp_path: Path) -> None:
    """Rebuilt without the suite's code, it computes the same logits to the bit."""
    run, model, _ = a_run(tmp_path / "run", name)
    layout = open_checkpoint(run)
    assert layout.path.name == "step-000004"
    with torch.no_grad():
        wanted = model.eval()(input_ids=tokens(1)).logits
        found = load_model(layout)(input_ids=tokens(1)).logits
    assert float((found - wanted).abs().max()) <= 1e-6 * float(wanted.abs().max())
    if name == "debug_llama":
        assert [str(pair) for pair in pairs_of_checkpoint(layout)] == [str(pair) for pair in pairs_of(name)]
    older = load_model(open_checkpoint(run / "checkpoints" / "step-000002"))(input_ids=tokens(1)).logits.detach()
    assert float((older - wanted).abs().max()) > 1e-4 * float(wanted.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_a_run_goes_on_from_the_result_as_from_balancing_in_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "pairs_of_checkpoint", lambda *_: list(pairs_of(name)))
    run, model, optimizer = a_run(tmp_path / "run", name)
    before = contents(run)
    done = rebalance_checkpoint(run, tmp_path / "out" / "step-000004", factors="power_of_two")
    assert done.optimizer == "carried"
    assert contents(run) == before
    saved = checkpoint.load_newest(tmp_path / "out")
    assert saved is not None
    saggs.balance(model, list(pairs_of(name)), optimizer, factors="power_of_two")
    wanted = checkpoint.weights_of(model)
    assert saved["weights"].keys() == wanted.keys()
    assert all(torch.equal(saved["weights"][n], wanted[n]) for n in wanted)
    state = checkpoint.optimizer_state_of(model, optimizer)
    assert saved["optimizer"]["groups"] == state["groups"]
    for parameter, entry in state["state"].items():
        for key, value in entry.items():
            assert torch.equal(saved["optimizer"]["state"][parameter][key], value)
    assert saved["state"] == {"step": 4, "rebalancer": None}
    assert all(abs(r.log2_ratio or 0) <= 1 for r in inspect_checkpoint(tmp_path / "out" / "step-000004"))


def test_a_damaged_run_checkpoint_is_refused(tmp_path: Path) -> None:
    run, _, _ = a_run(tmp_path / "run", "debug_llama")
    step = run / "checkpoints" / "step-000004"
    assert open_checkpoint(step).manifest == run / "manifest.json"
    shutil.copytree(step, tmp_path / "alone")
    with pytest.raises(CheckpointError, match=r"without the run's manifest.json"):
        rebalance_checkpoint(tmp_path / "alone", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"which is none without its optimizer.pt"):
        rebalance_checkpoint(step, tmp_path / "out", without_optimizer=True)
    (step / "state.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"damaged: state.json is missing or not what was written"):
        rebalance_checkpoint(run, tmp_path / "out")
    (step / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match=r"damaged: COMPLETE is missing"):
        rebalance_checkpoint(step, tmp_path / "out")
    assert remains(tmp_path) == ["alone", "run"]


def test_a_users_own_model_is_refused(tmp_path: Path) -> None:
    run, _, _ = a_run(tmp_path / "run", "debug_llama")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["config"]["model"]["architecture"] = "my_model"
    (run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="'my_model', which only its own code can build"):
        inspect_checkpoint(run)
