"""A long prompt beside streams: their inter-token time, and the prompt's time, without a target and with one.

    python bench/long_prompt.py [--model llama-3.1-8b] [--prompt 100000] [--streams 16] [--target 20] [--repeats 3]
        [--json FILE]

One engine without a target and one with --target-itl-ms are open at the same time; in each repeat they take turns. A
turn: the prompt alone; then streams decode for a while; then the prompt comes beside them, until its first token. Times
are those at which the step thread committed the tokens of the streams. A delivery of several tokens counts as so many
equal times; how many such there were is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple

from gpu_common import add_engine_options, greedy, opened, random_prompts

from asyncengine import AsyncEngine, _core, testing
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median, percentile
from asyncengine.cli.embed import loop_factory
from asyncengine.engine.stream import RequestStream

STREAM_PROMPT = 128
ROOM = 4096
"""Tokens that a stream may have: more than it gets."""
MOST_OVER_TARGET = 1.1
MOST_LOSS = 35.0
"""Percent of its time that the prompt may lose to a target."""
NO_TARGET = "no target"


class Turn(NamedTuple):
    """Times of one run of an engine. Seconds, but for inter-token times."""

    alone_s: float
    beside_s: float
    decode_ms: list[float]
    """between tokens of the streams while nothing else ran"""
    beside_ms: list[float]
    """and while the prompt did"""
    crowded: int
    """deliveries of several tokens meanwhile"""


_PERCENTILES = (1, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)


def summary(turn: Turn) -> dict[str, Any]:
    """A turn for the record: percentiles in place of some ten thousand times between tokens."""
    fields = turn._asdict()
    for name in ("decode_ms", "beside_ms"):
        fields[name] = {f"p{p:g}": round(percentile(fields[name], p), 4) for p in _PERCENTILES}
    return fields


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape or a directory (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=100_000, help="tokens (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--target", type=float, default=20.0, help="milliseconds (default: %(default)s)")
    parser.add_argument("--decode-s", type=float, default=1.0, help="for which streams run alone")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", default="bench/results/long_prompt.json")
    add_engine_options(parser)
    args = parser.parse_args()
    args.max_model_len = max(args.prompt, STREAM_PROMPT + ROOM) + 64
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        turns = runner.run(work(args))
    figures = summarize(turns, args.target)
    report.print_figures(
        f"A prompt of {args.prompt} tokens beside {args.streams} streams of {args.model} (medians of {args.repeats})",
        figures,
    )
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    results = {name: [summary(turn) for turn in some] for name, some in turns.items()}
    report.write(
        args.json, report.record("long_prompt", figures, repeats=args.repeats, settings=settings, results=results)
    )


async def work(args: argparse.Namespace) -> dict[str, list[Turn]]:
    tokens = args.max_model_len + args.streams * (STREAM_PROMPT + ROOM)
    config = {
        "max_num_seqs": max(32, args.streams + 1),
        "num_kv_blocks": -(-tokens // 16) + 64,
        "enable_prefix_caching": False,
    }
    variants: dict[str, dict[str, Any]] = {NO_TARGET: {}, "target": {"target_itl_ms": args.target}}
    rng = random.Random(0)
    turns: dict[str, list[Turn]] = {name: [] for name in variants}
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(opened(args.model, args, **config | more))
            for name, more in variants.items()
        }
        for repeat in range(args.repeats + 1):
            for name, engine in engines.items():
                turn = await take_turn(engine, rng, args)
                await testing.settle(engine)
                if repeat > 0:  # the first one is not counted: clocks rise, costs are learned
                    turns[name].append(turn)
                    print_turn(name, turn)
    return turns


async def take_turn(engine: AsyncEngine, rng: random.Random, args: argparse.Namespace) -> Turn:
    alone_s = await run_prompt(engine, rng, args.prompt)
    prompts = random_prompts(rng, engine, args.streams, STREAM_PROMPT)
    tasks = [asyncio.create_task(engine.generate(prompt, greedy(ROOM))) for prompt in prompts]
    try:
        deliveries = await follow(engine, args.streams)
        begun_ns = time.monotonic_ns()
        await asyncio.sleep(args.decode_s)
        middle_ns = time.monotonic_ns()
        beside_s = await run_prompt(engine, rng, args.prompt)
        end_ns = time.monotonic_ns()
        if any(task.done() for task in tasks):
            raise SystemExit("a stream ended before the prompt did: its room is too small")
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
    decode_ms, _ = intervals(deliveries, begun_ns, middle_ns)
    beside_ms, crowded = intervals(deliveries, middle_ns, end_ns)
    return Turn(alone_s, beside_s, decode_ms, beside_ms, crowded)


async def run_prompt(engine: AsyncEngine, rng: random.Random, length: int) -> float:
    """Seconds until its first token."""
    (prompt,) = random_prompts(rng, engine, 1, length)
    started = time.perf_counter()
    await engine.generate(prompt, greedy(1))
    return time.perf_counter() - started


Delivery = tuple[int, int]
"""Tokens, and when the step thread committed the last of them, in nanoseconds."""


async def follow(engine: AsyncEngine, count: int) -> list[list[Delivery]]:
    """Record the deliveries that ``count`` streams get from now on, once all of them decode."""
    streams: list[RequestStream] = []
    while len(streams) < count or not all(len(s._sequences[0].token_ids) >= 2 for s in streams):
        await asyncio.sleep(0.001)
        streams = list(engine._life.requests)
    return [_record(stream) for stream in streams]


def _record(stream: RequestStream) -> list[Delivery]:
    deliveries: list[Delivery] = []
    feed = stream.feed

    def recording(news: _core.SequenceNews) -> None:
        deliveries.append((len(news.tokens), news.last_ns))
        feed(news)

    stream.feed = recording  # type: ignore[method-assign]
    return deliveries


def intervals(streams: Sequence[Sequence[Delivery]], begin_ns: int, end_ns: int) -> tuple[list[float], int]:
    """Milliseconds between tokens committed in that time, and how many deliveries brought several."""
    found: list[float] = []
    crowded = 0
    for deliveries in streams:
        for (_, before_ns), (tokens, last_ns) in itertools.pairwise(deliveries):
            if tokens > 0 and begin_ns <= last_ns <= end_ns:
                found += [(last_ns - before_ns) / 1e6 / tokens] * tokens
                crowded += tokens > 1
    return found, crowded


# ---- the report ----


def summarize(turns: Mapping[str, Sequence[Turn]], target: float) -> list[Figure]:
    figures = []
    beside = {name: median([turn.beside_s for turn in some]) for name, some in turns.items()}
    for name, some in turns.items():
        label = NO_TARGET if name == NO_TARGET else f"target {target:g} ms"
        goal = None if name == NO_TARGET else MOST_OVER_TARGET * target
        figures += [
            Figure(f"{label}: streams alone, p50", median([percentile(t.decode_ms, 50) for t in some]), "ms"),
            Figure(f"{label}: beside the prompt, p50", median([percentile(t.beside_ms, 50) for t in some]), "ms"),
            Figure(f"{label}: beside the prompt, p99", median([percentile(t.beside_ms, 99) for t in some]), "ms", goal),
            Figure(f"{label}: the prompt alone", median([t.alone_s for t in some]), "s"),
            Figure(f"{label}: the prompt beside streams", beside[name], "s"),
        ]
    loss = 100 * (beside["target"] / beside[NO_TARGET] - 1)
    return [*figures, Figure("what the prompt loses to the target", loss, "%", MOST_LOSS)]


def print_turn(name: str, turn: Turn) -> None:
    p50, p99 = (percentile(turn.beside_ms, p) for p in (50, 99))
    decode = percentile(turn.decode_ms, 50)
    print(
        f"{name:<10} streams alone {decode:6.2f} ms, beside the prompt p50 {p50:6.2f} p99 {p99:6.2f} ms "
        f"({turn.crowded} deliveries of several); prompt alone {turn.alone_s:.2f} s, beside {turn.beside_s:.2f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
