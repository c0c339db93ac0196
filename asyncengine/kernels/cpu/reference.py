"""ReferenceOps: every operation in plain torch, the twin that native kernels are tested against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine._core import StepBatch
from asyncengine.kernels.cpu.base import BaseOps, Residual
from asyncengine.kernels.cpu.linear.formats.base import Format
from asyncengine.kernels.cpu.linear.formats.registry import format_of
from asyncengine.kernels.cpu.paging import gather_kv, visible
from asyncengine.kernels.float8_cache import quantize_heads
from asyncengine.kernels.ops import Activation, AttentionCall, LayerKVCache, Norm, is_gated
from asyncengine.kernels.weight import PackedWeight


@dataclass(frozen=True)
class ReferenceLinear:
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    form: Format


class ReferenceOps(BaseOps[ReferenceLinear]):
    """Implements ``asyncengine.kernels.ops.Ops``."""

    def make_linear(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> ReferenceLinear:
        """Weights are unpacked once."""
        form = format_of(weights)
        return ReferenceLinear(tuple(form.unpack(weight) for weight in weights), tuple(biases), form)

    def embed(
        self,
        batch: StepBatch,
        embedding: ReferenceLinear,
        position_table: Tensor | None = None,
        scale: float = 1.0,
    ) -> Residual:
        x = F.embedding(torch.from_numpy(batch.input_ids), embedding.weights[0])
        x = (x.float() * scale).to(x.dtype)
        if position_table is not None:
            x += F.embedding(torch.from_numpy(batch.positions), position_table)
        return Residual(x)

    def multiply(
        self, x: Tensor, handle: ReferenceLinear, batch: StepBatch, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        wanted = out_dtype or x.dtype
        x = handle.form.operand(x)
        dtype = torch.promote_types(x.dtype, wanted)
        parts = [
            F.linear(x.to(dtype), w.to(dtype), None if b is None else b.to(dtype))
            for w, b in zip(handle.weights, handle.biases, strict=True)
        ]
        return torch.cat(parts, dim=-1).to(wanted)

    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        if residual is not None:
            residual += x
            x = residual
        if norm.bias is None:
            return _rms_norm(x, norm.weight, norm.eps)
        weight, bias = norm.weight.float(), norm.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, norm.eps).to(x.dtype)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        x32, up = x.float().chunk(2, dim=-1) if is_gated(activation) else (x.float(), None)
        if activation == "clamped_silu_mul":
            assert up is not None
            gate = x32.clamp(max=7.0)
            return (gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)).to(x.dtype)
        match activation.removesuffix("_mul"):
            case "silu":
                y = F.silu(x32)
            case "gelu_tanh":
                y = F.gelu(x32, approximate="tanh")
            case "relu2":
                y = F.relu(x32).square()
            case _:
                y = F.gelu(x32)
        return (y if up is None else y * up).to(x.dtype)

    def soft_cap_(self, x: Tensor, cap: float) -> Tensor:
        return x.div_(cap).tanh_().mul_(cap)

    def head_rms_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        x.copy_(_rms_norm(x, weight, eps))

    def rotary_(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        cos, sin = cos_sin[positions][:, None, :].chunk(2, dim=-1)
        for x in (q, k):
            a, b = x.float().chunk(2, dim=-1)
            x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))

    def store_kv(self, k: Tensor, v: Tensor, cache: LayerKVCache, batch: StepBatch) -> None:
        if cache.scales is not None:
            k, v = quantize_heads(k, cache.scales[0]), quantize_heads(v, cache.scales[1])
        slots = torch.from_numpy(batch.slots_of(cache.group))
        block_size = cache.v.shape[2]
        block, offset = slots // block_size, slots % block_size
        cache.k[block, :, :, offset] = k
        cache.v[block, :, offset, :] = v

    def paged_attention(self, call: AttentionCall[StepBatch]) -> Tensor:
        q, layer, cache, batch = call.queries, call.layer, call.cache, call.step
        group = q.shape[1] // cache.k.shape[1]
        block_size = cache.v.shape[2]
        out = q.new_empty(q.shape)
        for row in range(batch.num_rows):
            first, last = int(batch.query_start[row]), int(batch.query_start[row + 1])
            if last > len(q):
                break
            end = int(batch.context_len[row]) + last - first
            blocks = torch.from_numpy(batch.block_table(row, -(-end // block_size), cache.group))
            k, v = gather_kv(cache.k, cache.v, blocks, 0, end, cache.scales)
            k = k.float().repeat_interleave(group, dim=0)
            v = v.float().repeat_interleave(group, dim=0)
            scores = torch.einsum("qhd,hkd->hqk", q[first:last].float(), k) * layer.scale
            if layer.softcap:
                self.soft_cap_(scores, layer.softcap)
            scores.masked_fill_(~visible(last - first, 0, end, layer.window), float("-inf"))
            if layer.sinks is not None:
                scores = torch.cat((scores, layer.sinks[:, None, None].expand(-1, last - first, 1)), -1)
            out[first:last] = torch.einsum("hqk,hkd->qhd", scores.softmax(-1)[..., :end], v)
        return out.flatten(1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
