"""A mixture of experts of a step: which kernels compute it, and the memory between them."""

from __future__ import annotations

from functools import partial
from typing import Required, TypedDict, Unpack

import torch
from torch import Tensor

from asyncengine.kernels.cuda.experts.few_rows import multiply_down, multiply_up
from asyncengine.kernels.cuda.experts.grouped import multiply_tiles
from asyncengine.kernels.cuda.experts.plan import FEW_ROWS, DirectPlan, direct_plan_for, tiles_for
from asyncengine.kernels.cuda.experts.sort import sort_pairs
from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.linear.grouped import CodedRows
from asyncengine.kernels.cuda.linear.handle import CudaLinear
from asyncengine.kernels.cuda.rows.additions import add_rows
from asyncengine.kernels.ops import Experts, Routing

try:
    from asyncengine.kernels.cuda.experts import direct
except ImportError:  # a Triton without Gluon
    direct = None  # type: ignore[assignment]


class MixOptions(TypedDict, total=False):
    """Options of a mixture that are the same for all of a model's layers and steps."""

    gpu: Required[Gpu]
    """The card that choices are made for."""
    invariant: bool
    """A row's results do not depend on the number of rows."""
    pdl: bool
    """programmatic dependent launch"""


def mix(
    x: Tensor,
    routing: Routing,
    experts: Experts[CudaLinear],
    *,
    out: Tensor,
    add: bool,
    **options: Unpack[MixOptions],
) -> None:
    """out [T, H] = the weighted results of the experts of x [T, K], added up in float32; or out += that."""
    pdl = options.get("pdl", False)
    if adds_up(x, routing, experts, **options):
        mix_few(x, routing, experts, out=out, add=add, pdl=pdl)
    else:
        results = multiply_pairs(x, routing, experts, out.shape[1], **options)
        add_rows(results, out, parts=routing.ids.shape[1], replaces=not add, pdl=pdl)


def mix_few(
    x: Tensor, routing: Routing, experts: Experts[CudaLinear], *, out: Tensor, add: bool, pdl: bool = False
) -> None:
    """``mix`` where the second product adds up results itself, see ``adds_up``."""
    [up], [down] = experts.up, experts.down
    inner = _inner_rows(x, routing, experts)
    multiply_up(x, routing.ids, up, out=inner, activation=experts.activation, pdl=pdl)
    multiply_down(inner, routing.ids, routing.weights, down, out=out, add=add, pdl=pdl)


def adds_up(x: Tensor, routing: Routing, experts: Experts[CudaLinear], **options: Unpack[MixOptions]) -> bool:
    """Return whether ``mix_few`` is for these rows, which are one or two, of weights that direct.py does not take."""
    few = len(x) <= FEW_ROWS and not options.get("invariant")
    return few and _plan_of_few(x, routing, experts, options["gpu"]) is None


def multiply_pairs(
    x: Tensor, routing: Routing, experts: Experts[CudaLinear], width: int, **options: Unpack[MixOptions]
) -> Tensor:
    """Return the weighted results [T * top_k, width] of the experts of x [T, K], those of a row one behind another.

    These and the results between the products are in x's dtype. No launch depends on the routing, whose indices are to
    be in range: every row is computed by all of its experts.
    """
    [up], [down] = experts.up, experts.down
    gpu, invariant, pdl = options["gpu"], options.get("invariant", False), options.get("pdl", False)
    inner = _inner_rows(x, routing, experts)
    pairs, top_k = routing.ids.numel(), routing.ids.shape[1]
    few = None if invariant else _plan_of_few(x, routing, experts, gpu)
    if few is not None:
        order = sort_pairs(routing.ids, experts.count, few.up.rows, pdl=pdl)
        multiply = partial(direct.multiply_few, pairs=order, pdl=pdl)
        multiply_first, multiply_second = partial(multiply, tiles=few.up), partial(multiply, tiles=few.down)
    else:
        bits = up.format.bits[up.format.kind(x.dtype)], 8 * x.itemsize
        tiles = tiles_for(pairs, experts.count, bits, gpu, invariant=invariant)
        order = sort_pairs(routing.ids, experts.count, tiles.rows, pdl=pdl)
        multiply_first = multiply_second = partial(multiply_tiles, pairs=order, tiles=tiles, pdl=pdl)
    multiply_first(x, up, out=inner, pairs_per_row=top_k, activation=experts.activation)
    results = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    multiply_second(inner, down, out=results, factors=routing.weights)
    return results


def _inner_rows(x: Tensor, routing: Routing, experts: Experts[CudaLinear]) -> Tensor:
    """Memory for the results of the first products, [T * top_k, inner]. Raises ValueError if x and routing do not
    fit."""
    if len(routing.ids) != len(x) or x.stride(1) != 1 or not all(part.is_contiguous() for part in routing):
        raise ValueError(f"x {list(x.shape)} and routing {list(routing.ids.shape)} must be contiguous and fit")
    [down] = experts.down
    return torch.empty((routing.ids.numel(), down.weight.shape[1]), dtype=x.dtype, device=x.device)


def _plan_of_few(x: Tensor, routing: Routing, experts: Experts[CudaLinear], gpu: Gpu) -> DirectPlan | None:
    """The tiles of the products of direct.py, if the card has these and they multiply such weights and rows."""
    if not gpu.tma or direct is None or x.stride(0) % 2:
        return None
    weights = [one.weight for one in (*experts.up, *experts.down)]
    coded = [weight for weight in weights if isinstance(weight, CodedRows) and direct.takes(weight, x.dtype)]
    if len(coded) < len(weights):
        return None
    return direct_plan_for(routing.ids.numel(), experts.count, x.shape[1], coded[-1].shape[1], fp4=coded[0].fp4)
