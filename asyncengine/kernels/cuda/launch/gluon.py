"""Tiles of bfloat16 matrices on Hopper: how they are copied to shared memory, and how they and their products lie."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc"

from __future__ import annotations

from functools import cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from asyncengine.kernels.cuda.launch.cache_policy import mark_copies
from asyncengine.kernels.cuda.launch.compiling import Kernel


class GluonKernel(Kernel, GluonJITFunction):
    """A function in Gluon that is launched from Python. Triton's interpreter does not run it."""


@cache
def _tile_layout(*shape: int) -> gl.NVMMASharedLayout:
    """Layout of a tile in shared memory. It is kept: Triton takes 5 us to make one, of some 50 for a launch."""
    return gl.NVMMASharedLayout.get_default_for(list(shape), gl.bfloat16)


def tiles_of(x: Tensor, *shape: int) -> TensorDescriptor:
    """x as the accelerator copies it, in tiles of this shape, zeros for what lies beyond x. ValueError if it cannot."""
    if x.stride(0) % 8 or x.data_ptr() % 16:
        raise ValueError(f"rows of {list(x.shape)} with stride {x.stride(0)} are not aligned to 16 bytes")
    return TensorDescriptor.from_tensor(x, list(shape), _tile_layout(*shape))


def whole_tiles_of(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe tiles as ``tiles_of`` does, but read the memory beyond the rows of x as it is, if x has some behind it.

    See ``empty_rows``. Zeros take the accelerator longer than a copy: gate and up of a model with 2,048 inputs take 62
    us with 16 rows of x in their last tile of 128, and 47 with 128.
    """
    whole = -(-len(x) // rows) * rows
    there = (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()) // x.stride(0)
    return tiles_of(x.as_strided((whole, x.shape[1]), x.stride()) if whole <= there else x, rows, columns)


@gluon.jit
def copy_tile(x, at, ready, to, MARK: gl.constexpr, wanted):
    """Ask for the tile of x that begins with element ``at``, a place in each dimension."""
    mark_copies(MARK)
    tma.async_copy_global_to_shared(x, at, ready, to, pred=wanted)


@gluon.constexpr_function
def sums_layout(left, right, warps):
    """Layout of the sums [left, right] of Hopper's own instruction: warps down the left operand as far as its rows
    do."""
    down = warps if left >= 16 * warps else 4
    return gl.NVMMADistributedLayout([3, 0], [down, warps // down], [16, right * down // warps, 16])


@gluon.constexpr_function
def next_power_of_2(n):
    return 1 << (n - 1).bit_length()


@gluon.constexpr_function
def stretches(rows, inner, warps):
    """[warps, rows, inner / warps], each warp's stretch of K, as a tile [rows, inner] lies in shared memory.

    That is in columns of 64 elements, 128 bytes, whose 16 bytes are exchanged according to their line.
    """
    span = inner // warps
    along = [[(1 << bit) // span, 0, (1 << bit) % span] for bit in range(inner.bit_length() - 1)]
    exchanged = [8 << bit if bit < 3 else 0 for bit in range(rows.bit_length() - 1)]
    down = [[k // span, 1 << bit, k % span] for bit, k in enumerate(exchanged)]
    return gl.SharedLinearLayout([*along[:6], *down, *along[6:]], alignment=1024)
