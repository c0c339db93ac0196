"""CudaOps: Triton kernels, cuBLAS and torch's scaled product. Implements ``asyncengine.kernels.ops.Ops``.

Everything is enqueued on torch's current CUDA stream and nothing waits, so that a step can be captured. An operation
asks for a plan and launches it; linear/choose.py chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from asyncengine._core import Need
from asyncengine.kernels.cuda.attention.latent_run import attend, choose_plans
from asyncengine.kernels.cuda.attention.run import BucketAttention
from asyncengine.kernels.cuda.experts.mix import MixOptions, adds_up, mix, mix_few, multiply_pairs
from asyncengine.kernels.cuda.experts.route import ROUTED_ROWS, choose_experts, route_rows, takes_rows
from asyncengine.kernels.cuda.experts.stack import stack_experts
from asyncengine.kernels.cuda.gpu import Gpu, describe
from asyncengine.kernels.cuda.launch.programmatic import TmaOptions
from asyncengine.kernels.cuda.linear.choose import Choices
from asyncengine.kernels.cuda.linear.formats.base import Matrix, as_tensor
from asyncengine.kernels.cuda.linear.handle import CudaLinear, pack
from asyncengine.kernels.cuda.linear.plan import Plan, Site, fused_activation
from asyncengine.kernels.cuda.linear.project import Projections
from asyncengine.kernels.cuda.linear.residual import Residual
from asyncengine.kernels.cuda.linear.tables import PlanTable
from asyncengine.kernels.cuda.recurrent.conv import convolve
from asyncengine.kernels.cuda.recurrent.delta_net import delta_net
from asyncengine.kernels.cuda.recurrent.mamba2 import mamba2
from asyncengine.kernels.cuda.rows.activation import activate_rows, gate_by_sigmoid, soft_cap_
from asyncengine.kernels.cuda.rows.additions import add_rows
from asyncengine.kernels.cuda.rows.lanes import HostLanes, exchange
from asyncengine.kernels.cuda.rows.lookup import embed
from asyncengine.kernels.cuda.rows.norms import norm_rows
from asyncengine.kernels.cuda.rows.tensors import empty_rows
from asyncengine.kernels.cuda.sampling.sample import Ranks
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.latent import LatentLayer
from asyncengine.kernels.ops import (
    Activation,
    AttentionLayer,
    Experts,
    LayerKVCache,
    LayerLatentCache,
    LayerStates,
    Norm,
    Reduction,
    Routing,
    RoutingRule,
)
from asyncengine.kernels.states import DeltaNet, Mamba2, ShortConv
from asyncengine.kernels.weight import DENSE, PackedWeight, tensors_of


@dataclass(frozen=True, slots=True)
class CudaBatch:
    """A step on the device, and how layers attend in it."""

    step: DeviceStep
    attention: BucketAttention = field(default_factory=BucketAttention)
    needs: int = ~0
    """Bits of _core.Need: what the sampled rows may need beyond the greatest logit; all of them by default."""
    lanes: HostLanes | None = None
    """lanes of a step with host rows"""
    single_token_rows: bool = False
    """Every row of the step has one token, or none."""


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """Settings of the kernels that CudaOps runs."""

    plans: PlanTable = field(default_factory=PlanTable)
    pdl: bool = False
    """programmatic dependent launch (see kernels/cuda/launch/programmatic.py)"""
    batch_invariant: bool = False
    """every sum is in an order that does not depend on the number of rows"""
    gpu: Gpu | None = None
    """The card that choices are made for; without one what ``describe`` says of the device, and no tma kernels."""
    l2_cache_hints: bool = True
    """tma kernels say what is to leave the L2 cache first (see kernels/cuda/launch/cache_policy.py)"""
    expert_codes: bool = True
    """Experts in int4 stay in codes. Otherwise they are unpacked, to several times the memory."""

    @property
    def for_tma(self) -> TmaOptions:
        return {"pdl": self.pdl, "l2_cache_hints": self.l2_cache_hints}


class CudaOps:
    """Tensors are float32, float16 or bfloat16, all of one call in the same dtype."""

    transposed_keys = False
    reads_blocks = False

    def __init__(self, device: torch.device, options: CudaOptions | None = None) -> None:
        self.device = device
        self.options = options or CudaOptions()
        self.gpu = self.options.gpu or describe(device)
        self.choices = Choices(self.options.plans, self.gpu, batch_invariant=self.options.batch_invariant)
        """choices of plans for projections"""
        self.expert_codes = self.options.expert_codes
        self.reduction: Reduction | None = None
        self._projections = Projections(device, self.gpu, self.options.for_tma)
        self._arrivals = torch.zeros(ROUTED_ROWS, dtype=torch.int32, device=device)
        """counters of ``route_rows``"""
        self._mixes = MixOptions(gpu=self.gpu, invariant=self.options.batch_invariant, pdl=self.options.pdl)

    def make_linear(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> CudaLinear:
        """Weights that share their input become one matrix, which copies them if there are several."""
        return pack(weights, biases)

    def make_head(self, weight: PackedWeight) -> CudaLinear:
        return pack([weight], [None])

    def make_embedding(self, table: PackedWeight, *, tied: bool, copy: bool = False) -> CudaLinear:
        """A tied table is there once: if the head has to be padded, rows are looked up in what is padded."""
        [rows] = tensors_of([table], "weight", DENSE)
        return self.make_head(table) if tied else CudaLinear(rows, None, len(rows))

    def make_experts(
        self,
        up: Sequence[Sequence[PackedWeight]],
        down: Sequence[PackedWeight],
        activation: Activation,
        up_biases: Sequence[Sequence[Tensor]] | None = None,
        down_biases: Sequence[Tensor] | None = None,
    ) -> Experts[CudaLinear]:
        return stack_experts(up, down, activation, up_biases, down_biases, keeps_codes=self.expert_codes)

    def embed(
        self, batch: CudaBatch, embedding: CudaLinear, position_table: Tensor | None = None, scale: float = 1.0
    ) -> Residual:
        step, table = batch.step, as_tensor(embedding.weight)
        x = embed(step.input_ids, table, step.positions, position_table, scale=scale, pdl=self.options.pdl)
        return Residual(x)

    def residual(self, x: Tensor, batch: CudaBatch) -> Residual:
        return Residual(x)

    def norm_linear(
        self,
        residual: Residual,
        norm: Norm | None,
        handle: CudaLinear,
        batch: CudaBatch,
        activation: Activation | None = None,
    ) -> Matrix:
        """Quantised after an activation, if the next to read it is a product in float8 that does not do it itself."""
        handle = handle if activation is None else handle.exact()
        fused = fused_activation(activation)
        plan = self.choices.plan(handle.site(len(residual.x), residual.x.dtype, norm, fused))
        if norm is None:
            operand = self._projections.operand(residual.settle(), handle, plan)
        else:
            operand = residual.read(norm, plan, handle.format, pdl=self.options.pdl)
        return self._projections.project(operand, handle, plan, activation)

    def linear_add_(
        self, x: Matrix, handle: CudaLinear, residual: Residual, batch: CudaBatch, norm: Norm | None = None
    ) -> None:
        """Add a product to the residual. With a norm of the product, or a reduction, the product is a kernel before the
        addition."""
        handle, alone = handle.exact(), norm is None and self.reduction is None
        plan = self.choices.plan(handle.site(len(x), residual.x.dtype, add=alone))
        if alone:
            self._projections.add(x, handle, plan, residual)
            return
        self.add_(self._product(x, handle, plan), residual, batch, norm)

    def normed(self, residual: Residual, norm: Norm, batch: CudaBatch) -> Tensor:
        return residual.read_by_kernel(norm, pdl=self.options.pdl)

    def linear(self, x: Matrix, handle: CudaLinear, batch: CudaBatch) -> Tensor:
        handle = handle.exact()
        return self._product(x, handle, self.choices.plan(handle.site(len(x), handle.format.result_dtype(x))))

    def routes_rows(self, x: Tensor, norm: Norm | None, router: CudaLinear) -> bool:
        """Return whether one kernel norms these rows and chooses their experts."""
        return not self.options.batch_invariant and takes_rows(len(x), router, norm)

    def route(
        self, residual: Residual, norm: Norm | None, router: CudaLinear, rule: RoutingRule, batch: CudaBatch
    ) -> tuple[Tensor, Routing]:
        pdl = self.options.pdl
        if self.routes_rows(residual.x, norm, router):
            x, norm = residual.rows(norm, pdl=pdl)
            return route_rows(x, norm, router, rule, self._arrivals, self.gpu, pdl=pdl)
        x = residual.settle() if norm is None else residual.read_by_kernel(norm, pdl=pdl)
        plan = self.choices.plan(router.site(len(x), x.dtype))
        operand = self._projections.operand(x, router, plan)
        logits = as_tensor(self._projections.project(operand, router, plan, dtype=torch.float32))
        return x, choose_experts(logits, rule, pdl=pdl)

    def rms_norm(self, x: Tensor, norm: Norm, batch: CudaBatch) -> Tensor:
        return norm_rows(x, norm, pdl=self.options.pdl)

    def activated(self, x: Tensor, activation: Activation, batch: CudaBatch) -> Tensor:
        return activate_rows(x, activation, pdl=self.options.pdl)

    def gated(self, x: Tensor, gate: Tensor, batch: CudaBatch) -> Tensor:
        return gate_by_sigmoid(x, gate, pdl=self.options.pdl)

    def experts(self, x: Tensor, routing: Routing, experts: Experts[CudaLinear], batch: CudaBatch) -> Tensor:
        [down] = experts.down
        out = empty_rows(len(x), down.out_features // experts.count, x.dtype, x.device)
        mix(x, routing, experts, out=out, add=False, **self._mixes)
        return out

    def experts_add_(
        self,
        x: Tensor,
        routing: Routing,
        experts: Experts[CudaLinear],
        residual: Residual,
        batch: CudaBatch,
        norm: Norm | None = None,
    ) -> None:
        if self.reduction is not None:
            self.add_(self.experts(x, routing, experts, batch), residual, batch, norm)
        elif norm is None and adds_up(x, routing, experts, **self._mixes):
            mix_few(x, routing, experts, out=residual.settle(), add=True, pdl=self.options.pdl)
        else:
            results = multiply_pairs(x, routing, experts, residual.x.shape[1], **self._mixes)
            self._put_off(residual, results, norm, parts=routing.ids.shape[1])

    def add_(self, x: Tensor, residual: Residual, batch: CudaBatch, norm: Norm | None = None) -> None:
        if self.reduction is not None:
            x = x.contiguous()  # not so behind weights that are padded
            if norm is None:
                residual.put_off(partial(self.reduction, x, batch, residual.settle()), norms=True)
                return
            self.reduction(x, batch)
        self._put_off(residual, x, norm)

    def _put_off(self, residual: Residual, x: Tensor, norm: Norm | None, parts: int = 1) -> None:
        """Leave ``add_rows`` to the norm that reads the residual next. The next product of a lone row norms it itself
        while it waits for weights, which takes less time."""
        add = partial(add_rows, x, residual.settle(), parts=parts, norm=norm, pdl=self.options.pdl)
        if len(residual.x) == 1:
            add()
        else:
            residual.put_off(add, norms=True)

    def plain(self, residual: Residual, batch: CudaBatch) -> Tensor:
        return residual.settle()

    def input_ids(self, batch: CudaBatch) -> Tensor:
        return batch.step.input_ids

    def positions(self, batch: CudaBatch) -> Tensor:
        return batch.step.positions

    def _product(self, x: Matrix, handle: CudaLinear, plan: Plan) -> Tensor:
        return as_tensor(self._projections.project(self._projections.operand(x, handle, plan), handle, plan))

    def attention(self, heads: Tensor, layer: AttentionLayer, cache: LayerKVCache, batch: CudaBatch) -> Tensor:
        _, num_kv_heads, _, head_dim = cache.v.shape
        attend = batch.attention.of(layer, num_kv_heads, head_dim)
        return attend(heads, layer, cache, batch.step.of_group(cache.group), **self.options.for_tma)

    def make_latent_up(self, up: Tensor, key_dim: int) -> Tensor:
        return up

    def latent_attention(
        self, q: Tensor, rows: Tensor, layer: LatentLayer, cache: LayerLatentCache, batch: CudaBatch
    ) -> Tensor:
        how = {"single_token_rows": batch.single_token_rows, "float8": cache.scales is not None}
        plans = choose_plans(q, layer, batch.step, self.gpu, **how)
        return attend(q, rows, layer, cache, batch.step, plans, pdl=self.options.pdl)

    def short_conv(self, x: Tensor, conv: ShortConv, cache: LayerStates, batch: CudaBatch) -> Tensor:
        return convolve(x, conv, cache.states, batch.step, single=batch.single_token_rows, pdl=self.options.pdl)

    def mamba2(self, x: Tensor, mixer: Mamba2, cache: LayerStates, batch: CudaBatch) -> Tensor:
        how = {"single": batch.single_token_rows, "invariant": self.options.batch_invariant, "pdl": self.options.pdl}
        return mamba2(x, mixer, cache.states, batch.step, self.gpu, **how)

    def delta_net(self, x: Tensor, mixer: DeltaNet, cache: LayerStates, batch: CudaBatch) -> Tensor:
        how = {"single": batch.single_token_rows, "invariant": self.options.batch_invariant, "pdl": self.options.pdl}
        return delta_net(x, mixer, cache.states, batch.step, self.gpu, **how)

    def exchange(
        self, heads: Tensor, x: Tensor, residual: Residual, layer: AttentionLayer, cache: LayerKVCache, batch: CudaBatch
    ) -> None:
        if batch.lanes is not None:
            own, step, pdl = residual.settle(), batch.step, self.options.pdl
            exchange(heads, x, own, layer, cache.number, batch.lanes, step, pdl=pdl)

    def keep_sampled(self, x: Tensor, residual: Residual, batch: CudaBatch) -> Tensor:
        """Drops nothing: a decode step is sampled from in every row, and ``logits`` reads but the rows it needs."""
        return x

    def sampled_step(self, residual: Residual, batch: CudaBatch) -> tuple[CudaBatch, Tensor | None]:
        """Drops nothing: a bucket's step has one size for all its layers."""
        return batch, None

    def hidden(self, residual: Residual, norm: Norm | None, batch: CudaBatch) -> Tensor:
        index = None if batch.needs & Need.mean else batch.step.sample_index
        if norm is None:
            return residual.settle() if index is None else residual.settle().index_select(0, index)
        return residual.read_by_kernel(norm, index, pdl=self.options.pdl)

    def greedy_site(self, residual: Residual, norm: Norm | None, handle: CudaLinear, batch: CudaBatch) -> Site | None:
        """Return the site of a head whose rows need their greatest logits alone, if some plan gives ranks for it."""
        rows = len(batch.step.sample_index)
        if batch.needs or not self.gpu.tma or rows <= 1:
            return None
        site = handle.site(rows, residual.x.dtype, norm, "argmax")
        return site if handle.format.takes_tma(site) else None

    def logits(
        self,
        residual: Residual,
        norm: Norm | None,
        handle: CudaLinear,
        batch: CudaBatch,
        softcap: float = 0.0,
        scale: float = 1.0,
    ) -> Tensor | Ranks:
        """Return logits for ``sample``. A greedy batch gets ranks, if there is a plan for them, and neither scale nor
        cap, which keep the order."""
        index, dtype, pdl = batch.step.sample_index, residual.x.dtype, self.options.pdl
        if (greedy := self.greedy_site(residual, norm, handle, batch)) is not None:
            plan = self.choices.plan(greedy)
            if plan.kind == "tma":
                return Ranks(self._projections.ranks(self.hidden(residual, norm, batch), handle, plan))
        plan = self.choices.plan(handle.site(len(index), dtype, norm))
        if norm is None:
            operand = self._projections.operand(residual.settle().index_select(0, index), handle, plan)
        else:
            operand = residual.read(norm, plan, handle.format, index=index, pdl=pdl)
        y = as_tensor(self._projections.project(operand, handle, plan, dtype=torch.float32))
        if scale != 1 and batch.needs:
            y.mul_(scale)
        if softcap and batch.needs:
            soft_cap_(y, softcap, pdl=pdl)
        return y
