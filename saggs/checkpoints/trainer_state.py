"""An optimizer's state on disk: whose entry is whose, and how it answers when the weights are rescaled.

Hugging Face's Trainer saves `optimizer.state_dict()`: entries by *position*. Which parameter stands at a position is
known only if one knows how the optimizer was built, so the two usual ways are tried and compared with the file:

    the Trainer's own two groups:   decayed parameters, then the others, each in the model's order
    one group:                      every parameter of the model, in its order

A grouping counts only if every group has its size and every state tensor the shape of its parameter. If none fits, or
if two fit and disagree, the state is refused. Where the file has names of its own (an optimizer built from
`named_parameters()`), those are used.

The class of the optimizer is not in the file either, and names of states mislead (`exp_avg` means three different
things in three optimizers). So a state is carried only if its entries *and* its settings are those of torch's Adam,
AdamW or SGD: first moments answer with c^-e, second moments with c^-2e, the step stays (see `saggs.transport`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saggs.checkpoints.cells import CellPlan, Grid, scale_rows
from saggs.checkpoints.shards import CheckpointError, load_plain
from saggs.pairs import canonical_names, named_parameters, unwrapped_name

_ADAM = {"exp_avg": -1, "exp_avg_sq": -2, "max_exp_avg_sq": -2, "step": 0}
_SGD = {"momentum_buffer": -1}
_COMMON = {"params", "names", "param_names", "lr", "initial_lr", "weight_decay", "maximize", "foreach", "fused",
           "differentiable", "capturable"}  # fmt: skip
_ADAM_SETTINGS = {"betas", "eps", "amsgrad"}
_SGD_SETTINGS = {"momentum", "dampening", "nesterov"}


class OptimizerState:
    """The state in an `optimizer.pt`, with the parameter that every entry belongs to.

    Args:
        path: the file; a Trainer's (by position) or one of this project's runs (by name).
        model: of the checkpoint's class; may be on the meta device.

    Attributes:
        entries: parameter name -> its state.
        notes: what a user should know.

    Raises:
        CheckpointError: the file is damaged, the optimizer is not known, or its entries cannot be assigned for sure.
    """

    def __init__(self, path: Path, model: nn.Module) -> None:
        self._path = path
        self._saved = load_plain(path)
        groups = self._groups()
        self.notes = [note] if (note := self._check_settings(groups)) else []
        shapes = {name: tuple(p.shape) for name, p in named_parameters(model).items()}
        state = self._saved["state"]
        if any("names" in group for group in groups):
            known: dict[Any, str] = {name: name for name in shapes}
        else:
            known = self._positions(groups, model, shapes)
        unknown = [key for key in state if key not in known]
        if unknown:
            raise self._refused(f"it has state for {unknown[:3]}, which no group holds")
        self.entries: dict[str, dict[str, Any]] = {known[key]: entry for key, entry in state.items()}
        for name, entry in self.entries.items():
            self._check_entry(name, entry, shapes[name])
        if not state:
            self.notes.append(f"{path.name} holds no state yet; it stays as it is")

    def _groups(self) -> list[dict[str, Any]]:
        saved = self._saved
        groups = saved.get("param_groups", saved.get("groups")) if isinstance(saved, dict) else None
        if not isinstance(groups, list) or not groups or not isinstance(saved.get("state"), dict):
            raise self._refused("it is no optimizer's state_dict")
        if saved.get("class", "AdamW") not in ("Adam", "AdamW", "SGD"):
            raise self._refused(f"the rule of {saved['class']} is not known")
        return groups

    def _check_settings(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """Refuse settings of any class but Adam, AdamW and SGD; a note where the decay is coupled."""
        for group in groups:
            keys = set(group)
            for own, more in ((_ADAM_SETTINGS, {"decoupled_weight_decay"}), (_SGD_SETTINGS, set())):
                if own <= keys <= own | more | _COMMON:
                    break
            else:
                raise self._refused(
                    f"its settings ({', '.join(sorted(map(str, keys - {'params'})))}) are not those of torch's Adam, "
                    "AdamW or SGD, and the rule of another optimizer is not known"
                )
        decays = [g for g in groups if g.get("weight_decay") and not g.get("decoupled_weight_decay")]
        if decays and ("momentum" in decays[0] or "decoupled_weight_decay" in decays[0]):
            return "weight decay is coupled: it mixes weights into the moments, so carrying them is only approximate"
        return ""

    def _check_entry(self, name: str, entry: Mapping[str, Any], shape: tuple[int, ...]) -> None:
        present = {key for key, value in entry.items() if value is not None}
        adam, sgd = {"exp_avg", "exp_avg_sq"} <= present <= set(_ADAM), present <= set(_SGD)
        if not (adam or sgd):
            raise self._refused(
                f"the state of {name} is {', '.join(sorted(map(str, present)))}, which is neither Adam's (exp_avg, "
                "exp_avg_sq) nor SGD's (momentum_buffer)"
            )
        for key in present:
            if key != "step" and (not isinstance(entry[key], Tensor) or tuple(entry[key].shape) != shape):
                raise self._refused(f"{key} of {name} has shape {tuple(entry[key].shape)}, the parameter {shape}")

    def _positions(
        self, groups: Sequence[Mapping[str, Any]], model: nn.Module, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[Any, str]:
        """Position -> parameter."""
        positions = [list(group["params"]) for group in groups]
        fitting: list[dict[Any, str]] = []
        misfits = []
        candidates = self._own_names(groups, model) or candidate_groups(model)
        for what, names in candidates.items():
            misfit = self._misfit(positions, names, shapes)
            if misfit:
                misfits.append(f"{what}: {misfit}")
                continue
            found = {p: n for group, own in zip(positions, names, strict=True) for p, n in zip(group, own, strict=True)}
            if found not in fitting:
                fitting.append(found)
        if len(fitting) != 1:
            why = "; ".join(misfits) if not fitting else "more than one order of parameters fits it"
            raise self._refused(f"its entries are kept by position and cannot be assigned for sure ({why})")
        return fitting[0]

    def _misfit(self, positions: list[list[int]], names: list[list[str]], shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Why this grouping cannot be the file's, or nothing."""
        sizes, expected = [len(group) for group in positions], [len(group) for group in names]
        if sizes != expected:
            return f"groups of {expected} parameters, the file has {sizes}"
        for group, own in zip(positions, names, strict=True):
            for position, name in zip(group, own, strict=True):
                for key, value in self._saved["state"].get(position, {}).items():
                    if isinstance(value, Tensor) and key != "step" and tuple(value.shape) != shapes[name]:
                        return f"{key} at position {position} has shape {tuple(value.shape)}, {name} {shapes[name]}"
        return ""

    def _own_names(self, groups: Sequence[Mapping[str, Any]], model: nn.Module) -> dict[str, list[list[str]]] | None:
        if not all("param_names" in group for group in groups):
            return None
        canonical = canonical_names(model)
        names = [[unwrapped_name(str(n)) for n in group["param_names"]] for group in groups]
        unknown = [n for own in names for n in own if n not in canonical]
        if unknown:
            raise self._refused(f"it names {unknown[0]!r}, which is no parameter of the model")
        return {"its own names": [[canonical[n] for n in own] for own in names]}

    def _refused(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: the optimizer's state cannot be carried: {why}. Leave it out knowingly with "
            "--without-optimizer, or rebalance inside the training loop (saggs.Rebalancer)"
        )

    def rescale(self, plan: CellPlan, factors: Tensor) -> dict[str, Any]:
        """The file's contents with every state moved along; dtypes, steps and settings are kept.

        Args:
            plan: cells by parameter name.
            factors: float64, (pairs,).

        Raises:
            CheckpointError: an entry overflows, or falls below the smallest normal number of its dtype.
        """
        by_degree = {degree: plan.multipliers(factors, degree) for degree in (-1, -2)}
        for name, entry in self.entries.items():
            grid = plan.grids.get(name)
            for key, value in entry.items():
                degree = (_ADAM | _SGD).get(key, 0)
                if grid is not None and degree and isinstance(value, Tensor):
                    self._rescale_tensor(f"{key} of {name}", value, grid, by_degree[degree])
        return dict(self._saved)

    def _rescale_tensor(self, what: str, tensor: Tensor, grid: Grid, multipliers: Tensor) -> None:
        expanded = grid.expanded(multipliers)
        if bool((expanded == 1).all()):
            return
        smallest = torch.finfo(tensor.dtype).tiny
        step = max(1, (1 << 20) // max(1, tensor[:1].numel())) if tensor.dim() else 1
        for first in range(0, len(tensor) if tensor.dim() else 1, step):
            rows = tensor[first : first + step] if tensor.dim() else tensor
            normal = rows.abs() >= smallest
            scale_rows(rows, grid.rows_of(expanded, first, len(rows) if rows.dim() else 1), offset=0)
            size = rows.abs()
            if not bool(torch.isfinite(size).all()) or bool((normal & (size < smallest)).any()):
                raise self._refused(f"{what} over- or underflows in {tensor.dtype}")


def candidate_groups(model: nn.Module) -> dict[str, list[list[str]]]:
    """The usual ways to hand a model's parameters to an optimizer: description -> names, group by group."""
    from transformers import Trainer

    names = list(named_parameters(model))
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]  # it reads no self
    return {
        "the Trainer's groups": [[n for n in names if n in decayed], [n for n in names if n not in decayed]],
        "one group": [names],
    }
