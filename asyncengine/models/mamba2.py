"""Mamba2ForCausalLM (Dao, Gu 2024): layers of one mixer with a state each, without attention and without positions.

A text of any length can be computed. The model's context is ``max_position_embeddings`` or 131,072 tokens.
"""

from __future__ import annotations

from typing import Any

from asyncengine.models.config import LayerNorms, ModelConfig, RawConfig
from asyncengine.models.decoder import BlocksLayer, Layer
from asyncengine.models.llama import LayerWeights, LlamaForCausalLM, read_decoder_config
from asyncengine.models.state_space import mamba2_block, read_state_space, with_mixers

_DEFAULTS: dict[str, Any] = {
    "num_heads": 128, "head_dim": 64, "vocab_size": 32_768, "hidden_size": 4096, "state_size": 128,
    "num_hidden_layers": 64, "layer_norm_epsilon": 1e-5, "expand": 2, "conv_kernel": 4, "n_groups": 8,
    "initializer_range": 0.1, "max_position_embeddings": 1 << 17,
}  # fmt: skip
_NAMES = {
    "num_heads": "mamba_n_heads", "head_dim": "mamba_d_head", "state_size": "mamba_d_state", "expand": "mamba_expand",
    "n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_bias": "mamba_proj_bias",
    "use_conv_bias": "mamba_conv_bias", "layer_norm_epsilon": "rms_norm_eps",
}  # fmt: skip


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.with_defaults(_DEFAULTS).renamed(_NAMES)
    raw.require("hidden_act", "silu")
    inner = raw.integer("mamba_expand") * raw.integer("hidden_size")
    # Sizes of attention and of an MLP, of which there are none.
    none = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 1}
    config = read_decoder_config(raw.changed(none))
    return with_mixers(
        config,
        read_state_space(raw, inner, module="mixer"),
        [False] * config.num_layers,
        layer_ropes=(None,) * config.num_layers,
        layers="backbone.layers",
        embedding="backbone.embeddings",
        final_norm="backbone.norm_f",
        layer_norms=LayerNorms("norm", None),
    )


class Mamba2ForCausalLM(LlamaForCausalLM):
    def layer(self, layer: LayerWeights, cos_sin: Any, query_scales: Any) -> Layer:
        return BlocksLayer(mamba2_block(layer, layer.block_norm("norm")))
