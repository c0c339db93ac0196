"""SeedOssForCausalLM (ByteDance 2025): Llama with biases of queries, keys and values, and wide heads."""

from __future__ import annotations

from asyncengine.models.config import ModelConfig, RawConfig
from asyncengine.models.llama import LlamaForCausalLM, read_decoder_config


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.with_defaults({"num_key_value_heads": 8, "head_dim": 128})
    return read_decoder_config(
        raw,
        qkv_bias=raw.flag("attention_bias", True),
        output_bias=raw.flag("attention_out_bias", False),
        mlp_bias=raw.flag("mlp_bias", False),
    )


class SeedOssForCausalLM(LlamaForCausalLM):
    pass
