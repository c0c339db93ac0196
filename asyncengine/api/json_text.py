"""JSON that is the text of a string: its size is looked at before objects are made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncengine._core import json_extent

MAX_BYTES = 4 << 20
"""Bytes of UTF-8 that the JSON texts of one request may have together."""
MAX_VALUES = 100_000
"""Values that they may have together. Names of members, strings, arrays and objects count twice."""
MAX_DEPTH = 64
"""Arrays and objects within each other."""


class JsonTooLargeError(ValueError):
    """A JSON text is over a limit. The message says which one, without naming the text."""


@dataclass(slots=True)
class JsonTexts:
    """The JSON texts of one request. What is parsed at all takes some 20 ms at most, all of them together."""

    max_bytes: int = MAX_BYTES
    max_values: int = MAX_VALUES
    _bytes: int = 0
    _values: int = 0

    def parse(self, text: str) -> Any:
        """The value. Raises JsonTooLargeError over a limit, and ValueError for what is no JSON."""
        if self._bytes + len(text) > self.max_bytes:  # a character has a byte at least
            raise self._too_long()
        encoded = text.encode()  # UnicodeEncodeError, of lone surrogates, is a ValueError
        self._bytes += len(encoded)
        if self._bytes > self.max_bytes:
            raise self._too_long()
        values, depth = json_extent(encoded)
        self._values += values
        if self._values > self.max_values:
            raise JsonTooLargeError(f"JSON within strings has more than {self.max_values} values")
        if depth > MAX_DEPTH:
            raise JsonTooLargeError(f"JSON within a string is nested more than {MAX_DEPTH} levels deep")
        import msgspec  # not with the package: few requests need it

        return msgspec.json.decode(encoded)

    def _too_long(self) -> JsonTooLargeError:
        return JsonTooLargeError(f"JSON within strings has more than {self.max_bytes} bytes")


def object_of(text: str) -> dict[str, Any] | None:
    """The object that a model wrote. None for what is no object, and for one that is over the limits."""
    try:
        value = JsonTexts().parse(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
