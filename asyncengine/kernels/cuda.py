"""CudaOps: Triton kernels and cuBLAS over torch tensors. Implements ``asyncengine.kernels.ops.Ops``.

Everything is enqueued on torch's current stream and nothing waits, so that a step can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine.kernels import triton_rows as rows
from asyncengine.kernels.device_step import DeviceStep
from asyncengine.kernels.ops import HeadNorms, StepTokens
from asyncengine.kernels.triton_attention import paged_attention
from asyncengine.kernels.work_list import WorkList


@dataclass(frozen=True, slots=True)
class CudaBatch:
    """A step on the device, with the work of its attention cut into shares."""

    step: DeviceStep
    work: dict[int, WorkList]
    """by sliding window; 0 is none"""

    def build_work(self) -> None:
        """After ingest, before the model."""
        for work in self.work.values():
            work.build(self.step)


@dataclass(frozen=True, slots=True)
class CudaLinear:
    weight: Tensor
    """[N, K], with rows of zeros after the out_features that there are"""
    bias: Tensor | None
    out_features: int


class CudaOps:
    """Tensors are float32 or bfloat16, all of one call in the same dtype."""

    transposed_keys = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def tokens(self, batch: CudaBatch) -> StepTokens:
        step = batch.step
        return StepTokens(step.input_ids, step.positions, step.sample_index)

    def make_linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> CudaLinear:
        """Weights that share their input become one matrix, which copies them if there are several.

        So does padding to rows that are aligned, without which cuBLAS falls back to kernels of Turing's time: a
        vocabulary of 50,257 took 214 us instead of 36 at 256 rows on an H200.
        """
        out_features = sum(len(w) for w in weights)
        padding = -out_features % 64 if out_features % 8 else 0
        weight = weights[0]
        if len(weights) > 1 or padding:
            weight = torch.cat((*weights, weight.new_zeros(padding, weight.shape[1])))
        bias = None
        if any(b is not None for b in biases):
            filled = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
            bias = torch.cat((*filled, weight.new_zeros(padding)))
        return CudaLinear(weight.contiguous(), bias, out_features)

    def linear(self, x: Tensor, handle: CudaLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        y = self._product(x, handle, x.dtype if out_dtype is None else out_dtype)
        return y if y.shape[1] == handle.out_features else y[:, : handle.out_features]

    @staticmethod
    def _product(x: Tensor, handle: CudaLinear, dtype: torch.dtype) -> Tensor:
        if dtype == x.dtype:
            return F.linear(x, handle.weight, handle.bias)
        if x.device.type == "cpu":  # no such product there
            return F.linear(x.to(dtype), handle.weight.to(dtype), handle.bias)
        y = torch.mm(x, handle.weight.T, out_dtype=dtype)
        return y if handle.bias is None else y + handle.bias

    rms_norm = staticmethod(rows.rms_norm)
    add_rms_norm = staticmethod(rows.add_rms_norm)
    layer_norm = staticmethod(rows.layer_norm)
    add_layer_norm = staticmethod(rows.add_layer_norm)
    silu_mul = staticmethod(rows.silu_mul)
    gelu_tanh = staticmethod(rows.gelu_tanh)
    gelu = staticmethod(rows.gelu)

    def rotary_store_kv(
        self,
        heads: Tensor,
        num_heads: int,
        norms: HeadNorms | None,
        cos_sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: CudaBatch,
    ) -> None:
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        rows.rotary_store_kv(
            heads,
            num_heads,
            q_norm,
            k_norm,
            eps,
            cos_sin,
            positions,
            batch.step.slot_mapping,
            k_cache,
            v_cache,
        )

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: CudaBatch) -> None:
        rows.store_kv(k, v, batch.step.slot_mapping, k_cache, v_cache)

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: CudaBatch, scale: float, window: int
    ) -> Tensor:
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        paged_attention(q, k_cache, v_cache, batch.step, batch.work[window], scale, window, out)
        return out
