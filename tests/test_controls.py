"""A check that cannot fail proves nothing: what the inputs do not exercise is refused, whatever stands beside it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from families import randomised
from models import vectors
from test_trials import refused
from torch import Tensor, nn

from saggs import ParameterSlice, ScalePair
from saggs.certificates import examine
from saggs.inputs import default_output
from saggs.trials import Trial


class Experts(nn.Module):
    """Many experts in two tensors, one of which may be closed; the others have a share in every row."""

    def __init__(self, experts: int, closed: int | None) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.zeros(experts, 6))
        self.ups, self.downs = nn.Parameter(torch.zeros(experts, 9, 6)), nn.Parameter(torch.zeros(experts, 5, 9))
        self.closed = closed
        randomised(self, 7)

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ self.router.T
        if self.closed is not None:
            scores = scores.index_fill(-1, torch.tensor([self.closed]), float("-inf"))
        weight = scores.softmax(-1)
        hidden = torch.relu(torch.einsum("bi,eni->ben", x, self.ups))
        return torch.einsum("be,ben,eon->bo", weight, hidden, self.downs)


def _expert(number: int, exponent: int = -1) -> ScalePair:
    one = (number, number + 1)
    left = (ParameterSlice("ups", (one, None, None), 1),)
    right = (ParameterSlice("downs", (one, None, None), exponent),)
    return ScalePair("up_down", "", left, right, signs="positive")


@pytest.mark.parametrize("experts", [6, 20])
def test_a_pair_that_nothing_exercises_is_refused_whatever_stands_beside_it(experts: int) -> None:
    """A wrong pair of an expert that no input reaches changes nothing: it must not pass on the controls of others."""
    right = [_expert(i) for i in range(experts)]
    assert refused(examine(Experts(experts, None), right, vectors)) == []
    wrong = [*right[:3], _expert(3, exponent=-2), *right[4:]]
    assert refused(examine(Experts(experts, None), wrong, vectors)) == [3]
    results = examine(Experts(experts, 3), wrong, vectors)
    assert refused(results) == [3]
    assert "proves nothing" in str(results[3])


def test_a_right_side_that_nothing_exercises_is_refused_and_named() -> None:
    """The left side matters, its true reader too; a reader more, with whatever exponent, is in a closed expert."""
    right = _expert(2)
    idle = ParameterSlice("downs", ((3, 4), None, None), -5)
    results = examine(Experts(6, 3), [right, dataclasses.replace(right, right=(*right.right, idle))], vectors)
    assert refused(results) == [1]
    assert "proves nothing: downs[3:4, :, :]" in str(results[1])
    assert refused(examine(Experts(6, None), [dataclasses.replace(right, right=(*right.right, idle))], vectors)) == [0]


class Neurons(nn.Module):
    """down(relu(up(x))) of many neurons, with nothing to differentiate where `opaque`."""

    def __init__(self, opaque: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.opaque = nn.Linear(6, 40), nn.Linear(40, 5), opaque
        randomised(self, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.opaque and torch.is_grad_enabled()):
            return self.down(torch.relu(self.up(x)))


def _neuron(number: int, exponent: int = -1) -> ScalePair:
    one = (number, number + 1)
    left = (ParameterSlice("up.weight", (one, None), 1), ParameterSlice("up.bias", (one,), 1, bias=True))
    right = (ParameterSlice("down.weight", (None, one), exponent),)
    return ScalePair("up_down", "", left, right, signs="positive")


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_neuron_that_is_dead_is_proved_and_refused_where_it_is_alive(everywhere: bool) -> None:
    """Trained models have many such. At other weights it fires, and there it has to hold; a wrong one is seen there."""
    model = Neurons()
    with torch.no_grad():
        model.up.bias[7] = model.up.bias[9] = -5.0
    pairs = [_neuron(i, -2 if i == 9 else -1) for i in range(40)]
    calls = [((), dict(vectors(torch.Generator().manual_seed(0), 24)))]
    results = Trial(model, "", calls, default_output, pairs).examine(pairs, everywhere=everywhere)
    assert refused(results) == [9]
    assert "is not exact" in str(results[9])
    dead = results[7]
    assert isinstance(dead, ScalePair)
    assert dead.certificate is not None
    assert dead.certificate.spreads
    assert dead.certificate.control > 1e-6


def test_what_has_no_gradient_is_scaled_to_see_whether_it_matters() -> None:
    pairs = [_neuron(i) for i in range(40)]
    assert refused(examine(Neurons(opaque=True), pairs, vectors)) == []
    pairs[5] = _neuron(5, -2)
    assert refused(examine(Neurons(opaque=True), pairs, vectors)) == [5]
