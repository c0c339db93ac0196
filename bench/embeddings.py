"""Embeddings beside prefill: tokens per second of both, of one engine.

    python bench/embeddings.py [--model qwen3-0.6b] [--length 512] [--prompts 64] [--repeats 5] [--json FILE]

Prompts of random ids, all at once, in steps of 2,048 tokens: as many tokens in prompts of 2,048 of which each gives one
token, as in bench/prefill.py, and in prompts of ``--length`` that give vectors. The two alternate, and a ratio is the
median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from gpu_common import add_engine_options, greedy, opened, random_prompts

from asyncengine import AsyncEngine
from asyncengine.api.outputs import Pooling
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure
from asyncengine.cli.embed import loop_factory

CHUNK = 2048
TARGET = 0.8
"""Least share of prefill's rate."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape or a directory")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", default="bench/results/embeddings.json")
    add_engine_options(parser)
    parser.set_defaults(max_model_len=CHUNK + 64)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        results = runner.run(measure(args))
    figures = [
        Figure(f"{args.model}, pooling {name}: rate over prefill's", report.median(ratios), "", at_least=TARGET)
        for name, ratios in results["ratios"].items()
    ]
    rate = report.median(results["prefill"])
    report.print_figures(f"Embeddings of {args.length} tokens (prefill: {rate:,.0f} tokens/s)", figures)
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    report.write(
        args.json, report.record("embeddings", figures, repeats=args.repeats, settings=settings, results=results)
    )


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(0)
    tokens = args.length * args.prompts
    whole = min(CHUNK, args.max_model_len - 1)
    poolings: tuple[Pooling, ...] = ("last", "mean")
    config = {"max_num_batched_tokens": CHUNK, "prefill_chunk_size": None, "enable_prefix_caching": False}
    async with opened(args.model, args, max_num_seqs=32, **config) as engine:

        async def prefill() -> float:
            return await rate(engine, rng, -(-tokens // whole), whole, generate_one)

        async def embed(pooling: Pooling) -> float:
            def work(engine: AsyncEngine, prompts: list[list[int]]) -> Awaitable[object]:
                return engine.embed(prompts, pooling=pooling)

            return await rate(engine, rng, args.prompts, args.length, work)

        for pooling in poolings:
            await embed(pooling)
        results: dict[str, Any] = {"prefill": [], "embed": {}, "ratios": {}}
        for _ in range(args.repeats):
            plain = await prefill()
            results["prefill"].append(plain)
            for pooling in poolings:
                found = await embed(pooling)
                results["embed"].setdefault(pooling, []).append(found)
                results["ratios"].setdefault(pooling, []).append(found / plain)
    return results


async def generate_one(engine: AsyncEngine, prompts: list[list[int]]) -> None:
    await asyncio.gather(*(engine.generate(prompt, greedy(1)) for prompt in prompts))


async def rate(
    engine: AsyncEngine,
    rng: random.Random,
    count: int,
    length: int,
    work: Callable[[AsyncEngine, list[list[int]]], Awaitable[object]],
) -> float:
    """Tokens per second."""
    prompts = random_prompts(rng, engine, count, length)
    start = time.perf_counter()
    await work(engine, prompts)
    return count * length / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
