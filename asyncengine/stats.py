"""Counters and gauges of an engine: what it does, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from asyncengine import _core


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine is doing now, and what it has done since it started."""

    num_requests_running: int
    """Sequences that have a slot."""
    num_requests_waiting: int
    kv_cache_usage: float
    """Share of the KV blocks that sequences hold, 0..1; blocks that only the prefix cache keeps count as free."""
    num_preemptions: int
    prefix_cache_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int
    """Prompt tokens found there."""
    prompt_tokens: int
    generation_tokens: int
    num_kv_blocks: int
    num_free_blocks: int
    num_free_slots: int
    num_steps: int
    num_late_launches: int
    """Steps that late_launch held back until the GPU had nothing left to do, or as good as nothing."""
    num_steps_in_flight: int

    @classmethod
    def of(cls, s: _core.StepLoopStats) -> Self:
        return cls(
            num_requests_running=s.running,
            num_requests_waiting=max(s.waiting, s.queued_requests),
            kv_cache_usage=1 - s.free_blocks / s.num_blocks,
            num_preemptions=s.preemptions,
            prefix_cache_queries=s.prefix_queries,
            prefix_cache_hits=s.prefix_hits,
            prompt_tokens=s.prompt_tokens,
            generation_tokens=s.generated_tokens,
            num_kv_blocks=s.num_blocks,
            num_free_blocks=s.free_blocks,
            num_free_slots=s.free_slots,
            num_steps=s.steps,
            num_late_launches=s.late_launches,
            num_steps_in_flight=s.leases,
        )


@dataclass(frozen=True, slots=True)
class DebugStats:
    """What an engine holds. At rest every field but the first three is 0, and those three add up to the pool."""

    free_blocks: int
    """KV blocks whose content is worthless."""
    cached_blocks: int
    """KV blocks that nobody holds and that the prefix cache may hand out again."""
    num_kv_blocks: int
    held_blocks: int
    block_references: int
    """The sum of all reference counts: more than held_blocks where sequences share."""
    held_slots: int
    leases: int
    """Staging buffers of steps in flight."""
    live_requests: int
    """Requests that the core still has in memory."""
    streams: int
    """Requests whose consumer has not seen their end."""
    tasks: int
    """Tasks that wait for a delta or for the end of a request."""
    queued_requests: int
    queued_tokens: int
    queued_characters: int
    """Of prompts that are being tokenized, or wait for it."""

    @classmethod
    def of(cls, step_loop: _core.StepLoop, max_num_seqs: int, streams: int, tasks: int, queued_characters: int) -> Self:
        s = step_loop.stats()
        return cls(
            free_blocks=s.free_blocks - s.cached_blocks,
            cached_blocks=s.cached_blocks,
            num_kv_blocks=s.num_blocks,
            held_blocks=s.num_blocks - s.free_blocks,
            block_references=s.block_references,
            held_slots=max_num_seqs - s.free_slots,
            leases=s.leases,
            live_requests=s.live_requests,
            streams=streams,
            tasks=tasks,
            queued_requests=s.queued_requests,
            queued_tokens=s.queued_tokens,
            queued_characters=queued_characters,
        )

    @property
    def held(self) -> dict[str, int]:
        """Everything that is 0 at rest and is not."""
        names = ("free_blocks", "cached_blocks", "num_kv_blocks")
        return {name: value for name in self.__slots__ if name not in names and (value := getattr(self, name))}
