"""Qwen2ForCausalLM: Llama with biased q, k, v and, at choice, a sliding window in the upper layers."""

from __future__ import annotations

from asyncengine.models.config import ModelConfig, RawConfig, read_layer_windows
from asyncengine.models.llama import LlamaForCausalLM, read_decoder_config


def read_windows(raw: RawConfig) -> tuple[int, ...]:
    """The window of each layer, from layer_types or, in older files, from max_window_layers."""
    window = 0  # a null sliding_window means none
    if raw.flag("use_sliding_window", False) and raw.values.get("sliding_window", 4096) is not None:
        window = raw.integer("sliding_window", 4096)
    first = raw.get("max_window_layers", int, 28)
    return read_layer_windows(raw, window, [i >= first for i in range(raw.integer("num_hidden_layers"))])


def read_config(raw: RawConfig) -> ModelConfig:
    return read_decoder_config(raw, default_kv_heads=32, layer_windows=read_windows(raw), qkv_bias=True)


class Qwen2ForCausalLM(LlamaForCausalLM):
    pass
