"""``asyncengine chat``: a conversation on the terminal, or one turn per line of a pipe."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any, Protocol

from asyncengine.api.request import ChatMessage, SamplingParams
from asyncengine.cli import flags
from asyncengine.cli.batch import warn_of_idle_flags
from asyncengine.cli.chat_commands import NOT_FOR_CHATS, Conversation, command, is_command
from asyncengine.cli.chat_input import Typed
from asyncengine.cli.embed import add_engine, add_model, add_sampling, engine_from, loop_factory, running
from asyncengine.cli.wrap import Wrap
from asyncengine.errors import AsyncEngineError, ContextLengthError, EngineDeadError, KVCapacityError

if TYPE_CHECKING:
    from asyncengine.cli.remote import Remote
    from asyncengine.engine.engine import AsyncEngine

_DEFAULTS = {"max_tokens": None}


class Partner(Protocol):
    """The other side of a chat: an engine or a server that answers."""

    def answer(self, messages: list[ChatMessage], sampling: dict[str, Any]) -> AsyncGenerator[str, None]:
        """The answer, piece by piece. Raises AsyncEngineError, OSError."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [options]"
    add_model(parser)
    parser.add_argument(
        "--url",
        metavar="TEXT",
        default=argparse.SUPPRESS,
        help="Server to talk to, http://HOST:PORT or unix:PATH. It answers in place of an engine in this process; "
        "--model is then the name that it knows the model by, or else the first that it lists.",
    )
    parser.add_argument("--api-key", metavar="TEXT", default=argparse.SUPPRESS, help="key of that server")
    parser.add_argument("--system", metavar="TEXT", default=argparse.SUPPRESS, help="system message")
    add_sampling(parser, NOT_FOR_CHATS, _DEFAULTS)
    add_engine(parser, exclude=("seed",))


def run(args: argparse.Namespace) -> int:
    sampling = flags.values(args, SamplingParams)
    SamplingParams(**_DEFAULTS | sampling)  # or they are refused now
    if "url" in args:
        warn_of_idle_flags(args)
    conversation = Conversation(system=getattr(args, "system", None), sampling=sampling)
    # The loop runs only while there is an answer to produce; in between, input() blocks the main
    # thread as in any terminal program, so Ctrl-C and line editing behave.
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        stack = AsyncExitStack()
        try:
            partner = runner.run(_partner(args, stack))
            with Typed() as typed:
                for text in typed:
                    if is_command(text):
                        if not command(conversation, text):
                            break
                    else:
                        conversation.ask(text.removeprefix("/"))
                    if conversation.waits:
                        _turn(runner, partner, conversation)
        finally:
            runner.run(stack.aclose())
    return 0


def _turn(runner: asyncio.Runner, partner: Partner, conversation: Conversation) -> None:
    """Print the answer. The part that came before an interruption stays in the conversation."""
    parts: list[str] = []
    try:
        runner.run(_print(partner, conversation, parts))
    except (KeyboardInterrupt, ContextLengthError, KVCapacityError) as exc:
        _tell(exc)
    except (AsyncEngineError, OSError) as exc:
        if isinstance(exc, BrokenPipeError | EngineDeadError) or not sys.stdin.isatty():
            raise
        _tell(exc)
    conversation.answered("".join(parts))


def _tell(exc: BaseException) -> None:
    print(f"\n[{str(exc) or 'interrupted'}]", file=sys.stderr)


async def _print(partner: Partner, conversation: Conversation, parts: list[str]) -> None:
    wrap = Wrap(shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
    try:
        async with aclosing(partner.answer(conversation.messages, conversation.sampling)) as pieces:
            async for text in pieces:
                parts.append(text)
                print(wrap.feed(text) if wrap else text, end="", flush=True)
    finally:
        print(wrap.flush() if wrap else "", end="", flush=True)
    print()


async def _partner(args: argparse.Namespace, stack: AsyncExitStack) -> Partner:
    if "url" not in args:
        return _Local(await stack.enter_async_context(running(engine_from(args))))
    from asyncengine.cli.remote import Remote

    remote = await stack.enter_async_context(Remote(args.url, getattr(args, "api_key", None)))
    return _Elsewhere(remote, getattr(args, "model", None) or await remote.first_model())


class _Local:
    """An engine of this process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def answer(self, messages: list[ChatMessage], sampling: dict[str, Any]) -> AsyncGenerator[str, None]:
        stream = await self._engine.submit(messages, SamplingParams(**_DEFAULTS | sampling))
        try:
            async for delta in stream:
                yield delta.text
        finally:
            await stream.aclose()


class _Elsewhere:
    """A server."""

    def __init__(self, remote: Remote, model: str) -> None:
        self._remote = remote
        self._model = model

    def answer(self, messages: list[ChatMessage], sampling: dict[str, Any]) -> AsyncGenerator[str, None]:
        return self._remote.chat({"model": self._model, "messages": messages, **sampling})
