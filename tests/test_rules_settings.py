"""What the update rules take and refuse: settings by name and range, shapes, kinds of gradients."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from identities import distance, draw
from torch import nn

from saggs.rules import RULES, Adam, Dial, ScaledGD

SAME = 1e-12
MATRIX_RULES = ("adafactor", "muon", "shampoo", "scaled_gd")


def test_settings_of_a_group_act_on_its_weights_and_the_shared_number_on_all() -> None:
    """A dial of two groups, each with betas, eps and power of its own, written out. Sharing nothing is the control."""
    w = [nn.Parameter(draw(1, 4, 3)), nn.Parameter(draw(2, 5))]
    g = [draw(3, 4, 3), draw(4, 5)]
    settings = [
        {"betas": (0.9, 0.99), "eps": 1e-3, "precond_power": 0.25},
        {"betas": (0.5, 0.8), "eps": 1e-2, "precond_power": 0.6, "scalar": "geomean"},
    ]
    optimizer = Dial([{"params": [p], **own} for p, own in zip(w, settings, strict=True)], lr=0.1)
    before = [p.detach().clone() for p in w]
    for p, own in zip(w, g, strict=True):
        p.grad = own
    optimizer.step()
    # At the first step both corrected moments are those of the gradient, whatever the betas.
    everything = torch.cat([x.flatten() for x in g])
    rms = everything.square().mean().sqrt()
    logs = torch.cat([torch.log(g[0].abs() + 1e-3).flatten(), torch.log(g[1].abs() + 1e-2)])
    for index, (scale, eps, power) in enumerate(((rms, 1e-3, 0.25), (logs.mean().exp(), 1e-2, 0.6))):
        for shared, within in ((scale, True), (g[index].square().mean().sqrt(), False)):
            wanted = g[index] / ((g[index].abs() + eps) ** power * (shared + eps) ** (1 - power) + eps)
            assert (distance(before[index] - w[index].detach(), 0.1 * wanted) < SAME) == within


@pytest.mark.parametrize("name", RULES)
def test_defaults_are_those_of_the_signature_and_lie_in_their_ranges(name: str) -> None:
    cls = RULES[name]
    known = inspect.signature(cls).parameters
    assert {n: p.default for n, p in known.items() if p.kind is p.KEYWORD_ONLY} == dict(cls.DEFAULTS)
    assert set(cls.RANGES) == set(cls.DEFAULTS)
    assert all(cls.RANGES[n].admits(value) for n, value in cls.DEFAULTS.items())
    assert not any(cls.RANGES[n].admits(value) for n, value in dict.fromkeys(cls.DEFAULTS, "nonsense").items())


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("adam", {"lr": -1.0}, "lr=-1.0 must be a number, 0 or more, and finite"),
    ("adam", {"lr": torch.ones(2)}, r"lr has shape \(2,\); give a number or a 0-dimensional tensor"),
    ("adam", {"weight_decay": -0.1}, "weight_decay=-0.1"),
    ("adam", {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) must be two of a number in \[0, 1\)"),
    ("adam", {"betas": 0.9}, "betas=0.9"),
    ("adam", {"eps": -1e-8}, "eps=-1e-08"),
    ("adam", {"eps": float("nan")}, "eps=nan"),
    ("gd", {"momentum": 1.0}, "momentum=1.0"),
    ("rmsprop", {"rho": True}, "rho=True"),
    ("signum", {"beta": float("inf")}, "beta=inf"),
    ("dial", {"precond_power": 1.5}, r"precond_power=1.5 must be a number in \[0, 1\]"),
    ("dial", {"scalar": "geometric"}, "scalar='geometric' must be 'rms' or 'geomean'"),
    ("dial", {"scalar": "geomeans"}, "the nearest is 'geomean'"),
    ("muon", {"ns_steps": 0}, "ns_steps=0 must be a whole number, 1 or more"),
    ("shampoo", {"every": 2.5}, "every=2.5 must be a whole number"),
    ("shampoo", {"exponent": 0.25}, r"exponent=0.25 must be a number in \[-1, 0\]"),
    ("flow_adam", {"clip": "globally"}, "the nearest is 'global'"),
    ("flow_adam", {"clip_value": -1.0}, "clip_value=-1.0 must be None or a number"),
    ("flow_adam", {"moment_limit": float("inf")}, "moment_limit=inf must be a number, 0 or more, and finite"),
]


@pytest.mark.parametrize(("name", "settings", "message"), MISTAKES)
def test_a_setting_out_of_its_range_is_refused_with_its_value_and_its_range(
    name: str, settings: dict[str, Any], message: str
) -> None:
    """On construction, and in a group that is added later, which is then not there."""
    shape = (3, 2)
    with pytest.raises(ValueError, match=message):
        RULES[name]([nn.Parameter(torch.zeros(shape))], **{"lr": 0.1, **settings})
    optimizer = RULES[name]([nn.Parameter(torch.zeros(shape))], lr=0.1)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(shape))], **settings})
    assert len(optimizer.param_groups) == 1


def test_a_setting_that_is_none_is_refused_with_the_nearest_one() -> None:
    """Also in a group, where PyTorch would keep it and nothing would read it. A group may have a name."""
    parameters = [nn.Parameter(torch.zeros(3, 2))]
    with pytest.raises(ValueError, match="Dial has no setting 'precondpower'; the nearest is 'precond_power'"):
        Dial(parameters, lr=0.1, precondpower=1.0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"Adam has no setting 'beta'; the nearest is 'betas'. Its settings are lr,"):
        Adam([{"params": parameters, "beta": 0.9}], lr=0.1)
    assert Adam([{"params": parameters, "name": "all"}], lr=0.1).param_groups[0]["name"] == "all"


@pytest.mark.parametrize("name", MATRIX_RULES)
@pytest.mark.parametrize("shape", [(3,), (), (2, 3, 4)])
def test_what_is_no_matrix_is_refused_by_a_rule_for_matrices_with_the_remedy(name: str, shape: tuple[int, ...]) -> None:
    message = r"is a rule for matrices, and a parameter has shape .*torch\.optim\.Adam"
    with pytest.raises(ValueError, match=message):
        RULES[name]([nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(shape))], lr=0.1)


@pytest.mark.parametrize("shapes", [[(3, 2)], [(3, 2), (4, 3)], [(3, 2), (4, 2), (5, 2)]])
def test_a_group_of_scaled_gd_that_is_no_pair_is_refused(shapes: list[tuple[int, int]]) -> None:
    """Also where one of a pair has no gradient, which on construction no one knows."""
    with pytest.raises(ValueError, match="a group of ScaledGD is a pair of matrices"):
        ScaledGD([nn.Parameter(torch.zeros(s)) for s in shapes], lr=0.1)
    pair = [nn.Parameter(draw(0, 3, 2)), nn.Parameter(draw(1, 4, 2))]
    optimizer = ScaledGD(pair, lr=0.1)
    pair[0].grad = draw(2, 3, 2)
    with pytest.raises(ValueError, match=r"both with a gradient; this one has \(3, 2\)"):
        optimizer.step()


def test_gradients_that_are_sparse_or_complex_are_refused_and_nothing_moves() -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"Adam got a gradient of layout torch\.sparse_coo; .*sparse=False"):
        Adam(embedding.parameters(), lr=0.1).step()
    assert torch.equal(embedding.weight, before)
    p = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"gradient of dtype torch\.complex64; .*view_as_real"):
        Adam([p], lr=0.1).step()
