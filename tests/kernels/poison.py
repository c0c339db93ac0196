"""New memory is full of what must not be read before it is written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor


def poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN, or integers far outside of any range."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        x = empty(*args, **kwargs)
        return x.fill_(math.nan if x.is_floating_point() else -0x5A5A5A5A)

    monkeypatch.setattr(torch, "empty", poisoned)


def surrounded(x: Tensor, device: torch.device, stride: int = 0) -> tuple[Tensor, Tensor]:
    """A copy of x in the midst of NaN, its rows ``stride`` elements longer than they are; and all that memory."""
    edge, width = 512, x.shape[-1] + stride
    memory = torch.full((2 * edge + len(x.view(-1, x.shape[-1])) * width,), math.nan, dtype=x.dtype, device=device)
    inner = memory[edge:-edge].view(*x.shape[:-1], width)[..., : x.shape[-1]]
    inner.copy_(x)
    return inner, memory


def taken(inner: Tensor, memory: Tensor) -> Tensor:
    """A copy on the CPU of what was written into ``surrounded`` memory. Nothing must have been written beside it."""
    got = inner.clone().cpu()
    inner.fill_(math.nan)
    assert memory.isnan().all(), "wrote beside out"
    return got
