"""Hidden states as records, or their means over prompts: what ends a sample that needs a vector, and no token."""

# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine._core import Need, RecordKind
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, wait
from asyncengine.kernels.cuda.sampling.results import END_OF_RECORDS, NO_TOKEN, NOT_FINITE, store_word, store_words
from asyncengine.kernels.cuda.step.tensors import DeviceStep

VECTOR = tl.constexpr(int(Need.vector))
KIND = tl.constexpr(int(RecordKind.vector))
MEAN = tl.constexpr(int(Need.mean))
_CHUNK = 1024
_COLUMNS = 128
_TOKENS = 32


@triton.jit
def _numbers(
    hidden: tl.tensor, sums: tl.tensor, count: tl.tensor, i: tl.tensor, mask: tl.tensor, is_mean: tl.tensor
) -> tl.tensor:
    own = tl.load(hidden + i, mask=mask & (is_mean == 0), other=0.0).to(tl.float32)
    total = tl.load(sums + i, mask=mask & is_mean, other=0.0).to(tl.float32)
    return tl.where(is_mean, tl.div_rn(total, tl.zeros_like(total) + tl.maximum(count, 1.0)), own)


@kernel
def _sums_kernel(
    hidden: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    slot_needs: tl.tensor,
    row_slot: tl.tensor,
    row_query_start: tl.tensor,
    row_query_len: tl.tensor,
    row_context_len: tl.tensor,
    sums: tl.tensor,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Each program adds up some columns of a row's tokens, always in the same order."""
    wait(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot + row).to(tl.int64)
    if slot < 0:
        return
    query_len = tl.load(row_query_len + row)
    if ((tl.load(slot_needs + slot) & MEAN) == 0) | (query_len == 0):
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    sums += slot * width
    continues = tl.load(row_context_len + row) > 0
    total = tl.load(sums + column, mask=inside & continues, other=0.0)
    hidden += tl.load(row_query_start + row).to(tl.int64) * stride
    for start in range(0, query_len, TOKENS):
        token = start + tl.arange(0, TOKENS)
        mask = (token < query_len)[:, None] & inside[None, :]
        x = tl.load(hidden + token[:, None] * stride + column[None, :], mask=mask, other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
    tl.store(sums + column, total, mask=inside)


def add_up(hidden: Tensor, step: DeviceStep, sums: Tensor, *, pdl: bool = False) -> None:
    """Add the step's states [T, H] of each slot with Need.mean to ``sums`` float32 [S, H]; a prompt's first part begins
    anew."""
    width = hidden.shape[1]
    if sums.dtype != torch.float32 or sums.shape[1] != width or hidden.stride(1) != 1:
        raise ValueError(f"sums must be float32 [slots, {width}], got {sums.dtype} {list(sums.shape)}")
    _sums_kernel[(step.num_rows, triton.cdiv(width, _COLUMNS))](
        hidden, hidden.stride(0), width, step.slots.needs, step.row_slot, step.row_query_start, step.row_query_len,
        step.row_context_len, sums, TOKENS=_TOKENS, COLUMNS=_COLUMNS, num_warps=4, **launch_options(pdl),
    )  # fmt: skip


@kernel
def _vectors_kernel(
    hidden: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    slot_needs: tl.tensor,
    finished: tl.tensor,
    sample_slot: tl.tensor,
    sample_index: tl.tensor,
    sample_position: tl.tensor,
    sums: tl.tensor,
    sample_records: tl.tensor,
    header: tl.tensor,
    out_words: tl.tensor,
    ring_stride: tl.tensor,
    records_begin: tl.tensor,
    OF_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    sample = tl.program_id(0).to(tl.int64)
    slot = tl.load(sample_slot + sample)
    if slot < 0:
        return
    needs = tl.load(slot_needs + slot)
    if (needs & VECTOR) == 0:
        return
    is_mean = ((needs & MEAN) != 0) & OF_TOKENS
    row = tl.load(sample_index + sample) if OF_TOKENS else sample
    hidden += row * stride
    sums += slot.to(tl.int64) * width
    count = tl.load(sample_position + sample).to(tl.float32)  # the prompt's tokens
    begin = records_begin + tl.load(sample_records + 2 * sample)
    room = tl.load(sample_records + 2 * sample + 1)
    bad = tl.zeros([CHUNK], tl.int32)
    for start in range(0, width, CHUNK):
        i = start + tl.arange(0, CHUNK)
        x = _numbers(hidden, sums, count, i, i < width, is_mean)
        bad |= (~(tl.abs(x) < float("inf"))).to(tl.int32)
    fits = room > width
    if fits & (tl.max(bad, 0) == 0):
        for start in range(0, width, CHUNK):
            i = start + tl.arange(0, CHUNK)
            x = _numbers(hidden, sums, count, i, i < width, is_mean)
            store_words(header, out_words, ring_stride, begin + 1 + i, x, i < width)
        store_word(header, out_words, ring_stride, begin, width + (KIND << 24))
        if room > width + 1:
            store_word(header, out_words, ring_stride, begin + 1 + width, END_OF_RECORDS)
        store_word(header, out_words, ring_stride, sample, NO_TOKEN)
    else:
        store_word(header, out_words, ring_stride, sample, NOT_FINITE)
    tl.store(finished + slot, 1)
    tl.store(sample_slot + sample, -1)


def store_vectors(
    hidden: Tensor,
    step: DeviceStep,
    header: Tensor,
    out_words: Tensor,
    records_begin: int,
    sums: Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """End each sample s whose slot has Need.vector: hidden[s] [H] becomes its record, in float32, and its head none.

    With ``sums``, after ``add_up``, ``hidden`` is that of all tokens, and slots with Need.mean give the mean of theirs.
    The head is NOT_FINITE where a number is not finite or the record has no room for the row. The sample then has no
    slot any more, so ``sample``, which comes later, leaves it alone. ``header`` and ``out_words`` are as there, and the
    records begin at word ``records_begin``.
    """
    rows, width = hidden.shape
    samples = rows if sums is None else step.num_samples
    if len(step.sample_slot) < samples or hidden.stride(1) != 1:
        raise ValueError(f"{rows} rows of {width} with strides {hidden.stride()} for {len(step.sample_slot)} samples")
    if out_words.dtype != torch.int64 or out_words.dim() != 2:
        raise ValueError(f"out_words must be int64 [ring, words], got {out_words.dtype} {list(out_words.shape)}")
    _vectors_kernel[(samples,)](
        hidden, hidden.stride(0), width, step.slots.needs, step.slots.finished, step.sample_slot, step.sample_index,
        step.sample_position, hidden if sums is None else sums, step.sample_records, header, out_words,
        out_words.stride(0), records_begin, OF_TOKENS=sums is not None, CHUNK=_CHUNK, num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip
