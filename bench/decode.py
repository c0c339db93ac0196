"""Milliseconds per decode step, and start-up, beside other engines on the same GPU.

    python bench/decode.py [--model gpt2] [--batches 1,8,64,256] [--cache cold|warm] [--json FILE]

A step is (time of 256 tokens - time of 64) / 192: prompts of 128 random ids, greedy, no end of sequence, text out,
all requests gathered at once; medians of the repeats. Every shape has a process of its own. Start-up is from the start
of that process to a ready engine and to its first token, by default with an empty cache of compiled kernels.

The floor is the time to read weights, keys and values once, at the bandwidth that the card was seen to reach.
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
from typing import Any

from gpu_common import PROMPT_LEN, SHAPES, add_engine_options, child_environment, greedy, opened, random_prompts

from asyncengine import AsyncEngine
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median
from asyncengine.cli.embed import loop_factory

BANDWIDTH = 4.4e12  # bytes per second, measured on the H200
STARTUP_TARGET_S = 30.0  # Llama-3.1-8B, capture included

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
    parser.add_argument("--short", type=int, default=64)
    parser.add_argument("--long", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cache", choices=("cold", "warm"), default="cold", help="of compiled kernels, at start-up")
    parser.add_argument("--quantization", choices=("none", "fp8"), default="none")
    parser.add_argument("--json", default="bench/results/decode.json")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "STARTED"), help=argparse.SUPPRESS)
    add_engine_options(parser)
    args = parser.parse_args()
    args.batches = [int(batch) for batch in args.batches.split(",")]
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
    rng = random.Random(0)
    async with opened(model, args, max_num_seqs=max(args.batches), quantization=args.quantization) as engine:
        ready_s = time.monotonic() - started
        await generate(engine, rng, 1, 1)
        first_token_s = time.monotonic() - started
        for batch in args.batches:  # not counted: everything runs once
            await generate(engine, rng, batch, args.short)
        seconds: dict[int, dict[int, list[float]]] = {b: {args.short: [], args.long: []} for b in args.batches}
        for _ in range(args.repeats):
            for batch, times in seconds.items():
                for tokens, samples in times.items():
                    samples.append(await generate(engine, rng, batch, tokens))
        context = PROMPT_LEN + (args.short + args.long) / 2
        return {
            "ready_s": ready_s,
            "first_token_s": first_token_s,
            "step_ms": {b: step_ms(times) for b, times in seconds.items()},
            "floor_ms": {b: floor_ms(engine, b, context) for b in args.batches},
            "seconds": seconds,
            "kv_cache_tokens": engine.model_info.kv_capacity_tokens,
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


def floor_ms(engine: AsyncEngine, batch: int, context: float) -> float:
    info = engine.model_info
    config = json.loads((info.path / "config.json").read_text())
    untied = not config.get("tie_word_embeddings", True)
    # A few rows of the input embedding are read; all of it only where it is the output's matrix too.
    unread = info.vocab_size * config["hidden_size"] * 2 if untied else 0
    kv = batch * context * info.kv_bytes_per_block / info.block_size
    return 1e3 * (info.weight_bytes - unread + kv) / BANDWIDTH


# ---- the report ----


def by_batch(values: Mapping[str, float]) -> dict[int, float]:
    """JSON has made the batches strings."""
    return {int(batch): value for batch, value in values.items()}


def summarize(model: str, result: Mapping[str, Any]) -> list[Figure]:
    peers = PEERS.get(model, {})
    figures = []
    for batch, ms in by_batch(result["step_ms"]).items():
        fastest = min((steps[batch] for steps, _ in peers.values() if batch in steps), default=None)
        figures.append(Figure(f"{model}, batch {batch}", ms, "ms/step", at_most=fastest))
    limit = STARTUP_TARGET_S if model == "llama-3.1-8b" else None
    figures.append(Figure(f"{model}, process start to ready", result["ready_s"], "s"))
    figures.append(Figure(f"{model}, process start to first token", result["first_token_s"], "s", at_most=limit))
    return figures


def print_table(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Ours, the memory floor and the others, measured on the same H200."""
    for model, result in results.items():
        ours, floors = by_batch(result["step_ms"]), by_batch(result["floor_ms"])
        rows = {"asyncengine": (ours, result["ready_s"]), "memory floor": (floors, None), **PEERS.get(model, {})}
        print(f"\n{model:<20}" + "".join(f"{f'batch {b}':>12}" for b in ours) + f"{'start-up':>12}")
        for name, (steps, startup) in rows.items():
            cells = [f"{steps[b]:.3f}" if b in steps else "-" for b in ours]
            cells.append("-" if startup is None else f"{startup:.1f} s")
            print(f"{name:<20}" + "".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    main()
