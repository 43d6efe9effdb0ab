"""Hyperspectral completion: the published runs, to their digits; gradients, masks and scenes; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import composed, stopped_at
from scipy.io import savemat

from experiments import hyperspectral, saved
from experiments.checks import ConfigError, validated
from experiments.config import Config
from experiments.factorization import scenes, steppers
from experiments.factorization.completion import Problem, draw_masks, draw_start
from experiments.run import Interrupted, Run
from experiments.study_config import IndianPines, MatScene, RuleGrid, Scene


@pytest.fixture(scope="module")
def indian_pines() -> scenes.Prepared:
    return scenes.load(IndianPines())


def descended(scene: scenes.Prepared, settings: Scene, grid: RuleGrid, level: float, seed: int) -> dict[str, Any]:
    """Step and figures when the training error first reaches a level."""
    shape = (scene.matrix.shape[0], scene.matrix.shape[1])
    problem = Problem(scene.matrix, draw_masks(shape, settings, seed, second_pass=False))
    u, v = draw_start(shape, settings, seed)
    stepper = steppers.build(grid, grid.rates, (u[None], v[None]))
    step = 0
    while True:
        loss, du, dv = problem.loss_and_gradients(u, v)
        step += 1
        if float(loss) <= level:
            return {"step": step, **problem.assess(u, v)}
        stepper.step(
            (u[None], v[None]), (du[None], dv[None]), steppers.rate_factor(grid.schedule, step, settings.steps)
        )


def test_adam_ends_where_the_published_log_says(indian_pines: scenes.Prepared) -> None:
    """Indian Pines, 15 % observed, seed 42, rate 1e-3: .0172317475 at step 163; another seed ends elsewhere."""
    grid = RuleGrid("adam", [1e-3])
    found = descended(indian_pines, IndianPines(), grid, 1e-5, 42)
    assert found["step"] == 163
    assert found["test_rmse"] == pytest.approx(0.017231747551648295, rel=1e-6)
    other = descended(indian_pines, IndianPines(), grid, 1e-5, 43)
    assert other["test_rmse"] != pytest.approx(0.017231747551648295, rel=1e-4)


@pytest.mark.slow
def test_gradient_descent_ends_where_the_published_log_says(indian_pines: scenes.Prepared) -> None:
    """Seed 42, rate 30: .01488756 at step 10226."""
    found = descended(indian_pines, IndianPines(), RuleGrid("gd", [30.0]), 1e-5, 42)
    assert found["step"] == 10226
    assert found["test_rmse"] == pytest.approx(0.014887557548, rel=1e-6)


def test_loss_and_gradients_are_those_of_the_formula(indian_pines: scenes.Prepared) -> None:
    """By autograd, over the entries trained on; the gradient over all observed ones (the control) is another."""
    matrix, settings = indian_pines.matrix[:600], IndianPines(width=5)
    shape = (600, 200)
    u, v = (factor.mul(10).requires_grad_() for factor in draw_start(shape, settings, 1))
    wanted = {}
    for second_pass in (False, True):
        masks = draw_masks(shape, settings, 1, second_pass)
        loss = ((u @ v.T - matrix).square() * masks.train).sum() / masks.train.sum()
        wanted[second_pass] = (loss.detach(), *torch.autograd.grad(loss, (u, v)))
        with torch.no_grad():
            found = Problem(matrix, masks).loss_and_gradients(u, v)
        for ours, theirs in zip(found, wanted[second_pass], strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-12
    assert float((wanted[True][1] - wanted[False][1]).norm() / wanted[False][1].norm()) > 1e-2


def test_masks_part_the_entries() -> None:
    """Trained on, left out and never observed: each entry one of them; the first pass leaves none out."""
    settings, shape = IndianPines(density=0.3, holdout=0.1), (500, 200)
    first, second = (draw_masks(shape, settings, 7, second_pass) for second_pass in (False, True))
    for masks in (first, second):
        assert torch.equal(masks.train + masks.held_out + masks.test, torch.ones(shape, dtype=torch.float64))
    assert float(first.held_out.sum()) == 0
    assert torch.equal(first.train, second.train + second.held_out)
    assert float(first.train.mean()) == pytest.approx(0.3, abs=0.01)
    assert float(second.held_out.sum() / first.train.sum()) == pytest.approx(0.1, abs=0.01)
    assert not torch.equal(first.train, draw_masks(shape, settings, 8, False).train)


def test_assessing_is_what_the_words_say() -> None:
    """Errors on the entries named; the effective rank by the small matrix is that of the whole product."""
    generator = torch.Generator().manual_seed(0)
    u, v, matrix = (torch.randn(*shape, generator=generator).double() for shape in ((40, 3), (30, 3), (40, 30)))
    masks = draw_masks((40, 30), IndianPines(density=0.5, holdout=0.2), 1, second_pass=True)
    found = Problem(matrix, masks).assess(u, v)
    residual = u @ v.T - matrix
    assert found["test_rmse"] == pytest.approx(float(residual[masks.test == 1].square().mean().sqrt()))
    assert found["held_out_rmse"] == pytest.approx(float(residual[masks.held_out == 1].square().mean().sqrt()))
    shares = torch.linalg.svdvals(u @ v.T)[:3]
    shares = shares / shares.sum()
    assert found["effective_rank"] == pytest.approx(float(torch.exp(-(shares * shares.log()).sum())))
    u[0, 0] = torch.inf
    assert Problem(matrix, masks).assess(u, v) == {"test_rmse": None, "held_out_rmse": None, "effective_rank": None}


# --- scenes ----------------------------------------------------------------------------------------------------------


def test_indian_pines_is_prepared_as_stated(indian_pines: scenes.Prepared) -> None:
    assert indian_pines.matrix.shape == (2000, 200)
    assert indian_pines.image_shape == (145, 145, 200)
    assert float(indian_pines.matrix.mean(dim=0).abs().max()) < 1e-12
    assert float(indian_pines.matrix.abs().max()) < 1
    assert len({tuple(position) for position in indian_pines.positions.tolist()}) == 2000


def cube(rows: int = 9, columns: int = 8, bands: int = 12) -> np.ndarray:
    return np.random.default_rng(0).uniform(1, 1000, (rows, columns, bands)).astype(np.uint16)


def test_a_mat_scene_is_read_in_its_orientation(tmp_path: Path) -> None:
    """An empty pixel is dropped, every other one lies where its position says."""
    values = cube()
    values[2, 3] = 0
    savemat(tmp_path / "a.mat", {"paviaU": values, "other": np.ones(3)})
    settings = MatScene("mine", path=str(tmp_path / "a.mat"), variable="paviaU", pixels=71, width=4)
    found = scenes.load(settings)
    assert found.image_shape == (9, 8, 12)
    assert [2, 3] not in found.positions.tolist()
    wanted = np.stack([values[r, c] for r, c in found.positions.tolist()]).astype(float) / (values.max() + 1e-12)
    assert np.allclose(found.matrix.numpy(), wanted - wanted.mean(axis=0))
    with pytest.raises(ConfigError, match=r"scene\.pixels=72: mine has only 71 pixels that are not empty"):
        scenes.load(MatScene("mine", path=str(tmp_path / "a.mat"), variable="paviaU", pixels=72, width=4))


def broken(tmp_path: Path, what: str) -> dict[str, Any]:
    path = tmp_path / "scene.mat"
    content: Any = {"good": cube(), "flat": np.ones((4, 4)), "text": "abc", "infinite": np.full((2, 2, 3), np.inf)}
    savemat(path, content)
    if what == "garbage":
        path.write_bytes(b"not a matrix" * 40)
    if what == "hdf5":
        path.write_bytes(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(512))
    return {"path": str(path if what != "missing" else tmp_path / "nowhere.mat")}


@pytest.mark.parametrize(
    ("what", "settings", "message"),
    [
        ("missing", {"variable": "good"}, "nowhere.mat: there is no such file"),
        ("garbage", {"variable": "good"}, "scene.mat: not a MATLAB file"),
        ("hdf5", {"variable": "good"}, "scene.mat: a MATLAB 7.3 file; save it with -v7"),
        ("", {"variable": "goo"}, "scene.variable=goo: .* has no such variable; did you mean 'good'.*it holds good"),
        ("", {"variable": "flat"}, r"scene.variable=flat: shape \(4, 4\)"),
        ("", {"variable": "text"}, "scene.variable=text"),
        ("", {"variable": "infinite", "pixels": 4, "width": 2}, "scene=mine: it holds values that are not finite"),
        (
            "",
            {"variable": "good", "pixels": 20, "width": 13},
            "scene.width=13: must not exceed the matrix, 20 pixels x 12",
        ),
        ("", {"variable": "good", "pixels": 5, "width": 6}, "scene.width=6: must not exceed the matrix, 5 pixels x 12"),
    ],
)
def test_a_scene_that_cannot_be_used_is_refused_by_name(
    what: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        scenes.load(MatScene("mine", **broken(tmp_path, what), **settings))
    if not what:
        assert scenes.load(MatScene("mine", **broken(tmp_path, ""), variable="good", pixels=20, width=5)).matrix.numel()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scene.density=0", "scene.density=0.0: must lie between 0 and 1"),
        ("scene.density=1", "scene.density=1.0: must lie between 0 and 1"),
        ("scene.holdout=1", "scene.holdout=1.0: must lie in"),
        ("scene.levels=[]", r"scene.levels=\[\]: give positive training errors"),
        ("scene.levels=[1e-3,1e-2]", "each smaller than the one before"),
        ("scene.start_scale=0", "scene.start_scale=0.0: must be positive"),
    ],
)
def test_wrong_settings_are_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validated(composed(["study=completion", override]))


# --- runs ------------------------------------------------------------------------------------------------------------


def small(tmp_path: Path, name: str = "out") -> Config:
    path = tmp_path / "scene.mat"
    if not path.exists():
        savemat(path, {"good": cube(20, 20, 30)})
    return validated(
        composed(
            [
                *("task=hyperspectral", "rules=completion", "scene=mat", "scene.name=mine", f"scene.path={path}"),
                *("scene.variable=good", "scene.pixels=100", "scene.width=6", "scene.density=0.5", "scene.steps=660"),
                *(
                    "scene.levels=[8e-2,6e-2]",
                    "rules.gd.rates=[3,1e9]",
                    "rules.adam.rates=[1e-2,3e-2]",
                    "progress=false",
                ),
                *("rules.scalar_adam.rates=[1e-2]", "rules.muon.rates=[1e-2]", f"paths.outputs={tmp_path / name}"),
            ]
        )
    )


def executed(config: Config) -> tuple[dict[str, Any], bytes]:
    prepared = hyperspectral.prepare(config)
    run = Run.open(config, prepared.facts, prepared.total_steps)
    with run.recording():
        result = prepared.execute(run)
        run.succeed(result)
    return json.loads(json.dumps(result)), (run.directory / "metrics.jsonl").read_bytes()


def test_a_run_resumes_bit_for_bit_in_the_middle_of_a_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped again and again, each time a little later; and with its newest state damaged."""
    wanted, metrics = executed(small(tmp_path))
    outcomes = {(m["arm"], m["rate"]): m["outcome"] for m in wanted["members"] if not m["second_pass"]}
    assert outcomes["gd", 1e9] == "diverged"
    assert "reached" in outcomes.values()
    assert wanted["examples"].keys() == {"gd", "adam", "scalar_adam", "muon"}
    config, stops = small(tmp_path, "stopped"), 0
    while True:
        with monkeypatch.context() as patch:
            patch.setattr(hyperspectral, "stop_signals", stopped_at(2))
            try:
                found, rows = executed(config)
            except Interrupted:
                stops += 1
                assert stops < 50
                if stops == 3:
                    newest = max(next((tmp_path / "stopped" / "runs").iterdir()).glob("checkpoints/step-*"))
                    data = (newest / "tensors.safetensors").read_bytes()
                    (newest / "tensors.safetensors").write_bytes(data[:-8] + bytes(8))
                continue
        break
    assert stops > 2
    assert found == wanted
    assert rows == metrics


def test_saved_states_keep_the_newest_two(tmp_path: Path) -> None:
    mark = {"bytes": 0, "sha256": ""}
    for step in (1, 2, 3):
        saved.save(tmp_path, step, {"a": torch.ones(2)}, {"x": step}, mark)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]
