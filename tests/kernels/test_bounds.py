"""The interpreter finds a kernel that touches memory beside its tensors (see bounds.py)."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from asyncengine.kernels.cuda.launch.programmatic import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a GPU has no such check")


@triton.jit
def copy_kernel(x, out, count, shift, TILE: tl.constexpr, MASKED: tl.constexpr):
    at = tl.arange(0, TILE)
    if MASKED:
        tl.store(out + at, tl.load(x + at + shift, mask=at < count, other=0), mask=at < count)
    else:
        tl.store(out + at, tl.load(x + at + shift))


@triton.jit
def add_kernel(out, TILE: tl.constexpr):
    tl.atomic_add(out + tl.arange(0, TILE), 1)


def test_a_mask_keeps_a_kernel_within_its_tensors() -> None:
    x, out = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    copy_kernel[(1,)](x, out, 5, 0, TILE=8, MASKED=True)
    assert torch.equal(x, out)


@pytest.mark.parametrize(("read", "written", "shift"), [(7, 8, 0), (8, 7, 0), (16, 8, -1), (8, 8, 1)])
def test_memory_before_or_behind_a_tensor_is_refused(read: int, written: int, shift: int) -> None:
    with pytest.raises(InterpreterError, match="copy_kernel touches memory beside its tensors: 1 of 8 elements"):
        copy_kernel[(1,)](torch.arange(read), torch.zeros(written, dtype=torch.int64), 8, shift, TILE=8, MASKED=False)


def test_atomic_operations_are_looked_at() -> None:
    with pytest.raises(InterpreterError, match="add_kernel touches memory beside its tensors: 2 of 8 elements"):
        add_kernel[(1,)](torch.zeros(6, dtype=torch.int32), TILE=8)
