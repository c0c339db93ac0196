"""The server alone: SSE streams from a simulated device to a client in another process.

    python bench/server_sim.py [--watched] [--front] [--json FILE]

The engine, its step thread and the HTTP server are the real ones; only the model is simulated, and costs next to
nothing. Two loads: *flat out*, where a step is due sooner than the server can stream the one before, and *paced*, where
the device gives a token to every stream slightly faster than the target. News that the event loop does not take in time
is joined into bigger events, so tokens per event is printed too. Every stream's text is compared with what the model
must have said. ``--watched`` repeats both loads while somebody looks at the page, which asks for figures at 4 Hz, and
``--front`` with the engine behind a front, as of several, while somebody reads the events of its cache (needs pyzmq).
Processor time is read from /proc, so this needs Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from quiet import wait_for_quiet

from asyncengine import DataParallelEngine, SamplingParams, testing
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median
from asyncengine.cli.benchmarks.sse_client import SseResult, Target, read_sse
from asyncengine.text.tokenizer import placeholder_tokenizer

TARGET_TOKENS_PER_S = 30_000
LOADS = {"flat out": 2000.0, "paced": 7000.0}  # microseconds per step
PLAIN, WATCHED, FRONT = "", "watched", "front and events"
"""Ways to run a load."""
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Run:
    """One round of all streams."""

    seconds: float
    tokens: int
    events: int
    failures: list[str]
    server_cpu_s: float
    server_loop_cpu_s: float
    client_cpu_s: float
    quiet: bool
    """True if the machine was idle when the run began."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="per stream")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--watched", action="store_true", help="also with the page's figures asked for at 4 Hz")
    parser.add_argument("--front", action="store_true", help="also behind a front, with events of the cache")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--wait", type=float, default=30, metavar="S", help="for a quiet machine, before each run")
    parser.add_argument("--json", default="bench/results/server_sim.json")
    parser.add_argument("--serve", type=float, metavar="STEP_US", help=argparse.SUPPRESS)
    parser.add_argument("--events", metavar="ENDPOINT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve, args.streams, args.events)
        return
    ways = [PLAIN, *([WATCHED] if args.watched else []), *([FRONT] if args.front else [])]
    loads = {(name, way): us for name, us in LOADS.items() for way in ways}
    runs: dict[str, list[Run]] = {_title(*load): [] for load in loads}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for _ in range(args.repeats):
            for load, step_us in loads.items():
                quiet = wait_for_quiet(args.wait)
                runs[_title(*load)].append(runner.run(measure(args, step_us, quiet, load[1])))
    figures = [figure for name in runs for figure in summarize(name, runs[name])]
    if args.front:
        figures += [front_cost(name, runs) for name in LOADS]
    report.print_figures(f"Server on the simulated device, {args.streams} streams (medians)", figures)
    settings = {key: getattr(args, key) for key in ("streams", "tokens", "prompt_tokens")}
    samples = {name: [vars(run) for run in runs[name]] for name in runs}
    settings |= {"step µs": LOADS}
    report.write(args.json, report.record("server_sim", figures, repeats=args.repeats, settings=settings, runs=samples))


def _title(name: str, way: str) -> str:
    return f"{name}, {way}" if way else name


def front_cost(name: str, runs: dict[str, list[Run]]) -> Figure:
    """The processor time of an event behind a front over that of one without; medians over pairs of runs."""
    pairs = zip(runs[_title(name, FRONT)], runs[_title(name, PLAIN)], strict=True)
    ratios = [front.server_cpu_s / front.events / (plain.server_cpu_s / plain.events) for front, plain in pairs]
    return Figure(f"{name}: server CPU per event, {FRONT} / without", median(ratios), "", at_most=1.03)


def summarize(name: str, runs: list[Run]) -> list[Figure]:
    def per_token(seconds: str) -> float:
        return median([getattr(run, seconds) / run.tokens * 1e6 for run in runs])

    target = TARGET_TOKENS_PER_S if name == "flat out" else None
    return [
        Figure(f"{name}: output", median([r.tokens / r.seconds for r in runs]), "tokens/s", at_least=target),
        Figure(f"{name}: events", median([r.events / r.seconds for r in runs]), "events/s"),
        Figure(f"{name}: tokens per event", median([r.tokens / r.events for r in runs]), "tokens"),
        Figure(f"{name}: server CPU, all threads", per_token("server_cpu_s"), "µs/token"),
        Figure(f"{name}: server CPU, event loop", per_token("server_loop_cpu_s"), "µs/token"),
        Figure(f"{name}: client CPU", per_token("client_cpu_s"), "µs/token"),
        Figure(f"{name}: streams lost or wrong", sum(len(r.failures) for r in runs), "streams", at_most=0),
    ]


async def _look(url: str) -> None:
    """Ask for the statistics as the page does."""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/page/stats") as reply:
                assert (await reply.json())["health"] == "ready"
            await asyncio.sleep(0.25)


async def _read_events(endpoint: str) -> None:
    """Take the messages of the cache's events, as a router does."""
    import zmq.asyncio

    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        socket.connect(endpoint)
        while True:
            await socket.recv_multipart()


async def measure(args: argparse.Namespace, step_us: float, quiet: bool = False, way: str = PLAIN) -> Run:
    """Start a server, warm it up, and time one round of streams."""
    command = [sys.executable, __file__, "--serve", str(step_us), "--streams", str(args.streams)]
    endpoint = f"ipc://{tempfile.gettempdir()}/server-sim-{os.getpid()}.events"
    if way == FRONT:
        command += ["--events", endpoint]
    server = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    looking = None
    try:
        url = await _url(server)
        if way:
            looking = asyncio.create_task(_look(url) if way == WATCHED else _read_events(endpoint))
        target = Target.parse(url, "/v1/completions")
        await _round(target, min(args.streams, 64), args.prompt_tokens, 32)
        before, start = _cpu_times(server.pid), time.perf_counter()
        results = await _round(target, args.streams, args.prompt_tokens, args.tokens)
        seconds = time.perf_counter() - start
        after = _cpu_times(server.pid)
        if looking is not None:
            assert not looking.done(), looking
            looking.cancel()
    finally:
        server.terminate()
        await server.communicate()
    used = [b - a for a, b in zip(before, after, strict=True)]
    failures = _failures(results, args.prompt_tokens, args.tokens)
    for failure in failures[:3]:
        print(failure, file=sys.stderr)
    return Run(
        seconds=seconds,
        tokens=sum(r.completion_tokens for r in results),
        events=sum(len(r.text_times) for r in results),
        failures=failures,
        server_cpu_s=used[0],
        server_loop_cpu_s=used[1],
        client_cpu_s=used[2],
        quiet=quiet,
    )


async def _round(target: Target, streams: int, prompt_tokens: int, tokens: int) -> list[SseResult]:
    requests = [
        target.request(
            {
                "prompt": _prompt(i, prompt_tokens),
                "max_tokens": tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        for i in range(streams)
    ]
    return await asyncio.gather(*(read_sse(target, request, _TIMEOUT_S) for request in requests))


def _prompt(stream_number: int, tokens: int) -> list[int]:
    return [300 + stream_number, *range(300, 299 + tokens)]


def _failures(results: list[SseResult], prompt_tokens: int, tokens: int) -> list[str]:
    """Describe the fault of each stream that is not complete to the last character."""
    model = testing.SimulatedEngine()
    tokenizer = placeholder_tokenizer(testing.VOCAB_SIZE)
    params = SamplingParams(temperature=0, max_tokens=tokens)
    failures = []
    for i, result in enumerate(results):
        expected = tokenizer.decode(model.expected_token_ids(_prompt(i, prompt_tokens), params))
        failure = result.failure
        if failure is None and result.completion_tokens != tokens:
            failure = f"{result.completion_tokens} tokens"
        if failure is None and "".join(result.texts) != expected:
            failure = "the text is not the model's"
        if failure is not None:
            failures.append(f"stream {i}: {failure}")
    return failures


async def _url(server: asyncio.subprocess.Process) -> str:
    """Return the server's address once it is ready; from then on a task throws its log away."""
    assert server.stderr is not None
    seen = []
    while line := (await server.stderr.readline()).decode():
        seen.append(line)
        if " ready on " in line:
            return line.rsplit(" ", 1)[1].strip()
    raise SystemExit("the server did not start:\n" + "".join(seen))


def _cpu_times(pid: int) -> tuple[float, float, float]:
    """Seconds of processor time used so far: the server, its event loop's thread, this process."""
    ticks = os.sysconf("SC_CLK_TCK")

    def seconds(path: Path) -> float:
        fields = path.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / ticks

    own = resource.getrusage(resource.RUSAGE_SELF)
    process = Path(f"/proc/{pid}")
    return seconds(process / "stat"), seconds(process / "task" / str(pid) / "stat"), own.ru_utime + own.ru_stime


def serve(step_us: float, streams: int, events: str | None = None) -> None:
    """The server's process: what ``asyncengine serve`` runs, on a simulated engine. With ``events``, an endpoint for
    those of its cache, the engine is behind a front."""
    from asyncengine.cli.serve import run_server
    from asyncengine.server.config import ServerConfig

    async def load() -> Any:
        engine = testing.SimulatedEngine(
            step_latency_us=step_us,
            read_kv=False,  # a model that costs nothing
            poll_interval_us=200,
            max_num_seqs=streams,
            num_kv_blocks=128 * streams,
            kv_events=events is not None,
        )
        front = engine if events is None else DataParallelEngine([engine])
        await front.start()
        return front

    run_server(ServerConfig(port=0, kv_events_endpoint=events), load)


if __name__ == "__main__":
    main()
