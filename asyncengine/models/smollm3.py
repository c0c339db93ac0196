"""SmolLM3ForCausalLM (Hugging Face 2025): Llama whose every fourth layer does not rotate queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncengine.models.config import ModelConfig, RawConfig, read_layer_windows, read_period
from asyncengine.models.files import excerpt
from asyncengine.models.llama import LlamaForCausalLM, read_decoder_config

_DEFAULTS: dict[str, Any] = {"num_key_value_heads": 4, "tie_word_embeddings": True}


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.with_defaults(_DEFAULTS)
    rotated = _rotated_layers(raw)
    window = 0 if raw.values.get("sliding_window") is None else raw.integer("sliding_window")
    slides = raw.flag("use_sliding_window", False)
    attention_bias = raw.flag("attention_bias", False)
    config = read_decoder_config(
        raw,
        layer_windows=read_layer_windows(raw, window, [slides and not rotates for rotates in rotated]),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=raw.flag("mlp_bias", False),
        rope_theta=2_000_000.0,
    )
    ropes = tuple(rope if rotates else None for rope, rotates in zip(config.layer_ropes, rotated, strict=True))
    return replace(config, layer_ropes=ropes)


def _rotated_layers(raw: RawConfig) -> list[bool]:
    """The layers that rotate: no_rope_layers holds 1 for these, and 0 for the others."""
    num_layers = raw.integer("num_hidden_layers")
    values, interval = raw.get("no_rope_layers", list, None), read_period(raw, "no_rope_layer_interval", 4)
    if values is None:
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if len(values) < num_layers or any(isinstance(v, bool) or v not in (0, 1) for v in values):
        raise raw.unsupported(f"no_rope_layers = {excerpt(values)} for {num_layers} layers")
    return [value == 1 for value in values[:num_layers]]


class SmolLM3ForCausalLM(LlamaForCausalLM):
    pass
