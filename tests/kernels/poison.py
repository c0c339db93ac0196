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
