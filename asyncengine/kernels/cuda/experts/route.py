"""Choice of each row's experts on the GPU: from logits, or for few rows from the rows themselves.

For few rows one launch norms them, makes their logits and chooses: three launches in turn take longer than their bytes.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, misc, unreachable"
# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: RUF005 - Triton knows no starred items in a tuple

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, start_next, wait
from asyncengine.kernels.cuda.linear.handle import CudaLinear
from asyncengine.kernels.cuda.rows.norms import check_norm
from asyncengine.kernels.cuda.rows.tensors import check, check_rows, empty_rows
from asyncengine.kernels.ops import Norm, Routing, RoutingRule

ROUTED_ROWS = 2
"""Most rows for ``route_rows``. For four it takes as long as its three parts, and longer for more."""
_MOST_HELD = 128
"""Elements of the router that a thread has on the way."""
_LONGEST = 1 << 14
"""Most elements of a row, which a program has in registers."""
_LEAST = tl.constexpr(-(1 << 31))


@triton.jit
def _ordered(value):
    """Integers in the order of numbers: a warp finds the greatest of them by one instruction."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(order):
    """The number of such an integer."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _choose(
    logits,
    correction,
    factors,
    weights,
    ids,
    scale,
    smallest,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BEST: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    FACTORS: tl.constexpr,
    SUMS_TO_ONE: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
):
    """Choose the experts of the row with these logits, which lie in GROUPS of SIZE. SHARED: the expert behind these
    computes every row.

    Experts whose logits are no numbers are chosen last, so that indices are in range whatever the rows hold.
    """
    group, place = tl.arange(0, GROUP_TILE)[:, None], tl.arange(0, SIZE_TILE)[None, :]
    expert = group * SIZE + place
    there = (group < GROUPS) & (place < SIZE)
    logit = tl.load(logits + expert, mask=there, other=0.0 if SIGMOID else -3.0e38).to(tl.float32)
    choice = logit
    if SIGMOID:
        score = tl.sigmoid(logit)
        choice = score
    else:
        top = tl.max(tl.max(logit, 1), 0)
        score = tl.exp(logit - top)
        total = tl.sum(tl.sum(score, 1), 0)
        score = score / total
    if CORRECTED:
        choice += tl.load(correction + expert, mask=there, other=0.0)
    choice = tl.where(there & (choice == choice), choice, float("-inf"))
    if KEPT < GROUPS:
        rank = tl.max(choice, 1)
        if BEST > 1:
            best = tl.argmax(choice, 1)
            rank += tl.max(tl.where(place == best[:, None], float("-inf"), choice), 1)
        kept = tl.zeros([GROUP_TILE], tl.int1)
        number = tl.arange(0, GROUP_TILE)
        for _ in tl.static_range(KEPT):
            kept = kept | (number == tl.argmax(tl.where(kept, float("-inf"), rank), 0))
        choice = tl.where(kept[:, None], choice, float("-inf"))
    choice = tl.reshape(choice, [GROUP_TILE * SIZE_TILE])
    score = tl.reshape(tl.where(there, score, 0.0), [GROUP_TILE * SIZE_TILE])
    place = tl.arange(0, GROUP_TILE * SIZE_TILE)
    k = tl.arange(0, K_TILE)
    weight = tl.zeros([K_TILE], tl.float32)
    chosen = tl.zeros([K_TILE], tl.int32)
    # Below every number: what is no expert, and later what is chosen already.
    is_expert = (place % SIZE_TILE < SIZE) & (place // SIZE_TILE < GROUPS)
    order = tl.where(is_expert, _ordered(tl.maximum(choice, -3.0e38)), _LEAST)
    for i in tl.static_range(TOP_K):
        greatest = tl.max(order, 0)
        best = tl.min(tl.where(order == greatest, place, GROUP_TILE * SIZE_TILE), 0)
        value = _unordered(greatest)
        if SIGMOID or CORRECTED:
            value = tl.sum(tl.where(place == best, score, 0.0), 0)
        weight = tl.where(k == i, value, weight)
        chosen = tl.where(k == i, best // SIZE_TILE * SIZE + best % SIZE_TILE, chosen)
        order = tl.where(place == best, _LEAST, order)
    if not (SIGMOID or CORRECTED):
        weight = tl.where(k < TOP_K, tl.exp(tl.where(k < TOP_K, weight, top) - top) / total, 0.0)
    if SUMS_TO_ONE:
        weight = weight / (tl.sum(weight, 0) + smallest)
    weight *= scale
    if FACTORS:
        weight *= tl.load(factors + chosen)
    if SHARED:
        share = tl.sigmoid(tl.load(logits + GROUPS * SIZE).to(tl.float32)) if GATED else 1.0
        weight = tl.where(k == TOP_K, share, weight)
        chosen = tl.where(k == TOP_K, GROUPS * SIZE, chosen)
    COUNT: tl.constexpr = TOP_K + SHARED
    tl.store(weights + k, weight, mask=k < COUNT)
    tl.store(ids + k, chosen, mask=k < COUNT)


@kernel
def _choose_kernel(
    logits, correction, factors, weights, ids, stride, scale, smallest, SIZE: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, BEST: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, CORRECTED: tl.constexpr,
    FACTORS: tl.constexpr, SUMS_TO_ONE: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    GROUP_TILE: tl.constexpr, SIZE_TILE: tl.constexpr, K_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program is a row."""
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = row * (TOP_K + SHARED)
    _choose(
        logits + row * stride, correction, factors, weights + at, ids + at, scale, smallest, SIZE, GROUPS, KEPT, BEST,
        TOP_K, SIGMOID, CORRECTED, FACTORS, SUMS_TO_ONE, SHARED, GATED, GROUP_TILE, SIZE_TILE, K_TILE,
    )  # fmt: skip


@kernel
def _route_kernel(
    x, gains, router, bias, normed, logits, arrivals, correction, factors, weights, ids, x_stride, normed_stride, eps,
    scale, smallest, COUNT: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, FACTORS: tl.constexpr,
    SUMS_TO_ONE: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, GROUP_TILE: tl.constexpr,
    SIZE_TILE: tl.constexpr, K_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: programs of BN of the router's COUNT rows, rows of x. The program of a row that comes last chooses."""
    start_next(PDL)
    STEPS: tl.constexpr = (K + BK - 1) // BK
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, number = tl.arange(0, BK), program * BN + tl.arange(0, BN)
    of_router = tl.minimum(number, COUNT - 1)
    at = router + of_router[:, None] * K + k[None, :]
    w, g = (), ()
    for i in tl.static_range(STEPS):
        inside = i * BK + k < K
        w = w + (tl.load(at + i * BK, mask=inside[None, :], other=0.0),)
        if NORM:
            g = g + (tl.load(gains + i * BK + k, mask=inside, other=0.0),)
    offset = tl.zeros([BN], tl.float32)
    if BIAS:
        offset += tl.load(bias + of_router).to(tl.float32)
    wait(PDL)
    xs = ()
    square = tl.zeros([BK], tl.float32)
    for i in tl.static_range(STEPS):
        value = tl.load(x + row * x_stride + i * BK + k, mask=i * BK + k < K, other=0.0)
        xs = xs + (value,)
        if NORM:
            square += value.to(tl.float32) * value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(square, 0) / K + eps)
    acc = tl.zeros([BN, BK], tl.float32)
    for i in tl.static_range(STEPS):
        value = xs[i]
        if NORM:
            value = (value.to(tl.float32) * factor * g[i].to(tl.float32)).to(x.dtype.element_ty)
            if program == 0:
                tl.store(normed + row * normed_stride + i * BK + k, value, mask=i * BK + k < K)
        acc += w[i].to(tl.float32) * value.to(tl.float32)[None, :]
    own = logits + row * COUNT
    tl.store(own + number, tl.sum(acc, 1) + offset, mask=number < COUNT)
    tl.debug_barrier()  # all threads' stores come before the one thread that counts
    if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrivals + row, 0)  # for the next launch: nobody else comes in this one
        to = row * (TOP_K + SHARED)
        _choose(
            own, correction, factors, weights + to, ids + to, scale, smallest, SIZE, GROUPS, KEPT, BEST, TOP_K,
            SIGMOID, CORRECTED, FACTORS, SUMS_TO_ONE, SHARED, GATED, GROUP_TILE, SIZE_TILE, K_TILE,
        )  # fmt: skip


def choose_experts(logits: Tensor, rule: RoutingRule, *, pdl: bool = False) -> Routing:
    """The experts of rows with these logits float32 [T, E], by the greatest scores; of equal scores the first.

    The logits are [T, E + 1] where a shared expert is gated.
    """
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits must be float32 with contiguous rows, got {logits.dtype} {logits.stride()}")
    tensors, constants = _operands(rule, logits.shape[1], logits)
    routing = _allocate(rule, logits)
    warps = 1 if logits.shape[1] <= 257 else 4
    _choose_kernel[(len(logits),)](
        logits, *tensors, *routing, logits.stride(0), rule.scale, rule.sum_offset, **constants, num_warps=warps,
        **launch_options(pdl),
    )  # fmt: skip
    return routing


def takes_rows(rows: int, router: CudaLinear, norm: Norm | None) -> bool:
    """Return whether ``route_rows`` is for so many rows and this router and norm."""
    few = rows <= ROUTED_ROWS and (norm is None or norm.bias is None)
    return few and isinstance(router.weight, Tensor) and router.weight.shape[1] <= _LONGEST


def route_rows(
    x: Tensor,
    norm: Norm | None,
    router: CudaLinear,
    rule: RoutingRule,
    arrivals: Tensor,
    gpu: Gpu,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Routing]:
    """The RMS norm of the rows of x [T, K], or x without one, and the experts of these rows by a router [E, K].

    ``arrivals`` are int32 counters that are 0 between launches, one for each row; launches that share them must not
    overlap.
    """
    check_rows(x, "x")
    weight, count = router.weight, router.out_features
    if not isinstance(weight, Tensor) or weight.shape[1] != x.shape[1] or len(arrivals) < len(x):
        raise ValueError(f"x {list(x.shape)} and the router do not fit")
    if norm is not None:
        check_norm(norm, x)
    tensors, constants = _operands(rule, count, x)
    rows, inner = x.shape
    tile = triton.next_power_of_2(triton.cdiv(count, gpu.multiprocessors))
    warps = min(8, triton.next_power_of_2(triton.cdiv(tile * inner, 32 * _MOST_HELD)))
    routing, logits = _allocate(rule, x), torch.empty((rows, count), dtype=torch.float32, device=x.device)
    normed = x if norm is None else empty_rows(rows, inner, x.dtype, x.device)
    _route_kernel[(triton.cdiv(count, tile), rows)](
        x, x if norm is None else norm.weight, weight, x if router.bias is None else router.bias, normed, logits,
        arrivals, *tensors, *routing, x.stride(0), normed.stride(0), 1.0 if norm is None else norm.eps, rule.scale,
        rule.sum_offset, COUNT=count, K=inner, BN=tile, BK=min(256 * warps, triton.next_power_of_2(inner)),
        NORM=norm is not None, BIAS=router.bias is not None, **constants, num_warps=warps, **launch_options(pdl),
    )  # fmt: skip
    return normed, routing


def _allocate(rule: RoutingRule, x: Tensor) -> Routing:
    shape = len(x), rule.top_k + (rule.shared != "none")
    return Routing(
        torch.empty(shape, dtype=torch.float32, device=x.device), torch.empty(shape, dtype=torch.int32, device=x.device)
    )


def _operands(rule: RoutingRule, count: int, instead: Tensor) -> tuple[list[Tensor], dict[str, Any]]:
    """The correction and the factors of a rule, or what kernels do not read, and constants; ``count`` logits a row.

    Raises ValueError if the rule does not fit.
    """
    experts, tensors = count - (rule.shared == "gated"), {"correction": rule.correction, "factors": rule.factors}
    for name, tensor in tensors.items():
        if tensor is not None:
            check(tensor, torch.float32, (experts,), name)
    size, remainder = divmod(experts, rule.groups)
    if remainder or not rule.top_k <= rule.kept_groups * size:
        raise ValueError(f"{rule} does not fit {experts} experts")
    shared = int(rule.shared != "none")
    return [instead if tensor is None else tensor for tensor in tensors.values()], {
        "SIZE": size,
        "GROUPS": rule.groups,
        "KEPT": rule.kept_groups,
        "BEST": rule.group_scores,
        "TOP_K": rule.top_k,
        "SIGMOID": rule.scores == "sigmoid",
        "CORRECTED": rule.correction is not None,
        "FACTORS": rule.factors is not None,
        "SUMS_TO_ONE": rule.sums_to_one,
        "SHARED": shared,
        "GATED": rule.shared == "gated",
        "GROUP_TILE": triton.next_power_of_2(rule.groups),
        "SIZE_TILE": triton.next_power_of_2(size),
        "K_TILE": triton.next_power_of_2(rule.top_k + shared),
    }
