"""CudaOps: Triton kernels, cuBLAS and torch's scaled product. Implements ``asyncengine.kernels.ops.Ops``.

Everything is enqueued on torch's current stream and nothing waits, so that a step can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine.kernels.cuda.attention.run import BucketAttention
from asyncengine.kernels.cuda.gpu import Gpu, describe
from asyncengine.kernels.cuda.launch.programmatic import StreamingOptions
from asyncengine.kernels.cuda.linear import tiled as triton_linear
from asyncengine.kernels.cuda.linear.choose import (
    CUBLAS,
    INVARIANT,
    Fused,
    Plan,
    PlanTable,
    Site,
    default_plan,
    is_for_formula,
    norm_kind,
    plan_for_many_rows,
    round_rows,
)
from asyncengine.kernels.cuda.linear.residual import Unnormed, fold_norm
from asyncengine.kernels.cuda.rows import rows
from asyncengine.kernels.cuda.rows.quantise import quantize_rows
from asyncengine.kernels.cuda.sampling.sample import Ranks
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.float8 import Quantization, Quantized, quantize_weights, scaled_product
from asyncengine.kernels.ops import Activation, AttentionLayer, Norm

try:
    from asyncengine.kernels.cuda.linear import tma as gluon_linear
    from asyncengine.kernels.cuda.linear import tma_ranks as gluon_head
except ImportError:  # an experimental part of Triton, which another version may have elsewhere
    gluon_head = gluon_linear = None  # type: ignore[assignment]


def can_stream(device: torch.device) -> bool:
    """Whether this GPU and this Triton run kernels in Gluon; tries one."""
    return gluon_linear is not None and gluon_linear.works(device)


@dataclass(frozen=True, slots=True)
class CudaBatch:
    """A step on the device, and how layers attend in it."""

    step: DeviceStep
    attention: BucketAttention = field(default_factory=BucketAttention)
    needs: int = 0
    """Bits of _core.Need: what the sampled rows may need beyond the greatest logit."""


@dataclass(slots=True)
class Stream:
    """A step's residual stream."""

    x: Tensor
    """[T, H]"""
    parts: Tensor | None = None
    """float32 [P, T, H], to be added to x by the norm that reads it next"""
    pending: Callable[[Norm | None], Unnormed | None] | None = None
    """Adds to x, and makes it ready for a projection that reads it through the norm."""

    def add_pending(self, norm: Norm | None = None) -> Unnormed | None:
        pending, self.pending = self.pending, None
        return None if pending is None else pending(norm)

    def settle(self) -> Tensor:
        """x, with what was to be added."""
        self.add_pending()
        if self.parts is not None:
            self.x.copy_(self.x.float() + self.parts.sum(0))
            self.parts = None
        return self.x


@dataclass(frozen=True, slots=True)
class CudaLinear:
    weight: Tensor | Quantized
    """[N, K]; a Tensor with rows of zeros after the out_features that there are"""
    bias: Tensor | None
    out_features: int

    def columns(self, activation: Fused | None) -> int:
        """Of the result, padding included."""
        return len(self.weight) // (2 if activation == "silu_mul" else 1)

    def exact(self) -> CudaLinear:
        """Without the padding, for whoever splits the result, adds it to something or looks for its maximum."""
        if isinstance(self.weight, Quantized) or len(self.weight) == self.out_features:
            return self
        bias = None if self.bias is None else self.bias[: self.out_features]
        return CudaLinear(self.weight[: self.out_features], bias, self.out_features)


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """How CudaOps computes what it computes."""

    plans: PlanTable = field(default_factory=PlanTable)
    pdl: bool = False
    """programmatic dependent launch (see kernels/cuda/launch/programmatic.py)"""
    batch_invariant: bool = False
    """every sum is in an order that does not depend on the number of rows"""
    quantization: Quantization = "none"
    """of what ``make_linear`` is given, which must be bfloat16; never of heads"""
    streamed: bool = False
    """kernels in Gluon run here (see can_stream): streamed plans, and attention"""
    gpu: Gpu | None = None
    """The card that choices are made for; without one what ``describe`` says of the device."""
    l2_cache_hints: bool = True
    """these say what is to leave the L2 cache first (see kernels/cuda/launch/cache_policy.py)"""

    @property
    def for_streaming(self) -> StreamingOptions:
        return {"pdl": self.pdl, "l2_cache_hints": self.l2_cache_hints}


class CudaOps:
    """Tensors are float32 or bfloat16, all of one call in the same dtype."""

    transposed_keys = False

    def __init__(self, device: torch.device, options: CudaOptions | None = None) -> None:
        self.device = device
        self.options = options or CudaOptions()
        described = describe(device)
        tried = replace(described, dependent_launch=self.options.pdl, tma=self.options.streamed)
        self.gpu = self.options.gpu or tried
        self.missing: set[Site] = set()
        """Kinds of projection that were asked for and that the table does not know."""
        self.saved_bytes = 0
        """What quantising has taken off the weights."""
        self._folded: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """By address: weights that follow a LayerNorm, and what ``fold_norm`` makes of them."""
        self._arrivals = torch.zeros(triton_linear.MAX_ARRIVALS, dtype=torch.int32, device=device)

    def make_linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> CudaLinear:
        """Weights that share their input become one matrix, which copies them if there are several, or quantised."""
        if self.options.quantization == "none":
            return self._make_plain(weights, biases)
        quantized = quantize_weights(weights)
        self.saved_bytes += sum(w.nbytes for w in weights) - quantized.nbytes
        return CudaLinear(quantized, _join_biases(weights, biases), len(quantized))

    def make_head(self, weight: Tensor) -> CudaLinear:
        return self._make_plain([weight], [None])

    def make_embedding(self, table: Tensor, *, tied: bool, copy: bool = False) -> CudaLinear:
        """A tied table is there once: if the head has to be padded, rows are looked up in what is padded."""
        return self.make_head(table) if tied else CudaLinear(table, None, len(table))

    def _make_plain(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> CudaLinear:
        """Padded to rows that are aligned, which copies them.

        Otherwise cuBLAS falls back to kernels of Turing's time: a vocabulary of 50,257 took 214 us instead of 36 at 256
        rows on an H200.
        """
        out_features = sum(len(w) for w in weights)
        padding = -out_features % 64 if out_features % 8 else 0
        weight = weights[0]
        if len(weights) > 1 or padding:
            weight = torch.cat((*weights, weight.new_zeros(padding, weight.shape[1])))
        return CudaLinear(weight.contiguous(), _join_biases(weights, biases, padding), out_features)

    def embed(self, batch: CudaBatch, embedding: CudaLinear, position_table: Tensor | None = None) -> Stream:
        step, table = batch.step, embedding.weight
        assert isinstance(table, Tensor)
        return Stream(rows.embed(step.input_ids, table, step.positions, position_table, pdl=self.options.pdl))

    def norm_linear(
        self, stream: Stream, norm: Norm, handle: CudaLinear, activation: Activation | None = None
    ) -> Tensor | Quantized:
        """Quantised after an activation, if the next to read it is a product in float8 that does not do it itself."""
        handle = handle if activation is None else handle.exact()
        plan = self._choose(stream.x, handle, norm, activation)
        quantized = isinstance(handle.weight, Quantized)
        if stream.pending and plan.kind == "streamed":
            unnormed = stream.add_pending(norm)
            assert unnormed is not None
            return self._project_unnormed(unnormed, norm, handle, plan, activation)
        stream.add_pending()
        if quantized:
            stream.settle()
        if plan.fused_norm and stream.parts is None:
            return self._project(stream.x, handle, plan, norm, activation)
        if quantized:
            return self._project(quantize_rows(stream.x, norm, pdl=self.options.pdl), handle, plan, None, activation)
        x = rows.norm(stream.x, norm, parts=stream.parts, pdl=self.options.pdl)
        stream.parts = None
        return self._project(x, handle, plan, None, activation)

    def linear_add_(self, x: Tensor | Quantized, handle: CudaLinear, stream: Stream) -> None:
        handle, to, pdl = handle.exact(), stream.settle(), self.options.pdl
        weight, bias = handle.weight, handle.bias
        plan = self._choose(x, handle, None, None, add=True)
        if isinstance(weight, Quantized) and isinstance(x, Tensor) and not plan.fused_norm:
            x = quantize_rows(x, pdl=pdl)
        if plan.leaves_parts:
            assert isinstance(x, Tensor)
            assert isinstance(weight, Tensor)
            stream.parts = gluon_linear.streamed_parts(x, weight, plan, bias=bias, **self.options.for_streaming)
        elif self.options.streamed and plan.kind in ("streamed", "skinny") and not isinstance(weight, Quantized):
            assert isinstance(x, Tensor)
            stream.pending = partial(self._add, x, handle, plan, to)
        elif plan.kind != "cublas":
            self._launch(x, handle, plan, out=to, add=True)
        elif bias is None and isinstance(weight, Tensor) and isinstance(x, Tensor):
            torch.addmm(to, x, weight.T, out=to)
        else:
            to += _product(x, weight, bias, to.dtype)

    def _add(self, x: Tensor, handle: CudaLinear, plan: Plan, to: Tensor, norm: Norm | None) -> Unnormed | None:
        """What was put off in ``linear_add_``, by a plan that can do a part of the norm which reads the sum."""
        weight, bias, options = handle.weight, handle.bias, self.options
        if norm is None:
            self._launch(x, handle, plan, out=to, add=True)
            return None
        assert isinstance(weight, Tensor)
        if plan.kind == "streamed":
            return gluon_linear.streamed_sum(x, weight, plan, out=to, norm=norm, bias=bias, **options.for_streaming)
        return triton_linear.linear(x, weight, plan, out=to, bias=bias, add=True, reader=norm, pdl=options.pdl)

    def attention(
        self, heads: Tensor, layer: AttentionLayer, k_cache: Tensor, v_cache: Tensor, batch: CudaBatch
    ) -> Tensor:
        attend = batch.attention.of(layer)
        return attend(heads, layer, k_cache, v_cache, batch.step, **self.options.for_streaming)

    def keep_sampled(self, x: Tensor, stream: Stream, batch: CudaBatch) -> Tensor:
        """Drops nothing: a decode step is sampled from in every row, and ``logits`` reads but the rows it needs."""
        return x

    def logits(self, stream: Stream, norm: Norm, handle: CudaLinear, batch: CudaBatch) -> Tensor | Ranks:
        """For ``triton_sampler.sample``: of a batch without needs ranks, where there is a plan for that."""
        stream.add_pending()
        index = batch.step.sample_index
        if not batch.needs and self.options.streamed and len(index) > 1:
            plan = self._choose(stream.x[: len(index)], handle, norm, "argmax")
            if plan.kind == "streamed":
                x, exact = rows.norm(stream.x, norm, index, stream.parts, pdl=self.options.pdl), handle.exact()
                assert isinstance(exact.weight, Tensor)
                return Ranks(
                    gluon_head.streamed_ranks(x, exact.weight, plan, bias=exact.bias, **self.options.for_streaming)
                )
        plan = self._choose(stream.x[: len(index)], handle, norm, None)
        if plan.fused_norm and stream.parts is None:
            y = self._project(stream.x, handle, plan, norm, None, index=index, dtype=torch.float32)
        else:
            x = rows.norm(stream.x, norm, index, stream.parts, pdl=self.options.pdl)
            y = self._project(x, handle, plan, None, None, dtype=torch.float32)
        assert isinstance(y, Tensor)
        return y

    # ---- projections ----

    def _choose(
        self,
        x: Tensor | Quantized,
        handle: CudaLinear,
        norm: Norm | None,
        activation: Fused | None,
        *,
        add: bool = False,
    ) -> Plan:
        if self.options.batch_invariant:
            return INVARIANT
        if isinstance(x, Tensor) and x.dtype != torch.bfloat16:
            return CUBLAS
        site = Site(
            handle.columns(activation), x.shape[1], len(x), norm_kind(norm), activation, handle.bias is not None, add,
            "fp8" if isinstance(handle.weight, Quantized) else "bf16",
        )  # fmt: skip
        plan: Plan | None
        if is_for_formula(site):
            plan = plan_for_many_rows(site)
        else:
            site = site._replace(rows=round_rows(len(x)))
            plan = self.options.plans.find(site)
        if plan is None:
            self.missing.add(site)
        if plan is None or (plan.kind == "streamed" and not self.options.streamed):
            return default_plan(site)
        return plan

    def _project(
        self,
        x: Tensor | Quantized,
        handle: CudaLinear,
        plan: Plan,
        norm: Norm | None,
        activation: Activation | None,
        *,
        index: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor | Quantized:
        weight, bias, pdl = handle.weight, handle.bias, self.options.pdl
        dtype = dtype or (torch.bfloat16 if isinstance(x, Quantized) else x.dtype)
        if plan.kind == "cublas":
            y = _product(x, weight, bias, dtype)
            if activation is not None:
                make_rows = _quantized_activation if isinstance(weight, Quantized) else rows.activation
                return make_rows(y, activation, pdl=pdl)
        else:
            num_rows = len(x) if index is None else len(index)
            y = rows.empty_rows(num_rows, handle.columns(activation), dtype, self.device)
            self._launch(x, handle, plan, out=y, norm=norm, activation=activation, index=index)
        return y[:, : handle.out_features]  # a gate's result is half as wide, and never padded

    def _fold(self, norm: Norm, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if norm.bias is None:
            return bias, None
        address = weight.data_ptr()
        if address not in self._folded:  # when a step first runs, before any is captured
            self._folded[address] = weight, *fold_norm(norm, weight, bias)
        return self._folded[address][1:]

    def _project_unnormed(
        self, x: Unnormed, norm: Norm, handle: CudaLinear, plan: Plan, activation: Activation | None
    ) -> Tensor:
        weight = handle.weight
        assert isinstance(weight, Tensor)
        bias, shift = self._fold(norm, weight, handle.bias)
        y = rows.empty_rows(len(x.x), handle.columns(activation), x.x.dtype, self.device)
        gluon_linear.streamed_linear(
            x, weight, plan, out=y, bias=bias, shift=shift, activation=activation, **self.options.for_streaming
        )
        return y[:, : handle.out_features]

    def _launch(
        self,
        x: Tensor | Quantized,
        handle: CudaLinear,
        plan: Plan,
        *,
        out: Tensor,
        norm: Norm | None = None,
        activation: Activation | None = None,
        add: bool = False,
        index: Tensor | None = None,
    ) -> None:
        """``triton_linear.linear`` by whichever kernel the plan is for. Streamed plans take neither norm nor index."""
        weight, bias, pdl = handle.weight, handle.bias, self.options.pdl
        if plan.kind == "streamed":
            assert isinstance(x, Tensor)
            assert isinstance(weight, Tensor)
            assert norm is None
            assert index is None
            gluon_linear.streamed_linear(
                x, weight, plan, out=out, bias=bias, activation=activation, add=add, **self.options.for_streaming
            )
        else:
            triton_linear.linear(
                x, weight, plan, out=out, bias=bias, norm=norm, activation=activation, add=add, index=index,
                arrivals=self._arrivals, pdl=pdl,
            )  # fmt: skip


def _join_biases(weights: Sequence[Tensor], biases: Sequence[Tensor | None], padding: int = 0) -> Tensor | None:
    """With zeros for those that are missing; None if all are."""
    if all(bias is None for bias in biases):
        return None
    filled = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
    return torch.cat((*filled, weights[0].new_zeros(padding)))


def _quantized_activation(x: Tensor, activation: Activation, *, pdl: bool) -> Quantized:
    return quantize_rows(x, activation=activation, pdl=pdl)


def _product(x: Tensor | Quantized, weight: Tensor | Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [M, K] times weight [N, K], transposed, plus the bias: [M, N]. Both are quantised, or neither."""
    if isinstance(weight, Quantized):
        assert isinstance(x, Quantized)
        return scaled_product(x, weight, bias)
    assert isinstance(x, Tensor)
    if dtype == x.dtype:
        return F.linear(x, weight, bias)
    if x.device.type == "cpu":  # no such product there
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    y = torch.mm(x, weight.T, out_dtype=dtype)
    return y if bias is None else y + bias
