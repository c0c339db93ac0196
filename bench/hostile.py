"""Delays that hostile requests cause to the event loop, and to the requests of others.

    python bench/hostile.py [--only REGEX] [--repeats N] [--json FILE]

The server is the real one with the bundled model, in a process of its own; clients are threads of this process. In the
server a ticker on the event loop is due every 5 ms. For each load: what the requests got, the time to the last answer,
the most processor time that the loop's thread took between two ticks, the longest lag (the time between due and run),
the longest collection of garbage, the most that resident memory grew, and the slowest of the small requests that a
client sends one after the other meanwhile. An idle server comes first: its figures are the machine's.

The limit is on processor time, because a lag counts what other processes took from a busy machine too.
tests/bench/test_hostile.py holds every body of hostile_bodies.py to the same limit.

The readers of streams who stall are 100 among 100 normal ones, on the simulated device; without them is the control,
and both are run in turns. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from hostile_bodies import BODIES, load_of
from hostile_requests import NESTED_LOOPS, Address, Load, Outcome, completion, loads, render_nested_loops, status_of
from hostile_server import NORMAL, STALLED, STEP_US, TICK_S, Server

from asyncengine import bundled_model
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median, percentile
from asyncengine.cli.benchmarks.sse_client import SseResult, Target, read_sse

MAX_BUSY_MS = 100.0
SMALL = completion(b'{"prompt": "One day", "max_tokens": 1}')
STREAM_TOKENS = 300
_STALLED_TOKENS = 1500
_NESTED = "a template of nested loops"


@dataclass(frozen=True)
class Run:
    """Effect of one load on the server."""

    statuses: dict[str, int]
    seconds: float
    max_lag_ms: float
    max_busy_ms: float
    """Processor time of the loop's thread between two ticks."""
    max_collection_ms: float
    growth_mb: float
    small_requests: int
    slowest_small_ms: float
    small_failed: dict[str, int]
    stack: list[str]
    """Stack of the event loop during its longest lag, if it was caught."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="loads whose name matches")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", default="bench/results/hostile.json")
    args = parser.parse_args()
    runs: dict[str, list[Run]] = {}
    for group in groups():
        chosen = {name: make for name, make in group.items() if re.search(args.only, name)}
        for _ in range(args.repeats if chosen else 0):
            for name, run in measure(chosen).items():
                runs.setdefault(name, []).append(run)
                print_run(name, run)
    figures = [figure for name in runs for figure in summarize(name, runs[name])]
    stalls = []
    if re.search(args.only, "stalled readers"):
        stalls = [compare_stalled() for _ in range(3)]
        figures += summarize_stalls(stalls)
    report.print_figures("Hostile requests (the worst of the repeats)", figures)
    samples = {name: [vars(run) for run in runs[name]] for name in runs} | {"stalled readers": stalls}
    settings = {"tick ms": TICK_S * 1e3, "stalled": STALLED, "normal": NORMAL, "step µs": STEP_US}
    report.write(args.json, report.record("hostile", figures, repeats=args.repeats, settings=settings, runs=samples))


def groups() -> list[dict[str, Callable[[], Load]]]:
    """Loads by name; each group has a server of its own. The bodies of one route are a group."""
    alone = {"nothing": lambda: idle, **loads(), _NESTED: render_nested_loops}
    by_route: dict[str, dict[str, Callable[[], Load]]] = {}
    for body in BODIES:
        by_route.setdefault(body.path, {})[body.name] = partial(load_of, body)
    return [*({name: make} for name, make in alone.items()), *by_route.values()]


def idle(address: Address) -> Outcome:
    """The load of comparison."""
    time.sleep(3)
    return Outcome(Counter(), 3.0)


def print_run(name: str, run: Run) -> None:
    print(
        f"{name:<42} {run.statuses!s:<28} {run.seconds:6.2f} s, busy {run.max_busy_ms:6.1f} ms, "
        f"lag {run.max_lag_ms:6.1f} ms, "
        f"gc {run.max_collection_ms:5.1f} ms, {run.growth_mb:+7.1f} MB, "
        f"slowest of {run.small_requests} small {run.slowest_small_ms:7.1f} ms {run.small_failed or ''}"
    )
    if run.max_busy_ms > MAX_BUSY_MS:
        print("".join(run.stack[-8:]))
    sys.stdout.flush()


def summarize(name: str, runs: list[Run]) -> list[Figure]:
    figures = [
        Figure(f"{name}: loop's processor time in one go", max(r.max_busy_ms for r in runs), "ms", at_most=MAX_BUSY_MS),
        Figure(f"{name}: longest lag of the loop", max(r.max_lag_ms for r in runs), "ms"),
        Figure(f"{name}: slowest small request beside", max(r.slowest_small_ms for r in runs), "ms"),
        Figure(f"{name}: growth of resident memory", max(r.growth_mb for r in runs), "MB"),
        Figure(f"{name}: small requests that failed", sum(sum(r.small_failed.values()) for r in runs), "", at_most=0),
    ]
    return figures if name == "nothing" else [Figure(f"{name}: answered", max(r.seconds for r in runs), "s"), *figures]


def measure(group: Mapping[str, Callable[[], Load]]) -> dict[str, Run]:
    """Measure each load of the group, one after the other, at one new server."""
    with tempfile.TemporaryDirectory() as folder:
        model = bundled_model()
        if _NESTED in group:
            model = Path(folder) / "model"
            shutil.copytree(bundled_model(), model)
            (model / "chat_template.jinja").write_text(NESTED_LOOPS)
        with Server("bundled", "--model", str(model)) as server, beside(server.address) as small:
            time.sleep(0.5)
            return {name: _observe(make(), server, small) for name, make in group.items()}


def _observe(load: Load, server: Server, small: list[tuple[str, float]]) -> Run:
    small.clear()
    server.reset()
    before = server.resident_mb("VmRSS")
    outcome = load(server.address)
    time.sleep(0.3)
    seen = server.report()
    times = list(small)
    return Run(
        statuses=dict(outcome.statuses),
        seconds=outcome.seconds,
        growth_mb=server.resident_mb("VmHWM") - before,
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
            "max_busy_ms": server.report()["max_busy_ms"],
        }


async def _streams(target: Target) -> list[SseResult]:
    fields = {"max_tokens": STREAM_TOKENS, "temperature": 0, "ignore_eos": True} | {
        "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    requests = [target.request(fields | {"prompt": [300 + i]}) for i in range(NORMAL)]
    return await asyncio.gather(*(read_sse(target, request, 120.0) for request in requests))


def _was_cut(sock: socket.socket) -> bool:
    """Return whether a stream ended without its end event."""
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

    limit = MAX_BUSY_MS
    control, among = (median(all_of(which, "p99_ms")) for which in ("control", "among stalled"))
    return [
        Figure("readers: p99 between events, control", control, "ms"),
        Figure(f"readers: p99 between events, {STALLED} stalled", among, "ms"),
        Figure("readers: ratio", among / control, "", at_most=1.5),
        Figure("readers: stalled that were cut", min(all_of("among stalled", "cut")), "", at_least=STALLED),
        Figure("readers: growth of resident memory", max(all_of("among stalled", "growth_mb")), "MB"),
        Figure("readers: loop's processor time, control", max(all_of("control", "max_busy_ms")), "ms", at_most=limit),
        Figure("readers: loop's processor time", max(all_of("among stalled", "max_busy_ms")), "ms", at_most=limit),
        Figure("readers: streams that failed", sum(len(r[w]["failures"]) for r in stalls for w in r), "", at_most=0),
    ]


if __name__ == "__main__":
    main()
