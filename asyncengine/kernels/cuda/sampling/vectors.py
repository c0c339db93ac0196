"""Hidden states as records: what ends a sample that needs a vector, and no token."""

# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from asyncengine._core import Need, RecordKind
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, wait
from asyncengine.kernels.cuda.sampling.results import END_OF_RECORDS, NO_TOKEN, NOT_FINITE, store_word, store_words
from asyncengine.kernels.cuda.step.tensors import DeviceStep

VECTOR = tl.constexpr(int(Need.vector))
KIND = tl.constexpr(int(RecordKind.vector))
_CHUNK = 1024


@kernel
def _vectors_kernel(
    hidden: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    slot_needs: tl.tensor,
    finished: tl.tensor,
    sample_slot: tl.tensor,
    sample_records: tl.tensor,
    header: tl.tensor,
    out_words: tl.tensor,
    ring_stride: tl.tensor,
    records_begin: tl.tensor,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    sample = tl.program_id(0).to(tl.int64)
    slot = tl.load(sample_slot + sample)
    if slot < 0:
        return
    if (tl.load(slot_needs + slot) & VECTOR) == 0:
        return
    begin = records_begin + tl.load(sample_records + 2 * sample)
    room = tl.load(sample_records + 2 * sample + 1)
    bad = tl.zeros([CHUNK], tl.int32)
    for start in range(0, width, CHUNK):
        i = start + tl.arange(0, CHUNK)
        x = tl.load(hidden + sample * stride + i, mask=i < width, other=0.0).to(tl.float32)
        bad |= (~(tl.abs(x) < float("inf"))).to(tl.int32)
    fits = room > width
    if fits & (tl.max(bad, 0) == 0):
        for start in range(0, width, CHUNK):
            i = start + tl.arange(0, CHUNK)
            x = tl.load(hidden + sample * stride + i, mask=i < width, other=0.0).to(tl.float32)
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
    hidden: Tensor, step: DeviceStep, header: Tensor, out_words: Tensor, records_begin: int, *, pdl: bool = False
) -> None:
    """End each sample s whose slot has Need.vector: hidden[s] [H] becomes its record, in float32, and its head none.

    The head is NOT_FINITE where a number is not finite or the record has no room for the row. The sample then has no
    slot any more, so ``sample``, which comes later, leaves it alone. ``header`` and ``out_words`` are as there, and the
    records begin at word ``records_begin``.
    """
    rows, width = hidden.shape
    if len(step.sample_slot) < rows or hidden.stride(1) != 1:
        raise ValueError(f"{rows} rows of {width} with strides {hidden.stride()} for {len(step.sample_slot)} samples")
    if out_words.dtype != torch.int64 or out_words.dim() != 2:
        raise ValueError(f"out_words must be int64 [ring, words], got {out_words.dtype} {list(out_words.shape)}")
    _vectors_kernel[(rows,)](
        hidden, hidden.stride(0), width, step.slots.needs, step.slots.finished, step.sample_slot, step.sample_records,
        header, out_words, out_words.stride(0), records_begin,
        CHUNK=_CHUNK, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
