"""Qwen3ForCausalLM: Qwen2 with an RMS norm on each query and key head, no biases (Yang et al. 2025)."""

from __future__ import annotations

from asyncengine.models.config import ModelConfig, RawConfig
from asyncengine.models.llama import LlamaForCausalLM, read_decoder_config
from asyncengine.models.qwen2 import read_windows


def read_config(raw: RawConfig) -> ModelConfig:
    attention_bias = raw.flag("attention_bias", False)
    return read_decoder_config(
        raw,
        default_kv_heads=32,
        layer_windows=read_windows(raw),
        head_dim=128,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
    )


class Qwen3ForCausalLM(LlamaForCausalLM):
    pass
