"""The server's process of bench/hostile.py, and the watch over its event loop.

A ticker on the loop is due every 5 ms. Between two of its ticks the watch measures the lag (the time between due and
run) and the processor time of the loop's thread. The lag counts what other processes took from a busy machine; the
processor time is what the server itself did in one go. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import selectors
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hostile_requests import Address

from asyncengine import bundled_model, testing

TICK_S = 0.005
STALLED, NORMAL = 100, 100
STEP_US = 10_000
_WRITE_TIMEOUT_S = 1.5

_ROOT = Path(__file__).resolve().parents[1]
_WAITING = (asyncio.__path__[0], selectors.__file__)
"""Files of the innermost frame of a loop that waits: its work is over, and its stack tells nothing."""


class Server:
    """A server process and the commands to its watch: a line in, a line of JSON out.

    ``options`` are the command line of this file.
    """

    def __init__(self, *options: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if " ready on " in line:
                host, port = line.rsplit("//", 1)[1].strip().split(":")
                self.address: Address = host, int(port)
                break
        else:
            raise SystemExit("the server did not start")
        threading.Thread(target=self._process.stderr.read, daemon=True).start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()  # what hostile requests began may take long to drain
        self._process.communicate()

    def _command(self, word: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def reset(self) -> None:
        """Forget lags and processor times, and the peak of resident memory."""
        self._command("reset")
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def report(self) -> dict[str, Any]:
        report_: dict[str, Any] = self._command("report")
        return report_

    def resident_mb(self, which: str) -> float:
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith(which):
                return int(line.split()[1]) * 1024 / 1e6
        raise LookupError(which)


class Watch:
    """Measures the event loop that it runs on, and notes its stack when it is late."""

    def __init__(self) -> None:
        self._loop_thread = threading.get_ident()
        self._tick, self._used = time.perf_counter(), time.thread_time()
        self._max_lag = self._max_busy = self._max_collection = 0.0
        self._collecting = 0.0
        self._stack: list[str] = []
        self._stack_lag = 0.0
        self._closed = False
        gc.callbacks.append(self._on_collection)
        threading.Thread(target=self._look, daemon=True).start()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def obey(self, commands: Iterable[str]) -> None:
        """Answer each line of ``commands`` on standard output, in a thread."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            for line in commands:
                # On the loop, so that a lag that lasts is over, and counted, before it is reported.
                loop.call_soon_threadsafe(self.answer, line.strip())

        threading.Thread(target=read, daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._task.cancel()
        gc.callbacks.remove(self._on_collection)

    async def _run(self) -> None:
        while True:
            self._tick, self._used = time.perf_counter(), time.thread_time()
            await asyncio.sleep(TICK_S)
            self._look_at_clocks()

    def _look_at_clocks(self) -> None:
        self._max_lag = max(self._max_lag, time.perf_counter() - self._tick - TICK_S)
        self._max_busy = max(self._max_busy, time.thread_time() - self._used)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        else:
            self._max_collection = max(self._max_collection, time.perf_counter() - self._collecting)

    def _look(self) -> None:
        while not self._closed:
            time.sleep(0.01)
            lag = time.perf_counter() - self._tick - TICK_S
            # Not each time that it is a little longer: the last look may come when the work is over.
            if lag > max(0.03, 1.2 * self._stack_lag):
                frame = sys._current_frames()[self._loop_thread]
                if frame.f_code.co_filename.startswith(_WAITING):
                    continue
                self._stack_lag = lag
                stack = traceback.format_stack(frame)
                self._stack = [line.replace(f"{_ROOT}/", "") for line in stack]  # a record names no folder of a machine

    def answer(self, command: str) -> None:
        """Print what was seen; after "reset" it is forgotten. Runs on the loop, whose thread's time it reads."""
        self._look_at_clocks()
        seen = {
            "max_lag_ms": self._max_lag * 1e3,
            "max_busy_ms": self._max_busy * 1e3,
            "max_collection_ms": self._max_collection * 1e3,
            "stack": self._stack,
        }
        if command == "reset":
            self._tick, self._used = time.perf_counter(), time.thread_time()
            self._max_lag = self._max_busy = self._max_collection = self._stack_lag = 0.0
            self._stack = []
        print(json.dumps(seen), flush=True)


def serve(kind: str, model: str) -> None:
    """The server's process: what ``asyncengine serve`` runs."""
    from asyncengine import AsyncEngine
    from asyncengine.cli.serve import run_server
    from asyncengine.server.config import ServerConfig

    watch: list[Watch] = []

    async def load() -> Any:
        if kind == "bundled":
            engine = AsyncEngine.from_pretrained(model)
        else:
            engine = testing.SimulatedEngine(read_kv=False, step_latency_us=STEP_US, max_num_seqs=STALLED + NORMAL)
        await engine.start()
        watch.append(Watch())
        watch[0].obey(sys.stdin)
        return engine

    if kind == "bundled":
        config = ServerConfig(port=0, served_model_name="stories")
    else:
        # The long name makes long events, which fill a socket's buffers with few tokens.
        config = ServerConfig(port=0, served_model_name="m" * 2000, write_timeout_s=_WRITE_TIMEOUT_S)
    run_server(config, load)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=("bundled", "simulated"))
    parser.add_argument("--model", default=str(bundled_model()))
    args = parser.parse_args()
    serve(args.kind, args.model)


if __name__ == "__main__":
    main()
