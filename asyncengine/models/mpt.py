"""MptForCausalLM (MosaicML 2023): linear biases, layer norms without a bias, queries, keys and values in one matrix."""

from __future__ import annotations

import math

import torch

from asyncengine.kernels.ops import AttentionLayer, Handle, KVSpec, ModelOps, Norm
from asyncengine.models.alibi import (
    PLACES,
    FusedAttentionBlock,
    FusedHeads,
    check_positions,
    power_slopes,
    query_places,
)
from asyncengine.models.config import ModelConfig, RawConfig, require_full_attention
from asyncengine.models.decoder import Decoder, DecoderLayer, MLPBlock
from asyncengine.models.weights.shard import Cut
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
    if hidden_size % num_heads:
        raise raw.unsupported(f"d_model = {hidden_size} over {num_heads} heads")
    dim = hidden_size // num_heads
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


def _norm(config: ModelConfig, weights: WeightSource, name: str) -> Norm:
    weight = weights.tensor(f"{name}.weight", config.hidden_size)
    return Norm(weight, torch.zeros_like(weight), config.norm_eps)


def _layer(config: ModelConfig, index: int, weights: WeightSource, ops: ModelOps) -> DecoderLayer:
    prefix, hidden, inner = f"transformer.blocks.{index}", config.hidden_size, config.intermediate_size
    dim, scale, count = config.head_dim - PLACES, config.layer_scales[index], config.num_heads

    def linear(name: str, out_size: int, in_size: int, cut: Cut, blocks: int = 1) -> Handle:
        weight = weights.weight(f"{prefix}.{name}", out_size, in_size, cut=cut, blocks=blocks)
        return ops.make_linear([weight], [None])

    places = query_places(power_slopes(count), scale, weights.dtype).to(ops.device)
    attention = FusedAttentionBlock(
        norm=_norm(config, weights, f"{prefix}.norm_1"),
        qkv=linear("attn.Wqkv", 3 * hidden, hidden, "rows", blocks=3),
        layer=AttentionLayer(count, None, None, scale, 0),
        output=linear("attn.out_proj", hidden, hidden, "columns"),
        heads=FusedHeads(count, count, dim, by_group=False, places=places, largest=config.largest_head),
    )
    mlp = MLPBlock(
        norm=_norm(config, weights, f"{prefix}.norm_2"),
        up=linear("ffn.up_proj", inner, hidden, "rows"),
        activation=config.activation,
        down=linear("ffn.down_proj", hidden, inner, "columns"),
    )
    return DecoderLayer(attention, mlp)


class MptForCausalLM(Decoder):
    """Loaded while it is built. ``max_positions`` is not needed: no table has positions."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: ModelOps, max_positions: int) -> None:
        table = weights.table(config.embedding, config.vocab_size, config.hidden_size)
        embedding = ops.make_embedding(table, tied=config.tie_word_embeddings)
        layers = [_layer(config, i, weights, ops) for i in range(config.num_layers)]
        norm = _norm(config, weights, "transformer.norm_f")
        head = embedding if config.tie_word_embeddings else ops.make_head(weights.table(*config.head_shape))
        super().__init__(ops, layers, embedding=embedding, norm=norm, head=head)
