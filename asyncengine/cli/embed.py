"""What the commands that run an engine in this process share."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
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
