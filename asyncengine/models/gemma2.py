"""Gemma2ForCausalLM (Gemma team 2024): norms before and behind each block, soft caps, a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncengine.kernels.ops import Activation
from asyncengine.models.config import LayerNorms, ModelConfig, RawConfig, read_layer_windows
from asyncengine.models.llama import LlamaForCausalLM, read_decoder_config

ACTIVATIONS: Mapping[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh_mul"}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
"""Values of absent keys; published files leave out many."""


def read_gemma_config(raw: RawConfig, slides: Sequence[bool]) -> ModelConfig:
    """Read what Gemma 2 and 3 have in common, of a config with the family's defaults.

    ``slides`` says which layers have the window if there are no layer_types.
    """
    if raw.flag("use_bidirectional_attention", False):
        raise raw.unsupported("use_bidirectional_attention")
    window = 0 if raw.values["sliding_window"] is None else raw.integer("sliding_window")
    attention_bias = raw.flag("attention_bias", False)
    config = read_decoder_config(
        raw,
        activations=ACTIVATIONS,
        activation_key="hidden_activation",
        layer_windows=read_layer_windows(raw, window, slides),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
    )
    norms = LayerNorms(
        before_mlp="pre_feedforward_layernorm",
        behind_attention="post_attention_layernorm",
        behind_mlp="post_feedforward_layernorm",
    )
    return replace(
        config,
        layer_scales=(raw.number("query_pre_attn_scalar") ** -0.5,) * config.num_layers,
        layer_norms=norms,
        norm_weight_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
        round_embedding_scale=True,
        logit_softcap=read_cap(raw, "final_logit_softcapping"),
    )


def read_cap(raw: RawConfig, key: str) -> float:
    """A soft cap; 0 for a key that is null."""
    return 0.0 if raw.values[key] is None else raw.number(key)


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.with_defaults(DEFAULTS)
    slides = [i % 2 == 0 for i in range(raw.integer("num_hidden_layers"))]
    return replace(read_gemma_config(raw, slides), score_softcap=read_cap(raw, "attn_logit_softcapping"))


class Gemma2ForCausalLM(LlamaForCausalLM):
    pass
