"""MixtralForCausalLM: Mistral with a mixture of experts in every layer (Jiang et al. 2024)."""

from __future__ import annotations

from asyncengine.models.config import ExpertNames, ModelConfig, RawConfig, read_one_window
from asyncengine.models.llama import read_decoder_config
from asyncengine.models.mixture import MixtureForCausalLM, with_mixture

NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.renamed({"num_local_experts": "num_experts"})
    raw = raw.with_defaults(
        {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336, "rms_norm_eps": 1e-5}
    )
    config = read_decoder_config(raw, default_kv_heads=8, layer_windows=read_one_window(raw), rope_theta=1e6)
    return with_mixture(
        config,
        raw,
        layers=(True,) * config.num_layers,
        intermediate_size=config.intermediate_size,
        sums_to_one=True,
        names=NAMES,
    )


class MixtralForCausalLM(MixtureForCausalLM):
    pass
