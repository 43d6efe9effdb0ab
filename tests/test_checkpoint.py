"""A checkpoint is whole or not there; what is loaded is what was saved, under the name it was saved under."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import outputs_in
from forked import DEBUG, composed, differences, directory, final_state, read, run, signal_at, start
from torch import nn

from experiments.checks import validated
from experiments.language_model import checkpoint
from experiments.language_model.model import build_model

COMMAND = [
    *DEBUG,
    "arm=saggs",
    "seed=2",
    "training.steps=14",
    "checkpoint.every=2",
    "checkpoint.keep=3",
    "logging.every=1",
]


# --- damage on disk --------------------------------------------------------------------------------------------------


def truncated(name: str, size: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        os.truncate(path / name, int(size * (path / name).stat().st_size))

    return damage


def flipped(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 1
        (path / name).write_bytes(data)

    return damage


def removed(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


DAMAGE = {
    "weights cut to half": truncated("weights.safetensors", 0.5),
    "optimizer of 0 bytes": truncated("optimizer.pt", 0),
    "one bit of the weights": flipped("weights.safetensors"),
    "one bit of the moments": flipped("optimizer.pt"),
    "one bit of the state": flipped("state.json"),
    "no marker": removed("COMPLETE"),
    "half a marker": truncated("COMPLETE", 0.5),
    "no state": removed("state.json"),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, warm_cache: Path) -> dict[str, Any]:
    """The final state of the run that nothing happened to."""
    outputs = outputs_in(tmp_path_factory.mktemp("reference") / "outputs", warm_cache)
    run([*COMMAND, f"paths.outputs={outputs}"], outputs / "log")
    return final_state(directory(outputs))


@pytest.fixture(scope="module")
def half_way(tmp_path_factory: pytest.TempPathFactory, warm_cache: Path) -> Path:
    """The live store of a run killed after step 8; it has three checkpoints."""
    outputs = outputs_in(tmp_path_factory.mktemp("half") / "outputs", warm_cache)
    run([*COMMAND, f"paths.outputs={outputs}"], outputs / "log", -9, before=signal_at(9, signal.SIGKILL))
    return outputs


def test_every_damage_is_noticed_and_the_one_before_is_used(
    half_way: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, (what, damage) in enumerate(DAMAGE.items()):
        folder = tmp_path / str(number)
        shutil.copytree(directory(half_way) / "checkpoints", folder)
        newest, before = sorted(folder.glob("step-*"))[:-3:-1]
        caplog.clear()
        intact = checkpoint.load_newest(folder)
        assert intact is not None
        assert intact["path"] == newest
        assert not caplog.records, "the control: nothing is damaged yet"
        damage(newest)
        with caplog.at_level(logging.WARNING):
            found = checkpoint.load_newest(folder)
        assert found is not None
        assert found["path"] == before, what
        assert str(newest) in caplog.text, what


@pytest.mark.parametrize("what", ["one bit of the moments", "no marker"])
def test_a_damaged_newest_checkpoint_ends_bit_equal(
    what: str, half_way: Path, tmp_path: Path, reference: dict[str, Any]
) -> None:
    outputs = tmp_path / "outputs"
    shutil.copytree(half_way, outputs, symlinks=True)
    newest, before = sorted((directory(outputs) / "checkpoints").glob("step-*"))[:-3:-1]
    DAMAGE[what](newest)
    child = run([*COMMAND, f"paths.outputs={outputs}"], outputs / "log")
    assert newest.name in child.text()
    timing = [json.loads(line) for line in (directory(outputs) / "timing.jsonl").read_text().splitlines()]
    assert [row["resumed_from"] for row in timing if "resumed_from" in row] == [before.name]
    assert differences(final_state(directory(outputs)), reference) == []


def test_all_checkpoints_damaged_it_starts_again_and_ends_bit_equal(
    half_way: Path, tmp_path: Path, reference: dict[str, Any]
) -> None:
    outputs = tmp_path / "outputs"
    shutil.copytree(half_way, outputs, symlinks=True)
    damaged = sorted((directory(outputs) / "checkpoints").glob("step-*"))
    assert len(damaged) >= 2
    for path in damaged:
        flipped("weights.safetensors")(path)
    child = run([*COMMAND, f"paths.outputs={outputs}"], outputs / "log")
    assert all(path.name in child.text() for path in damaged)
    assert differences(final_state(directory(outputs)), reference) == []


# --- a full disk -----------------------------------------------------------------------------------------------------


def save_at(folder: Path, step: int, keep: int = 2, factor: float = 1.0) -> Path:
    """A checkpoint of a tiny model, told apart by its weights."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(factor * step)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return checkpoint.save(folder, model, optimizer, {"step": step}, keep)


@pytest.mark.parametrize("call", range(1, 6))
def test_a_full_disk_during_a_save_leaves_the_earlier_checkpoint(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five syncs before the rename: three files, the marker, the folder. Each of them may be the one that fails."""
    save_at(tmp_path, 1)
    real, calls = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device"):
            save_at(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert (checkpoint.load_newest(tmp_path) or {})["state"] == {"step": 1}
    save_at(tmp_path, 2)
    assert (checkpoint.load_newest(tmp_path) or {})["state"] == {"step": 2}


def test_a_run_that_meets_a_limit_on_disk_fails_clearly_and_resumes_bit_equal(
    outputs: Path, reference: dict[str, Any]
) -> None:
    """A real limit on the size of a file, set from outside after the first checkpoint."""
    child = start([*COMMAND, f"paths.outputs={outputs}"], outputs / "log", before=signal_at(3, signal.SIGSTOP))
    child.wait_stopped()
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    child.send(signal.SIGCONT)
    assert child.wait() == 1
    assert "File too large" in child.text()
    status = read(directory(outputs) / "status.json")
    assert status["status"] == "failed"
    assert "File too large" in status["message"]
    assert "OSError" in (directory(outputs) / "traceback.txt").read_text()
    assert (checkpoint.load_newest(directory(outputs) / "checkpoints") or {})["state"]["step"] == 2
    run([*COMMAND, f"paths.outputs={outputs}"], outputs / "log")
    assert differences(final_state(directory(outputs)), reference) == []


# --- retention -------------------------------------------------------------------------------------------------------


def test_the_newest_two_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10, 20):
        save_at(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000020"]


def test_the_checkpoint_just_written_stays_though_a_damaged_one_is_of_a_later_step(tmp_path: Path) -> None:
    """Resumed from step 1 because step 9 is damaged, the run must not throw away what it saves at step 5."""
    save_at(tmp_path, 9, keep=1)
    flipped("optimizer.pt")(tmp_path / "step-000009")
    assert checkpoint.load_newest(tmp_path) is None
    save_at(tmp_path, 5, keep=1)
    found = checkpoint.load_newest(tmp_path)
    assert found is not None, f"only {[path.name for path in tmp_path.iterdir()]} is left, which is damaged"
    assert found["state"] == {"step": 5}


def test_step_one_million_is_newer_than_the_step_before_it(tmp_path: Path) -> None:
    save_at(tmp_path, 999_999)
    save_at(tmp_path, 1_000_000)
    assert (checkpoint.load_newest(tmp_path) or {})["state"] == {"step": 1_000_000}


# --- what is loaded is what was saved --------------------------------------------------------------------------------


class Block(nn.Module):
    """Two matrices of one shape, so that swapped moments would fit, and a vector."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.q_proj = nn.Linear(4, 4, dtype=dtype)
        self.k_proj = nn.Linear(4, 4, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.k_proj(torch.tanh(self.q_proj(x)))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> torch.optim.Optimizer:
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def round_trip(tmp_path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    checkpoint.save(tmp_path, model, optimizer, {"step": 1}, keep=1)
    found = checkpoint.load_newest(tmp_path)
    assert found is not None
    return found


def test_moments_come_back_bit_equal_and_the_next_step_with_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Block()
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    saved = round_trip(tmp_path, model, optimizer)
    other = Block()
    fresh = torch.optim.AdamW(other.parameters())
    checkpoint.load_weights(other, saved["weights"])
    forgetful = copy.deepcopy(other)
    checkpoint.load_optimizer_state(other, fresh, saved["optimizer"])
    before = checkpoint.optimizer_state_of(model, optimizer)
    assert differences(before, checkpoint.optimizer_state_of(other, fresh)) == []
    stepped(model, optimizer, 1)
    stepped(other, fresh, 1)
    stepped(forgetful, torch.optim.AdamW(forgetful.parameters()), 1)
    assert differences(checkpoint.weights_of(model), checkpoint.weights_of(other)) == []
    assert differences(checkpoint.weights_of(model), checkpoint.weights_of(forgetful)), "the control: moments matter"


def test_float32_moments_of_bfloat16_weights_stay_float32(tmp_path: Path) -> None:
    """torch's own load_state_dict casts them to bfloat16: the control."""
    torch.manual_seed(0)
    model = Block(torch.bfloat16)
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    for entry in optimizer.state.values():
        entry["exp_avg"] = torch.full_like(entry["exp_avg"], 1.001, dtype=torch.float32)
    saved = round_trip(tmp_path, model, optimizer)
    theirs, ours = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    theirs.load_state_dict(optimizer.state_dict())
    checkpoint.load_optimizer_state(model, ours, saved["optimizer"])
    expected = torch.tensor(1.001)
    assert all(e["exp_avg"].dtype == torch.float32 and (e["exp_avg"] == expected).all() for e in ours.state.values())
    assert all(entry["exp_avg"].dtype == torch.bfloat16 for entry in theirs.state.values())


def test_groups_and_parameters_in_another_order_swap_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Block()

    def groups(backwards: bool) -> torch.optim.AdamW:
        matrices, vectors = ([p for p in model.parameters() if p.dim() == d] for d in (2, 1))
        found = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        if backwards:
            found = [{**group, "params": group["params"][::-1]} for group in found[::-1]]  # type: ignore[index]
        return torch.optim.AdamW(found)

    optimizer = stepped(model, groups(False))
    saved = round_trip(tmp_path, model, optimizer)
    other = groups(True)
    checkpoint.load_optimizer_state(model, other, saved["optimizer"])
    for parameter in model.parameters():
        assert differences(optimizer.state[parameter], other.state[parameter]) == []
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 0.1]
    by_position = groups(True)
    by_position.load_state_dict({**optimizer.state_dict(), "param_groups": by_position.state_dict()["param_groups"]})
    swapped = by_position.state[model.q_proj.weight]["exp_avg"]
    assert not torch.equal(swapped, optimizer.state[model.q_proj.weight]["exp_avg"]), (
        "the control: by position it would"
    )


FOREIGN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another name": (lambda s: s["state"].update({"q_prj.weight": s["state"].pop("q_proj.weight")}), "q_prj.weight"),
    "another shape": (lambda s: s["state"]["q_proj.weight"].update(exp_avg=torch.zeros(4, 5)), "q_proj.weight"),
    "another class": (lambda s: s.update({"class": "SGD"}), "SGD"),
    "another group": (lambda s: s["groups"][0]["names"].pop(), "no saved group"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_state_that_does_not_belong_is_refused(what: str) -> None:
    model = Block()
    saved = checkpoint.optimizer_state_of(model, stepped(model, torch.optim.AdamW(model.parameters())))
    fresh = torch.optim.AdamW(model.parameters())
    checkpoint.load_optimizer_state(model, fresh, saved)  # the control
    change, message = FOREIGN[what]
    change(saved)
    with pytest.raises(ValueError, match=message):
        checkpoint.load_optimizer_state(model, fresh, saved)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
@pytest.mark.parametrize("wrapped", [(True, False), (False, True), (True, True)])
def test_compiled_and_plain_models_share_checkpoints(wrapped: tuple[bool, bool], tmp_path: Path) -> None:
    """`torch.compile` is lazy: wrapping compiles nothing, but it renames every parameter to `_orig_mod.…`."""
    models: list[Any] = []
    for seed, wrap in enumerate(wrapped):
        torch.manual_seed(seed)
        inner = Block()
        models.append(torch.compile(inner) if wrap else inner)
        if wrap:
            assert all(name.startswith("_orig_mod.") for name, _ in models[-1].named_parameters())
    source, target = models
    saved = round_trip(tmp_path, source, torch.optim.AdamW(source.parameters()))
    assert sorted(saved["weights"]) == ["k_proj.bias", "k_proj.weight", "q_proj.bias", "q_proj.weight"]
    checkpoint.load_weights(target, saved["weights"])
    checkpoint.load_optimizer_state(target, torch.optim.AdamW(target.parameters()), saved["optimizer"])
    assert differences(checkpoint.weights_of(source), checkpoint.weights_of(target)) == []


@pytest.mark.parametrize("fault", ["name", "missing", "shape", "dtype"])
def test_weights_that_do_not_fit_are_refused_and_none_is_loaded(fault: str) -> None:
    model = Block()
    saved = {name: torch.full_like(tensor, 7.0) for name, tensor in checkpoint.weights_of(model).items()}
    weight = saved.pop("k_proj.weight")
    if fault != "missing":
        name = "k_prj.weight" if fault == "name" else "k_proj.weight"
        saved[name] = weight[:, :3] if fault == "shape" else weight.bfloat16() if fault == "dtype" else weight
    with pytest.raises(ValueError, match=r"k_proj\.weight"):
        checkpoint.load_weights(model, saved)
    assert not any((tensor == 7.0).any() for tensor in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("option", ["debug_gpt2", "debug_llama"])
def test_tied_stays_tied_and_untied_untied(option: str, tied: bool, tmp_path: Path) -> None:
    """Through the suite's checkpoint and through transformers' own format."""
    from transformers import AutoModelForCausalLM

    def built(seed: int) -> Any:
        arguments = [f"model={option}", f"model.tied={str(tied).lower()}", f"seed={seed}"]
        return build_model(validated(composed([*DEBUG, *arguments])), 0)

    model, other = built(0), built(1)
    count = sum(p.numel() for p in model.parameters())
    saved = round_trip(tmp_path / "ours", model, torch.optim.AdamW(model.parameters()))
    assert sum(t.numel() for t in saved["weights"].values()) == count
    checkpoint.load_weights(other, saved["weights"])
    theirs_at = tmp_path / "theirs"
    model.save_pretrained(theirs_at)
    load: Any = AutoModelForCausalLM.from_pretrained
    theirs, report = load(theirs_at, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    for loaded in (other, theirs):
        assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
        assert sum(p.numel() for p in loaded.parameters()) == count
        assert differences(checkpoint.weights_of(loaded), checkpoint.weights_of(model)) == []
