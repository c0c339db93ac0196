"""GptOssForCausalLM (OpenAI 2025): a mixture with biases in every layer, sinks in the softmax of attention.

Every other layer has a window. Published experts are in MXFP4. Where a kernel package does not multiply by their codes,
they are unpacked when they are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from asyncengine.kernels.ops import RoutingRule
from asyncengine.kernels.weight import dense
from asyncengine.models.config import ModelConfig, RawConfig, read_layer_windows
from asyncengine.models.decoder import FeedForward, MixtureBlock, Router
from asyncengine.models.llama import LayerWeights, LlamaForCausalLM, read_decoder_config
from asyncengine.models.mixture import with_mixture

_DEFAULTS: dict[str, Any] = {
    "num_experts": 128, "num_experts_per_tok": 4, "head_dim": 64, "intermediate_size": 2880, "rms_norm_eps": 1e-5,
    "sliding_window": 128,
}  # fmt: skip
_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.renamed({"num_local_experts": "num_experts"}).with_defaults(_DEFAULTS)
    if raw.values.get("rope_parameters") is None and raw.values.get("rope_scaling") is None:
        raw = raw.changed({"rope_parameters": _ROPE})
    raw.require("swiglu_alpha", 1.702)
    raw.require("swiglu_limit", 7.0)
    raw.require("hidden_act", "silu")
    window = 0 if raw.values["sliding_window"] is None else raw.integer("sliding_window")
    windows = read_layer_windows(raw, window, [i % 2 == 0 for i in range(raw.integer("num_hidden_layers"))])
    bias = raw.flag("attention_bias", True)
    config = read_decoder_config(
        raw, default_kv_heads=8, layer_windows=windows, qkv_bias=bias, output_bias=bias, rope_theta=150_000.0
    )
    packed = raw.get("quantization_config", dict, None) is not None
    return with_mixture(
        replace(config, activation="clamped_silu_mul", attention_sinks=True),
        raw,
        layers=(True,) * config.num_layers,
        intermediate_size=config.intermediate_size,
        sums_to_one=True,
        mxfp4=packed,
    )


class GptOssForCausalLM(LlamaForCausalLM):
    def feed_forward(self, layer: LayerWeights) -> FeedForward:
        config, mixture, ops, weights = layer.config, layer.config.mixture, layer.ops, layer.weights
        assert mixture is not None
        block, count = f"{layer.name}.mlp", mixture.num_experts
        hidden, wide = config.hidden_size, 2 * mixture.intermediate_size
        # Gate and up lie row by row in turn; here one behind the other.
        halves = [torch.arange(first, wide, 2, device=ops.device) for first in (0, 1)]
        order, packed = torch.cat(halves), mixture.mxfp4
        names = [f"{block}.experts.{name}_proj" for name in ("gate_up", "down")]
        if packed and ops.expert_codes:
            up = weights.expert_codes(names[0], count, wide, hidden, halves)
            down = weights.expert_codes(names[1], count, hidden, wide // 2, [torch.arange(hidden, device=ops.device)])
        else:
            matrices = weights.expert_matrices(names[0], count, wide, hidden, order, mxfp4=packed)
            up = [[dense(half) for half in matrix.chunk(2)] for matrix in matrices]
            matrices = weights.expert_matrices(names[1], count, hidden, wide // 2, mxfp4=packed)
            down = [[dense(matrix)] for matrix in matrices]
        up_bias = weights.tensor(f"{block}.experts.gate_up_proj_bias", count, wide)[:, order]
        down_bias = weights.tensor(f"{block}.experts.down_proj_bias", count, hidden)
        router = ops.make_linear(
            [weights.table(f"{block}.router", count, hidden)], [weights.bias(f"{block}.router", count)]
        )
        experts = ops.make_experts(
            up,
            [weight for [weight] in down],
            config.activation,
            [list(bias.chunk(2)) for bias in up_bias],
            list(down_bias),
        )
        norm = layer.block_norm(config.layer_norms.before_mlp)
        return MixtureBlock(norm, Router(router, RoutingRule(mixture.top_k, sums_to_one=True)), experts)
