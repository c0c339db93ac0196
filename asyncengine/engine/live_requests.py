"""The requests that an engine has under way, by the core's numbers and by their names."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncengine.api.checks import quoted
from asyncengine.engine.fairness import FairShare
from asyncengine.engine.stream import RequestStream
from asyncengine.errors import AsyncEngineError, InvalidRequestError, WrongLoopError

if TYPE_CHECKING:
    from asyncengine._core import StepLoop
    from asyncengine.engine.fairness import Place

_WRONG_LOOP = (
    "this engine belongs to the event loop that started it: call it from there "
    "(another thread: asyncio.run_coroutine_threadsafe(engine.generate(...), loop)), or start an engine in each loop"
)


class LiveRequests:
    """The Owner of streams. ``step_loop`` and ``loop`` are set while the engine runs."""

    def __init__(self, fair_share_s: float) -> None:
        self.step_loop: StepLoop | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.rank = 0
        """Number of the engine, among several behind one."""
        self.fair_share = FairShare(fair_share_s)
        self.idle = asyncio.Event()
        self.idle.set()
        self._keys = itertools.count(1)
        self._by_key: dict[int, RequestStream] = {}
        self._by_id: dict[str, int] = {}  # keys

    def share_names(self, other: LiveRequests) -> None:
        """Keys, names and fair shares are those of ``other`` from now on: requests may go from it to here."""
        self._keys, self._by_id, self.fair_share = other._keys, other._by_id, other.fair_share

    def __iter__(self) -> Iterator[RequestStream]:
        """The streams now; requests may end meanwhile."""
        return iter(list(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: int) -> RequestStream | None:
        """The stream of the core's request ``key``."""
        return self._by_key.get(key)

    def named(self, request_id: str) -> int | None:
        """The key of a request."""
        key = self._by_id.get(request_id)
        return key if key in self._by_key else None

    def new_key(self) -> int:
        """Key of a request that may be called by it."""
        while f"req-{(key := next(self._keys))}" in self._by_id:  # somebody chose such a name
            pass
        return key

    def check_name(self, request_id: str) -> None:
        """Raises InvalidRequestError if a request has this name."""
        if request_id in self._by_id:
            raise InvalidRequestError(f"request_id {quoted(request_id)} is in use", param="request_id")

    def enter(self, stream: RequestStream, key: int, tenant: str | None, priority: int, n: int, place: Place) -> None:
        """The core has accepted a request."""
        self.fair_share.enter(key, tenant, priority, n, place)
        self._by_key[key], self._by_id[stream.request_id] = stream, key
        self.idle.clear()

    def give(self, key: int, other: LiveRequests) -> None:
        """Request ``key`` is no longer here but in ``other``, which shares the names."""
        stream = other._by_key[key] = self._by_key.pop(key)
        stream.owner = other
        other.idle.clear()
        if not self._by_key:
            self.idle.set()

    def abort_in_core(self, key: int) -> None:
        """Nothing more is computed for the request."""
        if self.step_loop is not None:
            self.step_loop.abort(key)

    # ---- Owner ----

    def check_loop(self) -> None:
        """Raise WrongLoopError unless the caller runs in the engine's event loop."""
        if self.loop is not asyncio._get_running_loop():  # None in a thread without a loop
            raise WrongLoopError(_WRONG_LOOP)

    def forget(self, key: int) -> None:
        """The request has ended; nothing more is delivered for it."""
        stream = self._by_key.pop(key, None)
        if stream is not None:
            del self._by_id[stream.request_id]
            self.fair_share.leave(key)
            if not self._by_key:
                self.idle.set()

    def drop(self, key: int) -> None:
        """The consumer has gone: abort the request."""
        self.abort_in_core(key)
        self.forget(key)

    def stop_sequence(self, key: int, index: int) -> None:
        """A stop string ended one sequence of a request."""
        if self.step_loop is not None:
            self.step_loop.abort(key, index)

    def fail(self, key: int, error: AsyncEngineError) -> None:
        """The request cannot go on."""
        stream = self._by_key.get(key)
        if stream is not None:
            self.abort_in_core(key)
            stream.fail(error)
