"""Candidates are kept by the hash of what they depend on, and never handed to another model."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from models import tiny_gpt2, tiny_llama
from odd_models import ODD
from tongues import Buffered, Hidden, Power, Tongue, plain, raised
from torch import Tensor, nn
from torch.nn import functional

from saggs import ScalePair, cache, discovery, find_pairs
from saggs.cache import key_of
from saggs.lifting import Analysis, analyse


@pytest.fixture(autouse=True)
def _empty_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(cache.DIRECTORY, raising=False)
    cache.clear()
    yield
    cache.clear()


@pytest.fixture
def analysed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The class of every model that was analysed, in order."""
    seen: list[str] = []

    def counting(model: nn.Module, *rest: Any) -> Analysis:
        seen.append(type(model).__name__)
        return analyse(model, *rest)

    monkeypatch.setattr(discovery, "analyse", counting)
    return seen


def kinds(pairs: list[ScalePair]) -> set[str]:
    return {pair.kind for pair in pairs}


# --- the key ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [Tongue, tiny_gpt2, tiny_llama, *(ODD[name].build for name in ODD)])
def test_the_same_class_configuration_and_shapes_have_one_key_whatever_the_weights(build: Any) -> None:
    one, other = build(), build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
            parameter.requires_grad_(False)
    key = key_of(one, "matrix")
    assert key is not None
    assert len(key) == 24
    assert key_of(other.train(), "matrix") == key
    assert key_of(nn.DataParallel(other), "matrix") == key
    assert len({key_of(one, granularity) for granularity in ("matrix", "head", "channel")}) == 3


def test_a_compiled_model_has_the_key_of_the_model_in_it() -> None:
    compiled: Any = torch.compile(Tongue())
    assert key_of(compiled, "matrix") == key_of(Tongue(), "matrix") != key_of(Tongue(neurons=8), "matrix")


def _llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 16, "attn_implementation": "eager",
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


def _tied() -> nn.Module:
    model = Tongue()
    model.head.weight = model.table.weight
    return model


def _other_eps() -> nn.Module:
    model = Tongue()
    model.norm.eps = 1e-6
    return model


def _other_setting() -> nn.Module:
    model = Tongue()
    model.config.power = 2
    return model


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "width": (Tongue, lambda: Tongue(width=7)),
    "neurons": (Tongue, lambda: Tongue(neurons=8)),
    "eps": (Tongue, _other_eps),
    "function": (Tongue, lambda: Tongue(functional.gelu)),
    "builtin": (lambda: Tongue(torch.relu), lambda: Tongue(torch.tanh)),
    "module": (lambda: Tongue(nn.ReLU()), lambda: Tongue(nn.GELU())),
    "setting_of_a_module": (lambda: Tongue(nn.ELU(1.0)), lambda: Tongue(nn.ELU(2.0))),
    "setting_of_a_callable": (lambda: Tongue(Power(1)), lambda: Tongue(Power(2))),
    "tie": (Tongue, _tied),
    "configuration": (Tongue, _other_setting),
    "class": (Tongue, Hidden),
    "library_activation": (_llama, lambda: _llama(hidden_act="relu")),
    "library_heads": (_llama, lambda: _llama(num_attention_heads=8, head_dim=4)),
    "library_eps": (_llama, lambda: _llama(rms_norm_eps=1e-5)),
    "library_attention": (_llama, lambda: _llama(attn_implementation="sdpa")),
    "library_tie": (_llama, lambda: _llama(tie_word_embeddings=True)),
    "library_bias": (_llama, lambda: _llama(mlp_bias=True)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_may_change_the_pairs_changes_the_key(what: str) -> None:
    one, other = (build() for build in DIFFERENT[what])
    assert key_of(one, "matrix") is not None
    assert key_of(other, "matrix") not in (key_of(one, "matrix"), None)


def _with(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Tongue()
        change(model)
        return model

    return build


def _local_class() -> nn.Module:
    class Local(Tongue):
        pass

    return Local()


UNTOLD: dict[str, Callable[[], nn.Module]] = {
    "hook": _with(lambda m: m.up.register_forward_hook(lambda module, args, out: out.relu())),
    "hook_before": _with(lambda m: m.up.register_forward_pre_hook(lambda module, args: args)),
    "forward_of_its_own": _with(lambda m: setattr(m.up, "forward", m.up.forward)),
    "lambda": lambda: Tongue(lambda x: x.relu()),
    "lambda_in_a_list": _with(lambda m: setattr(m, "steps", [functional.relu, lambda x: x])),
    "local_function": lambda: Tongue(raised(lambda x: x, 2)),
    "local_class": _local_class,
    "odd_object": _with(lambda m: setattr(m, "odd", range(3))),
    "nested_too_deeply": _with(lambda m: setattr(m, "deep", [[[[[[[[1]]]]]]]])),
    "no_source": _with(lambda m: setattr(m, "made", type("Made", (nn.Identity,), {"__module__": "nowhere"})())),
}


@pytest.mark.parametrize("what", UNTOLD)
def test_what_no_key_can_hold_is_not_cached(what: str) -> None:
    assert key_of(UNTOLD[what](), "matrix") is None
    assert key_of(Tongue(), "matrix") is not None


def test_a_hook_that_is_gone_leaves_no_trace() -> None:
    model = Tongue()
    handle = model.up.register_forward_hook(lambda module, args, out: out)
    assert key_of(model, "matrix") is None
    handle.remove()
    assert key_of(model, "matrix") == key_of(Tongue(), "matrix")


@pytest.mark.parametrize("name", ["quarry", "llama"])
def test_the_key_is_the_same_in_every_process(name: str) -> None:
    """With other hashes of strings, on which the order of a set depends."""
    code = (
        "import sys; sys.path[:0] = ['tests', '.']\nfrom families import FAMILIES\nfrom odd_models import ODD\n"
        "from saggs.cache import key_of\n"
        f"print(key_of({{**FAMILIES, **ODD}}[{name!r}].build(), 'matrix'))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == key_of({**FAMILIES, **ODD}[name].build(), "matrix"), done.stderr


# --- a result is never another model's --------------------------------------------------------------------------------

# Two models that compute different functions, told apart by nothing but what the name says.
ALIKE: dict[str, tuple[Callable[[Any], nn.Module], Any, Any]] = {
    "public_function": (Tongue, functional.relu, functional.gelu),
    "setting": (Tongue, Power(1), Power(2)),
    "private_function": (Hidden, functional.relu, functional.gelu),
    "private_module": (Hidden, nn.ReLU(), nn.GELU()),
    "partial": (Tongue, functools.partial(functional.relu), functools.partial(functional.gelu)),
    "wrapped": (Tongue, raised(plain, 1), raised(plain, 2)),
    "method": (Tongue, Power(1).__call__, Power(2).__call__),
    "buffer": (Buffered, 1, 2),
}


@pytest.mark.parametrize("what", ALIKE)
def test_a_kept_result_never_leaks_to_a_model_that_differs_in(what: str) -> None:
    """In either order each model has the pairs that it has without any cache, and nothing is said of left-out ones."""
    build, first, second = ALIKE[what]
    models = [build(first), build(second)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = []
        for model in models:
            cache.clear()
            wanted.append(find_pairs(model))
        assert wanted[0] != wanted[1]
        for order in ((0, 1), (1, 0)):
            cache.clear()
            for i in order:
                assert find_pairs(models[i]) == wanted[i]


def test_a_kept_result_does_not_survive_a_class_that_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries of faster kernels do: they put another forward pass into a class."""
    assert "up_down" in kinds(find_pairs(Tongue()))
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: functional.linear(x, self.weight, self.bias).tanh())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "up_down" not in kinds(find_pairs(Tongue()))


# --- in memory --------------------------------------------------------------------------------------------------------


def test_a_model_that_was_met_is_not_analysed_again_but_certified_again(analysed: list[str]) -> None:
    first = find_pairs(Tongue())
    assert analysed == ["Tongue"]
    other = Tongue()
    with torch.no_grad():
        other.up.weight.mul_(3)
    again = find_pairs(other)
    assert analysed == ["Tongue"]
    assert [(p.left, p.right) for p in again] == [(p.left, p.right) for p in first]
    assert [p.certificate for p in again] != [p.certificate for p in first]  # on these weights
    assert len(find_pairs(Tongue(), ["up_down"])) == 1
    assert analysed == ["Tongue"]
    find_pairs(Tongue(), granularity="channel")
    find_pairs(Tongue(neurons=8))
    assert analysed == ["Tongue", "Tongue", "Tongue"]
    cache.clear()
    assert find_pairs(other) == again
    assert analysed == ["Tongue"] * 4


def test_weights_that_are_not_finite_are_refused_although_the_model_is_known(analysed: list[str]) -> None:
    model = Tongue()
    assert len(find_pairs(model)) > 1
    with torch.no_grad():
        model.up.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="Tongue's outputs are not finite; nothing can be certified on it"):
        find_pairs(model)
    assert analysed == ["Tongue"]


def test_a_list_that_was_handed_out_is_the_callers_own() -> None:
    find_pairs(Tongue()).clear()
    cache.cached(Tongue(), "matrix", None, list).clear()
    assert len(find_pairs(Tongue())) > 1


@pytest.mark.parametrize("given", ["inputs", "output"])
def test_with_inputs_or_an_output_of_the_callers_own_nothing_is_kept(
    given: str, analysed: list[str], tmp_path: Path
) -> None:
    def inputs(generator: torch.Generator, count: int) -> Mapping[str, Tensor]:
        return {"input_ids": torch.randint(0, 20, (count, 5), generator=generator)}

    own: dict[str, Any] = {"inputs": inputs} if given == "inputs" else {"output": lambda result: result}
    for _ in range(2):
        assert "up_down" in kinds(find_pairs(Tongue(), cache=tmp_path, **own))
    assert analysed == ["Tongue"] * 2
    assert list(tmp_path.iterdir()) == []
    find_pairs(Tongue(), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_memory_holds_a_bounded_number_of_models(analysed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MOST", 2)
    for neurons in (5, 6, 7, 7, 6, 5):
        find_pairs(Tongue(neurons=neurons), ["up_down"])
    assert len(analysed) == 4  # the first was forgotten for the third
