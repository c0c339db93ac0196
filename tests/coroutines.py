"""Coroutines of tests, run with a time limit; a test that does not end behind it says what it waits for."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")
CLEANUP_S = 30.0  # for what the limit ends


def run(
    coroutine: Coroutine[Any, Any, T],
    limit_s: float,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> T:
    """Run ``coroutine`` and return its result. Raises TimeoutError after ``limit_s``.

    Nothing limits the cleanup that the error begins, and no stack of a thread tells where a coroutine waits. So the
    stacks of all tasks are printed to standard error if there are some ``CLEANUP_S`` later.
    """

    async def limited() -> T:
        asyncio.get_running_loop().call_later(limit_s + CLEANUP_S, print_tasks)
        async with asyncio.timeout(limit_s):
            return await coroutine

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(limited())


def print_tasks() -> None:
    """Print the stacks of all tasks to standard error of the process, which pytest does not capture in its workers."""
    for task in asyncio.all_tasks():
        print(f"{task.get_name()} waits in", *waits_in(task.get_coro()), sep="\n  ", file=sys.__stderr__, flush=True)


def waits_in(awaited: Any) -> Iterator[str]:
    """Places of a coroutine and of what it awaits, from the outermost to the innermost."""
    while awaited is not None:
        if inspect.iscoroutine(awaited):
            frame, following = awaited.cr_frame, awaited.cr_await
        elif inspect.isgenerator(awaited):
            frame, following = awaited.gi_frame, awaited.gi_yieldfrom
        elif inspect.isasyncgen(awaited):
            frame, following = awaited.ag_frame, awaited.ag_await
        else:  # a future's iterator, or a step of an asynchronous generator, which has the generator nowhere else
            frame, following = None, next(filter(inspect.isasyncgen, gc.get_referents(awaited)), None)
            if following is None:
                yield repr(awaited)
        if frame is not None:
            yield f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        awaited = following
