"""Qwen2MoeForCausalLM: Qwen2 with a mixture of experts beside one that computes every token, behind a gate.

Qwen team 2024: "Qwen1.5-MoE".
"""

from __future__ import annotations

from asyncengine.models.config import ModelConfig, RawConfig, read_layer_windows
from asyncengine.models.llama import read_decoder_config
from asyncengine.models.mixture import MixtureForCausalLM, read_sparse_layers, with_mixture


def read_windows(raw: RawConfig) -> tuple[int, ...]:
    """The window of each layer, from layer_types or, without them, in every other layer below max_window_layers."""
    window = 0
    if raw.flag("use_sliding_window", False) and raw.values.get("sliding_window", 4096) is not None:
        window = raw.integer("sliding_window", 4096)
    last = raw.get("max_window_layers", int, 28)
    slides = [i % 2 == 0 and i < last for i in range(raw.integer("num_hidden_layers"))]
    return read_layer_windows(raw, window, slides)


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.renamed({"num_local_experts": "num_experts"})
    raw = raw.with_defaults({"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408})
    config = read_decoder_config(
        raw, default_kv_heads=16, layer_windows=read_windows(raw), qkv_bias=raw.flag("qkv_bias", True)
    )
    return with_mixture(
        config,
        raw,
        layers=read_sparse_layers(raw, config.num_layers),
        intermediate_size=raw.integer("moe_intermediate_size"),
        sums_to_one=raw.flag("norm_topk_prob", False),
        shared_size=raw.integer("shared_expert_intermediate_size", 5632),
        gated_share=True,
    )


class Qwen2MoeForCausalLM(MixtureForCausalLM):
    pass
