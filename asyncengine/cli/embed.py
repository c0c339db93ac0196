"""What the commands that run an engine in this process share."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from asyncengine.cli import flags
from asyncengine.config import EngineConfig

if TYPE_CHECKING:
    from asyncengine.engine import AsyncEngine

BUNDLED_MODEL_NAME = "stories"
MODEL_HELP = "directory or hub id; without it, the small bundled model"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loops where uvloop exists; None means asyncio's own."""
    try:
        import uvloop
    except ImportError:  # not made for this platform
        return None
    return uvloop.new_event_loop


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """``--model``, for commands whose positional argument is something else."""
    parser.add_argument("--model", metavar="MODEL", default=argparse.SUPPRESS, help=MODEL_HELP)


def engine_from(args: argparse.Namespace) -> AsyncEngine:
    """The engine that the flags describe, not started. Imports torch, which takes seconds."""
    from asyncengine.bundled import path as bundled_path
    from asyncengine.engine import AsyncEngine

    options: dict[str, Any] = flags.values(args, EngineConfig)
    model = options.pop("model", None) or str(bundled_path())
    return AsyncEngine.from_pretrained(model, **options)


async def start(engine: AsyncEngine) -> None:
    """Load the model. Ctrl-C meanwhile ends the process: nothing can interrupt the thread that loads or downloads."""
    before = signal.getsignal(signal.SIGINT)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        await engine.start()
    finally:
        signal.signal(signal.SIGINT, before)


@asynccontextmanager
async def running(engine: AsyncEngine) -> AsyncIterator[AsyncEngine]:
    """The engine, started as by ``start`` and closed in the end."""
    await start(engine)
    try:
        yield engine
    finally:
        await engine.aclose(drain=False)
