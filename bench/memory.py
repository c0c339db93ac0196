"""More context than the GPU holds: what the host tier keeps of prefixes and sequences, beside computing it again.

    python bench/memory.py [--model llama-3.1-8b] [--pool-gb 8] [--host-gb 24] [--repeats 3] [--json FILE]

The GPU's KV pool is capped, so a figure says "pool of N GB on" the card that ran it.

- prefix: time to the first token of a long prompt that is computed, that the pool still holds, and that other prompts
  have evicted to the host.
- pressure: many requests whose outputs outgrow the pool, so that sequences are preempted: tokens per second with the
  host tier and without, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

from gpu_common import SHAPES, add_engine_options, greedy, opened, random_prompts

from asyncengine import AsyncEngine
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median
from asyncengine.cli.embed import loop_factory


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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("prefix", "pressure"))
    parser.add_argument("--json", default="bench/results/memory.json")
    add_engine_options(parser)
    parser.set_defaults(max_model_len=65536)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        figures = [] if args.only == "pressure" else runner.run(prefix(args))
        figures += [] if args.only == "prefix" else runner.run(pressure(args))
    report.print_figures(f"Pool of {args.pool_gb:g} GB, host tier of {args.host_gb:g} GB, {args.model}", figures)
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    report.write(args.json, report.record("memory", figures, repeats=args.repeats, settings=settings, results={}))


def settings(args: argparse.Namespace, *, host: bool) -> dict[str, Any]:
    pool = {"kv_cache_memory_bytes": int(args.pool_gb * 1e9), "max_num_seqs": 64, "prefill_chunk_size": None}
    tier = {"host_kv_memory_bytes": int(args.host_gb * 1e9)} if host else {}
    return pool | tier | ({"disk_kv_path": args.disk} if host and args.disk else {})


# ---- prefix ----


async def first_token(engine: AsyncEngine, prompt: list[int]) -> float:
    """Milliseconds from the request to its only token."""
    start = time.perf_counter()
    await engine.generate(prompt, greedy(1))
    return 1e3 * (time.perf_counter() - start)


async def prefix(args: argparse.Namespace) -> list[Figure]:
    times: dict[str, list[float]] = {"computed": [], "on the GPU": [], "from the host": []}
    async with opened(args.model, args, **settings(args, host=True)) as engine:
        rng = random.Random(0)
        await first_token(engine, random_prompts(rng, engine, 1, args.prefix)[0])  # not counted
        for _ in range(args.repeats):
            [prompt] = random_prompts(rng, engine, 1, args.prefix)
            times["computed"].append(await first_token(engine, prompt))
            times["on the GPU"].append(await first_token(engine, prompt))
            before = engine.stats().blocks_from_host
            for other in random_prompts(rng, engine, evictors(engine, args.prefix), args.prefix):
                await first_token(engine, other)
            times["from the host"].append(await first_token(engine, prompt))
            if engine.stats().blocks_from_host == before:
                raise SystemExit("nothing came from the host: the pool is too large, or the host tier too small")
    computed = median(times["computed"])
    figures = [Figure(f"first token of {args.prefix:,}, {name}", median(ms), "ms") for name, ms in times.items()]
    ratio = Figure("of computing it, from the host", median(times["from the host"]) / computed, "x")
    return [*figures, ratio]


def evictors(engine: AsyncEngine, length: int) -> int:
    """Prompts of this length that fill the pool."""
    return engine.model_info.kv_capacity_tokens // length + 1


# ---- pressure ----


async def pressure(args: argparse.Namespace) -> list[Figure]:
    rates: dict[str, list[float]] = {"computed again": [], "host tier": []}
    preemptions: dict[str, float] = {}
    for _ in range(args.repeats):
        for name in rates:
            async with opened(args.model, args, **settings(args, host=name == "host tier")) as engine:
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


if __name__ == "__main__":
    main()
