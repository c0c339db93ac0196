"""Qwen2ForCausalLM: Llama with biased q, k, v and, at choice, a sliding window in the upper layers."""

from __future__ import annotations

from asyncengine.models.config import ModelConfig, RawConfig, excerpt
from asyncengine.models.llama import LlamaForCausalLM, read_decoder_config


def read_layer_windows(raw: RawConfig) -> tuple[int, ...]:
    """The window of each layer, from layer_types or, in older files, from max_window_layers."""
    num_layers = raw.integer("num_hidden_layers")
    if not raw.flag("use_sliding_window", False):
        return (0,) * num_layers
    window = raw.integer("sliding_window", 4096)
    types = raw.get("layer_types", list, None)
    if types is None:
        first = raw.get("max_window_layers", int, 28)
        return tuple(window if i >= first else 0 for i in range(num_layers))
    windows = {"full_attention": 0, "sliding_attention": window}
    for kind in types:
        if not isinstance(kind, str) or kind not in windows:
            raise raw.unsupported(f"layer type {excerpt(kind)}")
    if len(types) != num_layers:
        raise raw.unsupported(f"layer_types with {len(types)} entries for {num_layers} layers")
    return tuple(windows[kind] for kind in types)


def read_config(raw: RawConfig) -> ModelConfig:
    return read_decoder_config(raw, default_kv_heads=32, layer_windows=read_layer_windows(raw), qkv_bias=True)


class Qwen2ForCausalLM(LlamaForCausalLM):
    pass
