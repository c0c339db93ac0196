"""Words of a step's output, as csrc/core/step_output.h lays them out: the one place that stores heads and records.

A kernel passes ``header`` (number of the step and its place in the ring), ``out_words`` and ``ring_stride`` as
``sample`` gets them. A record is stored by one program: ``store_word`` its header, ``store_words`` its payload, and
``store_word`` the end if the region has room left.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from asyncengine._core import STEP_INPUT_LAYOUT

NOT_FINITE = tl.constexpr(STEP_INPUT_LAYOUT["not_finite"])
"""Head in place of a token: the logits were not finite."""
NO_TOKEN = tl.constexpr(STEP_INPUT_LAYOUT["no_token"])
"""Head in place of a token: none was sampled here."""
END_OF_RECORDS = tl.constexpr(STEP_INPUT_LAYOUT["end_of_records"])


@triton.jit
def store_word(
    header: tl.tensor, out_words: tl.tensor, ring_stride: tl.tensor, place: tl.tensor, payload: tl.tensor
) -> None:
    """Payload int32, which may be a constant, at a place of the step's output: a head at the place of its sample."""
    step, ring = tl.load(header), tl.load(header + 1)
    tl.store(out_words + ring * ring_stride + place, (step << 32) | (tl.cast(payload, tl.int64) & 0xFFFFFFFF))


@triton.jit
def store_words(
    header: tl.tensor,
    out_words: tl.tensor,
    ring_stride: tl.tensor,
    places: tl.tensor,
    payload: tl.tensor,
    mask: tl.tensor,
) -> None:
    """A block of payloads, int32 or the bits of float32."""
    step, ring = tl.load(header), tl.load(header + 1)
    bits = payload.to(tl.int32, bitcast=True)
    tl.store(out_words + ring * ring_stride + places, (step << 32) | (bits.to(tl.int64) & 0xFFFFFFFF), mask=mask)


@triton.jit
def store_record(
    header: tl.tensor,
    out_words: tl.tensor,
    ring_stride: tl.tensor,
    begin: tl.tensor,
    room: tl.tensor,
    KIND: tl.constexpr,
    payload: tl.tensor,
    count: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """The only record of a region of ``room`` words at ``begin``: the first ``count`` of CHUNK payloads, a number that
    may be a constant.

    ``begin`` counts from the first head: the records begin there at Staging.records_begin. Nothing is stored where the
    region has no room for it all.
    """
    if room >= count + 1:
        store_word(header, out_words, ring_stride, begin, count + (KIND << 24))
        i = tl.arange(0, CHUNK)
        store_words(header, out_words, ring_stride, begin + 1 + i, payload, i < count)
        if room > count + 1:
            store_word(header, out_words, ring_stride, begin + 1 + count, END_OF_RECORDS)
