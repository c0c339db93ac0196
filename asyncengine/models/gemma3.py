"""Gemma3ForCausalLM (Gemma team 2025): Gemma 2 with normed queries and keys, and a rotary base for each type of layer.

Five of six layers have a window. Of Gemma3ForConditionalGeneration the text model is served.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncengine.models import gemma2
from asyncengine.models.config import ModelConfig, RawConfig, read_period
from asyncengine.models.llama import LlamaForCausalLM
from asyncengine.models.rope_settings import read_rope, rope_of_layer_type

_DEFAULTS: dict[str, Any] = gemma2.DEFAULTS | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.with_defaults(_DEFAULTS)
    # transformers reads this key and caps no score by it.
    raw.require("attn_logit_softcapping", None)
    period = read_period(raw, "sliding_window_pattern", 6)
    slides = [(i + 1) % period != 0 for i in range(raw.integer("num_hidden_layers"))]
    full = rope_of_layer_type(raw, "full_attention", raw.number("rope_theta", 1_000_000.0))
    sliding = rope_of_layer_type(raw, "sliding_attention", raw.number("rope_local_base_freq", 10_000.0))
    config = gemma2.read_gemma_config(full, slides)
    positions = raw.integer("max_position_embeddings")  # that of the scaled positions
    local = read_rope(sliding, positions, config.head_dim)
    ropes = tuple(
        local if slides else rope for slides, rope in zip(config.layer_windows, config.layer_ropes, strict=True)
    )
    return replace(config, qk_norm=True, max_positions=positions, layer_ropes=ropes)


class Gemma3ForCausalLM(LlamaForCausalLM):
    pass
