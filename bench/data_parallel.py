"""An engine on each of several GPUs behind one front, beside an engine on one of them: throughput and first tokens.

A mixed load: prompts of 32 to 1,024 tokens and outputs of 32 to 256. For each GPU so many requests are under way, and
the next begins when one is done, so that several GPUs have as much to do, each, as one. Both are there at once, and
rounds alternate between them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from time import perf_counter
from typing import Any

from gpu_common import add_engine_options, greedy, opened, random_prompts
from streaming import Trace, consume

from asyncengine import AsyncEngine
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median, percentile
from asyncengine.cli.embed import loop_factory

PROMPT_TOKENS, OUTPUT_TOKENS = (32, 1024), (32, 256)
THROUGHPUT_TARGET, TTFT_TARGET = 1.95, 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape or a directory (default: %(default)s)")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=64, help="requests under way for each GPU")
    parser.add_argument("--requests", type=int, default=384, help="of a round, for each GPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-kv-blocks", type=int, default=8192)
    parser.add_argument("--json", default="bench/results/data_parallel.json")
    add_engine_options(parser)
    args = parser.parse_args()
    args.max_model_len = max(args.max_model_len, PROMPT_TOKENS[1] + OUTPUT_TOKENS[1] + 1)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        rounds = runner.run(measure(args))
    figures = list(summarize(rounds))
    report.print_figures(f"{args.model} on {args.engines} GPUs and on one (medians of {args.repeats})", figures)
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    record = report.record("data_parallel", figures, repeats=args.repeats, settings=settings, rounds=rounds)
    report.write(args.json, record)


async def measure(args: argparse.Namespace) -> dict[int, list[dict[str, float]]]:
    """Statistics of the rounds, by the number of engines."""
    config: dict[str, Any] = {"max_num_seqs": args.concurrency, "num_kv_blocks": args.num_kv_blocks}
    async with AsyncExitStack() as stack:
        engines = {
            count: await stack.enter_async_context(opened(args.model, args, data_parallel_size=count, **config))
            for count in (1, args.engines)
        }
        rounds: dict[int, list[dict[str, float]]] = {count: [] for count in engines}
        for i in range(-1, args.repeats):
            for count, engine in engines.items():
                statistics = await play(engine, count, args, random.Random(i))
                if i >= 0:
                    rounds[count].append(statistics)
        return rounds


async def play(engine: AsyncEngine, count: int, args: argparse.Namespace, rng: random.Random) -> dict[str, float]:
    """One round. SystemExit if a request does not get all of its tokens."""
    lengths = [(rng.randint(*PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS)) for _ in range(count * args.requests)]
    waiting = [(random_prompts(rng, engine, 1, prompt)[0], tokens) for prompt, tokens in lengths]
    traces: list[Trace] = []

    async def work() -> None:
        while waiting:
            prompt, tokens = waiting.pop()
            submitted = perf_counter()
            stream = await engine.submit(prompt, greedy(tokens))
            trace = Trace(submitted, submitted, perf_counter())
            traces.append(trace)
            await consume(stream, trace)
            if trace.tokens != tokens:
                raise SystemExit(f"{trace.tokens} tokens of {tokens} came back")

    start = perf_counter()
    await asyncio.gather(*(work() for _ in range(count * args.concurrency)))
    seconds = perf_counter() - start
    return {
        "throughput": sum(trace.tokens for trace in traces) / seconds,
        "TTFT p50": 1e3 * percentile([trace.deliveries[0] - trace.submitted for trace in traces], 50),
    }


def summarize(rounds: Mapping[int, Sequence[Mapping[str, float]]]) -> list[Figure]:
    one, more = sorted(rounds)
    figures = []
    for name, unit, target in (
        ("throughput", "tokens/s", {"at_least": THROUGHPUT_TARGET}),
        ("TTFT p50", "ms", {"at_most": TTFT_TARGET}),
    ):
        values = {count: median([each[name] for each in rounds[count]]) for count in (one, more)}
        figures += [Figure(f"{count} GPUs: {name}", values[count], unit) for count in (one, more)]
        figures.append(Figure(f"{name}: {more} / {one}", values[more] / values[one], "", **target))
    return figures


if __name__ == "__main__":
    main()
