"""Any number of prompts through one engine: as many under way as keep it busy, and no overload."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Sequence
from typing import Literal

from asyncengine.api.checks import quoted
from asyncengine.api.outputs import Finished, RequestOutput
from asyncengine.api.request import Prompt, SamplingParams
from asyncengine.errors import AsyncEngineError, EngineOverloadedError, InvalidRequestError

MAX_CONCURRENCY = 65_536
_RETRY_S = 0.05
_AHEAD = 4
"""Results in order: for each prompt that may be under way, so many may be, or wait for an earlier one."""


class Many:
    """Any number of prompts, for an engine's method ``generate_many``."""

    def __init__(self, serving: Callable[[], object], health: Callable[[], str], max_num_seqs: int) -> None:
        """``serving`` raises EngineError unless an engine serves; ``max_num_seqs`` sequences run at the same time."""
        self._serving = serving
        self._health = health
        self._max_num_seqs = max_num_seqs

    def results(
        self,
        generate: Callable[[Prompt, SamplingParams | None], Awaitable[RequestOutput]],
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        concurrency: int | None,
        in_order: bool,
        errors: Literal["raise", "return"],
        progress: Callable[[int], None] | None,
    ) -> AsyncGenerator[Finished, None]:
        """See ``AsyncEngine.generate_many``. ``generate`` serves one prompt."""
        _check(concurrency, errors)
        self._serving()
        if concurrency is None:
            n = params.n if isinstance(params, SamplingParams) else 1
            concurrency = min(MAX_CONCURRENCY, max(2, self._max_num_seqs // n * 3 // 2))

        async def answer(position: int, prompt: Prompt, params: SamplingParams | None) -> Finished:
            while True:
                try:
                    return Finished(position, await generate(prompt, params))
                except EngineOverloadedError:  # others may have filled the queue
                    await asyncio.sleep(_RETRY_S)
                except AsyncEngineError as e:
                    if errors == "raise" or self._health() not in ("ready", "draining"):
                        raise
                    return Finished(position, None, e)

        return _Call(answer, prompts, params, concurrency).results(in_order, progress)


def _check(concurrency: object, errors: object) -> None:
    whole = isinstance(concurrency, int) and not isinstance(concurrency, bool)
    if concurrency is not None and not (whole and 1 <= concurrency <= MAX_CONCURRENCY):  # type: ignore[operator]
        raise InvalidRequestError(
            f"concurrency must be an integer in [1, {MAX_CONCURRENCY}], got {quoted(concurrency)}", param="concurrency"
        )
    if errors not in ("raise", "return"):
        raise InvalidRequestError(f"errors must be 'raise' or 'return', got {quoted(errors)}", param="errors")


class _Call:
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
