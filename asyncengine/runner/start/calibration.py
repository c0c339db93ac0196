"""Scales of a KV cache in float8 by a step on the device (see ``runner/state/kv_scales.py``)."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.attention.run import BucketAttention
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps
from asyncengine.kernels.cuda.step.tensors import DeviceStep, allocate_step
from asyncengine.kernels.float8_cache import fixed_scales, with_inverses
from asyncengine.kernels.ops import AttentionLayer, LayerKVCache, split_heads
from asyncengine.runner.state import memory
from asyncengine.runner.state.kv_scales import fixed_prompt, tops
from asyncengine.runner.steps.model_runner import LoadedModel


class _NotingAttention(BucketAttention):
    """Attention of one prompt in plain torch, without a cache: no kernel is compiled that steps do not launch.

    It notes what each layer's keys and values reach.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self._head_dim = head_dim
        self.tops: list[Tensor] = []
        """float32 [2, Hk] of each layer so far"""

    def of(self, layer: AttentionLayer, num_kv_heads: int, head_dim: int) -> _NotingAttention:  # type: ignore[override]
        return self

    def __call__(
        self, heads: Tensor, layer: AttentionLayer, cache: LayerKVCache, step: DeviceStep, **_: object
    ) -> Tensor:
        """Attend as ``PlannedAttention`` does, for tokens at the positions 0, 1 ... The cache is not looked at."""
        q, k, v = split_heads(heads.view(len(heads), -1, self._head_dim), layer.num_heads)
        if layer.norms is not None:
            q, k = (_normed(x, gain, layer.norms.eps) for x, gain in ((q, layer.norms.q), (k, layer.norms.k)))
        if layer.cos_sin is not None:
            q, k = (_rotated(x, layer.cos_sin[: len(heads)]) for x in (q, k))
        if layer.query_scales is not None:
            q = (q.float() * layer.query_scales[: len(heads), None, None]).to(q.dtype)
        self.tops.append(torch.stack([x.abs().amax((0, 2)).float() for x in (k, v)]))
        return _attend(q, k, v, layer)


def _normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    exact = x.reshape(len(x), -1, len(gain)).float()  # one head, if the norm is over all heads together
    return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps) * gain.float()).view_as(x).to(x.dtype)


def _rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    cosine, sine = cos_sin[:, None].chunk(2, -1)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1).to(x.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
    """Causal attention [T, Hq * D] of q [T, Hq, D] over k and v [T, Hk, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k).float() * layer.scale
    if layer.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    i = torch.arange(len(q), device=q.device)
    hidden = i[None, :] > i[:, None]
    if layer.window:
        hidden |= i[None, :] <= i[:, None] - layer.window
    weights = F.softmax(scores.masked_fill(hidden, float("-inf")), -1).to(q.dtype)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def with_kv_scales(config: EngineConfig, loaded: LoadedModel, ops: CudaOps) -> LoadedModel:
    """Return the model with the scales that its cache needs, if the cache is in float8 and the checkpoint has none."""
    if not config.float8_cache or loaded.kv_scales is not None:
        return loaded
    return replace(loaded, kv_scales=with_inverses(calibrate_device(loaded, ops)))


def calibrate_device(loaded: LoadedModel, ops: CudaOps) -> Tensor:
    """Scales of the fixed prompt, float32 [layers, 2, Hk] on the device. It waits for the device.

    Latents are noted in a cache of their own, by the kernels.
    """
    ids, model = fixed_prompt(loaded.config.vocab_size, loaded.max_model_len), loaded.config
    config = EngineConfig(model="", max_num_seqs=1)
    blocks = -(-len(ids) // config.block_size)
    step = allocate_step(1, blocks, 1, len(ids), ops.device)
    step.input_ids.copy_(ids)
    step.positions.copy_(torch.arange(len(ids)))
    step.slot_mapping.copy_(torch.arange(len(ids)))
    for tensor in (step.token_slot, step.row_slot, step.row_query_start, step.row_context_len):
        tensor.zero_()
    step.row_query_len.fill_(len(ids))
    step.slots.block_tables.copy_(torch.arange(blocks)[None])
    attention = _NotingAttention(model.head_dim)
    with torch.inference_mode():
        if model.latent is None:
            loaded.model.run(CudaBatch(step, attention), memory.without_memory(model, ops.device))
            return fixed_scales(torch.stack(attention.tops)).clone()
        cache = memory.allocate(config, model, blocks, loaded.dtype, ops)
        for group in cache.groups:
            group.zero_()
        loaded.model.run(CudaBatch(step), cache.layers)
        return fixed_scales(tops(model, cache)).clone()
