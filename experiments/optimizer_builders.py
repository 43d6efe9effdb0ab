"""How each optimizer of the atlas is built: every class of torch.optim and of pytorch_optimizer, with its defaults.

Most take `cls(params, lr=1e-2)`. The rest need something: a group that says `use_muon`, an optimizer to wrap, a model
with names, a gradient with a graph. What is done for them stands here and in the table's column `setting`. Rows beside
the defaults show settings that change a verdict, and the literal rules of `saggs.reference_optimizer` show what the
formulas say.

Optimizers that ask for gradients at other points (SAM and its kin) or for curvature (AdaHessian, SophiaH) get those of

    L(W + D) = <G, D> + tr((G^T D)^2) / 2,

in which W and D times c, with G divided by c, change nothing, and rotations and signed permutations neither.

Source: ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytorch_optimizer
import torch
from torch import Tensor, nn

from saggs.reference_optimizer import RULES, ReferenceOptimizer
from saggs.rehearsal import Build

RATE = 1e-2
Params = list[nn.Parameter]


@dataclass(frozen=True)
class Entry:
    """One row of the atlas: an optimizer with one setting; `setting` is "" for the library's defaults."""

    optimizer: str
    library: str
    setting: str
    build: Build


def entries() -> list[Entry]:
    """Every row, in the order of the table."""
    rows = []
    for library, module in (("torch.optim", torch.optim), ("pytorch_optimizer", pytorch_optimizer)):
        for name, cls in classes(module):
            setting, build = _SPECIAL.get((library, name), ("", _plain(cls)))
            rows.append(Entry(name, library, setting, build))
            rows += [Entry(name, library, text, other) for text, other in _FURTHER.get((library, name), [])]
    return rows + [_reference(name) for name in RULES]


def classes(module: Any) -> list[tuple[str, type[torch.optim.Optimizer]]]:
    """Optimizer classes of a library by name, without base classes and without those of PyTorch it passes on."""
    found = {}
    for name, value in sorted(vars(module).items()):
        if not (inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)):
            continue
        own = value.__module__.startswith("torch.") == (module is torch.optim)
        if own and name not in ("Optimizer", "BaseOptimizer"):
            found[name] = value
    return list(found.items())


def _plain(cls: Callable[..., torch.optim.Optimizer], **settings: Any) -> Build:
    return lambda params: cls(params, **{"lr": RATE, **settings})


def _grouped(cls: Callable[..., torch.optim.Optimizer], **settings: Any) -> Build:
    """With settings in the param group, where some classes look for them."""
    return lambda params: cls([{"params": params, **settings}], lr=RATE)


def _with_attribute(cls: Callable[..., torch.optim.Optimizer], name: str, value: Any) -> Build:
    def build(params: Params) -> torch.optim.Optimizer:
        optimizer = cls(params, lr=RATE)
        setattr(optimizer, name, value)
        return optimizer

    return build


def _around(cls: Callable[..., torch.optim.Optimizer], **settings: Any) -> Build:
    """A wrapper around AdamW."""
    return lambda params: cls(torch.optim.AdamW(params, lr=RATE), **settings)


class Named(nn.Module):
    """A model that is nothing but its weights, for classes that take a model."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        for index, parameter in enumerate(params):
            self.register_parameter(f"weight{index}", parameter)


def _of_model(cls: Callable[..., torch.optim.Optimizer]) -> Build:
    return lambda params: cls(Named(params), lr=RATE)


class FusedWithBackward(torch.optim.Optimizer):
    """LOMO and AdaLOMO, which update in the backward pass, with a `step` that makes one."""

    def __init__(self, params: Params, cls: Callable[..., Any]) -> None:
        self.inner = cls(Named(params), lr=RATE)
        super().__init__(params, {"lr": RATE})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One backward pass of <G, W>, whose gradient is G."""
        params = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in params]
        for parameter in params:
            parameter.grad = None
        with torch.enable_grad():
            loss = sum(((g * p).sum() for g, p in zip(gradients, params, strict=True)), torch.zeros(()))
            self.inner.fused_backward(loss, self.param_groups[0]["lr"])
        for index, parameter in enumerate(params):
            held = {n: getattr(self.inner, n, {}) for n in ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")}
            self.state[parameter] = {n: v[f"weight{index}"] for n, v in held.items() if f"weight{index}" in v}


def _curved_loss(parameter: Tensor, origin: Tensor, gradient: Tensor) -> Tensor:
    moved = parameter - origin
    product = gradient.T @ moved
    loss: Tensor = (gradient * moved).sum() + 0.5 * (product @ product).trace()
    return loss


def _with_graph(cls: type[torch.optim.Optimizer], **settings: Any) -> Build:
    """For optimizers that differentiate the gradient: it gets a graph."""

    class WithGraph(cls):  # type: ignore[valid-type, misc]
        def step(self, *arguments: Any, **keywords: Any) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    with torch.enable_grad():
                        loss = _curved_loss(parameter, parameter.detach(), parameter.grad.detach())
                        (parameter.grad,) = torch.autograd.grad(loss, parameter, create_graph=True)
            return super().step(*arguments, **keywords)

    return lambda params: WithGraph(params, lr=RATE, **settings)


def _perturbing(make: Callable[[Params], Any], pair: bool = False) -> Build:
    """For optimizers that look at the loss near by: the closure they are given depends on where the weights are."""

    def build(params: Params) -> torch.optim.Optimizer:
        optimizer = make(params)
        inner_step = optimizer.step

        def step(closure: Callable[[], float] | None = None) -> Any:
            if closure is None:
                raise ValueError("needs a closure")
            origins = [p.detach().clone() for p in params]

            def curved() -> Any:
                value = closure()
                for parameter, origin in zip(params, origins, strict=True):
                    with torch.enable_grad():
                        here = parameter.detach().requires_grad_()
                        assert parameter.grad is not None
                        (parameter.grad,) = torch.autograd.grad(_curved_loss(here, origin, parameter.grad), here)
                return (None, torch.tensor(value)) if pair else torch.tensor(value)

            curved()
            return inner_step(curved)

        optimizer.step = step
        return optimizer

    return build


def _gsam(params: Params) -> Any:
    base = torch.optim.AdamW(params, lr=RATE)
    rates: Any = pytorch_optimizer.CosineScheduler(base, t_max=1000, max_lr=RATE)
    radii = pytorch_optimizer.ProportionScheduler(rates, max_lr=RATE, max_value=0.05, min_value=0.05)
    return pytorch_optimizer.GSAM(params, base, Named(params), radii)


def _sam(name: str) -> Build:
    cls = getattr(pytorch_optimizer, name)
    return _perturbing(lambda params: cls(params, base_optimizer=torch.optim.AdamW, lr=RATE))


def _of_pairs(_: Params) -> torch.optim.Optimizer:
    raise ValueError("acts on pairs of factors only, and has no answer for a weight by itself")


def _with_sparse_gradients(params: Params) -> torch.optim.Optimizer:
    optimizer = torch.optim.SparseAdam(params, lr=RATE)
    inner_step = optimizer.step

    def step(closure: Any = None) -> Any:
        for parameter in params:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to_sparse()
        return inner_step(closure)

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


def _schedule_free(params: Params) -> torch.optim.Optimizer:
    optimizer = pytorch_optimizer.ScheduleFreeWrapper(torch.optim.AdamW(params, lr=RATE))
    optimizer.train()
    return optimizer


def _half_precision_safe(params: Params) -> torch.optim.Optimizer:
    """The wrapper keeps its groups and states in the optimizer that it wraps."""
    optimizer = pytorch_optimizer.SafeFP16Optimizer(torch.optim.AdamW(params, lr=RATE))
    optimizer.param_groups, optimizer.state = optimizer.optimizer.param_groups, optimizer.optimizer.state
    return optimizer


def _reference(name: str) -> Entry:
    """A literal rule with its constants, except that no damping, floor or clipping blurs it."""
    rule = RULES[name]
    if name == "scaled_gd":
        return Entry(name, "reference", "", _of_pairs)
    known = inspect.signature(rule.step).parameters
    settings = {"eps": known["eps"].default} if "eps" in known else {}
    changed: dict[str, Any] = {n: v for n, v in (("damping", 0.0), ("floor", 0.0), ("clip", None)) if n in known}
    changed = {n: v for n, v in changed.items() if known[n].default != v}
    text = ", ".join(f"{n}={v}" for n, v in changed.items())
    return Entry(name, "reference", text, lambda p: ReferenceOptimizer(p, rule, RATE, **settings, **changed))


_LOW_RANK = {"rank": 4, "update_proj_gap": 10, "scale": 1.0, "projection_type": "std"}
_LOW_RANK_TEXT = "rank=4, update_proj_gap=10 in the param group"


def _of(name: str) -> Any:
    return getattr(pytorch_optimizer, name)


def _specials() -> dict[tuple[str, str], tuple[str, Build]]:
    """(library, class) -> (setting, how it is built), for those that cls(params, lr=…) does not build."""
    found: dict[str, tuple[str, Build]] = {}
    for name in ("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon"):
        found[name] = ("use_muon=True in the param group", _grouped(_of(name), use_muon=True))
    for name in ("Lookahead", "OrthoGrad", "PCGrad", "TRAC"):
        found[name] = ("around AdamW", _around(_of(name)))
    found["ScheduleFreeWrapper"] = ("around AdamW", _schedule_free)
    found["SafeFP16Optimizer"] = ("around AdamW", _half_precision_safe)
    found["LoRARite"] = ("", _of_pairs)
    for name in ("SAM", "LookSAM", "FriendlySAM"):
        found[name] = ("around AdamW", _sam(name))
    found["WSAM"] = (
        "around AdamW",
        _perturbing(lambda p: _of("WSAM")(Named(p), p, base_optimizer=torch.optim.AdamW, lr=RATE)),
    )
    found["GSAM"] = ("around AdamW", _perturbing(_gsam, pair=True))
    found["BSAM"] = ("num_data=100", _perturbing(lambda p: _of("BSAM")(p, num_data=100, lr=RATE)))
    for name in ("LOMO", "AdaLOMO"):
        found[name] = ("", partial(FusedWithBackward, cls=_of(name)))
    found["AdamMini"] = ("", _of_model(_of("AdamMini")))
    for name in ("AdaHessian", "SophiaH"):
        found[name] = ("", _with_graph(_of(name)))
    found["Ranger21"] = ("num_iterations=1000", _plain(_of("Ranger21"), num_iterations=1000))
    found["SaRA"] = ("threshold=0.5", _plain(_of("SaRA"), threshold=0.5))
    specials = {("pytorch_optimizer", name): value for name, value in found.items()}
    specials["torch.optim", "SparseAdam"] = ("gradients as sparse tensors", _with_sparse_gradients)
    return specials


_SPECIAL = _specials()
_FURTHER: dict[tuple[str, str], list[tuple[str, Build]]] = {
    ("torch.optim", "SGD"): [("momentum=0.9", _plain(torch.optim.SGD, momentum=0.9))],
    ("pytorch_optimizer", "AdaFactor"): [
        ("relative_step=False", _plain(_of("AdaFactor"), relative_step=False)),
        (
            "relative_step=False, scale_parameter=False",
            _plain(_of("AdaFactor"), relative_step=False, scale_parameter=False),
        ),
    ],
    ("pytorch_optimizer", "APOLLO"): [(_LOW_RANK_TEXT, _grouped(_of("APOLLO"), **_LOW_RANK))],
    ("pytorch_optimizer", "Conda"): [("update_proj_gap=10", _plain(_of("Conda"), update_proj_gap=10))],
    ("pytorch_optimizer", "Fira"): [(_LOW_RANK_TEXT, _grouped(_of("Fira"), **_LOW_RANK))],
    ("pytorch_optimizer", "GaLore"): [(_LOW_RANK_TEXT, _grouped(_of("GaLore"), **_LOW_RANK))],
    ("pytorch_optimizer", "Lamb"): [("attribute clamp=1e9", _with_attribute(_of("Lamb"), "clamp", 1e9))],
    ("pytorch_optimizer", "ScalableShampoo"): [
        (
            "start_preconditioning_step=5, preconditioning_compute_steps=5",
            _plain(_of("ScalableShampoo"), start_preconditioning_step=5, preconditioning_compute_steps=5),
        )
    ],
}
"""Further rows of a class: (setting, how it is built)."""
