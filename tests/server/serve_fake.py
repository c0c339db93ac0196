"""``asyncengine serve`` with an engine without a model: the same process, signals and log."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import sys

from asyncengine.cli.serve import run_server
from asyncengine.errors import ModelNotFoundError
from asyncengine.server.config import ServerConfig
from asyncengine.testing import SimulatedEngine
from tests.server.fake_engine import FakeEngine

logger = logging.getLogger("chatter")


def _loop_for_ever() -> None:
    while True:
        pass


def _hold_the_gil() -> None:
    sum(itertools.repeat(0))


def _chat(count: int, alike: bool) -> None:
    for i in range(count):
        line = 0 if alike else i  # as if each were from a statement of its own
        logger.handle(logger.makeRecord(logger.name, logging.INFO, "chatter", line, "chatter %d", (i,), None))


HANGS = {"python": _loop_for_ever, "gil": _hold_the_gil}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--max-model-len", type=int, default=100_000)
    parser.add_argument("--shutdown-timeout-s", type=float, default=30.0)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--no-exit-on-death", dest="exit_on_death", action="store_false")
    parser.add_argument("--hang", choices=HANGS, help="the event loop, half a second after start")
    parser.add_argument("--chatter", type=int, default=0, help="log so many different lines half a second after start")
    parser.add_argument("--alike", action="store_true", help="the lines are one statement's")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="text")
    parser.add_argument("--fault", choices=("fail", "hang"), help="of a simulated device, at its 20th launch")
    args = parser.parse_args()

    async def load() -> FakeEngine | SimulatedEngine:
        await asyncio.sleep(args.load_s)
        if args.max_model_len < 1:
            raise ModelNotFoundError("no such model")
        if args.hang:
            asyncio.get_running_loop().call_later(0.5, HANGS[args.hang])
        if args.chatter:
            asyncio.get_running_loop().call_later(0.5, _chat, args.chatter, args.alike)
        if args.fault is None:
            return FakeEngine(step_s=args.step_s, max_model_len=args.max_model_len)
        engine = SimulatedEngine(step_latency_us=1e6 * args.step_s, step_timeout_s=1.0)
        await engine.start()
        (engine.device.fail_at if args.fault == "fail" else engine.device.hang_at)(20)
        return engine

    config = ServerConfig(port=args.port, shutdown_timeout_s=args.shutdown_timeout_s, exit_on_death=args.exit_on_death)
    return run_server(config, load, args.log_level, args.log_format)


if __name__ == "__main__":
    sys.exit(main())
