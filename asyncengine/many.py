"""Any number of prompts through one engine: as many under way as keep it busy, and no overload."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Literal, NamedTuple

from asyncengine.checks import quoted
from asyncengine.config import EngineConfig
from asyncengine.errors import AsyncEngineError, EngineOverloadedError, InvalidRequestError
from asyncengine.request import Prompt, RequestOutput, SamplingParams

MAX_CONCURRENCY = 65_536
_RETRY_S = 0.05
_AHEAD = 4
"""Results in order: for each prompt that may be under way, so many may be, or wait for an earlier one."""


class Finished(NamedTuple):
    """The result of one prompt of ``AsyncEngine.generate_many``."""

    position: int
    """Place of the prompt among the prompts, from 0."""
    output: RequestOutput | None
    """Output of the prompt; None where ``error`` says why there is none."""
    error: AsyncEngineError | None = None


class ManyMethods(ABC):
    """The engine's method for many prompts."""

    config: EngineConfig

    @property
    @abstractmethod
    def health(self) -> str:
        """ready while requests are served."""

    @abstractmethod
    def _serving(self) -> object:
        """Raises EngineClosedError and EngineDeadError where no request is served."""

    @abstractmethod
    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> RequestOutput:
        """Generate for one prompt."""

    async def generate_many(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        concurrency: int | None = None,
        in_order: bool = False,
        errors: Literal["raise", "return"] = "raise",
        progress: Callable[[int], None] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> AsyncGenerator[Finished, None]:
        """Generate for any number of prompts, and give each result when it is there.

            async for position, output, error in engine.generate_many(prompts, params):

        Prompts are taken as there is room, so they may come from a generator without an end. ``params`` are those of
        all prompts, or one for each. ``concurrency`` prompts are under way at most; None: as many as keep the engine
        busy. The engine's queue never overflows: a prompt waits until others have left it. ``in_order`` gives results
        in the order of the prompts. ``errors="return"`` gives a prompt's error in place of its output, where "raise"
        ends the loop. ``progress`` is called with the count of results so far. Leaving the loop aborts the rest
        (``contextlib.aclosing`` does it at once). Other arguments and errors are those of ``submit``.
        """
        _check(concurrency, errors)
        self._serving()
        if concurrency is None:
            n = params.n if isinstance(params, SamplingParams) else 1
            concurrency = min(MAX_CONCURRENCY, max(2, self.config.max_num_seqs // n * 3 // 2))

        async def answer(position: int, prompt: Prompt, params: SamplingParams | None) -> Finished:
            while True:
                try:
                    return Finished(
                        position,
                        await self.generate(prompt, params, priority=priority, cache_salt=cache_salt, tenant=tenant),
                    )
                except EngineOverloadedError:  # others may have filled the queue
                    await asyncio.sleep(_RETRY_S)
                except AsyncEngineError as e:
                    if errors == "raise" or self.health not in ("ready", "draining"):
                        raise
                    return Finished(position, None, e)

        async with aclosing(_Many(answer, prompts, params, concurrency).results(in_order, progress)) as results:
            async for finished in results:
                yield finished


def _check(concurrency: object, errors: object) -> None:
    whole = isinstance(concurrency, int) and not isinstance(concurrency, bool)
    if concurrency is not None and not (whole and 1 <= concurrency <= MAX_CONCURRENCY):  # type: ignore[operator]
        raise InvalidRequestError(
            f"concurrency must be an integer in [1, {MAX_CONCURRENCY}], got {quoted(concurrency)}", param="concurrency"
        )
    if errors not in ("raise", "return"):
        raise InvalidRequestError(f"errors must be 'raise' or 'return', got {quoted(errors)}", param="errors")


class _Many:
    """One call of ``generate_many``: workers take prompts, and results come back through a queue."""

    def __init__(
        self,
        answer: Callable[[int, Prompt, SamplingParams | None], Awaitable[Finished]],
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        concurrency: int,
    ) -> None:
        self._answer = answer
        self._prompts = _each(prompts)
        self._params = params
        self._concurrency = concurrency
        self._room = asyncio.Semaphore(_AHEAD * concurrency)
        self._taking = asyncio.Lock()  # a generator answers one caller at a time
        self._next = 0
        self._ended = False
        self._finished: asyncio.Queue[Finished | BaseException | None] = asyncio.Queue()

    async def results(self, in_order: bool, progress: Callable[[int], None] | None) -> AsyncGenerator[Finished, None]:
        """Results as they come, or in the order of the prompts."""
        workers = [asyncio.ensure_future(self._work()) for _ in range(self._concurrency)]
        waiting: dict[int, Finished] = {}
        count = given = 0
        working = len(workers)
        try:
            while working:
                found = await self._finished.get()
                if found is None:
                    working -= 1
                    continue
                if isinstance(found, BaseException):
                    raise found
                waiting[found.position if in_order else count] = found
                count += 1
                if progress is not None:
                    progress(count)
                while (ready := waiting.pop(given, None)) is not None:
                    given += 1
                    self._room.release()
                    yield ready
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await self._prompts.aclose()

    async def _work(self) -> None:
        try:
            while (taken := await self._take()) is not None:
                self._finished.put_nowait(await self._answer(*taken))
        except asyncio.CancelledError:
            raise
        except BaseException as e:
            self._finished.put_nowait(e)
        else:
            self._finished.put_nowait(None)

    async def _take(self) -> tuple[int, Prompt, SamplingParams | None] | None:
        """The next prompt, None behind the last one."""
        await self._room.acquire()
        async with self._taking:
            if self._ended:
                self._room.release()
                return None
            try:
                prompt = await anext(self._prompts)
            except StopAsyncIteration:
                self._ended = True
                self._room.release()
                return None
            position, self._next = self._next, self._next + 1
        if self._params is None or isinstance(self._params, SamplingParams):
            return position, prompt, self._params
        if position >= len(self._params):
            raise InvalidRequestError(f"there are {len(self._params)} params and more prompts", param="params")
        return position, prompt, self._params[position]


async def _each(prompts: Iterable[Prompt] | AsyncIterable[Prompt]) -> AsyncGenerator[Prompt, None]:
    if isinstance(prompts, AsyncIterable):
        async for prompt in prompts:
            yield prompt
        return
    for prompt in prompts:
        yield prompt
