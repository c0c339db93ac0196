"""A stream of requests at a fixed rate through the embedded API: what each one waits for, and how evenly it is served.

    python bench/streaming.py [--model gpt2] [--requests 64] [--interval-ms 20] [--tokens 128] [--json FILE]

One producer submits a request every interval, a task each consumes them with text out. All figures are as the consumer
sees them, but for the queue: when a request was first scheduled, and its first token committed, the step thread says.

- submit lag: between the due time of a request and the call of ``submit``; add_request: inside ``submit``
- queue wait: from arrival to the first step that computes the prompt; prefill: from there to the first token
- TTFT: from the call of ``submit`` to the first delivery with a token; TPOT: from there to the last, per token
- ITL: between deliveries, as they are; tokens per delivery says how many came together
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from time import perf_counter
from typing import Any

from gpu_common import SHAPES, add_engine_options, greedy, opened

from asyncengine import AsyncEngine
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median, percentile
from asyncengine.cli.embed import loop_factory
from asyncengine.engine.stream import RequestStream

PROMPT = "Hello"
PERCENTS = (50, 95, 99)
_RATIO = "ITL p99 over p50"
#: Milliseconds. At the limit of the schedule, 64 requests of 128 tokens give 6,300 tokens/s.
TARGETS = {
    "gpt2": {
        "TTFT p50": {"at_most": 2.0},
        "TPOT p50": {"at_most": 0.40},
        _RATIO: {"at_most": 2.0},
        "throughput": {"at_least": 6000.0},
    },
    "qwen3-0.6b": {"TTFT p50": {"at_most": 3.0}, "TPOT p50": {"at_most": 0.9}, _RATIO: {"at_most": 2.0}},
    "llama-3.1-8b": {"TTFT p50": {"at_most": 8.0}, "TPOT p50": {"at_most": 4.6}, _RATIO: {"at_most": 2.0}},
}


@dataclass(slots=True)
class Trace:
    """One request; seconds of perf_counter, and of time.monotonic for what the engine says."""

    due: float
    submitted: float
    accepted: float
    deliveries: list[float] = field(default_factory=list)
    """times of deliveries that brought tokens"""
    tokens: int = 0
    characters: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", help=f"a shape or a directory (default: {', '.join(SHAPES)})")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--interval-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="rounds, after one that warms up")
    parser.add_argument("--json", default="bench/results/streaming.json")
    add_engine_options(parser)
    args = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {}
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            for model in args.model or SHAPES:
                rounds[model] = runner.run(measure(model, args))
                title = f"{model}: {args.requests} requests, one every {args.interval_ms:g} ms"
                report.print_figures(title, summarize(model, rounds[model]))
    finally:  # what was measured is kept
        if rounds:
            save(rounds, args)


def save(rounds: Mapping[str, Sequence[dict[str, float]]], args: argparse.Namespace) -> None:
    figures = [
        replace(figure, name=f"{model}: {figure.name}")
        for model, values in rounds.items()
        for figure in summarize(model, values)
    ]
    settings = {key: value for key, value in vars(args).items() if key != "json"} | {"prompt": PROMPT}
    record = report.record("streaming", figures, repeats=args.repeats, settings=settings, rounds=rounds)
    report.write(args.json, record)


async def measure(model: str, args: argparse.Namespace) -> list[dict[str, float]]:
    async with opened(model, args) as engine:
        rounds = []
        for i in range(-1, args.repeats):
            traces = await play(engine, args.requests, args.interval_ms / 1e3, args.tokens)
            if i >= 0:
                rounds.append(statistics(traces))
                print(json.dumps({"model": model} | rounds[-1]), file=sys.stderr, flush=True)
        return rounds


async def play(engine: AsyncEngine, requests: int, interval_s: float, tokens: int) -> list[Trace]:
    """One round. SystemExit if a request does not get all of its tokens."""
    traces, consumers = [], []
    start = perf_counter()
    for i in range(requests):
        due = start + i * interval_s
        await asyncio.sleep(max(0.0, due - perf_counter()))
        submitted = perf_counter()
        stream = await engine.submit(PROMPT, greedy(tokens))
        traces.append(Trace(due, submitted, perf_counter()))
        consumers.append(asyncio.create_task(consume(stream, traces[-1])))
    await asyncio.gather(*consumers)
    short = [asdict(t) for t in traces if t.tokens != tokens or not t.characters]
    if short:
        raise SystemExit(f"{len(short)} requests came back short, for one {short[0]}")
    return traces


async def consume(stream: RequestStream, trace: Trace) -> None:
    async for delta in stream:
        if delta.token_ids:
            trace.deliveries.append(perf_counter())
            trace.tokens += len(delta.token_ids)
        trace.characters += len(delta.text)
        if delta.timing is not None:
            trace.queue_s = delta.timing.queue_time
            trace.prefill_s = delta.timing.ttft - delta.timing.queue_time


def statistics(traces: Sequence[Trace]) -> dict[str, float]:
    """Percentiles in milliseconds over the requests of one round, for ITL over all of its intervals."""
    tokens, deliveries = sum(t.tokens for t in traces), sum(len(t.deliveries) for t in traces)
    distributions = {
        "submit lag": [t.submitted - t.due for t in traces],
        "add_request": [t.accepted - t.submitted for t in traces],
        "queue wait": [t.queue_s for t in traces],
        "prefill to first token": [t.prefill_s for t in traces],
        "TTFT": [t.deliveries[0] - t.submitted for t in traces],
        "TPOT": [(t.deliveries[-1] - t.deliveries[0]) / max(1, t.tokens - 1) for t in traces],
        "ITL": [b - a for t in traces for a, b in pairwise(t.deliveries)],
        "latency": [t.deliveries[-1] - t.submitted for t in traces],
    }
    result = {f"{name} p{p}": 1e3 * percentile(v, p) for name, v in distributions.items() for p in PERCENTS}
    result[_RATIO] = result["ITL p99"] / result["ITL p50"] if result["ITL p50"] else float("nan")
    result["ITL max"] = 1e3 * max(distributions["ITL"], default=float("nan"))
    seconds = max(t.deliveries[-1] for t in traces) - min(t.submitted for t in traces)
    return result | {"throughput": tokens / seconds, "tokens per delivery": tokens / deliveries}


def summarize(model: str, rounds: Sequence[dict[str, float]]) -> list[Figure]:
    """Medians over the rounds; the worst interval is that of all rounds."""
    units = {_RATIO: "x", "throughput": "tokens/s", "tokens per delivery": "tokens"}
    targets: dict[str, Any] = TARGETS.get(model, {})
    return [
        Figure(
            name,
            (max if name == "ITL max" else median)([r[name] for r in rounds]),
            units.get(name, "ms"),
            **targets.get(name, {}),
        )
        for name in rounds[0]
    ]


if __name__ == "__main__":
    main()
