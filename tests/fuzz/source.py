"""Bytes of a fuzzer as decisions, so that a small change of the bytes is a small change of the input."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

NUMBERS: tuple[int | float, ...] = (
    0, 1, 2, 3, 16, 128, 1024, -1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**9, 10**400, -(10**400),
    0.0, 0.5, 1.0, 1.5, -0.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
CHARACTERS = "ab01._-/\\ \n\0\"'{}[]<>é▁😀\ufffd\ud800"
MAX_DEPTH = 6


def scratch_directory() -> Path:
    """Make a folder for the files of one process; it goes when the process ends."""
    path = Path(tempfile.mkdtemp(prefix="asyncengine-fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


class Source:
    """Every method takes as many bytes as it needs; after the last one come zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return max(0, len(self._data) - self._at)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def flag(self) -> bool:
        return self.byte() % 2 == 1

    def integer(self, low: int, high: int) -> int:
        """Return an integer from ``low`` to ``high``, both included."""
        size = 1 if high - low < 256 else 2
        return low + int.from_bytes(bytes(self.byte() for _ in range(size)), "big") % (high - low + 1)

    def pick(self, items: Sequence[T]) -> T:
        return items[self.integer(0, len(items) - 1)]

    def text(self, alphabet: str = CHARACTERS, longest: int = 12) -> str:
        return "".join(self.pick(alphabet) for _ in range(self.integer(0, longest)))

    def rest(self) -> bytes:
        data = self._data[self._at :]
        self._at = len(self._data)
        return data

    def value(self, depth: int = 0) -> Any:
        """Return any value that JSON can express, or NaN or infinity."""
        match self.byte() % (9 if depth < MAX_DEPTH else 7):
            case 0:
                return None
            case 1:
                return self.flag()
            case 2:
                return self.byte()
            case 3 | 4:
                return self.pick(NUMBERS)
            case 5 | 6:
                return self.text()
            case 7:
                return [self.value(depth + 1) for _ in range(self.integer(0, 4))]
        return {self.text(): self.value(depth + 1) for _ in range(self.integer(0, 4))}
