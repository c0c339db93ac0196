"""The GPU never waits: the engine's step time in steady decode beside bare back-to-back replay of the same graph.

    python bench/overlap.py [--cases gpt2:64,gpt2:256] [--repeats N] [--no-sse] [--json FILE]
    python bench/overlap.py --ablation [--cases gpt2:64] [--json FILE]

Per case (shape:batch) and repeat: `batch` requests of 128 random tokens decode in an idle engine, consumed by tasks of
this process that format every delta; then the same requests come from SSE clients in other processes, through the real
server in this one. The step time is that between the moment when all decode and the moment when the first ends, by the
step thread's clock. Right after each, the graph of that step is replayed bare, on contexts as long as those were in the
middle, timed with CUDA events. The ratio of the two is taken within a repeat.

The ablation starts an engine for every variant, and the default again at the end: its drift is the table's error.
Without CUDA (--device cpu) there is nothing to replay: that only tries the script out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from gpu_common import PROMPT_LEN, add_engine_options, child_environment, consume_all, opened, random_prompts
from steady import Window, observe

from asyncengine import AsyncEngine, testing
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median
from asyncengine.cli.embed import loop_factory
from asyncengine.engine.stream import RequestStream

CASES = "gpt2:64,gpt2:256,qwen3-0.6b:64,llama-3.1-8b:1,llama-3.1-8b:64"
ABLATION_CASES = "gpt2:64,gpt2:256,qwen3-0.6b:64"
RATIO_TARGETS = {"gpt2": 1.02, "qwen3-0.6b": 1.01, "llama-3.1-8b": 1.01}
BUBBLE_TARGET = 2.0  # percent of the step
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "one step in flight": {"steps_in_flight": 1},
    "next step at once": {"late_launch": False},
    "no programmatic launch": {"programmatic_launch": False},
    "no L2 cache hints": {"l2_cache_hints": False},
    "staging mapped": {"staging": "mapped"},
    "staging pinned": {"staging": "pinned"},
    "staging pageable": {"staging": "pageable"},
    "eager, no graphs": {"enforce_eager": True},
    "event loop launches": {"step_driver": "loop"},
    "event loop, one in flight": {"step_driver": "loop", "steps_in_flight": 1},
    "default again": {},
}
SSE = ", SSE"
SSE_VARIANTS = ("default", "one step in flight", "event loop launches", "event loop, one in flight")
"""Variants on which a busy event loop has different effects."""
_REQUESTS_PER_CLIENT = 64

Case = tuple[str, int]
Sample = dict[str, Any]
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ablation", action="store_true", help="what each part of the design is worth")
    parser.add_argument("--cases", type=parse_cases, help=f"shape:batch,... (default: {CASES})")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512, help="per request")
    parser.add_argument("--replays", type=int, default=300)
    parser.add_argument("--no-sse", dest="sse", action="store_false")
    parser.add_argument("--json", help="(default: bench/results/overlap.json or overlap_ablation.json)")
    add_engine_options(parser)
    args = parser.parse_args()
    name = "overlap_ablation" if args.ablation else "overlap"
    args.cases = args.cases or parse_cases(ABLATION_CASES if args.ablation else CASES)
    samples: list[Sample] = []
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(ablate(args, samples) if args.ablation else compare(args, samples))
    finally:  # what was measured is kept
        if samples:
            save(name, samples, args)


def save(name: str, samples: Sequence[Sample], args: argparse.Namespace) -> None:
    figures = summarize_ablation(samples) if args.ablation else summarize(samples)
    report.print_figures(f"{name}, prompts of {PROMPT_LEN} tokens (medians of {args.repeats})", figures)
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "ablation")}
    record = report.record(name, figures, repeats=args.repeats, settings=settings, samples=samples)
    report.write(args.json or f"bench/results/{name}.json", record)


def parse_cases(text: str) -> list[Case]:
    cases = []
    for case in text.split(","):
        shape, _, batch = case.rpartition(":")
        if not shape or not batch.isdecimal() or int(batch) < 1:
            raise argparse.ArgumentTypeError(f"expected shape:batch, got {case!r}")
        cases.append((shape, int(batch)))
    return cases


# ---- engine beside bare replay ----


async def compare(args: argparse.Namespace, samples: list[Sample]) -> None:
    """One engine per case, with as many slots as requests, so that a replay finds the engine's own block tables."""
    rng = random.Random(0)
    for shape, batch in args.cases:
        async with opened(shape, args, max_num_seqs=batch, enable_prefix_caching=False) as engine:
            await consume_all(engine, random_prompts(rng, engine, batch), 32)  # not counted
            for _ in range(args.repeats):
                sample: Sample = {"case": f"{shape}:{batch}"}
                sample["in-process"] = await in_process(engine, batch, args, rng)
                if args.sse:
                    sample["SSE"] = await over_http(engine, batch, args, rng)
                samples.append(sample)
                print(json.dumps(sample), file=sys.stderr, flush=True)


async def in_process(engine: AsyncEngine, batch: int, args: argparse.Namespace, rng: random.Random) -> Sample:
    prompts = random_prompts(rng, engine, batch)
    window, _, sample = await measured(engine, batch, args.tokens, consume_all(engine, prompts, args.tokens))
    return sample | await beside_bare(engine, window, args.replays)


async def over_http(engine: AsyncEngine, batch: int, args: argparse.Namespace, rng: random.Random) -> Sample:
    from asyncengine.server.config import ServerConfig
    from asyncengine.server.http_server import HttpServer

    server = HttpServer(ServerConfig(port=0))
    server.app.engine = engine
    await server.start()
    clients: list[asyncio.subprocess.Process] = []
    try:
        vocab = engine.model_info.vocab_size
        for first in range(0, batch, _REQUESTS_PER_CLIENT):
            count = min(_REQUESTS_PER_CLIENT, batch - first)
            clients.append(await start_client(server.url, count, args.tokens, vocab, rng.randrange(2**31)))
        with submitted_together(engine, batch):
            window, results, sample = await measured(engine, batch, args.tokens, run_clients(clients))
    finally:
        for client in clients:
            if client.returncode is None:
                client.kill()
            await client.wait()
        await server.aclose()
    sample["failures"] = [failure for r in results for failure in r["failures"]]
    sample["tokens per event"] = batch * args.tokens / max(1, sum(r["events"] for r in results))
    return sample | await beside_bare(engine, window, args.replays)


async def measured(
    engine: AsyncEngine, batch: int, tokens: int, load: Awaitable[T]
) -> tuple[Window, T, dict[str, Any]]:
    """Run ``load``: its steady part, its result, and per token of it all the processor time of this process."""
    start = time.perf_counter(), time.process_time(), time.thread_time()
    window, result = await observe(engine, batch, load)
    end = time.perf_counter(), time.process_time(), time.thread_time()
    seconds, process_cpu, loop_cpu = (b - a for a, b in zip(start, end, strict=True))
    total = batch * tokens
    return window, result, {
        "tokens/s with prefill": total / seconds,
        "process_cpu_us_per_token": 1e6 * process_cpu / total,
        "loop_cpu_us_per_token": 1e6 * loop_cpu / total,
    }  # fmt: skip


@contextmanager
def submitted_together(engine: AsyncEngine, count: int) -> Iterator[None]:
    """Hold requests back until ``count`` are there: the first would be at its end while HTTP brings the last."""
    barrier, submit = asyncio.Barrier(count), engine.submit

    async def held(*args: Any, **kwargs: Any) -> RequestStream:
        await barrier.wait()
        return await submit(*args, **kwargs)

    engine.submit = held  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.submit


async def start_client(url: str, requests: int, tokens: int, vocab: int, seed: int) -> asyncio.subprocess.Process:
    """A process with its requests made and everything imported, waiting for the word to go."""
    options = {"requests": requests, "prompt-len": PROMPT_LEN, "tokens": tokens, "vocab": vocab, "seed": seed}
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    pipe = asyncio.subprocess.PIPE
    script = str(Path(__file__).parent / "sse_load.py")
    command = [sys.executable, script, url, *flags]
    client = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=child_environment())
    assert client.stdout is not None
    if await client.stdout.readline() != b"ready\n":
        raise SystemExit("a client did not start")
    return client


async def run_clients(clients: Sequence[asyncio.subprocess.Process]) -> list[Any]:
    outputs = await asyncio.gather(*(client.communicate(b"go\n") for client in clients))
    return [json.loads(output) for output, _ in outputs]


async def beside_bare(engine: AsyncEngine, window: Window, replays: int) -> Sample:
    """The window as numbers, with the bare replay of its middle step if the engine runs on CUDA."""
    await testing.settle(engine)
    sample = asdict(window) | {"contexts": [min(window.contexts), max(window.contexts)]}
    sample |= {"tokens/s": window.tokens_per_s, "tokens per delivery in window": window.steps / window.deliveries}
    runner: Any = engine._life.loaded().keep_alive
    if hasattr(runner, "graphs"):
        from replay import bare_step_us, decode_rows

        sample["bare_us"] = bare_step_us(runner, decode_rows(window.contexts), replays, engine.stats().num_steps + 1)
        sample["ratio"] = window.step_us / sample["bare_us"]
    return sample


def summarize(samples: Sequence[Sample]) -> list[Figure]:
    figures = []
    for case in dict.fromkeys(s["case"] for s in samples):
        for mode in ("in-process", "SSE"):
            runs = [s[mode] for s in samples if s["case"] == case and mode in s]
            if runs:
                figures += figures_of(f"{case} {mode}", RATIO_TARGETS.get(case.rpartition(":")[0]), runs)
    return figures


def figures_of(label: str, target: float | None, runs: Sequence[Sample]) -> list[Figure]:
    def middle(key: str) -> float:
        return median([run[key] for run in runs])

    figures = [Figure(f"{label}: engine", middle("step_us"), "µs/step")]
    if "ratio" in runs[0]:
        ratio = middle("ratio")
        figures += [
            Figure(f"{label}: bare replay", middle("bare_us"), "µs/step"),
            Figure(f"{label}: engine over bare", ratio, "x", at_most=target),
            Figure(f"{label}: bubble", 100 * (1 - 1 / ratio), "% of the step", at_most=BUBBLE_TARGET),
        ]
    figures += [
        Figure(f"{label}: output in the window", middle("tokens/s"), "tokens/s"),
        Figure(f"{label}: process CPU, round with prefill", middle("process_cpu_us_per_token"), "µs/token"),
        Figure(f"{label}: of it the event loop", middle("loop_cpu_us_per_token"), "µs/token"),
    ]
    if "failures" in runs[0]:
        figures += [
            Figure(f"{label}: tokens per event", middle("tokens per event"), "tokens"),
            Figure(f"{label}: streams lost or short", sum(len(r["failures"]) for r in runs), "streams", at_most=0),
        ]
    return figures


# ---- what the parts are worth ----


async def ablate(args: argparse.Namespace, samples: list[Sample]) -> None:
    rng = random.Random(0)
    for shape, batch in args.cases:
        for variant, config in VARIANTS.items():
            async with opened(shape, args, max_num_seqs=batch, enable_prefix_caching=False, **config) as engine:
                await consume_all(engine, random_prompts(rng, engine, batch), 32)
                for _ in range(args.repeats):
                    load = consume_all(engine, random_prompts(rng, engine, batch), args.tokens)
                    window, _, sample = await measured(engine, batch, args.tokens, load)
                    sample |= {"case": f"{shape}:{batch}", "variant": variant, "step_us": window.step_us}
                    samples.append(sample | {"steps": window.steps})
                    if args.sse and variant in SSE_VARIANTS:
                        sample = await over_http(engine, batch, args, rng)
                        samples.append(sample | {"case": f"{shape}:{batch}", "variant": variant + SSE})
                    print(json.dumps(samples[-1]), file=sys.stderr, flush=True)


def summarize_ablation(samples: Sequence[Sample]) -> list[Figure]:
    """Step time and throughput of every variant, each also over the default's."""
    figures = []
    for case, variant in dict.fromkeys((s["case"], s["variant"]) for s in samples):
        step, output = (_ablation_median(samples, case, variant, key) for key in _ABLATION_KEYS)
        default = "default" + SSE if variant.endswith(SSE) else "default"
        default_step, default_output = (_ablation_median(samples, case, default, key) for key in _ABLATION_KEYS)
        figures += [
            Figure(f"{case} {variant}: step", step, "µs"),
            Figure(f"{case} {variant}: step over default", step / default_step, "x"),
            Figure(f"{case} {variant}: output", output, "tokens/s"),
            Figure(f"{case} {variant}: output over default", output / default_output, "x"),
        ]
    return figures


_ABLATION_KEYS = ("step_us", "tokens/s with prefill")


def _ablation_median(samples: Sequence[Sample], case: str, variant: str, key: str) -> float:
    return median([s[key] for s in samples if (s["case"], s["variant"]) == (case, variant)])


if __name__ == "__main__":
    main()
