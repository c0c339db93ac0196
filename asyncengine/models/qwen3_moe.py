"""Qwen3MoeForCausalLM: Qwen3 with a mixture of experts in the place of the MLP (Yang et al. 2025)."""

from __future__ import annotations

from asyncengine.models.config import ModelConfig, RawConfig, read_layer_windows, read_one_window
from asyncengine.models.llama import read_decoder_config
from asyncengine.models.mixture import MixtureForCausalLM, read_sparse_layers, with_mixture


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.renamed({"num_local_experts": "num_experts"})
    raw = raw.with_defaults({"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768})
    attention_bias = raw.flag("attention_bias", False)
    if raw.flag("use_sliding_window", False):
        windows = read_one_window(raw.with_defaults({"sliding_window": 4096}))
    else:
        windows = read_layer_windows(raw, 0, (False,) * raw.integer("num_hidden_layers"))
    config = read_decoder_config(
        raw,
        default_kv_heads=4,
        layer_windows=windows,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
    )
    return with_mixture(
        config,
        raw,
        layers=read_sparse_layers(raw, config.num_layers),
        intermediate_size=raw.integer("moe_intermediate_size"),
        sums_to_one=raw.flag("norm_topk_prob", False),
    )


class Qwen3MoeForCausalLM(MixtureForCausalLM):
    pass
