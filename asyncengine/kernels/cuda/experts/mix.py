"""A mixture of experts of a step: which kernels compute it, and the memory between them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from asyncengine.kernels.cuda.experts.epilogue import sum_results
from asyncengine.kernels.cuda.experts.few_rows import multiply_down, multiply_up
from asyncengine.kernels.cuda.experts.grouped import multiply_tiles
from asyncengine.kernels.cuda.experts.plan import FEW_ROWS, DirectTiles, direct_tiles_for, tiles_for
from asyncengine.kernels.cuda.experts.sort import sort_pairs
from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.linear.grouped import CodedRows
from asyncengine.kernels.cuda.linear.handle import CudaLinear
from asyncengine.kernels.ops import Experts, Routing

try:
    from asyncengine.kernels.cuda.experts import direct
except ImportError:  # a Triton without Gluon
    direct = None  # type: ignore[assignment]


def mix(
    x: Tensor,
    routing: Routing,
    experts: Experts[CudaLinear],
    *,
    out: Tensor,
    add: bool,
    gpu: Gpu,
    invariant: bool = False,
    pdl: bool = False,
) -> None:
    """out [T, H] = the weighted results of the experts of x [T, K], added up in float32; or out += that.

    Results between the products are in x's dtype. No launch depends on the routing, whose indices are to be in range:
    every row is computed by all of its experts.
    """
    [up], [down] = experts.up, experts.down
    rows, top_k = routing.ids.shape
    pairs = rows * top_k
    if rows != len(x) or x.stride(1) != 1 or not routing.weights.is_contiguous() or not routing.ids.is_contiguous():
        raise ValueError(f"x {list(x.shape)} and routing {list(routing.ids.shape)} must be contiguous and fit")
    inner = torch.empty((pairs, down.weight.shape[1]), dtype=x.dtype, device=x.device)
    few = None if invariant else _tiles_of_few(x, (up, down), pairs, experts.count, gpu)
    if few is None and rows <= FEW_ROWS and not invariant:
        multiply_up(x, routing.ids, up, out=inner, activation=experts.activation, pdl=pdl)
        multiply_down(inner, routing.ids, routing.weights, down, out=out, add=add, pdl=pdl)
        return
    if few is not None:
        order = sort_pairs(routing.ids, experts.count, few.rows, pdl=pdl)
        multiply = partial(direct.multiply_few, pairs=order, tiles=few, pdl=pdl)
    else:
        bits = up.format.bits[up.format.kind(x.dtype)], 8 * x.itemsize
        tiles = tiles_for(pairs, experts.count, bits, gpu, invariant=invariant)
        order = sort_pairs(routing.ids, experts.count, tiles.rows, pdl=pdl)
        multiply = partial(multiply_tiles, pairs=order, tiles=tiles, pdl=pdl)
    multiply(x, up, out=inner, pairs_per_row=top_k, activation=experts.activation)
    results = torch.empty((pairs, out.shape[1]), dtype=x.dtype, device=x.device)
    multiply(inner, down, out=results, factors=routing.weights)
    sum_results(results, out, add=add, pdl=pdl)


def _tiles_of_few(x: Tensor, weights: Sequence[CudaLinear], pairs: int, experts: int, gpu: Gpu) -> DirectTiles | None:
    """The tiles of the kernel of direct.py, if the card has it and it multiplies such weights and rows."""
    if not gpu.tma or direct is None or x.stride(0) % 2:
        return None
    if not all(isinstance(one.weight, CodedRows) and direct.takes(one.weight, x.dtype) for one in weights):
        return None
    return direct_tiles_for(pairs, experts)
