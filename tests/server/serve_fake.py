"""``asyncengine serve`` with a fake engine in place of the model: the same process, signals and log."""

from __future__ import annotations

import argparse
import asyncio
import sys

from fake_engine import FakeEngine

from asyncengine.cli.serve import run_server
from asyncengine.errors import ModelNotFoundError
from asyncengine.server.config import ServerConfig


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--max-model-len", type=int, default=100_000)
    parser.add_argument("--shutdown-timeout-s", type=float, default=30.0)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()

    async def load() -> FakeEngine:
        await asyncio.sleep(args.load_s)
        if args.max_model_len < 1:
            raise ModelNotFoundError("no such model")
        return FakeEngine(step_s=args.step_s, max_model_len=args.max_model_len)

    return run_server(ServerConfig(port=args.port, shutdown_timeout_s=args.shutdown_timeout_s), load)


if __name__ == "__main__":
    sys.exit(main())
