"""Steps without an engine around them: the same step again and again, to time it.

The StepInput is made here, in the layout of csrc/core/step_input.h, and stays the same for every replay. It needs an
idle engine without a prefix cache: block tables and KV are overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from asyncengine._core import STEP_INPUT_LAYOUT
from asyncengine.kernels.float8 import FLOAT8
from asyncengine.runner.steps.buckets import Bucket
from asyncengine.runner.steps.device_steps import DeviceSteps

LAYOUT = STEP_INPUT_LAYOUT
STEP = 2**31 - 1
"""Number of the replayed step; an engine would run for a month before it got there."""
PROMPT_IDS = 64
"""Different tokens among those of replayed prompts."""
_WARM_UP = 32
"""Replays before the clock starts: more than there are places in a ring, and enough for the clocks to rise."""


class Row(NamedTuple):
    """A row of a step. One of a single token takes it from the device, as a decoding sequence does."""

    query: int
    context: int
    """tokens before the query"""


def decode_rows(contexts: Iterable[int]) -> list[Row]:
    return [Row(1, context) for context in contexts]


def step_input(rows: Sequence[Row]) -> list[int]:
    """A StepInput, in 32-bit words: row i runs in slot i, and greedily samples a token."""
    decodes = sum(row.query == 1 for row in rows)
    tokens = sum(row.query for row in rows)
    words, prompt_ids = [], 0
    start = 0
    for i, (query, context) in enumerate(rows):
        flags = LAYOUT["flag.from_device"] if query == 1 else 0
        words += _structure(
            "row", slot=i, query_start=start, query_len=query, context_len=context, flags=flags,
            prompt_start=prompt_ids, sample_row=i, num_samples=1, num_appends=1, update=-1,
        )  # fmt: skip
        start += query
        prompt_ids += query if query > 1 else 0
    header = _structure(
        "header", total_words=LAYOUT["header_words"] + len(words) + prompt_ids, step=STEP, num_rows=len(rows),
        num_decode_rows=decodes, num_tokens=tokens, num_samples=len(rows), num_heads=len(rows),
        num_prompt_ids=prompt_ids, max_context=max(row.context for row in rows),
    )  # fmt: skip
    header[0] = LAYOUT["magic"]
    return [*header, *words, *(i % PROMPT_IDS for i in range(prompt_ids))]


def _structure(kind: str, **fields: int) -> list[int]:
    """A structure of the StepInput; a field that is not named is 0."""
    words = [0] * LAYOUT[f"{kind}_words"]
    for field, value in fields.items():
        words[LAYOUT[f"{kind}.{field}"]] = value
    return words


def choose_bucket(buckets: Sequence[Bucket], rows: Sequence[Row], lanes: int = 0) -> int:
    """Index of the bucket that the engine takes for a step of these rows, with as many lanes: the first that fits."""
    tokens = sum(row.query for row in rows)
    longest, plain = max(row.context for row in rows), tokens == len(rows)
    return next(
        i
        for i, b in enumerate(buckets)
        if b.lanes == lanes
        and len(rows) <= b.max_rows
        and tokens + lanes <= b.max_tokens
        and longest <= b.max_context
        and (plain or not b.single_token_rows)
    )


def stage(steps: DeviceSteps, rows: Sequence[Row], *, own_tables: bool = False) -> None:
    """Make every launch from now on a step of ``rows``.

    With a row for every slot the block tables and the KV stay what the last sequences of the slots left there, which
    must have been no shorter: what the memory of a step looks like is worth 5% of its time. Otherwise, or with
    ``own_tables``, the rows get block tables of their own.
    """
    slots = steps.state.slots
    if own_tables or len(rows) < len(slots.last_token):
        longest = max(row.query + row.context for row in rows)
        _lay_out(steps, len(rows), (longest - 1) // steps.block_size + 1)
    slots.last_token.copy_(torch.arange(len(slots.last_token)))
    slots.finished.zero_()
    slots.stops.fill_(-1)
    words = torch.tensor(step_input(rows), dtype=torch.int32)
    steps.source.inputs[:, : len(words)] = words.to(steps.source.inputs.device)


def _lay_out(steps: DeviceSteps, rows: int, entries: int) -> None:
    """Blocks of a sequence lie apart, as they do when sequences grow side by side. States are those of a beginning."""
    num_blocks = min((planes.shape[1] for planes in steps.cache.groups), default=rows * entries)
    if rows * entries > num_blocks:
        raise ValueError(f"{rows} rows of {entries} blocks do not fit a cache of {num_blocks}")
    # Memory that nobody has written may hold NaN, with which rows would end.
    for memory in (planes[:, : rows * entries] for planes in steps.cache.groups):
        if memory.dtype == FLOAT8:
            memory.view(torch.uint8).bitwise_and_(0xF7)  # a bit of the exponent that makes e4m3's NaN
        else:
            memory.nan_to_num_(0.0, 0.0, 0.0)
    for states in steps.cache.states:
        states[:, :rows].zero_()
    tables = torch.arange(entries)[None, :] * rows + torch.arange(rows)[:, None]
    block_tables = steps.state.slots.block_tables
    block_tables[:rows, :entries] = tables.to(block_tables)
    if steps.state.slots.window_tables is not None:  # the same blocks: what is computed does not matter
        steps.state.slots.window_tables[:, :rows, :entries] = tables.to(block_tables)


def check(steps: DeviceSteps, rows: int) -> None:
    """Every place of the ring must hold tokens of the replayed step, and no row have ended. RuntimeError if not."""
    words = steps.source.outputs[:, :rows].cpu()
    tokens = words & 0xFFFFFFFF
    if not (words >> 32 == STEP).all() or (tokens >= 2**31).any() or steps.state.slots.finished.any():
        raise RuntimeError("the bare replays did not do the work of the engine's steps")


@contextmanager
def staged(
    steps: DeviceSteps,
    rows: Sequence[Row],
    next_step: int,
    synchronize: Callable[[], None],
    *,
    own_tables: bool = False,
) -> Iterator[None]:
    """Launches inside are steps of ``rows``, checked at the end; afterwards the engine's ``next_step`` is next.

    ``synchronize`` waits for the device: torch's CUDA stream and the runner's do not wait for each other.
    """
    synchronize()
    stage(steps, rows, own_tables=own_tables)
    synchronize()
    try:
        yield
        synchronize()
        check(steps, len(rows))
    finally:
        steps.restart(next_step)
        synchronize()


def launch_us(
    launch: Callable[[int], None], replays: int, cuda_stream: torch.cuda.Stream, *, warm_up: int = _WARM_UP
) -> float:
    """Microseconds of each of ``replays`` that ``launch``, called with their number, enqueues on the CUDA stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    launch(warm_up)
    begin.record(cuda_stream)  # while the GPU is still busy: the first launch has no latency to show
    launch(replays)
    end.record(cuda_stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / replays
