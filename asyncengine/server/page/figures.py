"""The JSON that the page at / draws."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncengine.api.stats import EngineSnapshot
from asyncengine.errors import ConfigError
from asyncengine.server.engine_api import Engine
from asyncengine.server.metrics import Histogram, Metrics


class Total(msgspec.Struct):
    """Sum of all observations since the start: the page shows the mean of those between two answers."""

    count: int
    seconds: float

    @classmethod
    def of(cls, *histograms: Histogram) -> Total:
        return cls(sum(sum(h.counts) for h in histograms), sum(h.total for h in histograms))


class Blocks(msgspec.Struct):
    """asyncengine.BlockMap: its bytes are base64."""

    total: int
    free: int
    per_cell: int
    held: bytes
    shared: bytes
    cached: bytes


class Figures(msgspec.Struct, kw_only=True):
    """GET /page/stats. ``time_s`` is a clock that only goes forward; the times in ``steps`` and ``wakes`` are
    nanoseconds before it."""

    health: str
    time_s: float
    running: int
    waiting: int
    on_host: int
    """Requests of ``running`` that decode on the host."""
    steps_done: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    ttft: Total
    itl: Total
    blocks: Blocks
    steps: list[list[int]]
    """Step, begun, packed, launched, ready, committed, rows, tokens: asyncengine.StepRecord."""
    wakes: list[list[int]]
    """Begun, delivered, handled: asyncengine.WakeRecord."""


class Unready(msgspec.Struct):
    """GET /page/stats and /page/model while there is no engine to ask."""

    health: str


class Model(msgspec.Struct, kw_only=True):
    """GET /page/model."""

    health: str
    name: str
    architecture: str
    dtype: str
    device: str
    max_model_len: int
    num_parameters: int
    block_size: int
    talks: str
    """chat; or text, where there is no chat template; or tokens, where there is no tokenizer."""


def figures(health: str, snapshot: EngineSnapshot, metrics: Metrics) -> Figures:
    stats, now = snapshot.stats, snapshot.time_ns
    return Figures(
        health=health,
        time_s=now / 1e9,
        running=stats.num_requests_running,
        waiting=stats.num_requests_waiting,
        on_host=stats.num_host_rows,
        steps_done=stats.num_steps,
        prompt_tokens=stats.prompt_tokens,
        generation_tokens=stats.generation_tokens,
        preemptions=stats.num_preemptions,
        prefix_queries=stats.prefix_cache_queries,
        prefix_hits=stats.prefix_cache_hits,
        ttft=Total.of(*(each.time_to_first_token for each in metrics.each)),
        itl=Total.of(*(data for each in metrics.each for data in each.inter_token_latency.values())),
        blocks=Blocks(
            stats.num_kv_blocks,
            stats.num_free_blocks,
            snapshot.blocks.blocks_per_cell,
            snapshot.blocks.held,
            snapshot.blocks.shared,
            snapshot.blocks.cached,
        ),
        steps=[[s.step, *_before(now, s[1:6]), s.rows, s.tokens] for s in snapshot.steps],
        wakes=[_before(now, wake) for wake in snapshot.wakes],
    )


def model(health: str, name: str, engine: Engine) -> Model:
    info = engine.model_info
    return Model(
        health=health,
        name=name,
        architecture=info.architecture,
        dtype=info.dtype,
        device=info.device_label,
        max_model_len=info.max_model_len,
        num_parameters=info.num_parameters,
        block_size=info.block_size,
        talks=_talks(engine),
    )


def _talks(engine: Engine) -> str:
    try:
        return "chat" if engine.tokenizer.has_chat_template else "text"
    except ConfigError:  # skip_tokenizer_init
        return "tokens"


def _before(now: int, times: Sequence[int]) -> list[int]:
    return [now - time for time in times]
