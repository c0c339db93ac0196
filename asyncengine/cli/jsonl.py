"""Files with a request on every line, and files with a result for every request, which a later run goes on with."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, Self

from asyncengine.errors import ConfigError

Key = str | int
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Request:
    """One line. Its result has the same ``key``; ``problem`` says why it cannot be sent."""

    key: Key
    path: str = ""
    fields: dict[str, Any] | None = None
    problem: str | None = None


def numbered_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Lines of a file from 1, without their ends; empty ones are left out. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                text = (line.removeprefix(_BOM) if number == 1 else line).rstrip(b"\r\n")
                if text.strip():
                    yield number, text
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from None


def keys_of(path: str, requests: Iterable[Request]) -> list[Key]:
    """Return the keys of the requests, in order. Raises ConfigError if two are the same."""
    keys: dict[Key, None] = {}
    for request in requests:
        if request.key in keys:
            raise ConfigError(f"{path}: custom_id {request.key!r} comes twice")
        keys[request.key] = None
    return list(keys)


def has_failed(record: dict[str, Any]) -> bool:
    """Return whether a line of results reports a failure."""
    response = record.get("response")
    status = response.get("status_code") if isinstance(response, dict) else 200
    return record.get("error") is not None or status != 200


class Results:
    """A file of results, each with the ``custom_id`` of its request. Use as a context manager."""

    def __init__(self, path: str, keys: Iterable[Key], *, retry_failed: bool = False) -> None:
        """Reads what an earlier run has left, and drops a torn last line.

        With ``retry_failed``, failures are dropped as well. Raises ConfigError if the file has results of other
        requests, or if another process writes it.
        """
        self._path = os.path.realpath(path)
        self._order = list(keys)
        self._places: dict[Key, tuple[int, int]] = {}  # offset and length
        self.failed = 0
        self.first_failure = ""
        try:
            self._file: BinaryIO = open(self._path, "a+b")  # noqa: SIM115 - closed by __exit__
        except OSError as exc:
            raise ConfigError(f"cannot write {path}: {exc.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise ConfigError(f"cannot write {path}: results go to a regular file")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another process writes {path}") from None
            self._read(set(self._order), retry_failed)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    @property
    def done(self) -> int:
        return len(self._places)

    @property
    def missing(self) -> int:
        return len(self._order) - len(self._places)

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def add(self, record: dict[str, Any]) -> None:
        """Append one result. Raises OSError if it cannot be written; the file then has the results before it."""
        line = _encode(record)
        end = self._file.seek(0, os.SEEK_END)
        try:
            _write(self._file.fileno(), line)
        except OSError as exc:
            with suppress(OSError):
                self._file.truncate(end)
            raise OSError(exc.errno, f"cannot write the results: {exc.strerror}", self._path) from exc
        self._note(record, end, line)

    def put_in_order(self) -> None:
        """Give the lines the order of the requests. The file is replaced at once: it is whole at any time.

        Raises OSError if there is no room for a second file; the first one then stays as it is.
        """
        kept = [self._places[key] for key in self._order if key in self._places]
        if kept != sorted(kept):
            self._replace(kept)

    def _read(self, known: set[Key], retry_failed: bool) -> None:
        end, dropped = 0, False
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n") and line[:2] == b'{"'[: len(line)]:
                break  # torn
            record = _decode(line)
            key = record.get("custom_id")
            if not isinstance(key, str | int) or key not in known or key in self._places:
                raise ConfigError(f"{self._path}, line {number}: this is no result of the requests: take another file")
            if retry_failed and has_failed(record):
                dropped = True
            else:
                self._note(record, end, line)
            end += len(line)
        self._file.truncate(end)
        if dropped:
            self._replace(list(self._places.values()))

    def _note(self, record: dict[str, Any], offset: int, line: bytes) -> None:
        self._places[record["custom_id"]] = offset, len(line)
        if has_failed(record):
            self.failed += 1
            self.first_failure = self.first_failure or line.decode(errors="replace").strip()

    def _replace(self, places: list[tuple[int, int]]) -> None:
        """Keep these lines, in this order."""
        by_place = {place: key for key, place in self._places.items()}
        moved: dict[Key, tuple[int, int]] = {}
        beside = self._path + ".part"
        try:
            with open(beside, "wb", buffering=0) as file:
                for offset, length in places:
                    self._file.seek(offset)
                    moved[by_place[offset, length]] = file.tell(), length
                    _write(file.fileno(), self._file.read(length))
        except OSError as exc:
            with suppress(OSError):
                os.unlink(beside)
            raise OSError(exc.errno, f"cannot put the results in order: {exc.strerror}", self._path) from exc
        self._places = moved
        replaced, self._file = self._file, open(beside, "a+b")  # noqa: SIM115 - closed by __exit__
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.replace(beside, self._path)
        replaced.close()


def _write(descriptor: int, data: bytes) -> None:
    """Write all of ``data``, past any buffer: bytes that a full disk refuses are not kept for later."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _encode(record: dict[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # a custom_id with half a character
        return json.dumps(record).encode() + b"\n"


def _decode(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
