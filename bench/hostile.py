"""How long hostile requests hold up the event loop, and the requests of others.

    python bench/hostile.py [--only REGEX] [--repeats N] [--json FILE]

The server is the real one with the bundled model, in a process of its own; clients are threads of this process. In the
server a ticker on the event loop is due every 5 ms, and its lag is the time between due and run. For each load: what
the requests got, the time to the last answer, the longest lag, the longest collection of garbage, the most that
resident memory grew, and the slowest of the small requests that a client sends one after the other meanwhile. An idle
server comes first: its figures are the machine's.

The readers of streams who stall are 100 among 100 normal ones, on the simulated device; without them is the control,
and both are run in turns. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from hostile_requests import NESTED_LOOPS, Address, Load, Outcome, completion, loads, render_nested_loops, status_of

from asyncengine import bundled_model, testing
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median, percentile
from asyncengine.cli.benchmarks.sse_client import SseResult, Target, read_sse

MAX_LAG_MS = 100.0
TICK_S = 0.005
SMALL = completion(b'{"prompt": "One day", "max_tokens": 1}')
STALLED, NORMAL = 100, 100
STEP_US, STREAM_TOKENS = 10_000, 300
_STALLED_TOKENS = 1500
_WRITE_TIMEOUT_S = 1.5


@dataclass(frozen=True)
class Run:
    """What one load did to the server."""

    statuses: dict[str, int]
    seconds: float
    max_lag_ms: float
    max_collection_ms: float
    growth_mb: float
    small_requests: int
    slowest_small_ms: float
    small_failed: dict[str, int]
    stack: list[str]
    """Of the event loop during its longest lag, if it was caught."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="loads whose name matches")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", default="bench/results/hostile.json")
    parser.add_argument("--serve", choices=("bundled", "simulated"), help=argparse.SUPPRESS)
    parser.add_argument("--model", default=str(bundled_model()), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve, args.model)
        return
    runs: dict[str, list[Run]] = {}
    for name, make in {"nothing": lambda: idle, **loads(), "a template of nested loops": render_nested_loops}.items():
        if re.search(args.only, name):
            runs[name] = [measure(make(), nested=make is render_nested_loops) for _ in range(args.repeats)]
            print_run(name, runs[name][-1])
    figures = [figure for name in runs for figure in summarize(name, runs[name])]
    stalls = []
    if re.search(args.only, "stalled readers"):
        stalls = [compare_stalled() for _ in range(3)]
        figures += summarize_stalls(stalls)
    report.print_figures("Hostile requests (the worst of the repeats)", figures)
    samples = {name: [vars(run) for run in runs[name]] for name in runs} | {"stalled readers": stalls}
    settings = {"tick ms": TICK_S * 1e3, "stalled": STALLED, "normal": NORMAL, "step µs": STEP_US}
    report.write(args.json, report.record("hostile", figures, repeats=args.repeats, settings=settings, runs=samples))


def idle(address: Address) -> Outcome:
    """The load of comparison."""
    time.sleep(3)
    return Outcome(Counter(), 3.0)


def print_run(name: str, run: Run) -> None:
    print(
        f"{name:<42} {run.statuses!s:<28} {run.seconds:6.2f} s, lag {run.max_lag_ms:6.1f} ms, "
        f"gc {run.max_collection_ms:5.1f} ms, {run.growth_mb:+7.1f} MB, "
        f"slowest of {run.small_requests} small {run.slowest_small_ms:7.1f} ms {run.small_failed or ''}"
    )
    if run.max_lag_ms > MAX_LAG_MS:
        print("".join(run.stack[-8:]))
    sys.stdout.flush()


def summarize(name: str, runs: list[Run]) -> list[Figure]:
    figures = [
        Figure(f"{name}: longest lag of the loop", max(r.max_lag_ms for r in runs), "ms", at_most=MAX_LAG_MS),
        Figure(f"{name}: slowest small request beside", max(r.slowest_small_ms for r in runs), "ms"),
        Figure(f"{name}: growth of resident memory", max(r.growth_mb for r in runs), "MB"),
        Figure(f"{name}: small requests that failed", sum(sum(r.small_failed.values()) for r in runs), "", at_most=0),
    ]
    return figures if name == "nothing" else [Figure(f"{name}: answered", max(r.seconds for r in runs), "s"), *figures]


def measure(load: Load, nested: bool = False) -> Run:
    """One load at a new server."""
    with tempfile.TemporaryDirectory() as folder:
        model = bundled_model()
        if nested:
            model = Path(folder) / "model"
            shutil.copytree(bundled_model(), model)
            (model / "chat_template.jinja").write_text(NESTED_LOOPS)
        with Server("bundled", "--model", str(model)) as server, beside(server.address) as small:
            time.sleep(0.5)
            small.clear()
            server.reset()
            before = server.resident_mb("VmRSS")
            outcome = load(server.address)
            time.sleep(0.3)
            seen = server.report()
            growth = server.resident_mb("VmHWM") - before
            times = list(small)
    return Run(
        statuses=dict(outcome.statuses),
        seconds=outcome.seconds,
        growth_mb=growth,
        small_requests=len(times),
        slowest_small_ms=max(seconds for _, seconds in times) * 1e3,
        small_failed=dict(Counter(status for status, _ in times if status != "200")),
        **seen,
    )


@contextmanager
def beside(address: Address) -> Iterator[list[tuple[str, float]]]:
    """Small requests one after the other; status and seconds of each."""
    results: list[tuple[str, float]] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.01):
            started = time.perf_counter()
            results.append((status_of(address, SMALL), time.perf_counter() - started))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield results
    finally:
        stop.set()
        thread.join()


class Server:
    """A server process and the commands to its watch: a line in, a line of JSON out."""

    def __init__(self, *options: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *options],
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
        """Forget the lags, and the peak of resident memory."""
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
    """Measures the event loop that it runs on, and notes what it does when it is late."""

    def __init__(self) -> None:
        self._loop_thread = threading.get_ident()
        self._tick = time.perf_counter()
        self._max_lag = self._max_collection = 0.0
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
            self._tick = time.perf_counter()
            await asyncio.sleep(TICK_S)
            self._max_lag = max(self._max_lag, time.perf_counter() - self._tick - TICK_S)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        else:
            self._max_collection = max(self._max_collection, time.perf_counter() - self._collecting)

    def _look(self) -> None:
        while not self._closed:
            time.sleep(0.01)
            lag = time.perf_counter() - self._tick - TICK_S
            if lag > max(0.03, self._stack_lag):
                self._stack_lag = lag
                self._stack = traceback.format_stack(sys._current_frames()[self._loop_thread])

    def answer(self, command: str) -> None:
        """Print what was seen; after "reset" it is forgotten."""
        lag = max(self._max_lag, time.perf_counter() - self._tick - TICK_S)
        seen = {"max_lag_ms": lag * 1e3, "max_collection_ms": self._max_collection * 1e3, "stack": self._stack}
        if command == "reset":
            self._max_lag = self._max_collection = self._stack_lag = 0.0
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


def compare_stalled() -> dict[str, Any]:
    """99th percentiles of the normal readers' time between events: without stalled ones, and among them."""
    return {which: _stalled_run(stalled) for which, stalled in (("control", 0), ("among stalled", STALLED))}


def _stalled_run(stalled: int) -> dict[str, Any]:
    with Server("simulated") as server:
        target = Target(*server.address, "/v1/completions")
        body = json.dumps({"prompt": [300], "max_tokens": _STALLED_TOKENS, "ignore_eos": True, "stream": True}).encode()
        sockets = []
        for _ in range(stalled):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(server.address)
            sock.sendall(completion(body))
            sockets.append(sock)
        before = server.resident_mb("VmRSS")
        server.reset()
        results = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(_streams(target))
        gaps = [b - a for r in results for a, b in zip(r.text_times, r.text_times[1:], strict=False)]
        cut = sum(_was_cut(sock) for sock in sockets)
        return {
            "p99_ms": percentile(gaps, 99) * 1e3,
            "p50_ms": percentile(gaps, 50) * 1e3,
            "failures": [r.failure for r in results if r.failure is not None],
            "cut": cut,
            "growth_mb": server.resident_mb("VmHWM") - before,
            "max_lag_ms": server.report()["max_lag_ms"],
        }


async def _streams(target: Target) -> list[SseResult]:
    fields = {"max_tokens": STREAM_TOKENS, "temperature": 0, "ignore_eos": True} | {
        "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    requests = [target.request(fields | {"prompt": [300 + i]}) for i in range(NORMAL)]
    return await asyncio.gather(*(read_sse(target, request, 120.0) for request in requests))


def _was_cut(sock: socket.socket) -> bool:
    """Whether a stream ended without its end."""
    received = b""
    with sock:
        sock.settimeout(30)
        try:
            while piece := sock.recv(1 << 16):
                received = (received + piece)[-100:]
        except ConnectionError:
            pass
    return b"[DONE]" not in received and not received.endswith(b"0\r\n\r\n")


def summarize_stalls(stalls: list[dict[str, Any]]) -> list[Figure]:
    def all_of(which: str, key: str) -> list[float]:
        return [run[which][key] for run in stalls]

    control, among = (median(all_of(which, "p99_ms")) for which in ("control", "among stalled"))
    return [
        Figure("readers: p99 between events, control", control, "ms"),
        Figure(f"readers: p99 between events, {STALLED} stalled", among, "ms"),
        Figure("readers: ratio", among / control, "", at_most=1.5),
        Figure("readers: stalled that were cut", min(all_of("among stalled", "cut")), "", at_least=STALLED),
        Figure("readers: growth of resident memory", max(all_of("among stalled", "growth_mb")), "MB"),
        Figure("readers: longest lag, control", max(all_of("control", "max_lag_ms")), "ms", at_most=MAX_LAG_MS),
        Figure("readers: longest lag", max(all_of("among stalled", "max_lag_ms")), "ms", at_most=MAX_LAG_MS),
        Figure("readers: streams that failed", sum(len(r[w]["failures"]) for r in stalls for w in r), "", at_most=0),
    ]


if __name__ == "__main__":
    main()
