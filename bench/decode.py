"""Milliseconds per decode step, and start-up, beside other engines on the same GPU.

    python bench/decode.py [--model gpt2] [--batches 1,8,64,256] [--contexts 256,2k,16k] [--between 24,48,96,160]
        [--cache cold|warm] [--batch-invariant] [--json FILE]

A step is (time of 256 tokens - time of 64) / 192: prompts of 128 random ids, greedy, no end of sequence, text out,
all requests gathered at once; medians of the repeats. Every shape has a process of its own. Start-up is from the start
of that process to a ready engine and to its first token, by default with an empty cache of compiled kernels.

The floor is the time to read weights, keys and values once, at the bandwidth that the card was seen to reach.

For every batch and context, bare replay of the step's graph over keys and values of random numbers, which takes no
prefill: whole steps, greedy sampling included, back to back. At the first context also for batches between, whose rows
are no power of two, as most are that a server has. ``--batch-invariant`` measures all of it a second time, on an engine
of that mode beside the first one in the same process, their repeats in alternation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from gpu_common import (
    BANDWIDTH,
    CODE_BYTES,
    PROMPT_LEN,
    SHAPES,
    add_engine_options,
    child_environment,
    decode_bytes,
    floor_ms,
    greedy,
    opened,
    random_prompts,
    read_model,
)

from asyncengine import AsyncEngine, testing
from asyncengine.api.model_info import ModelInfo
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median
from asyncengine.cli.embed import loop_factory
from asyncengine.models.config import ModelConfig

MEMORY_SHARE = 0.9
"""Share of the GPU's memory, for all engines together."""
DEFAULT, INVARIANT = "default", "batch-invariant"
STARTUP_TARGET_S = 20.0  # Llama-3.1-8B, compilation and capture included

#: Milliseconds per step by batch.
TARGETS: dict[str, dict[int, float]] = {
    "gpt2": {1: 0.20, 8: 0.22, 64: 0.40, 256: 0.95},
    "qwen3-0.6b": {1: 0.55, 8: 0.60, 64: 1.15, 256: 2.8},
    "llama-3.1-8b": {1: 3.9, 8: 4.0, 64: 4.8, 256: 9.2},
}
#: Milliseconds per step by batch, start-up in seconds; measured on the same H200 by the method of this file.
PEERS: dict[str, dict[str, tuple[dict[int, float], float]]] = {
    "gpt2": {"vLLM 0.26.0": ({1: 1.65, 8: 1.50, 64: 2.20, 256: 5.33}, 50)},
    "qwen3-0.6b": {
        "vLLM 0.26.0": ({1: 1.93, 8: 2.68, 64: 2.96, 256: 7.58}, 43),
        "SGLang 0.5.17": ({1: 1.58, 8: 1.55, 64: 2.41, 256: 4.76}, 102),
        "nano-vllm bb823b3": ({1: 2.22, 8: 2.15, 64: 3.12, 256: 6.60}, 20),
    },
    "llama-3.1-8b": {
        "vLLM 0.26.0": ({1: 4.90, 8: 5.09, 64: 6.09, 256: 11.14}, 65),
        "SGLang 0.5.17": ({1: 4.84, 8: 5.02, 64: 6.03, 256: 11.00}, 35),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", help=f"a shape or a directory (default: {', '.join(SHAPES)})")
    parser.add_argument("--batches", default="1,8,64,256", help="(default: %(default)s)")
    parser.add_argument("--contexts", default="256,2k,16k", help="of the replays, '' for none (default: %(default)s)")
    parser.add_argument("--between", default="24,48,96,160", help="more batches of the replays (default: %(default)s)")
    parser.add_argument("--replays", type=int, default=20, help="of a batch and context")
    parser.add_argument("--batch-invariant", action="store_true", help="and what that mode costs")
    parser.add_argument("--short", type=int, default=64)
    parser.add_argument("--long", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cache", choices=("cold", "warm"), default="cold", help="of compiled kernels, at start-up")
    parser.add_argument("--quantization", choices=("none", *CODE_BYTES), default="none")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--json", default="bench/results/decode.json")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "STARTED"), help=argparse.SUPPRESS)
    add_engine_options(parser)
    args = parser.parse_args()
    args.batches, args.between, args.contexts = map(parse_counts, (args.batches, args.between, args.contexts))
    if args.worker:
        model, started = args.worker
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            print(json.dumps(runner.run(work(model, float(started), args))))
        return
    results: dict[str, Any] = {}
    try:
        for model in args.model or SHAPES:
            results[model] = run_worker(model, args)
    finally:  # what was measured is kept
        if results:
            save(results, args)


def parse_counts(text: str) -> list[int]:
    """A k is 1,024."""
    return [int(word.removesuffix("k")) * (1024 if word.endswith("k") else 1) for word in filter(None, text.split(","))]


def save(results: Mapping[str, Any], args: argparse.Namespace) -> None:
    figures = [figure for model, result in results.items() for figure in summarize(model, result)]
    report.print_figures(f"Decode (medians of {args.repeats}), {args.cache} start-up", figures)
    print_table(results)
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "worker")}
    settings |= {"prompt tokens": PROMPT_LEN, "bandwidth of the floor, bytes/s": BANDWIDTH}
    record = report.record("decode", figures, repeats=args.repeats, settings=settings, results=results)
    report.write(args.json, record)


def run_worker(model: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as empty:
        environment = child_environment() | ({"TRITON_CACHE_DIR": empty} if args.cache == "cold" else {})
        started = time.monotonic()  # one clock for all processes of the machine
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", model, str(started)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{model}: the worker ended with exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# ---- the worker ----


async def work(model: str, started: float, args: argparse.Namespace) -> dict[str, Any]:
    rng, c = random.Random(0), read_model(model)
    args.max_model_len = min(c.max_positions, max([args.max_model_len, *args.contexts]))
    modes = [DEFAULT, INVARIANT] if args.batch_invariant else [DEFAULT]
    engines: dict[str, AsyncEngine] = {}
    result: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        for i, mode in enumerate(modes):
            share = MEMORY_SHARE * (i + 1) / len(modes)  # of what the engines before it take, too
            config = {"batch_invariant": mode == INVARIANT, "gpu_memory_utilization": share}
            config |= {"quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
            engine = await stack.enter_async_context(opened(model, args, max_num_seqs=max(args.batches), **config))
            engines[mode] = engine
            if mode == DEFAULT:
                result["ready_s"] = time.monotonic() - started
                await generate(engine, rng, 1, 1)
                result["first_token_s"] = time.monotonic() - started
        measured = await measure(engines, rng, args)
        for mode, engine in engines.items():  # last: it leaves nothing that a prefix cache could use
            measured[mode]["contexts"] = await sweep(engine, c, args)
    context = PROMPT_LEN + (args.short + args.long) / 2
    stored = args.quantization, args.kv_cache_dtype
    result["floor_ms"] = {b: floor_ms(c, b, context, *stored) for b in args.batches}
    return result | measured[DEFAULT] | ({INVARIANT: measured[INVARIANT]} if INVARIANT in measured else {})


async def measure(
    engines: Mapping[str, AsyncEngine], rng: random.Random, args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Steps of each engine, their repeats in alternation."""
    seconds: dict[str, dict[int, dict[int, list[float]]]] = {}
    for mode, engine in engines.items():
        for batch in args.batches:  # not counted: everything runs once
            await generate(engine, rng, batch, args.short)
        seconds[mode] = {batch: {args.short: [], args.long: []} for batch in args.batches}
    for _ in range(args.repeats):
        for batch in args.batches:
            for mode, engine in engines.items():
                for tokens, samples in seconds[mode][batch].items():
                    samples.append(await generate(engine, rng, batch, tokens))
    return {
        mode: {
            "step_ms": {batch: step_ms(times) for batch, times in seconds[mode].items()},
            "seconds": seconds[mode],
            "kv_cache_tokens": engine.model_info.kv_capacity_tokens,
        }
        for mode, engine in engines.items()
    }


async def generate(engine: AsyncEngine, rng: random.Random, batch: int, tokens: int) -> float:
    """Seconds for ``batch`` requests at once. SystemExit if one is short."""
    prompts = random_prompts(rng, engine, batch)
    start = time.perf_counter()
    outputs = await asyncio.gather(*(engine.generate(prompt, greedy(tokens)) for prompt in prompts))
    seconds = time.perf_counter() - start
    if any(len(output.token_ids) != tokens or not output.text for output in outputs):
        raise SystemExit("a request came back short")
    return seconds


def step_ms(times: Mapping[int, Sequence[float]]) -> float:
    """Milliseconds per token beyond the shorter of two counts of tokens, from the seconds that each took."""
    short, long = sorted(times)
    return 1e3 * (median(times[long]) - median(times[short])) / (long - short)


# ---- batches and contexts, by bare replay ----


async def sweep(engine: AsyncEngine, c: ModelConfig, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every batch and context, with what was left out and why. Nothing without CUDA graphs to replay."""
    runner: Any = engine._life.loaded().keep_alive
    if not args.contexts or not hasattr(runner, "graphs"):
        return []
    from replay import bare_step_us, decode_rows, fill_cache

    await testing.settle(engine)
    fill_cache(runner.steps.cache.groups)
    points = []
    for context in args.contexts:
        for batch in batches_at(context, args):
            point: dict[str, Any] = {"batch": batch, "context": context}
            left_out = reason_to_skip(c, engine.model_info, batch, context)
            if left_out is None:
                # The query's own key is the last of the context.
                rows, step = decode_rows([context - 1] * batch), engine.stats().num_steps + 1
                us = bare_step_us(runner, rows, args.replays, step, own_tables=True)
                point |= achieved(c, batch, context, us / 1e3, args.quantization, args.kv_cache_dtype)
            else:
                point["skipped"] = left_out
            points.append(point)
    return points


def batches_at(context: int, args: argparse.Namespace) -> list[int]:
    """Return the batches of the replays. The engine has room for the largest of ``args.batches``."""
    between = args.between if context == args.contexts[0] else []
    return sorted({*args.batches, *(batch for batch in between if batch < max(args.batches))})


def reason_to_skip(c: ModelConfig, info: ModelInfo, batch: int, context: int) -> str | None:
    if context > c.max_positions:
        return f"the model has {c.max_positions:,} positions"
    fitting = info.num_kv_blocks // -(-context // info.block_size)
    if batch > fitting:
        return f"the KV cache holds {info.kv_capacity_tokens:,} tokens, {fitting} such sequences"
    return None


def achieved(
    c: ModelConfig, batch: int, context: int, ms: float, quantization: str = "none", kv_cache_dtype: str = "auto"
) -> dict[str, float]:
    """``share`` is of the bandwidth that the card was seen to reach."""
    rate = decode_bytes(c, batch, context, quantization, kv_cache_dtype) / (ms * 1e-3)
    return {
        "ms": ms,
        "floor_ms": floor_ms(c, batch, context, quantization, kv_cache_dtype),
        "tokens/s": batch / (ms * 1e-3),
        "TB/s": rate / 1e12,
        "share": rate / BANDWIDTH,
    }


# ---- the report ----


def by_batch(values: Mapping[str, float]) -> dict[int, float]:
    """JSON has made the batches strings."""
    return {int(batch): value for batch, value in values.items()}


def summarize(model: str, result: Mapping[str, Any]) -> list[Figure]:
    peers, targets = PEERS.get(model, {}), TARGETS.get(model, {})
    figures = []
    ours = by_batch(result["step_ms"])
    for batch, ms in ours.items():
        figures.append(Figure(f"{model}, batch {batch}", ms, "ms/step", at_most=targets.get(batch)))
        if fastest := min((steps[batch] for steps, _ in peers.values() if batch in steps), default=None):
            figures.append(Figure(f"{model}, batch {batch}, of the fastest peer's", ms / fastest, "x", at_most=1.0))
    limit = STARTUP_TARGET_S if model == "llama-3.1-8b" else None
    figures.append(Figure(f"{model}, process start to ready", result["ready_s"], "s"))
    figures.append(Figure(f"{model}, process start to first token", result["first_token_s"], "s", at_most=limit))
    for point in result.get("contexts", ()):
        if "ms" in point:
            label = f"{model}, {point['batch']} x {point['context']}"
            figures.append(Figure(label, point["ms"], "ms/step"))
            figures.append(Figure(f"{label}: of the bandwidth", 100 * point["share"], "%"))
    return figures + costs(model, result)


def costs(model: str, result: Mapping[str, Any]) -> list[Figure]:
    """Times of the batch-invariant mode over those of the default."""
    other = result.get(INVARIANT)
    if other is None:
        return []
    ours, slower = by_batch(result["step_ms"]), by_batch(other["step_ms"])
    figures = [Figure(f"{model}, batch {b}, {INVARIANT} over default", slower[b] / ours[b], "x") for b in ours]
    invariant = {(point["batch"], point["context"]): point for point in other["contexts"] if "ms" in point}
    for point in result["contexts"]:
        key = point["batch"], point["context"]
        if "ms" in point and key in invariant:
            label = f"{model}, {key[0]} x {key[1]}, {INVARIANT} over default"
            figures.append(Figure(label, invariant[key]["ms"] / point["ms"], "x"))
    return figures


def print_table(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Ours, the memory floor, what is aimed at, and the others, measured on the same H200."""
    for model, result in results.items():
        ours, floors = by_batch(result["step_ms"]), by_batch(result["floor_ms"])
        rows: dict[str, tuple[Mapping[int, float], float | None]] = {"asyncengine": (ours, result["ready_s"])}
        if INVARIANT in result:
            rows[INVARIANT] = (by_batch(result[INVARIANT]["step_ms"]), None)
        limit = STARTUP_TARGET_S if model == "llama-3.1-8b" else None
        rows |= {"memory floor": (floors, None), "target": (TARGETS.get(model, {}), limit), **PEERS.get(model, {})}
        print(f"\n{model:<20}" + "".join(f"{f'batch {b}':>12}" for b in ours) + f"{'start-up':>12}")
        for name, (steps, startup) in rows.items():
            cells = [f"{steps[b]:.3f}" if b in steps else "-" for b in ours]
            cells.append("-" if startup is None else f"{startup:.1f} s")
            print(f"{name:<20}" + "".join(f"{cell:>12}" for cell in cells))
        print(f"{'tokens/s':<20}" + "".join(f"{1e3 * b / ms:>12,.0f}" for b, ms in ours.items()))
        print(f"{'of the bandwidth':<20}" + "".join(f"{floors[b] / ms:>12.1%}" for b, ms in ours.items()))
        print_contexts(f"{model}, bare replay", result.get("contexts", ()))
        print_contexts(f"{model}, bare replay, {INVARIANT}", result.get(INVARIANT, {}).get("contexts", ()))


def print_contexts(title: str, points: Sequence[Mapping[str, Any]]) -> None:
    if not points:
        return
    print(f"\n{title:<44}{'ms/step':>10}{'floor':>10}{'tokens/s':>12}{'TB/s':>8}{'share':>8}")
    for point in points:
        label = f"  {point['batch']:>3} x {point['context']:>6}"
        if "skipped" in point:
            print(f"{label:<44}left out: {point['skipped']}")
            continue
        times = f"{point['ms']:>10.3f}{point['floor_ms']:>10.3f}{point['tokens/s']:>12,.0f}"
        print(f"{label:<44}{times}{point['TB/s']:>8.2f}{point['share']:>8.1%}")


if __name__ == "__main__":
    main()
