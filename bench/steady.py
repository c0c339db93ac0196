"""Step time of an engine while a batch of requests decodes: no prompt is computed, and no request ends.

Times are those at which the step thread committed the tokens of one request, by its own clock: one token is one step,
so a late event loop and the moment of looking do not blur the figure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from asyncengine import AsyncEngine, _core
from asyncengine.engine.stream import RequestStream

T = TypeVar("T")
_SKIP_TOKENS = 16
"""Left out at the beginning: the last prompts have just been computed."""


class Point(NamedTuple):
    """A delivery to the request that is followed."""

    tokens: int
    """tokens that the stream has got so far"""
    committed_ns: int
    """time at which the step thread committed the last token"""


@dataclass(frozen=True, slots=True)
class Window:
    """Figures of the time between the first and the last Point that count."""

    steps: int
    step_us: float
    contexts: list[int]
    """Tokens of KV before each row's query, in the middle of the window."""
    deliveries: int
    """Deliveries of one request: fewer than steps if the loop fell behind."""

    @property
    def tokens_per_s(self) -> float:
        return len(self.contexts) / self.step_us * 1e6


def make_window(points: Sequence[Point], lengths: Sequence[int], followed: int, prompt_len: int) -> Window:
    """``lengths``: tokens that each row's request had when ``points`` began and the followed one had ``followed``.

    Raises ValueError if there is too little between the points.
    """
    counted = [p for p in points if p.tokens >= followed + _SKIP_TOKENS]
    if len(counted) < 2:
        raise ValueError("no steady window: ask for more tokens")
    first, last = counted[0], counted[-1]
    steps = last.tokens - first.tokens
    # The step that gives token k takes token k - 1 as its input, so prompt + k - 2 tokens precede it.
    middle = prompt_len + (first.tokens + 1 + last.tokens) / 2 - 2
    return Window(
        steps=steps,
        step_us=(last.committed_ns - first.committed_ns) / steps / 1e3,
        contexts=[round(middle + length - followed) for length in lengths],
        deliveries=len(counted) - 1,
    )


async def observe(engine: AsyncEngine, batch: int, load: Awaitable[T]) -> tuple[Window, T]:
    """Run ``load``, which makes ``batch`` requests of prompts of one length, and look at them while all decode.

    SystemExit if that never comes about.
    """
    loading = asyncio.ensure_future(load)
    watching = asyncio.create_task(_watch(engine, batch))
    await asyncio.wait((loading, watching), return_when=asyncio.FIRST_COMPLETED)
    if not watching.done():
        watching.cancel()
        await loading  # its own failure comes first
        raise SystemExit(f"{batch} requests never decoded at the same time for long: ask for more tokens")
    return watching.result(), await loading


async def _watch(engine: AsyncEngine, batch: int) -> Window:
    streams: list[RequestStream] = []
    while len(streams) < batch or not all(_generated(s) for s in streams):
        await asyncio.sleep(0.001)
        streams = list(engine._life.requests)
    # All of a step's tokens are delivered together, so these belong to one step.
    lengths = [_generated(stream) for stream in streams]
    oldest = max(streams, key=_generated)  # the first to end
    followed, prompt_len = _generated(oldest), len(oldest.prompt_token_ids)
    try:
        return make_window(await _follow(oldest), lengths, followed, prompt_len)
    except ValueError as e:
        raise SystemExit(str(e)) from None


async def _follow(stream: RequestStream) -> list[Point]:
    """Deliveries to ``stream`` until its end."""
    points: list[Point] = []
    ended = asyncio.get_running_loop().create_future()
    feed, tokens_before = stream.feed, _generated(stream)

    def recording(news: _core.SequenceNews) -> None:
        have = (points[-1].tokens if points else tokens_before) + len(news.tokens)
        points.append(Point(have, news.last_ns))
        if news.finish is not _core.FinishReason.none and not ended.done():
            ended.set_result(None)
        feed(news)

    stream.feed = recording  # type: ignore[method-assign]
    await ended
    return points


def _generated(stream: RequestStream) -> int:
    return len(stream._sequences[0].token_ids)
