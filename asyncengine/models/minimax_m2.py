"""MiniMaxM2ForCausalLM (MiniMax 2025): sigmoid routing in every layer, and queries and keys normed over all heads.

A part of each head may stay as it is: published files call the rotated part rotary_dim.
"""

from __future__ import annotations

from dataclasses import replace

from asyncengine.models.config import ExpertNames, ModelConfig, RawConfig
from asyncengine.models.llama import read_decoder_config
from asyncengine.models.mixture import MixtureForCausalLM, with_mixture

NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.renamed({"num_local_experts": "num_experts"})
    raw = raw.with_defaults({"num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 1536, "head_dim": 128})
    rotated = 1.0
    if raw.values.get("rotary_dim") is not None:
        rotated = raw.integer("rotary_dim") / raw.integer("head_dim")
    config = read_decoder_config(raw, default_kv_heads=8, qk_norm=True, rope_theta=5e6, partial_rotary=rotated)
    return with_mixture(
        replace(config, qk_norm_over_all=True),
        raw,
        layers=(True,) * config.num_layers,
        intermediate_size=config.intermediate_size,
        scores="sigmoid",
        correction="e_score_correction_bias",
        sums_to_one=True,
        names=NAMES,
    )


class MiniMaxM2ForCausalLM(MixtureForCausalLM):
    pass
