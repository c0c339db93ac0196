"""Copies of states on the device, before the step that goes on from them: for siblings and for the prefix cache."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.step.ingest import StepSource
from asyncengine.kernels.cuda.step.layout import (
    COPY_SOURCE,
    COPY_TARGET,
    COPY_WORDS,
    NUM_STATE_COPIES,
    TOTAL_WORDS,
)

_PROGRAMS = 32
"""Programs that share each layer's part of a state."""


def copy_states(source: StepSource, states: Tensor) -> None:
    """Run the copies of states of the next StepInput, which stays the next one.

    ``states`` is uint8 [layers, slots, bytes]: a state is copied in every layer. A copy without a source does nothing:
    layers take the state before a sequence's first token for zeros.
    """
    ring, words = source.inputs.shape
    layers, slots, num_bytes = states.shape
    _copy_states[(_PROGRAMS, layers)](
        source.inputs, source.state, states.view(torch.int32), words, slots, num_bytes // 4, RING=ring, CHUNK=1024,
        num_warps=4,
    )  # fmt: skip


@kernel
def _copy_states(inputs, state, states, words, slots, state_words, RING: tl.constexpr, CHUNK: tl.constexpr):
    source = inputs + (tl.load(state + 2) % RING) * words
    count = tl.load(source + NUM_STATE_COPIES)
    copies = source + tl.load(source + TOTAL_WORDS) - COPY_WORDS * count  # behind everything else
    layer = states + tl.program_id(1).to(tl.int64) * slots * state_words
    for i in range(count):
        origin = tl.load(copies + COPY_WORDS * i + COPY_SOURCE)
        if origin >= 0:
            read = layer + origin.to(tl.int64) * state_words
            write = layer + tl.load(copies + COPY_WORDS * i + COPY_TARGET).to(tl.int64) * state_words
            for start in range(tl.program_id(0) * CHUNK, state_words, tl.num_programs(0) * CHUNK):
                word = start + tl.arange(0, CHUNK)
                tl.store(write + word, tl.load(read + word, mask=word < state_words), mask=word < state_words)
