"""``asyncengine chat``: a conversation on the terminal, or one turn per line of a pipe."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncengine.cli import flags
from asyncengine.cli.embed import add_model_option, engine_from, loop_factory, start
from asyncengine.config import EngineConfig
from asyncengine.errors import ContextLengthError, KVCapacityError
from asyncengine.request import ChatMessage, SamplingParams

if TYPE_CHECKING:
    from asyncengine.engine import AsyncEngine

_DEFAULTS = {"max_tokens": None}
_HELP = "Ctrl-D ends, Ctrl-C interrupts an answer, /clear forgets the conversation."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    add_model_option(parser)
    parser.add_argument("--system", metavar="TEXT", default=argparse.SUPPRESS, help="system message")
    flags.add_dataclass(parser, SamplingParams, "sampling", exclude=("n",), defaults=_DEFAULTS)
    flags.add_dataclass(parser, EngineConfig, "engine", exclude=("model", "seed"))


def run(args: argparse.Namespace) -> int:
    params = SamplingParams(**_DEFAULTS | flags.values(args, SamplingParams))
    opening: list[ChatMessage] = []
    if "system" in args:
        opening.append({"role": "system", "content": args.system})
    messages = list(opening)
    # The loop runs only while there is an answer to produce; in between, input() blocks the main
    # thread as in any terminal program, so Ctrl-C and line editing behave.
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        engine = engine_from(args)
        runner.run(start(engine))
        try:
            for line in _lines():
                if line == "/clear":
                    messages = list(opening)
                    continue
                messages.append({"role": "user", "content": line})
                try:
                    answer = runner.run(_answer(engine, messages, params))
                except (KeyboardInterrupt, ContextLengthError, KVCapacityError) as exc:
                    messages.pop()
                    print(f"\n[{str(exc) or 'interrupted'}]", file=sys.stderr)
                    continue
                messages.append({"role": "assistant", "content": answer})
        finally:
            runner.run(engine.aclose(drain=False))
    return 0


def _lines() -> Iterator[str]:
    """What the user says, without empty lines."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  # gives input() its line editing and history

        print(_HELP, file=sys.stderr)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return
        if line:
            yield line


async def _answer(engine: AsyncEngine, messages: list[ChatMessage], params: SamplingParams) -> str:
    parts: list[str] = []
    async for delta in await engine.submit(messages, params):
        parts.append(delta.text)
        print(delta.text, end="", flush=True)
    print()
    return "".join(parts)
