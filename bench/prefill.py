"""Prefill of the three shapes in chunks of 2,048 tokens: time, tokens per second, share of the GPU's matrix rate.

    python bench/prefill.py [--model llama-3.1-8b] [--repeats 3] [--json FILE]

- engine: prompts of random ids through the embedded API, all at once, one token generated of each. Prompts of one
  chunk, and of 16k where the model has the positions; steps are full, since chunks of several prompts share them.
- bare replay: the graph of a chunk after 0, 6k and 14k tokens, back to back, over keys and values of random numbers.

Operations are those of the model: two for each parameter of its matrices and token, four for each pair of a query and a
visible key, head and element, and one row of logits a prompt. The share is that of the rate of torch's product of
two bfloat16 matrices of 8,192 x 8,192, measured in the same process.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Mapping
from typing import Any

import torch
from gpu_common import SHAPES, add_engine_options, greedy, opened, prefill_flops, random_prompts, read_model
from kernel_timing import Timer, matrix_rate

from asyncengine import AsyncEngine, testing
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median
from asyncengine.cli.embed import loop_factory
from asyncengine.models.config import ModelConfig

CHUNK = 2048
CONTEXTS = (0, 6144, 14336)
"""Tokens before a replayed chunk."""
LONG = 16384
TARGET = 60.0
"""Percent of the matrix rate in chunks of 2,048 tokens, of the 8B shape."""
TARGET_SHAPE = "llama-3.1-8b"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", help=f"a shape or a directory (default: {', '.join(SHAPES)})")
    parser.add_argument("--tokens", type=int, default=16 * CHUNK, help="of all prompts together (default: %(default)s)")
    parser.add_argument("--replays", type=int, default=10, help="of a chunk")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", default="bench/results/prefill.json")
    add_engine_options(parser)
    parser.set_defaults(max_model_len=LONG + 64)
    args = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            for model in args.model or SHAPES:
                results[model] = runner.run(work(model, args))
                print_table(model, results[model])
    finally:  # what was measured is kept
        if results:
            save(results, args)


def save(results: Mapping[str, Mapping[str, Any]], args: argparse.Namespace) -> None:
    figures = [figure for model, result in results.items() for figure in summarize(model, result)]
    report.print_figures(f"Prefill (medians of {args.repeats})", figures)
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    record = report.record("prefill", figures, repeats=args.repeats, settings=settings, results=results)
    report.write(args.json, record)


async def work(model: str, args: argparse.Namespace) -> dict[str, Any]:
    c = read_model(model)
    room = min(c.max_positions, args.max_model_len)
    chunk = min(CHUNK, room - 1)  # one token is generated
    lengths = [chunk, LONG] if room > LONG else [chunk]
    rate = matrix_rate(Timer(torch.device("cuda"), 5)) if args.device == "cuda" else float("nan")
    config = {"max_num_batched_tokens": CHUNK, "prefill_chunk_size": None, "enable_prefix_caching": False}
    async with opened(model, args, max_num_seqs=32, **config | {"max_model_len": room}) as engine:
        rng = random.Random(0)
        prompts = {length: max(1, args.tokens // length) for length in lengths}
        await generate(engine, rng, 1, chunk)  # not counted
        seconds: dict[int, list[float]] = {length: [] for length in lengths}
        for _ in range(args.repeats):
            for length, samples in seconds.items():
                samples.append(await generate(engine, rng, prompts[length], length))
        return {
            "matrix_rate": rate,
            "prompts": [engine_point(c, length, prompts[length], seconds[length], rate) for length in lengths],
            "chunks": await replay_chunks(engine, c, rate, args),
        }


async def generate(engine: AsyncEngine, rng: random.Random, count: int, length: int) -> float:
    """Seconds for ``count`` prompts at once. SystemExit if one gets no token."""
    prompts = random_prompts(rng, engine, count, length)
    start = time.perf_counter()
    outputs = await asyncio.gather(*(engine.generate(prompt, greedy(1)) for prompt in prompts))
    seconds = time.perf_counter() - start
    if any(len(output.token_ids) != 1 for output in outputs):
        raise SystemExit("a request came back short")
    return seconds


def engine_point(c: ModelConfig, length: int, count: int, seconds: list[float], rate: float) -> dict[str, Any]:
    took = median(seconds)
    achieved = count * prefill_flops(c, length, 0) / took
    return {
        "prompt": length,
        "prompts": count,
        "seconds": seconds,
        "tokens/s": count * length / took,
        "TFLOP/s": achieved / 1e12,
        "share": achieved / rate,
    }


async def replay_chunks(
    engine: AsyncEngine, c: ModelConfig, rate: float, args: argparse.Namespace
) -> list[dict[str, float]]:
    """Nothing without CUDA graphs to replay."""
    runner: Any = engine._life.loaded().keep_alive
    if not hasattr(runner, "graphs"):
        return []
    from replay import Row, bare_step_us, fill_cache

    await testing.settle(engine)
    fill_cache(runner.steps.cache.groups)
    points = []
    chunk = min(CHUNK, engine.model_info.max_model_len)
    for context in CONTEXTS:
        if context + chunk <= engine.model_info.max_model_len:
            next_step = engine.stats().num_steps + 1
            us = bare_step_us(runner, [Row(chunk, context)], args.replays, next_step, own_tables=True)
            points.append(chunk_point(c, chunk, context, us, rate))
    return points


def chunk_point(c: ModelConfig, chunk: int, context: int, us: float, rate: float) -> dict[str, float]:
    achieved = prefill_flops(c, chunk, context) / (us * 1e-6)
    return {
        "chunk": chunk,
        "context": context,
        "ms": us / 1e3,
        "tokens/s": chunk / (us * 1e-6),
        "TFLOP/s": achieved / 1e12,
        "share": achieved / rate,
    }


# ---- the report ----


def summarize(model: str, result: Mapping[str, Any]) -> list[Figure]:
    figures = [Figure(f"{model}, torch's product of large matrices", result["matrix_rate"] / 1e12, "TFLOP/s")]
    for point in result["prompts"]:
        label = f"{model}, prompts of {point['prompt']}"
        goal = TARGET if model == TARGET_SHAPE and point["prompt"] == CHUNK else None
        figures.append(Figure(label, point["tokens/s"], "tokens/s"))
        figures.append(Figure(f"{label}: of the matrix rate", 100 * point["share"], "%", at_least=goal))
    for point in result["chunks"]:
        label = f"{model}, chunk of {point['chunk']} after {point['context']}"
        goal = TARGET if model == TARGET_SHAPE else None
        figures.append(Figure(label, point["ms"], "ms"))
        figures.append(Figure(f"{label}: of the matrix rate", 100 * point["share"], "%", at_least=goal))
    return figures


def print_table(model: str, result: Mapping[str, Any]) -> None:
    print(f"\n{model}: torch's product of large matrices reaches {result['matrix_rate'] / 1e12:.0f} TFLOP/s")
    print(f"{'':<32}{'ms':>10}{'tokens/s':>12}{'TFLOP/s':>10}{'share':>8}")
    for point in result["prompts"]:
        ms = 1e3 * median(point["seconds"])
        print_row(f"{point['prompts']} prompts of {point['prompt']}", ms, point)
    for point in result["chunks"]:
        print_row(f"replay, {point['chunk']} after {point['context']}", point["ms"], point)


def print_row(label: str, ms: float, point: Mapping[str, float]) -> None:
    rates = f"{point['tokens/s']:>12,.0f}{point['TFLOP/s']:>10.1f}{point['share']:>8.1%}"
    print(f"  {label:<30}{ms:>10.2f}{rates}", flush=True)


if __name__ == "__main__":
    main()
