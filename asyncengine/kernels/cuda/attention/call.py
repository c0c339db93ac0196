"""KernelCall: attention of one layer in one step, as a kernel of this folder is handed it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from asyncengine.kernels.cuda.attention.work.lists import Work
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.ops import AttentionCall


@dataclass(frozen=True, slots=True)
class KernelCall(AttentionCall[DeviceStep]):
    """Attention with the memory that its kernels write, and how they are launched."""

    work: Work
    """work that was built from the step"""
    out: Tensor
    """[T, num_heads * D], contiguous within a token. Tokens of no row, and of rows that a launch is not for, are left
    as they are."""
    pdl: bool = False
    """programmatic dependent launch (see launch/programmatic.py)"""
    l2_cache_hints: bool = True
    """tma kernels say what is to leave the L2 cache first (see launch/cache_policy.py)"""
