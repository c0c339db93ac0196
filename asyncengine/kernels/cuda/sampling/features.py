"""State of sampling that slots keep beyond a temperature: entries, histories and counts of tokens.

A slot's entries come with its first row (``csrc/core/step_input.h``) and stay as they are. Its history grows by the
token that a row computes: the last sampled one, which is that row's input. So steps in flight each see the history
that belongs to them, and nothing has to be taken back.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from asyncengine._core import STEP_INPUT_LAYOUT, EntryKind, Need
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, wait
from asyncengine.kernels.cuda.step.ingest import StepSource
from asyncengine.kernels.cuda.step.tensors import DeviceStep

KINDS = tl.constexpr(16)
"""Places for the kinds of entries of a slot."""
PENALTIES = tl.constexpr(int(Need.penalties))
_HISTORY = tl.constexpr(int(EntryKind.token_history))
_PARAMETERS = tl.constexpr(int(EntryKind.parameters))
_PROMPT_LEN = tl.constexpr(STEP_INPUT_LAYOUT["parameter.prompt_len"])
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class SlotFeatures:
    """A row for each of S slots. Its contents count only for slots whose needs say so."""

    words: Tensor
    """int32 [S, W]: the payloads of the slot's entries, one after the other, but for its history"""
    places: Tensor
    """int32 [S, KINDS, 2]: for each EntryKind where its payload begins in ``words``, and how many words it has"""
    history: Tensor
    """int32 [S, L]: prompt and output"""
    history_len: Tensor
    """int32 [S]"""
    counts: Tensor
    """int32 [S, V]: 2 * times in the output, + 1 if in the prompt"""
    distinct: Tensor
    """int32 [S, L]: the tokens whose count is not 0, each once"""
    num_distinct: Tensor
    """int32 [S]"""


def allocate_features(num_slots: int, entry_words: int, max_len: int, vocab: int, device: torch.device) -> SlotFeatures:
    """Allocate the features of slots whose entries, but for the history, have ``entry_words`` words at most."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return SlotFeatures(
        words=zeros(num_slots, entry_words),
        places=zeros(num_slots, KINDS.value, 2),
        history=zeros(num_slots, max_len),
        history_len=zeros(num_slots),
        counts=zeros(num_slots, vocab),
        distinct=zeros(num_slots, max_len),
        num_distinct=zeros(num_slots),
    )


@kernel(do_not_specialize=["first_lane"])
def _follow_kernel(
    running: tl.tensor,
    stride: tl.tensor,
    header: tl.tensor,
    row_slot: tl.tensor,
    row_entries: tl.tensor,
    row_query_start: tl.tensor,
    row_query_len: tl.tensor,
    row_context_len: tl.tensor,
    input_ids: tl.tensor,
    last_token: tl.tensor,
    first_lane: tl.tensor,
    slot_needs: tl.tensor,
    words: tl.tensor,
    width: tl.tensor,
    places: tl.tensor,
    history: tl.tensor,
    max_len: tl.tensor,
    history_len: tl.tensor,
    counts: tl.tensor,
    vocab: tl.tensor,
    distinct: tl.tensor,
    num_distinct: tl.tensor,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot + row).to(tl.int64)
    if slot < 0:
        return
    words += slot * width
    history += slot * max_len
    distinct += slot * max_len
    counts += slot * vocab
    num_words = tl.load(row_entries + 2 * row + 1)
    offsets = tl.arange(0, CHUNK)
    if num_words > 0:
        places += slot * 2 * KINDS
        tl.store(places + tl.arange(0, 2 * KINDS), tl.zeros([2 * KINDS], tl.int32))
        for start in range(0, tl.load(num_distinct + slot), CHUNK):  # of the slot's last sequence
            old = start + offsets < tl.load(num_distinct + slot)
            token = tl.load(distinct + start + offsets, mask=old, other=0)
            tl.store(counts + token, tl.zeros([CHUNK], tl.int32), mask=old)
        tl.debug_barrier()
        source = running + tl.load(header + 1) * stride + tl.load(row_entries + 2 * row)
        at, kept = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
        tokens_at, length, prompt_len = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
        while at < num_words:
            entry = tl.load(source + at)
            kind, count = (entry >> 24) & 0xFF, entry & 0xFFFFFF
            payload = at + 1
            at = payload + count
            if kind == 0:
                at = num_words
            elif kind == _HISTORY:
                tokens_at, length = payload, tl.minimum(count, max_len)
            elif kind < KINDS:
                if kind == _PARAMETERS:
                    prompt_len = tl.load(source + payload + _PROMPT_LEN)
                count = tl.minimum(count, width - kept)
                for start in range(0, count, CHUNK):
                    i = start + offsets
                    word = tl.load(source + payload + i, mask=i < count, other=0)
                    tl.store(words + kept + i, word, mask=i < count)
                tl.store(places + 2 * kind, kept)
                tl.store(places + 2 * kind + 1, count)
                kept += count
        found = tl.zeros((), tl.int32)
        for start in range(0, length, CHUNK):
            i = start + offsets
            token = tl.load(source + tokens_at + i, mask=i < length, other=0)
            tl.store(history + i, token, mask=i < length)
            known = (i < length) & (token >= 0) & (token < vocab)
            in_prompt = i < prompt_len
            in_output = in_prompt == 0
            of_prompt = tl.atomic_or(counts + token, 1, mask=known & in_prompt, sem="relaxed")
            of_output = tl.atomic_add(counts + token, 2, mask=known & in_output, sem="relaxed")
            fresh = known & (tl.where(in_prompt, of_prompt, of_output) == 0)
            tl.store(distinct + found + tl.cumsum(fresh.to(tl.int32), 0) - 1, token, mask=fresh)
            found += tl.sum(fresh.to(tl.int32), 0)
        tl.store(history_len + slot, length)
        tl.store(num_distinct + slot, found)
    elif (tl.load(slot_needs + slot) & PENALTIES) != 0:
        query_len = tl.load(row_query_len + row)
        length = tl.load(history_len + slot)
        query_start = tl.load(row_query_start + row)
        is_lane = False
        if LANES:  # a row that ends a token, which it began in another step
            is_lane = query_start >= first_lane
            query_len = tl.where(is_lane, 1, query_len)
        if (query_len > 0) & (length < tl.load(row_context_len + row) + query_len) & (length < max_len):
            token = tl.load(input_ids + query_start + query_len - 1)
            if LANES:
                token = tl.where(is_lane, tl.load(last_token + slot), token)
            tl.store(history + length, token)
            tl.store(history_len + slot, length + 1)
            if (token >= 0) & (token < vocab):
                count = tl.load(counts + token)
                found = tl.load(num_distinct + slot)
                tl.debug_barrier()  # every thread has read what one of them changes
                tl.store(counts + token, count + 2)
                if count == 0:
                    tl.store(distinct + found, token)
                    tl.store(num_distinct + slot, found + 1)


def follow(source: StepSource, step: DeviceStep, features: SlotFeatures, *, pdl: bool = False) -> None:
    """Bring the features of the step's slots up to date: entries of those newly filled, and the tokens of the others.

    It comes after ``ingest`` with ENTRY_NEEDS, once a step.
    """
    running, stride = source.running
    slots = step.slots
    _follow_kernel[(step.num_rows,)](
        running, stride, source.header, step.row_slot, step.row_entries, step.row_query_start, step.row_query_len,
        step.row_context_len, step.input_ids, slots.last_token, step.num_tokens - step.num_lanes, slots.needs,
        features.words, features.words.shape[1], features.places, features.history, features.history.shape[1],
        features.history_len, features.counts, features.counts.shape[1], features.distinct, features.num_distinct,
        LANES=step.num_lanes > 0, CHUNK=_CHUNK, num_warps=8, **launch_options(pdl),
    )  # fmt: skip
