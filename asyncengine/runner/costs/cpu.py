"""Times steps before an engine starts: decode rows and chunks of prompts of a few sizes, with and without context."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch

from asyncengine._core import HostPool, StepBatch
from asyncengine._core import time_host_attention as time_attention
from asyncengine.api.model_info import ModelInfo
from asyncengine.config import EngineConfig
from asyncengine.models.config import ModelConfig
from asyncengine.runner.costs.table import CostFile, CostTable, HostAttention, KnownCosts, Point
from asyncengine.runner.loop_config import decodes_on_host
from asyncengine.runner.state.memory import host_shape
from asyncengine.runner.steps.model_runner import CpuModelRunner

logger = logging.getLogger(__name__)

CPU_BUDGET_S = 1.0
"""Time that measuring takes. If a model has slower steps, some sizes are left out, and the engine learns as it runs."""
_DECODE_ROWS = (1, 16, 64, 4, 9, 5, 8, 256)
"""Counts of decode rows to measure, the most useful first. A GPU rounds 5 and 9 rows up to 8 and 16: between two of
these sizes time rises at once, and then hardly."""
_CHUNKS = (128, 512, 16, 2048, 256, 64, 1024, 192, 384, 96, 768, 32)
"""Sizes of chunks in the order of their worth, where time does not suffice for all."""
_SHORT = 16
"""Context of decode rows whose attention takes next to nothing."""

HOST_TOKENS = (2048, 8192)
"""Contexts that attention on the host is timed with."""

Rows = Sequence[tuple[int, int]]
"""Rows of a step, each (tokens, context before them): decode rows have one token."""


class Sizes(NamedTuple):
    """Sizes of the steps that are measured."""

    rows: Sequence[int]
    chunks: Sequence[int]
    num_blocks: int
    """blocks that rows of a step share"""
    block_size: int
    max_len: int
    """tokens of a row"""

    @classmethod
    def of(cls, config: EngineConfig, info: ModelInfo, most_context: int) -> Sizes:
        """``most_context``: of a row; more takes too long to measure."""
        most_rows, most_tokens = config.max_num_seqs, config.max_num_batched_tokens
        rows = dict.fromkeys((*(n for n in _DECODE_ROWS if n < most_rows), most_rows))
        longest = min(info.max_model_len, info.kv_capacity_tokens, most_context + most_tokens)
        chunks = dict.fromkeys((*(n for n in _CHUNKS if n < most_tokens), most_tokens))
        # There must be room for a context, to tell what it takes.
        measurable = tuple(n for n in chunks if 2 * n <= longest) or (max(1, longest // 2),)
        return cls(tuple(rows), measurable, info.num_kv_blocks // (1 + info.window_groups), info.block_size, longest)


def measure(sizes: Sizes, time_step: Callable[[Rows], float], end: float, clock: Callable[[], float]) -> CostTable:
    """Costs of steps, by ``time_step``, which gives seconds. After ``end`` of the clock no further size is begun.

    The first sizes are measured whatever they take.
    """
    decode: dict[int, Point] = {}
    prompt: dict[int, Point] = {}
    for i in range(max(len(sizes.rows), len(sizes.chunks))):
        if i < len(sizes.chunks) and not (prompt and clock() >= end):
            prompt[sizes.chunks[i]] = _measure_chunk(sizes, sizes.chunks[i], time_step)
        if i < len(sizes.rows) and sizes.rows[i] <= sizes.num_blocks and not (decode and clock() >= end):
            decode[sizes.rows[i]] = _measure_decode(sizes, sizes.rows[i], time_step)
    return CostTable(_ascending(decode), _ascending(prompt, context_too=True))


def _measure_chunk(sizes: Sizes, chunk: int, time_step: Callable[[Rows], float]) -> Point:
    alone_ns, context = 1e9 * time_step([(chunk, 0)]), sizes.max_len - chunk
    context_ns = max(0.0, 1e9 * time_step([(chunk, context)]) - alone_ns) / max(1, context)
    # Each token of the chunk attends to the chunk's tokens before it: to half of them on average.
    return Point(chunk, max(0.0, alone_ns - context_ns * chunk / 2), context_ns)


def _measure_decode(sizes: Sizes, rows: int, time_step: Callable[[Rows], float]) -> Point:
    """Precondition: each row has a block."""
    longest = min(sizes.num_blocks // rows * sizes.block_size, sizes.max_len) - 1
    short = min(_SHORT, longest)
    short_ns, more = 1e9 * time_step([(1, short)] * rows), rows * (longest - short)
    context_ns = max(0.0, 1e9 * time_step([(1, longest)] * rows) - short_ns) / more if more > 0 else 0.0
    return Point(rows, max(0.0, short_ns - context_ns * rows * (short + 1)), context_ns)


def _ascending(points: dict[int, Point], *, context_too: bool = False) -> list[Point]:
    """Order points by tokens. No step of more tokens is cheaper than one of fewer: the search for a chunk relies on
    that."""
    ordered: list[Point] = []
    least = Point(0, 0.0, 0.0)
    for tokens, point in sorted(points.items()):
        context_ns = max(least.context_ns, point.context_ns) if context_too else point.context_ns
        least = Point(tokens, max(least.base_ns, point.base_ns), context_ns)
        ordered.append(least)
    return ordered


def known_costs(file: CostFile, measure_all: Callable[[], CostTable], *, anew: bool = False) -> KnownCosts:
    """Return the costs that the file keeps, or else measure and keep them."""
    table = None if anew else file.read()
    if table is None:
        started = time.monotonic()
        table = measure_all()
        file.keep(table)
        logger.info("measured the costs of steps in %.1f s", time.monotonic() - started)
    return KnownCosts(file, table)


# ---- on the CPU ----

_MOST_CPU_CONTEXT = 2048


def cpu_costs(config: EngineConfig, runner: CpuModelRunner, *, anew: bool = False) -> KnownCosts:
    """Return the costs of a runner that is not in use. ``anew`` measures them even if the file has some."""
    info = runner.info
    file = CostFile.find(config, runner.model_config, info.dtype, "cpu")
    sizes = Sizes.of(config, info, _MOST_CPU_CONTEXT)

    def measure_all() -> CostTable:
        time_cpu_step(runner, [(1, 0)])  # what the first forward does once
        end = time.monotonic() + CPU_BUDGET_S
        table = measure(sizes, lambda rows: time_cpu_step(runner, rows), end, time.monotonic)
        if not anew and not decodes_on_host(config, info):
            return table
        attention = time_host_attention(config, runner.model_config, info.dtype, transposed_keys=True)
        return msgspec.structs.replace(table, host_attention=attention)

    return known_costs(file, measure_all, anew=anew)


def time_cpu_step(runner: CpuModelRunner, rows: Rows) -> float:
    """Seconds of the faster of two forwards, or of the first one if that takes long."""
    batch = _step_batch(rows, runner.info.block_size, runner.info.window_groups)
    seconds: list[float] = []
    while len(seconds) < 2 and sum(seconds) < CPU_BUDGET_S / 20:
        started = time.perf_counter()
        runner.forward(batch)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _step_batch(rows: Rows, block_size: int, window_groups: int) -> StepBatch:
    """Every row has blocks of its own, side by side, and samples its last token. All groups of layers use the same."""
    positions: list[int] = []
    slots: list[int] = []
    starts, tables, blocks = [0], [], 0
    for tokens, context in rows:
        count = -(-(context + tokens) // block_size)
        tables.append(list(range(blocks, blocks + count)))
        positions += range(context, context + tokens)
        slots += range(blocks * block_size + context, blocks * block_size + context + tokens)
        starts.append(starts[-1] + tokens)
        blocks += count
    return StepBatch(
        [0] * len(positions), positions, slots, starts, [context for _, context in rows], tables,
        [start - 1 for start in starts[1:]], window_tables=[tables] * window_groups,
        window_slots=[slots] * window_groups,
    )  # fmt: skip


# ---- attention on the host ----


def time_host_attention(
    config: EngineConfig, model: ModelConfig, dtype: str, *, transposed_keys: bool, pool: HostPool | None = None
) -> list[HostAttention]:
    """Time attention with the model's heads, by one worker, half of the workers and all of them; heads of odd size give
    nothing.

    ``transposed_keys``: as blocks of the CPU have them, and not those of a GPU. ``pool``: where its rows will be.
    """
    if model.head_dim % 2 or not config.num_hybrid_workers:
        return []
    most, shape = config.num_hybrid_workers, host_shape(model, getattr(torch, dtype))
    float8, measured = config.float8_cache, []
    for workers in sorted({1, max(1, most // 2), most}):
        for tokens in HOST_TOKENS:
            ns = time_attention(
                shape, config.block_size, transposed_keys, workers, tokens,
                float8=float8, pool=pool, num_layers=model.num_layers,
            )  # fmt: skip
            measured.append(HostAttention(workers, tokens, ns))
    return measured
