"""Olmo3ForCausalLM (OLMo team 2025): OLMo 2 with a window in three of four layers, which yarn leaves alone."""

from __future__ import annotations

from dataclasses import replace

from asyncengine.models.config import ModelConfig, RawConfig, read_layer_windows
from asyncengine.models.llama import LlamaForCausalLM
from asyncengine.models.olmo2 import read_olmo_config
from asyncengine.models.rope_settings import read_rope, rope_of_layer_type

_THETA = 500_000.0


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.with_defaults({"sliding_window": 4096})
    window = 0 if raw.values["sliding_window"] is None else raw.integer("sliding_window")
    slides = [(i + 1) % 4 != 0 for i in range(raw.integer("num_hidden_layers"))]
    windows = read_layer_windows(raw, window, slides)
    full = rope_of_layer_type(raw, "full_attention", raw.number("rope_theta", _THETA))
    config = read_olmo_config(full, layer_windows=windows)
    # transformers takes rope_theta for the other layers alone.
    sliding = rope_of_layer_type(raw, "sliding_attention", _THETA)
    local = read_rope(sliding, raw.integer("max_position_embeddings"), config.head_dim)
    ropes = tuple(local if slides else rope for slides, rope in zip(windows, config.layer_ropes, strict=True))
    return replace(config, layer_ropes=ropes)


class Olmo3ForCausalLM(LlamaForCausalLM):
    pass
