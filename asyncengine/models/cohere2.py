"""Cohere2ForCausalLM, of Command R7B and Command A (Cohere 2024): attention and MLP beside each other.

Layers with a window rotate queries and keys; every fourth layer has no window and no positions.
"""

from __future__ import annotations

from dataclasses import replace

from asyncengine.models.config import LayerNorms, ModelConfig, RawConfig, read_layer_windows, read_period
from asyncengine.models.llama import LlamaForCausalLM, read_decoder_config


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.with_defaults({"sliding_window": 4096, "layer_norm_eps": 1e-5, "tie_word_embeddings": True})
    window = 0 if raw.values["sliding_window"] is None else raw.integer("sliding_window")
    period = read_period(raw, "sliding_window_pattern", 4)
    slides = [(i + 1) % period != 0 for i in range(raw.integer("num_hidden_layers"))]
    attention_bias = raw.flag("attention_bias", False)
    config = read_decoder_config(
        raw,
        eps_key="layer_norm_eps",
        layer_windows=read_layer_windows(raw, window, slides),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
    )
    ropes = zip(config.layer_ropes, config.layer_windows, strict=True)
    return replace(
        config,
        layer_ropes=tuple(replace(rope, interleaved=True) if rope and slides else None for rope, slides in ropes),
        layer_norms=LayerNorms(before_mlp=None),
        centered_norms=True,
        parallel_blocks=True,
        logit_scale=raw.number("logit_scale", 0.0625),
    )


class Cohere2ForCausalLM(LlamaForCausalLM):
    pass
