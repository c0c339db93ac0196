"""OlmoeForCausalLM (Muennighoff et al. 2024): a mixture in every layer, queries and keys normed over all heads."""

from __future__ import annotations

from dataclasses import replace

from asyncengine.models.config import ModelConfig, RawConfig
from asyncengine.models.llama import read_decoder_config
from asyncengine.models.mixture import MixtureForCausalLM, with_mixture


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.renamed({"num_local_experts": "num_experts"})
    raw = raw.with_defaults(
        {"num_experts": 64, "num_experts_per_tok": 8, "intermediate_size": 2048, "rms_norm_eps": 1e-5}
    )
    raw.require("clip_qkv", None)
    attention_bias = raw.flag("attention_bias", False)
    config = read_decoder_config(raw, qkv_bias=attention_bias, output_bias=attention_bias, qk_norm=True)
    return with_mixture(
        replace(config, qk_norm_over_all=True),
        raw,
        layers=(True,) * config.num_layers,
        intermediate_size=config.intermediate_size,
        sums_to_one=raw.flag("norm_topk_prob", False),
    )


class OlmoeForCausalLM(MixtureForCausalLM):
    pass
