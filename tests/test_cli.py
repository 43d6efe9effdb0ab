"""`saggs` on the command line: what it prints, what it writes, and how it says no."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import tiny_gpt2
from saved import contents, imbalanced, known_pairs, logits, pairs_of, save

import saggs
from saggs import cli, pairs
from saggs.checkpoints import model as checkpoint_model
from saggs.checkpoints import operations as checkpoints
from saggs.report import ProgressLine, layer_of


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "pairs_of_checkpoint", known_pairs)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(imbalanced("llama"), tmp_path / "in", shards=True)


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_inspect_shows_the_worst_first(source: Path, known: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", source) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[-2:] == ["kind", "pair"]
    ratios = [abs(float(row.split()[0])) for row in rows]
    assert ratios == sorted(ratios, reverse=True)
    assert len(rows) == len(pairs_of("llama"))
    assert "up_down" in rows[0]
    assert "model.layers.1.mlp" in rows[0]  # it was multiplied by the largest factor, 32
    assert ratios[0] == pytest.approx(10, abs=0.5)


def test_inspect_shows_no_more_than_asked_and_says_so(
    source: Path, known: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("inspect", source, "--granularity", "channel", "--top", 3) == 0
    lines = capsys.readouterr().out.splitlines()
    count = len(pairs_of("llama", "channel"))
    assert len(lines) == 5
    assert lines[-1] == f"… and {count - 3} more; --top 0 shows all {count}"
    assert "_proj.weight[" in lines[1]  # which channel


def test_inspect_json_is_the_table_in_plain_values(
    source: Path, known: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("inspect", source, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    model = imbalanced("llama")
    wanted = saggs.log2_norm_ratios(model, list(pairs_of("llama")))
    by_name = {(pair.kind, pair.path): float(ratio) for pair, ratio in zip(pairs_of("llama"), wanted, strict=True)}
    assert len(found) == len(by_name)
    for entry in found:
        assert entry["log2_ratio"] == pytest.approx(by_name[entry["kind"], entry["path"]], abs=1e-5)
        assert entry["residual"] < 1e-10 < entry["control"]
        assert entry["layer"] in (0, 1)


def test_inspect_draws_a_picture(source: Path, known: None, tmp_path: Path) -> None:
    for granularity in ("matrix", "channel"):
        assert run("inspect", source, "--granularity", granularity, "--plot", tmp_path / f"{granularity}.png") == 0
        assert (tmp_path / f"{granularity}.png").read_bytes().startswith(b"\x89PNG")
    assert run("inspect", source, "--plot", tmp_path / "picture.xyz") == 2
    assert not (tmp_path / "picture.xyz").exists()


def test_layers_are_read_off_the_path() -> None:
    assert [layer_of(pair) for pair in pairs_of("llama")].count(1) == 3
    data = pairs_of("llama")[0].to_json()
    assert layer_of(saggs.ScalePair.from_json(data | {"path": "model.norm2"})) is None


def test_certify_proves_every_pair(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("certify", source) == 0
    out, err = capsys.readouterr()
    assert out.count("exact") == len(pairs_of("llama")) == 6
    assert "6 pairs exact, 0 failed" in err


def test_certify_fails_where_a_pair_does(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair of the gate instead of the up projection: the others are still proven, and the exit code tells."""
    wrong = [
        saggs.ScalePair.from_json(json.loads(json.dumps(p.to_json()).replace("0.mlp.up_proj", "0.mlp.gate_proj")))
        for p in pairs_of("llama")
    ]
    monkeypatch.setattr(checkpoint_model, "find_pairs", lambda *_: wrong)
    assert run("certify", source) == 1
    out, err = capsys.readouterr()
    assert out.count("FAILED") == 1
    assert "model.layers.0.mlp: up_down of model.layers.0.mlp is not exact" in out
    assert "5 pairs exact, 1 failed" in err


def test_rebalance_writes_a_copy_and_says_what_it_did(
    source: Path, tmp_path: Path, known: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("rebalance", source, tmp_path / "out", "--factors", "power_of_two") == 0
    out, err = capsys.readouterr()
    assert "6 of 6 pairs rescaled, factors" in out
    assert "optimizer state: absent" in out
    assert err == ""
    assert torch.equal(logits(tmp_path / "out"), logits(source))
    assert run("rebalance", source, tmp_path / "soft", "--damping", 0.3, "--norm", "l1", "--kinds", "up_down") == 0
    assert contents(tmp_path / "soft") != contents(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "{}/none"), "none does not exist"),
        (("inspect", "{}/in", "--top", "-1"), "--top -1 must be 0 or more"),
        (("certify", "{}/in/config.json"), "is a file; name the directory"),
        (("rebalance", "{}/in", "{}/in"), "exists; name a directory that does not"),
        (("rebalance", "{}/in", "{}/out", "--damping", "2"), "damping=2.0 must lie in (0, 1]"),
        (("rebalance", "{}/in", "{}/out", "--optimizer", "{}/x", "--without-optimizer"), "choose one"),
    ],
)
def test_a_users_mistake_is_one_line_and_code_2(
    arguments: tuple[str, ...], message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*(argument.format(tmp_path) for argument in arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("saggs: error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["rebalance", "a"], ["inspect", "a", "--kinds", "gate_down"]])
def test_a_wrong_command_line_is_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: saggs" in capsys.readouterr().err


def test_a_full_disk_is_one_line_and_code_2(
    source: Path, tmp_path: Path, known: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("saggs.checkpoints.shards._write", full)
    assert run("rebalance", source, tmp_path / "out") == 2
    assert capsys.readouterr().err == "saggs: error: [Errno 28] No space left on device\n"
    assert not (tmp_path / "out").exists()


def test_the_kinds_are_those_of_the_library() -> None:
    """They stand in the command line a second time, so that `--help` need not import the library's own."""
    assert cli.KINDS == pairs.KINDS
    assert cli.BALANCED_KINDS == pairs.BALANCED_KINDS
    assert cli._kinds("all") == pairs.KINDS
    assert cli._kinds("up_down, query_key") == ("up_down", "query_key")


HELP = """
import sys, types
package = types.ModuleType("saggs")
package.__path__ = [sys.argv.pop(1)]
sys.modules["saggs"] = package
from saggs.cli import main
try:
    main(sys.argv[1:])
finally:
    print("heavy:", sorted({"torch", "transformers", "matplotlib", "numpy"} & sys.modules.keys()))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["rebalance", "--help"], ["inspect"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    folder = str(Path(cli.__file__).parent)
    done = subprocess.run([sys.executable, "-c", HELP, folder, *arguments], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"
    assert "usage: saggs" in done.stdout + done.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_has_an_estimate_on_a_terminal_and_is_silent_elsewhere() -> None:
    for stream, visible in ((Terminal(), True), (io.StringIO(), False)):
        line = ProgressLine(stream)
        line("finding", 0, 0)
        for done in (10**8, 5 * 10**8, 10**9):
            line("writing", done, 10**9)
        line.clear()
        text = stream.getvalue()
        assert ("writing: 100 % of 1.00 GB, 0:00 left" in text) == visible
        assert text.endswith("\r\x1b[K") == visible


def test_python_m_runs_it(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "saggs.cli", "inspect", str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"saggs: error: {tmp_path} has no config.json, so its model is unknown\n"


def test_gpt2_has_no_up_down_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(tiny_gpt2(), tmp_path / "in")
    assert run("certify", source, "--kinds", "up_down") == 2
    assert "no exact pair of the kinds up_down" in capsys.readouterr().err
