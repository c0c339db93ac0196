"""Common parts of the commands that run an engine in this process."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from asyncengine.api.request import SamplingParams
from asyncengine.cli import flags
from asyncengine.config import EngineConfig

if TYPE_CHECKING:
    from asyncengine.engine.engine import AsyncEngine

BUNDLED_MODEL_NAME = "stories"
MODEL_HELP = "directory or hub id (default: a bundled one)"
COMMON_ENGINE = ("dtype", "quantization", "device", "max_model_len", "kv_cache_dtype")
_COMMON_SAMPLING = ("max_tokens", "temperature", "top_p", "stop", "seed")
"""Options that the short help shows."""


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loops where uvloop exists; None means asyncio's own."""
    try:
        import uvloop
    except ImportError:  # not made for this platform
        return None
    return uvloop.new_event_loop


def add_model(parser: argparse.ArgumentParser, *, positional: bool = True) -> None:
    """MODEL and ``--model``, which say the same. A command that tells its own arguments apart has the option alone."""
    if positional:
        parser.add_argument(
            "model", metavar="MODEL", nargs="?", action=_OneModel, default=argparse.SUPPRESS, help=MODEL_HELP
        )
    text = "the same as MODEL" if positional else MODEL_HELP
    action = parser.add_argument(
        "--model", metavar="MODEL", dest="model", action=_OneModel, default=argparse.SUPPRESS, help=text
    )
    if positional:
        action.is_rare = True  # type: ignore[attr-defined]


class _OneModel(argparse.Action):
    """MODEL and ``--model``."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: object = None
    ) -> None:
        set_model(parser, namespace, values)


def set_model(parser: argparse.ArgumentParser, args: argparse.Namespace, model: str) -> None:
    """The command line names a model. Two different ones are a usage error."""
    if getattr(args, "model", model) != model:
        parser.error(f"two models are given: {args.model} and {model}")
    args.model = model


def add_engine(
    parser: argparse.ArgumentParser, exclude: Collection[str] = (), common: Collection[str] = COMMON_ENGINE
) -> None:
    """Options of the engine, without the model. The short help shows those of ``common``."""
    flags.add_dataclass(parser, EngineConfig, "engine", exclude={"model", *exclude}, common=common)


def add_sampling(parser: argparse.ArgumentParser, exclude: Collection[str], defaults: Mapping[str, object]) -> None:
    """Sampling parameters of a request."""
    flags.add_dataclass(parser, SamplingParams, "sampling", exclude=exclude, defaults=defaults, common=_COMMON_SAMPLING)


def check_model(args: argparse.Namespace) -> None:
    """Raises ModelError at once for a model that is no directory of a model and can be no hub id."""
    from asyncengine.models.files import read_config
    from asyncengine.models.gguf.paths import is_gguf
    from asyncengine.models.weights.hub import local_directory

    if "model" in args and (directory := local_directory(args.model)) is not None and not is_gguf(directory):
        read_config(directory)


def engine_from(args: argparse.Namespace) -> AsyncEngine:
    """The engine that the flags describe, not started. Imports torch, which takes seconds."""
    check_model(args)
    from asyncengine.bundled import path as bundled_path
    from asyncengine.engine.engine import AsyncEngine

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
