"""How a model uses its parameters, observed while it runs: which dimension is contracted, which bias follows.

A scale charge tells that two lines of weights move together, not whether a line is a row (it makes an output) or a
column (it reads an input). The call that uses the matrix tells: `F.linear(x, W, b)` contracts the last dimension of W,
`torch.addmm(b, x, W)` the first, an `einsum` the letter that is missing from its result. So one forward pass is run
under a `TorchFunctionMode` that looks at the arguments. Nothing here knows a layer's class or a parameter's name.

A parameter that is used in no such call has the convention of `nn.Linear`: its last dimension reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from saggs.pairs import named_parameters

_MATMULS = (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__)
_ADDMMS = (torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm)
_ADDS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)
_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d, functional.conv1d, functional.conv2d, functional.conv3d)


@dataclass
class Wiring:
    """What one forward pass showed.

    Attributes:
        reads: parameter -> its dimension that is contracted with an input.
        bias: matrix -> the bias that is added to its product.
        additive: parameters that are added to an activation, or passed as a bias.
        kernels: convolution weights: all dimensions but the first two are one line's entries.
        looked_up: embedding tables: rows are picked, not contracted.
    """

    reads: dict[str, int] = field(default_factory=dict)
    bias: dict[str, str] = field(default_factory=dict)
    additive: set[str] = field(default_factory=set)
    kernels: set[str] = field(default_factory=set)
    looked_up: set[str] = field(default_factory=set)


def observe(model: nn.Module, run: Callable[[], Any]) -> Wiring:
    """The wiring of `model`, seen while `run` makes one forward pass of it."""
    mode = _Observer(named_parameters(model))
    with mode:
        run()
    return mode.wiring


class _Observer(TorchFunctionMode):
    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.wiring = Wiring()
        self._by_storage = {p.untyped_storage().data_ptr(): (name, p) for name, p in parameters.items() if p.numel()}
        # Products are kept alive until the pass is over, so that no id is given out twice.
        self._products: dict[int, tuple[Tensor, str]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        self._look(func, list(args), kwargs, result)
        return result

    def _look(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], result: Any) -> None:
        if func is functional.linear:
            weight, bias = self._arguments(args, kwargs, "input", "weight", "bias")[1:]
            self._contracted(weight, -1, result)
            self._with_bias(weight, bias)
        elif func in _CONVOLUTIONS:
            weight, bias = self._arguments(args, kwargs, "input", "weight", "bias")[1:]
            if (found := self._find(weight)) is not None:
                self.wiring.kernels.add(found[0])
            self._contracted(weight, 1, result)
            self._with_bias(weight, bias)
        elif func is functional.embedding:
            if (found := self._find(self._arguments(args, kwargs, "input", "weight")[1])) is not None:
                self.wiring.looked_up.add(found[0])
                self.wiring.reads.setdefault(found[0], 0)
        elif func is functional.layer_norm or func is torch.layer_norm:
            self._adds(self._arguments(args, kwargs, "input", "normalized_shape", "weight", "bias")[3])
        elif func is functional.multi_head_attention_forward and len(args) >= 13:
            self._with_bias(args[5], args[6])  # in one call, what it does inside is not seen
            self._with_bias(args[11], args[12])
        elif func in _MATMULS and len(args) == 2:
            left, right = args
            self._contracted(left, -1, result)
            self._contracted(right, -2 if isinstance(right, Tensor) and right.dim() > 1 else -1, result)
        elif func is Tensor.__rmatmul__ and len(args) == 2:
            self._contracted(args[0], -2, result)
        elif func in _ADDMMS and len(args) >= 3:
            self._contracted(args[1], -1, result)
            self._contracted(args[2], -2, result)
            self._with_bias(args[2], args[0])
        elif func is torch.einsum and args and isinstance(args[0], str):
            self._einsum(args[0], list(args[1]) if isinstance(args[1], list | tuple) else args[1:], result)
        elif func in _ADDS and len(args) >= 2:
            self._sum(args[0], args[1], result)

    @staticmethod
    def _arguments(args: list[Any], kwargs: Mapping[str, Any], *names: str) -> list[Any]:
        return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]

    def _find(self, value: Any) -> tuple[str, nn.Parameter] | None:
        """The parameter that `value` is, or is a view of."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
            return None
        try:
            return self._by_storage.get(value.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):  # a tensor without storage, such as a wrapper's
            return None

    def _contracted(self, value: Any, dim: int, result: Any) -> None:
        """Note that dimension `dim` of `value`, a view of a parameter, was contracted to make `result`."""
        found = self._find(value)
        if found is None or value.dim() < 2:
            return
        name, parameter = found
        dim %= value.dim()
        dims = [
            d
            for d in range(parameter.dim())
            if parameter.stride(d) == value.stride(dim) and parameter.shape[d] == value.shape[dim]
        ]
        if value.shape == parameter.shape and dim in dims:  # of equal strides, as sizes of one have, its own
            dims = [dim]
        if dims:
            self.wiring.reads.setdefault(name, dims[-1])
        if isinstance(result, Tensor):
            self._products[id(result)] = (result, name)

    def _with_bias(self, weight: Any, bias: Any) -> None:
        matrix, found = self._find(weight), self._find(bias)
        if found is not None:
            self.wiring.additive.add(found[0])
            if matrix is not None:
                self.wiring.bias.setdefault(matrix[0], found[0])

    def _adds(self, value: Any) -> None:
        if (found := self._find(value)) is not None:
            self.wiring.additive.add(found[0])

    def _sum(self, left: Any, right: Any, result: Any) -> None:
        for value, other in ((left, right), (right, left)):
            found = self._find(value)
            if found is None or not isinstance(other, Tensor) or other.dim() == 0:
                continue  # 1 + w is no bias
            self.wiring.additive.add(found[0])
            if id(other) in self._products and found[1].dim() <= 2:
                self.wiring.bias.setdefault(self._products[id(other)][1], found[0])

    def _einsum(self, equation: str, operands: Sequence[Any], result: Any) -> None:
        inputs, arrow, output = equation.replace(" ", "").replace("...", "").partition("->")
        if not arrow:  # then what occurs once is kept
            output = "".join(c for c in set(inputs) if c != "," and inputs.count(c) == 1)
        for letters, operand in zip(inputs.split(","), operands, strict=False):
            if (
                self._find(operand) is None
                or len(letters) != operand.dim()
                or not any(c not in output for c in letters)
            ):
                continue
            contracted = [i for i, letter in enumerate(letters) if letter not in output]
            self._contracted(operand, contracted[-1], result)


__all__ = ["Wiring", "observe"]
