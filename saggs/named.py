"""An optimizer's class, and settings for it, as they are written on a command line.

    torch.optim.AdamW  betas=0.9,0.95        my_module:MyClass  lr=1e-2

Source: ours.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from saggs.rehearsal import Build


def optimizer_class(text: str) -> type[torch.optim.Optimizer]:
    """The class of a dotted name, `package.module.Class` or `module:Class`. The current directory is importable.

    Raises:
        ValueError: there is no such module or class, or it is no optimizer.
    """
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    module_name, separator, name = text.rpartition(":" if ":" in text else ".")
    if not separator or not module_name or not name:
        raise ValueError(f"{text!r}: name a class as torch.optim.AdamW or my_module:MyClass")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{text}: there is no module {error.name!r} here") from None
    except (Exception, SystemExit) as error:
        raise ValueError(f"{text}: importing {module_name} raised {type(error).__name__}: {error}") from None
    found = getattr(module, name, None)
    if found is None:
        raise ValueError(f"{module_name} has no {name!r}{_nearest(name, dir(module))}")
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(f"{text} is no subclass of torch.optim.Optimizer")
    return found


def settings_of(texts: Sequence[str]) -> dict[str, Any]:
    """{"lr": 0.01} of "lr=0.01": values are Python literals, `0.9,0.95` a tuple.

    Raises:
        ValueError: no name or no literal, or a name twice.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        name = name.strip()
        if not separator or not name.isidentifier():
            raise ValueError(f"--set {text}: write NAME=VALUE, as lr=0.01")
        if name in settings:
            raise ValueError(f"--set {name} is given twice")
        try:
            settings[name] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ValueError(
                f"--set {text}: {value.strip()!r} is no Python literal; write a number, True, None, (0.9, 0.95) or "
                "a text in quotes"
            ) from None
    return settings


def builder(cls: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> Build:
    """Builds the class with these settings and its own defaults.

    Raises:
        ValueError: a setting that neither the class nor one it is made of names, or a missing one that it needs.
    """
    parameters = [n for n, p in inspect.signature(cls).parameters.items() if p.kind is not p.VAR_POSITIONAL]
    named = {n for base in cls.__mro__ if issubclass(base, torch.optim.Optimizer) for n in _keywords(base)}
    # A class with **anything may hand settings on to the classes it is made of, or may take them and ignore them.
    known = sorted((named if _is_open(cls) else set(_keywords(cls))) - {*parameters[:1], "self", "params", "defaults"})
    for name in settings:
        if name not in known:
            raise ValueError(f"{cls.__name__} takes no setting {name!r}{_nearest(name, known)}")

    def build(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        return cls(weights, **settings)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            build([nn.Parameter(torch.zeros(3, 2))])
    except Exception as error:  # whatever a class may raise; it is named
        raise ValueError(f"{cls.__name__} could not be built: {type(error).__name__}: {error}") from None
    return build


def _keywords(cls: type) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [n for n, p in inspect.signature(cls.__init__).parameters.items() if p.kind in kinds]  # type: ignore[misc]


def _is_open(cls: type) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls).parameters.values())


def _nearest(word: str, options: Sequence[str]) -> str:
    same = [option for option in options if option.lower() == word.lower()]
    near = same or difflib.get_close_matches(word, options, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


__all__ = ["builder", "optimizer_class", "settings_of"]
