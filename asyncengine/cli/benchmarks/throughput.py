"""Many requests of mixed lengths at once: useful tokens per second."""

from __future__ import annotations

import argparse
import asyncio
import random
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from asyncengine.api.request import SamplingParams
from asyncengine.cli import flags
from asyncengine.cli.benchmarks.latency import describe
from asyncengine.cli.benchmarks.lengths import Lengths, check_counts
from asyncengine.cli.benchmarks.report import Figure, median, print_figures, record
from asyncengine.cli.embed import add_engine, add_model, engine_from, loop_factory, running

HELP = "many requests of mixed lengths at once through the embedded API: useful tokens per second"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of ``asyncengine bench throughput``. Wrong values raise ConfigError."""

    num_prompts: int = 64
    """Requests, all submitted at once."""
    input_len: str = "16-256"
    """Tokens in a prompt: a number, or a range drawn from evenly."""
    output_len: str = "16-128"
    """Tokens to generate, likewise."""
    repeats: int = 3
    """Rounds, each with prompts of its own."""

    def __post_init__(self) -> None:
        check_counts(num_prompts=self.num_prompts, repeats=self.repeats)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [options]"
    add_model(parser)
    flags.add_dataclass(parser, Options, "measurement")
    add_engine(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_run(args, Options(**flags.values(args, Options))))


async def _run(args: argparse.Namespace, options: Options) -> dict[str, Any]:
    rng = random.Random(0)
    input_len = Lengths.parse("input_len", options.input_len)
    output_len = Lengths.parse("output_len", options.output_len)
    rounds: list[tuple[float, int, int]] = []
    async with running(engine_from(args)) as engine:
        vocabulary = range(engine.model_info.vocab_size)
        await engine.generate(rng.choices(vocabulary, k=input_len.low), SamplingParams(max_tokens=2, ignore_eos=True))
        for _ in range(options.repeats):
            # Random prompts, so that the prefix cache finds nothing.
            work = [
                (rng.choices(vocabulary, k=input_len.draw(rng)), output_len.draw(rng))
                for _ in range(options.num_prompts)
            ]
            start = perf_counter()
            outputs = await asyncio.gather(
                *(
                    engine.generate(prompt, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))
                    for prompt, n in work
                )
            )
            seconds = perf_counter() - start
            generated = sum(output.usage.completion_tokens for output in outputs)
            rounds.append((seconds, sum(len(prompt) for prompt, _ in work), generated))
        model = describe(engine)
    figures = [
        Figure("requests", median([options.num_prompts / seconds for seconds, _, _ in rounds]), "req/s"),
        Figure("output", median([generated / seconds for seconds, _, generated in rounds]), "tokens/s"),
        Figure("prompts and output", median([(p + g) / seconds for seconds, p, g in rounds]), "tokens/s"),
    ]
    title = f"Throughput, {options.num_prompts} requests: {model['name']}, {model['dtype']} (medians)"
    print_figures(title, figures)
    return record("throughput", figures, repeats=options.repeats, settings=asdict(options), model=model, rounds=rounds)
