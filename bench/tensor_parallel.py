"""A model on two GPUs beside the same model on one: decode steps, prompts, bare replays, and the skew of launches.

Both engines are there at once, and measurements alternate between them. A decode step is the difference between
requests of two lengths, as in decode.py. The bare replay launches the same graphs on every GPU, back to back.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import torch
from gpu_common import add_engine_options, greedy, opened, random_prompts
from replay import choose_bucket, decode_rows, launch_us, stage

from asyncengine import AsyncEngine, testing
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median, percentile
from asyncengine.cli.embed import loop_factory
from asyncengine.runner.cuda_runner import CudaRunner
from asyncengine.runner.steps.device_steps import ARGMAX

PROMPT_TOKENS = 2048
STEP_TARGETS = {1: 0.60, 64: 0.60, 256: 0.62}
"""Step of two GPUs over that of one, by rows."""
PREFILL_TARGET, BARE_TARGET, SKEW_TARGET_US = 0.60, 1.01, 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape or a directory (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", default="1,64,256", help="(default: %(default)s)")
    parser.add_argument("--short", type=int, default=16)
    parser.add_argument("--long", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--num-kv-blocks", type=int, default=4096)
    parser.add_argument("--json", default="bench/results/tensor_parallel.json")
    add_engine_options(parser)
    args = parser.parse_args()
    args.max_model_len = max(args.max_model_len, PROMPT_TOKENS + 16)
    batches = [int(word) for word in args.batches.split(",")]
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        results = runner.run(measure(batches, args))
    figures = list(summarize(results, batches))
    report.print_figures(f"{args.model} on {args.ranks} GPUs and on one (medians of {args.repeats})", figures)
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    record = report.record("tensor_parallel", figures, repeats=args.repeats, settings=settings, results=results)
    report.write(args.json, record)


async def measure(batches: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and microseconds of each engine, by its number of GPUs."""
    config: dict[str, Any] = {
        "max_num_seqs": max(batches), "max_num_batched_tokens": PROMPT_TOKENS, "prefill_chunk_size": None,
        "num_kv_blocks": args.num_kv_blocks, "enable_prefix_caching": False,
    }  # fmt: skip
    async with AsyncExitStack() as stack:
        engines = {
            ranks: await stack.enter_async_context(opened(args.model, args, tensor_parallel_size=ranks, **config))
            for ranks in (1, args.ranks)
        }
        rng = random.Random(0)
        for engine in engines.values():
            await seconds_of(engine, rng, max(batches), 4)
            await prefill_s(engine, rng)
        lengths = args.short, args.long
        seconds: Any = {ranks: {b: {n: [] for n in lengths} for b in batches} for ranks in engines}
        prefills: dict[int, list[float]] = {ranks: [] for ranks in engines}
        for _ in range(args.repeats):
            for batch in batches:
                for ranks, engine in engines.items():
                    for tokens in lengths:
                        seconds[ranks][batch][tokens].append(await seconds_of(engine, rng, batch, tokens))
            for ranks, engine in engines.items():
                prefills[ranks].append(await prefill_s(engine, rng))
        bare: dict[int, dict[int, float]] = {ranks: {} for ranks in engines}
        skews: list[float] = []
        for ranks, engine in engines.items():
            await testing.settle(engine)
            runner: Any = engine._life.loaded().keep_alive
            for batch in batches:
                step = engine.stats().num_steps + 1
                context = 32 + (args.short + args.long) // 2
                bare[ranks][batch] = bare_us(runner, [context] * batch, args.replays, step, skews)
    return {"seconds": seconds, "prefill_s": prefills, "bare_us": bare, "skew_us": skews}


async def seconds_of(engine: AsyncEngine, rng: random.Random, batch: int, tokens: int) -> float:
    prompts = random_prompts(rng, engine, batch, 32)
    start = time.perf_counter()
    outputs = await asyncio.gather(*(engine.generate(prompt, greedy(tokens)) for prompt in prompts))
    if any(len(output.token_ids) != tokens for output in outputs):
        raise SystemExit("a request came back short")
    return time.perf_counter() - start


async def prefill_s(engine: AsyncEngine, rng: random.Random) -> float:
    """Seconds of one step of a prompt."""
    [prompt] = random_prompts(rng, engine, 1, PROMPT_TOKENS)
    start = time.perf_counter()
    await engine.generate(prompt, greedy(1))
    return time.perf_counter() - start


def bare_us(runner: CudaRunner, contexts: Sequence[int], replays: int, next_step: int, skews: list[float]) -> float:
    """Microseconds of a step launched back to back on every GPU; ``skews`` gets those between the launches of one."""
    rows = decode_rows(contexts)
    bucket = choose_bucket(runner.buckets, rows)
    ranks = [(runner.steps, runner.graphs, runner.cuda_stream)]
    ranks += [(other.steps, other.graphs, other.cuda_stream) for other in runner.others]

    def launch(count: int) -> None:
        for _ in range(count):
            times = []
            for _, graphs, cuda_stream in ranks:
                graphs.native.launch(bucket, ARGMAX, cuda_stream.cuda_stream)
                times.append(time.perf_counter())
            if len(times) > 1:
                skews.append(1e6 * (times[-1] - times[0]))

    def synchronize() -> None:
        for _, _, cuda_stream in ranks:
            torch.cuda.synchronize(cuda_stream.device)

    synchronize()
    for steps, _, cuda_stream in ranks:
        with torch.cuda.device(cuda_stream.device):
            stage(steps, rows, own_tables=True)
    synchronize()
    kept = len(skews)
    launch(1)  # the first launch of a graph takes longer
    synchronize()
    del skews[kept:]
    try:
        with torch.cuda.device(runner.cuda_stream.device):
            return launch_us(launch, replays, runner.cuda_stream)
    finally:
        synchronize()
        for steps, _, cuda_stream in ranks:
            with torch.cuda.device(cuda_stream.device):
                steps.restart(next_step)
        synchronize()


def step_ms(times: Mapping[int, Sequence[float]]) -> float:
    """Milliseconds per token beyond the shorter of two counts of tokens, from the seconds that each took."""
    short, long = sorted(times)
    return 1e3 * (median(times[long]) - median(times[short])) / (long - short)


def summarize(results: Mapping[str, Any], batches: Sequence[int]) -> list[Figure]:
    one, more = sorted(results["seconds"])
    figures = []
    for batch in batches:
        steps = {ranks: step_ms(results["seconds"][ranks][batch]) for ranks in (one, more)}
        bare = {ranks: results["bare_us"][ranks][batch] / 1e3 for ranks in (one, more)}
        for ranks in (one, more):
            figures.append(Figure(f"{ranks} GPUs, {batch} rows: step", steps[ranks], "ms"))
            figures.append(Figure(f"{ranks} GPUs, {batch} rows: bare replay", bare[ranks], "ms"))
            ratio = steps[ranks] / bare[ranks]
            figures.append(Figure(f"{ranks} GPUs, {batch} rows: step / bare", ratio, "", at_most=BARE_TARGET))
        ratio, target = steps[more] / steps[one], STEP_TARGETS.get(batch)
        figures.append(Figure(f"{batch} rows: step of {more} / of {one}", ratio, "", at_most=target))
    prefills = {ranks: 1e3 * median(results["prefill_s"][ranks]) for ranks in (one, more)}
    figures += [Figure(f"{ranks} GPUs: prompt of {PROMPT_TOKENS}", prefills[ranks], "ms") for ranks in (one, more)]
    ratio = prefills[more] / prefills[one]
    figures.append(Figure(f"prompt of {PROMPT_TOKENS}: {more} / {one}", ratio, "", at_most=PREFILL_TARGET))
    skew = percentile(results["skew_us"], 99)
    figures.append(Figure("skew of launches, p99", skew, "us", at_most=SKEW_TARGET_US))
    return figures


if __name__ == "__main__":
    main()
