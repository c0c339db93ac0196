"""Runs attention as a plan says: the heads are prepared, if the plan says so, then its kernels are launched in order.

Each kernel's file has a function ``run``, which takes a launch of the plan and a ``KernelCall``. All compute causal
attention of a step's rows: the token at position i sees position j if j <= i and, with a window > 0, i - window < j.
Caches are [num_blocks, Hk, block_size, D], contiguous; with ``LayerKVCache.scales`` in float8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.attention import few_keys, paged, paged_decode
from asyncengine.kernels.cuda.attention.call import KernelCall
from asyncengine.kernels.cuda.attention.choose import Limits, describe, describe_all
from asyncengine.kernels.cuda.attention.plan import AttentionPlan, Kernel, Launch, LayerKind
from asyncengine.kernels.cuda.attention.work.lists import StepWork, Work
from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.launch.programmatic import TmaOptions
from asyncengine.kernels.cuda.rows.norms import norm_rows
from asyncengine.kernels.cuda.rows.rotary import rotary_store_kv, rotate_queries, scale_queries, store_kv
from asyncengine.kernels.cuda.rows.tensors import empty_rows
from asyncengine.kernels.cuda.step.bucket import Bucket
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.ops import AttentionLayer, HeadNorms, LayerKVCache, Norm, split_heads

KernelRun = Callable[[Launch, KernelCall], None]

_KERNELS: dict[Kernel, KernelRun] = {
    "few_keys": few_keys.run, "paged": paged.run, "paged_decode": paged_decode.run
}  # fmt: skip
try:
    from asyncengine.kernels.cuda.attention import tma_decode, tma_prefill

    _KERNELS |= {"tma_decode": tma_decode.run, "tma_prefill": tma_prefill.run}
except ImportError:  # an experimental part of Triton, which another version may have elsewhere
    pass


@dataclass(frozen=True, slots=True)
class PlannedAttention:
    """A plan, and the memory that its kernels share."""

    plan: AttentionPlan
    work: Work

    def __call__(
        self, heads: Tensor, layer: AttentionLayer, cache: LayerKVCache, step: DeviceStep, **how: Unpack[TmaOptions]
    ) -> Tensor:
        """Attention of a step: [T, num_heads * D]. It may rotate the queries in heads [T, (num_heads + 2 Hk) * D], or
        [T, num_heads * D] of a layer that shares keys and values.

        Raises ConfigError for layers that share or norm values, if the plan is for others.
        """
        norms_values = layer.norms is not None and layer.norms.v is not None
        if (layer.shares or norms_values) and not self.plan.prepares:
            raise ConfigError(f"heads of layers that share keys and values or norm values, by {self.plan}")
        heads = heads.view(len(heads), -1, cache.v.shape[3])
        out = empty_rows(len(heads), layer.num_heads * heads.shape[2], heads.dtype, heads.device)
        call = KernelCall(heads, layer, cache, step, self.work, out, **how)
        if layer.norms is not None and len(layer.norms.q) != heads.shape[2]:
            norm_all_heads(heads, layer.num_heads, layer.norms, pdl=call.pdl)
            call = replace(call, layer=layer._replace(norms=None))
        if layer.query_scales is not None:
            scale_queries(heads, layer.num_heads, layer.query_scales, step.positions, step.slot_mapping, pdl=call.pdl)
        if self.plan.prepares:
            prepare(call)
        launch_all(self.plan.launches, call)
        return out


def norm_all_heads(heads: Tensor, num_heads: int, norms: HeadNorms, *, pdl: bool) -> None:
    """Norm the queries and the keys of a token, each over all their heads together, in place."""
    q, k, _ = split_heads(heads, num_heads)
    for x, weight in ((q, norms.q), (k, norms.k)):
        norm_rows(x.view(len(x), len(weight)), Norm(weight, None, norms.eps), in_place=True, pdl=pdl)


def prepare(call: KernelCall) -> None:
    """Norm and rotate queries and keys, the queries in place, and store keys and values in the cache."""
    heads, layer, step, (k_cache, v_cache, scales, *_) = call.heads, call.layer, call.step, call.cache
    q_norm, k_norm, eps, v_norm = layer.norms or (None, None, 0.0, None)
    if layer.shares:
        if layer.cos_sin is not None:
            rotate_queries(heads, q_norm, eps, layer.cos_sin, step.positions, step.slot_mapping, pdl=call.pdl)
        return
    if layer.cos_sin is None:
        _, k, v = split_heads(heads, layer.num_heads)
        store_kv(k, v, step.slot_mapping, k_cache, v_cache, scales=scales, pdl=call.pdl)
        return
    rotary_store_kv(
        heads, layer.num_heads, q_norm, k_norm, eps, layer.cos_sin, step.positions, step.slot_mapping, k_cache,
        v_cache, v_norm=v_norm, scales=scales, pdl=call.pdl,
    )  # fmt: skip


def launch_all(launches: Sequence[Launch], call: KernelCall) -> None:
    """The kernels of a plan, one after the other."""
    for launch in launches:
        _KERNELS[launch.kernel](launch, call)


class BucketAttention:
    """Attention of a model's layers in the steps of one bucket."""

    def __init__(self, planned: Iterable[PlannedAttention] = ()) -> None:
        self._planned = {one.plan.layer.key: one for one in planned}

    def of(self, layer: AttentionLayer, num_kv_heads: int, head_dim: int) -> PlannedAttention:
        return self._planned[layer.window, layer.softcap, num_kv_heads, head_dim]

    def build(self, step: DeviceStep, *, pdl: bool) -> None:
        """Build the work lists of the step, after ingest and before the model."""
        for work in {id(one.work): one.work for one in self._planned.values()}.values():
            work.build(step, pdl)


class StepAttention:
    """Attention of a model's layers in the steps of any bucket. All memory is allocated here."""

    def __init__(self, kinds: Sequence[LayerKind], limits: Limits, gpu: Gpu, device: torch.device) -> None:
        self._describe = partial(describe, gpu=gpu, limits=limits)
        self._kinds = kinds
        plans = [plan for kind in kinds for plan in describe_all(kind, gpu, limits)]
        self._work = StepWork(
            plans, max_rows=limits.max_rows, max_tokens=limits.max_tokens, max_context=limits.max_context, gpu=gpu,
            device=device,
        )  # fmt: skip

    def of(self, bucket: Bucket) -> BucketAttention:
        plans = [self._describe(bucket, kind) for kind in self._kinds]
        return BucketAttention(PlannedAttention(plan, self._work.of(plan)) for plan in plans)
