"""The server's log: lines go to stderr through a queue, so that a reader of stderr who does not read holds up nobody.

A full pipe blocks the thread that writes to it. Here that is a thread of its own; while it is blocked, lines that the
queue has no room for are counted and dropped.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
import select
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Any, Literal

from asyncengine.server import access

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_MAX_QUEUED = 4096
_MAX_ALIKE = 20
"""Lines that one statement of a program may log per second; for the rest of that second it gets one line in all."""
_TICK_S = 0.5


class Log:
    """The root logger's way to stderr, from construction to ``stop``."""

    def __init__(self, level: str, form: Literal["text", "json"] = "text") -> None:
        lines: queue.Queue[Any] = queue.Queue(_MAX_QUEUED)
        self._enqueue = _Enqueue(lines)
        self._listener = _Listener(lines, self._enqueue, _Json() if form == "json" else logging.Formatter(_FORMAT))
        logging.basicConfig(level=level.upper(), handlers=[self._enqueue], force=True)
        logging.captureWarnings(True)
        self._listener.start()

    def stop(self, limit_s: float = 2.0) -> None:
        """Write what is queued, as far as that is possible within ``limit_s`` seconds."""
        self._enqueue.summarise(before=time.time() + 1)
        self._listener.stop_within(limit_s)


class _Enqueue(logging.handlers.QueueHandler):
    """Puts lines into the queue and never waits."""

    def __init__(self, lines: queue.Queue[Any]) -> None:
        super().__init__(lines)
        self.setFormatter(logging.Formatter("%(message)s"))  # with the traceback; the rest is _Stderr's
        self._alike: dict[tuple[str, int], tuple[float, int, str]] = {}  # since when, how many, and their template
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == access.logger.name:
            super().emit(record)  # a line for each request is meant, and the queue's size limits them
            return
        key = record.pathname, record.lineno
        since, count, template = self._alike.get(key, (record.created, 0, ""))
        if record.created - since >= 1:
            self._summarise(count, template)
            since, count = record.created, 0
        self._alike[key] = since, count + 1, str(record.msg)
        if count < _MAX_ALIKE:
            super().emit(record)

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def take_dropped(self) -> int:
        """The number of lines dropped since the last call."""
        assert self.lock is not None
        with self.lock:
            count, self._dropped = self._dropped, 0
        return count

    def summarise(self, before: float) -> None:
        """Tell of the lines left out whose second began a second before that time, and forget them."""
        assert self.lock is not None
        with self.lock:
            for key, (since, count, template) in list(self._alike.items()):
                if before - since >= 1:
                    del self._alike[key]
                    self._summarise(count, template)

    def _summarise(self, count: int, template: str) -> None:
        if count > _MAX_ALIKE:
            self.enqueue(_line(logging.WARNING, f"left out {count - _MAX_ALIKE} more lines like {template!r}"))


class _Listener(logging.handlers.QueueListener):
    """The thread that writes. It tells of dropped lines when there is room again."""

    def __init__(self, lines: queue.Queue[Any], source: _Enqueue, formatter: logging.Formatter) -> None:
        super().__init__(lines, _Stderr(formatter))
        self._lines = lines
        self._source = source

    def dequeue(self, block: bool) -> Any:
        while True:
            try:
                return self._lines.get(timeout=_TICK_S)
            except queue.Empty:
                self._source.summarise(before=time.time())

    def handle(self, record: logging.LogRecord) -> None:
        super().handle(record)
        if self._lines.empty() and (count := self._source.take_dropped()):
            super().handle(_line(logging.WARNING, f"{count} lines were dropped: nobody read the log"))

    def enqueue_sentinel(self) -> None:
        self._lines.put(None)  # waits for room

    def stop_within(self, limit_s: float) -> None:
        """Stop when all is written. Threads that are still blocked then are daemons and end with the process."""
        stopping = threading.Thread(target=self.stop, daemon=True)
        stopping.start()
        stopping.join(limit_s)


class _Json(logging.Formatter):
    """A JSON object a line: time (ISO 8601, UTC), level, logger, message, and the fields that the record brings."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        return json.dumps(line | getattr(record, "fields", {}))


class _Stderr(logging.Handler):
    """Writes to the descriptor. A blocked write holds no lock that the end of the process waits for."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._descriptor = sys.stderr.fileno()

    def handle(self, record: logging.LogRecord) -> bool:
        self.emit(record)  # without the handler's lock, as one thread writes
        return True

    def emit(self, record: logging.LogRecord) -> None:
        data = (self.format(record) + "\n").encode(errors="backslashreplace")
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process made the pipe so
                select.select([], [self._descriptor], [])
            except OSError:
                return  # closed


def _line(level: int, message: str) -> logging.LogRecord:
    return logging.LogRecord("asyncengine.server", level, "", 0, message, None, None)
