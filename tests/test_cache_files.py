"""Candidates in a directory: read by later processes, made anew where a file is broken, and certified all the same."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tongues import Tongue
from torch import nn

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


# --- in a directory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["argument", "environment"])
def test_a_later_process_reads_the_directory(
    through: str, analysed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "folder"
    argument: dict[str, Any] = {"cache": folder} if through == "argument" else {}
    if not argument:
        monkeypatch.setenv(cache.DIRECTORY, str(folder))
    first = find_pairs(Tongue(), **argument)
    (file,) = folder.iterdir()
    assert file.name == f"pairs-{key_of(Tongue(), 'matrix')}.json"
    assert all(pair["certificate"] is None for pair in json.loads(file.read_text())["pairs"])
    cache.clear()
    again = find_pairs(Tongue(), **argument)
    assert analysed == ["Tongue"]
    assert [(p.kind, p.left, p.right, p.signs) for p in again] == [(p.kind, p.left, p.right, p.signs) for p in first]
    assert all(p.certificate is not None for p in again)
    file.unlink()
    cache.clear()
    find_pairs(Tongue(), **argument)
    assert analysed == ["Tongue"] * 2


def test_a_directory_is_filled_although_the_memory_knows_the_model(tmp_path: Path) -> None:
    find_pairs(Tongue())
    find_pairs(Tongue(), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def _pairs_of_another_model(text: str) -> str:
    return text.replace("up.weight", "upper.weight")


def _other_shapes(text: str) -> str:
    return text.replace("[9, 6]", "[9, 7]")


BROKEN: dict[str, Callable[[str], bytes | str]] = {
    "truncated": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "garbage": lambda text: b"\x93\xff\x00garbage",
    "another_json": lambda text: '{"weights": [1, 2]}',
    "a_list": lambda text: "[1, 2]",
    "pairs_of_nothing": lambda text: '{"pairs": [{}]}',
    "pairs_of_numbers": lambda text: '{"pairs": [1]}',
    "unknown_kind": lambda text: text.replace("up_down", "up_and_away"),
    "odd_certificate": lambda text: text.replace('"certificate": null', '"certificate": "yes"'),
    "names_of_another_model": _pairs_of_another_model,
    "shapes_of_another_model": _other_shapes,
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_file_is_named_in_a_warning_and_made_anew(how: str, analysed: list[str], tmp_path: Path) -> None:
    wanted = find_pairs(Tongue(), cache=tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    broken = BROKEN[how](whole)
    assert broken != whole
    file.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
    cache.clear()
    with pytest.warns(UserWarning, match=rf"{file.name} holds no pairs .*they are found anew"):
        assert find_pairs(Tongue(), cache=tmp_path) == wanted
    assert analysed == ["Tongue"] * 2
    assert file.read_text() == whole
    cache.clear()
    assert find_pairs(Tongue(), cache=tmp_path) == wanted
    assert analysed == ["Tongue"] * 2


def test_a_wrong_pair_in_a_file_is_refused_by_its_certificate(tmp_path: Path) -> None:
    """A file can be wrong in a way that no reading shows: every pair is proved on the model at hand."""
    wanted = find_pairs(Tongue(), cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text().replace('"exponent": -1', '"exponent": -2'))
    cache.clear()
    with pytest.warns(UserWarning, match="left out: .* is not exact"):
        assert len(find_pairs(Tongue(), cache=tmp_path)) < len(wanted)


def refused(*_: Any, **__: Any) -> Any:
    """What a system says of a directory that may not, or cannot, be written to."""
    raise PermissionError("the system refused")


@pytest.mark.parametrize("why", ["a_file_in_the_way", "no_permission"])
def test_a_directory_that_cannot_be_written_costs_a_warning_only(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    if why == "a_file_in_the_way":
        folder.write_text("not a folder")
    else:
        monkeypatch.setattr(tempfile, "NamedTemporaryFile", refused)
    with pytest.warns(UserWarning, match=r"pairs-.*\.json cannot be written .*found anew next time"):
        pairs = find_pairs(Tongue(), cache=folder)
    assert "up_down" in kinds(pairs)
    assert folder.is_file() or list(folder.iterdir()) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_pairs(Tongue(), cache=folder) == pairs  # from memory


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", refused)
    with pytest.warns(UserWarning, match="the system refused"):
        find_pairs(Tongue(), cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
