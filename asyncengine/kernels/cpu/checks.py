"""Checks of the tensors that native kernels read by their addresses."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncengine._core import Dtype

_DTYPES = {torch.float32: Dtype.float32, torch.bfloat16: Dtype.bfloat16}


def native_dtype(dtype: torch.dtype) -> Dtype:
    """Return the kernels' name of a dtype. Raises ValueError if they do not take it."""
    try:
        return _DTYPES[dtype]
    except KeyError:
        raise ValueError(f"CPU kernels take float32 and bfloat16, got {dtype}") from None


def check(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    """Raises ValueError unless x is contiguous and has that dtype and shape."""
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} {list(shape)}, got {x.dtype} {list(x.shape)} with strides {x.stride()}"
        )


def check_rows(x: Tensor, dtype: torch.dtype, width: int) -> None:
    """Raises ValueError unless x is [tokens, width], each row contiguous."""
    if x.dtype != dtype or x.dim() != 2 or x.shape[1] != width or x.stride(1) != 1:
        raise ValueError(
            f"x must be {dtype} [tokens, {width}] with contiguous rows, "
            f"got {x.dtype} {list(x.shape)} with strides {x.stride()}"
        )


def check_heads(x: Tensor, dtype: torch.dtype, name: str) -> None:
    """Raises ValueError unless x is [tokens, heads, head_dim], the heads of a token contiguous."""
    packed = x.dim() == 3 and x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    if x.dtype != dtype or not packed:
        raise ValueError(
            f"{name} must be {dtype} [tokens, heads, head_dim] with contiguous heads, "
            f"got {x.dtype} {list(x.shape)} with strides {x.stride()}"
        )
