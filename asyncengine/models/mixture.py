"""Mixtures of experts in the place of MLPs: what families with experts have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncengine.kernels.ops import RoutingRule
from asyncengine.models.config import Mixture, ModelConfig, RawConfig
from asyncengine.models.decoder import FeedForward, MixtureBlock, Router, SharedExpert
from asyncengine.models.files import excerpt
from asyncengine.models.llama import LayerWeights, LlamaForCausalLM, mlp_block

LARGEST_GROUP_COUNT = 1 << 8


def with_mixture(config: ModelConfig, raw: RawConfig, *, layers: tuple[bool, ...], **settings: Any) -> ModelConfig:
    """Return the config with a mixture in these layers. Keywords are fields of ``Mixture``; the number of experts and
    of those that compute a token are read here, unless they are given."""
    mixture = Mixture(
        settings.pop("num_experts", None) or raw.integer("num_experts"),
        settings.pop("top_k", None) or raw.integer("num_experts_per_tok"),
        layers=layers,
        **settings,
    )
    if mixture.top_k > mixture.num_experts:
        raise raw.unsupported(f"num_experts_per_tok = {mixture.top_k} of {mixture.num_experts} experts")
    return replace(config, mixture=mixture)


def read_groups(raw: RawConfig, num_experts: int, top_k: int) -> dict[str, int]:
    """The number of groups of experts and of those that a token's experts are in, as fields of ``Mixture``."""
    groups, kept = (raw.get(key, int, 1) for key in ("n_group", "topk_group"))
    if not 1 <= kept <= groups <= LARGEST_GROUP_COUNT or num_experts % groups:
        raise raw.unsupported(f"n_group = {groups} and topk_group = {kept} with {num_experts} experts")
    if groups > 1 and (num_experts // groups < 2 or top_k > kept * (num_experts // groups)):
        raise raw.unsupported(f"num_experts_per_tok = {top_k} of {kept} groups of {num_experts // groups} experts")
    return {"groups": groups, "kept_groups": kept}


def read_sparse_layers(raw: RawConfig, num_layers: int) -> tuple[bool, ...]:
    """The layers that have a mixture: each ``decoder_sparse_step``-th but for those of mlp_only_layers."""
    step, dense = raw.integer("decoder_sparse_step", 1), raw.get("mlp_only_layers", list, [])
    if not all(isinstance(index, int) for index in dense):
        raise raw.unsupported(f"mlp_only_layers = {excerpt(dense)}")
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(num_layers))


def mixture_block(layer: LayerWeights) -> MixtureBlock:
    config, mixture, ops, weights = layer.config, layer.config.mixture, layer.ops, layer.weights
    assert mixture is not None
    names, hidden, inner = mixture.names, config.hidden_size, mixture.intermediate_size
    block = f"{layer.name}.{names.block}"
    modules = [f"{block}.experts.{index}" for index in range(mixture.num_experts)]
    up = [
        weights.side_by_side([weights.weight(f"{module}.{name}", inner, hidden, cut="rows") for name in names.first])
        for module in modules
    ]
    down = [weights.weight(f"{module}.{names.down}", hidden, inner, cut="columns") for module in modules]
    router = ops.make_linear([weights.table(f"{block}.gate", mixture.num_experts, hidden)], [None])
    correction = None
    if mixture.correction:
        correction = weights.float32(f"{block}.{mixture.correction}", mixture.num_experts)
    rule = RoutingRule(
        mixture.top_k, mixture.scores, mixture.sums_to_one, mixture.scale, correction, mixture.groups,
        mixture.kept_groups, mixture.sum_offset, mixture.group_scores,
    )  # fmt: skip
    return MixtureBlock(
        layer.block_norm(config.layer_norms.before_mlp),
        Router(router, rule),
        ops.make_experts(up, down, config.activation),
        layer.block_norm(config.layer_norms.behind_mlp),
        _shared_expert(layer, block, mixture) if mixture.shared_size else None,
    )


def _shared_expert(layer: LayerWeights, block: str, mixture: Mixture) -> SharedExpert:
    config, ops, weights, inner = layer.config, layer.ops, layer.weights, mixture.shared_size
    module, names, hidden = f"{block}.{mixture.names.shared}", mixture.names, config.hidden_size
    up = weights.side_by_side([weights.weight(f"{module}.{name}", inner, hidden, cut="rows") for name in names.first])
    down = weights.weight(f"{module}.{names.down}", hidden, inner, cut="columns")
    gate = None
    if mixture.gated_share:
        gate = ops.make_linear([weights.table(f"{module}_gate", 1, hidden)], [None])
    return SharedExpert(ops.make_linear(up, [None] * len(up)), config.activation, ops.make_linear([down], [None]), gate)


class MixtureForCausalLM(LlamaForCausalLM):
    """A relative of Llama with mixtures of experts in some of its layers, or in all."""

    def feed_forward(self, layer: LayerWeights) -> FeedForward:
        assert layer.config.mixture is not None
        return mixture_block(layer) if layer.config.mixture.layers[layer.index] else mlp_block(layer)
