"""Layers with a state in plain torch: each row of a step goes on from the state of its sequence's slot.

Every token is computed by the same operations in the same order, so that the cut of a prompt into chunks and the other
rows of a step change no bit of its result.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine._core import StepBatch
from asyncengine.kernels.cpu.sdpa import count_decodes
from asyncengine.kernels.ops import LayerStates, ShortConv


def rows_of(batch: StepBatch) -> Iterator[tuple[Tensor, slice, int]]:
    """Rows of equal lengths together: their slots int64 [R], their tokens, and the length of each.

    Rows of one token, which come first, are one item. Each other row is one by itself.
    """
    slots, starts = torch.from_numpy(batch.slots).long(), batch.query_start.tolist()
    decodes = count_decodes(batch)
    if decodes:
        yield slots[:decodes], slice(0, decodes), 1
    for row in range(decodes, batch.num_rows):
        yield slots[row : row + 1], slice(starts[row], starts[row + 1]), starts[row + 1] - starts[row]


def short_conv(x: Tensor, conv: ShortConv, cache: LayerStates, batch: StepBatch) -> Tensor:
    """``Ops.short_conv``."""
    size, channels = conv.weight.shape
    states = cache.states.view(torch.float32)[:, : (size - 1) * channels]
    out = torch.empty_like(x)
    for slots, tokens, length in rows_of(batch):
        before = states[slots].view(-1, size - 1, channels)
        inputs = torch.cat((before, x[tokens].view(-1, length, channels).float()), 1)
        y = inputs[:, :length] * conv.weight[0]
        for k in range(1, size):
            y += inputs[:, k : k + length] * conv.weight[k]
        if conv.bias is not None:
            y += conv.bias
        out[tokens] = (F.silu(y) if conv.silu else y).flatten(0, 1).to(x.dtype)
        states[slots] = inputs[:, length:].flatten(1)
    return out
