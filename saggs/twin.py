"""A twin: the same class built again from a smaller configuration, found by search.

What can be rescaled depends on how a model is wired, not on how deep or how wide it is. So the charges of a model with
many blocks are taken from a twin with few of them, at the real widths, and the null space (`saggs.nullspace`) from one
that is narrow as well. No attribute of a configuration is known here by name. Whole numbers of the configuration are
replaced by smaller ones, one after the other, and a change is kept where the class still builds, the forward pass still
runs, and the parameters keep their names, layer indices aside: those that number the blocks of the model make it
shallow, those that occur as sizes of tensors make it narrow.

A model without a configuration that its class can be built from has no twin; it is analysed itself. A twin is built by
the class of a model that is already in memory: no code of a checkpoint is run.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from saggs.inputs import Inputs, Output, default_inputs, default_output
from saggs.pairs import unwrap

_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")
_NARROW = (4, 2, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128)
_FEW_ROWS = 64
_MOST_HEADS = 256
_MOST_PARAMETERS = 1_500_000_000

Site = tuple[Any, str]  # an object of the configuration, and the attribute that holds a whole number


def indexless(name: str) -> str:
    """A parameter's name with every layer index replaced by #."""
    return _INDEX.sub("#", name)


def blocks_of(model: nn.Module, shortest: int = 2) -> dict[str, list[str]]:
    """Outermost lists of `shortest` modules or more: the list's name -> the names of its members, in order."""
    found: dict[str, list[str]] = {}
    for name, module in unwrap(model).named_modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) >= shortest
            and not any(name.startswith(f"{o}.") for o in found)
        ):
            found[name] = [f"{name}.{i}" for i in range(len(module))]
    return found


def shallow_twin(model: nn.Module, inputs: Inputs | None = None, output: Output | None = None) -> nn.Module | None:
    """A twin with few blocks, one of every kind at least, at the real widths; None where there is no shallower one."""
    return _searched(model, inputs, output, narrow=False)


def small_twin(model: nn.Module, inputs: Inputs | None = None, output: Output | None = None) -> nn.Module | None:
    """A twin with few and narrow blocks; None where the search finds none."""
    return _searched(model, inputs, output, narrow=True)


def _searched(model: nn.Module, inputs: Inputs | None, output: Output | None, *, narrow: bool) -> nn.Module | None:
    source = unwrap(model)
    config = getattr(source, "config", None)
    if config is None:
        return None
    search = _Search(source, config, inputs, output)
    if not search.builds():
        return None
    search.make_shallow()
    search.shorten_tables()
    if narrow:
        search.make_narrow()
    return search.twin()


class _Search:
    """Replaces whole numbers of a configuration by smaller ones, as long as the model stays the same but for sizes."""

    def __init__(self, source: nn.Module, config: Any, inputs: Inputs | None, output: Output | None) -> None:
        self._class = type(source)
        self._inputs, self._output = inputs, output or default_output
        self._config = copy.deepcopy(config)
        self._names = {indexless(name) for name, _ in source.named_parameters()}
        self._shapes = _shapes(source)
        self._kinds = _kinds_of_blocks(source)
        self._size = _size(source)
        self._numbers: dict[tuple[int, str], int] = {}
        self._counts: set[tuple[int, str]] = set()  # what counts blocks

    def builds(self) -> bool:
        """Whether the class can be built from this configuration with the parameters that the model has."""
        model = self._built()
        return model is not None and {indexless(n) for n, _ in model.named_parameters()} == self._names

    def make_shallow(self) -> None:
        """Fewer blocks, as long as every kind of block is there."""
        for owner, key, value in list(_whole_numbers(self._config)):
            built = self._built() or nn.Module()
            if value not in {len(members) for members in blocks_of(built).values()}:
                continue
            depth = _depth(built, shortest=1)
            undo = _set(owner, key, value, value - 1)
            counts_blocks = 0 < _depth(self._built(), shortest=1) < depth
            undo()
            if counts_blocks:
                self._counts.add((id(owner), key))
                # Not run yet, with its long tables: the next step does.
                self._try([(owner, key)], value, range(2, value), self._has_same_blocks, run=False)

    def _has_same_blocks(self, model: nn.Module) -> bool:
        return _kinds_of_blocks(model) == self._kinds and _shapes(model) == self._shapes

    def shorten_tables(self) -> None:
        """Fewer rows in embedding tables: tokens and positions that the probes do not need."""
        built = self._built() or nn.Module()
        tables = {m.num_embeddings for m in built.modules() if isinstance(m, nn.Embedding)}
        for owner, key, value in list(_whole_numbers(self._config)):
            if value in tables and value > _FEW_ROWS:
                self._try([(owner, key)], value, (_FEW_ROWS,), self._has_only_shorter_tables)

    def make_narrow(self) -> None:
        """Smaller sizes: for each the smallest of a few that keeps every ratio and still builds and runs.

        What counts is what occurs as a size of a tensor, and small numbers that divide the sizes (numbers of heads).
        """
        built = self._built() or nn.Module()
        sizes = Counter(size for p in built.parameters() for size in p.shape if size > _FEW_ROWS).most_common(2)
        numbers = [
            (owner, key, value)
            for owner, key, value in _whole_numbers(self._config)
            if value != _FEW_ROWS
            and (id(owner), key) not in self._counts
            and (
                any(value in p.shape for p in built.parameters())
                or (value <= _MOST_HEADS and all(size % value == 0 for size, _ in sizes))
            )
        ]
        self._numbers = {(id(owner), key): value for owner, key, value in numbers}
        taken: set[int] = set()
        by_value: dict[int, list[Site]] = {}
        for owner, key, value in sorted(numbers, key=lambda site: site[2]):
            if (id(owner), key) in self._numbers and value > 2:
                by_value.setdefault(value, []).append((owner, key))
        for value, sites in by_value.items():
            # Equal numbers often have to stay equal (a width that two settings state); else each by itself.
            for together in [sites, *([site] for site in sites if len(sites) > 1)]:
                smaller = [n for n in _NARROW if n < value and self._keeps_ratios(together[0], n)]
                choices = [n for n in smaller if n not in taken] + [n for n in smaller if n in taken]
                no_larger = partial(_is_no_larger, _size(self._built()))
                if self._try(together, value, choices, no_larger):
                    taken.add(getattr(*together[0]))
                    break

    def twin(self) -> nn.Module | None:
        """The twin, with random weights, if it is smaller than the model and runs."""
        with torch.random.fork_rng(devices=[]), _unfilled_parameters():
            model = self._built(device="cpu")
        if model is None or _size(model) >= self._size:
            return None
        generator = torch.Generator().manual_seed(0)
        for module in model.modules():
            for parameter in list(module.parameters(recurse=False)):
                if parameter.is_meta:
                    real = torch.empty(parameter.shape, dtype=parameter.dtype).normal_(0.0, 0.02, generator=generator)
                    _replace(model, parameter, nn.Parameter(real + 1 if parameter.dim() < 2 else real))
        return model if self._runs(model) else None

    def _try(
        self,
        sites: Sequence[Site],
        value: int,
        choices: Iterable[int],
        accept: Callable[[nn.Module], bool],
        *,
        run: bool = True,
    ) -> bool:
        """Set the numbers, and cut lists of that length, to the first choice that is accepted; put all back if none."""
        for choice in choices:
            undo = [_set(owner, key, value, choice) for owner, key in sites]
            model = self._built()
            same = model is not None and {indexless(n) for n, _ in model.named_parameters()} == self._names
            if same and model is not None and accept(model) and (not run or self._runs(model)):
                return True
            for step in reversed(undo):
                step()
        return False

    def _keeps_ratios(self, site: Site, choice: int) -> bool:
        """Where one number divides another (heads, the width), it goes on doing so, and a ratio stays one."""
        own = self._numbers[id(site[0]), site[1]]
        for other_owner, other_key, now in _whole_numbers(self._config):
            other = self._numbers.get((id(other_owner), other_key), own)
            if other == own:
                continue
            (large, large_now), (small, small_now) = sorted(((own, choice), (other, now)), reverse=True)
            least = 4 if large >= 32 * small else 2
            if large % small == 0 and (large_now % small_now or large_now < least * small_now):
                return False
        return True

    def _has_only_shorter_tables(self, model: nn.Module) -> bool:
        """Only numbers of rows, or of outputs of a head that is as long as the table, have changed."""
        changed = [
            (name, shape) for name, shapes in _shapes(model).items() for shape in shapes - self._shapes.get(name, set())
        ]
        return bool(changed) and all(
            any(old[1:] == shape[1:] and old[0] > shape[0] for old in self._shapes[name]) for name, shape in changed
        )

    def _built(self, device: str = "meta") -> nn.Module | None:
        try:
            with torch.random.fork_rng(devices=[]), torch.device(device), _quiet():
                return self._class(copy.deepcopy(self._config)).eval()
        except Exception:  # any class may refuse any configuration in its own way; a refusal is an answer
            return None

    def _runs(self, model: nn.Module) -> bool:
        if _size(model) > _MOST_PARAMETERS:
            return False
        try:
            inputs = self._inputs or default_inputs(model)
            arguments = dict(inputs(torch.Generator().manual_seed(0), 2))
            model = _filled(model) if any(p.is_meta for p in model.parameters()) else model
            with torch.no_grad(), _quiet():
                self._output(model(**arguments))
        except Exception:
            return False
        return True


@contextlib.contextmanager
def _unfilled_parameters() -> Iterator[None]:
    """Parameters made within the block take no memory and no time to fill; buffers are made as always."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put a parameter in the place of another everywhere: tied ones stay tied."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter is old:
                module._parameters[name] = new


def _filled(model: nn.Module) -> nn.Module:
    """A model that was built without memory, with zeros in every tensor: enough to see whether it runs."""
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.zero_()
    return model


def _is_no_larger(size: int, model: nn.Module) -> bool:
    return _size(model) <= size


def _depth(model: nn.Module | None, shortest: int = 2) -> int:
    return 0 if model is None else sum(len(members) for members in blocks_of(model, shortest).values())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A search provokes warnings about odd configurations that are nobody's concern."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _size(model: nn.Module | None) -> int:
    return 0 if model is None else sum(p.numel() for p in model.parameters())


def _shapes(model: nn.Module) -> dict[str, set[tuple[int, ...]]]:
    found: dict[str, set[tuple[int, ...]]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(indexless(name), set()).add(tuple(parameter.shape))
    return found


def signatures_of(model: nn.Module) -> dict[str, frozenset[object]]:
    """Block -> what makes two blocks of one kind: parameters with their shapes, and switches of its modules.

    A switch is a setting that is true, false, text, nothing or a small number (rotary positions in this layer or not, a
    sliding window or none) and is no block's own index.
    """
    found: dict[str, frozenset[object]] = {}
    for members in blocks_of(model).values():
        parts = [set(_parameters_of(model, block)) for block in members]
        switches = [_switches_of(model.get_submodule(block)) for block in members]
        counted = {
            key for key in switches[0] if len(members) > 1 and all(own.get(key) == i for i, own in enumerate(switches))
        }
        for block, shapes, own in zip(members, parts, switches, strict=True):
            kept = {(key, repr(_switch(value))) for key, value in own.items() if key not in counted}
            found[block] = frozenset([*shapes, *kept])
    return found


def _parameters_of(model: nn.Module, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, parameter in model.get_submodule(block).named_parameters():
        yield name, tuple(parameter.shape)


def _switches_of(block: nn.Module) -> dict[tuple[str, str], object]:
    return {
        (name, key): value
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if not key.startswith("_") and key != "training" and (value is None or isinstance(value, bool | int | str))
    }


def _switch(value: object) -> object:
    """Numbers count as nothing, one, or more: sizes and windows differ between a model and its twin."""
    return min(int(value), 2) if isinstance(value, int) else value


def _kinds_of_blocks(model: nn.Module) -> dict[str, frozenset[frozenset[object]]]:
    own = signatures_of(model)
    return {name: frozenset(own[block] for block in members) for name, members in blocks_of(model).items()}


def _whole_numbers(config: Any, seen: set[int] | None = None) -> Iterator[tuple[Any, str, int]]:
    """(owner, attribute, value) of every whole number above 1 in a configuration and in those it holds."""
    seen = set() if seen is None else seen
    if id(config) in seen or not hasattr(config, "__dict__"):
        return
    seen.add(id(config))
    for key, value in list(vars(config).items()):
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            yield config, key, value
        elif hasattr(value, "__dict__") and not isinstance(value, type | torch.dtype):
            yield from _whole_numbers(value, seen)


def _set(owner: Any, key: str, old: int, new: int) -> Callable[[], None]:
    """Replace a number, and cut every list of that length to the new one; returns what undoes it."""
    before = copy.copy(vars(owner))
    setattr(owner, key, new)
    for name, value in list(vars(owner).items()):
        if isinstance(value, list) and len(value) == old and new < old:
            setattr(owner, name, value[:new])

    def undo() -> None:
        vars(owner).clear()
        vars(owner).update(before)

    return undo


__all__ = ["blocks_of", "indexless", "shallow_twin", "signatures_of", "small_twin"]
