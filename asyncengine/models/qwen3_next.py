"""Qwen3NextForCausalLM (Qwen team 2025): gated DeltaNet in three layers of four, attention behind a gate in the others.

Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM (2026) are its relatives with other names of projections.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asyncengine.kernels.ops import CacheSpec
from asyncengine.kernels.states import DeltaNet, ShortConv
from asyncengine.models.config import ModelConfig, RawConfig, read_period
from asyncengine.models.decoder import DecoderLayer, DeltaNetBlock, FeedForward, Layer
from asyncengine.models.llama import LayerWeights, attention_block, mlp_block, read_decoder_config
from asyncengine.models.mixer_shapes import Delta
from asyncengine.models.mixture import MixtureForCausalLM, mixture_block, read_sparse_layers, with_mixture
from asyncengine.models.state_space import read_kinds

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
    "num_attention_heads": 16, "head_dim": 256, "max_position_embeddings": 32_768, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
_OF_35: dict[str, Any] = {
    "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}  # fmt: skip
_OF_35_MOE: dict[str, Any] = {
    "vocab_size": 248_320, "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8,
    "intermediate_size": 1,
}  # fmt: skip


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.renamed({"num_local_experts": "num_experts"}).with_defaults(_DEFAULTS)
    config = _read(raw, fused=True)
    return _with_experts(
        config, raw, layers=read_sparse_layers(raw, config.num_layers), sums_to_one=raw.flag("norm_topk_prob", True)
    )


def read_qwen35_config(raw: RawConfig) -> ModelConfig:
    return _read(raw.with_defaults(_DEFAULTS | _OF_35), fused=False)


def read_qwen35_moe_config(raw: RawConfig) -> ModelConfig:
    raw = raw.renamed({"num_local_experts": "num_experts"}).with_defaults(_DEFAULTS | _OF_35_MOE)
    config = _read(raw, fused=False)
    return _with_experts(config, raw, layers=(True,) * config.num_layers, sums_to_one=True)


def _with_experts(config: ModelConfig, raw: RawConfig, **settings: Any) -> ModelConfig:
    inner, shared = (raw.integer(key) for key in ("moe_intermediate_size", "shared_expert_intermediate_size"))
    return with_mixture(config, raw, gated_share=True, intermediate_size=inner, shared_size=shared, **settings)


def _read(raw: RawConfig, *, fused: bool) -> ModelConfig:
    biased = raw.flag("attention_bias", False)
    config = read_decoder_config(
        raw.changed({"layer_types": None}),
        default_kv_heads=2,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
        partial_rotary=0.25,
    )
    period = read_period(raw, "full_attention_interval", 4)
    kinds = ["full_attention" if (i + 1) % period == 0 else "linear_attention" for i in range(config.num_layers)]
    delta = Delta(
        raw.integer("linear_num_key_heads"),
        raw.integer("linear_num_value_heads"),
        raw.integer("linear_key_head_dim"),
        raw.integer("linear_value_head_dim"),
        raw.integer("linear_conv_kernel_dim"),
        fused,
    )
    if delta.value_heads % delta.key_heads:
        raise raw.unsupported(f"{delta.value_heads} linear value heads over {delta.key_heads} key heads")
    if delta.conv_size < 2:
        raise raw.unsupported(f"linear_conv_kernel_dim = {delta.conv_size}")
    attends = read_kinds(raw, "layer_types", kinds)
    caches: list[CacheSpec] = [
        spec if attention else delta.spec for attention, spec in zip(attends, config.layer_caches, strict=True)
    ]
    return replace(config, delta=delta, layer_caches=tuple(caches), gated_queries=True, norm_weight_offset=1.0)


def _fused_orders(delta: Delta) -> tuple[Tensor, Tensor]:
    """Orders of the rows of in_proj_qkvz and in_proj_ba, in which each of their parts has all heads together."""
    share = delta.value_heads // delta.key_heads
    sizes = [delta.key_dim, delta.key_dim, share * delta.value_dim, share * delta.value_dim]
    rows = torch.split(torch.arange(delta.key_heads * sum(sizes)).view(delta.key_heads, -1), sizes, 1)
    rates = torch.split(torch.arange(2 * delta.value_heads).view(delta.key_heads, -1), [share, share], 1)
    return torch.cat([part.flatten() for part in rows]), torch.cat([part.flatten() for part in rates])


def _delta_block(layer: LayerWeights, delta: Delta) -> DeltaNetBlock:
    config, weights, ops, name = layer.config, layer.weights, layer.ops, f"{layer.name}.linear_attn"
    hidden, heads = config.hidden_size, delta.value_heads
    if delta.fused:
        sizes = {"qkvz": delta.channels + delta.inner, "ba": 2 * heads}
        orders = dict(zip(sizes, _fused_orders(delta), strict=True))
    else:
        sizes, orders = {"qkv": delta.channels, "z": delta.inner, "b": heads, "a": heads}, {}
    inputs = [
        weights.weight(f"{name}.in_proj_{part}", size, hidden, order=orders.get(part)) for part, size in sizes.items()
    ]
    kernel = weights.tensor(f"{name}.conv1d.weight", delta.channels, 1, delta.conv_size)
    mixer = DeltaNet(
        ShortConv(kernel[:, 0].t().float().contiguous(), silu=True),
        -weights.float32(f"{name}.A_log", heads).exp(),
        weights.float32(f"{name}.dt_bias", heads),
        delta.key_heads,
        delta.key_dim,
        delta.value_dim,
        weights.float32(f"{name}.norm.weight", delta.value_dim),
        config.norm_eps,
        torch.bfloat16 if delta.half else torch.float32,
    )
    output = ops.make_linear([weights.weight(f"{name}.out_proj", hidden, delta.inner)], [None])
    made = ops.make_linear(weights.side_by_side(inputs), [None] * len(inputs))
    return DeltaNetBlock(layer.block_norm(config.layer_norms.before_attention), made, mixer, output)


class Qwen3NextForCausalLM(MixtureForCausalLM):
    def layer(self, layer: LayerWeights, cos_sin: Any, query_scales: Any) -> Layer:
        config = layer.config
        assert config.delta is not None
        if config.kv_spec(layer.index) is None:
            return DecoderLayer(_delta_block(layer, config.delta), self.feed_forward(layer))
        return DecoderLayer(attention_block(layer, cos_sin), self.feed_forward(layer))

    def feed_forward(self, layer: LayerWeights) -> FeedForward:
        mixture = layer.config.mixture
        return mixture_block(layer) if mixture is not None and mixture.layers[layer.index] else mlp_block(layer)
