"""Every configuration composes; a wrong one is refused by name at once; the identity holds what changes results."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import ROOT, composed

from experiments import config as schema
from experiments import identity as identity_module
from experiments import registry
from experiments.checks import ConfigError, validated
from experiments.config import (
    SGD,
    AdamW,
    Config,
    CustomModel,
    CustomOptimizer,
    CustomRebalance,
    Data,
    GPT2Model,
    LlamaModel,
    Optimizer,
    ReciprocalImbalance,
    RMSprop,
    Saggs,
    Training,
)
from experiments.identity import CANNOT_CHANGE_THE_RESULT, Identity, flatten, recorded, relevant
from experiments.study_config import Characters, IndianPines, MatScene, ModularAddition, RuleGrid
from experiments.sweep import expand

# --- everything under configs/ composes ------------------------------------------------------------------------------

NEEDED = {
    "model/custom": [f"model.{k}=4" for k in ("layers", "width", "heads", "context")]
    + ["model.name=mine", "model.architecture=mine"],
    "data/text": ["data.path=somewhere"],
    "optimizer/custom": ["optimizer.name=mine", "optimizer.learning_rate=1e-3"],
    "rebalance/custom": ["rebalance.name=mine"],
    "rules/one": ["rules.one.rule=gd", "rules.one.rates=[0.1]"],
    "scene/mat": ["scene.name=mine", "scene.path=a.mat", "scene.variable=a"],
}
GROUPS = sorted(
    path.name for path in schema.CONFIGS.iterdir() if path.is_dir() and path.name not in ("experiment", "hydra")
)
OPTIONS = [f"{group}/{path.stem}" for group in GROUPS for path in sorted((schema.CONFIGS / group).glob("*.yaml"))]
EXPERIMENTS = {"table1": 1, "table2": 50, "table2_debug": 20, "table2_paper": 50, "table5": 5, "table5_debug": 2}
EXPERIMENTS |= {"tune_table2": 40, "table6": 39, "table6_debug": 2, "table7": 2, "table7_chosen": 2, "table7_debug": 2}
EXPERIMENTS |= {"table7_paper": 16, "table8": 8, "table8_debug": 4}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_every_group_composes_and_is_valid(option: str) -> None:
    group, name = option.split("/")
    found = validated(composed([f"{group}={name}", *NEEDED.get(option, [])]))
    chosen = getattr(found, group) if group != "study" else {"task": found.task}
    assert dataclasses.is_dataclass(chosen) or isinstance(chosen, dict) or chosen == name
    if option in NEEDED:
        with pytest.raises(ConfigError, match="no value for"):
            validated(composed([f"{group}={name}"]))


def expands(name: str, *narrower: str) -> int:
    runs = expand([f"experiment={name}", *narrower])
    assert len({run.run_id for run in runs}) == len(runs)
    return len(runs)


def test_every_experiment_is_known_here_and_begins_with_its_command() -> None:
    files = {path.stem: path.read_text() for path in (schema.CONFIGS / "experiment").glob("*.yaml")}
    assert files.keys() == EXPERIMENTS.keys()
    for name, text in files.items():
        assert text.splitlines()[1].startswith(f"# python train.py -m experiment={name}")


@pytest.mark.parametrize(
    ("name", "narrower", "count"),
    [
        ("table2", ["seed=0"], 10),
        ("table2_paper", ["seed=0", "arm=control,soft_saggs"], 4),
        ("table2_debug", ["model=debug_llama"], 10),
        ("tune_table2", ["seed=100", "arm=control"], 10),
    ],
)
def test_every_experiment_expands_to_distinct_valid_runs(name: str, narrower: list[str], count: int) -> None:
    assert expands(name, *narrower) == count


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_expands_whole(name: str) -> None:
    assert expands(name) == EXPERIMENTS[name]


@pytest.mark.parametrize(
    ("model", "data", "millions"),
    [
        ("modern_31m", "wikitext103", 31.1),
        ("gpt_101m", "wikitext103", 101.1),
        ("gpt_123m8", "wikitext103", 123.85),
        ("mini_gpt2", "wikipedia_mini", 1.33),
        ("mini_llama", "wikipedia_mini", 1.32),
    ],
)
def test_the_models_have_the_sizes_that_their_files_state(model: str, data: str, millions: float) -> None:
    """Counted on the meta device, a tied matrix once."""
    from experiments.language_model.model import build_model

    built = build_model(validated(composed([f"model={model}", f"data={data}"])), 0, device="meta")
    assert (
        round(sum(p.numel() for p in built.parameters()) / 1e6, 2 if millions < 2 or millions > 120 else 1) == millions
    )


# --- refusals --------------------------------------------------------------------------------------------------------

WRAPPER = """
import runpy, sys
sys.argv = ["train.py", *sys.argv[1:]]
code = 0
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as end:
    code = end.code
print("IMPORTED" if "torch" in sys.modules or "transformers" in sys.modules else "NOT IMPORTED", file=sys.stderr)
sys.exit(code)
"""


def train(*arguments: str, outputs: Path) -> subprocess.CompletedProcess[str]:
    """A real process of train.py that says at its end whether torch or transformers were imported."""
    command = [sys.executable, "-c", WRAPPER, f"paths.outputs={outputs}", "scale=debug", "progress=false", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


# What is wrong, and what the message must contain: the key, the value where one is wrong, and the remedy.
WRONG = {
    "unknown group": (["+optim.lrr=1e-3"], ["optim", "optimizer"]),
    "unknown nested key": (["model.n_layre=4"], ["model.n_layre", "model.layers"]),
    "misspelt nested key": (["model.widht=3"], ["model.widht", "model.width"]),
    "added nested key": (["+model.width_=3"], ["model.width_", "width"]),
    "added top key": (["+leraning=1"], ["leraning", "training"]),
    "fraction for an integer": (["seed=1.5"], ["seed", "1.5"]),
    "truth value for an integer": (["seed=true"], ["seed=True", "Integer"]),
    "word for a number": (["optimizer.learning_rate=abc"], ["optimizer.learning_rate", "abc"]),
    "period of zero": (["rebalance=saggs", "rebalance.every=0"], ["rebalance.every=0", "at least 1"]),
    "damping of two": (["rebalance=virtual", "rebalance.damping=2"], ["rebalance.damping=2", "1 is hard"]),
    "unknown option": (["model=mini_gpt3"], ["mini_gpt3", "mini_gpt2"]),
    "negative seed": (["seed=-1"], ["seed=-1", "0 or more"]),
    "unknown task": (["task=language_modle"], ["task=language_modle", "language_model"]),
    "no file": (["data=text"], ["data.path"]),
    "setting of a study": (["sensing.steps=3"], ["sensing.steps=3", "task=language_model", "ignore"]),
    "model of a study": (["study=nine", "model=mini_llama"], ["model=mini_llama", "task=matrix_sensing", "ignore"]),
    "all observed": (["study=completion", "scene.density=1"], ["scene.density=1.0", "between 0 and 1"]),
    "arm that is not there": (["rules.gd.rates=[1]"], ["rules.gd", "rules=one"]),
    "factors too wide": (["study=nine", "sensing.width=50"], ["sensing.width=50", "sensing.size=40"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_setting_is_refused_by_name_before_torch_is_imported(what: str, tmp_path: Path) -> None:
    arguments, expected = WRONG[what]
    done = train(*arguments, outputs=tmp_path / "outputs")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    message = next(line for line in done.stderr.splitlines() if line.startswith("refused: "))
    assert [word for word in expected if word not in message] == [], message
    assert "NOT IMPORTED" in done.stderr
    assert not (tmp_path / "outputs" / "runs").exists()


def test_a_misspelt_key_in_an_experiment_file_is_refused(tmp_path: Path) -> None:
    """In a folder of the user's own; the same file spelt right is the control."""
    (tmp_path / "experiment").mkdir()
    for name, key in (("wrong", "warmup_stpes"), ("right", "warmup_steps")):
        text = f"# @package _global_\ntraining: {{{key}: 2}}\n"
        (tmp_path / "experiment" / f"{name}.yaml").write_text(text)
    folder = ["--config-dir", str(tmp_path), "--cfg", "job"]
    done = train("experiment=wrong", *folder, outputs=tmp_path / "outputs")
    assert done.returncode == 2, done.stderr
    assert "training.warmup_stpes" in done.stderr
    assert "training.warmup_steps" in done.stderr
    done = train("experiment=right", *folder, outputs=tmp_path / "outputs")
    assert done.returncode == 0, done.stderr
    assert "warmup_steps: 2" in done.stdout


@registry.optimizer("adadelta")
def _adadelta(groups: list[dict[str, Any]], learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.Adadelta(groups, lr=learning_rate)


# Its second state, squared updates, starts from eps: no power of a factor carries it.
ADADELTA = ["optimizer=custom", "optimizer.name=adadelta", "optimizer.learning_rate=1e-2"]


def refusal(arguments: list[str], outputs: Path) -> str:
    """The message of a refusal that needs the model or the data; fails where nothing is refused."""
    from experiments import command_line

    with pytest.raises(ValueError) as caught:
        command_line.run(composed(["scale=debug", "progress=false", *arguments, f"paths.outputs={outputs}"]))
    assert not (outputs / "runs").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["model=debug_llama", "+model.hf.hiden_act=silu"], ["model.hf.hiden_act", "'hidden_act'"]),
        (["+model.hf.hiden_size=64"], ["model.hf.hiden_size", "GPT2Config"]),
        (["model=debug_llama", "+model.hf.hiden_size=64"], ["model.hf.hiden_size", "'hidden_size'"]),
        (["model=debug_llama", "+model.hf.hidden_size=64"], ["model.hf.hidden_size", "change those"]),
        (["rebalance=saggs", "rebalance.kinds=[up_down]"], ["rebalance.kinds", "up_down", "rebalance=none"]),
        (["imbalance=reciprocal", "imbalance.kinds=[up_down]"], ["imbalance.kinds", "imbalance=none"]),
        ([*ADADELTA, "rebalance=saggs"], ["Adadelta", "'acc_delta'", "rebalance.transport=false"]),
        ([*ADADELTA, "rebalance=virtual"], ["Adadelta", "'acc_delta'", "rebalance=none"]),
        ([*ADADELTA, "imbalance=reciprocal"], ["Adadelta", "imbalance.transport=false"]),
        (["optimizer=custom", "optimizer.name=mine", "optimizer.learning_rate=1"], ["'mine'", "plugins="]),
        (["optimizer=muon"], ["optimizer=muon", "task=attention_rotation"]),
        (["plugins=[no_such_module]"], ["no_such_module", "PYTHONPATH"]),
        (["data=wikitext103", "data.vocabulary=50257"], ["wikitext103", "HF_HUB_OFFLINE", "data.path=FOLDER"]),
        (["data.limit_documents=1"], ["split", "limit_documents"]),
        (["data=text", "data.path=/nowhere"], ["/nowhere", "data.path="]),
    ],
)
def test_what_only_model_or_data_can_tell_is_refused_before_a_run_is_opened(
    arguments: list[str], expected: list[str], outputs: Path
) -> None:
    message = refusal(arguments, outputs)
    assert [word for word in expected if word not in message] == [], message


def test_missing_data_in_a_real_process_exits_2_quickly_with_a_remedy(tmp_path: Path) -> None:
    done = train("data=wikitext103", "data.vocabulary=50257", outputs=tmp_path / "outputs")
    assert done.returncode == 2, done.stderr
    assert "data.path=FOLDER" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outputs" / "runs").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [*ADADELTA, "arm=control"],
        [*ADADELTA, "arm=saggs", "rebalance.transport=false", "imbalance.transport=false"],
        ["optimizer=rmsprop", "arm=saggs"],
        ["optimizer=adam"],
        ["optimizer=scalar_adam"],
        ["model=debug_llama", "arm=saggs", "rebalance.kinds=[up_down]"],
        ["model=debug_llama", "+model.hf.rms_norm_eps=1e-5"],
    ],
)
def test_the_controls_of_the_refusals_are_accepted(arguments: list[str], outputs: Path) -> None:
    from experiments.language_model.task import prepare

    config = validated(composed(["scale=debug", "progress=false", *arguments, f"paths.outputs={outputs}"]))
    assert prepare(config).total_steps == 30


# --- identity --------------------------------------------------------------------------------------------------------

DATA = Data("wikipedia_mini", vocabulary=512)
TRAINING = Training(30, 512, warmup_steps=3)
ADAMW = AdamW(learning_rate=1e-3)
GPT2 = GPT2Model("debug_gpt2", layers=2, width=32, heads=2, context=32)
CUSTOM = CustomModel("mine", "mine", 2, 32, 2, 32)
LLAMA = LlamaModel("debug_llama", layers=2, width=32, heads=4, context=32, kv_heads=2, mlp_width=64)


def made(model: Any, optimizer: Optimizer, imbalance: Any, rebalance: Any) -> Config:
    return Config("language_model", "debug", "arm", 1, model, DATA, optimizer, imbalance, rebalance, training=TRAINING)


CONFIGS = {
    "gpt2": made(GPT2, ADAMW, ReciprocalImbalance(), Saggs()),
    "llama": made(LLAMA, SGD(learning_rate=1e-3), ReciprocalImbalance(), Saggs()),
    "custom": made(CUSTOM, CustomOptimizer("mine", 1e-3), ReciprocalImbalance(), CustomRebalance("mine")),
    "rmsprop": made(GPT2, RMSprop(learning_rate=1e-3), ReciprocalImbalance(), Saggs()),
}
CONFIGS |= {
    task: dataclasses.replace(
        CONFIGS["rmsprop"], task=task, rules={"gd": RuleGrid("gd", [0.1])}, scene=scene, attention=attention
    )
    for task, scene, attention in (
        ("matrix_sensing", IndianPines(), ModularAddition(steps=3)),
        ("hyperspectral", MatScene("mine", path="a.mat", variable="a"), ModularAddition(steps=3)),
        ("attention_rotation", IndianPines(), Characters(steps=3)),
        ("optimizer_atlas", IndianPines(), ModularAddition(steps=3)),
    )
}
LEAVES = sorted((key, name) for name, config in CONFIGS.items() for key in flatten(recorded(config)) if key != "task")
LISTED = [
    (key, name)
    for name, config in CONFIGS.items()
    for key in flatten(dataclasses.asdict(config))
    if key not in flatten(recorded(config))
]


def changed(config: Config, key: str) -> Config:
    """The configuration with another value under a dotted key."""
    tree = dataclasses.replace(config)
    *path, last = key.split(".")
    node: Any = tree
    for name in path:
        if isinstance(node, dict):
            node[name] = child = dataclasses.replace(node[name])
        else:
            child = getattr(node, name)
            child = dict(child) if isinstance(child, dict) else dataclasses.replace(child)
            setattr(node, name, child)
        node = child
    value = getattr(node, last)
    other: Any
    if isinstance(value, bool):
        other = not value
    elif isinstance(value, int | float):
        other = value + 1
    elif isinstance(value, str) or value is None:
        other = f"{value}x"
    else:
        other = [*value, "x"] if isinstance(value, list) else {**value, "x": 1}
    setattr(node, last, other)
    return tree


@pytest.mark.parametrize(("key", "name"), LEAVES)
def test_a_key_changes_the_identity_unless_it_is_listed(key: str, name: str) -> None:
    before = CONFIGS[name]
    listed = any(key == out or key.startswith(f"{out}.") for out in CANNOT_CHANGE_THE_RESULT)
    after = changed(before, key)
    assert flatten(dataclasses.asdict(after)) != flatten(dataclasses.asdict(before))
    one, other = Identity.of(before), Identity.of(after)
    assert (one.run_id == other.run_id) == listed
    assert (one.group == other.group) == (listed or key == "seed")


@pytest.mark.parametrize(("key", "name"), LISTED)
def test_a_setting_of_another_task_changes_no_identity(key: str, name: str) -> None:
    assert Identity.of(CONFIGS[name]).full == Identity.of(changed(CONFIGS[name], key)).full


def test_every_listed_key_exists() -> None:
    keys = [key for key, _ in LEAVES]
    assert [out for out in CANNOT_CHANGE_THE_RESULT if not any(k == out or k.startswith(f"{out}.") for k in keys)] == []


def test_seed_zero_is_a_seed_like_any_other() -> None:
    config = CONFIGS["gpt2"]
    found = [Identity.of(dataclasses.replace(config, seed=seed)) for seed in (0, 1, 2)]
    assert len({i.run_id for i in found}) == 3
    assert len({i.group for i in found}) == 1
    assert "seed0" in found[0].run_id


def test_another_numerics_version_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Identity.of(CONFIGS["gpt2"])
    monkeypatch.setattr(identity_module, "NUMERICS_VERSION", identity_module.NUMERICS_VERSION + 1)
    assert Identity.of(CONFIGS["gpt2"]).run_id != before.run_id


def test_a_key_added_later_renames_no_run_that_leaves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `training.threads` were new: at its old value the identity is that of a schema without it."""
    config = CONFIGS["gpt2"]
    entries = relevant(config)
    del entries["training.threads"]
    monkeypatch.setitem(identity_module.ADDED_LATER, "training.threads", 1)
    assert relevant(config) == entries
    assert "training.threads" in relevant(changed(config, "training.threads"))
