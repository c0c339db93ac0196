"""GPT2LMHeadModel (Radford et al. 2019): learned positions, layer norms with bias, a GELU MLP."""

from __future__ import annotations

from asyncengine.kernels.ops import Activation, AttentionLayer, KVSpec, ModelOps
from asyncengine.models.config import ModelConfig, RawConfig, require_full_attention
from asyncengine.models.decoder import AttentionBlock, Decoder, DecoderLayer
from asyncengine.models.files import excerpt
from asyncengine.models.fused import FusedModules, head_size
from asyncengine.models.weights.source import WeightSource

# The names under which transformers knows the exact GELU and its tanh approximation.
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Other names of keys."""


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.renamed(_ALIASES)
    activation = raw.get("activation_function", str, "gelu_new")
    if activation not in _ACTIVATIONS:
        raise raw.unsupported(f"activation_function = {excerpt(activation)}")
    raw.require("add_cross_attention", False)
    hidden_size = raw.integer("n_embd", 768)
    num_layers = raw.integer("n_layer", 12)
    num_heads = raw.integer("n_head", 12)
    head_dim = head_size(raw, "n_embd", hidden_size, num_heads)
    max_positions = raw.integer("n_positions", 1024)
    windows = require_full_attention(raw, num_layers, max_positions)
    scale = head_dim**-0.5 if raw.flag("scale_attn_weights", True) else 1.0
    by_layer = raw.flag("scale_attn_by_inverse_layer_idx", False)
    return ModelConfig(
        vocab_size=raw.integer("vocab_size", 50257),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("n_inner", 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=raw.number("layer_norm_epsilon", 1e-5),
        activation=_ACTIVATIONS[activation],
        tie_word_embeddings=raw.flag("tie_word_embeddings", True),
        initializer_range=raw.number("initializer_range", 0.02),
        layer_scales=tuple(scale / (i + 1) if by_layer else scale for i in range(num_layers)),
        layer_caches=tuple(KVSpec(num_heads, head_dim, window) for window in windows),
        layer_ropes=(None,) * num_layers,
        embedding="transformer.wte",
    )


def _layer(modules: FusedModules, index: int) -> DecoderLayer:
    prefix, config = f"transformer.h.{index}", modules.config
    hidden = config.hidden_size
    attention = AttentionBlock(
        norm=modules.norm(f"{prefix}.ln_1"),
        qkv=modules.linear(f"{prefix}.attn.c_attn", 3 * hidden, hidden, "rows", blocks=3),
        layer=AttentionLayer(modules.weights.own(config.num_heads), None, None, config.layer_scales[index], 0),
        output=modules.linear(f"{prefix}.attn.c_proj", hidden, hidden, "columns"),
    )
    norm = modules.norm(f"{prefix}.ln_2")
    return DecoderLayer(attention, modules.mlp(norm, f"{prefix}.mlp.c_fc", f"{prefix}.mlp.c_proj"))


class GPT2LMHeadModel(Decoder):
    """Loaded while it is built. ``max_positions`` is not needed: the table of positions is a weight."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: ModelOps, max_positions: int) -> None:
        modules = FusedModules(config, weights, ops, transposed=True)
        position_table = weights.tensor("transformer.wpe.weight", config.max_positions, config.hidden_size)
        layers = [_layer(modules, i) for i in range(config.num_layers)]
        ends = modules.ends("transformer.ln_f", copy=True)
        super().__init__(ops, layers, **ends, position_table=position_table)
