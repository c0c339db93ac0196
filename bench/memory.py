"""More context than the GPU holds: what the host keeps of prefixes and sequences, beside computing it again.

    python bench/memory.py [--model llama-3.1-8b] [--pool-gb 8] [--host-gb 24] [--disk DIR] [--repeats 3] [--json FILE]
    python bench/memory.py --only hybrid [--pools 1,2,3.5,8] [--contexts 2048,8192] [--kv-cache-dtype auto fp8]

The GPU's KV pool is capped, so a figure says "pool of N GB on" the card that ran it. Where the engine's table of costs
foretells a figure, the prediction is printed beside it.

- prefix: time to the first token of a long prompt that is computed, that the pool still holds, and that other prompts
  have evicted to the host, and with --disk from there to the disk (whose files the system may have in its own cache).
- pressure: many requests whose outputs outgrow the pool, so that sequences are preempted: tokens per second with the
  host tier and without, in turn.
- resume: a sequence is preempted and another prompt overwrites its blocks; time from the end of that until the
  sequence's next token, by copies from the host and by computing again.
- hybrid (memory_hybrid.py): decoding with the keys and values of some sequences on the host. Only if it is named.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from gpu_common import SHAPES, add_engine_options, greedy, opened, random_prompts
from memory_hybrid import add_hybrid_options, hybrid, numbers, table_of

from asyncengine import AsyncEngine
from asyncengine.api.stats import EngineStats
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median
from asyncengine.cli.embed import loop_factory

# Tokens of the sequence that is preempted, and of the other sequence, whose output makes that happen.
_VICTIM_TOKENS, _GROWER_PROMPT, _GROWER_TOKENS, _ROOM = 200, 16, 160, 272
_TRIES = 4  # to evict a prompt: a tier may keep it by chance
_WHOLE = 0.95  # of its tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b", help=f"of {', '.join(SHAPES)}, or a directory")
    parser.add_argument("--pool-gb", type=float, default=8.0, help="of the GPU's memory for keys and values")
    parser.add_argument("--host-gb", type=float, default=24.0, help="of the host tier")
    parser.add_argument("--disk", help="a directory for a third tier")
    parser.add_argument("--prefix", type=int, default=32768, help="tokens")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each of these")
    parser.add_argument("--output", type=int, default=1024, help="tokens of each of these")
    parser.add_argument("--resumed", type=numbers, default=[4096, 16384], help="tokens of what is preempted")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS))
    parser.add_argument("--json", default="bench/results/memory.json")
    add_engine_options(parser)
    add_hybrid_options(parser)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        names = args.only or [name for name in PARTS if name != "hybrid"]
        figures = [figure for name in names for figure in runner.run(PARTS[name](args))]
    pools = f"Pool of {args.pool_gb:g} GB" if names != ["hybrid"] else "Pools"
    report.print_figures(f"{pools}, host tier, {args.model}", figures)
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    report.write(args.json, report.record("memory", figures, repeats=args.repeats, settings=settings, results={}))


def settings(args: argparse.Namespace, longest: int, *, host: bool) -> dict[str, Any]:
    """``longest``: tokens of a request, which the pool must hold."""
    pool = {"kv_cache_memory_bytes": int(args.pool_gb * 1e9), "max_num_seqs": 64, "prefill_chunk_size": None}
    pool["max_model_len"] = longest
    tier = {"host_kv_memory_bytes": int(args.host_gb * 1e9)} if host else {}
    return pool | tier | ({"disk_kv_path": args.disk} if host and args.disk else {})


def predicted_ms(engine: AsyncEngine, tokens: int, *, copied: bool) -> float | None:
    """Predict the time until the next token of a sequence of ``tokens``, copied from the host or computed; None if
    costs are not known."""
    table = table_of(engine)
    if table is None:
        return None
    costs, info = table.native(), engine.model_info
    if not copied:
        return costs.recompute_ns(tokens, 0) / 1e6
    copy_ns = costs.copy_ns(tokens // info.block_size * info.kv_bytes_per_block, True)
    return (copy_ns + costs.decode_ns(1, tokens)) / 1e6 if copy_ns else None


def with_prediction(name: str, ms: list[float], predicted: float | None) -> list[Figure]:
    measured = Figure(name, median(ms), "ms")
    return [measured] if predicted is None else [measured, Figure(f"{name}: predicted", predicted, "ms")]


# ---- prefix ----


async def first_token(engine: AsyncEngine, prompt: list[int]) -> float:
    """Milliseconds from the request to its only token."""
    start = time.perf_counter()
    await engine.generate(prompt, greedy(1))
    return 1e3 * (time.perf_counter() - start)


async def prefix(args: argparse.Namespace) -> list[Figure]:
    async with opened(args.model, args, **settings(args, args.prefix + 16, host=True)) as engine:
        return await measure_prefix(engine, args)


async def measure_prefix(engine: AsyncEngine, args: argparse.Namespace) -> list[Figure]:
    times: dict[str, list[float]] = {"computed": [], "on the GPU": [], "from the host": []}
    if args.disk:
        times["from the disk"] = []
    rng = random.Random(0)
    await first_token(engine, random_prompts(rng, engine, 1, args.prefix)[0])  # not counted
    for _ in range(args.repeats):
        [prompt] = random_prompts(rng, engine, 1, args.prefix)
        times["computed"].append(await first_token(engine, prompt))
        times["on the GPU"].append(await first_token(engine, prompt))
        for name in list(times)[2:]:
            times[name].append(await evicted_first_token(engine, rng, prompt, name))
    computed = median(times["computed"])
    predictions = {"computed": False, "from the host": True}
    figures = []
    for name, ms in times.items():
        predicted = predicted_ms(engine, args.prefix, copied=predictions[name]) if name in predictions else None
        figures += with_prediction(f"first token of {args.prefix:,}, {name}", ms, predicted)
    limits = {"from the host": 0.15, "from the disk": 0.4}
    ratios = {name: median(times[name]) / computed for name in limits if name in times}
    return figures + [Figure(f"of computing it, {name}", r, "x", at_most=limits[name]) for name, r in ratios.items()]


async def evicted_first_token(engine: AsyncEngine, rng: random.Random, prompt: list[int], place: str) -> float:
    """``first_token`` of a prompt that others have evicted to ``place``, from where nearly all of it comes.

    The others come as fast as the tiers take what they evict.
    """
    for _ in range(_TRIES):
        await settled(engine)
        for other in random_prompts(rng, engine, evictors(engine, len(prompt), place), len(prompt)):
            await first_token(engine, other)
            before = await settled(engine)
        ms = await first_token(engine, prompt)
        now = engine.stats()
        from_disk = now.blocks_from_disk - before.blocks_from_disk
        from_host = now.blocks_from_host - before.blocks_from_host - from_disk  # what the disk gives comes by the host
        came = from_host if place == "from the host" else from_disk
        if came * engine.model_info.block_size >= _WHOLE * len(prompt):
            return ms
    raise SystemExit(f"too little came {place}: the pool is too large, or the tier too small")


async def settled(engine: AsyncEngine) -> EngineStats:
    """Wait until no more blocks go to the host or the disk: one that is evicted before is not there."""
    before, now = None, engine.stats()
    while before is None or (before.blocks_to_host, before.blocks_to_disk) != (now.blocks_to_host, now.blocks_to_disk):
        await asyncio.sleep(0.1)
        before, now = now, engine.stats()
    return now


def evictors(engine: AsyncEngine, length: int, place: str) -> int:
    """Prompts of this length that fill the pool; and the host tier too, where the disk is the place."""
    info = engine.model_info
    host = engine.stats().num_host_blocks * info.block_size if place == "from the disk" else 0
    return (info.kv_capacity_tokens + host) // length + 1


# ---- pressure ----


async def pressure(args: argparse.Namespace) -> list[Figure]:
    rates: dict[str, list[float]] = {"computed again": [], "host tier": []}
    preemptions: dict[str, float] = {}
    for _ in range(args.repeats):
        for name in rates:
            config = settings(args, args.prompt + args.output, host=name == "host tier")
            async with opened(args.model, args, **config) as engine:
                prompts = random_prompts(random.Random(1), engine, args.requests, args.prompt)
                await engine.generate(prompts[0][:64], greedy(8))
                start = time.perf_counter()
                await asyncio.gather(*(engine.generate(prompt, greedy(args.output)) for prompt in prompts))
                rates[name].append(args.requests * args.output / (time.perf_counter() - start))
                preemptions[name] = engine.stats().num_preemptions
    figures = [
        Figure(f"{args.requests} requests under pressure, {name}", median(r), "tok/s") for name, r in rates.items()
    ]
    figures += [Figure(f"preemptions, {name}", count, "") for name, count in preemptions.items()]
    return [
        *figures,
        Figure("host tier over computing again", median(rates["host tier"]) / median(rates["computed again"]), "x"),
    ]


# ---- resume ----


async def resume(args: argparse.Namespace) -> list[Figure]:
    figures = []
    for context in args.resumed:
        times: dict[bool, list[float]] = {False: [], True: []}
        predictions: dict[bool, float | None] = {}
        for host in times:
            pool = {"num_kv_blocks": -(-(context + _ROOM) // 16), "block_size": 16}
            async with opened(args.model, args, **settings(args, context + _ROOM, host=host) | pool) as engine:
                for repeat in range(args.repeats + 1):
                    ms = await resume_ms(engine, random.Random(repeat), context)
                    times[host] += [ms] if repeat else []  # the first one warms up
                if host:
                    grown = context + (_ROOM - _GROWER_PROMPT) // 2
                    predictions = {copied: predicted_ms(engine, grown, copied=copied) for copied in (False, True)}
        for host, ms_of in times.items():
            how = "copied from the host" if host else "computed again"
            figures += with_prediction(f"next token of {context:,} when resumed, {how}", ms_of, predictions[host])
        ratio = median(times[True]) / median(times[False])
        figures.append(Figure(f"copied over computed again, {context:,}", ratio, "x"))
    return figures


async def resume_ms(engine: AsyncEngine, rng: random.Random, context: int) -> float:
    """Milliseconds from the end of the prompt that overwrote a preempted sequence until its next token.

    The pool holds ``context + _ROOM`` tokens: two outputs grow until the one of lower priority is preempted. A prompt
    of nearly the whole pool waits for the other's end, and has its turn before the preempted one.
    """
    [victim], [grower] = random_prompts(rng, engine, 1, context), random_prompts(rng, engine, 1, _GROWER_PROMPT)
    [evictor] = random_prompts(rng, engine, 1, context + _ROOM - 16)
    before = engine.stats().num_preemptions
    async with aclosing(engine.stream(victim, greedy(_VICTIM_TOKENS), priority=9)) as stream:
        await anext(stream)
        growing = asyncio.create_task(engine.generate(grower, greedy(_GROWER_TOKENS)))
        overwriting = asyncio.create_task(engine.generate(evictor, greedy(1)))
        came = [time.monotonic() async for _ in stream]
    await growing
    overwritten = (await overwriting).timing.finished
    later = [at for at in came if at > overwritten]
    if engine.stats().num_preemptions == before or not later:
        raise SystemExit("the sequence was not preempted, or not before the other prompt ended")
    return 1e3 * (later[0] - overwritten)


PARTS: dict[str, Callable[[argparse.Namespace], Coroutine[Any, Any, list[Figure]]]] = {
    "prefix": prefix,
    "pressure": pressure,
    "resume": resume,
    "hybrid": hybrid,
}


if __name__ == "__main__":
    main()
