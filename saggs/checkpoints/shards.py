"""Weight files that are read and rewritten without ever holding one whole.

A safetensors file is a header (JSON: name, dtype, shape and byte range of every tensor) and then bytes. Multiplying
weights changes none of what the header says, so a rewritten file is the old one, byte for byte, but for the ranges of
the tensors that changed: those go through memory a few megabytes at a time, everything between them is copied by the
kernel. Names, order, dtypes, metadata and alignment are kept because they are never touched.

`pytorch_model.bin` is a pickle and has to be loaded whole; it is only ever opened with `weights_only=True`, which
builds tensors and plain containers and runs no code of the file's.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

Edit = Callable[[Tensor, int], None]
"""(rows of a tensor, index of the first of them): changes the rows in place."""
Progress = Callable[[int], None]
"""(bytes done since the last call)."""

_CHUNK_BYTES = 1 << 20  # of a tensor at a time: small enough to stay in a cache between reading, scaling and writing
_HEADER_LIMIT = 100 << 20  # the format's own limit
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class CheckpointError(ValueError):
    """A checkpoint that is damaged, of a kind that cannot be handled, or not what its configuration says."""


def no_progress(count: int) -> None:
    """The `Progress` of nobody watching."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. `dtype` is torch's, or the file's own word for one that torch cannot compute with."""

    dtype: torch.dtype | str
    shape: tuple[int, ...]
    start: int = 0
    stop: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor; 0 for a dtype that is not torch's."""
        return self.dtype.itemsize * _count(self.shape) if isinstance(self.dtype, torch.dtype) else 0


class SafetensorsShard:
    """A safetensors file, its header read and checked against the file's size.

    Attributes:
        entries: name -> `Entry`, in the header's order.

    Raises:
        CheckpointError: no safetensors file, or one that was cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        with open(path, "rb") as stream:
            self.entries = self._read_header(stream)

    def _read_header(self, stream: BinaryIO) -> dict[str, Entry]:
        first = stream.read(8)
        length = int.from_bytes(first, "little")
        if first.startswith(b"version "):
            raise CheckpointError(f"{self.path} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
        if len(first) < 8 or length > min(_HEADER_LIMIT, self.size - 8):
            raise self._damaged("its header is cut short or no header")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            data = 8 + length
            entries = {name: self._entry(fields, data) for name, fields in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._damaged(f"its header cannot be read: {error}") from None
        end = max((entry.stop for entry in entries.values()), default=data)
        if end != self.size:
            raise self._damaged(f"its tensors need {end} bytes, the file has {self.size}")
        return entries

    def _entry(self, fields: Mapping[str, Any], data: int) -> Entry:
        shape = tuple(int(n) for n in fields["shape"])
        start, stop = (data + int(offset) for offset in fields["data_offsets"])
        dtype = _DTYPES.get(fields["dtype"], str(fields["dtype"]))
        if isinstance(dtype, torch.dtype) and stop - start != dtype.itemsize * _count(shape):
            raise ValueError(f"{fields} does not add up")
        return Entry(dtype, shape, start, stop)

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or no safetensors file: {why}. Copy or download it again")

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        entry = self.entries[name]
        buffer = bytearray(entry.stop - entry.start)
        with open(self.path, "rb") as stream:
            self._fill(stream, entry.start, memoryview(buffer))
        return _tensor(memoryview(buffer), entry)

    def rows(self, name: str, progress: Progress = no_progress) -> Iterator[tuple[int, Tensor]]:
        """(index of the first row, rows) of a tensor, a few megabytes at a time; valid until the next."""
        with open(self.path, "rb", buffering=0) as stream:
            for first, rows, data, _ in self._chunks(stream, name):
                yield first, rows
                progress(len(data))

    def _chunks(self, stream: BinaryIO, name: str) -> Iterator[tuple[int, Tensor, memoryview, int]]:
        entry = self.entries[name]
        total = entry.shape[0] if entry.shape else 1
        row_bytes = max(1, (entry.stop - entry.start) // max(1, total))
        step = max(1, min(total, _CHUNK_BYTES // row_bytes))
        buffer = memoryview(bytearray(step * row_bytes))
        for first in range(0, total if entry.stop > entry.start else 0, step):
            count = min(step, total - first)
            data = buffer[: count * row_bytes]
            position = entry.start + first * row_bytes
            self._fill(stream, position, data)
            shape = (count, *entry.shape[1:]) if entry.shape else ()
            yield first, _tensor(data, Entry(entry.dtype, shape)), data, position

    def _fill(self, stream: BinaryIO, position: int, data: memoryview) -> None:
        stream.seek(position)
        while data:
            count = stream.readinto(data)  # type: ignore[attr-defined]
            if not count:
                raise self._damaged("it ended early")
            data = data[count:]

    def rewrite(self, target: Path, edits: Mapping[str, Edit], progress: Progress = no_progress) -> None:
        """Write the file to `target`, which must not exist, with the tensors in `edits` changed; synced to disk.

        Raises:
            OSError: the disk is full or not writable; what is at `target` then is no whole file.
        """
        with open(self.path, "rb", buffering=0) as source, open(target, "xb", buffering=0) as sink:
            position = 0
            for name in sorted(edits, key=lambda name: self.entries[name].start):
                _copy_range(source, sink, position, self.entries[name].start, progress)
                for first, rows, data, _ in self._chunks(source, name):
                    edits[name](rows, first)
                    _write(sink, data)
                    progress(len(data))
                position = self.entries[name].stop
            _copy_range(source, sink, position, self.size, progress)
            os.fsync(sink.fileno())


class PickleShard:
    """A `pytorch_model.bin`: loaded whole, with `weights_only=True`. Same methods as `SafetensorsShard`.

    Raises:
        CheckpointError: a file that needs code to be run, or is damaged, or holds anything but tensors by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self.entries = {
            name: Entry(tensor.dtype if tensor.dtype in _DTYPES.values() else str(tensor.dtype), tuple(tensor.shape))
            for name, tensor in self._load().items()
        }

    def _load(self) -> dict[str, Tensor]:
        loaded = load_plain(self.path)
        if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
            raise CheckpointError(f"{self.path} does not hold tensors by name")
        return loaded

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        return self._load()[name]

    def rows(self, name: str, progress: Progress = no_progress) -> Iterator[tuple[int, Tensor]]:
        """(0, the tensor)."""
        tensor = self.read(name)
        yield 0, tensor
        progress(tensor.nbytes)

    def rewrite(self, target: Path, edits: Mapping[str, Edit], progress: Progress = no_progress) -> None:
        """Write the file to `target` with the tensors in `edits` changed; tensors that shared memory still do."""
        tensors = self._load()
        done: set[int] = set()
        for name, edit in edits.items():
            if tensors[name].data_ptr() not in done:  # a tied tensor stands under two names: once is enough
                edit(tensors[name], 0)
                done.add(tensors[name].data_ptr())
        save_plain(tensors, target)
        progress(self.size)


Shard = SafetensorsShard | PickleShard


def load_plain(path: Path) -> Any:
    """`torch.load` of tensors and plain containers, on the CPU, mapped where the format allows it; runs no code.

    Raises:
        CheckpointError: the file is damaged, or would have to run code to be loaded.
    """
    for mapped in (True, False):
        try:
            return torch.load(path, weights_only=True, map_location="cpu", mmap=mapped)
        except pickle.UnpicklingError as error:
            first = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"{path} is damaged, or holds more than tensors and plain values, which only running its code could "
                f"load; it is not loaded ({first})"
            ) from None
        except (RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
            if mapped and "mmap" in str(error):  # the format before torch 1.6 cannot be mapped
                continue
            raise CheckpointError(f"{path} is damaged: {str(error).strip().splitlines()[0]}") from None
    raise AssertionError


def save_plain(value: Any, target: Path) -> None:
    """`torch.save` to `target`, which must not exist, synced to disk. An OSError where the disk is full."""
    with open(target, "xb") as stream:
        try:
            torch.save(value, stream)
        except RuntimeError as error:  # the zip writer's words for a write that failed
            stream.flush()
            raise OSError(f"{target} could not be written: {error}") from error
        stream.flush()
        os.fsync(stream.fileno())


def copy_file(source: Path, target: Path, progress: Progress = no_progress) -> None:
    """Copy bytes to `target`, which must not exist; synced to disk."""
    with open(source, "rb") as reader, open(target, "xb", buffering=0) as writer:
        _copy_range(reader, writer, 0, source.stat().st_size, progress)
        os.fsync(writer.fileno())


def _copy_range(source: BinaryIO, sink: BinaryIO, start: int, stop: int, progress: Progress) -> None:
    """Bytes [start, stop) of `source` to the end of `sink`, by the kernel; nothing passes through Python."""
    while start < stop:
        count = _send(sink.fileno(), source.fileno(), start, min(stop - start, 64 << 20))
        if count == 0:
            raise CheckpointError(f"{source.name} became shorter while it was read")
        start += count
        progress(count)


def _send(sink: int, source: int, offset: int, count: int) -> int:
    if sys.platform == "linux":
        return os.sendfile(sink, source, offset, count)
    return os.write(sink, os.pread(source, min(count, _CHUNK_BYTES), offset))


def _write(sink: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[sink.write(data) :]


def _tensor(data: memoryview, entry: Entry) -> Tensor:
    if not isinstance(entry.dtype, torch.dtype):
        raise CheckpointError(f"tensors of dtype {entry.dtype} cannot be read")
    if not data:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return torch.frombuffer(data, dtype=entry.dtype).view(entry.shape)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count
