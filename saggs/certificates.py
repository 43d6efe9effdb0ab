"""Numerical proof that a pair is exact on this very model, with a control that must fail.

A pair is proved in the innermost module that holds all its parameters, and all pairs together once more in the whole
model (a module may show the world more than what it returns). The real model is run once to record what that module is
given; the module is cloned in float64, its biases and gains are drawn at random (a fresh model has zero biases and unit
gains, and would not notice a forgotten bias), and it is run under the all-float64 mode. A pair is exact where rescaling
by 2^6, 2^-6, an odd factor, and a negative one if it claims any sign, changes the module's outputs by less than 1e-10
relative to their largest entry; pairs of one module are rescaled together, each by its own factor (and once more by
random ones, so that no two faults make up for each other), and told apart by halving where that fails. It is asked at
the model's own weights and again at matrices of standard deviation 0.4 and 2, since a clamp looks linear until
something reaches it. Scaling the left side alone has to change the outputs, and so has every slice of the pair: a
check that cannot fail proves nothing. One backward pass tells it of all slices; a slice that matters at none of these
weights (an expert that no token is routed to) is named and the pair refused.

One module at a time is held in float64, so a model of a billion parameters needs little beyond itself. Where a pair
fails within its module, the whole model has the last word, if it is small enough to be cloned. What only the whole of a
large model holds (a last norm and an untied head) is proved on the model itself, in its own precision and by powers of
two, and its tensors are put back. Of a large model's blocks with the same parameters, the first alone is asked at the
wider weights: those do not depend on the block.

It is a proof at three points, on random inputs, not for all of them: what no input and no draw reaches (a clamp beyond
a thousand times the activations) it cannot see.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from saggs.copies import dtype_of, require_real
from saggs.inputs import Inputs, Output, default_inputs, default_output, on_device, refusing
from saggs.pairs import ScalePair, canonical_names, named_parameters, unwrap, unwrapped_name
from saggs.trials import CONTROL, FACTORS, TOLERANCE, Call, CertificationError, InPlaceTrial, Trial

LARGE = 200_000_000
SMALL = 2_000_000
_SAMPLES = 2
_SAMPLES_OF_SMALL = 6


def certify(
    model: nn.Module,
    pairs: Sequence[ScalePair],
    inputs: Inputs | None = None,
    output: Output | None = None,
) -> list[ScalePair]:
    """Prove every pair on float64 clones of the modules that hold them; returns the pairs with their certificates.

    Args:
        model: the model; it is not changed. One of its modules at a time is cloned in float64.
        pairs: what to prove.
        inputs: callable (generator, count) -> keyword arguments; random tokens for a causal language model.
        output: callable (result) -> tensor; the logits by default.

    Raises:
        CertificationError: naming the pair, the factor and the change of the outputs.
        ValueError: the model cannot be run (meta tensors, no `inputs` for a plain module, non-finite outputs).
    """
    certified = []
    for found in examine(model, pairs, inputs, output):
        if isinstance(found, CertificationError):
            raise found
        certified.append(found)
    return certified


def examine(
    model: nn.Module,
    pairs: Sequence[ScalePair],
    inputs: Inputs | None = None,
    output: Output | None = None,
) -> list[ScalePair | CertificationError]:
    """As `certify`, but a pair that fails yields its error in the place of the pair."""
    if not pairs:
        return []
    with torch.random.fork_rng(devices=[]):  # a forward pass may draw
        return _examined(unwrap(model), pairs, inputs, output)


def _examined(
    source: nn.Module, pairs: Sequence[ScalePair], inputs: Inputs | None, output: Output | None
) -> list[ScalePair | CertificationError]:
    require_real(source)
    read = output or default_output
    size = sum(p.numel() for p in source.parameters())
    large = size > LARGE
    samples = _SAMPLES_OF_SMALL if size < SMALL else _SAMPLES
    arguments = dict((inputs or default_inputs(source))(torch.Generator().manual_seed(0), samples))
    homes = _Homes(source, pairs)
    calls = _recorded(source, homes.hooked(), arguments, read)
    homes.move_to_called(calls)
    found: list[ScalePair | CertificationError] = list(pairs)
    seen: set[object] = set()
    for home, members in homes.members.items():
        here = [pairs[i] for i in members]
        if large and not home:
            results = InPlaceTrial(source, arguments, read, here).examine(here)
        else:
            likeness = homes.likeness(home, here)
            trial = Trial(source, home, calls.get(home, [((), arguments)]), read, here)
            results = trial.examine(here, everywhere=not (large and likeness in seen))
            seen.add(likeness)
        for position, result in zip(members, results, strict=True):
            found[position] = result
    if large:
        return found
    whole = [((), arguments)]
    local = [i for home, members in homes.members.items() if home for i in members]
    failed = [i for i in local if isinstance(found[i], CertificationError)]
    passed = [i for i in local if isinstance(found[i], ScalePair)]
    # A module may leak what it computes past its outputs: all that passed is rescaled once more, in the whole model.
    if passed:
        here = [pairs[i] for i in passed]
        if not Trial(source, "", whole, read, here).joint_residual(here) <= TOLERANCE:
            failed = local
    if failed:
        here = [pairs[i] for i in failed]
        for position, result in zip(failed, Trial(source, "", whole, read, here).examine(here), strict=True):
            found[position] = result
    return found


# --- where a pair lives -----------------------------------------------------------------------------------------------


class _Homes:
    """For each pair the innermost module whose forward pass uses all its parameters, and that alone uses them.

    Attributes:
        members: module name -> positions of its pairs; "" is the whole model.
    """

    def __init__(self, model: nn.Module, pairs: Sequence[ScalePair]) -> None:
        self._modules = {
            unwrapped_name(name)
            for name, module in model.named_modules()
            if type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        }
        self._shapes = {name: tuple(p.shape) for name, p in named_parameters(model).items()}
        self._aliases: dict[str, list[str]] = {}
        for alias, name in canonical_names(model).items():
            self._aliases.setdefault(name, []).append(alias)
        known: dict[tuple[tuple[str, bool], ...], str] = {}
        own: list[str] = []
        for pair in pairs:
            held = tuple(sorted({(part.name, part.bias) for part in pair.slices}))
            if held not in known:
                known[held] = self._of(pair)
            own.append(known[held])
        homes = sorted(set(own) - {""}, key=len)
        # One clone of a block serves all that is in it.
        outer = {home: next((o for o in homes if home.startswith(f"{o}.")), home) for home in {*homes, ""}}
        self.members: dict[str, list[int]] = {}
        for position, home in enumerate(own):
            self.members.setdefault(outer[home], []).append(position)

    def hooked(self) -> list[str]:
        """Modules whose calls have to be seen: the homes and all that is around them."""
        parts = [home.split(".") for home in self.members if home]
        return sorted({".".join(p[: n + 1]) for p in parts for n in range(len(p))} & self._modules)

    def move_to_called(self, calls: Mapping[str, object]) -> None:
        """Move pairs of a module that is not called as such (but through a method of its own) to what is around it."""
        for home in list(self.members):
            around = home
            while around and around not in calls:
                around = around.rpartition(".")[0]
            if around != home:
                self.members.setdefault(around, []).extend(self.members.pop(home))

    def likeness(self, home: str, pairs: Sequence[ScalePair]) -> object:
        """Equal for modules whose parameters and pairs differ by their place in the model alone."""
        prefix = f"{home}."
        shapes = frozenset((n.removeprefix(prefix), s) for n, s in self._shapes.items() if n.startswith(prefix))
        return shapes, frozenset((p.kind, p.signs, p.path.removeprefix(home), len(p.slices)) for p in pairs)

    def _of(self, pair: ScalePair) -> str:
        names = [alias for part in pair.slices for alias in self._aliases.get(part.name, [part.name])]
        common = names[0].split(".")[:-1]
        for name in names[1:]:
            parts = name.split(".")[:-1]
            agree = next((i for i, (a, b) in enumerate(zip(common, parts, strict=False)) if a != b), None)
            common = common[: min(len(common), len(parts)) if agree is None else agree]
        layer = len({part.name for part in pair.slices if not part.bias}) == 1
        if layer and common:  # both sides in one layer: the layer's own output is what gets scaled
            common = common[:-1]
        while common and ".".join(common) not in self._modules:
            common.pop()
        return ".".join(common)


def _recorded(
    model: nn.Module, names: Sequence[str], arguments: Mapping[str, Any], output: Output
) -> dict[str, list[Call]]:
    """What every named module is called with in one forward pass of the model, as it is. Its mode is restored."""
    calls: dict[str, list[Call]] = {}
    modules = {unwrapped_name(name): module for name, module in model.named_modules()}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, []).append(copy.deepcopy(_detached((args, kwargs))))

        return hook

    training = {module: module.training for module in model.modules()}
    kept = {t: t.detach().clone() for t in _written_by_running(model)}
    handles = [modules[name].register_forward_pre_hook(keep(name), with_kwargs=True) for name in names]
    try:
        model.eval()
        with torch.no_grad(), refusing(model):
            outputs = output(model(**on_device(dict(arguments), device, dtype_of(model))))
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in training.items():
            module.training = mode
        with torch.no_grad():
            for tensor, before in kept.items():
                tensor.copy_(before)
    if not bool(torch.isfinite(outputs).all()):
        raise ValueError(f"{type(model).__name__}'s outputs are not finite; nothing can be certified on it")
    return calls


def _written_by_running(model: nn.Module) -> list[Tensor]:
    """What a forward pass may write: buffers, and tables whose rows are renormalised as they are read."""
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and m.max_norm is not None]
    return [*model.buffers(), *tables]


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(_detached(v) for v in value)
    if type(value) is dict:
        return {k: _detached(v) for k, v in value.items()}
    return value


__all__ = ["CONTROL", "FACTORS", "TOLERANCE", "CertificationError", "certify", "examine"]
