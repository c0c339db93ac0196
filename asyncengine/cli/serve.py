"""``asyncengine serve``: the process around the server, with its signals and its log."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal

from asyncengine.cli import flags
from asyncengine.cli.embed import (
    BUNDLED_MODEL_NAME,
    COMMON_ENGINE,
    add_engine,
    add_model,
    check_model,
    engine_from,
    loop_factory,
)
from asyncengine.cli.log import Log
from asyncengine.errors import ConfigError, EngineDeadError
from asyncengine.server.config import ServerConfig
from asyncengine.version import VERSION

if TYPE_CHECKING:
    from asyncengine.server.engine_api import Engine

logger = logging.getLogger("asyncengine.server")

_COMMON = ("host", "port", "served_model_name", "api_key_file", "cors_origins", "tool_call_parser", "reasoning_parser")
_COMMON_ENGINE_SERVED = (
    "max_num_seqs", "gpu_memory_utilization", "target_itl_ms", "kv_cache_memory_bytes", "host_kv_memory_bytes",
)  # fmt: skip
"""Options that the short help shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [options]"
    add_model(parser)
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        metavar="LEVEL",
        default=argparse.SUPPRESS,
        help="debug, info, warning or error (default: info)",
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default=argparse.SUPPRESS,
        help="For people or for programs. json: an object a line, with the numbers of each request. (default: text)",
    )
    flags.add_dataclass(parser, ServerConfig, "server", several=("served_model_name",), common=_COMMON)
    add_engine(parser, common=(*COMMON_ENGINE, *_COMMON_ENGINE_SERVED))


def run(args: argparse.Namespace) -> int:
    options = flags.values(args, ServerConfig)
    if "model" not in args:
        if len(options.get("served_model_name", ())) > 1:
            raise ConfigError("no MODEL is given: put it before --served-model-name, which takes all words behind it")
        options.setdefault("served_model_name", BUNDLED_MODEL_NAME)
    config = ServerConfig(**options)
    if config.kv_events_endpoint is not None:
        args.kv_events = True
    check_model(args)

    async def load() -> Engine:
        engine = await asyncio.to_thread(engine_from, args)  # so that /health answers meanwhile
        await engine.start()
        return engine

    return run_server(config, load, getattr(args, "log_level", "info"), getattr(args, "log_format", "text"))


def run_server(
    config: ServerConfig,
    load: Callable[[], Awaitable[Engine]],
    log_level: str = "info",
    log_format: Literal["text", "json"] = "text",
) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP; returns the exit code. A dead engine ends the process with 1."""
    log = Log(log_level, log_format)
    try:
        logger.info("asyncengine %s", VERSION)
        _raise_file_limit()
        # Until the model is loaded there is nothing to drain and a loading thread cannot be interrupted:
        # let the signal end the process.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            try:
                runner.run(_serve(config, load))
            except EngineDeadError:
                log.stop()
                os._exit(1)  # leaving the usual way waits for threads, and some may hang with the engine
        return 0
    finally:
        log.stop()


async def _serve(config: ServerConfig, load: Callable[[], Awaitable[Engine]]) -> None:
    from asyncengine.server.http_server import serve

    stop = asyncio.Event()

    async def load_and_settle() -> Engine:
        engine = await load()
        # Freeze all objects that exist now, which live as long as the process: a full collection then examines only the
        # garbage of requests, and pauses streams no longer than that takes.
        gc.collect()
        gc.freeze()
        _handle_signals(stop)
        return engine

    await serve(config, load_and_settle, stop)


def _handle_signals(stop: asyncio.Event) -> None:
    """The first signal drains; a second one ends the process at once, whatever the event loop does meanwhile."""
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # which nohup sets
        numbers.append(signal.SIGHUP)

    def on_signal(number: signal.Signals) -> None:
        logger.info("%s received", number.name)
        stop.set()
        for n in numbers:
            loop.remove_signal_handler(n)
            signal.signal(n, signal.SIG_DFL)

    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
        _only_once(number)


def _only_once(number: signal.Signals) -> None:
    """Have the kernel restore the default action as it delivers the signal.

    Python runs handlers between bytecodes of the main thread: a loop that hangs would never get to ``on_signal``.
    Where the C library has no ``sysv_signal`` that remains so.
    """
    sysv_signal = getattr(ctypes.CDLL(None), "sysv_signal", None)
    if sysv_signal is not None:
        sysv_signal.argtypes, sysv_signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        sysv_signal(number, sysv_signal(number, None))  # which returns Python's own handler
        signal.siginterrupt(number, False)


def _raise_file_limit() -> None:
    """Every client is a file descriptor, and the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
