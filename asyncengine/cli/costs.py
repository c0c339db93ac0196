"""``asyncengine costs``: what steps and copies take on this machine, and how well that foretells steps that run."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncengine.cli import embed, flags
from asyncengine.cli.benchmarks.report import percentile
from asyncengine.config import EngineConfig

if TYPE_CHECKING:
    from asyncengine._core import StepRecord
    from asyncengine.api.model_info import ModelInfo
    from asyncengine.engine.engine import AsyncEngine
    from asyncengine.runner.backend import Backend
    from asyncengine.runner.costs.table import CostTable, KnownCosts

_LOOK_S = 0.01
_STREAMS = 16
_SECONDS = 5.0
_CONTEXTS = (2048, 8192)
"""Context lengths for which the gain of hybrid attention is predicted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [options]"
    embed.add_model(parser)
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="X",
        default=argparse.SUPPRESS,
        help=f"duration of the load whose steps are compared with predictions; 0: none (default: {_SECONDS:g})",
    )
    parser.add_argument("--json", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help="print JSON")
    embed.add_engine(parser)


def run(args: argparse.Namespace) -> int:
    embed.check_model(args)
    with asyncio.Runner(loop_factory=embed.loop_factory()) as runner:
        return runner.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    from asyncengine.bundled import path as bundled_path
    from asyncengine.engine.engine import AsyncEngine

    options: dict[str, Any] = flags.values(args, EngineConfig)
    config = EngineConfig.from_kwargs(options.pop("model", None) or str(bundled_path()), options)
    found: list[KnownCosts] = []
    engine = AsyncEngine(config, partial(_load, found=found))
    async with embed.running(engine):
        if not found:
            print("The steps of this model cannot be timed.")
            return 1
        info = engine.model_info
        seconds = getattr(args, "seconds", _SECONDS)
        predictions = await _compare(engine, seconds) if seconds > 0 else []
    costs = found[0]
    if getattr(args, "json", False):
        print(json.dumps(_as_dict(config, info, costs, predictions), indent=1))
        return 0
    print(f"{info.name} on {info.device_label}, {info.dtype}; kept in {costs.file.path}")
    for block in (*_table(costs.table), *_host_tables(config, info, costs.table), _prediction_table(predictions)):
        print("\n" + "\n".join(_aligned(block)))
    return 0


def _load(config: EngineConfig, *, found: list[KnownCosts]) -> Backend:
    from asyncengine.runner.backend import load_backend

    backend = load_backend(config, progress=True, measure=True)
    if backend.costs is not None:
        found.append(backend.costs)
    return backend


# ---- steps that run ----


class Prediction(NamedTuple):
    """Predicted and measured duration of a step that ran."""

    kind: str
    took_ns: int
    predicted_ns: int

    @property
    def error(self) -> float:
        """Share of what it took by which the prediction was wrong."""
        return abs(self.predicted_ns - self.took_ns) / self.took_ns


async def _compare(engine: AsyncEngine, seconds: float) -> list[Prediction]:
    """Streams that decode, and prompts of half of the context beside them, one after another."""
    end = time.monotonic() + seconds
    rng = random.Random(0)
    longest = min(engine.model_info.max_model_len, engine.model_info.kv_capacity_tokens // 4)
    streams = max(1, min(_STREAMS, engine.config.max_num_seqs - 1))
    tasks = [
        asyncio.create_task(_repeat(engine, rng, min(16, longest // 4), longest // 2, end)) for _ in range(streams)
    ]
    prompts = asyncio.create_task(_repeat(engine, rng, longest // 2, 1, end, pause_s=seconds / 20))
    records: dict[int, StepRecord] = {}
    try:
        while time.monotonic() < end:
            records |= {record.step: record for record in engine.snapshot().steps}
            await asyncio.sleep(_LOOK_S)
    finally:
        for task in (*tasks, prompts):
            task.cancel()
        await asyncio.gather(*tasks, prompts, return_exceptions=True)
    return compare(list(records.values()))


async def _repeat(
    engine: AsyncEngine, rng: random.Random, prompt: int, tokens: int, end: float, *, pause_s: float = 0.0
) -> None:
    from asyncengine.api.request import SamplingParams

    params = SamplingParams(max_tokens=max(1, tokens), temperature=0, ignore_eos=True)
    while time.monotonic() < end:
        await asyncio.sleep(pause_s)
        await engine.generate(rng.choices(range(engine.model_info.vocab_size), k=max(1, prompt)), params)


def compare(records: Sequence[StepRecord]) -> list[Prediction]:
    """Compare predictions with measured steps. A step counts if the step before it was recorded too: it begins when
    that one ends, or when it is launched."""
    found = []
    ordered = sorted(records)
    for before, record in itertools.pairwise(ordered):
        if record.step == before.step + 1 and record.predicted_ns > 0:
            took = record.ready_ns - max(before.ready_ns, record.packed_ns)
            kind = "decode" if record.decode_rows == record.rows else "mixed"
            found.append(Prediction(kind, max(1, took), record.predicted_ns))
    return found


# ---- the report ----

Lines = list[tuple[str, ...]]


def _table(table: CostTable) -> Iterable[Lines]:
    rows = [(f"{p.tokens:,}", _ms(p.base_ns), _ms(1000 * p.context_ns)) for p in table.decode]
    yield [("decode rows", "ms without context", "ms for 1,000 tokens of context, of all rows together"), *rows]
    rows = [(f"{p.tokens:,}", _ms(p.base_ns), _ms(1000 * p.context_ns)) for p in table.prompt]
    yield [("chunk of a prompt", "ms without context", "ms for 1,000 tokens of context"), *rows]
    if table.to_device:
        pairs = zip(table.to_device, table.to_host, strict=True)
        copies = [(f"{a.num_bytes >> 10:,}", _ms(a.ns), _ms(b.ns), f"{a.num_bytes / a.ns:.1f}") for a, b in pairs]
        yield [("KiB copied", "ms to the GPU", "ms to the host", "GB/s to the GPU"), *copies]
    yield [("from a kernel's launch until the host sees its result", f"{table.crossing_ns / 1e3:.1f} us")]


def _host_tables(config: EngineConfig, info: ModelInfo, table: CostTable) -> Iterable[Lines]:
    if not table.host_attention:
        return
    rates = [
        (f"{h.workers:,}", f"{h.tokens:,}", f"{h.ns:.2f}", f"{h.workers * info.kv_layer_token_bytes / h.ns:.1f}")
        for h in table.host_attention
    ]
    yield [("workers of the host", "tokens of context", "ns of one, token and layer", "GB/s of all"), *rates]
    yield [("lanes for sequences on the host add to a step", f"{table.exchange_ns / 1e3:.1f} us")]
    if gains := _gains(config, info, table):
        lines = [(f"{g.context:,}", f"{g.rows:,}", f"{g.gain:+.1%}") for g in gains]
        yield [("tokens of context", "sequences in the cache", "throughput that sequences on the host add"), *lines]


class Gain(NamedTuple):
    """Predicted gain of hybrid attention."""

    context: int
    rows: int
    """rows of which the cache is full"""
    gain: float


def _gains(config: EngineConfig, info: ModelInfo, table: CostTable) -> list[Gain]:
    """Empty where it is off or not known."""
    from asyncengine.runner.loop_config import hybrid_gain

    gains = []
    for context in sorted({min(n, info.max_model_len) for n in _CONTEXTS}):
        rows, gain = hybrid_gain(config, info, table, context)
        gains += [] if gain is None else [Gain(context, rows, gain)]
    return gains


def _prediction_table(predictions: Sequence[Prediction]) -> Lines:
    lines = []
    for kind, summary in _summary(predictions).items():
        errors = f"{summary['median_error']:.1%}", f"{summary['p90_error']:.1%}"
        lines.append((kind, f"{summary['steps']:,.0f}", _ms(summary["median_ns"]), *errors))
    return [("steps that ran", "steps", "ms (median)", "median error", "p90 error of the prediction"), *lines]


def _summary(predictions: Sequence[Prediction]) -> dict[str, dict[str, float]]:
    summary: dict[str, dict[str, float]] = {}
    for kind in ("decode", "mixed"):
        if some := [p for p in predictions if p.kind == kind]:
            errors = [p.error for p in some]
            summary[kind] = {
                "steps": len(some),
                "median_ns": percentile([p.took_ns for p in some], 50),
                "median_error": percentile(errors, 50),
                "p90_error": percentile(errors, 90),
            }
    return summary


def _as_dict(
    config: EngineConfig, info: ModelInfo, costs: KnownCosts, predictions: Sequence[Prediction]
) -> dict[str, Any]:
    import msgspec

    return {
        "model": info.name,
        "device": info.device,
        "costs": msgspec.to_builtins(costs.table),
        "hybrid_gain": [gain._asdict() for gain in _gains(config, info, costs.table)],
        "predictions": _summary(predictions),
    }


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3f}"


def _aligned(lines: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        first, *rest = (
            word.ljust(w) if i == 0 else word.rjust(w) for i, (word, w) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join((first, *rest)).rstrip()
