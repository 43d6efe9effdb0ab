"""A checkpoint on disk is balanced as its model would be in memory; all else in it stays, and nothing is half done."""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from models import biased_llama, tiny_llama
from saved import contents, imbalanced, known_pairs, largest_gap, load, logits, pairs_of, remains, save, tensors
from torch import Tensor

import saggs
from saggs.checkpoints import CheckpointError, inspect_checkpoint, rebalance_checkpoint, shards
from saggs.checkpoints import operations as checkpoints
from saggs.pairs import named_parameters

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs that were found once; `test_discovery_is_of_the_very_checkpoint` and others do without."""
    monkeypatch.setattr(checkpoints, "pairs_of_checkpoint", known_pairs)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


# --- the same function, balanced -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_powers_of_two_keep_logits_bit_for_bit(family: str, dtype: torch.dtype, tmp_path: Path, known: None) -> None:
    source = save(imbalanced(family, dtype), tmp_path / "in", shards=family == "llama")
    done = rebalance_checkpoint(source, tmp_path / "out", factors="power_of_two")
    assert all(report.factor != 1 for report in done.pairs)
    assert max(abs(r.log2_ratio_after) for r in done.pairs if r.log2_ratio_after is not None) <= 1.0
    assert torch.equal(logits(tmp_path / "out"), logits(source))


def test_a_wrong_pair_would_change_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same rewriting, with the left sides alone, is seen by the comparison above."""
    source = save(imbalanced("llama"), tmp_path / "in", shards=True)
    up = next(pair for pair in pairs_of("llama") if pair.kind == "up_down")
    monkeypatch.setattr(checkpoints, "pairs_of_checkpoint", lambda *_: [_onto_gate(up)])
    rebalance_checkpoint(source, tmp_path / "out", factors="power_of_two")
    assert relative(logits(tmp_path / "out"), logits(source)) > 1e-2


def _onto_gate(pair: saggs.ScalePair) -> saggs.ScalePair:
    data = json.loads(json.dumps(pair.to_json()).replace("up_proj", "gate_proj"))
    return saggs.ScalePair.from_json(data)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-6), (torch.float64, 1e-7), (torch.float16, 1e-2)])
def test_exact_factors_keep_logits_to_rounding(dtype: torch.dtype, allowed: float, tmp_path: Path, known: None) -> None:
    source = save(imbalanced("biased_llama", dtype), tmp_path / "in", shards=True)
    done = rebalance_checkpoint(source, tmp_path / "out")
    assert max(abs(r.log2_ratio_after or 0) for r in done.pairs) < 1e-12
    assert relative(logits(tmp_path / "out"), logits(source)) < allowed
    assert contents(tmp_path / "out") != contents(source)
    assert any("float16" in note for note in done.notes) == (dtype == torch.float16)


def test_auto_rounds_bfloat16_pairs_to_powers_of_two_and_no_others(tmp_path: Path, known: None) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        source = save(imbalanced("llama", dtype), tmp_path / f"in {dtype}")
        done = rebalance_checkpoint(source, tmp_path / f"out {dtype}")
        exponents = torch.tensor([r.factor for r in done.pairs], dtype=torch.float64).log2()
        assert bool((exponents == exponents.round()).all()) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("settings", [{}, {"damping": 0.3}, {"norm": "l1"}, {"factors": "power_of_two"}], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "biased_llama"])
def test_tensors_are_those_of_balance_in_memory(
    family: str, settings: dict[str, Any], tmp_path: Path, known: None
) -> None:
    """Bit for bit with powers of two; else to rounding: files are balanced by sums in float64, a model in float32."""
    source = save(imbalanced(family), tmp_path / "in", shards=True)
    rebalance_checkpoint(source, tmp_path / "out", **settings)
    model = load(source)
    saggs.balance(model, list(pairs_of(family)), **settings)
    wanted = {name: p.detach() for name, p in named_parameters(model).items()}
    touched = {part.name for pair in pairs_of(family) for part in pair.slices}
    before, after = tensors(source), tensors(tmp_path / "out")
    assert after.keys() == before.keys() == wanted.keys()
    for name in after:
        assert torch.equal(after[name], before[name]) == (name not in touched)
    gap = largest_gap(after, wanted)
    assert gap == 0 if "factors" in settings else gap < 2e-6


@pytest.mark.parametrize("granularity", ["head", "channel"])
def test_finer_pairs_are_balanced_too(granularity: Any, tmp_path: Path, known: None) -> None:
    source = save(imbalanced("llama"), tmp_path / "in", shards=True)
    done = rebalance_checkpoint(source, tmp_path / "out", granularity=granularity)
    assert len(done.pairs) > len(pairs_of("llama"))
    model = load(source)
    saggs.balance(model, list(pairs_of("llama", granularity)))
    assert largest_gap(tensors(tmp_path / "out"), {n: p.detach() for n, p in named_parameters(model).items()}) < 3e-7
    assert relative(logits(tmp_path / "out"), logits(source)) < 1e-5


def test_a_checkpoint_made_imbalanced_by_powers_of_two_is_balanced_to_the_same_bits(
    tmp_path: Path, known: None
) -> None:
    one, other = save(biased_llama(), tmp_path / "one"), save(imbalanced("biased_llama"), tmp_path / "other")
    rebalance_checkpoint(one, tmp_path / "one out")
    rebalance_checkpoint(other, tmp_path / "other out")
    assert contents(tmp_path / "one out") == contents(tmp_path / "other out")
    assert contents(one) != contents(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_second_time_changes_nothing(dtype: torch.dtype, tmp_path: Path, known: None) -> None:
    source = save(imbalanced("llama", dtype), tmp_path / "0", shards=True)
    rebalance_checkpoint(source, tmp_path / "1")
    again = rebalance_checkpoint(tmp_path / "1", tmp_path / "2")
    assert all(report.factor == 1 for report in again.pairs)
    assert contents(tmp_path / "2") == contents(tmp_path / "1") != contents(source)


def test_damped_balancing_does_go_on(tmp_path: Path, known: None) -> None:
    """The control of the one above."""
    source = save(imbalanced("llama"), tmp_path / "0")
    first = rebalance_checkpoint(source, tmp_path / "1", damping=0.5)
    rebalance_checkpoint(tmp_path / "1", tmp_path / "2", damping=0.5)
    assert contents(tmp_path / "2") != contents(tmp_path / "1")
    for report in first.pairs:
        assert report.log2_ratio_after == pytest.approx(0.5 * (report.log2_ratio or 0))


def test_tied_weights_stay_tied_and_dropped_names_stay_dropped(tmp_path: Path, known: None) -> None:
    source = save(imbalanced("gpt2"), tmp_path / "in")
    rebalance_checkpoint(source, tmp_path / "out")
    model = load(tmp_path / "out")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert "lm_head.weight" not in tensors(tmp_path / "out")


def test_a_zero_matrix_is_left_alone_and_said(tmp_path: Path, known: None) -> None:
    model = imbalanced("llama")
    model.model.layers[1].mlp.down_proj.weight.data.zero_()
    done = rebalance_checkpoint(save(model, tmp_path / "in"), tmp_path / "out")
    left_alone = [report for report in done.pairs if report.log2_ratio is None]
    assert [(r.pair.path, r.factor) for r in left_alone] == [("model.layers.1.mlp", 1.0)]
    assert any("up_down of model.layers.1.mlp was left alone" in note for note in done.notes)


def test_discovery_is_of_the_very_checkpoint(tmp_path: Path) -> None:
    """No stand-in: pairs found, certified and measured from the files alone, as the model in memory has them."""
    model = imbalanced("llama", torch.bfloat16)
    found = inspect_checkpoint(save(model, tmp_path / "in", shards=True))
    wanted = saggs.log2_norm_ratios(model, list(pairs_of("llama")))
    assert [r.pair.kind for r in found] == [p.kind for p in pairs_of("llama")]
    assert all(r.pair.certificate is not None for r in found)
    assert torch.allclose(torch.tensor([r.log2_ratio for r in found]), wanted, atol=1e-2)


# --- all else stays --------------------------------------------------------------------------------------------------


def test_everything_else_is_copied_byte_for_byte(tmp_path: Path, known: None) -> None:
    model = imbalanced("llama")
    source = save(model, tmp_path / "blobs", shards=True)
    (source / "tokenizer.json").write_bytes(b'{"a":1}')
    (source / "training_args.bin").write_bytes(b"no pickle at all: never opened")
    (source / "onnx").mkdir()
    (source / "onnx" / "graph.onnx").write_bytes(os.urandom(1000))
    (source / "pytorch_model.bin").write_bytes(b"an older copy")
    linked = tmp_path / "snapshot"  # as in a hub's cache: links into another directory
    linked.mkdir()
    for path in source.iterdir():
        if path.is_file():
            (linked / path.name).symlink_to(path)
    before = contents(source)
    done = rebalance_checkpoint(linked, tmp_path / "out")
    assert contents(source) == before
    after = contents(tmp_path / "out")
    assert not any((tmp_path / "out" / name).is_symlink() for name in after)
    assert after.keys() == {name for name in before if "/" not in name}
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {name for name in before if name.startswith("model-")}
    for name in changed:  # the header, with order, dtypes and metadata, is the same to the byte
        length = 8 + int.from_bytes(before[name][:8], "little")
        assert after[name][:length] == before[name][:length]
        assert len(after[name]) == len(before[name])
    assert any("pytorch_model.bin is not one of the model's weight files" in note for note in done.notes)


def test_pickled_weights_are_rebalanced_and_ties_kept(tmp_path: Path, known: None) -> None:
    model = imbalanced("gpt2")
    source = save(model, tmp_path / "in")
    (source / "model.safetensors").unlink()
    torch.save(model.state_dict(), source / "pytorch_model.bin")
    before = (source / "pytorch_model.bin").read_bytes()
    rebalance_checkpoint(source, tmp_path / "out", factors="power_of_two")
    assert (source / "pytorch_model.bin").read_bytes() == before
    state = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    assert torch.equal(logits(tmp_path / "out"), logits(source))
    saggs.balance(model, list(pairs_of("gpt2")), factors="power_of_two")
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_names_without_the_backbones_prefix_are_understood(tmp_path: Path, known: None) -> None:
    """As the first GPT-2 files on the hub are: saved from the bare backbone."""
    model = imbalanced("gpt2")
    source = save(model.transformer, tmp_path / "in")
    (source / "config.json").write_text((save(model, tmp_path / "whole") / "config.json").read_text())
    assert "h.0.attn.c_attn.weight" in tensors(source)
    rebalance_checkpoint(source, tmp_path / "out", factors="power_of_two")
    assert torch.equal(logits(tmp_path / "out"), logits(source))
    assert not torch.equal(
        tensors(tmp_path / "out")["h.0.attn.c_attn.weight"], tensors(source)["h.0.attn.c_attn.weight"]
    )


# --- whole or not at all ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_failed_write_leaves_nothing(
    failure: BaseException, tmp_path: Path, known: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(imbalanced("llama"), tmp_path / "in", shards=True)
    written = []

    def failing(sink: Any, data: memoryview) -> None:
        written.append(len(data))
        if len(written) > 3:
            raise failure
        sink.write(data)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "_write", failing)
        with pytest.raises(type(failure)):
            rebalance_checkpoint(source, tmp_path / "out")
    assert len(written) == 4
    assert remains(tmp_path) == ["in"]
    rebalance_checkpoint(source, tmp_path / "out")  # the control: it was the failure alone
    assert remains(tmp_path) == ["in", "out"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, known: None) -> None:
    """With a true limit of the system's on a file's size."""
    source = save(imbalanced("llama"), tmp_path / "in", shards=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            rebalance_checkpoint(source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert remains(tmp_path) == ["in"]


def test_what_a_killed_call_left_is_named_and_not_in_the_way(tmp_path: Path, known: None) -> None:
    source = save(imbalanced("llama"), tmp_path / "in")
    (tmp_path / ".out.unfinished-1234").mkdir()
    done = rebalance_checkpoint(source, tmp_path / "out")
    assert any(".out.unfinished-1234 was left by an interrupted call" in note for note in done.notes)
    assert remains(tmp_path) == [".out.unfinished-1234", "in", "out"]


@pytest.mark.parametrize("out", ["in", "in/out", "there"])
def test_an_output_that_exists_or_lies_inside_is_refused(out: str, tmp_path: Path) -> None:
    source = save(tiny_llama(), tmp_path / "in")
    (tmp_path / "there").mkdir()
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"exists|inside"):
        rebalance_checkpoint(source, tmp_path / out)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("damping", [0.0, -1.0, 1.5, float("nan"), True])
def test_a_damping_out_of_range_is_refused(damping: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"damping=.* must lie in \(0, 1\]"):
        rebalance_checkpoint(tmp_path, tmp_path / "out", damping=damping)


def test_files_are_the_same_where_the_kernel_cannot_copy(
    tmp_path: Path, known: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(imbalanced("llama"), tmp_path / "in", shards=True)
    rebalance_checkpoint(source, tmp_path / "1")
    monkeypatch.setattr(shards.sys, "platform", "another")
    monkeypatch.delattr(os, "sendfile")
    rebalance_checkpoint(source, tmp_path / "2")
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def anonymous_kilobytes() -> int:
    """Memory of this process that is no file's: what it holds itself."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0])


def give_back_freed_memory() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process as Linux shows it")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process holds at any moment of both passes, for 80 MB in shards of 20; and, as a control, loaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 1024, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16)
    source = tmp_path / "in"
    LlamaForCausalLM(config).save_pretrained(source, max_shard_size="20MB")
    total = sum(p.stat().st_size for p in source.glob("*.safetensors")) // 1024
    assert total > 70_000
    pairs = [saggs.ScalePair.from_json(_without_shapes(pair.to_json())) for pair in pairs_of("llama")]
    monkeypatch.setattr(checkpoints, "pairs_of_checkpoint", lambda *_: pairs)
    give_back_freed_memory()  # or it would hide what is taken next
    held: list[int] = []
    rebalance_checkpoint(source, tmp_path / "out", progress=lambda *_: held.append(anonymous_kilobytes()))
    assert max(held) - held[0] < 20_000
    give_back_freed_memory()
    before = anonymous_kilobytes()
    loaded = {name: tensor.clone() for name, tensor in tensors(tmp_path / "out").items()}
    assert len(loaded) == len(tensors(source))
    assert anonymous_kilobytes() - before > 0.8 * total


def _without_shapes(pair: dict[str, Any]) -> dict[str, Any]:
    for part in (*pair["left"], *pair["right"]):
        part["shape"] = None
        assert part["ranges"] == (None,) * len(part["ranges"])
    return pair


def test_termination_removes_what_was_begun(tmp_path: Path, known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from saggs.cli import main

    source = save(imbalanced("gpt2"), tmp_path / "in")
    monkeypatch.setattr(shards, "_write", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        main(["rebalance", str(source), str(tmp_path / "out")])
    assert caught.value.code == 143
    assert remains(tmp_path) == ["in"]
