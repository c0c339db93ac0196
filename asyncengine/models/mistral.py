"""MistralForCausalLM: Llama with a sliding window in every layer (Jiang et al. 2023), or in those of layer_types.

transformers calls a Mistral with layer_types Ministral.
"""

from __future__ import annotations

from asyncengine.models.config import ModelConfig, RawConfig, read_layer_windows
from asyncengine.models.llama import LlamaForCausalLM, read_decoder_config


def read_config(raw: RawConfig) -> ModelConfig:
    # Absent keys mean transformers' defaults; a null sliding_window means no window.
    window = 0 if raw.values.get("sliding_window", 4096) is None else raw.integer("sliding_window", 4096)
    every_layer = (True,) * raw.integer("num_hidden_layers")
    windows = read_layer_windows(raw, window, every_layer)
    return read_decoder_config(raw, default_kv_heads=8, layer_windows=windows)


class MistralForCausalLM(LlamaForCausalLM):
    pass
