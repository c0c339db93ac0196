"""Load on an OpenAI-compatible server, this one or another, and what its clients experience."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, Literal

from asyncengine.cli import flags
from asyncengine.cli.benchmarks.lengths import Lengths, check_counts
from asyncengine.cli.benchmarks.report import Figure, mean, median, percentile, record
from asyncengine.cli.embed import loop_factory
from asyncengine.errors import ConfigError

HELP = "streams against an OpenAI-compatible server: latencies and throughput"

_RULE = 50
#: Words that are short and common, so that most tokenizers have each as one token.
_WORDS = (
    "the", "a", "little", "big", "red", "old", "dog", "cat", "bird", "tree", "house", "day",
    "said", "went", "saw", "found", "gave", "liked", "and", "to", "in", "with",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of ``asyncengine bench serve``. Wrong values raise ConfigError."""

    url: str | None = None
    """Server to measure, such as http://127.0.0.1:8000. Without it, one is started with the arguments after --."""
    model: str | None = None
    """Name of the model in requests. Without it, the first that the server lists."""
    endpoint: Literal["completions", "chat"] = "completions"
    num_prompts: int = 100
    """Requests to send."""
    request_rate: float | None = None
    """Requests per second on average, in a Poisson process. Without it, all at once."""
    max_concurrency: int | None = None
    """Requests under way at most. The clock of one that waits for its turn has not started."""
    input_len: str = "16-128"
    """Words in a prompt: a number, or a range drawn from evenly."""
    output_len: str = "16-128"
    """Tokens to generate: a number, or a range drawn from evenly."""
    ignore_eos: bool = True
    """Ask for exactly output_len tokens; a stream with fewer then counts as failed. Not every server knows this."""
    num_warmups: int = 2
    """Requests before the clock starts."""
    timeout: float = 600.0
    """Seconds after which a stream counts as failed."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(num_prompts=self.num_prompts, max_concurrency=self.max_concurrency)
        check_counts(least=0, num_warmups=self.num_warmups)
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(f"request_rate must be positive, got {self.request_rate}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] [-- ARGUMENTS]"
    flags.add_dataclass(parser, Options, "measurement")
    parser.add_argument("--api-key", metavar="TEXT", default=argparse.SUPPRESS, help="key of the server")
    parser.add_argument(
        "serve_arguments",
        metavar="-- ARGUMENTS",
        nargs="*",
        default=argparse.SUPPRESS,
        help="arguments of 'asyncengine serve' with which the server is started",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    options = Options(**flags.values(args, Options))
    serve_arguments: list[str] = getattr(args, "serve_arguments", [])
    if options.url is not None and serve_arguments:
        raise ConfigError("--url and arguments for a server to start exclude each other")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_run(options, serve_arguments, getattr(args, "api_key", None)))


async def _run(options: Options, serve_arguments: list[str], api_key: str | None) -> dict[str, Any]:
    async with _server(options, serve_arguments) as url:
        outcome = await measure(options, url, api_key)
    figures = outcome.figures()
    print_block(figures)
    if outcome.failures:
        print(f"first failure: {outcome.failures[0]}", file=sys.stderr)
    return record("serve", figures, repeats=1, settings=asdict(options), failures=outcome.failures[:20])


async def measure(options: Options, url: str, api_key: str | None) -> Outcome:
    """Put the load on ``url``. Raises OSError if nothing answers there, ConfigError for a URL that is none."""
    from asyncengine.cli.benchmarks.sse_client import SseResult, Target, read_sse

    path = "/v1/completions" if options.endpoint == "completions" else "/v1/chat/completions"
    try:
        target = Target.parse(url, path, api_key)
    except ValueError as exc:
        raise ConfigError(str(exc)) from None
    model = options.model or await _first_model(url, api_key)
    rng = random.Random(options.seed)
    requests = [_fields(options, model, rng) for _ in range(options.num_prompts)]
    limit = asyncio.Semaphore(options.max_concurrency or options.num_prompts)
    for fields in requests[: options.num_warmups]:
        warm = await read_sse(target, target.request(fields), options.timeout)
        if warm.failure:
            raise OSError(f"the first request to {url} failed: {warm.failure}")

    async def send(fields: dict[str, Any]) -> SseResult:
        async with limit:
            result = await read_sse(target, target.request(fields), options.timeout)
        asked, got = fields["max_tokens"], result.completion_tokens
        if result.failure is None and options.ignore_eos and got != asked:
            result.error = f"the stream is short: {got} of {asked} tokens"
        return result

    start = perf_counter()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for fields in requests:
            tasks.append(group.create_task(send(fields)))
            if options.request_rate is not None:
                await asyncio.sleep(rng.expovariate(options.request_rate))
    return Outcome([task.result() for task in tasks], perf_counter() - start)


def _fields(options: Options, model: str, rng: random.Random) -> dict[str, Any]:
    text = " ".join(rng.choices(_WORDS, k=Lengths.parse("input_len", options.input_len).draw(rng)))
    chat = options.endpoint == "chat"
    return {
        **({"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}),
        "model": model,
        "max_tokens": Lengths.parse("output_len", options.output_len).draw(rng),
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if options.ignore_eos else {}),
    }


class Outcome:
    """Results of all streams of a run, as figures."""

    def __init__(self, results: list[Any], seconds: float) -> None:
        self.failures = [result.failure for result in results if result.failure is not None]
        self._good = [result for result in results if result.failure is None]
        self._all = results
        self._seconds = seconds

    def figures(self) -> list[Figure]:
        """Return the figures in the order in which benchmarks of servers print them."""
        good, seconds = self._good, self._seconds
        prompt, generated = (sum(getattr(r, name) for r in good) for name in ("prompt_tokens", "completion_tokens"))
        ttft = [1e3 * (r.text_times[0] - r.started) for r in good if r.text_times]
        tpot = [
            1e3 * (r.text_times[-1] - r.text_times[0]) / (r.completion_tokens - 1)
            for r in good
            if r.text_times and r.completion_tokens > 1
        ]
        itl = [1e3 * (b - a) for r in good for a, b in pairwise(r.text_times)]
        e2el = [1e3 * (r.ended - r.started) for r in good]
        figures = [
            Figure("Successful requests", len(good), "requests"),
            Figure("Failed requests", len(self.failures), "requests"),
            Figure("Benchmark duration (s)", seconds, "s"),
            Figure("Total input tokens", prompt, "tokens"),
            Figure("Total generated tokens", generated, "tokens"),
            Figure("Request throughput (req/s)", len(good) / seconds, "req/s"),
            Figure("Output token throughput (tok/s)", generated / seconds, "tok/s"),
            Figure("Peak output token throughput (tok/s)", self._peak_throughput(), "tok/s"),
            Figure("Peak concurrent requests", self._peak_concurrency(), "requests"),
            Figure("Total token throughput (tok/s)", (prompt + generated) / seconds, "tok/s"),
        ]
        for name, values in (("TTFT", ttft), ("TPOT", tpot), ("ITL", itl), ("E2EL", e2el)):
            figures += [
                Figure(f"Mean {name} (ms)", mean(values), "ms"),
                Figure(f"Median {name} (ms)", median(values), "ms"),
                Figure(f"P99 {name} (ms)", percentile(values, 99), "ms"),
            ]
        return figures

    def _peak_throughput(self) -> float:
        """Tokens per second in the best second; an event of several tokens counts as so many.

        The run is cut into as many equal parts as it has whole seconds, so that none is too short to tell, and the
        best of them is at least as good as their mean.
        """
        start = min((r.started for r in self._all), default=0.0)
        parts = max(1, int(self._seconds))
        per_part = [0.0] * parts
        for result in self._good:
            times = result.text_times or [result.ended]
            for time in times:
                place = int((time - start) / self._seconds * parts)
                per_part[min(max(place, 0), parts - 1)] += result.completion_tokens / len(times)
        return max(per_part) * parts / self._seconds

    def _peak_concurrency(self) -> int:
        changes = sorted([(r.started, 1) for r in self._all] + [(r.ended, -1) for r in self._all])
        now = peak = 0
        for _, change in changes:
            now += change
            peak = max(peak, now)
        return peak


_SECTIONS = {
    "Mean TTFT (ms)": "Time to First Token",
    "Mean TPOT (ms)": "Time per Output Token (excl. 1st token)",
    "Mean ITL (ms)": "Inter-token Latency",
    "Mean E2EL (ms)": "End-to-end Latency",
}


def print_block(figures: list[Figure]) -> None:
    """The block that benchmarks of servers print, so that scripts which read others' read ours."""
    print(f"{' Serving Benchmark Result ':=^{_RULE}}")
    for figure in figures:
        if title := _SECTIONS.get(figure.name):
            print(f"{title:-^{_RULE}}")
        value = f"{figure.value:d}" if isinstance(figure.value, int) else f"{figure.value:.2f}"
        print(f"{figure.name + ':':<40} {value:<9}".rstrip())
    print("=" * _RULE)


async def _first_model(url: str, api_key: str | None) -> str:
    import aiohttp

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{url}/v1/models") as response:
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, LookupError, TypeError, ValueError) as exc:
        raise OSError(f"{url} does not say what model it serves: {exc}") from None


@asynccontextmanager
async def _server(options: Options, serve_arguments: list[str]) -> AsyncIterator[str]:
    """URL of the server to measure; one that is started here ends with the measurement."""
    if options.url is not None:
        yield options.url.rstrip("/").removesuffix("/v1")
        return
    command = [sys.executable, "-m", "asyncengine.cli.main", "serve", *serve_arguments, "--port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    log: list[str] = []
    reading: asyncio.Task[None] | None = None
    try:
        url = await _ready_url(process.stderr, log)
        if url is None:
            raise OSError("the server did not start:\n" + "".join(log[-20:]))
        reading = asyncio.create_task(_throw_away(process.stderr))  # a full pipe would block the server
        yield url
    finally:
        if reading is not None:
            reading.cancel()
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _ready_url(log: asyncio.StreamReader, seen: list[str]) -> str | None:
    while line := (await log.readline()).decode(errors="replace"):
        seen.append(line)
        if " ready on " in line:
            return line.rsplit(" ", 1)[1].strip()
    return None


async def _throw_away(log: asyncio.StreamReader) -> None:
    while await log.read(65536):
        pass
