"""Products with weights in codes whose columns share scales in groups (see kernels/grouped.py).

Codes become weights in registers: number * scale + offset in float32, rounded to the dtype of x. One row is multiplied
without tensor cores. Up to MAX_ROWS rows take them, tile by tile. More rows are multiplied by a library, with a copy
of the weights in the dtype of x that lives as long as the product.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import must_widen
from asyncengine.kernels.cuda.linear.decode import FP4_PLACES, INT4_PLACES, codes_of_words
from asyncengine.kernels.grouped import unpack_nibbles
from asyncengine.kernels.weight import INT4, INT8

MAX_ROWS = 256
"""Beyond, weights are unpacked for a library's product."""
DIRECT_ROWS = 32
"""Most rows for which the kernel of direct.py is considered."""
TILE = 128
"""Columns of the weight that a program decodes at a time."""
TILE_COLUMNS = {INT4: 128, INT8: 64}
"""Columns of a tile of ``in_tiles``, by form."""
SMALL_GROUPS = {INT4: (32,), INT8: (16, 32, 64)}
"""Sizes of groups, by form, that lie in the 64 columns which lie side by side in such a tile, and whose sums have room
in registers."""


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """Weights side by side, as one matrix of codes."""

    form: str
    """a name of kernels/weight.py"""
    codes: Tensor
    """[N, K / 2] of INT4, else [N, K]; of INT4 and INT8 in tiles if these fit (see ``in_tiles``)"""
    scales: Tensor
    """[K / G, N]"""
    offsets: Tensor | None
    """[K / G, N]"""
    table: Tensor | None
    order: Tensor | None
    """int32 [K]"""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.codes), self.codes.shape[1] * (2 if self.form == INT4 else 1)))

    @property
    def group(self) -> int:
        """Number of columns that share a scale."""
        return self.shape[1] // len(self.scales)

    @property
    def tiled(self) -> bool:
        """True if the codes are those of ``in_tiles``."""
        return has_tiles(self.form, *self.shape)

    @property
    def scales_sums(self) -> bool:
        """True if the kernel of coded.py multiplies it: each half of a tile lies in one group of plain numbers."""
        smallest = TILE // 2 if self.form == INT4 else TILE
        fits = self.tiled if self.form == INT4 else self.shape[1] % TILE == 0
        return self.table is None and fits and self.group % smallest == 0

    @property
    def has_small_groups(self) -> bool:
        """True if of both kernels that of direct.py alone multiplies it, for few rows: by group, in tiles."""
        return self.table is None and self.tiled and not self.scales_sums and self.group in SMALL_GROUPS[self.form]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scales, self.offsets, self.table, self.order) if t is not None)

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Weights of experts in int4, one below another, as their kernels read them: codes in tiles, and scales by row."""

    codes: Tensor
    """uint8 [N, K / 2] in the order of ``in_tiles``; K is whole tiles"""
    scales: Tensor
    """[N, K / G] in float32 or float16; of floats also in uint8, exponents of powers of 2 to which 253 is added; rows
    begin at words of 4 bytes"""
    columns: int
    """Columns of the weights; codes behind them stand for 0."""
    fp4: bool
    """Codes are floats of 4 bits (FP4_NUMBERS of kernels/grouped.py), and not numbers to which 8 is added."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.codes), self.columns))

    @property
    def group(self) -> int:
        """Number of columns that share a scale."""
        return self.columns // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + len(self) * self.scales.stride(0) * self.scales.itemsize

    def __len__(self) -> int:
        return len(self.codes)


def has_tiles(form: str, rows: int, columns: int) -> bool:
    """Return whether ``in_tiles`` has an order for codes of a weight [rows, columns]."""
    return form in TILE_COLUMNS and columns % TILE == 0 and rows % 8 == 0


def in_tiles(form: str, codes: Tensor, *, fp4: bool = False) -> Tensor:
    """Bytes of codes in tiles of 8 rows and 64 bytes, or as they are if the form has no tiles or these do not fill the
    weight. Bytes are uint8 [N, K], of INT4 [N, K / 2], whose low halves are even columns.

    A tile is 512 bytes: each thread of a warp reads 16, and has what the tensor cores take from it. Thread 4 g + t has
    of row g the columns 16 t to 16 t + 15, of INT4 in the low halves of its bytes, and 64 more in the high halves,
    before the bits of these bytes change places (see ``_in_lanes``). ``fp4``: codes are floats of 4 bits.
    """
    rows, width = codes.shape
    if not has_tiles(form, rows, 2 * width if form == INT4 else width):
        return codes
    if form == INT4:
        halves = unpack_nibbles(codes).view(rows, -1, 2, 64)
        codes = _in_lanes(halves[:, :, 0] | halves[:, :, 1] << 4, FP4_PLACES if fp4 else INT4_PLACES)
    return codes.view(rows // 8, 8, -1, 64).transpose(1, 2).reshape(rows, width)


def _in_lanes(codes: Tensor, places: Sequence[Sequence[int]]) -> Tensor:
    """Codes of 4 bits with the bits of each four at ``places`` in 16 bits, the highest bit of a code first.

    Of 4 bytes the first 16 bits have bytes 0 and 2, the others bytes 1 and 3: their low halves, then their high ones.
    """
    bytes_of = codes.reshape(*codes.shape[:-1], -1, 2, 2)  # [..., pair, first or second byte of it]
    lanes = torch.zeros(bytes_of[..., 0, :].shape, dtype=torch.int16, device=codes.device)
    for number, of_one in enumerate(places):
        code = (bytes_of[..., number % 2, :] >> number // 2 * 4).to(torch.int16)
        shifts = [place - bit for bit, place in zip((3, 2, 1, 0), of_one, strict=True)]
        for shift in set(shifts):  # bits that stay side by side move together
            mask = sum(1 << bit for bit, own in zip((3, 2, 1, 0), shifts, strict=True) if own == shift)
            lanes |= (code & mask) << shift
    return lanes.view(torch.uint8).view(codes.shape)


@triton.jit
def at_tiles(row, WIDTH: tl.constexpr, COUNT: tl.constexpr, EACH: tl.constexpr):
    """Places [BN, COUNT] of the first elements of rows, which have WIDTH elements of EACH bytes (see ``in_tiles``)."""
    SIDE: tl.constexpr = 64 // EACH
    element = tl.arange(0, COUNT)
    if COUNT > SIDE:
        element = element // SIDE * (8 * SIDE) + element % SIDE
    return (row // 8 * (8 * WIDTH) + row % 8 * SIDE)[:, None] + element[None, :]


@triton.jit
def _decode(
    codes, scales, offsets, table, row, first, columns,
    K: tl.constexpr, BK: tl.constexpr, G: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """The weights of rows [BN] of [columns] and columns [first, first + BK) in float32; zeros behind the last column.

    BK is TILE. TILED: codes are those of ``in_tiles``.
    """
    BN: tl.constexpr = row.shape[0]
    GROUPS: tl.constexpr = BK // G if G < BK else 1
    if codes.dtype.element_ty == tl.uint8:
        if TILED:
            words = codes.to(tl.pointer_type(tl.int16)) + at_tiles(row, K // 4, BK // 4, 2)
            low, high = codes_of_words(tl.reshape(tl.load(words + first * 2), [BN, BK // 32, 8]))
            low, high = tl.reshape(low, [BN, BK // 2]), tl.reshape(high, [BN, BK // 2])
            index = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [BN, BK])
        else:
            pair = first // 2 + tl.arange(0, BK // 2)
            packed = tl.load(codes + row[:, None] * (K // 2) + pair[None, :], mask=(pair < K // 2)[None, :], other=0)
            index = tl.interleave(packed & 15, packed >> 4).to(tl.int32)
        numbers = index.to(tl.float32) - 8.0 if table is None else tl.load(table + index)
    elif TILED:
        numbers = tl.load(codes + at_tiles(row, K, BK, 1) + first * 8).to(tl.float32)
    else:
        k = first + tl.arange(0, BK)
        numbers = tl.load(codes + row[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0.0).to(tl.float32)
    group = first // G + tl.arange(0, GROUPS)
    at = group[None, :].to(tl.int64) * columns + row[:, None]
    there = (group < K // G)[None, :]
    scale = tl.load(scales + at, mask=there, other=0.0).to(tl.float32)
    w = tl.reshape(numbers, [BN, GROUPS, BK // GROUPS]) * scale[:, :, None]
    if offsets is not None:
        w += tl.load(offsets + at, mask=there, other=0.0).to(tl.float32)[:, :, None]
    return tl.reshape(w, [BN, BK])


@kernel
def _product_kernel(
    x,
    codes,
    scales,
    offsets,
    table,
    bias,
    out,
    rows,
    columns,
    x_stride,
    K: tl.constexpr,
    G: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """out [M, N] = x [M, K] times the weight [N, K], transposed, plus the bias; BM 1: of one row."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(n, columns - 1).to(tl.int64)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    source = m.to(tl.int64) * x_stride
    dtype: tl.constexpr = x.dtype.element_ty
    acc = tl.zeros([BN, BK if BM == 1 else BM], tl.float32)
    for first in tl.range(0, K, BK):
        w = _decode(codes, scales, offsets, table, row, first, columns, K, BK, G, TILED).to(dtype)
        k = first + tl.arange(0, BK)
        if BM == 1:
            acc += w.to(tl.float32) * tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        else:
            inside = (k < K)[:, None] & (m < rows)[None, :]
            value = tl.load(x + source[None, :] + k[:, None], mask=inside, other=0.0)
            if WIDEN:
                w, value = w.to(tl.float32), value.to(tl.float32)
            acc = tl.dot(w, value, acc, input_precision="ieee")
    y = tl.sum(acc, 1)[:, None] if BM == 1 else acc
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)[:, None]
    to = out + m.to(tl.int64)[None, :] * columns + n[:, None]
    tl.store(to, y.to(out.dtype.element_ty), mask=(n < columns)[:, None] & (m < rows)[None, :])


@kernel
def _unpack_kernel(
    codes, scales, offsets, table, out, columns,
    K: tl.constexpr, G: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """out [N, K] = the weight, its columns in the order of the codes."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    first = tl.program_id(1) * BK
    w = _decode(codes, scales, offsets, table, tl.minimum(n, columns - 1).to(tl.int64), first, columns, K, BK, G, TILED)
    k = first + tl.arange(0, BK)
    to = out + n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(to, w.to(out.dtype.element_ty), mask=(n < columns)[:, None] & (k < K)[None, :])


def multiply(
    x: Tensor, weight: GroupedMatrix, bias: Tensor | None, dtype: torch.dtype, *, tile_rows: int = 0
) -> Tensor:
    """x [M, K] times the weight [N, K], transposed, plus the bias: [M, N] in ``dtype``.

    With ``tile_rows`` programs have tiles of so many rows of x, whatever their number: then a row of the result does
    not depend on the others.
    """
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    (columns, inner), rows = weight.shape, len(x)
    if rows > MAX_ROWS and not tile_rows:
        matrix = unpack(weight, x.dtype)
        return F.linear(x, matrix, bias).to(dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    if rows == 1 and not tile_rows:
        block_rows, block_columns, warps = 1, 16 if columns <= 1 << 15 else 32, 4
    else:
        block_rows = tile_rows or max(16, min(64, triton.next_power_of_2(rows)))
        block_columns, warps = 32 if columns <= 1 << 13 else 64, 4
    _product_kernel[(triton.cdiv(columns, block_columns), triton.cdiv(rows, block_rows))](
        x, weight.codes, weight.scales, weight.offsets, weight.table, bias, out, rows, columns, x.stride(0),
        K=inner, G=weight.group, BM=block_rows, BN=block_columns, BK=TILE, TILED=weight.tiled,
        WIDEN=must_widen(x.dtype), num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out


def unpack(weight: GroupedMatrix, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] that the codes stand for, its columns in their order."""
    columns, inner = weight.shape
    out = torch.empty(columns, inner, dtype=dtype, device=weight.codes.device)
    _unpack_kernel[(triton.cdiv(columns, 32), triton.cdiv(inner, TILE))](
        weight.codes, weight.scales, weight.offsets, weight.table, out, columns, K=inner, G=weight.group, BN=32,
        BK=TILE, TILED=weight.tiled, num_warps=4,
    )  # fmt: skip
    return out
