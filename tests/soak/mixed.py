"""Mixed traffic for half an hour: memory and descriptors stay, every answer is right.

    python -m tests.soak.mixed --minutes 30 --seed 1

The server is a process of its own, started like a user's. A line is fitted to its resident memory after a warm-up,
in which the KV cache fills for the first time: 402 MB with the bundled model, whose pages the kernel gives when they
are written.
Traffic stops at the end of the warm-up and at the end of the run, and both times the server must have come to rest:
gauges at zero, the canary's text the golden one, descriptors no more than before. Prints a summary as JSON; exits
with 1 if something failed. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import uvloop

from asyncengine.cli.benchmarks import report
from tests.soak.http import exchange, get, metric, post
from tests.soak.server import Server, serving
from tests.soak.traffic import COMPLETIONS, Traffic

CANARY = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "request_body_bytes")
MAX_SLOPE_MB = 1.0  # in ten minutes
SETTLE_S = 10.0


@dataclass
class Samples:
    """The server seen from outside, every ``interval_s``."""

    seconds: list[float] = field(default_factory=list)
    resident_mb: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)
    """Milliseconds that /health took: the event loop's lag, and the machine's."""

    def slope_mb(self, after_s: float) -> float | None:
        """Growth of the resident memory in ten minutes, of the samples after ``after_s``; None of fewer than two."""
        kept = [(s, mb) for s, mb in zip(self.seconds, self.resident_mb, strict=True) if s >= after_s]
        if len(kept) < 2:
            return None
        return statistics.linear_regression(*zip(*kept, strict=True)).slope * 600


async def soak(
    seconds: float, warm_up_s: float, seed: int, clients: int = 16, interval_s: float = 5.0
) -> dict[str, Any]:
    """The summary, in which ``failures`` says what went wrong; the slope is not judged."""
    failures: list[str] = []
    samples = Samples()
    async with serving("--served-model-name", "stories") as server:
        golden = await _canary(server)
        traffic = Traffic(server.address, seed, clients)
        started = time.monotonic()
        watching = asyncio.create_task(_watch(server, samples, started, interval_s))
        traffic.start()
        await asyncio.sleep(warm_up_s)
        await traffic.stop()
        descriptors = [await _rest(server, golden, failures, None)]
        traffic.start()
        await asyncio.sleep(max(0.0, started + seconds - time.monotonic()))
        await traffic.stop()
        watching.cancel()
        await asyncio.wait({watching})
        if not watching.cancelled():
            watching.result()
        descriptors.append(await _rest(server, golden, failures, descriptors[0]))
        failures += [f"the log: {line.strip()}" for line in server.log if " ERROR " in line or "Traceback" in line]
    if any(status >= 500 for status in traffic.statuses):
        failures.append(f"statuses: {dict(traffic.statuses)}")
    if not traffic.compared:
        failures.append("no answer was compared with another")
    return {
        "seed": seed,
        "seconds": time.monotonic() - started,
        "warm-up seconds": warm_up_s,
        "clients": clients,
        "requests": dict(traffic.requests.most_common()),
        "statuses": dict(traffic.statuses),
        "answers compared": traffic.compared,
        "descriptors at rest": descriptors,
        "descriptors, most": max(samples.descriptors, default=None),
        "resident MB": [samples.resident_mb[0], samples.resident_mb[-1]] if samples.resident_mb else None,
        "resident MB, slope in 10 minutes": samples.slope_mb(warm_up_s),
        "/health, slowest ms": max(samples.health_ms, default=None),
        "failures": [*failures, *traffic.failures],
        "number of failures": len(failures) + traffic.num_failures,
        "samples": vars(samples),
    }


async def _canary(server: Server) -> str:
    answer = await exchange(server.address, post(COMPLETIONS, CANARY))
    if answer.status != 200 or answer.completion_tokens != CANARY["max_tokens"]:
        raise RuntimeError(f"the canary got {answer.status}: {answer.body[:300]!r}")
    return answer.texts[0]


async def _watch(server: Server, samples: Samples, started: float, interval_s: float) -> None:
    due = time.monotonic()
    while True:
        begun = time.monotonic()
        await exchange(server.address, get("/health"))
        samples.health_ms.append((time.monotonic() - begun) * 1e3)
        samples.seconds.append(time.monotonic() - started)
        samples.resident_mb.append(server.resident_mb)
        samples.descriptors.append(server.descriptors)
        due += interval_s
        await asyncio.sleep(max(0.0, due - time.monotonic()))


async def _rest(server: Server, golden: str, failures: list[str], most_descriptors: int | None) -> int:
    """Check that nothing of the traffic is left. Returns the number of open descriptors."""
    end = time.monotonic() + SETTLE_S  # connections that were half-closed or left are seen a little later
    while True:
        gauges = {name: await metric(server.address, f"asyncengine:{name}") for name in GAUGES}
        await asyncio.sleep(0.2)
        descriptors = server.descriptors
        at_rest = not any(gauges.values()) and (most_descriptors is None or descriptors <= most_descriptors)
        if at_rest and most_descriptors is not None:
            break
        if time.monotonic() > end:
            if not at_rest:
                failures.append(f"not at rest: {gauges}, {descriptors} descriptors, {most_descriptors} before")
            break
    if await _canary(server) != golden:
        failures.append("the canary's text has changed")
    return descriptors


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.mixed", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--warm-up-minutes", type=float, help="(default: a third, 5 at least)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--json", metavar="FILE", help="save the summary with all samples there")
    args = parser.parse_args()
    warm_up = max(5.0, args.minutes / 3) if args.warm_up_minutes is None else args.warm_up_minutes
    if warm_up >= args.minutes:
        parser.error(f"--minutes must exceed the warm-up of {warm_up:g}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        summary = runner.run(soak(args.minutes * 60, warm_up * 60, args.seed, args.clients))
    slope = summary["resident MB, slope in 10 minutes"]
    if slope is None or slope >= MAX_SLOPE_MB:
        summary["failures"].append(f"resident memory grew by {slope} MB in 10 minutes")
        summary["number of failures"] += 1
    record = report.record("soak_mixed", [], repeats=1, settings=vars(args)) | summary
    if args.json is not None:
        report.write(args.json, record)
    print(json.dumps({name: value for name, value in record.items() if name != "samples"}, indent=2))
    return 1 if summary["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
