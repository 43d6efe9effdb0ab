"""The optimizer's state on disk follows the weights, entry by entry, or is refused: never guessed, never dropped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tokens
from saved import contents, imbalanced, known_pairs, load, logits, pairs_of, remains, save, steps, trainer_groups
from torch import nn

import saggs
from saggs.checkpoints import CheckpointError, rebalance_checkpoint
from saggs.checkpoints import operations as checkpoints
from saggs.checkpoints.trainer_state import candidate_groups


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "pairs_of_checkpoint", known_pairs)


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainer_groups(model), lr=1e-3, **settings)


def one_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainer_groups(model, 0.0), lr=1e-3, momentum=0.9)


def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model, amsgrad=True)


def trained(family: str, build: Callable[[nn.Module], torch.optim.Optimizer], folder: Path) -> Path:
    """A checkpoint after three steps, as the Trainer writes it."""
    model = imbalanced(family)
    optimizer = build(model)
    steps(model, optimizer)
    save(model, folder, shards=True)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    for name in ("scheduler.pt", "rng_state.pth", "trainer_state.json"):
        (folder / name).write_bytes(name.encode())
    return folder


def resumed(folder: Path, build: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[Any, torch.optim.Optimizer]:
    model = load(folder).float()
    optimizer = build(model)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    return model, optimizer


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name} {key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
        if value is not None
    }


@pytest.mark.parametrize("build", [adamw, one_group, momentum, amsgrad], ids=lambda build: build.__name__)
@pytest.mark.parametrize("family", ["gpt2", "biased_llama"])
def test_state_follows_as_in_memory(
    family: str, build: Callable[[nn.Module], torch.optim.Optimizer], tmp_path: Path
) -> None:
    """Bit for bit for powers of two: the same names, the same tensors, the same next step."""
    source = trained(family, build, tmp_path / "in")
    before = contents(source)
    done = rebalance_checkpoint(source, tmp_path / "out", factors="power_of_two")
    assert done.optimizer == "carried"
    assert contents(source) == before
    model, optimizer = resumed(source, build)
    unmoved = state_by_name(*resumed(source, build))
    saggs.balance(model, list(pairs_of(family)), optimizer, factors="power_of_two")
    again, again_optimizer = resumed(tmp_path / "out", build)
    wanted, found = state_by_name(model, optimizer), state_by_name(again, again_optimizer)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not all(torch.equal(found[name], unmoved[name]) for name in wanted)
    for one, one_optimizer in ((model, optimizer), (again, again_optimizer)):
        one.train()
        ids = tokens(9)
        one(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        one_optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_each_slice_of_a_fused_tensor_moves_by_its_own_factor(tmp_path: Path) -> None:
    source = trained("gpt2", adamw, tmp_path / "in")
    rebalance_checkpoint(source, tmp_path / "out", factors="power_of_two")
    before, after = (torch.load(p / "optimizer.pt", weights_only=True) for p in (source, tmp_path / "out"))
    names = [n for group in candidate_groups(imbalanced("gpt2"))["the Trainer's groups"] for n in group]
    position = names.index("transformer.h.0.attn.c_attn.weight")
    ratio = after["state"][position]["exp_avg"] / before["state"][position]["exp_avg"]
    width = ratio.shape[1] // 3
    query = ratio[:, :width].unique()
    assert len(query) == 1
    assert float(query) != 1
    assert torch.equal(ratio[:, width : 2 * width].unique(), 1 / query)
    squares = after["state"][position]["exp_avg_sq"] / before["state"][position]["exp_avg_sq"]
    assert torch.equal(squares[:, :width].unique(), query**2)
    assert after["state"][position]["step"] == before["state"][position]["step"] == 3
    assert after["param_groups"] == before["param_groups"]


def test_value_columns_are_left_alone_when_only_queries_and_keys_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        checkpoints, "pairs_of_checkpoint", lambda *_: [p for p in pairs_of("gpt2") if p.kind == "query_key"]
    )
    source = trained("gpt2", adamw, tmp_path / "in")
    rebalance_checkpoint(source, tmp_path / "out")
    a, b = (state_by_name(*resumed(p, adamw)) for p in (source, tmp_path / "out"))
    for name in a:
        if "c_attn.weight exp_avg" in name:
            width = a[name].shape[1] // 3
            assert torch.equal(a[name][:, 2 * width :], b[name][:, 2 * width :])
            assert not torch.equal(a[name][:, :width], b[name][:, :width])
        elif "c_attn" not in name:
            assert torch.equal(a[name], b[name])


def test_dtypes_of_moments_are_kept(tmp_path: Path) -> None:
    """float32 moments of bfloat16 weights, and the other way round."""
    for weights, moments in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        source = trained("llama", adamw, tmp_path / f"in {weights}")
        save(load(source).to(weights), source, shards=True)
        saved = torch.load(source / "optimizer.pt", weights_only=True)
        for entry in saved["state"].values():
            entry |= {key: entry[key].to(moments) for key in ("exp_avg", "exp_avg_sq")}
        torch.save(saved, source / "optimizer.pt")
        rebalance_checkpoint(source, tmp_path / f"out {weights}", factors="power_of_two")
        after = torch.load(tmp_path / f"out {weights}" / "optimizer.pt", weights_only=True)
        assert {entry["exp_avg"].dtype for entry in after["state"].values()} == {moments}
        assert {entry["step"].dtype for entry in after["state"].values()} == {torch.float32}


def test_an_optimizer_with_names_of_its_own_is_mapped_by_them(tmp_path: Path) -> None:
    """Built from `named_parameters()` in reverse: by position it would be someone else's."""

    def reversed_names(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(model.named_parameters())[::-1], lr=1e-3)

    source = trained("biased_llama", reversed_names, tmp_path / "in")
    rebalance_checkpoint(source, tmp_path / "out", factors="power_of_two")
    model, optimizer = resumed(source, reversed_names)
    saggs.balance(model, list(pairs_of("biased_llama")), optimizer, factors="power_of_two")
    wanted, found = state_by_name(model, optimizer), state_by_name(*resumed(tmp_path / "out", reversed_names))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# --- refusals --------------------------------------------------------------------------------------------------------


def by_dimension_swapped(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainer_groups(model)[::-1], lr=1e-3)


def three_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, second = trainer_groups(model)
    return torch.optim.AdamW([first, {"params": second["params"][:2]}, {"params": second["params"][2:]}], lr=1e-3)


def reversed_parameters(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(model.parameters())[::-1], lr=1e-3)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3)


def radam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RAdam(model.parameters(), lr=1e-3)


def adamax(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adamax(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (by_dimension_swapped, "cannot be assigned for sure"),
        (three_groups, r"groups of \[.*\] parameters, the file has"),
        (reversed_parameters, "cannot be assigned for sure"),
        (rmsprop, r"alpha.* are not those of torch's Adam, AdamW or SGD"),
        (radam, "are not those of torch's Adam, AdamW or SGD"),
        (adamax, "are not those of torch's Adam, AdamW or SGD"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_assigned_is_refused(
    build: Callable[[nn.Module], torch.optim.Optimizer], message: str, tmp_path: Path
) -> None:
    source = trained("biased_llama", build, tmp_path / "in")
    with pytest.raises(CheckpointError, match=message):
        rebalance_checkpoint(source, tmp_path / "out")
    assert remains(tmp_path) == ["in"]


def changed(source: Path, change: Callable[[dict[str, Any]], None]) -> None:
    saved = torch.load(source / "optimizer.pt", weights_only=True)
    change(saved)
    torch.save(saved, source / "optimizer.pt")


def _unknown_state(saved: dict[str, Any]) -> None:
    saved["state"][2]["exp_avg_diff"] = saved["state"][2]["exp_avg"].clone()


def _misshapen(saved: dict[str, Any]) -> None:
    saved["state"][2]["exp_avg_sq"] = torch.zeros(3)


def _underflow(saved: dict[str, Any]) -> None:
    for entry in saved["state"].values():
        entry["exp_avg_sq"].fill_(2e-38)


def _overflow(saved: dict[str, Any]) -> None:
    for entry in saved["state"].values():
        entry["exp_avg_sq"].fill_(3e38)


def _stray(saved: dict[str, Any]) -> None:
    saved["state"][999] = saved["state"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_unknown_state, "exp_avg_diff"),
        (_misshapen, r"exp_avg_sq at position 2 has shape \(3,\)"),
        (_underflow, "over- or underflows in torch.float32"),
        (_overflow, "over- or underflows in torch.float32"),
        (_stray, "999"),
        (lambda saved: saved.clear(), "no optimizer's state_dict"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    source = trained("llama", adamw, tmp_path / "in")
    changed(source, change)
    before = contents(source)
    with pytest.raises(CheckpointError, match=message):
        rebalance_checkpoint(source, tmp_path / "out")
    assert remains(tmp_path) == ["in"]
    assert contents(source) == before


def test_a_state_is_never_dropped_silently(tmp_path: Path) -> None:
    source = trained("llama", adamw, tmp_path / "in")
    done = rebalance_checkpoint(source, tmp_path / "out", without_optimizer=True)
    assert done.optimizer == "left out"
    assert any("optimizer.pt) was left out, as asked" in note for note in done.notes)
    assert contents(tmp_path / "out").keys() == contents(source).keys() - {"optimizer.pt"}
    (source / "optimizer.bin").write_bytes(b"sharded")
    with pytest.raises(CheckpointError, match=r"cannot be carried \(optimizer.bin"):
        rebalance_checkpoint(source, tmp_path / "out 2")
    (source / "optimizer.bin").unlink()
    (source / "global_step3").mkdir()
    with pytest.raises(CheckpointError, match="global_step3"):
        rebalance_checkpoint(source, tmp_path / "out 2")
    assert not (tmp_path / "out 2").exists()


def test_a_state_elsewhere_is_carried_along(tmp_path: Path) -> None:
    source = trained("llama", adamw, tmp_path / "in")
    shutil.copytree(source, tmp_path / "bare")
    elsewhere = (tmp_path / "bare" / "optimizer.pt").rename(tmp_path / "state.pt")
    rebalance_checkpoint(source, tmp_path / "out")
    rebalance_checkpoint(tmp_path / "bare", tmp_path / "out 2", optimizer=elsewhere)
    a, b = (state_by_name(*resumed(tmp_path / name, adamw)) for name in ("out", "out 2"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    with pytest.raises(CheckpointError, match="is there too"):
        rebalance_checkpoint(source, tmp_path / "out 3", optimizer=elsewhere)
    with pytest.raises(CheckpointError, match="is no file"):
        rebalance_checkpoint(tmp_path / "bare", tmp_path / "out 3", optimizer=tmp_path / "nowhere.pt")


def test_state_from_before_the_first_step_stays(tmp_path: Path) -> None:
    source = save(imbalanced("llama"), tmp_path / "in")
    torch.save(adamw(load(source)).state_dict(), source / "optimizer.pt")
    assert rebalance_checkpoint(source, tmp_path / "out").optimizer == "empty"
    assert contents(tmp_path / "out")["optimizer.pt"] == contents(source)["optimizer.pt"]


def test_a_pickle_with_code_is_not_loaded(tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    source = trained("llama", adamw, tmp_path / "in")
    torch.save({"state": {}, "param_groups": [], "extra": Touch()}, source / "optimizer.pt")
    with pytest.raises(CheckpointError, match="only running its code could"):
        rebalance_checkpoint(source, tmp_path / "out")
    assert remains(tmp_path) == ["in"]
    torch.load(source / "optimizer.pt", weights_only=False)  # the control: it would have run
    assert "executed" in remains(tmp_path)


def test_coupled_decay_is_said(tmp_path: Path) -> None:
    def coupled(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(trainer_groups(model), lr=1e-3)

    for build, said in ((coupled, True), (adamw, False)):
        source = trained("llama", build, tmp_path / f"in {said}")
        done = rebalance_checkpoint(source, tmp_path / f"out {said}")
        assert any("coupled" in note for note in done.notes) == said


def test_a_real_trainer_resumes_from_the_result(tmp_path: Path) -> None:
    """Three steps, rebalanced, three more: equal to balancing inside the Trainer's own run after three steps."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    rows = [{"input_ids": tokens(i, 1)[0], "labels": tokens(i, 1)[0]} for i in range(24)]

    def arguments(folder: Path) -> TrainingArguments:
        return TrainingArguments(
            str(folder), max_steps=6, save_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True,
            weight_decay=0.1, learning_rate=1e-3, disable_tqdm=True,
        )  # fmt: skip

    class Balance(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                inner = kwargs["optimizer"].optimizer
                saggs.balance(kwargs["model"], list(pairs_of("gpt2")), inner, factors="power_of_two")

    reference = Trainer(imbalanced("gpt2"), arguments(tmp_path / "a"), train_dataset=rows, callbacks=[Balance()])
    reference.train()
    out = tmp_path / "b" / "checkpoint-3"
    rebalance_checkpoint(tmp_path / "a" / "checkpoint-3", out, factors="power_of_two")
    again = Trainer(imbalanced("gpt2"), arguments(tmp_path / "b"), train_dataset=rows)
    again.train(resume_from_checkpoint=str(out))
    last = logits(tmp_path / "b" / "checkpoint-6")
    assert torch.equal(last, logits(tmp_path / "a" / "checkpoint-6"))
    assert not torch.equal(last, logits(tmp_path / "a" / "checkpoint-3"))
