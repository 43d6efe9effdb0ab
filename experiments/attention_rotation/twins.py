"""Twins of a model, and how far they have drifted apart.

The rotated twin is the same function: every head's rows of W_Q and of W_K are multiplied by one orthogonal matrix R,
and (R W_Q x_i) . (R W_K x_j) = (W_Q x_i) . (W_K x_j). A rule that follows rotations, u(R G) = R u(G), keeps it the same
function; one that treats coordinates one by one does not. What rounding alone does to it is seen at twins whose weights
are disturbed by noise, and that nothing else differs at the twin "rotated" by the identity matrix.

Drift is measured where such twins are equal, at the bilinear form of each head, M = W_Q^T W_K:

    drift = mean over layers and heads of |M_1 - M_2| / ((|M_1| + |M_2|) / 2)                 (Frobenius norms)

Source: Singh (2026). Ours, where that paper is silent: every head of every layer has a matrix of its own, drawn in that
order; the Gaussians are drawn in float32 and the rest is done in float64, so that float32 and float64 runs are rotated
alike; noise is relative to the root mean square of each weight.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.attention_rotation.model import Transformer
from experiments.identity import derived_seed
from experiments.language_model.checkpoint import load_weights, optimizer_state_of, weights_of
from saggs.pairs import named_parameters

BASE, IDENTITY, ROTATED = "base", "identity", "rotated"
_TENSOR, _TUPLE = "tensor of this name", "tuple of these"


def noise_name(level: float) -> str:
    """The name of the twin that is disturbed by that relative noise: noise_1e-07."""
    short = f"{level:.0e}"
    return f"noise_{short if float(short) == level else f'{level!r}'}"


# --- how they are made -----------------------------------------------------------------------------------------------


def make_models(base: Transformer, rotation_seed: int, noises: list[float], seed: int) -> dict[str, Transformer]:
    """The base and its twins, by name: identity, rotated, and one for each level of noise."""
    heads, size = _heads_of(base)
    eyes = torch.eye(size, dtype=torch.float64).expand(len(base.layers), heads, size, size)
    models = {
        BASE: base,
        IDENTITY: rotated(base, eyes),
        ROTATED: rotated(base, random_rotations(len(base.layers), heads, size, rotation_seed)),
    }
    for level in noises:
        name = noise_name(level)
        models[name] = disturbed(base, level, derived_seed(seed, name))
    return models


def random_rotations(layers: int, heads: int, size: int, seed: int) -> Tensor:
    """Q of the QR decomposition of a Gaussian matrix for each head; shape (layers, heads, size, size), float64."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(size, size, generator=generator) for _ in range(layers * heads)]
    return torch.linalg.qr(torch.stack(drawn).double()).Q.view(layers, heads, size, size)


def rotated(model: Transformer, rotations: Tensor, *, keys: bool = True) -> Transformer:
    """A copy whose W_Q and W_K are multiplied from the left by a matrix a head.

    Args:
        model: left as it is.
        rotations: shape (layers, heads, size, size).
        keys: False leaves W_K alone, which changes the function.
    """
    twin = copy.deepcopy(model)
    for block, turns in zip(twin.layers, rotations, strict=True):
        for projection in (block.query, block.key) if keys else (block.query,):
            weight = projection.weight.data
            weight.copy_(torch.bmm(turns, _by_head(weight.double(), block.heads)).flatten(0, 1))
    return twin


def disturbed(model: Transformer, level: float, seed: int) -> Transformer:
    """A copy with w + level rms(W) n for every entry w of every weight W, with n from N(0, 1)."""
    twin, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for weight in named_parameters(twin).values():
        exact = weight.data.double()
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        weight.data.copy_(exact + level * exact.square().mean().sqrt() * noise)
    return twin


# --- how far apart they are ------------------------------------------------------------------------------------------


def score_forms(model: Transformer) -> Tensor:
    """M = W_Q^T W_K of each head: shape (layers, heads, width, width), float64."""
    forms = []
    for block in model.layers:
        query, key = (_by_head(p.weight.detach().double(), block.heads) for p in (block.query, block.key))
        forms.append(torch.bmm(query.mT, key))
    return torch.stack(forms)


def drift(one: Tensor, other: Tensor) -> float:
    """The mean over heads of |M_1 - M_2| / ((|M_1| + |M_2|) / 2), of the forms of two models; 0 where both are 0."""
    apart, *norms = (torch.linalg.matrix_norm(forms) for forms in (one - other, one, other))
    return float(torch.where(apart == 0, 0.0, 2 * apart / sum(norms)).mean())


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Whether all weights of two models are equal."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _by_head(weight: Tensor, heads: int) -> Tensor:
    """The rows of each head: shape (heads, size, width)."""
    return weight.view(heads, -1, weight.shape[1])


def _heads_of(model: Transformer) -> tuple[int, int]:
    block = model.layers[0]
    return block.heads, len(block.query.weight) // block.heads


# --- in training -----------------------------------------------------------------------------------------------------


@dataclass
class Twin:
    """A model in training; `diverged` is the first step after which its loss was not finite."""

    model: Transformer
    optimizers: list[torch.optim.Optimizer]
    diverged: int | None = None

    def update(self, loss: Tensor) -> None:
        """One step of its optimizers."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights and all that the optimizers keep, as named tensors and plain facts."""
        tensors = {f"weights/{name}": tensor for name, tensor in weights_of(self.model).items()}
        kept = [optimizer_state_of(self.model, optimizer) for optimizer in self.optimizers]
        return tensors, {"optimizers": _packed(kept, "optimizers", tensors), "diverged": self.diverged}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from a state, bit for bit."""
        parameters = named_parameters(self.model)
        load_weights(self.model, {name: tensors[f"weights/{name}"] for name in weights_of(self.model)})
        self.diverged = facts["diverged"]
        for optimizer, kept in zip(self.optimizers, _unpacked(facts["optimizers"], tensors), strict=True):
            optimizer.state.update({parameters[name]: entry for name, entry in kept["state"].items()})
            for group, settings in zip(optimizer.param_groups, kept["groups"], strict=True):
                group.update({key: value for key, value in settings.items() if key != "names"})


def _packed(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """A nested value as JSON holds it; its tensors go to `tensors` under the names of their places."""
    if isinstance(value, Tensor):
        tensors[place] = value
        return {_TENSOR: place}
    if isinstance(value, dict):
        return {key: _packed(entry, f"{place}/{key}", tensors) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        entries = [_packed(entry, f"{place}/{n}", tensors) for n, entry in enumerate(value)]
        return {_TUPLE: entries} if isinstance(value, tuple) else entries
    return value


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `_packed` was given."""
    if isinstance(value, list):
        return [_unpacked(entry, tensors) for entry in value]
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]].clone()
        if value.keys() == {_TUPLE}:
            return tuple(_unpacked(entry, tensors) for entry in value[_TUPLE])
        return {key: _unpacked(entry, tensors) for key, entry in value.items()}
    return value


__all__ = [
    "BASE",
    "IDENTITY",
    "ROTATED",
    "Twin",
    "disturbed",
    "drift",
    "make_models",
    "noise_name",
    "random_rotations",
    "rotated",
    "same_weights",
    "score_forms",
]
