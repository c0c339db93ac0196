"""Headers of GGUF files, versions 2 and 3, which are untrusted.

A header claims lengths and counts. Each is compared with the bytes that are left before anything is read or made of it,
so that time and memory are bounded by the file and by the limits below. (Source: docs/gguf.md of ggml.)
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncengine.errors import ModelError, UnsupportedModelError
from asyncengine.kernels.blocks import SIZES, BlockType, row_bytes
from asyncengine.models.files import checked_size, excerpt

MAX_HEADER_BYTES = 128 << 20
"""Largest header. A vocabulary of 260,000 tokens with their merges takes some 15 MB."""
MAX_ENTRIES = 1 << 12
MAX_STRINGS = 1 << 20
"""Most strings in all arrays of a header together."""
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = 256
MAX_TEXT_BYTES = 8 << 20
_MAX_AXES = 4
_MAX_ELEMENTS = 1 << 48
_MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS: Final[dict[int, str]] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


class StoredTensor(NamedTuple):
    """Place of a tensor in a file."""

    path: Path
    kind: BlockType
    shape: tuple[int, ...]
    """As torch has it: rows before columns."""
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Strings:
    """An array of strings that is decoded when it is wanted."""

    path: Path
    start: int
    count: int

    def read(self) -> list[str]:
        """The strings; what is no UTF-8 is replaced."""
        texts = []
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = self.start
            for _ in range(self.count):
                end = at + 8 + int.from_bytes(data[at : at + 8], "little")
                texts.append(data[at + 8 : end].decode(errors="replace"))
                at = end
        return texts


@dataclass(frozen=True)
class Header:
    """Metadata by key and tensors by name of one file."""

    metadata: dict[str, Any]
    """Numbers, flags and texts; an array is a numpy array of numbers, or ``Strings``."""
    tensors: dict[str, StoredTensor]


class _Cursor:
    """A place in a file's bytes, from which values are taken that are all there."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0
        self.end = min(len(data), MAX_HEADER_BYTES)
        self.strings = 0

    def take(self, size: int) -> int:
        """The place of the next ``size`` bytes, which are passed over. Raises ModelError if there are fewer."""
        if size > self.end - self.at:
            what = f"more than {MAX_HEADER_BYTES:,} bytes" if self.end < len(self.data) else "more than the file"
            raise ModelError(f"{self.path} is damaged or incomplete: its header claims {what}")
        self.at += size
        return self.at - size

    def integer(self, size: int = 8) -> int:
        at = self.take(size)
        return int.from_bytes(self.data[at : at + size], "little")

    def count(self, what: str, most: int) -> int:
        if (found := self.integer()) > most:
            raise ModelError(f"{self.path}: the header claims {found:,} {what}; at most {most:,} are read")
        return found

    def text(self, what: str, most: int) -> str:
        size = self.count(f"bytes of {what}", most)
        at = self.take(size)
        return self.data[at : at + size].decode(errors="replace")

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.text("a text", MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _NUMBERS:
            raise ModelError(f"{self.path}: {excerpt(key)} has a type {kind} that is not known")
        return self._numbers(kind, 1)[0].item()

    def _numbers(self, kind: int, count: int) -> npt.NDArray[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        at = self.take(count * dtype.itemsize)
        stored = self.data[at : at + count * dtype.itemsize]
        return np.frombuffer(stored, np.uint8) != 0 if kind == _BOOL else np.frombuffer(stored, dtype)

    def _array(self, key: str) -> npt.NDArray[Any] | Strings:
        kind, count = self.integer(4), self.count("elements of an array", MAX_HEADER_BYTES)
        if kind in _NUMBERS:
            return self._numbers(kind, count)
        if kind != _STRING:
            raise ModelError(f"{self.path}: {excerpt(key)} is an array of a type {kind} that is not read")
        self.strings += count
        if self.strings > MAX_STRINGS:
            raise ModelError(f"{self.path}: the header claims more than {MAX_STRINGS:,} strings")
        start, unpack, data, end = self.at, struct.Struct("<Q").unpack_from, self.data, self.end
        for _ in range(count):
            at = self.take(8)
            size = unpack(data, at)[0]
            if size > end - self.at:
                self.take(size)
            self.at += size
        return Strings(self.path, start, count)


def read_header(path: Path) -> Header:
    """The header of one file. Raises ModelError for one that is damaged, UnsupportedModelError for types that are not
    read."""
    size = checked_size(path)
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise ModelError(f"{path} is no GGUF file: it does not begin with {_MAGIC.decode()}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(data, path), size)
    except (OSError, ValueError) as e:
        raise ModelError(f"cannot read {path}: {e}") from e


def _parse(cursor: _Cursor, size: int) -> Header:
    path = cursor.path
    cursor.take(len(_MAGIC))
    if (version := cursor.integer(4)) not in (2, 3):
        raise UnsupportedModelError(
            f"{path} has version {version} of GGUF; 2 and 3 are read, of little-endian machines"
        )
    num_tensors, num_entries = cursor.count("tensors", MAX_TENSORS), cursor.count("entries", MAX_ENTRIES)
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.text("a key", MAX_KEY_BYTES)
        metadata[key] = cursor.value(cursor.integer(4), key)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
        raise ModelError(f"{path}: general.alignment must be a power of two from 8, found {excerpt(alignment)}")
    entries = [_tensor(cursor) for _ in range(num_tensors)]
    data_start = cursor.at + -cursor.at % alignment
    return Header(metadata, dict(_places(path, entries, data_start, alignment, size)))


class _Entry(NamedTuple):
    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int


def _tensor(cursor: _Cursor) -> _Entry:
    name = cursor.text("a tensor's name", MAX_KEY_BYTES)
    axes = cursor.integer(4)
    if not 1 <= axes <= _MAX_AXES:
        raise ModelError(f"{cursor.path}: tensor {excerpt(name)} has {axes} axes")
    shape = tuple(cursor.integer() for _ in range(axes))[::-1]
    return _Entry(name, cursor.integer(4), shape, cursor.integer())


def _places(
    path: Path, entries: list[_Entry], data_start: int, alignment: int, size: int
) -> Iterator[tuple[str, StoredTensor]]:
    seen = set()
    for name, number, shape, offset in entries:
        if number not in SIZES:
            raise UnsupportedModelError(f"{path}: tensor {excerpt(name)} has type {number}, which is not read")
        kind, rows = BlockType(number), 1
        for length in shape[:-1]:
            rows *= length
        if name in seen or not 0 < rows * shape[-1] <= _MAX_ELEMENTS or offset % alignment:
            raise ModelError(f"{path}: tensor {excerpt(name)} of {excerpt(shape)} at {offset} cannot be")
        seen.add(name)
        try:
            num_bytes = rows * row_bytes(kind, shape[-1])
        except ValueError as e:
            raise ModelError(f"{path}: tensor {excerpt(name)}: {e}") from None
        if num_bytes > size - data_start - offset:
            raise ModelError(f"{path} is damaged or incomplete: tensor {excerpt(name)} ends behind the file")
        yield name, StoredTensor(path, kind, shape, data_start + offset, num_bytes)
