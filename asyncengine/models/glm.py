"""GlmForCausalLM and Glm4ForCausalLM (GLM team 2024): half of each head is rotated, in pairs of neighbours.

GLM-4-0414, the second, has norms behind its blocks as well.
"""

from __future__ import annotations

from dataclasses import replace

from asyncengine.models.config import LayerNorms, ModelConfig, RawConfig
from asyncengine.models.llama import LlamaForCausalLM, read_decoder_config


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.with_defaults({"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7})
    config = read_decoder_config(raw, qkv_bias=raw.flag("attention_bias", True), partial_rotary=0.5)
    ropes = tuple(rope and replace(rope, interleaved=True) for rope in config.layer_ropes)
    return replace(config, layer_ropes=ropes, fused_gate_up=True)


def read_glm4_config(raw: RawConfig) -> ModelConfig:
    norms = LayerNorms(behind_attention="post_self_attn_layernorm", behind_mlp="post_mlp_layernorm")
    return replace(read_config(raw), layer_norms=norms)


class GlmForCausalLM(LlamaForCausalLM):
    pass


class Glm4ForCausalLM(LlamaForCausalLM):
    pass
