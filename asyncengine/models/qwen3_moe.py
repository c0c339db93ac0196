"""Qwen3MoeForCausalLM: Qwen3 with a mixture of experts in the place of the MLP (Yang et al. 2025)."""

from __future__ import annotations

from dataclasses import replace

from asyncengine.kernels.ops import RoutingRule
from asyncengine.models.config import Mixture, ModelConfig, RawConfig, read_layer_windows, read_one_window
from asyncengine.models.decoder import FeedForward, MixtureBlock, Router
from asyncengine.models.files import excerpt
from asyncengine.models.llama import LayerWeights, LlamaForCausalLM, mlp_block, read_decoder_config


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.renamed({"num_local_experts": "num_experts"})
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
    return replace(config, mixture=_read_mixture(raw, config))


def _read_mixture(raw: RawConfig, config: ModelConfig) -> Mixture:
    num_experts, top_k = raw.integer("num_experts", 128), raw.integer("num_experts_per_tok", 8)
    if top_k > num_experts:
        raise raw.unsupported(f"num_experts_per_tok = {top_k} of {num_experts} experts")
    step, dense = raw.integer("decoder_sparse_step", 1), raw.get("mlp_only_layers", list, [])
    if not all(isinstance(index, int) for index in dense):
        raise raw.unsupported(f"mlp_only_layers = {excerpt(dense)}")
    return Mixture(
        num_experts,
        top_k,
        raw.integer("moe_intermediate_size", 768),
        raw.flag("norm_topk_prob", False),
        tuple(index not in dense and (index + 1) % step == 0 for index in range(config.num_layers)),
    )


def mixture_block(layer: LayerWeights) -> MixtureBlock:
    config, mixture, ops = layer.config, layer.config.mixture, layer.ops
    assert mixture is not None
    hidden, inner, block = config.hidden_size, mixture.intermediate_size, f"model.layers.{layer.index}.mlp"
    modules = [f"{block}.experts.{index}" for index in range(mixture.num_experts)]
    up = [
        [layer.weights.weight(f"{module}.{name}_proj", inner, hidden, cut="rows") for name in ("gate", "up")]
        for module in modules
    ]
    down = [layer.weights.weight(f"{module}.down_proj", hidden, inner, cut="columns") for module in modules]
    router = ops.make_linear([layer.weights.table(f"{block}.gate", mixture.num_experts, hidden)], [None])
    return MixtureBlock(
        layer.block_norm(config.layer_norms.before_mlp),
        Router(router, RoutingRule(mixture.top_k, sums_to_one=mixture.sums_to_one)),
        ops.make_experts(up, down, config.activation),
        layer.block_norm(config.layer_norms.behind_mlp),
    )


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    def feed_forward(self, layer: LayerWeights) -> FeedForward:
        assert layer.config.mixture is not None
        return mixture_block(layer) if layer.config.mixture.layers[layer.index] else mlp_block(layer)
