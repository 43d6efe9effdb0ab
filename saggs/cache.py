"""Candidates of a model that was met before, by the hash of what they depend on.

Which pairs a model has follows from its code, its configuration and its shapes, not from its weights. So the candidates
are kept: in memory for the process, and in a directory for later ones. The key is the source of every file that defines
a class of the model, every plain setting of every module, the names and shapes of all tensors with their ties, and the
versions of PyTorch and of this format. A model with hooks, with classes whose source cannot be read, or with inputs of
the caller's own is not cached: what it computes is not in the key. Certificates are never cached; every candidate is
certified on the weights at hand.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from saggs.pairs import ScalePair, canonical_names, named_parameters, unwrap

FORMAT = 1
DIRECTORY = "SAGGS_CACHE"
"""The environment variable that names a directory for candidates."""

_MOST = 64
_OF_EVERY_MODULE = {"training", *vars(nn.Module())}
_memory: dict[str, list[ScalePair]] = {}
_refused: set[Path] = set()  # files that could not be written: said once


def cached(
    model: nn.Module, granularity: str, directory: Path | None, find: Callable[[], Sequence[ScalePair]]
) -> list[ScalePair]:
    """The candidates of a model: those kept under its key, or else what `find` returns, which is then kept.

    Args:
        model: the model, wrapped or not.
        granularity: part of the key.
        directory: where to keep them, beside the memory; where None, that of the environment variable SAGGS_CACHE, if
            it is set.
        find: computes them.

    Warns:
        UserWarning: a file that cannot be read or written; the candidates are then computed, and nothing is lost.
    """
    key = key_of(model, granularity)
    if key is None:
        return list(find())
    if directory is None and (named := os.environ.get(DIRECTORY)):
        directory = Path(named)
    file = None if directory is None else directory / f"pairs-{key}.json"
    pairs = _memory.get(key)
    shapes = {name: tuple(p.shape) for name, p in named_parameters(model).items()}
    kept = _read(file, shapes) if file is not None and pairs is None else None
    if pairs is None:
        pairs = list(find()) if kept is None else kept
        while len(_memory) >= _MOST:
            _memory.pop(next(iter(_memory)))
        _memory[key] = pairs
    if file is not None and kept is None and file not in _refused and not _intact(file, shapes):
        _write(file, pairs)
    return list(pairs)


def clear() -> None:
    """Forget what is in memory; files stay."""
    _memory.clear()
    _refused.clear()


def key_of(model: nn.Module, granularity: str) -> str | None:
    """A hash of all that the candidates of a model depend on; None where that cannot be told."""
    source = unwrap(model)
    digest = hashlib.sha256()
    try:
        for part in _described(source):
            digest.update(part.encode() + b"\0")
    except (OSError, TypeError, KeyError, _Untold):
        return None
    digest.update(f"{FORMAT} {torch.__version__} {granularity}".encode())
    return digest.hexdigest()[:24]


class _Untold(Exception):
    """Something decides what the model computes that no key can hold."""


def _described(model: nn.Module) -> list[str]:
    classes = {base for m in model.modules() for base in type(m).__mro__ if base is not object}
    if local := [c for c in classes if "<locals>" in c.__qualname__]:
        raise _Untold(f"{local[0].__qualname__} closes over what cannot be seen")
    for c in classes:
        forward = inspect.unwrap(vars(c).get("forward", _described))
        own = inspect.getsourcefile(sys.modules[c.__module__])
        if "forward" in vars(c) and inspect.isfunction(forward) and forward.__code__.co_filename != own:
            raise _Untold(f"{c.__qualname__}.forward has been replaced")
    parts = sorted(_source_of(c.__module__) for c in classes)
    for name, module in model.named_modules():
        if any(getattr(module, hooks) for hooks in ("_forward_hooks", "_forward_pre_hooks")):
            raise _Untold(f"{name} has hooks")
        if "forward" in vars(module):
            raise _Untold(f"{name} has a forward of its own")
        parts.append(f"{name} {type(module).__qualname__} {_settings(module)}")
    parts += [f"{alias} {name}" for alias, name in canonical_names(model).items()]
    parts += [f"parameter {name} {tuple(parameter.shape)}" for name, parameter in model.named_parameters()]
    for name, buffer in model.named_buffers():
        wide = buffer.detach().cpu().double() if buffer.is_floating_point() else buffer.detach().cpu()
        values = wide.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        parts.append(f"buffer {name} {tuple(buffer.shape)} {hashlib.sha256(values).hexdigest()}")
    return parts


@lru_cache(maxsize=256)
def _source_of(module: str) -> str:
    """A hash of the source of a Python module, read once a process."""
    return hashlib.sha256(inspect.getsource(sys.modules[module]).encode()).hexdigest()


def _settings(module: nn.Module) -> str:
    own = {k: v for k, v in vars(module).items() if k not in _OF_EVERY_MODULE and k != "_is_torch_compile"}
    return json.dumps(_plain(own), sort_keys=True)


def _plain(value: Any, depth: int = 0) -> Any:
    """Settings as plain values; what is neither plain nor a named object of code makes the model uncached."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype | torch.device | Enum):
        return str(value)
    if depth > 6:
        raise _Untold("settings nested too deeply")
    if isinstance(value, dict):
        # A library's memo of its own hash differs from process to process.
        return {str(k): _plain(v, depth + 1) for k, v in value.items() if not str(k).endswith("_hash")}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v, depth + 1) for v in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, torch.Tensor):
        return ["tensor", list(value.shape), value.double().cpu().tolist() if value.numel() <= 4096 else "large"]
    if isinstance(value, partial):
        return ["partial", _code(value.func), _plain(list(value.args), depth + 1), _plain(value.keywords, depth + 1)]
    if inspect.ismethod(value):
        return ["method", _code(value.__func__), _plain(value.__self__, depth + 1)]
    if inspect.isfunction(value) or inspect.isclass(value) or inspect.isbuiltin(value):
        return _code(value)
    if isinstance(value, nn.Module):  # held in a plain list, say, so that it is none of the model's modules
        return [f"{name} {type(m).__qualname__} {_settings(m)}" for name, m in value.named_modules()]
    if hasattr(value, "__dict__"):
        return [type(value).__qualname__, _plain(vars(value), depth + 1)]
    raise _Untold(f"a setting of type {type(value).__name__}")


def _code(value: Any) -> str:
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    if "<lambda>" in name or "<locals>" in name or getattr(value, "__closure__", None):
        raise _Untold(f"{name} closes over what cannot be seen")
    return name if inspect.isbuiltin(value) else f"{name} {inspect.getsource(value)}"


def _intact(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _read(file, shapes) is not None


def _read(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> list[ScalePair] | None:
    try:
        held = json.loads(file.read_text())
        pairs = [ScalePair.from_json(pair) for pair in held["pairs"]]
        if foreign := [part for pair in pairs for part in pair.slices if shapes.get(part.name) != part.shape]:
            raise ValueError(f"{foreign[0]} is none of this model's")
        return pairs
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"{file} holds no pairs ({error}); they are found anew", stacklevel=2)
        return None


def _write(file: Path, pairs: Sequence[ScalePair]) -> None:
    """The file appears whole or not at all; a full disk costs the cache, not the result."""
    temporary: str | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.", delete=False) as stream:
            temporary = stream.name
            json.dump({"pairs": [pair.to_json() for pair in pairs]}, stream)
        os.replace(temporary, file)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        _refused.add(file)
        warnings.warn(f"{file} cannot be written ({error}); pairs are found anew next time", stacklevel=2)


__all__ = ["DIRECTORY", "cached", "clear", "key_of"]
