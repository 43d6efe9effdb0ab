"""Table 1, the atlas of optimizers: its builders, its rows, its committed table; and `saggs probe` before a class."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_optimizer
import torch

from experiments.artifacts import get, table1
from experiments.artifacts.artifact import Rows, read_rows
from experiments.config import RESULTS
from experiments.identity import DECIDED_BY, Identity
from experiments.optimizer_atlas import bound, measured
from experiments.optimizer_builders import Entry, classes, entries
from saggs import cli
from saggs.rehearsal import draw

ROOT = RESULTS.parent
HEADER = (
    "optimizer,library,exponent,exponent_residual,rotation_residual,signed_permutation_residual,transport,"
    "slices,coupling,eps,setting,error"
)
BY_NAME = {(e.library, e.optimizer, e.setting): e for e in entries()}


@pytest.fixture(scope="module")
def committed() -> list[dict[str, str]]:
    with open(RESULTS / "tables" / "table1.csv", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def rows() -> Rows:
    return read_rows(get("table1").sweep("mini"), "mini", committed=RESULTS / "runs")


# --- the committed table -----------------------------------------------------------------------------------------


def test_the_csv_has_the_promised_columns_in_their_order() -> None:
    assert (RESULTS / "tables" / "table1.csv").read_text().splitlines()[0] == HEADER


def test_at_least_125_classes_are_measured_and_every_other_one_has_its_reason(committed: list[dict[str, str]]) -> None:
    of_libraries = [row for row in committed if row["library"] != "reference"]
    done = {(row["library"], row["optimizer"]) for row in of_libraries if row["exponent"]}
    assert len(done) >= 125
    for row in committed:
        assert bool(row["exponent"]) or ": " in row["error"]
    everything = {(library, name) for library, module in (("torch.optim", torch.optim),
                  ("pytorch_optimizer", pytorch_optimizer)) for name, _ in classes(module)}  # fmt: skip
    assert {(row["library"], row["optimizer"]) for row in of_libraries} == everything
    assert len(everything - done) <= 5


def test_the_committed_table_is_what_the_committed_summary_gives(rows: Rows, tmp_path: Path) -> None:
    assert not rows.missing
    for path in get("table1").write(rows, tmp_path / "tables", tmp_path / "figures"):
        where = RESULTS / path.parent.name / path.name
        assert path.read_bytes() == where.read_bytes() if path.suffix in (".csv", ".md", ".tex") else where.exists()


def test_a_changed_summary_changes_the_table(rows: Rows) -> None:
    """The control of the test before."""
    frame = rows.frame.copy()
    changed = [dict(record) for record in frame.iloc[0]["optimizers"]]
    changed[0]["exponent"] = "+1"
    frame.at[0, "optimizers"] = changed
    _, csv_table = table1.build_table(Rows(frame, rows.sweep, rows.scale))
    assert csv_table.to_csv() != (RESULTS / "tables" / "table1.csv").read_text()


def test_what_the_papers_say_stands_in_the_table(committed: list[dict[str, str]]) -> None:
    def degree(library: str, name: str, setting: str = "") -> str:
        (row,) = [r for r in committed if (r["library"], r["optimizer"], r["setting"]) == (library, name, setting)]
        return row["exponent"] if row["exponent_residual"] == "exact" else "none"

    for name in ("SGD", "ASGD"):
        assert degree("torch.optim", name) == "-1"
    for name in ("Adam", "AdamW", "RMSprop", "NAdam", "Muon", "Adagrad", "Rprop"):
        assert degree("torch.optim", name) == "+0"
    for name in ("Lion", "SignSGD", "Shampoo", "ScheduleFreeAdamW"):
        assert degree("pytorch_optimizer", name) in ("+0", "none")
    assert degree("pytorch_optimizer", "LARS") == "+1"
    assert degree("pytorch_optimizer", "Lamb") == "none"  # its clamp
    assert degree("pytorch_optimizer", "Lamb", "attribute clamp=1e9") == "+1"
    assert degree("pytorch_optimizer", "AdaFactor", "relative_step=False, scale_parameter=False") == "+0"


def test_rotations_and_rescalings_have_their_own_verdicts_in_the_table(committed: list[dict[str, str]]) -> None:
    by_name = {(row["library"], row["optimizer"]): row for row in reversed(committed)}
    assert by_name["torch.optim", "SGD"]["rotation_residual"] == "exact"
    assert by_name["torch.optim", "Muon"]["rotation_residual"] == "rounding"
    assert by_name["pytorch_optimizer", "LARS"]["rotation_residual"] == "exact"
    adam = by_name["torch.optim", "Adam"]
    assert (adam["rotation_residual"], adam["signed_permutation_residual"]) == ("1e+00", "exact")
    assert by_name["reference", "scalar_adam"]["rotation_residual"] == "exact"
    assert "update" in by_name["reference", "scalar_adam"]["coupling"]


def test_random_rules_are_named_in_the_table(committed: list[dict[str, str]]) -> None:
    random = {row["optimizer"] for row in committed if "random" in row["error"]}
    assert {"Gravity", "Kron", "AdaHessian", "SophiaH"} <= random
    assert "AdamW" not in random


def test_the_rules_that_follow_are_those_that_the_note_and_the_figure_name(rows: Rows) -> None:
    found = [r for r in table1.records(rows.frame) if table1.is_equivariant(r)]
    names = {r["optimizer"] for r in found}
    assert {"LARS", "Kate", "Fromage", "lars", "lamb", "shampoo_half"} <= names
    assert not names & {"AdamW", "SGD", "Muon", "adam", "shampoo"}
    printed, _ = table1.build_table(rows)
    note = next(n for n in printed.notes if n.startswith("Degree +1"))
    assert all(name in note for name in names)
    figure = table1.build_figures(rows)["table1"]
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert {"AdamW", "LARS", "Kate", "Lamb (clamp=1e9)", "shampoo_half"} <= texts


def test_no_two_names_of_the_figure_lie_on_each_other(rows: Rows) -> None:
    figure = table1.build_figures(rows)["table1"]
    figure.canvas.draw()
    boxes = [(t.get_text(), t.get_window_extent()) for t in figure.axes[0].texts]
    for index, (text, box) in enumerate(boxes):
        assert box.x0 >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        for other, beside in boxes[index + 1 :]:
            assert min(box.x1, beside.x1) - max(box.x0, beside.x0) < 1 or min(box.y1, beside.y1) - max(
                box.y0, beside.y0
            ) < 0.3 * min(box.height, beside.height), (text, other)


# --- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        ("torch.optim", "AdamW", ""),
        ("torch.optim", "SparseAdam", "gradients as sparse tensors"),
        ("pytorch_optimizer", "LARS", ""),
        ("pytorch_optimizer", "Lamb", "attribute clamp=1e9"),
        ("pytorch_optimizer", "AdamMini", ""),
        ("pytorch_optimizer", "AdaHessian", ""),
        ("pytorch_optimizer", "Muon", "use_muon=True in the param group"),
        ("pytorch_optimizer", "SAM", "around AdamW"),
        ("pytorch_optimizer", "DeMo", ""),
        ("pytorch_optimizer", "DistributedMuon", "use_muon=True in the param group"),
        ("reference", "scaled_gd", ""),
    ],
)
def test_a_row_measured_now_is_the_committed_one(key: tuple[str, str, str], committed: list[dict[str, str]]) -> None:
    (row,) = [r for r in committed if (r["library"], r["optimizer"], r["setting"]) == key]
    assert measured(BY_NAME[key]) == row


def test_an_exception_is_the_rows_and_no_one_elses() -> None:
    def broken(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        raise RuntimeError("out of\nluck")

    row = measured(Entry("broken", "mine", "as it is", broken))
    assert row["error"] == "RuntimeError: out of"
    assert row["setting"] == "as it is"
    assert row["exponent"] == ""


def test_curvature_and_perturbed_gradients_are_those_of_a_function_of_w_over_c() -> None:
    """AdaHessian, which divides by curvature, has degree +1 then; SAM's radius has none, and shows."""
    curved = measured(BY_NAME["pytorch_optimizer", "AdaHessian", ""])
    assert (curved["exponent"], curved["exponent_residual"]) == ("+1", "exact")
    assert measured(BY_NAME["pytorch_optimizer", "SAM", "around AdamW"])["exponent_residual"] not in ("exact", "1e-06")


def test_every_entry_is_one_of_its_own_and_every_setting_builds_what_it_says() -> None:
    assert len(BY_NAME) == len(entries())
    weights = draw([(4, 3)], 1)[0]
    lamb = BY_NAME["pytorch_optimizer", "Lamb", "attribute clamp=1e9"].build([torch.nn.Parameter(weights[0])])
    assert lamb.clamp == 1e9  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("residual", "text"),
    [(0.0, "exact"), (1e-9, "exact"), (2e-9, "1e-06"), (3e-6, "1e-04"), (0.77, "1e+00"), (63.0, "1e+02"),
     (1e6, "above 100"), (math.inf, "none")],
)  # fmt: skip
def test_residuals_are_bounds(residual: float, text: str) -> None:
    assert bound(residual) == text


# --- the run -----------------------------------------------------------------------------------------------------


def test_task_and_seed_alone_decide_the_identity_of_this_task_and_of_no_other() -> None:
    sweep = get("table1").sweep
    (run,) = sweep("mini")
    assert run.run_id.startswith("optimizer_atlas-seed0-")
    assert sweep("mini", ["model=mini_llama"])[0].run_id == run.run_id  # train.py refuses it, but it is the same run
    assert sweep("mini", ["seed=1"])[0].run_id != run.run_id
    language = get("table2").sweep("mini")[0].config
    assert language.task not in DECIDED_BY
    assert Identity.of(language).run_id.startswith("mini_")


def test_a_setting_without_effect_is_refused() -> None:
    command = [sys.executable, str(ROOT / "train.py"), "-m", "experiment=table1", "model=mini_llama"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert "refused: model=mini_llama: task=optimizer_atlas has no such setting" in done.stderr


def test_verdicts_compare_word_for_word(rows: Rows) -> None:
    committed = rows.frame
    here = Rows(rows.frame.assign(source="live"), rows.sweep, rows.scale)
    assert [v.reproduced for v in table1.verdicts(here, committed)] == [True, True, True]
    frame = here.frame.copy()
    changed = [dict(record) for record in frame.iloc[0]["optimizers"]]
    changed[1]["exponent"] = "+7"
    frame.at[0, "optimizers"] = changed
    found = table1.verdicts(Rows(frame, rows.sweep, rows.scale), committed)
    assert [v.reproduced for v in found] == [False, True, True]
    assert changed[1]["optimizer"] in found[0].text
    assert {v.text for v in table1.verdicts(here, committed.iloc[:0])} == {"no committed cell"}
    assert [v.text for v in table1.verdicts(rows, committed)] == ["committed, not run here"]


# --- the command -------------------------------------------------------------------------------------------------


def run(*arguments: str) -> int:
    return cli.main(["probe", *arguments])


def test_probe_prints_verdicts_and_transport_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("torch.optim.AdamW", "--set", "weight_decay=0.1", "--set", "betas=0.9,0.95", "--steps", "8") == 0
    text = capsys.readouterr().out
    assert text.startswith("torch.optim.AdamW, 8 steps in float64")
    assert "exp_avg_sq" in text
    assert "not equivariant" in text


def test_the_example_in_the_documentation_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("torch.optim.AdamW", "--set", "weight_decay=0.1", "--set", "betas=0.9,0.95") == 0
    documented = (ROOT / "docs" / "optimizers.md").read_text()
    for line in capsys.readouterr().out.splitlines():
        assert not line or f"\n    {line}\n" in documented


def test_probe_settings_have_an_effect_and_json_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    eps = {}
    for value in ("1e-8", "1e-3"):
        assert run("torch.optim.AdamW", "--set", f"eps={value}", "--json", "--steps", "6") == 0
        eps[value] = json.loads(capsys.readouterr().out)["settings"]["eps"]
    assert eps["1e-8"] < 1e-4 < eps["1e-3"]


def test_probe_finds_a_class_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rules_of_mine.py").write_text(
        "import torch\nclass Mine(torch.optim.SGD):\n    def __init__(self, params, **others):\n"
        "        super().__init__(params, **{'lr': 0.1, **others})\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run("rules_of_mine:Mine", "--set", "momentum=0.9", "--steps", "6") == 0
    assert "momentum_buffer" in capsys.readouterr().out
    assert run("rules_of_mine:Mine", "--set", "momentun=0.9") == 2
    assert "did you mean 'momentum'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["torch.optim.AdamX"], "torch.optim has no 'AdamX'"),
        (["no_such_module:Rule"], "there is no module 'no_such_module' here"),
        (["AdamW"], "name a class as torch.optim.AdamW"),
        (["torch.nn.Linear"], "is no subclass of torch.optim.Optimizer"),
        (["torch.optim.Optimizer"], "could not be built"),
        (["torch.optim.AdamW", "--set", "lr"], "write NAME=VALUE"),
        (["torch.optim.AdamW", "--set", "lr=fast"], "is no Python literal"),
        (["torch.optim.AdamW", "--set", "lr=-1.0"], "Invalid learning rate"),
        (["torch.optim.AdamW", "--set", "weight_decai=0.1"], "did you mean 'weight_decay'?"),
        (["torch.optim.AdamW", "--set", "params=1"], "takes no setting 'params'"),
        (["torch.optim.AdamW", "--set", "lr=1.0", "--set", "lr=2.0"], "given twice"),
        (["pytorch_optimizer.Lamb", "--set", "clamp=1e9"], "takes no setting 'clamp'"),
        (["torch.optim.AdamW", "--steps", "1"], "steps=1: at least 2"),
        (["torch.optim.SparseAdam"], "does not support dense gradients"),
    ],
)
def test_probe_refuses_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("saggs: error: ")
    assert len(error.splitlines()) == 1
