"""One request at a time: how long until the first token, and between tokens."""

from __future__ import annotations

import argparse
import asyncio
import random
from dataclasses import asdict, dataclass
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any

from asyncengine.api.request import SamplingParams
from asyncengine.cli import flags
from asyncengine.cli.benchmarks.lengths import Lengths, check_counts
from asyncengine.cli.benchmarks.report import Figure, mean, percentile, print_figures, record
from asyncengine.cli.embed import add_engine, add_model, engine_from, loop_factory, running

if TYPE_CHECKING:
    from asyncengine.engine.engine import AsyncEngine

HELP = "one request at a time through the embedded API: time to first token, time between tokens"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of ``asyncengine bench latency``. Wrong values raise ConfigError."""

    num_prompts: int = 20
    """Requests to time."""
    num_warmups: int = 2
    """Requests before them."""
    input_len: str = "64"
    """Tokens in a prompt: a number, or a range such as 16-128 drawn from evenly."""
    output_len: str = "64"
    """Tokens to generate, likewise."""

    def __post_init__(self) -> None:
        check_counts(num_prompts=self.num_prompts)
        check_counts(least=0, num_warmups=self.num_warmups)


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
    ttft: list[float] = []
    tpot: list[float] = []
    itl: list[float] = []
    async with running(engine_from(args)) as engine:
        for i in range(-options.num_warmups, options.num_prompts):
            # Random prompts, so that the prefix cache finds nothing.
            prompt = rng.choices(range(engine.model_info.vocab_size), k=input_len.draw(rng))
            start, times, tokens = await _one(engine, prompt, output_len.draw(rng))
            if i < 0:
                continue
            ttft.append(1e3 * (times[0] - start))
            itl += [1e3 * (b - a) for a, b in pairwise(times)]
            if tokens > 1:
                tpot.append(1e3 * (times[-1] - times[0]) / (tokens - 1))
        model = describe(engine)
    figures = [
        figure
        for name, values in (("TTFT", ttft), ("TPOT", tpot), ("ITL", itl))
        for figure in (
            Figure(f"{name} mean", mean(values), "ms"),
            *(Figure(f"{name} p{p}", percentile(values, p), "ms") for p in (50, 95, 99)),
        )
    ]
    print_figures(f"Latency, one request at a time: {model['name']}, {model['dtype']}", figures)
    return record("latency", figures, repeats=options.num_prompts, settings=asdict(options), model=model)


async def _one(engine: AsyncEngine, prompt: list[int], max_tokens: int) -> tuple[float, list[float], int]:
    """Start, when each delta came, and the count of tokens."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    start, times, tokens = perf_counter(), [], 0
    async for delta in engine.stream(prompt, params):
        times.append(perf_counter())
        tokens += len(delta.token_ids)
    return start, times, tokens


def describe(engine: AsyncEngine) -> dict[str, Any]:
    """The model, and what of the configuration shapes its speed."""
    info, config = engine.model_info, engine.config
    return {
        "name": info.name,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "parameters": info.num_parameters,
        "load_format": config.load_format,
        "threads": config.num_threads,
        "max_num_seqs": config.max_num_seqs,
        "prefill_attention": config.prefill_attention,
    }
