"""Files damaged behind a run's back, and plugins that are not what they should be: named, and mended where possible."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from forked import DEBUG, ROOT, directory, final_state, read, run
from models import tiny_gpt2, tiny_llama

import saggs
from experiments.run import peek

SHORT = ("arm=saggs", "training.steps=6", "training.warmup_steps=1", "checkpoint.every=2", "evaluation.every=3")


def _command(outputs: Path, *more: str) -> list[str]:
    return [*DEBUG, *SHORT, *more, f"paths.outputs={outputs}"]


@pytest.mark.parametrize("damage", ["removed", "truncated"])
def test_a_finished_run_without_its_summary_is_assessed_again(outputs: Path, damage: str) -> None:
    run(_command(outputs), outputs / "log")
    found = directory(outputs)
    summary, weights = read(found / "summary.json"), final_state(found)
    if damage == "removed":
        (found / "summary.json").unlink()
    else:
        (found / "summary.json").write_text('{"run_id":')
    assert peek(found).status == "interrupted"
    run(_command(outputs), outputs / "log")
    again = read(found / "summary.json")
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in summary.items() if k != "seconds"}
    assert all(torch.equal(weights["weights"][n], t) for n, t in final_state(found)["weights"].items())


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"status": "running"}', "garbage"])
def test_a_damaged_status_is_an_interrupted_run_and_no_traceback(outputs: Path, text: str) -> None:
    run(_command(outputs), outputs / "log")
    (directory(outputs) / "status.json").write_text(text)
    assert peek(directory(outputs)).status == "interrupted"
    child = run(_command(outputs), outputs / "log")
    assert "Traceback" not in child.text()
    assert peek(directory(outputs)).status == "done"


@pytest.mark.parametrize("damage", ["emptied", "garbage of the same length"])
def test_lost_metrics_start_the_run_again_and_end_bit_equal(outputs: Path, damage: str) -> None:
    run(_command(outputs), outputs / "log")
    found = directory(outputs)
    metrics, weights = (found / "metrics.jsonl").read_bytes(), final_state(found)
    (found / "summary.json").unlink()
    (found / "metrics.jsonl").write_bytes(b"" if damage == "emptied" else b"x" * len(metrics))
    child = run(_command(outputs), outputs / "log")
    assert "lost rows" in child.text()
    assert (found / "metrics.jsonl").read_bytes() == metrics
    assert all(torch.equal(weights["weights"][n], t) for n, t in final_state(found)["weights"].items())


def test_a_damaged_manifest_is_refused_by_name(outputs: Path) -> None:
    run(_command(outputs), outputs / "log")
    found = directory(outputs)
    (found / "summary.json").unlink()
    (found / "manifest.json").write_text("{}")
    child = run(_command(outputs), outputs / "log", expected=2)
    assert "manifest.json is damaged; move" in child.text()


def test_a_renamed_checkpoint_is_not_taken_for_a_later_one(outputs: Path) -> None:
    run(_command(outputs), outputs / "log")
    found = directory(outputs)
    weights = final_state(found)
    (found / "summary.json").unlink()
    checkpoints = found / "checkpoints"
    shutil.copytree(checkpoints / "step-000004", checkpoints / "step-000099")
    child = run(_command(outputs), outputs / "log")
    assert "it was renamed" in child.text()
    assert all(torch.equal(weights["weights"][n], t) for n, t in final_state(found)["weights"].items())


PLUGIN = """
    import torch
    from experiments.registry import optimizer, rebalance

    optimizer("text")(lambda groups, learning_rate, weight_decay: "no optimizer")
    optimizer("foreign")(lambda groups, learning_rate, weight_decay: torch.optim.SGD([torch.zeros(1)], lr=1.0))
    optimizer("needy")(lambda groups, learning_rate, weight_decay, gamma: None)
    rebalance("nothing")(lambda model, optimizer, pairs, every, transport: None)
"""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("optimizer=custom", "optimizer.name=text", "optimizer.learning_rate=1.0"), "returned a str"),
        (("optimizer=custom", "optimizer.name=foreign", "optimizer.learning_rate=1.0"), "does not hold exactly"),
        (("optimizer=custom", "optimizer.name=needy", "optimizer.learning_rate=1.0"), "gamma"),
        (("rebalance=custom", "rebalance.name=nothing"), "returned a NoneType without step"),
    ],
)
def test_a_plugin_that_is_not_what_it_should_be_is_refused(
    outputs: Path, tmp_path: Path, settings: tuple[str, ...], message: str
) -> None:
    (tmp_path / "attacking_plugin.py").write_text(textwrap.dedent(PLUGIN))
    more = [*settings, "plugins=[attacking_plugin]", f"paths.outputs={outputs}"]
    environment = {"PYTHONPATH": str(tmp_path)}
    child = run([*DEBUG, *more], outputs / "log", expected=2, environment=environment)
    assert message in child.text()
    assert "Traceback" not in child.text()
    assert not (outputs / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("imbalance.factor=2",), "belongs to another option of imbalance"),
        (("optimizer.weight_decay=inf",), "optimizer.weight_decay=inf: must be a finite number"),
        (("seed=99999999999999999999",), "below 2**63"),
        (("experiment=table2_debug",), "is a sweep; run it with -m"),
        (("-m", "seed=0,-1", "scale=debug"), "seed=-1: must be 0 or more"),
        (("paths.outputs=/dev/null/x",), "cannot use"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_exit_code_2(
    outputs: Path, arguments: tuple[str, ...], message: str
) -> None:
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    command += [] if any(a.startswith("paths.") for a in arguments) else [f"paths.outputs={outputs}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_pairs_of_a_narrower_model_are_refused_by_a_wider_one() -> None:
    narrow, wide = tiny_gpt2(), tiny_gpt2()
    pairs = saggs.find_pairs(narrow)
    for name in ("c_attn", "c_proj"):
        layer = getattr(wide.transformer.h[0].attn, name)
        layer.weight = torch.nn.Parameter(torch.randn(2 * layer.weight.shape[0], 2 * layer.weight.shape[1]))
    with pytest.raises(ValueError, match="find the pairs of this model anew"):
        saggs.rescale(wide, pairs[0], 2.0)
    saggs.rescale(narrow, pairs[0], 2.0)


def test_a_pair_in_json_without_a_key_or_of_an_unknown_kind_is_named() -> None:
    (pair, *_) = saggs.find_pairs(tiny_llama())
    data = json.loads(json.dumps(pair.to_json()))
    assert saggs.ScalePair.from_json(data) == pair
    for change in ({"kind": "foo"}, {"signs": "Positive"}):
        with pytest.raises(ValueError, match="kinds are"):
            saggs.ScalePair.from_json(data | change)
    with pytest.raises(ValueError, match="'left' is missing"):
        saggs.ScalePair.from_json({k: v for k, v in data.items() if k != "left"})


def test_balancing_that_does_nothing_says_so() -> None:
    model = tiny_llama()
    pairs = saggs.find_pairs(model, saggs.BALANCED_KINDS)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.zero_()
    with pytest.warns(UserWarning, match="1 of 6 pairs were left alone"):
        saggs.balance(model, pairs)


def test_a_custom_model_does_not_ignore_transformers_settings(outputs: Path, tmp_path: Path) -> None:
    text = "from experiments.registry import model\n\nmodel('mine')(lambda **_: None)\n"
    (tmp_path / "modelling_plugin.py").write_text(text)
    shape = ["model=custom", "model.name=mine", "model.architecture=mine", "model.layers=1", "model.width=8",
             "model.heads=1", "model.context=32", "plugins=[modelling_plugin]"]  # fmt: skip
    command, environment = [*DEBUG, *shape, f"paths.outputs={outputs}"], {"PYTHONPATH": str(tmp_path)}
    ignored = run([*command, "+model.hf.n_inner=9"], outputs / "log", expected=2, environment=environment)
    assert "a custom model does not read it; use model.options" in ignored.text()
    control = run(command, outputs / "log2", expected=2, environment=environment)
    assert "returned a NoneType, not a torch.nn.Module" in control.text()
