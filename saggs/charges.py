"""The scale charges of a model: what tells, with one backward pass, which weights can be rescaled against each other.

The idea
--------
Call a set of weights θ that is multiplied as a whole a *line*: a row of a matrix with its bias, a column, one gain.
Stretch it, θ -> e^s θ, and a loss L moves at the rate of the line's **scale charge**

    q = <θ, dL/dθ> = dL/ds at s = 0.

Stretch several lines at once, line i by e^(s a_i), and L moves at the rate Σ a_i q_i. So

    Σ a_i q_i = 0 for every input, every loss and every θ    <=>    the rescaling a changes no output.

(<= is clear. => : an output that does not move at any θ does not move along the whole path e^(s a) θ.)
Charges are therefore measured for many random inputs, random losses L = <output, R> and several random θ, and what is
an *equation between weights* in the model's code becomes an equation between columns of numbers, which can be read off
(`saggs.relations`). No line about any architecture is needed.

A worked example: down(relu(up(x))), two inputs, three hidden neurons, two outputs. The charge of row i of `up` (with
its bias) equals the charge of column i of `down`, whatever x, R and the weights: each neuron may be rescaled.

    >>> import torch
    >>> from torch import nn
    >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> def inputs(generator, count):
    ...     return {"input": torch.randn(count, 2, generator=generator)}
    >>> table = scale_charges(network, inputs=inputs, output=lambda y: y)
    >>> rows, columns = table.of("0.weight", "out"), table.of("2.weight", "in")
    >>> rows.shape                                    # (probes, neurons)
    torch.Size([12, 3])
    >>> bool((rows - columns).abs().max() < 1e-12 * rows.abs().max())
    True

With a GELU in the place of the ReLU they differ, for gelu(c x) is not c gelu(x):

    >>> network[1] = nn.GELU()
    >>> table = scale_charges(network, inputs=inputs, output=lambda y: y)
    >>> rows, columns = table.of("0.weight", "out"), table.of("2.weight", "in")
    >>> bool((rows - columns).abs().max() > 1e-2 * rows.abs().max())
    True

Each matrix has one equation for free, Σ rows = Σ columns (both are <W, dL/dW>): the *trivial* one, which says nothing.
A gain that the model uses as 1 + w is stretched by 1 + w -> e^s (1 + w): its charge is <1 + w, dL/dw>. Both are taken.

Why random weights: a fresh model has zero biases and unit gains, and hides what depends on them. Why float64 and norms
with a large eps: a symmetry that only a norm's eps breaks shows 1e-8 at its own eps and would pass as exact; at
eps = 0.01 it shows 1e-4, against 1e-15 for what is exact. Why three draws of θ of growing spread: at one θ some
equations hold by accident, with coefficients that depend on θ; and a clamp looks linear until something reaches it.

Source: <θ, dL/dθ> is the synaptic saliency whose conservation SynFlow states neuron by neuron (Tanaka et al. 2020), and
the Noether charge of a rescaling (Kunin et al. 2021, Tanaka & Kunin 2021); to solve for unknown symmetries of a whole
network by it is, as far as we know, not done elsewhere.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from saggs.copies import cloned, draw_statistics, raise_eps, require_real
from saggs.inputs import Inputs, Output, default_inputs, default_output, refusing, widened
from saggs.pairs import named_parameters, unwrap
from saggs.precision import float64_everywhere, use_plain_kernels
from saggs.wiring import Wiring, observe

Role = Literal["out", "in", "entry"]
Consume = Callable[[int, str, Tensor, Tensor], None]
SPREADS = (1.0, 2.0, 4.0)
PROBES_PER_DRAW = 4
_SAMPLES = 16


@dataclass(frozen=True)
class Lines:
    """Parallel lines of one parameter: all its rows, all its columns, all its entries.

    Attributes:
        name: the parameter.
        shape: its shape.
        dims: the dimensions that number the lines; the others are summed over. (0,) and (1,) are the rows and columns
            of a matrix; (0, 1) and (0, 2) those of a stack of matrices, one an expert.
        role: "out" makes an output, "in" reads an input, "entry" is a parameter of one wide dimension.
        bias: the parameter whose entries ride along, one a line.
        offset: 1 where the line is 1 + w.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    role: Role
    bias: str | None = None
    offset: int = 0

    @property
    def count(self) -> int:
        """How many lines."""
        return math.prod(self.shape[d] for d in self.dims)

    @property
    def key(self) -> tuple[str, tuple[int, ...], int]:
        """What identifies these lines in one model."""
        return self.name, self.dims, self.offset

    def sums(self, values: Tensor) -> Tensor:
        """Sums over each line of `values`, shape (..., *self.shape) -> (..., count)."""
        if not self.shape:
            return values[..., None]
        lead = values.dim() - len(self.shape)
        others = [lead + d for d in range(len(self.shape)) if d not in self.dims]
        return (values.sum(dim=others) if others else values).flatten(lead)

    def rows(self, values: Tensor) -> Tensor:
        """`values`, shape (..., *self.shape), with one row a line: (..., count, entries of a line)."""
        lead = values.dim() - len(self.shape)
        others = [d for d in range(len(self.shape)) if d not in self.dims]
        order = [*range(lead), *(lead + d for d in (*self.dims, *others))]
        return values.permute(order).reshape(*values.shape[:lead], self.count, -1)


@dataclass(frozen=True)
class ChargeTable:
    """Charges of every line on every probe.

    Attributes:
        lines: families of parallel lines.
        charges: one tensor (probes, count) for each of them, float64.
        wiring: how the model uses its parameters.
    """

    lines: tuple[Lines, ...]
    charges: tuple[Tensor, ...]
    wiring: Wiring

    def of(self, name: str, role: Role) -> Tensor:
        """The charges (probes, count) of one parameter's lines of one role. Raises a KeyError where it has none."""
        for lines, charges in zip(self.lines, self.charges, strict=True):
            if lines.name == name and lines.role == role:
                return charges
        raise KeyError(f"{name} has no lines of role {role!r}")


class Probing:
    """A float64 copy of a model that is run with random weights, inputs and losses.

    Args:
        model: any module; it is not changed.
        inputs: callable (generator, count) -> keyword arguments; random tokens for a causal language model.
        output: callable (result) -> tensor; the logits by default.
        samples: inputs in the batch that every probe runs on.
        seed: of everything random.
        keep_eps: leave the norms' eps as they are; see above why they are raised.

    Raises:
        ValueError: a model that cannot be run, or whose output depends on no parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs | None = None,
        output: Output | None = None,
        *,
        samples: int = _SAMPLES,
        seed: int = 0,
        keep_eps: bool = False,
    ) -> None:
        source = unwrap(model)
        require_real(source)
        self._inputs = inputs or default_inputs(source)
        self._output = output or default_output
        self._samples = samples
        self.generator = torch.Generator().manual_seed(seed)
        self.model = cloned(source)
        use_plain_kernels(self.model)
        if not keep_eps:
            raise_eps(self.model)
        self.parameters = named_parameters(self.model)
        for parameter in self.parameters.values():
            parameter.grad = None
            parameter.requires_grad_(True)
        self._fresh = {name: p.detach().clone() for name, p in self.parameters.items() if p.dim() <= 1}
        self._arguments = widened(dict(self._inputs(self.generator, samples)))
        self.wiring = observe(self.model, self.run)

    def run(self) -> Tensor:
        """One forward pass at the present weights, under the all-float64 mode."""
        with float64_everywhere(), refusing(self.model):
            return self._output(self.model(**self._arguments)).double()

    def draw(self, spread: float) -> None:
        """New weights, matrices of standard deviation spread / sqrt(inputs of a line), and new inputs."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                noise = torch.randn(parameter.shape, generator=self.generator)  # float32 is random enough, and faster
                if parameter.dim() <= 1:
                    start = torch.nan_to_num(self._fresh[name]).clamp(-1, 1)
                    parameter.copy_(start + 0.4 * noise)
                else:
                    fan = 1 if name in self.wiring.looked_up else max(parameter.shape[self._read(name)], 1)
                    parameter.copy_(noise.mul_(spread / math.sqrt(fan)))
        draw_statistics(self.model, self.generator)
        self._arguments = widened(dict(self._inputs(self.generator, self._samples)))

    def _read(self, name: str) -> int:
        return self.wiring.reads.get(name, self.parameters[name].dim() - 1)

    def probes(self, count: int, consume: Consume) -> None:
        """`count` backward passes; each calls consume(probe, name, θ, dL/dθ) for every parameter that it reaches.

        No gradient outlives its call, so that memory stays near that of the weights.
        """
        outputs = self.run()
        self._require_usable(outputs)
        for probe in range(count):
            handles = []
            for name, parameter in self.parameters.items():
                attach: Callable[[Callable[[Tensor], None]], Any] = parameter.register_post_accumulate_grad_hook
                handles.append(attach(_handing_over(probe, name, consume)))
            try:
                torch.autograd.backward(outputs, self._cotangent(outputs), retain_graph=probe + 1 < count)
            finally:
                for handle in handles:
                    handle.remove()

    def batched_probes(self, count: int) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
        """As `probes`, many losses a backward pass: name -> (θ, dL/dθ of shape (chunk, *shape)). For small models.

        At most half as many as the output has entries: more losses than entries depend on each other.
        """
        outputs = self.run()
        self._require_usable(outputs)
        names, parameters = list(self.parameters), list(self.parameters.values())
        chunk = 64
        count = min(count, max(1, outputs.numel() // 2))
        while count > 0:
            losses = torch.stack([self._cotangent(outputs) for _ in range(min(chunk, count))])
            count -= len(losses)
            gradients = _gradients(outputs, parameters, losses)
            yield {
                name: (p.detach(), g) for name, p, g in zip(names, parameters, gradients, strict=True) if g is not None
            }

    def _cotangent(self, outputs: Tensor) -> Tensor:
        return torch.randn(outputs.shape, generator=self.generator, dtype=outputs.dtype)

    def _require_usable(self, outputs: Tensor) -> None:
        if not outputs.requires_grad:
            raise ValueError(
                f"{type(self.model).__name__}'s output depends on no parameter; pass output=, a callable of the "
                "forward pass's result that returns the tensor that counts"
            )
        if not bool(torch.isfinite(outputs).all()):
            raise ValueError(f"{type(self.model).__name__}'s outputs are not finite at random weights")


def _handing_over(probe: int, name: str, consume: Consume) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            consume(probe, name, parameter.detach(), parameter.grad)
        parameter.grad = None

    return hook


def _gradients(outputs: Tensor, parameters: Sequence[Tensor], losses: Tensor) -> Sequence[Tensor | None]:
    """Gradients of every loss, stacked: in one vectorised pass where every operation allows it, else in a loop."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # operations without a batching rule fall back to a loop, and say so
            return torch.autograd.grad(
                outputs, parameters, losses, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
    except RuntimeError:
        each = [torch.autograd.grad(outputs, parameters, loss, retain_graph=True, allow_unused=True) for loss in losses]
        return [
            None if column[0] is None else torch.stack([g for g in column if g is not None])
            for column in zip(*each, strict=True)
        ]


def lines_of(parameters: Mapping[str, nn.Parameter], wiring: Wiring) -> tuple[Lines, ...]:
    """Every family of parallel lines of a model: rows with their biases, columns, entries as w and as 1 + w."""
    found: list[Lines] = []
    for name, parameter in parameters.items():
        shape = tuple(parameter.shape)
        if not parameter.numel():
            continue
        wide = tuple(d for d, size in enumerate(shape) if size > 1)
        if len(wide) < 2 <= len(shape) and name in wiring.reads and name not in wiring.looked_up:
            wide = tuple(range(len(shape)))  # a matrix with one row or one column is a matrix all the same
        if len(wide) < 2:
            dims = wide or tuple(range(len(shape)))[:1]
            offsets = (0,) if name in wiring.additive else (0, 1)  # what is added to an activation is no gain
            found.extend(Lines(name, shape, dims, "entry", offset=offset) for offset in offsets)
            continue
        kernel = name in wiring.kernels
        reads = wiring.reads.get(name, wide[-1])
        families = (
            [(0,), (1,)] if kernel else [(d,) for d in wide] if len(wide) == 2 else [wide[:2], (wide[0], *wide[2:])]
        )
        for dims in families:
            own = dims if len(dims) == 1 else dims[1:]
            role: Role = "in" if reads in own else "out"
            bias = wiring.bias.get(name) if role == "out" else None
            if bias is not None and tuple(parameters[bias].shape) != tuple(shape[d] for d in dims):
                bias = None
            found.append(Lines(name, shape, dims, role, bias))
    return tuple(found)


def scale_charges(
    model: nn.Module,
    inputs: Inputs | None = None,
    output: Output | None = None,
    *,
    probes_per_draw: int = PROBES_PER_DRAW,
    seed: int = 0,
) -> ChargeTable:
    """The scale charges of every line of a model, on random inputs, losses and weights.

    Args:
        model: any module; it is not changed. Its float64 copy is what is measured.
        inputs: callable (generator, count) -> keyword arguments; random tokens for a causal language model.
        output: callable (result) -> tensor; the logits by default.
        probes_per_draw: losses for each of the three draws of the weights.
        seed: of everything random.

    Raises:
        ValueError: a model that cannot be run (meta or quantised weights, no inputs, non-finite outputs).
    """
    return charges_of(Probing(model, inputs, output, seed=seed), probes_per_draw)


def charges_of(probing: Probing, probes_per_draw: int = PROBES_PER_DRAW, *, batched: bool = False) -> ChargeTable:
    """As `scale_charges`, for a copy that is at hand. `batched` is faster for many probes of a small model."""
    lines = lines_of(probing.parameters, probing.wiring)
    sheets = [_Sheet(lines, probes_per_draw) for _ in SPREADS]
    for spread, sheet in zip(SPREADS, sheets, strict=True):
        probing.draw(spread)
        if batched:
            first = 0
            while first < probes_per_draw:
                for gradients in probing.batched_probes(probes_per_draw - first):
                    chunk = len(next(iter(gradients.values()))[1])
                    for name, (weight, gradient) in gradients.items():
                        sheet.add(slice(first, first + chunk), name, weight, gradient)
                    first += chunk
                probing.draw(spread)  # a model with few outputs says no more at these inputs and weights
        else:
            probing.probes(probes_per_draw, sheet.add)
    charges = tuple(torch.cat(columns) for columns in zip(*(s.charges for s in sheets), strict=True))
    return ChargeTable(lines, charges, probing.wiring)


class _Sheet:
    """The charges of one draw of the weights, filled in as gradients arrive, in whatever order."""

    def __init__(self, lines: Sequence[Lines], probes: int) -> None:
        self.charges = [torch.zeros(probes, family.count, dtype=torch.float64) for family in lines]
        self._lines = lines
        self._own: dict[str, list[int]] = {}
        self._riding: dict[str, list[int]] = {}
        for index, family in enumerate(lines):
            self._own.setdefault(family.name, []).append(index)
            if family.bias is not None:
                self._riding.setdefault(family.bias, []).append(index)

    def add(self, probe: int | slice, name: str, weight: Tensor, gradient: Tensor) -> None:
        """Add what one parameter contributes to its own lines, and as a bias to those it rides along with."""
        product = weight * gradient
        for index in self._own.get(name, ()):
            family = self._lines[index]
            self.charges[index][probe] += family.sums(product + gradient if family.offset else product)
        for index in self._riding.get(name, ()):
            self.charges[index][probe] += product.flatten(product.dim() - weight.dim())


__all__ = ["ChargeTable", "Lines", "Probing", "charges_of", "lines_of", "scale_charges"]
