"""FalconForCausalLM (TII 2023), of 7B, 40B, 180B and RW: three orders of heads, rotary positions or linear biases.

transformers rounds the products of slopes and positions to bfloat16. Here they are exact.
"""

from __future__ import annotations

from torch import Tensor

from asyncengine.kernels.ops import Activation, AttentionLayer, KVSpec, ModelOps
from asyncengine.models.alibi import (
    PLACES,
    FusedAttentionBlock,
    FusedHeads,
    bloom_slopes,
    check_positions,
    query_places,
)
from asyncengine.models.config import LayerNorms, ModelConfig, RawConfig, require_full_attention
from asyncengine.models.decoder import Decoder, DecoderLayer, Layer, ParallelLayer
from asyncengine.models.files import excerpt
from asyncengine.models.fused import FusedModules, head_size
from asyncengine.models.rope_settings import read_rope, scaled_positions
from asyncengine.models.rotary import rotary_table
from asyncengine.models.weights.source import WeightSource

_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.renamed({"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"})
    hidden_size = raw.integer("hidden_size", 4544)
    num_layers, num_heads = raw.integer("num_hidden_layers", 32), raw.integer("num_attention_heads", 71)
    dim, grouped = head_size(raw, "hidden_size", hidden_size, num_heads), raw.flag("new_decoder_architecture", False)
    alibi = raw.flag("alibi", False)
    num_kv_heads = num_heads if raw.values.get("num_kv_heads") is None else raw.integer("num_kv_heads")
    if not grouped:
        num_kv_heads = 1 if raw.flag("multi_query", True) else num_heads
    if num_heads % num_kv_heads:
        raise raw.unsupported(f"{num_heads} attention heads over {num_kv_heads} key-value heads")
    activation = raw.get("activation", str, "gelu")
    if activation not in _ACTIVATIONS:
        raise raw.unsupported(f"activation = {excerpt(activation)}")
    max_positions = raw.integer("max_position_embeddings", 2048)
    require_full_attention(raw, num_layers, max_positions)
    rope = None if alibi else read_rope(raw, max_positions, dim)
    if alibi:
        check_positions(raw, max_positions)
    bias, parallel = raw.flag("bias", False), grouped or raw.flag("parallel_attn", True)
    norms = raw.values.get("num_ln_in_parallel_attn")
    two_norms = parallel and grouped and (norms is None or raw.integer("num_ln_in_parallel_attn") == 2)
    if grouped and not raw.flag("parallel_attn", True):
        raise raw.unsupported("new_decoder_architecture with parallel_attn = False")
    places = PLACES if alibi else 0
    return ModelConfig(
        vocab_size=raw.integer("vocab_size", 65_024),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size
        if raw.values.get("ffn_hidden_size") is None
        else raw.integer("ffn_hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=dim + places,
        max_positions=scaled_positions(rope, max_positions) if rope else max_positions,
        norm_eps=raw.number("layer_norm_epsilon", 1e-5),
        activation=_ACTIVATIONS[activation],
        tie_word_embeddings=raw.flag("tie_word_embeddings", True),
        initializer_range=raw.number("initializer_range", 0.02),
        layer_scales=(dim**-0.5,) * num_layers,
        layer_caches=(KVSpec(num_kv_heads, dim + places),) * num_layers,
        layer_ropes=(rope,) * num_layers,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        parallel_blocks=parallel,
        layer_norms=_norm_names(parallel, two_norms),
        positions_in_keys=alibi,
        embedding="transformer.word_embeddings",
    )


def _norm_names(parallel: bool, two: bool) -> LayerNorms:
    if two:
        return LayerNorms(before_attention="ln_attn", before_mlp="ln_mlp")
    behind = None if parallel else "post_attention_layernorm"
    return LayerNorms(before_attention="input_layernorm", before_mlp=behind)


def _layer(modules: FusedModules, index: int, cos_sin: Tensor | None, places: Tensor | None) -> Layer:
    config, names = modules.config, modules.config.layer_norms
    prefix, hidden, kv_heads = f"transformer.h.{index}", config.hidden_size, config.num_kv_heads
    dim, own = hidden // config.num_heads, modules.weights.own
    norm = modules.norm(f"{prefix}.{names.before_attention}")
    qkv_size = hidden + 2 * kv_heads * dim
    attention = FusedAttentionBlock(
        norm=norm,
        qkv=modules.linear(f"{prefix}.self_attention.query_key_value", qkv_size, hidden, "rows"),
        layer=AttentionLayer(own(config.num_heads), None, cos_sin, config.layer_scales[index], 0),
        output=modules.linear(f"{prefix}.self_attention.dense", hidden, hidden, "columns"),
        heads=FusedHeads(own(config.num_heads), own(kv_heads), dim, by_group=True, places=places),
    )
    if names.before_mlp is not None:
        norm = modules.norm(f"{prefix}.{names.before_mlp}")
    mlp = modules.mlp(norm, f"{prefix}.mlp.dense_h_to_4h", f"{prefix}.mlp.dense_4h_to_h")
    return ParallelLayer(attention, mlp) if config.parallel_blocks else DecoderLayer(attention, mlp)


class FalconForCausalLM(Decoder):
    """Loaded while it is built."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: ModelOps, max_positions: int) -> None:
        modules, rope = FusedModules(config, weights, ops, biased=config.mlp_bias), config.layer_ropes[0]
        cos_sin = None if rope is None else rotary_table(rope, config.head_dim, max_positions).to(ops.device)
        places = None
        if config.positions_in_keys:  # scores are scaled with their biases
            places = query_places(bloom_slopes(config.num_heads), 1.0, weights.dtype)
            places = weights.own_heads(places).to(ops.device)
        layers = [_layer(modules, i, cos_sin, places) for i in range(config.num_layers)]
        super().__init__(ops, layers, **modules.ends("transformer.ln_f"))
