"""``asyncengine generate``: continue one prompt, streaming to stdout."""

from __future__ import annotations

import argparse
import asyncio
import sys

from asyncengine.cli import flags
from asyncengine.cli.embed import add_model_option, engine_from, loop_factory, running
from asyncengine.config import EngineConfig
from asyncengine.request import SamplingParams

_DEFAULTS = {"max_tokens": None}  # until the model ends it, or the reader does with Ctrl-C


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s PROMPT [options]"
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads standard input")
    add_model_option(parser)
    flags.add_dataclass(parser, SamplingParams, "sampling", exclude=("n",), defaults=_DEFAULTS)
    # --seed is the sampling seed here, the one that a single request is about.
    flags.add_dataclass(parser, EngineConfig, "engine", exclude=("model", "seed"))


def run(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    params = SamplingParams(**_DEFAULTS | flags.values(args, SamplingParams))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_generate(args, prompt, params))
    return 0


async def _generate(args: argparse.Namespace, prompt: str, params: SamplingParams) -> None:
    async with running(engine_from(args)) as engine:
        stream = await engine.submit(prompt, params)
        print(prompt, end="", flush=True)
        async for delta in stream:
            print(delta.text, end="", flush=True)
        print()
