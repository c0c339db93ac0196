"""BloomForCausalLM (BigScience 2022): linear biases, layer norms with bias, one of them behind the embedding."""

from __future__ import annotations

from asyncengine.kernels.ops import AttentionLayer, Batch, KVSpec, ModelOps, Residual
from asyncengine.models.alibi import (
    PLACES,
    FusedAttentionBlock,
    FusedHeads,
    bloom_slopes,
    check_positions,
    query_places,
)
from asyncengine.models.config import ModelConfig, RawConfig, require_full_attention
from asyncengine.models.decoder import Decoder, DecoderLayer
from asyncengine.models.fused import FusedModules, head_size
from asyncengine.models.weights.source import WeightSource

_ALIASES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"}
"""Other names of keys."""


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.renamed(_ALIASES)
    raw.require("apply_residual_connection_post_layernorm", False)
    raw.require("slow_but_exact", False)
    hidden_size = raw.integer("hidden_size", 64)
    num_layers, num_heads = raw.integer("n_layer", 2), raw.integer("n_head", 8)
    dim = head_size(raw, "hidden_size", hidden_size, num_heads)
    max_positions = check_positions(raw, raw.integer("seq_length", 2048))
    require_full_attention(raw, num_layers, max_positions)
    return ModelConfig(
        vocab_size=raw.integer("vocab_size", 250_880),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=dim + PLACES,
        max_positions=max_positions,
        norm_eps=raw.number("layer_norm_epsilon", 1e-5),
        activation="gelu_tanh",
        tie_word_embeddings=raw.flag("tie_word_embeddings", True),
        initializer_range=raw.number("initializer_range", 0.02),
        layer_scales=(dim**-0.5,) * num_layers,
        layer_caches=(KVSpec(num_heads, dim + PLACES),) * num_layers,
        layer_ropes=(None,) * num_layers,
        positions_in_keys=True,
        embedding="transformer.word_embeddings",
    )


def _layer(modules: FusedModules, index: int) -> DecoderLayer:
    config, ops = modules.config, modules.ops
    prefix, hidden = f"transformer.h.{index}", config.hidden_size
    dim, scale = config.head_dim - PLACES, config.layer_scales[index]
    count = modules.weights.own(config.num_heads)
    places = query_places(bloom_slopes(config.num_heads), scale, modules.weights.dtype)
    attention = FusedAttentionBlock(
        norm=modules.norm(f"{prefix}.input_layernorm"),
        qkv=modules.linear(f"{prefix}.self_attention.query_key_value", 3 * hidden, hidden, "rows"),
        layer=AttentionLayer(count, None, None, scale, 0),
        output=modules.linear(f"{prefix}.self_attention.dense", hidden, hidden, "columns"),
        heads=FusedHeads(count, count, dim, by_group=True, places=modules.weights.own_heads(places).to(ops.device)),
    )
    norm = modules.norm(f"{prefix}.post_attention_layernorm")
    return DecoderLayer(attention, modules.mlp(norm, f"{prefix}.mlp.dense_h_to_4h", f"{prefix}.mlp.dense_4h_to_h"))


class BloomForCausalLM(Decoder):
    """Loaded while it is built. ``max_positions`` is not needed: no table has positions."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: ModelOps, max_positions: int) -> None:
        modules = FusedModules(config, weights, ops)
        self._embedding_norm = modules.norm("transformer.word_embeddings_layernorm")
        layers = [_layer(modules, i) for i in range(config.num_layers)]
        super().__init__(ops, layers, **modules.ends("transformer.ln_f"))

    def embed(self, batch: Batch) -> Residual:
        residual = super().embed(batch)
        ops = self._ops
        ops.plain(residual, batch).copy_(ops.normed(residual, self._embedding_norm, batch))
        return residual
