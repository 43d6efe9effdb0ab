"""Which factor balances a pair, and the `Rebalancer` that applies it every so many steps.

On the orbit (c^p A, c^-q B) the squared norm c^2p |A|^2 + c^-2q |B|^2 is least at

    c = ( (q |B|^2) / (p |A|^2) )^(1 / (2 (p + q))),

for p = q = 1 the square root of the ratio of Frobenius norms, c = (|B| / |A|)^(1/2), where both norms become equal.
Damped balancing applies c^alpha with 0 < alpha <= 1, so that the log-imbalance shrinks by (1 - alpha) each time.

Hard balancing is written as `sqrt` of a ratio because that is exact for powers of two: balance(2^k A, B / 2^k) gives
the very bits of balance(A, B), weights and moments (`exp` of half a logarithm does not).

Source: the SAGGS paper (Kim, 2026) for hard and damped balancing; exponents other than 1 are ours.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from saggs import transport as _transport
from saggs.discovery import find_pairs
from saggs.pairs import ParameterSlice, ScalePair, named_parameters, parameter_of, require_disjoint
from saggs.rescaling import rescale_many


def balance(
    model: nn.Module,
    pairs: Sequence[ScalePair] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    damping: float = 1.0,
) -> Tensor:
    """Balance every pair once; returns the factors applied, shape (pairs,).

    Args:
        model: the model, changed in place.
        pairs: from `find_pairs`; found anew where None.
        optimizer: its moments are carried along; None leaves optimizer state alone.
        damping: alpha in (0, 1]; 1 equalises the norms, less goes part of the way.

    Raises:
        ValueError: no pairs, a damping outside (0, 1], or an optimizer whose state cannot be carried.
    """
    rebalancer = Rebalancer(model, optimizer, pairs, every=1, damping=damping, transport=optimizer is not None)
    factors = rebalancer.rebalance()
    if left := int(rebalancer.unbalanced):
        warnings.warn(f"{left} of {len(factors)} pairs were left alone: a norm is zero or not finite", stacklevel=2)
    return factors


def pair_norms(pairs: Sequence[ScalePair], parameters: Mapping[str, nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Frobenius norms of the left and right weights, without biases: two tensors of shape (pairs,).

    float32 at least, float64 where any of the weights is.
    """
    sides = [[p for p in pair.left if not p.bias] for pair in pairs]
    sides += [[p for p in pair.right if not p.bias] for pair in pairs]
    views = [_used_weight(part, parameters) for side in sides for part in side]
    dtype = torch.float64 if any(v.dtype == torch.float64 for v in views) else torch.float32
    each = iter(torch._foreach_norm(views, 2, dtype))
    norms = torch.stack([_joint_norm([next(each) for _ in side]) for side in sides])
    return norms[: len(pairs)], norms[len(pairs) :]


def _used_weight(part: ParameterSlice, parameters: Mapping[str, nn.Parameter]) -> Tensor:
    view = part.view(parameter_of(parameters, part).detach())
    return view + 1 if part.offset else view


def _joint_norm(norms: list[Tensor]) -> Tensor:
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def log2_norm_ratios(model: nn.Module, pairs: Sequence[ScalePair]) -> Tensor:
    """log2(|left| / |right|) of every pair, shape (pairs,): 0 is balanced, 2k after (2^k A, B / 2^k)."""
    left, right = pair_norms(pairs, named_parameters(model))
    return torch.log2(left / right)


def balanced_factors(
    pairs: Sequence[ScalePair], left: Tensor, right: Tensor, damping: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The factor of every pair from its two norms, shape (pairs,), and a mask of the pairs that could be balanced.

    A pair with a zero or non-finite norm has no balanced point; its factor is 1 and its mask False.
    """
    plain = all(p.exponent == 1 for pair in pairs for p in pair.left) and all(
        p.exponent == -1 for pair in pairs for p in pair.right
    )
    if plain:
        factors = torch.sqrt(right / left)
    else:
        p, q = (torch.tensor(side, dtype=left.dtype, device=left.device) for side in _exponents(pairs))
        factors = ((q * right.square()) / (p * left.square())) ** (0.5 / (p + q))
    if damping != 1.0:
        factors = factors**damping
    possible = torch.isfinite(factors) & (factors > 0)
    return torch.where(possible, factors, torch.ones_like(factors)), possible


def _exponents(pairs: Sequence[ScalePair]) -> tuple[list[int], list[int]]:
    """(p, q) of every pair, biases aside; a ValueError where a side mixes exponents (no closed form)."""
    result: tuple[list[int], list[int]] = ([], [])
    for pair in pairs:
        for side, values in zip((pair.left, pair.right), result, strict=True):
            found = {abs(part.exponent) for part in side if not part.bias}
            if len(found) != 1:
                raise ValueError(f"{pair}: exponents {sorted(found)} are mixed in one side; it cannot be balanced")
            values.append(found.pop())
    return result


class Rebalancer:
    """Keeps the exact pairs of a model balanced during training: SAGGS, and Soft SAGGS where damping < 1.

        rebalancer = Rebalancer(model, optimizer, every=10)
        for batch in batches:
            rebalancer.step()
            ...; optimizer.step(); optimizer.zero_grad()

    Call `step` at the top of every training step: the first call balances, and every `every`-th one after it, so that
    no update is made from an unbalanced start.

    Args:
        model: the model in training, wrapped or not.
        optimizer: its state is carried along. May be None with transport=False.
        pairs: from `find_pairs`; found (and certified) anew where None.
        every: calls of `step` from one balancing to the next; 1 balances before every optimizer step.
        damping: alpha in (0, 1]; 1 equalises norms, less closes that share of the log-gap each time.
        transport: carry the optimizer's state. False moves the weights alone (an ablation, rarely what you want).

    Attributes:
        steps: calls of `step` so far.
        unbalanced: 0-dimensional tensor: how many pairs the last event left alone for a zero or non-finite norm.

    Raises:
        ValueError: a period below 1, a damping outside (0, 1], no pairs, pairs that share entries, or an optimizer
            whose state cannot be carried or that holds none of the pairs' parameters.

    Source: the SAGGS paper (Kim, 2026); period and damping are free choices there and here.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        pairs: Sequence[ScalePair] | None = None,
        *,
        every: int = 10,
        damping: float = 1.0,
        transport: bool = True,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r} must be a whole number of steps, at least 1")
        if isinstance(damping, bool) or not isinstance(damping, int | float) or not 0.0 < damping <= 1.0:
            raise ValueError(f"damping={damping!r} must lie in (0, 1]: 1 is hard balancing")
        if transport:
            if optimizer is None:
                raise ValueError("transport=True needs the optimizer; pass it, or transport=False")
            _transport.require_transportable(optimizer)
        self.pairs = list(find_pairs(model) if pairs is None else pairs)
        if not self.pairs:
            raise ValueError("the model has no exact pair to balance; train it without a Rebalancer")
        require_disjoint(self.pairs)
        _exponents(self.pairs)
        self.every = every
        self.damping = float(damping)
        self.transport = transport
        self.steps = 0
        self._model = model
        parameters = named_parameters(model)
        for pair in self.pairs:
            for part in pair.slices:
                part.view(parameter_of(parameters, part))
        if transport and optimizer is not None:
            _transport.require_owned(optimizer, self.pairs, parameters)
        self._optimizer = optimizer if transport else None
        self.unbalanced = torch.zeros((), dtype=torch.int64)

    def step(self) -> bool:
        """Balance if it is due, and count one training step. Returns whether it balanced."""
        due = self.steps % self.every == 0
        if due:
            self.rebalance()
        self.steps += 1
        return due

    @torch.no_grad()
    def rebalance(self) -> Tensor:
        """Balance every pair now, whatever the period; returns the factors, shape (pairs,). No host sync."""
        parameters = named_parameters(self._model)  # anew: a parameter may have been replaced
        left, right = pair_norms(self.pairs, parameters)
        factors, possible = balanced_factors(self.pairs, left, right, self.damping)
        rescale_many(self.pairs, factors.unbind(), parameters, self._optimizer)
        self.unbalanced = (~possible).sum()
        return factors

    def state_dict(self) -> dict[str, Any]:
        """The counter and the settings it belongs to, as plain values."""
        return {"steps": self.steps, **self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting where `state` stopped. Raises a ValueError where it belongs to other settings."""
        for name, value in self._settings().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the saved Rebalancer has {name}={state.get(name)!r}, this one {value!r}; "
                    "build it with the same settings, or start a new one"
                )
        steps = state.get("steps")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"the saved Rebalancer has steps={steps!r}, which counts no steps")
        self.steps = steps

    def _settings(self) -> dict[str, Any]:
        names = [f"{pair.kind}:{pair.path}" for pair in self.pairs]
        return {"every": self.every, "damping": self.damping, "transport": self.transport, "pairs": names}
