"""Choice of each row's experts by its logits on the GPU, in one launch."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, misc, unreachable"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, start_next, wait
from asyncengine.kernels.cuda.rows.tensors import check
from asyncengine.kernels.ops import Routing, RoutingRule


@kernel
def _route_kernel(
    logits,
    correction,
    factors,
    weights,
    ids,
    stride,
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
    PDL: tl.constexpr,
):
    """A program is a row, whose experts lie in GROUPS of SIZE. SHARED: the expert behind these computes every row.

    Experts whose logits are no numbers are chosen last, so that indices are in range whatever the rows hold.
    """
    start_next(PDL)
    group, place = tl.arange(0, GROUP_TILE)[:, None], tl.arange(0, SIZE_TILE)[None, :]
    expert = group * SIZE + place
    there = (group < GROUPS) & (place < SIZE)
    added = tl.load(correction + expert, mask=there, other=0.0) if CORRECTED else 0.0
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    logit = tl.load(logits + row * stride + expert, mask=there, other=0.0 if SIGMOID else -3.0e38).to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(logit)
        choice = score + added
    else:
        top = tl.max(tl.max(logit, 1), 0)
        score = tl.exp(logit - top)
        score = score / tl.sum(tl.sum(score, 1), 0)
        choice = logit + added
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
    free = (place % SIZE_TILE < SIZE) & (place // SIZE_TILE < GROUPS)
    for i in tl.static_range(TOP_K):
        # Below every number: what is not free, chosen already or no expert.
        best = tl.argmax(tl.where(free, tl.maximum(choice, -3.0e38), float("-inf")), 0)
        weight = tl.where(k == i, tl.sum(tl.where(place == best, score, 0.0), 0), weight)
        chosen = tl.where(k == i, best // SIZE_TILE * SIZE + best % SIZE_TILE, chosen)
        free = free & (place != best)
    if SUMS_TO_ONE:
        weight = weight / (tl.sum(weight, 0) + smallest)
    weight *= scale
    if FACTORS:
        weight *= tl.load(factors + chosen)
    if SHARED:
        share = tl.sigmoid(tl.load(logits + row * stride + GROUPS * SIZE).to(tl.float32)) if GATED else 1.0
        weight = tl.where(k == TOP_K, share, weight)
        chosen = tl.where(k == TOP_K, GROUPS * SIZE, chosen)
    COUNT: tl.constexpr = TOP_K + SHARED
    tl.store(weights + row * COUNT + k, weight, mask=k < COUNT)
    tl.store(ids + row * COUNT + k, chosen, mask=k < COUNT)


def choose_experts(logits: Tensor, rule: RoutingRule, *, pdl: bool = False) -> Routing:
    """The experts of rows with these logits float32 [T, E], by the greatest scores; of equal scores the first.

    The logits are [T, E + 1] where a shared expert is gated.
    """
    rows, experts, count = len(logits), logits.shape[1] - (rule.shared == "gated"), rule.top_k + (rule.shared != "none")
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits must be float32 with contiguous rows, got {logits.dtype} {logits.stride()}")
    for tensor, name in ((rule.correction, "correction"), (rule.factors, "factors")):
        if tensor is not None:
            check(tensor, torch.float32, (experts,), name)
    size, remainder = divmod(experts, rule.groups)
    if remainder or not rule.top_k <= rule.kept_groups * size:
        raise ValueError(f"{rule} does not fit {experts} experts")
    weights = torch.empty((rows, count), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, count), dtype=torch.int32, device=logits.device)
    sigmoid = rule.scores == "sigmoid"
    tiles = triton.next_power_of_2(rule.groups), triton.next_power_of_2(size)
    _route_kernel[(rows,)](
        logits, *(logits if tensor is None else tensor for tensor in (rule.correction, rule.factors)), weights, ids,
        logits.stride(0), rule.scale, rule.sum_offset, SIZE=size, GROUPS=rule.groups, KEPT=rule.kept_groups,
        BEST=rule.group_scores, TOP_K=rule.top_k, SIGMOID=sigmoid, CORRECTED=rule.correction is not None,
        FACTORS=rule.factors is not None, SUMS_TO_ONE=rule.sums_to_one, SHARED=int(rule.shared != "none"),
        GATED=rule.shared == "gated", GROUP_TILE=tiles[0], SIZE_TILE=tiles[1], K_TILE=triton.next_power_of_2(count),
        num_warps=1 if experts <= 256 else 4, **launch_options(pdl),
    )  # fmt: skip
    return Routing(weights, ids)
