"""A compiled plan: thousands of pairs as a handful of tensor operations, compiled once and run at every event.

At the granularity of channels a model has tens of thousands of pairs with a few one-row slices each, and a loop over
them would cost more than the training step. Compiled, the slices of one parameter are one gather and one broadcast
product (`saggs.lines`), and all norms are one reduction a parameter and one sum by pair. A parameter with few slices
(whole matrices, the thirds of a fused one) is multiplied view by view, all such in one foreach call: its lines would
be many, and all with one multiplier.

The plan holds index tensors only. What they act on is looked up at every event, so that a parameter that was replaced,
or moved to another device or dtype, is the one that is rescaled. Nothing in the hot path waits for the device.

Pairs that share entries stand in different *rounds* (`saggs.overlaps`), which are applied one after the other.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from saggs import transport
from saggs.lines import NARROW, CompiledLines, Constant, Moving, Powers, multiply, shift_gain
from saggs.objective import Terms
from saggs.overlaps import disjoint_rounds
from saggs.pairs import ParameterSlice, ScalePair, parameter_of

VIEWS = 4
"""With so many slices or fewer, a parameter is multiplied view by view."""


class Round:
    """Pairs that share no entry, compiled.

    Attributes:
        pairs: the pairs.
        terms: the norms that decide their factors.
        weighed: names of the parameters that count in a norm.
    """

    def __init__(self, pairs: Sequence[ScalePair], shapes: Mapping[str, Sequence[int]]) -> None:
        self.pairs = list(pairs)
        self.terms = Terms(self.pairs)
        self._parts: dict[str, list[tuple[int, ParameterSlice]]] = {}
        for index, pair in enumerate(self.pairs):
            for part in pair.slices:
                self._parts.setdefault(part.name, []).append((index, part))
        numbers = {name: [self.terms.number(*item) for item in parts] for name, parts in self._parts.items()}
        self._lines = {
            name: CompiledLines(parts, shapes[name], numbers[name], len(self.pairs))
            for name, parts in self._parts.items()
            if len(parts) > VIEWS
        }
        self._views = {name: parts for name, parts in self._parts.items() if name not in self._lines}
        viewed = {pair for parts in self._views.values() for pair, _ in parts}
        self._position = {pair: position for position, pair in enumerate(sorted(viewed))}
        self._viewed = Constant(torch.tensor(sorted(viewed), dtype=torch.int64))
        self.weighed = {name for name, listed in numbers.items() if max(listed) >= 0}
        self._summed = {name: lines for name, lines in self._lines.items() if name in self.weighed}
        self._compile_sums(numbers)

    def _compile_sums(self, numbers: Mapping[str, Sequence[int]]) -> None:
        """The order that puts the norms of views and lines term by term, and how many each term has."""
        of_views = [n for name in self._views for n in numbers[name] if n >= 0]
        each = torch.cat([torch.tensor(of_views, dtype=torch.int64), *(x.terms for x in self._summed.values())])
        counted = each >= 0
        last_if_none = torch.where(counted, each, self.terms.count)
        self._order = Constant(torch.argsort(last_if_none, stable=True)[: int(counted.sum())])
        lengths = torch.bincount(each[counted], minlength=self.terms.count)
        self._lengths = None if bool((lengths == 1).all()) else Constant(lengths)

    def norms(self, weights: Mapping[str, Tensor], order: int, dtype: torch.dtype) -> Tensor:
        """The norm of every term, shape (terms,), in `dtype`."""
        views = [
            part.view(weights[name]).to(dtype) + 1 if part.offset else part.view(weights[name])
            for name, parts in self._views.items()
            for _, part in parts
            if not part.bias
        ]
        home = weights[min(self.weighed)].device
        of_views = [norm.to(home) for norm in torch._foreach_norm(views, order, dtype)] if views else []
        pieces = [torch.stack(of_views)] if views else []
        pieces += [lines.norms(weights[name], order, dtype).to(home) for name, lines in self._summed.items()]
        each = torch.cat(pieces).index_select(0, self._order.on(home))
        if self._lengths is None:
            return each
        # In float64, where no square over- or underflows; and by segments, whose order of summation is fixed.
        powers = each.double() ** order
        sums = torch.segment_reduce(powers, "sum", lengths=self._lengths.on(home), unsafe=True)
        return (sums if order == 1 else sums.sqrt()).to(dtype)

    def multiply(self, moving: Iterable[Moving], powers: Powers) -> list[Tensor]:
        """Multiply every slice of every tensor in place; returns the counts of `shift_gain`."""
        targets: list[Tensor] = []
        scales: list[Tensor] = []
        counts: list[Tensor | None] = []
        of_views: dict[tuple[int, torch.device], tuple[Tensor, ...]] = {}
        for item in moving:
            if item.name in self._lines:
                counts.append(self._lines[item.name].multiply(item, powers))
                continue
            for pair, part in self._views.get(item.name, ()):
                view = part.view(item.tensor) if item.like_weight else item.tensor
                device, power = item.tensor.device, part.exponent * item.degree
                if (power, device) not in of_views:
                    row = powers.on(device)[powers.highest + power]
                    of_views[power, device] = row.index_select(0, self._viewed.on(device)).unbind()
                scale = of_views[power, device][self._position[pair]]
                if item.is_weight and part.offset:
                    counts.append(shift_gain(view, scale, scale - 1))
                elif view.dtype in NARROW:  # one at a time: a copy in float32 of all of them would double the memory
                    multiply(view, scale)
                else:
                    targets.append(view)
                    scales.append(scale)
        if targets:
            torch._foreach_mul_(targets, scales)
        return [count for count in counts if count is not None]

    def first_in(self, item: Moving, mask: Tensor) -> tuple[ScalePair, ParameterSlice] | None:
        """The first pair with a slice of the item's tensor where the mask is set. Waits for the device."""
        for index, part in self._parts.get(item.name, ()):
            if bool((part.view(mask) if item.like_weight else mask).any()):
                return self.pairs[index], part
        return None


class ScalingPlan:
    """Pairs of one model, which may share entries, compiled into rounds.

    Attributes:
        pairs: the pairs, in the order in which factors are given and returned.
        rounds: each round, and where its pairs stand among all (None: it holds all of them).
        highest: the largest exponent, positive.
        weighed: names of the parameters that count in a norm.

    Raises:
        ValueError: a slice that the model does not have, or a pair that holds an entry twice.
    """

    def __init__(self, pairs: Sequence[ScalePair], parameters: Mapping[str, nn.Parameter]) -> None:
        self.pairs = list(pairs)
        self._whole = transport.whole_parameters(self.pairs)
        self._first: dict[str, ParameterSlice] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._holders: dict[str, list[int]] = {}
        for index, pair in enumerate(self.pairs):
            for part in pair.slices:
                if part.name not in self._first:
                    self._first[part.name] = part
                    self._shapes[part.name] = tuple(parameter_of(parameters, part).shape)
                    self._holders[part.name] = []
                if not _fits(part, self._shapes[part.name]):
                    part.view(parameters[part.name])  # says what is wrong
                self._holders[part.name].append(index)
        rounds = disjoint_rounds(self.pairs, self._shapes)
        self.rounds = [
            (None if len(rounds) == 1 else Constant(torch.tensor(members)), self._compile(members))
            for members in rounds
        ]
        self.highest = max((abs(part.exponent) for pair in self.pairs for part in pair.slices), default=1)
        self.weighed = {name for _, one in self.rounds for name in one.weighed}
        self._rounded: dict[tuple[torch.dtype, ...], Constant] = {}

    def _compile(self, members: Sequence[int]) -> Round:
        return Round([self.pairs[index] for index in members], self._shapes)

    @property
    def overlapping(self) -> bool:
        """True where pairs share entries, so that there is more than one round."""
        return len(self.rounds) > 1

    def weights(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """The present tensors of the named parameters. A ValueError where one is missing or has another shape."""
        found = {name: parameter_of(parameters, part).detach() for name, part in self._first.items()}
        for name, tensor in found.items():
            if tuple(tensor.shape) != self._shapes[name]:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, the plan was compiled for {self._shapes[name]}; find the "
                    "pairs of this model anew"
                )
        return found

    def moving(self, parameters: Mapping[str, nn.Parameter], optimizer: transport.Optimizers | None) -> list[Moving]:
        """Every tensor that the factors move: weights, gradients where there are any, the optimizer's state."""
        found = []
        carrier = None if optimizer is None else transport.Carrier(optimizer)
        for name, weight in self.weights(parameters).items():
            parameter = parameters[name]
            found.append(Moving(name, weight, 1, True))
            if parameter.grad is not None:
                found.append(Moving(name, parameter.grad, -1, False))
            if carrier is not None:
                state = carrier.tensors(parameter, name in self._whole)
                found += [Moving(name, tensor, degree, False, like_weight) for tensor, degree, like_weight in state]
        return found

    def highest_power(self, moving: Iterable[Moving]) -> int:
        """The largest power of a factor, positive, by which one of these tensors moves."""
        return self.highest * max((abs(item.degree) for item in moving), default=1)

    def powers(self, moving: Iterable[Moving], factors: Tensor) -> list[Powers]:
        """What each round multiplies by, from one factor a pair."""
        highest = self.highest_power(moving)
        own = (factors if at is None else factors.index_select(0, at.on(factors.device)) for at, _ in self.rounds)
        return [Powers(each, highest) for each in own]

    def multiply(self, moving: Sequence[Moving], powers: Sequence[Powers]) -> list[Tensor]:
        """Apply round after round to the tensors in place; returns the counts of `saggs.lines.shift_gain`."""
        rounds = zip(self.rounds, powers, strict=True)
        return [count for (_, one), each in rounds for count in one.multiply(moving, each)]

    def norm_dtype(self, weights: Mapping[str, Tensor]) -> torch.dtype:
        """float32 at least, float64 where any of the weights is."""
        wide = any(weights[name].dtype == torch.float64 for name in self.weighed)
        return torch.float64 if wide else torch.float32

    def in_bfloat16(self, weights: Mapping[str, Tensor], device: torch.device) -> Tensor | None:
        """A mask of the pairs with a slice in bfloat16, shape (pairs,), on `device`; None where there are none."""
        dtypes = tuple(weights[name].dtype for name in self._first)
        if torch.bfloat16 not in dtypes:
            return None
        if dtypes not in self._rounded:
            mask = torch.zeros(len(self.pairs), dtype=torch.bool)
            for name, dtype in zip(self._first, dtypes, strict=True):
                if dtype == torch.bfloat16:
                    mask[self._holders[name]] = True
            self._rounded[dtypes] = Constant(mask)
        return self._rounded[dtypes].on(device)


def _fits(part: ParameterSlice, shape: tuple[int, ...]) -> bool:
    """What `ParameterSlice.view` asks for, without making a view: there may be a hundred thousand slices."""
    return (
        (part.shape is None or part.shape == shape)
        and len(part.ranges) == len(shape)
        and all(r is None or 0 <= r[0] < r[1] <= size for r, size in zip(part.ranges, shape, strict=True))
    )
