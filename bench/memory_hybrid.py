"""The hybrid part of bench/memory.py: sequences that decode on the host, beside the best that the GPU does alone.

As many clients as --in-flight keep requests coming, the same ones in the same order for each way in turn; tokens are
counted in a window of --seconds once --warm-up is over, whether their request ends in it or not. For each pool and
context:

- GPU alone: recompute (no host tier), conservative (no host tier, and no more sequences than the pool holds to their
  end), swap (host tier);
- hybrid attention: auto; and always by workers, by the link, and by both.

Time per token is that of each request in the window, by classes: host if most of its tokens there were made while it
decoded on the host. Predictions of the table of costs are for a pool full of sequences of that context.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any, NamedTuple

from gpu_common import greedy, kv_bytes_per_token, opened, read_model

from asyncengine import AsyncEngine
from asyncengine.cli.benchmarks.report import Figure, median, percentile
from asyncengine.runner.costs.table import CostTable
from asyncengine.runner.loop_config import hybrid_gain

ALONE = ("recompute", "conservative", "swap")
HYBRID = ("auto", "workers", "link", "both")


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def add_hybrid_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hybrid")
    group.add_argument("--pools", type=lambda t: [float(w) for w in t.split(",")], default=[1, 2, 3.5, 8], help="GB")
    group.add_argument("--contexts", type=numbers, default=[2048, 8192], help="tokens of a request in mid-output")
    group.add_argument("--ways", type=lambda t: t.split(","), default=[*ALONE, "auto"])
    group.add_argument("--in-flight", type=int, default=192, help="requests, most of which wait")
    group.add_argument("--hybrid-output", type=int, default=1024, help="tokens of a request")
    group.add_argument("--hybrid-host-gb", type=float, default=40.0, help="of the host tier")
    group.add_argument("--hybrid-workers", type=int, help="threads that attend on the host")
    group.add_argument("--hybrid-lanes", type=int, help="rows of a step for those on the host")
    group.add_argument("--warm-up", type=float, default=15.0, help="seconds until sequences have found their places")
    group.add_argument("--seconds", type=float, default=20.0, help="that count")
    caches = "of keys and values, one after the other"
    group.add_argument("--kv-cache-dtype", nargs="+", choices=("auto", "fp8"), default=["auto"], help=caches)


def table_of(engine: AsyncEngine) -> CostTable | None:
    """Return the costs that the engine knows."""
    costs = engine._life.loaded().costs
    return None if costs is None else costs.table


def settings(args: argparse.Namespace, way: str, pool_gb: float, context: int, kv_cache_dtype: str) -> dict[str, Any]:
    pool, longest = int(pool_gb * 1e9), context + args.hybrid_output // 2
    rows = min(256, args.in_flight)
    if way == "conservative":
        rows = max(1, min(rows, pool // (longest * kv_bytes_per_token(read_model(args.model), kv_cache_dtype))))
    config: dict[str, Any] = {"kv_cache_memory_bytes": pool, "max_num_seqs": rows, "prefill_chunk_size": None}
    config |= {"kv_cache_dtype": kv_cache_dtype, "max_model_len": longest + 16}
    if way == "swap" or way in HYBRID:
        config["host_kv_memory_bytes"] = int(args.hybrid_host_gb * 1e9)
    if way in HYBRID:
        config |= {"hybrid_lanes": args.hybrid_lanes, "hybrid_workers": args.hybrid_workers}
        always = {"hybrid_attention": "always", "hybrid_form": way}
        config |= {"hybrid_attention": "auto"} if way == "auto" else always
    return config


# ---- one run ----


class Track:
    """Tokens of one request in the window."""

    def __init__(self) -> None:
        self.count = self.host = 0
        self.first = self.last = 0.0

    def add(self, at: float, count: int, host: int) -> None:
        if self.count == 0:  # those that came with the first are no time apart
            self.first, self.count, self.host = at, 1, min(host, 1)
        else:
            self.count, self.host = self.count + count, self.host + host
        self.last = at

    @property
    def place(self) -> str:
        return "host" if 2 * self.host > self.count else "device"

    @property
    def tpot_ms(self) -> float:
        return 1e3 * (self.last - self.first) / (self.count - 1)


class Sample(NamedTuple):
    tokens_per_s: float
    tpots: dict[str, list[float]]
    """milliseconds, by place"""
    host_rows: int
    """rows on the host in the end"""
    failed_host_rows: int
    foreseen: float | None
    """gain of hybrid attention, by the costs that the engine began with"""
    predicted: float | None
    """the same by its costs as they were learned meanwhile, which are kept"""


async def observe(engine: AsyncEngine, args: argparse.Namespace, context: int) -> Sample:
    rng, tracks = random.Random(context), list[Track]()
    prompt_len = max(1, context - args.hybrid_output // 2)
    window = [float("inf"), float("inf")]

    def prompts() -> Iterator[list[int]]:
        while True:
            yield rng.choices(range(engine.model_info.vocab_size), k=prompt_len)

    async def client(coming: Iterator[list[int]]) -> None:
        for prompt in coming:
            track = Track()
            tracks.append(track)
            async with aclosing(engine.stream(prompt, greedy(args.hybrid_output))) as stream:
                async for delta in stream:
                    if window[0] <= (now := time.monotonic()) < window[1] and delta.token_ids:
                        track.add(now, len(delta.token_ids), delta.host_tokens)

    coming = prompts()
    tasks = [asyncio.create_task(client(coming)) for _ in range(args.in_flight)]
    try:
        await asyncio.wait(tasks, timeout=args.warm_up, return_when=asyncio.FIRST_EXCEPTION)
        begin, window[0] = engine.stats(), time.monotonic()
        await asyncio.wait(tasks, timeout=args.seconds, return_when=asyncio.FIRST_EXCEPTION)
        end, window[1] = engine.stats(), time.monotonic()
        for task in tasks:
            if task.done():
                task.result()  # raises: they go on for ever
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    tpots: dict[str, list[float]] = {"device": [], "host": []}
    for track in tracks:
        if track.count > 1:
            tpots[track.place].append(track.tpot_ms)
    rate = (end.generation_tokens - begin.generation_tokens) / (window[1] - window[0])
    return Sample(rate, tpots, end.num_host_rows, end.failed_host_rows, *predicted_gains(engine, context))


def predicted_gains(engine: AsyncEngine, context: int) -> tuple[float | None, float | None]:
    """``Sample.foreseen`` and ``.predicted``, of a pool full of sequences of that context; None of unknown costs."""
    table = table_of(engine)
    if table is None or engine.config.hybrid_attention == "off":
        return None, None
    learned = table.corrected(engine._life.loaded().step_loop.stats())
    foreseen, predicted = (hybrid_gain(engine.config, engine.model_info, t, context)[1] for t in (table, learned))
    return foreseen, predicted


# ---- all of them ----


async def hybrid(args: argparse.Namespace) -> list[Figure]:
    if unknown := set(args.ways) - {*ALONE, *HYBRID}:
        raise SystemExit(f"--ways: {', '.join(sorted(unknown))}: choose among {', '.join((*ALONE, *HYBRID))}")
    figures = []
    for pool, dtype in itertools.product(args.pools, args.kv_cache_dtype):
        held = pool * 1e9 / kv_bytes_per_token(read_model(args.model), dtype)
        contexts = sorted(n for n in args.contexts if held >= n + args.hybrid_output // 2 + 32)
        for context in sorted(set(args.contexts) - set(contexts)):
            print(f"{name_of(pool, dtype, context)}: left out, as the pool does not hold one sequence")
        samples: dict[int, dict[str, list[Sample]]] = {n: {way: [] for way in args.ways} for n in contexts}
        for _, way in itertools.product(range(args.repeats), args.ways):
            # The number of sequences depends on the context only with "conservative": with the others contexts share an
            # engine.
            for some in [[n] for n in contexts] if way == "conservative" else [contexts]:
                await observe_all(args, way, pool, dtype, some, samples)
        for context in contexts:
            figures += summarize(name_of(pool, dtype, context), samples[context])
    return figures


def name_of(pool: float, dtype: str, context: int) -> str:
    return f"{pool:g} GB{', float8 KV' if dtype == 'fp8' else ''}, {context:,}"


async def observe_all(
    args: argparse.Namespace, way: str, pool: float, dtype: str, contexts: list[int],
    samples: dict[int, dict[str, list[Sample]]],
) -> None:  # fmt: skip
    """Add samples to ``samples``, by context and way."""
    if not contexts:
        return
    async with opened(args.model, args, **settings(args, way, pool, contexts[-1], dtype)) as engine:
        for context in contexts:
            sample = await observe(engine, args, context)
            samples[context][way].append(sample)
            print(f"{name_of(pool, dtype, context)}: {way}: {sample.tokens_per_s:,.0f} tok/s", flush=True)


def summarize(name: str, samples: dict[str, list[Sample]]) -> list[Figure]:
    """Ratios are those of medians over the repeats; the best way of the GPU alone is what it is over all of them."""
    rates = {way: median([s.tokens_per_s for s in of_way]) for way, of_way in samples.items()}
    alone = [way for way in ALONE if way in rates]
    best = max(alone, key=lambda way: rates[way]) if alone else None
    figures = [Figure(f"{name}: {way}", rate, "tok/s") for way, rate in rates.items()]
    for way, of_way in samples.items():
        figures += _times(f"{name}: {way}", of_way)
        if way not in HYBRID or best is None:
            continue
        gain = rates[way] / rates[best] - 1
        figures.append(Figure(f"{name}: {way} over {best}", 1 + gain, "x", at_least=0.98))
        if foreseen := [s.foreseen for s in of_way if s.foreseen is not None]:
            figures.append(Figure(f"{name}: {way}: gain predicted at the start", 100 * median(foreseen), "%"))
        predictions = [s.predicted for s in of_way if s.predicted is not None]
        if predictions:
            predicted = median(predictions)
            figures.append(Figure(f"{name}: {way}: predicted gain", 100 * predicted, "%"))
            if predicted > 0:
                figures.append(Figure(f"{name}: {way}: of the predicted gain", gain / predicted, "x", at_least=0.85))
        here, there = _tpots(of_way, "device"), _tpots(samples[best], "device")
        if here and there:
            ratio = median(here) / median(there)
            figures.append(Figure(f"{name}: {way}: TPOT p50 on the device over {best}", ratio, "x", at_most=1.05))
        figures.append(Figure(f"{name}: {way}: sequences on the host", median([s.host_rows for s in of_way]), ""))
        if failed := sum(s.failed_host_rows for s in of_way):
            figures.append(Figure(f"{name}: {way}: attention that failed", failed, "", at_most=0))
    return figures


def _times(name: str, samples: list[Sample]) -> list[Figure]:
    figures = []
    for place in ("device", "host"):
        if ms := _tpots(samples, place):
            figures += [Figure(f"{name}: TPOT p{p}, {place}", percentile(ms, p), "ms") for p in (50, 90, 99)]
    return figures


def _tpots(samples: list[Sample], place: str) -> list[float]:
    return [ms for sample in samples for ms in sample.tpots[place]]
