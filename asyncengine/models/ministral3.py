"""Ministral3ForCausalLM (Mistral AI 2025): Mistral with yarn, and queries that grow with their position.

Of Mistral3ForConditionalGeneration the text model is served.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncengine.models.config import ModelConfig, QueryGrowth, RawConfig, read_one_window
from asyncengine.models.llama import LlamaForCausalLM, read_decoder_config

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262_144,
}
_ROPE: dict[str, Any] = {
    "type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Values of rope_parameters where there are none."""


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.with_defaults(_DEFAULTS)
    scaling = raw.get("rope_scaling", dict, None) or raw.get("rope_parameters", dict, None) or _ROPE
    raw = raw.changed({"rope_parameters": scaling, "rope_scaling": None})
    config = read_decoder_config(raw, layer_windows=read_one_window(raw))
    rope = RawConfig(scaling, f"{raw.source}, rope scaling")
    original = raw.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", config.max_positions)
    )
    return replace(config, query_growth=QueryGrowth(rope.number("llama_4_scaling_beta"), original))


class Ministral3ForCausalLM(LlamaForCausalLM):
    pass
