"""Masks of sequences, a step ahead of their sampling: a token comes in, worker threads find out which may come next."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from asyncengine import _core
from asyncengine.checks import said
from asyncengine.errors import AsyncEngineError, InternalError, InvalidRequestError
from asyncengine.structured.grammars import PARAM
from asyncengine.structured.reasoning import Reasoning

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_THREADS = 8


class Constraint:
    """One sequence that follows a grammar, from its first token to its end.

    Of its parts ``advance`` belongs to the event loop, ``work`` to one worker at a time: the next token comes only when
    the mask before it was used.
    """

    def __init__(
        self, matcher: LLMatcher, mask_words: int, prompt_len: int, end: int, reasoning: Reasoning, *, forces: bool
    ) -> None:
        """Compute the first mask. ``end``: the token that ends the sequence where the grammar does. ``forces``: tokens
        that the grammar leaves no choice of are appended unsampled."""
        self.channel = _core.MaskChannel(mask_words)
        self._matcher = matcher.deep_copy()
        self._mask_bytes = 4 * mask_words
        self._position = prompt_len  # of the token that the last mask is for
        self._end = end
        self._reasoning = reasoning
        self._forces = forces
        self._unsampled = 0  # tokens that were forced and have not come back yet: the event loop's
        self._write([])

    def advance(self, tokens: Sequence[int]) -> list[int]:
        """Of new tokens those that were sampled: ``work`` is to be called if there are any."""
        forced = min(self._unsampled, len(tokens))
        self._unsampled -= forced
        return list(tokens[forced:])

    def work(self, tokens: Sequence[int]) -> None:
        """Take in sampled tokens, and hand on the next mask. Raises InvalidRequestError if the grammar fails."""
        for token in tokens:
            if self._reasoning.take(token):
                continue
            if not self._matcher.consume_token(token):
                raise _failed(self._matcher)
        self._position += len(tokens)
        self._write(self._forced())
        self.channel.post()

    def _forced(self) -> list[int]:
        if self._reasoning.under_way:
            return []
        if not self._forces:
            return []
        if self._matcher.is_stopped():
            return [self._end]
        forced = self._matcher.compute_ff_tokens()
        if len(forced) < _WORTH_FORCING:
            return []
        used = self._matcher.try_consume_tokens(forced)
        return forced[:used]

    def _write(self, forced: list[int]) -> None:
        # Before post(), which lets the event loop see them come back.
        self._unsampled += len(forced)
        free = self._reasoning.under_way or forced[-1:] == [self._end]
        if not free:
            self._matcher.unsafe_compute_mask_ptr(self.channel.address, self._mask_bytes)
        if self._matcher.is_error():
            raise _failed(self._matcher)
        if not free and self._reasoning.may_begin:
            self._reasoning.allow_begin(self.channel.address)
        self.channel.write(self._position, allows_all=free, forced=forced)
        self._position += len(forced)


_WORTH_FORCING = 2
"""Forced tokens come in a row of their own, for which a row in flight is given up."""


def _failed(matcher: LLMatcher) -> InvalidRequestError:
    return InvalidRequestError(f"{PARAM}: the grammar failed: {matcher.get_error()[:500]}", param=PARAM)


Work = tuple[Callable[[], None], Callable[[AsyncEngineError], None]]


class MaskWorkers:
    """Daemon threads that compute masks, started with the first. A slow mask takes up one of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._name = name
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], None], fail: Callable[[AsyncEngineError], None]) -> None:
        """Have ``work()`` called; ``fail`` is called in the event loop if that raises."""
        if not self._threads:
            self._start()
        self._queue.put((work, fail))

    def close(self) -> None:
        """Let the threads end. Idempotent."""
        for _ in self._threads:
            self._queue.put(None)
        self._threads = []

    def _start(self) -> None:
        count = max(2, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        for i in range(count):
            thread = threading.Thread(target=self._serve, name=f"asyncengine-{self._name}-{i}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            work, fail = item
            try:
                work()
            except AsyncEngineError as e:
                self._report(fail, e)
            except BaseException as e:  # a bug, or a panic of the library: it ends this request alone
                self._report(fail, InternalError(f"a mask failed: {said(e)}"))
            del item, work, fail

    def _report(self, fail: Callable[[AsyncEngineError], None], error: AsyncEngineError) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(fail, error)
