"""Counters and gauges of an engine: what it does, and what it holds.

The core counts (csrc/core/stats.inl), and its snapshot has a value by name. A field of that name takes the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Literal, NamedTuple, Self


class Exported(NamedTuple):
    """How the server exports a statistic: by its own name, or by ``name``, with this help text."""

    kind: Literal["gauge", "counter"]
    text: str
    name: str = ""


def _counted(cls: type, snapshot: Mapping[str, int]) -> dict[str, int]:
    """The fields of a class that the snapshot has."""
    return {field.name: snapshot[field.name] for field in fields(cls) if field.name in snapshot}


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine is doing now, and what it has done since it started."""

    num_requests_running: Annotated[int, Exported("gauge", "Requests that hold a slot.")]
    """Sequences that have a slot."""
    num_requests_waiting: Annotated[int, Exported("gauge", "Requests in the queue.")]
    kv_cache_usage: Annotated[float, Exported("gauge", "Share of the KV blocks in use, 0 to 1.", "kv_cache_usage_perc")]
    """Share of the KV blocks that sequences hold, 0..1; blocks that only the prefix cache keeps count as free."""
    num_preemptions: Annotated[int, Exported("counter", "Sequences that had to be recomputed.")]
    prefix_cache_queries: Annotated[int, Exported("counter", "Tokens sought in the prefix cache.")]
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: Annotated[int, Exported("counter", "Tokens found in the prefix cache.")]
    """Prompt tokens found there."""
    prompt_tokens: Annotated[int, Exported("counter", "Prompt tokens of admitted requests.")]
    generation_tokens: Annotated[int, Exported("counter", "Tokens generated.")]
    num_kv_blocks: int
    num_free_blocks: int
    num_free_slots: int
    num_steps: int
    num_late_launches: int
    """Steps that late_launch held back until the GPU had nothing left to do, or as good as nothing."""
    num_steps_in_flight: int
    num_host_blocks: int
    """KV blocks of the host tier; 0 without one."""
    host_cached_blocks: Annotated[int, Exported("gauge", "KV blocks that the host tier holds.")]
    blocks_to_host: Annotated[int, Exported("counter", "KV blocks copied to the host.")]
    blocks_from_host: Annotated[int, Exported("counter", "KV blocks copied back from the host.")]
    failed_transfers: Annotated[int, Exported("counter", "Copies of KV blocks that came to nothing.")]
    """What they were to bring was computed again."""
    blocks_to_disk: Annotated[int, Exported("counter", "KV blocks written to the disk tier.")]
    blocks_from_disk: Annotated[int, Exported("counter", "KV blocks read from the disk tier.")]
    failed_disk_transfers: Annotated[int, Exported("counter", "Reads and writes of the disk tier that failed.")]

    @classmethod
    def of(cls, snapshot: Mapping[str, int]) -> Self:
        usage = 1 - snapshot["num_free_blocks"] / snapshot["num_kv_blocks"]
        return cls(kv_cache_usage=usage, **_counted(cls, snapshot))


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
    def of(
        cls, snapshot: Mapping[str, int], max_num_seqs: int, streams: int, tasks: int, queued_characters: int
    ) -> Self:
        return cls(
            free_blocks=snapshot["num_free_blocks"] - snapshot["cached_blocks"],
            held_blocks=snapshot["num_kv_blocks"] - snapshot["num_free_blocks"],
            held_slots=max_num_seqs - snapshot["num_free_slots"],
            leases=snapshot["num_steps_in_flight"],
            streams=streams,
            tasks=tasks,
            queued_characters=queued_characters,
            **_counted(cls, snapshot),
        )

    @property
    def held(self) -> dict[str, int]:
        """Everything that is 0 at rest and is not."""
        names = ("free_blocks", "cached_blocks", "num_kv_blocks")
        return {name: value for name in self.__slots__ if name not in names and (value := getattr(self, name))}


class StepRecord(NamedTuple):
    """A step that is over. Times are those of time.monotonic_ns()."""

    step: int
    begun_ns: int
    """Scheduling began."""
    packed_ns: int
    """It was scheduled and packed, and the launch began."""
    launched_ns: int
    """The launch returned. The device runs the step from then on, or once the step before is over."""
    ready_ns: int
    """The step thread saw that the device was done."""
    committed_ns: int
    """Its tokens were taken in, and offered to the event loop."""
    rows: int
    """Sequences in it."""
    tokens: int
    """Computed in it, of prompts too."""
    decode_rows: int = 0
    """Sequences of which it computes one more token, and no prompt."""
    predicted_ns: int = 0
    """It was expected to take, from the end of the step before or its own launch; 0 where costs were not measured."""


class WakeRecord(NamedTuple):
    """The event loop took in what steps gave. Times are those of time.monotonic_ns()."""

    begun_ns: int
    delivered_ns: int
    """Every request had its tokens."""
    handled_ns: int
    """The tasks that this woke had run: a server has sent the text."""


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The KV blocks in order, in cells of ``blocks_per_cell``, at most 1,024 cells.

    A byte of ``held``, ``shared`` and ``cached`` says how many blocks of its cell are so, 0 to 255 for none to all. The
    rest is free.
    """

    blocks_per_cell: int
    held: bytes
    """By one sequence."""
    shared: bytes
    """By several sequences."""
    cached: bytes
    """By the prefix cache alone."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What AsyncEngine.snapshot() tells."""

    time_ns: int
    """time.monotonic_ns() when it was made."""
    stats: EngineStats
    steps: tuple[StepRecord, ...]
    """The oldest first."""
    wakes: tuple[WakeRecord, ...]
    """The oldest first."""
    blocks: BlockMap
