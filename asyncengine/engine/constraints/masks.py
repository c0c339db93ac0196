"""Masks of sequences, a step ahead of their sampling: a token comes in, worker threads find out which may come next."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from asyncengine._core import MaskChannel
from asyncengine.api.checks import said
from asyncengine.engine.constraints.grammars import PARAM, Grammar, Held
from asyncengine.engine.constraints.reasoning import Reasoning
from asyncengine.errors import AsyncEngineError, InternalError, InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

T = TypeVar("T")

MAX_THREADS = 8


class Constraint:
    """One sequence that follows a grammar, from its first token to its end.

    Its method ``advance`` belongs to the event loop, ``work`` to one worker at a time: the next token comes only when
    the mask before it was used.
    """

    def __init__(
        self,
        grammar: Grammar,
        mask_words: int,
        prompt_len: int,
        end: int,
        reasoning: Reasoning,
        *,
        forces: bool,
        held: Held | None = None,
    ) -> None:
        """Compute the first mask. ``end``: the token that ends the sequence where the grammar does. ``forces``: tokens
        that the grammar leaves no choice of are appended unsampled. ``held`` counts the memory of this object."""
        self.channel = MaskChannel(mask_words)
        self._grammar = grammar
        self._held = held
        self._history: list[int] = []  # tokens that the matcher has taken in
        self._mask_bytes = 4 * mask_words
        self._position = prompt_len  # of the token that the last mask is for
        self.end = end
        self._reasoning = reasoning
        self._forces = forces
        self._unsampled = 0  # tokens that were forced and have not come back yet: the event loop's
        self._is_free = False  # any token may come behind what is known
        self._begin()
        self._forces = False  # the first message forces nothing
        self._next([])
        self._forces = forces
        self._write([])

    def advance(self, tokens: Sequence[int]) -> list[int]:
        """Return the sampled ones of new tokens: ``work`` is to be called if there are any."""
        forced = min(self._unsampled, len(tokens))
        self._unsampled -= forced
        return list(tokens[forced:])

    def work(self, tokens: Sequence[int]) -> None:
        """Take in sampled tokens, and hand on the next mask. Raises InvalidRequestError if the grammar fails."""
        reasoning = self._reasoning
        taken = [token for token in tokens if not reasoning.take(token)] if reasoning.is_open else tokens
        self._position += len(tokens)
        self._history += taken
        try:
            forced = self._next(taken)
        except InvalidRequestError:
            forced = self._next_of_another()
        self._write(forced)
        self.channel.post()

    def _begin(self) -> None:
        self._matcher = self._grammar.deep_copy()
        self._generation = self._grammar.generation

    def _next_of_another(self) -> list[int]:
        """``_next`` with another automaton: sequences of this grammar may have made theirs too large."""
        grammar = self._grammar
        with grammar.lock:
            grammar.renew(self._generation)
            self._begin()
            grammar.has_failed = True  # unless this sequence gets on with it
            forced = self._next(self._history)
            grammar.has_failed = False
        return forced

    def _next(self, tokens: Sequence[int]) -> list[int]:
        """Compute the mask behind these tokens and those that they force, which are returned."""
        matcher = self._matcher
        for token in tokens:
            if not matcher.consume_token(token):
                raise _failed(matcher)
        forced = self._forced() if self._forces else []
        self._is_free = self._reasoning.under_way or forced[-1:] == [self.end]
        if not self._is_free:
            matcher.unsafe_compute_mask_ptr(self.channel.address, self._mask_bytes)
        if matcher.is_error():
            raise _failed(matcher)
        return forced

    def _forced(self) -> list[int]:
        if self._reasoning.under_way:
            return []
        if self._matcher.is_stopped():
            return [self.end]
        forced = self._matcher.compute_ff_tokens()
        if len(forced) < _WORTH_FORCING:
            return []
        used = self._matcher.try_consume_tokens(forced)
        return forced[:used]

    def _write(self, forced: list[int]) -> None:
        if forced:
            # Before post(), which lets the event loop see them come back.
            self._unsampled += len(forced)
            self._history += forced
        if self._reasoning.may_begin and not self._is_free:
            self._reasoning.allow_begin(self.channel.address)
        self.channel.write(self._position, allows_all=self._is_free, forced=forced)
        self._position += len(forced)


_WORTH_FORCING = 2
"""Forced tokens come in a row of their own, for which a row in flight is given up."""


def _failed(matcher: LLMatcher) -> InvalidRequestError:
    return InvalidRequestError(f"{PARAM}: the grammar failed: {matcher.get_error()[:500]}", param=PARAM)


def _settle(outcome: asyncio.Future[T], result: T) -> None:
    if not outcome.done():
        outcome.set_result(result)


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

    async def run(self, call: Callable[[], T]) -> T:
        """``call()``, on one of the threads. Raises what it raises."""
        outcome: asyncio.Future[T] = self._loop.create_future()

        def work() -> None:
            result = call()
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_settle, outcome, result)

        def fail(error: AsyncEngineError) -> None:
            if not outcome.done():
                outcome.set_exception(error)

        self.submit(work, fail)
        return await outcome

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
