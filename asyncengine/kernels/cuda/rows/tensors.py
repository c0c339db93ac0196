"""Memory for the results of row kernels, and checks of the operands, which run once, at capture.

Results are new tensors, so that in a captured graph they come from its private pool. An operand must stay where it is
as long as the graph.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

ELEMENTWISE_TILE = 1024


def empty_rows(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, columns], and behind it memory for the rest of the last tile of whatever plan multiplies these rows."""
    tile = min(256, triton.next_power_of_2(rows))
    return torch.empty((triton.cdiv(rows, tile) * tile, columns), dtype=dtype, device=device)[:rows]


def check(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} {list(shape)}, got {x.dtype} {list(x.shape)} with strides {x.stride()}"
        )


def check_strided(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    """Raise ValueError for a tensor that may be strided, but for its last axis, and is not what is asked for."""
    if x.shape != shape or x.dtype != dtype or x.stride(-1) != 1:
        raise ValueError(f"{name} must be {dtype} {list(shape)}, got {x.dtype} {list(x.shape)} {x.stride()}")


def gain_dtype(weight: Tensor, x: Tensor) -> torch.dtype:
    """The dtype that the weight of a norm of x is to have: that of x, or float32 if the weight is in float32."""
    return torch.float32 if weight.dtype == torch.float32 else x.dtype


def check_rows(x: Tensor, name: str) -> None:
    check_dtype(x, name)
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"{name} must have contiguous rows, got {list(x.shape)} with strides {x.stride()}")


def check_heads(x: Tensor, name: str) -> None:
    check_dtype(x, name)
    if x.dim() != 3 or x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2]):
        raise ValueError(
            f"{name} must be [tokens, heads, head_dim] with contiguous heads, "
            f"got {list(x.shape)} with strides {x.stride()}"
        )


def check_caches(k_cache: Tensor, v_cache: Tensor, dtype: torch.dtype, dim: int) -> tuple[int, int]:
    """KV heads and block size."""
    blocks, heads, block_size, _ = k_cache.shape
    for cache in (k_cache, v_cache):
        check(cache, dtype, (blocks, heads, block_size, dim), "k_cache and v_cache")
    return heads, block_size


def check_dtype(x: Tensor, name: str) -> None:
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{name} must be float32, float16 or bfloat16, got {x.dtype}")
