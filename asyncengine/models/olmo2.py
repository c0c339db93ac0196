"""Olmo2ForCausalLM (OLMo team 2024): norms behind the blocks, and queries and keys normed over all heads together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncengine.models.config import NORMS_BEHIND, ModelConfig, RawConfig
from asyncengine.models.llama import LlamaForCausalLM, read_decoder_config


def read_olmo_config(raw: RawConfig, **differences: Any) -> ModelConfig:
    """Read what OLMo 2 and 3 have in common; keywords are those of ``read_decoder_config``."""
    attention_bias = raw.flag("attention_bias", False)
    config = read_decoder_config(
        raw.with_defaults({"rms_norm_eps": 1e-5}),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        **differences,
    )
    return replace(config, qk_norm_over_all=True, layer_norms=NORMS_BEHIND)


def read_config(raw: RawConfig) -> ModelConfig:
    return read_olmo_config(raw)


class Olmo2ForCausalLM(LlamaForCausalLM):
    pass
