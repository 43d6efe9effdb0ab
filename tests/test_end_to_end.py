"""The doors as users open them: one command to the table, a local WikiText folder, the examples, an export."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import forked
import pandas as pd
import pytest
import torch

from experiments.code_version import ROOT
from experiments.language_model import checkpoint


def script(*arguments: str, timeout: float = 240.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command of ours in a process of its own."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment, timeout=timeout, check=False
    )


def test_one_command_gives_the_table_and_the_second_one_trains_nothing(outputs: Path) -> None:
    command = ("scripts/reproduce.py", "table2", "--scale", "debug", "--seeds", "0,1", "--launcher", "basic",
               f"paths.outputs={outputs}")  # fmt: skip
    first = script(*command)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "20 runs: 0 done already, 20 to do" in first.stdout
    assert "verdict against the committed runs: no committed cell" in first.stdout
    table = (outputs / "tables" / "table2_debug.csv").read_bytes()
    assert table.count(b"\n") == 11
    assert (outputs / "figures" / "table2_debug_curves.pdf").stat().st_size > 1000
    trained = {path: path.stat().st_mtime_ns for path in (outputs / "runs").glob("*/status.json")}
    begun = time.monotonic()
    second = script(*command)
    assert second.returncode == 0
    assert "20 done already, 0 to do" in second.stdout
    assert time.monotonic() - begun < 60  # the promise of the README, a minute on two cores
    assert {path: path.stat().st_mtime_ns for path in (outputs / "runs").glob("*/status.json")} == trained
    assert (outputs / "tables" / "table2_debug.csv").read_bytes() == table
    status = script("scripts/status.py", "table2", "--scale", "debug", f"paths.outputs={outputs}", "seed=0,1,2")
    assert status.returncode == 1  # the control: a seed that was not run is missing
    assert "20 done, 10 missing" in status.stdout


def test_a_scale_that_this_machine_has_no_device_for_is_refused_before_anything_runs(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        return
    command = ("scripts/reproduce.py", "table2", "--scale", "paper", f"paths.outputs={tmp_path}")
    done = script(*command)
    assert done.returncode == 2
    assert "no CUDA device is available here" in done.stderr
    insisted = script(*command, "training.device=cpu", "data.path=/nowhere")
    assert insisted.returncode == 2
    assert "/nowhere" in insisted.stderr  # the device is no objection any more; the data is
    assert not (tmp_path / "runs").exists()


WIKITEXT = {
    "train": [" = Valkyria = \n", " \n", " The game 's story @-@ line was <unk> to 1 @,@ 000 players . \n"] * 60,
    "validation": [" = Other = \n", " \n", " A second text of a few words , all of them known . \n"] * 8,
    "test": [" = Last = \n", " \n", " = = Section = = \n", " A third text , with 3 @.@ 5 words . \n"] * 8,
}


def _wikitext(folder: Path, form: str) -> Path:
    folder.mkdir()
    for split, lines in WIKITEXT.items():
        if form == "parquet":  # the hub's rows: lines without text are empty strings
            rows = [line if line.strip() else "" for line in lines]
            pd.DataFrame({"text": rows}).to_parquet(folder / f"{split}-00000-of-00001.parquet")
        else:
            (folder / f"wiki.{'valid' if split == 'validation' else split}.raw").write_text("".join(lines))
    return folder


def test_a_local_wikitext_folder_trains_the_same_from_parquet_and_from_text(tmp_path: Path) -> None:
    weights = {}
    for form in ("parquet", "text"):
        settings = ("data=wikitext103", f"data.path={_wikitext(tmp_path / form, form)}", "data.vocabulary=50257",
                    "data.limit_documents=null", "training.steps=3", "training.warmup_steps=1")  # fmt: skip
        store = tmp_path / f"outputs-{form}"
        forked.run([*forked.DEBUG, *settings, f"paths.outputs={store}"], tmp_path / f"{form}.log")
        (run,) = forked.directories(store)
        saved = checkpoint.load_newest(run / "checkpoints")
        assert saved is not None
        weights[form] = saved["weights"]
    assert all(torch.equal(weights["parquet"][name], weights["text"][name]) for name in weights["text"])
    assert weights["text"]["transformer.wte.weight"].shape[0] == 50257


def test_an_exported_model_loads_in_transformers_and_predicts_the_same(outputs: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from experiments.language_model.export import export

    short = ("training.steps=3", "training.warmup_steps=1")
    forked.run([*forked.DEBUG, *short, f"paths.outputs={outputs}"], tmp_path / "run.log")
    (run,) = forked.directories(outputs)
    assert export(run, tmp_path / "model") == 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    saved = checkpoint.load_newest(run / "checkpoints")
    assert saved is not None
    own = checkpoint.weights_of(model)
    assert own.keys() == saved["weights"].keys()
    assert all(torch.equal(own[name], saved["weights"][name]) for name in own)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("Hello world")["input_ids"]
    with pytest.raises(ValueError, match="exists"):
        export(run, tmp_path / "model")


def test_the_examples_run(outputs: Path) -> None:
    done = script("examples/own_loop.py")
    assert done.returncode == 0, done.stderr
    assert "log2 norm ratios at the end" in done.stdout
    plugin = ("train.py", "scale=debug", "progress=false", f"paths.outputs={outputs}", "plugins=[my_plugin]",
              "optimizer=custom", "optimizer.name=sign_momentum", "optimizer.learning_rate=1e-3",
              "training.steps=3", "training.warmup_steps=1")  # fmt: skip
    done = script(*plugin, "+optimizer.options.momentum=0.95", PYTHONPATH="examples")
    assert done.returncode == 0, done.stderr
    wrong = script(*plugin, "+optimizer.options.momentun=0.95", PYTHONPATH="examples")
    assert wrong.returncode == 2
    assert "did you mean 'momentum'" in wrong.stderr
