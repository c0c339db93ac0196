"""MptForCausalLM (MosaicML 2023): linear biases, layer norms without a bias, queries, keys and values in one matrix."""

from __future__ import annotations

import math

from asyncengine.kernels.ops import AttentionLayer, KVSpec, ModelOps
from asyncengine.models.alibi import (
    PLACES,
    FusedAttentionBlock,
    FusedHeads,
    check_positions,
    power_slopes,
    query_places,
)
from asyncengine.models.config import ModelConfig, RawConfig, require_full_attention
from asyncengine.models.decoder import Decoder, DecoderLayer
from asyncengine.models.fused import FusedModules, head_size
from asyncengine.models.weights.source import WeightSource

_ALIASES = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
"""Other names of keys."""


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.renamed(_ALIASES)
    attention = RawConfig(raw.get("attn_config", dict, {}), f"{raw.source}, attn_config")
    for source, key, value in (
        (raw, "no_bias", True),
        (raw, "logit_scale", None),
        (raw, "expansion_ratio", 4),
        (attention, "attn_type", "multihead_attention"),
        (attention, "prefix_lm", False),
        (attention, "qk_ln", False),
        (attention, "alibi", True),
        (attention, "alibi_bias_max", 8),
    ):
        source.require(key, value)
    hidden_size = raw.integer("d_model", 2048)
    num_layers, num_heads = raw.integer("n_layers", 24), raw.integer("n_heads", 16)
    dim = head_size(raw, "d_model", hidden_size, num_heads)
    max_positions = check_positions(raw, raw.integer("max_seq_len", 2048))
    require_full_attention(raw, num_layers, max_positions)
    scale = dim**-0.5 if attention.values.get("softmax_scale") is None else attention.number("softmax_scale")
    clip = math.inf if attention.values.get("clip_qkv") is None else attention.number("clip_qkv")
    return ModelConfig(
        vocab_size=raw.integer("vocab_size", 50_368),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=dim + PLACES,
        max_positions=max_positions,
        norm_eps=raw.number("layer_norm_epsilon", 1e-5),
        activation="gelu",
        tie_word_embeddings=raw.flag("tie_word_embeddings", True),
        initializer_range=raw.number("initializer_range", 0.02),
        layer_scales=(scale,) * num_layers,
        layer_caches=(KVSpec(num_heads, dim + PLACES),) * num_layers,
        layer_ropes=(None,) * num_layers,
        positions_in_keys=True,
        largest_head=clip or math.inf,
        embedding="transformer.wte",
    )


def _layer(modules: FusedModules, index: int) -> DecoderLayer:
    config, ops = modules.config, modules.ops
    prefix, hidden = f"transformer.blocks.{index}", config.hidden_size
    dim, scale, count = config.head_dim - PLACES, config.layer_scales[index], modules.weights.own(config.num_heads)
    slopes = query_places(power_slopes(config.num_heads), scale, modules.weights.dtype)
    places = modules.weights.own_heads(slopes).to(ops.device)
    attention = FusedAttentionBlock(
        norm=modules.norm(f"{prefix}.norm_1"),
        qkv=modules.linear(f"{prefix}.attn.Wqkv", 3 * hidden, hidden, "rows", blocks=3),
        layer=AttentionLayer(count, None, None, scale, 0),
        output=modules.linear(f"{prefix}.attn.out_proj", hidden, hidden, "columns"),
        heads=FusedHeads(count, count, dim, by_group=False, places=places, largest=config.largest_head),
    )
    norm = modules.norm(f"{prefix}.norm_2")
    return DecoderLayer(attention, modules.mlp(norm, f"{prefix}.ffn.up_proj", f"{prefix}.ffn.down_proj"))


class MptForCausalLM(Decoder):
    """Loaded while it is built. ``max_positions`` is not needed: no table has positions."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: ModelOps, max_positions: int) -> None:
        modules = FusedModules(config, weights, ops, biased=False, biased_norms=False)
        layers = [_layer(modules, i) for i in range(config.num_layers)]
        super().__init__(ops, layers, **modules.ends("transformer.norm_f"))
