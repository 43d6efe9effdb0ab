"""Three architectures that no library ships, with names that say nothing: pairs have to be found in the function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from expected_layouts import SIZES, Sizes
from families import LENGTH, Family, randomised, token_ids
from torch import Tensor, nn
from torch.nn import functional


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention on [count, heads, length, size]; fewer keys than queries are shared by their groups."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    return mixed.transpose(1, 2).flatten(2)


def _angles(length: int, rotated: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and frequency."""
    speed = 100.0 ** -(torch.arange(rotated // 2, dtype=like.dtype) * 2 / rotated)
    angle = torch.arange(length, dtype=like.dtype)[:, None] * speed
    return angle.cos(), angle.sin()


def _spun_neighbours(x: Tensor, rotated: int) -> Tensor:
    """RoPE that mixes channels 2i and 2i + 1 of the first `rotated` ones."""
    cos, sin = _angles(x.shape[-2], rotated, x)
    a, b = x[..., 0:rotated:2], x[..., 1:rotated:2]
    spun = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((spun, x[..., rotated:]), -1)


def _spun_halves(x: Tensor) -> Tensor:
    """RoPE that mixes channel i with i + half."""
    cos, sin = _angles(x.shape[-2], x.shape[-1], x)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Zig(nn.Module):
    """RMSNorm with the gain 1 + knot."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.knot = nn.Parameter(torch.zeros(width))
        self.smidgen = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.knot) * x * (x.square().mean(-1, keepdim=True) + self.smidgen).rsqrt()


class Plait(nn.Module):
    """Attention from one matrix that holds, for each group, value | key | query | query."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.skein = nn.Linear(s.width, (s.heads + 2 * s.groups) * s.size)
        self.hem = nn.Linear(s.heads * s.size, s.width)
        self.s = s

    def forward(self, x: Tensor) -> Tensor:
        s = self.s
        threads = self.skein(x).unflatten(-1, (s.groups, s.heads // s.groups + 2, s.size)).permute(2, 3, 0, 1, 4)
        v, k, q = threads[:, 0], threads[:, 1], threads[:, 2:].flatten(0, 1)
        q, k = _spun_neighbours(q, s.rotated), _spun_neighbours(k, s.rotated)
        return self.hem(_attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)))


class Tuft(nn.Module):
    """Gated MLP from one matrix that holds up | gate."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.loom = nn.Linear(s.width, 2 * s.neurons)
        self.fringe = nn.Linear(s.neurons, s.width)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.loom(x).chunk(2, -1)
        return self.fringe(functional.silu(gate) * up)


class Strand(nn.Module):
    """A layer of `Braid`."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.tuft, self.zag, self.plait, self.zig = Tuft(s), Zig(s.width), Plait(s), Zig(s.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.plait(self.zig(x))
        return x + self.tuft(self.zag(x))


class Braid(nn.Module):
    """Fused matrices in an odd order, interleaved RoPE on some channels, gains used as 1 + w."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.wool = nn.Embedding(s.vocabulary, s.width)
        self.strands = nn.ModuleList(Strand(s) for _ in range(s.layers))
        self.tassel = Zig(s.width)
        self.shears = nn.Linear(s.width, s.vocabulary, bias=False)

    def forward(self, beads: Tensor) -> Tensor:
        x = self.wool(beads)
        for strand in self.strands:
            x = strand(x)
        return self.shears(self.tassel(x))


class Seam(nn.Module):
    """A layer of `Quarry`: every matrix is a bare parameter stored [in, out], its bias ends in `_dust`."""

    flint: Tensor
    slate: Tensor
    chalk: Tensor
    marl: Tensor
    pick: Tensor
    shovel: Tensor
    flint_dust: Tensor
    slate_dust: Tensor
    chalk_dust: Tensor
    marl_dust: Tensor
    pick_dust: Tensor
    shovel_dust: Tensor

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        inner = s.heads * s.size
        shapes = {
            "pick": (s.width, s.neurons), "marl": (inner, s.width), "slate": (s.width, inner),
            "chalk": (s.width, inner), "shovel": (s.neurons, s.width), "flint": (s.width, inner),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
            self.register_parameter(f"{name}_dust", nn.Parameter(torch.zeros(shape[1])))
        self.grit, self.grit_dust = nn.Parameter(torch.ones(s.width)), nn.Parameter(torch.zeros(s.width))
        self.heads = s.heads

    def forward(self, x: Tensor) -> Tensor:
        clean = functional.layer_norm(x, self.grit.shape, self.grit, self.grit_dust)

        def heads(matrix: Tensor, dust: Tensor) -> Tensor:
            made = torch.einsum("bti,io->bto", clean, matrix) + dust
            return made.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k = heads(self.flint, self.flint_dust), heads(self.slate, self.slate_dust)
        mixed = _attend(q, k, heads(self.chalk, self.chalk_dust)) @ self.marl + self.marl_dust
        dug = torch.relu(clean @ self.pick + self.pick_dust).square()
        return x + mixed + torch.einsum("btf,fo->bto", dug, self.shovel) + self.shovel_dust


class Quarry(nn.Module):
    """Bare matrices, learned positions, a squared ReLU beside attention, one norm for both."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.scree = nn.Parameter(torch.zeros(s.width, s.vocabulary))
        self.grit, self.grit_dust = nn.Parameter(torch.ones(s.width)), nn.Parameter(torch.zeros(s.width))
        self.seams = nn.ModuleList(Seam(s) for _ in range(s.layers))
        self.ledges = nn.Parameter(torch.zeros(LENGTH, s.width))
        self.pebbles = nn.Parameter(torch.zeros(s.vocabulary, s.width))

    def forward(self, stones: Tensor) -> Tensor:
        x = self.pebbles[stones] + self.ledges[: stones.shape[1]]
        for seam in self.seams:
            x = seam(x)
        return functional.layer_norm(x, self.grit.shape, self.grit, self.grit_dust) @ self.scree


class Hush(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.ones(size))
        self.floor = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.level * (x / (x.square().mean(-1, keepdim=True) + self.floor).sqrt())


class Horse(nn.Module):
    """The one block of `Carousel`; its attention reads what a norm outside it has made of the input."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.pedal, self.crank = nn.Linear(s.neurons, s.width), nn.Linear(s.width, s.neurons)
        self.brass = nn.Linear(s.width, s.groups * s.size, bias=False)
        self.saddle = nn.Linear(s.width, s.groups * s.size)
        self.mane = nn.Linear(s.width, s.heads * s.size, bias=False)
        self.pole = nn.Linear(s.heads * s.size, s.width)
        self.bridle, self.bit, self.lull = Hush(s.size), Hush(s.size), Hush(s.width)
        self.size = s.size

    def forward(self, x: Tensor, ready: Tensor) -> Tensor:
        k, q, v = (
            part(ready).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.brass, self.mane, self.saddle)
        )
        q, k = _spun_halves(self.bit(q)), _spun_halves(self.bridle(k))
        x = x + self.pole(_attend(q, k, v))
        return x + self.pedal(torch.relu(self.crank(self.lull(x))))


class Carousel(nn.Module):
    """One block used three times, each time behind a norm of its own."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.exit = nn.Linear(s.width, s.vocabulary, bias=False)
        self.horse = Horse(s)
        self.entrances = nn.ModuleList(Hush(s.width) for _ in range(s.layers))
        self.tickets = nn.Embedding(s.vocabulary, s.width)
        self.bell = Hush(s.width)

    def forward(self, riders: Tensor) -> Tensor:
        x = self.tickets(riders)
        for entrance in self.entrances:
            x = self.horse(x, entrance(x))
        return self.exit(self.bell(x))


def _family(build: Callable[[Sizes], nn.Module], name: str, argument: str) -> Family:
    def inputs(generator: torch.Generator, count: int) -> Mapping[str, Any]:
        return {argument: token_ids(generator, count)}

    def built() -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # the biases of a fresh layer are random too
            torch.manual_seed(0)
            return randomised(build(SIZES[name]), seed=1)

    return Family(built, inputs, lambda result: result)


ODD: dict[str, Family] = {
    "braid": _family(Braid, "braid", "beads"),
    "quarry": _family(Quarry, "quarry", "stones"),
    "carousel": _family(Carousel, "carousel", "riders"),
}
