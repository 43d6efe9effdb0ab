"""What `train.py` does around a run: clean messages, exit codes, and the account of a sweep.

Exit codes: 0 done, skipped or left alone; 1 failed, or any run of a sweep failed; 2 refused before a run was opened;
3 diverged; 130 and 143 interrupted by SIGINT and SIGTERM.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from experiments import config as schema
from experiments.checks import ConfigError, nearest, validated
from experiments.code_version import code_version
from experiments.identity import DECIDED_BY, STUDIES, Identity
from experiments.run import ENDED, Diverged, Interrupted, Run, RunAlive, RunEnded, peek, runs_root

log = logging.getLogger(__name__)

TASKS = {
    "language_model": "experiments.language_model.task",
    "transport_ablation": "experiments.transport_ablation",
    "optimizer_atlas": "experiments.optimizer_atlas",
    "matrix_sensing": "experiments.matrix_sensing",
    "hyperspectral": "experiments.hyperspectral",
    "attention_rotation": "experiments.attention_rotation.task",
}

# What every task takes beside the settings that decide its result.
ALWAYS_HEEDED = ("experiment", "study", "arm", "scale", "paths", "progress", "reuse_committed")

FAILED, REFUSED, DIVERGED = 1, 2, 3

code_version()  # now, before the rest is imported


class RunFailed(Exception):
    """A run that was opened raised; its status and traceback are in its directory."""


def run(settings: DictConfig) -> str:
    """Carry out one composed configuration, unless there is nothing left to do.

    Returns:
        "done", or "skipped" or "alive" where another process or an earlier one did it.

    Raises:
        ConfigError: before a run is opened.
        Diverged, Interrupted: after the run's status says so.
    """
    config = validated(settings)
    if HydraConfig.initialized() and (hydra := HydraConfig.get()).mode == RunMode.RUN and hydra.sweeper.get("params"):
        raise ConfigError(f"experiment={hydra.runtime.choices['experiment']} is a sweep; run it with -m")
    if config.task not in TASKS:
        raise ConfigError(f"task={config.task}: choose one of {', '.join(TASKS)}")
    _refuse_ignored(config.task)
    identity = Identity.of(config)
    directory = runs_root(config) / identity.run_id
    state = peek(directory)
    if state.status in ENDED:
        return _say("skipped", f"{identity.run_id} is {state.status} already: {directory}")
    if state.status == "running":
        return _say("alive", f"{identity.run_id} is running in another process; it is left alone")
    if config.reuse_committed and (committed := schema.RESULTS / "runs" / f"{identity.run_id}.json").exists():
        return _say("skipped", f"{identity.run_id} is committed already: {committed}")
    # Only now: what follows imports torch and transformers.
    prepared = importlib.import_module(TASKS[config.task]).prepare(config)
    try:
        opened = Run.open(config, prepared.facts, prepared.total_steps)
    except RunAlive as error:
        return _say("alive", str(error))
    except RunEnded as error:
        return _say("skipped", str(error))
    try:
        with opened.recording():
            opened.succeed(prepared.execute(opened))
    except Diverged:
        raise
    except Exception as error:
        raise RunFailed(f"{identity.run_id} failed: {directory / 'traceback.txt'}") from error
    return _say("done", f"{identity.run_id} is done: {directory}")


def _refuse_ignored(task: str) -> None:
    """Raise a ConfigError for a setting of another task, which this one would ignore."""
    if not HydraConfig.initialized():
        return
    for override in HydraConfig.get().overrides.task:
        key = override.lstrip("+~").partition("=")[0].partition("@")[0]
        parts = key.split(".")
        own = DECIDED_BY.get(task)
        own = (*own, "wandb") if own is not None and task != "optimizer_atlas" else own  # the atlas mirrors nothing
        heeded = parts[0] not in STUDIES if own is None else parts[0] in (*own, *ALWAYS_HEEDED)
        if not heeded:
            raise ConfigError(f"{override}: task={task} has no such setting, and would ignore it")


def _say(outcome: str, message: str) -> str:
    log.info(message)
    return outcome


def main(hydra_main: Callable[[], Any], arguments: Sequence[str]) -> int:
    """Run Hydra's main function; errors become one clean message and an exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting
    os.environ.setdefault("TQDM_MININTERVAL", "0.5")
    sweep = any(a in ("-m", "--multirun") for a in arguments)
    code = guarded(hydra_main)
    if not sweep or code in (130, 143):
        return code
    accounts: list[int] = []
    refused = guarded(lambda: accounts.append(_account(arguments)))
    return accounts[0] if accounts else refused


def guarded(action: Callable[[], Any]) -> int:
    """Carry out `action`; a user's error is one line on stderr, only a fault of a run or of ours has a traceback."""
    try:
        action()
    except (Interrupted, KeyboardInterrupt) as error:
        print(f"interrupted: {error}", file=sys.stderr)
        return 143 if "SIGTERM" in str(error) else 130
    except Diverged as error:
        print(f"diverged: {error}", file=sys.stderr)
        return DIVERGED
    except RunFailed as error:
        traceback.print_exception(error.__cause__)
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    except yaml.YAMLError as error:
        print(f"refused: a configuration file is no YAML: {' '.join(str(error).split())}", file=sys.stderr)
        return REFUSED
    except (HydraException, OmegaConfBaseException) as error:
        print(f"refused: {explain(error)}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"refused: cannot use {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return REFUSED
    except ValueError as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    except Exception:
        traceback.print_exc()
        return FAILED
    return 0


def _account(arguments: Sequence[str]) -> int:
    """After a sweep: a table of every run, done, failed or missing; exit code 1 unless all are done."""
    from experiments import sweep

    parsed = get_args_parser().parse_args(list(arguments))
    overrides = list(parsed.overrides)
    if parsed.config_dir:
        overrides.append(f"hydra.searchpath=[file://{Path(parsed.config_dir).resolve()}]")
    runs = sweep.expand(overrides)
    sweep.print_states(runs)
    return 0 if all(sweep.state_of(r).status == "done" for r in runs) else FAILED


def explain(error: BaseException) -> str:
    """Hydra's and OmegaConf's errors in one line, with the nearest valid key or option."""
    chain: BaseException | None = error
    text = ""
    while chain is not None:
        text += f"{chain}\n"
        chain = chain.__cause__ or chain.__context__
    if unknown := re.search(r"Key '(\w+)' (?:is )?not in", text):
        full = re.search(r"full_key: (\S+)", text)
        key = full[1] if full else unknown[1]
        if key in schema.known_keys():
            group = key.partition(".")[0]
            return f"{key} belongs to another option of {group} than the one chosen; add {group}=OPTION that has it"
        if key.startswith("rules."):
            return f"{key}: the chosen rules have no such arm; one of your own: rules=one rules.one.rule=NAME"
        if ".hf." in key or ".options." in key:
            return f"{key} is a setting of your own: add it with +{key}=VALUE"
        return f"{key} is not a setting{nearest(key, schema.known_keys())}"
    if wrong := re.search(r"Value '(.*)' of type '(\w+)' could not be converted to (\w+)", text):
        full = re.search(r"full_key: (\S+)", text)
        return f"{full[1] if full else 'a setting'}={wrong[1]}: must be a value of type {wrong[3]}, not {wrong[2]}"
    if missing := re.search(r"Could not find '([^']+)/([^']+)'", text):
        group, option = missing[1], missing[2]
        options = sorted(path.stem for path in (schema.CONFIGS / group).glob("*.yaml"))
        return f"{group}={option}: choose one of {', '.join(options)}{nearest(option, options)}"
    return "; ".join(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
