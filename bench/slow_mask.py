"""Cost of a row whose masks take 50 ms to the rows beside it: their times between tokens, with and without it.

    python bench/slow_mask.py [--model gpt2] [--rows 64] [--tokens 300] [--repeats 3] [--json FILE]

One row follows a regular expression, the others nothing. In every second run each of its masks takes ``--slow-ms``
longer. A ratio is the median of the ratios of neighbouring runs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

from gpu_common import add_engine_options, greedy, opened, random_prompts

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure
from asyncengine.cli.embed import loop_factory
from asyncengine.engine.constraints.masks import Constraint

WARM_UP = 32
TARGETS = {"p50": 1.02, "p99": 1.10}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="gpt2", help="a shape or a directory")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300, help="of a row in a run")
    parser.add_argument("--slow-ms", type=float, default=50.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", default="bench/results/slow_mask.json")
    add_engine_options(parser)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runs = runner.run(measure(args))
    figures = []
    for name, target in TARGETS.items():
        ratios = [slow[name] / fast[name] for fast, slow in runs]
        fast_ms = report.median([fast[name] for fast, _ in runs])
        label = f"{args.model}, {args.rows - 1} rows beside it: ITL {name} ({fast_ms:.3f} ms)"
        figures.append(Figure(label, report.median(ratios), "of that without", target))
    report.print_figures(f"One row whose masks take {args.slow_ms:g} ms (medians of {args.repeats})", figures)
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    report.write(args.json, report.record("slow_mask", figures, repeats=args.repeats, settings=settings, results=runs))


async def measure(args: argparse.Namespace) -> list[tuple[dict[str, float], dict[str, float]]]:
    rng = random.Random(0)
    async with opened(args.model, args, max_num_seqs=args.rows) as engine:
        await run(engine, rng, args, 0.0)
        return [
            (await run(engine, rng, args, 0.0), await run(engine, rng, args, args.slow_ms)) for _ in range(args.repeats)
        ]


async def run(engine: AsyncEngine, rng: random.Random, args: argparse.Namespace, slow_ms: float) -> dict[str, float]:
    """Percentiles in milliseconds of the others' times between tokens."""
    work = Constraint.work

    def slow(self: Constraint, tokens: Sequence[int]) -> None:
        time.sleep(slow_ms / 1e3)
        work(self, tokens)

    async def one(prompt: list[int]) -> list[float]:
        seen, last, gaps = 0, 0.0, []
        async for delta in engine.stream(prompt, greedy(args.tokens)):
            now, count = time.perf_counter(), len(delta.token_ids)
            if seen >= WARM_UP:
                gaps += [(now - last) * 1e3 / count] * count
            seen, last = seen + count, now
        return gaps

    regex: Any = {"regex": "[a-z ]{20000}"}
    prompts = random_prompts(rng, engine, args.rows)
    params = SamplingParams(temperature=0, max_tokens=args.tokens, structured_outputs=regex)
    if slow_ms:
        Constraint.work = slow  # type: ignore[method-assign]
    try:
        planted = asyncio.ensure_future(engine.generate(prompts[0], params))
        gaps = sorted(x for row in await asyncio.gather(*map(one, prompts[1:])) for x in row)
        planted.cancel()
        await asyncio.gather(planted, return_exceptions=True)
    finally:
        Constraint.work = work  # type: ignore[method-assign]
    return {"p50": gaps[len(gaps) // 2], "p99": gaps[len(gaps) * 99 // 100]}


if __name__ == "__main__":
    main()
