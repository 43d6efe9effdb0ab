"""A run that is stopped or killed at any moment and started again ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import outputs_in
from forked import DEBUG, Child, differences, directories, directory, final_state, read, rows, run, signal_at, start

STEPS = 18
RUNS = {
    "soft_saggs": ("arm=soft_saggs", "imbalance.step=7", "rebalance.every=4", "seed=3"),
    "dropout": ("arm=saggs", "model.dropout=0.1", "rebalance.every=5", "seed=0"),
    "virtual": (
        "imbalance=reciprocal",
        "imbalance.step=7",
        "rebalance=virtual",
        "rebalance.every=4",
        "rebalance.damping=0.5",
    ),
    "llama": ("model=debug_llama", "arm=saggs", "optimizer=sgd", "imbalance.distribution=log_uniform"),
}


def command(name: str, outputs: Path, every: int = 2, steps: int = STEPS) -> list[str]:
    """The command line of one of the runs."""
    return [*DEBUG, *RUNS[name], f"training.steps={steps}", "logging.every=1", "evaluation.every=6",
            f"checkpoint.every={every}", f"paths.outputs={outputs}"]  # fmt: skip


@dataclass
class Reference:
    """A run that nothing happened to: what it left behind, and how long it took."""

    state: dict[str, Any]
    seconds: float


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, warm_cache: Path) -> Callable[[str], Reference]:
    """Runs that nothing happened to, made when first asked for."""

    @functools.cache
    def made(name: str) -> Reference:
        outputs = outputs_in(tmp_path_factory.mktemp(name) / "outputs", warm_cache)
        began = time.monotonic()
        run(command(name, outputs), outputs / "log")
        return Reference(final_state(directory(outputs)), time.monotonic() - began)

    return made


def require_equal(outputs: Path, reference: Reference) -> None:
    """The run ended as the undisturbed one did, and logged each step once."""
    assert differences(final_state(directory(outputs)), reference.state) == []
    steps = [row["step"] for row in rows(directory(outputs)) if "loss" in row]
    assert steps == list(range(1, STEPS + 1))
    assert read(directory(outputs) / "status.json")["status"] == "done"


def checkpoints(outputs: Path) -> list[Path]:
    return sorted((outputs / "runs").glob("*/checkpoints/step-*"))


def stopped(name: str, outputs: Path, every: int = 2) -> Child:
    """A run asked to stop by SIGTERM within step 9, once its row is written."""
    return run(command(name, outputs, every), outputs / "log", expected=143, before=signal_at(9, signal.SIGTERM))


# --- killed ----------------------------------------------------------------------------------------------------------


def kill_at_random_moments(
    name: str, outputs: Path, reference: Reference, every: int, kills: int, draw: random.Random
) -> None:
    for _ in range(kills):
        child = start(command(name, outputs, every), outputs / "log")
        time.sleep(draw.uniform(0.0, reference.seconds))
        child.kill()
    run(command(name, outputs, every), outputs / "log")
    require_equal(outputs, reference)


@pytest.mark.parametrize(("name", "trial"), [("soft_saggs", 0), ("soft_saggs", 1), ("soft_saggs", 2),
                                             ("dropout", 0), ("dropout", 1)])  # fmt: skip
def test_killed_twice_at_random_moments_the_run_ends_bit_equal(
    name: str, trial: int, outputs: Path, reference: Callable[[str], Reference]
) -> None:
    """Ten moments in all, drawn uniformly over the duration of an undisturbed run."""
    draw = random.Random(f"{name} {trial}")
    kill_at_random_moments(name, outputs, reference(name), every=1 + trial % 3, kills=2, draw=draw)


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(10))
@pytest.mark.parametrize("name", list(RUNS))
def test_a_storm_of_kills_ends_bit_equal(
    name: str, trial: int, outputs: Path, reference: Callable[[str], Reference]
) -> None:
    draw = random.Random(f"storm {name} {trial}")
    kill_at_random_moments(name, outputs, reference(name), every=1 + trial % 3, kills=1 + trial % 5, draw=draw)


def test_killed_before_the_first_checkpoint_it_ends_bit_equal(
    outputs: Path, reference: Callable[[str], Reference]
) -> None:
    run(command("soft_saggs", outputs, every=STEPS), outputs / "log", -9, before=signal_at(4, signal.SIGKILL))
    assert checkpoints(outputs) == []
    assert rows(directory(outputs))[-1]["step"] == 4
    run(command("soft_saggs", outputs, every=STEPS), outputs / "log")
    require_equal(outputs, reference("soft_saggs"))


def test_killed_during_a_save_it_ends_bit_equal_and_leaves_nothing_behind(
    outputs: Path, reference: Callable[[str], Reference]
) -> None:
    def leftovers() -> list[Path]:
        return list((outputs / "runs").glob("*/checkpoints/.step-*"))

    for _ in range(20):
        shutil.rmtree(outputs / "runs", ignore_errors=True)
        child = start(command("soft_saggs", outputs, every=1), outputs / "log")
        child.wait_until(lambda: bool(leftovers()))
        child.kill()
        if leftovers():
            break
    assert leftovers(), "no kill met a save"
    run(command("soft_saggs", outputs, every=1), outputs / "log")
    assert leftovers() == []
    require_equal(outputs, reference("soft_saggs"))


# --- stopped ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(RUNS))
def test_sigterm_saves_says_interrupted_and_resumes_bit_equal(
    name: str, outputs: Path, reference: Callable[[str], Reference]
) -> None:
    child = stopped(name, outputs, every=STEPS)
    status = read(directory(outputs) / "status.json")
    step = status["step"]
    assert status["status"] == "interrupted"
    assert step in (9, 10), "the signal came within step 9: the run stops at its end, or after the next one"
    assert f"interrupted: SIGTERM at step {step}; the state is saved" in child.text()
    assert not (directory(outputs) / "summary.json").exists()
    assert [path.name for path in checkpoints(outputs)] == [f"step-{step:06d}"], "it says that the state is saved"
    run(command(name, outputs), outputs / "log")
    timing = [json.loads(line) for line in (directory(outputs) / "timing.jsonl").read_text().splitlines()]
    assert [row["resumed_from"] for row in timing if "resumed_from" in row] == [f"step-{step:06d}"]
    require_equal(outputs, reference(name))


def test_sigint_leaves_130_and_interrupted(outputs: Path) -> None:
    run(command("soft_saggs", outputs, every=STEPS), outputs / "log", 130, before=signal_at(3, signal.SIGINT))
    assert read(directory(outputs) / "status.json")["status"] == "interrupted"


def test_sigterm_stops_a_whole_sweep_and_not_only_its_present_run(outputs: Path) -> None:
    """A scheduler that asks to stop kills seconds later: what the sweep begins in between is lost."""
    sweep = ["-m", *command("soft_saggs", outputs), "model.dropout=0.1,0.2,0.3"]
    run(sweep, outputs / "log", 143, before=signal_at(3, signal.SIGTERM))
    states = [read(path / "status.json")["status"] for path in directories(outputs)]
    assert states == ["interrupted"], f"after SIGTERM the sweep went on: {states}"


def test_a_second_command_leaves_a_live_run_alone(outputs: Path, reference: Callable[[str], Reference]) -> None:
    first = start(command("soft_saggs", outputs), outputs / "log", before=signal_at(5, signal.SIGSTOP))
    first.wait_stopped()
    second = run(command("soft_saggs", outputs), outputs / "second")
    first.send(signal.SIGCONT)
    assert "left alone" in second.text()
    assert first.wait() == 0
    require_equal(outputs, reference("soft_saggs"))


# --- the comparison has teeth ----------------------------------------------------------------------------------------


def rewrite(checkpoint: Path, name: str, data: bytes) -> None:
    """Replace a file of a checkpoint, and the marker too, so that it passes for intact."""
    (checkpoint / name).write_bytes(data)
    hashes = read(checkpoint / "COMPLETE") | {name: hashlib.sha256(data).hexdigest()}
    (checkpoint / "COMPLETE").write_text(json.dumps(hashes))


def later_counter(checkpoint: Path) -> None:
    state = read(checkpoint / "state.json")
    state["rebalancer"]["steps"] += 1
    rewrite(checkpoint, "state.json", json.dumps(state).encode())


def earlier_metrics(checkpoint: Path) -> None:
    state = read(checkpoint / "state.json")
    metrics = (checkpoint.parents[1] / "metrics.jsonl").read_bytes()[: state["metrics"]["bytes"]]
    shorter = metrics[: -len(metrics.splitlines(keepends=True)[-1])]
    state["metrics"] = {"bytes": len(shorter), "sha256": hashlib.sha256(shorter).hexdigest()}
    rewrite(checkpoint, "state.json", json.dumps(state).encode())


def empty_moments(checkpoint: Path) -> None:
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    for entry in saved["state"].values():
        entry["exp_avg"].zero_()
    torch.save(saved, checkpoint / "optimizer.pt")
    rewrite(checkpoint, "optimizer.pt", (checkpoint / "optimizer.pt").read_bytes())


@pytest.fixture(scope="module")
def half_way(tmp_path_factory: pytest.TempPathFactory, warm_cache: Path) -> Path:
    """The live store of a run stopped half way."""
    outputs = outputs_in(tmp_path_factory.mktemp("half") / "outputs", warm_cache)
    stopped("soft_saggs", outputs)
    return outputs


@pytest.mark.parametrize("tamper", [None, later_counter, earlier_metrics, empty_moments])
def test_a_tampered_state_ends_elsewhere(
    tamper: Callable[[Path], None] | None, half_way: Path, tmp_path: Path, reference: Callable[[str], Reference]
) -> None:
    """The control of every test above: one wrong counter, one row too few, lost moments would be noticed."""
    outputs = tmp_path / "outputs"
    shutil.copytree(half_way, outputs, symlinks=True)
    if tamper is not None:
        tamper(checkpoints(outputs)[-1])
    run(command("soft_saggs", outputs), outputs / "log")
    found = differences(final_state(directory(outputs)), reference("soft_saggs").state)
    assert bool(found) == (tamper is not None)
    if tamper in (later_counter, empty_moments):
        assert any(line.startswith(".weights") for line in found)


# --- watching changes nothing ----------------------------------------------------------------------------------------

WATCHING = {
    "evaluation": ["evaluation.every=5", "evaluation.curve_tokens=256", "evaluation.batch_sequences=5"],
    "logging and saving": ["logging.every=7", "checkpoint.every=4", "checkpoint.keep=1"],
    "wandb": ["wandb.mode=offline"],
    "another seed": ["seed=1"],
}


@pytest.mark.parametrize("what", WATCHING)
def test_how_a_run_is_watched_changes_no_bit_of_its_weights(
    what: str, outputs: Path, reference: Callable[[str], Reference]
) -> None:
    """With dropout, so that a random number drawn by evaluation or logging would show. The seed is the control."""
    run([*command("dropout", outputs), *WATCHING[what]], outputs / "log")
    found, expected = final_state(directory(outputs)), reference("dropout").state
    same = [differences(found[part], expected[part]) == [] for part in ("weights", "optimizer")]
    assert same == [what != "another seed"] * 2


def plain_training(outputs: Path) -> dict[str, torch.Tensor]:
    """The control arm as anybody would write it: torch's AdamW and nothing of the suite's loop."""
    from experiments.identity import derived_seed
    from experiments.language_model.batches import Batches
    from experiments.language_model.model import build_model
    from experiments.language_model.task import load_data
    from experiments.sweep import expand

    torch.set_num_threads(1)
    config = expand([*DEBUG, "arm=control", "seed=5", f"training.steps={STEPS}", f"paths.outputs={outputs}"])[0].config
    data = load_data(config)
    model = build_model(config, data.end_of_text_id)
    batches = Batches(data.train, config.model.context, derived_seed(5, "data"))
    settings = config.optimizer
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True,
    )  # fmt: skip
    warm_up, size = config.training.warmup_steps, config.training.total_batch_tokens // config.model.context
    for step in range(1, STEPS + 1):
        inputs, targets = batches.sample((step - 1) * size, size)
        hidden = model.base_model(input_ids=inputs)[0].flatten(0, 1)  # type: ignore[operator]
        loss = torch.nn.functional.linear_cross_entropy(
            hidden, model.lm_head.weight, targets.flatten(), reduction="sum",  # type: ignore[arg-type, union-attr]
            options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=256),
        ) / targets.numel()  # fmt: skip
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        cosine = 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (STEPS - warm_up)))
        factor = step / warm_up if step < warm_up else cosine * 0.9 + 0.1
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * factor
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("arm", "equal"), [("control", True), ("control_saggs", False)])
def test_never_rebalancing_is_plain_adamw_bitwise(arm: str, equal: bool, outputs: Path) -> None:
    """Exact equality: the same operations in the same order. A run that does balance is the control."""
    run([*DEBUG, f"arm={arm}", "seed=5", f"training.steps={STEPS}", f"paths.outputs={outputs}"], outputs / "log")
    found = differences(final_state(directory(outputs))["weights"], plain_training(outputs))
    assert (found == []) == equal, found
