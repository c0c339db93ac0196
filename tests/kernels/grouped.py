"""Random weights whose columns share scales in groups, and the matrices that they stand for."""

from __future__ import annotations

import torch

from asyncengine.kernels.float8 import FLOAT8
from asyncengine.kernels.grouped import make_grouped
from asyncengine.kernels.weight import FLOAT8_GROUPS, INT4, PackedWeight

NF4 = (-1.0, -0.7, -0.5, -0.4, -0.3, -0.2, -0.1, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0)
"""Numbers like those of a normal distribution's quantiles."""


def random_grouped(
    form: str, rows: int, columns: int, group: int, seed: int = 0, *, offsets: bool = False, table: bool = False,
    order: bool = False, dtype: torch.dtype = torch.float32,
) -> PackedWeight:  # fmt: skip
    """A weight whose elements are about a unit or less."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (rows, columns // 2 if form == INT4 else columns), generator=generator).to(torch.uint8)
    top = 8.0
    if form == FLOAT8_GROUPS:
        codes, top = torch.randn(rows, columns, generator=generator).to(FLOAT8), 1.0
    elif form != INT4:
        codes, top = codes.view(torch.int8), 128.0
    scales = (torch.rand(rows, columns // group, generator=generator) + 0.5) / (1.0 if table else top)
    shifts = torch.randn(scales.shape, generator=generator)
    permuted = torch.randperm(columns, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    return make_grouped(
        form, codes, scales.to(dtype), shifts.to(dtype) if offsets else None,
        table=torch.tensor(NF4) if table else None, order=permuted if order else None,
    )  # fmt: skip
