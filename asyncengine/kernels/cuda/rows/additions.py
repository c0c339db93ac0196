"""Addition of rows to the residual, with the norm of the rows before it and the norm that reads the sum behind it."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, start_next, wait
from asyncengine.kernels.cuda.rows.norms import check_norm, gains_or, load_gains, norm_values, store_sum
from asyncengine.kernels.cuda.rows.tensors import check_rows, check_strided, empty_rows
from asyncengine.kernels.ops import Norm


@kernel
def _add_kernel(
    x, onto, weight, bias, reader_weight, reader_bias, normed, x_stride, onto_stride, normed_stride, eps, reader_eps,
    PARTS: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr, ONTO: tl.constexpr, READER: tl.constexpr,
    READER_CENTER: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program is a row of ``onto``."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < WIDTH
    scale, shift = load_gains(weight, bias, column, inside, NORM, CENTER)
    reader_scale, reader_shift = load_gains(reader_weight, reader_bias, column, inside, READER, READER_CENTER)
    wait(PDL)
    total = tl.zeros([TILE], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(x + (row * PARTS + part) * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        total = norm_values(total, inside, scale, shift, eps, WIDTH, CENTER)
    store_sum(
        total, onto, onto_stride, normed, normed_stride, row, column, inside, reader_scale, reader_shift, reader_eps,
        WIDTH, ONTO, READER, READER_CENTER,
    )  # fmt: skip


def add_rows(
    x: Tensor, onto: Tensor, reader: Norm | None = None, *, parts: int = 1, norm: Norm | None = None,
    replaces: bool = False, pdl: bool = False,
) -> Tensor | None:  # fmt: skip
    """onto [M, N] += norm(y), where a row of y is the sum of ``parts`` rows of x [M * parts, N] that follow each other.

    With a ``reader`` return that norm of the result, [M, N]. ``replaces``: onto is norm(y), without what it was.
    Rows may be strided. Sums are in float32, in the order of the parts, and are rounded once. Raises ValueError for
    tensors that do not fit.
    """
    rows, width = onto.shape
    check_rows(onto, "onto")
    check_strided(x, onto.dtype, (rows * parts, width), "x")
    for one in (norm, reader):
        if one is not None:
            check_norm(one, onto)
    normed = onto if reader is None else empty_rows(rows, width, onto.dtype, onto.device)
    tile = triton.next_power_of_2(width)
    _add_kernel[(rows,)](
        x, onto, *gains_or(norm, onto), *gains_or(reader, onto), normed, x.stride(0), onto.stride(0), normed.stride(0),
        0.0 if norm is None else norm.eps, 0.0 if reader is None else reader.eps, PARTS=parts, NORM=norm is not None,
        CENTER=norm is not None and norm.bias is not None, ONTO=not replaces, READER=reader is not None,
        READER_CENTER=reader is not None and reader.bias is not None, WIDTH=width, TILE=tile,
        num_warps=min(16, max(1, tile // 256)), **launch_options(pdl),
    )  # fmt: skip
    return None if reader is None else normed
