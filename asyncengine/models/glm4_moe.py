"""Glm4MoeForCausalLM, of GLM-4.5 to 4.7 (GLM team 2025): sigmoid routing, beside an expert for every token.

A part of each head is rotated. The first layers have no mixture.
"""

from __future__ import annotations

from asyncengine.models.config import ExpertNames, ModelConfig, RawConfig
from asyncengine.models.llama import read_decoder_config
from asyncengine.models.mixture import MixtureForCausalLM, read_groups, with_mixture

NAMES = ExpertNames(shared="shared_experts")


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.renamed({"num_local_experts": "n_routed_experts"})
    raw = raw.with_defaults({"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "moe_intermediate_size": 1408})
    config = read_decoder_config(
        raw,
        default_kv_heads=8,
        qkv_bias=raw.flag("attention_bias", False),
        qk_norm=raw.flag("use_qk_norm", False),
        partial_rotary=0.5,
    )
    experts, inner = raw.integer("n_routed_experts", 128), raw.integer("moe_intermediate_size")
    dense = raw.get("first_k_dense_replace", int, 1)
    return with_mixture(
        config,
        raw,
        num_experts=experts,
        layers=tuple(index >= dense for index in range(config.num_layers)),
        intermediate_size=inner,
        scores="sigmoid",
        correction="gate.e_score_correction_bias",
        sums_to_one=raw.flag("norm_topk_prob", True),
        scale=raw.number("routed_scaling_factor", 1.0),
        shared_size=inner * raw.integer("n_shared_experts", 1),
        names=NAMES,
        **read_groups(raw, experts, raw.integer("num_experts_per_tok")),
    )


class Glm4MoeForCausalLM(MixtureForCausalLM):
    pass
