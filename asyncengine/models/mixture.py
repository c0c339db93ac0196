"""Mixtures of experts in the place of MLPs: what families with experts have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from asyncengine.kernels.grouped import are_alike
from asyncengine.kernels.ops import RoutingRule
from asyncengine.kernels.weight import PackedWeight
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


class _Expert(NamedTuple):
    """Weights of an expert: those of its first product, and that of its second."""

    up: list[PackedWeight]
    down: PackedWeight

    def is_like(self, other: _Expert) -> bool:
        """Return whether both have the same sizes and formats, so that a kernel package can put them in one stack."""
        pairs = zip((*self.up, self.down), (*other.up, other.down), strict=True)
        return self.down.in_features == other.down.in_features and all(are_alike(pair) for pair in pairs)


def mixture_block(layer: LayerWeights) -> MixtureBlock:
    """The mixture of a layer.

    A shared expert that is like the others is one more of them, and its gate is one more row of the router. Any other
    shared expert is computed by itself.
    """
    config, mixture, ops, weights = layer.config, layer.config.mixture, layer.ops, layer.weights
    assert mixture is not None
    names, hidden = mixture.names, config.hidden_size
    block = f"{layer.name}.{names.block}"
    experts = [
        _read_expert(layer, f"{block}.experts.{index}", mixture.intermediate_size)
        for index in range(mixture.num_experts)
    ]
    router = [weights.table(f"{block}.gate", mixture.num_experts, hidden)]
    correction = None
    if mixture.correction:
        correction = weights.float32(f"{block}.{mixture.correction}", mixture.num_experts)
    rule = RoutingRule(
        mixture.top_k, mixture.scores, mixture.sums_to_one, mixture.scale, correction, mixture.groups,
        mixture.kept_groups, mixture.sum_offset, mixture.group_scores,
    )  # fmt: skip
    apart = None
    if mixture.shared_size:
        shared = _read_expert(layer, f"{block}.{names.shared}", mixture.shared_size)
        gate = [weights.table(f"{block}.{names.shared}_gate", 1, hidden)] if mixture.gated_share else []
        if shared.is_like(experts[0]):
            experts.append(shared)
            router = weights.side_by_side([*router, *gate])
            rule = rule._replace(shared="gated" if gate else "plain")
        else:
            apart = _shared_expert(layer, shared, gate)
    return MixtureBlock(
        layer.block_norm(config.layer_norms.before_mlp),
        Router(ops.make_linear(router, [None] * len(router)), rule),
        ops.make_experts([expert.up for expert in experts], [expert.down for expert in experts], config.activation),
        layer.block_norm(config.layer_norms.behind_mlp),
        apart,
    )


def _read_expert(layer: LayerWeights, module: str, inner: int) -> _Expert:
    mixture, weights, hidden = layer.config.mixture, layer.weights, layer.config.hidden_size
    assert mixture is not None
    first = [weights.weight(f"{module}.{name}", inner, hidden, cut="rows") for name in mixture.names.first]
    down = weights.weight(f"{module}.{mixture.names.down}", hidden, inner, cut="columns")
    return _Expert(weights.side_by_side(first), down)


def _shared_expert(layer: LayerWeights, expert: _Expert, gate: list[PackedWeight]) -> SharedExpert:
    make = layer.ops.make_linear
    up, down = make(expert.up, [None] * len(expert.up)), make([expert.down], [None])
    return SharedExpert(up, layer.config.activation, down, make(gate, [None]) if gate else None)


class MixtureForCausalLM(LlamaForCausalLM):
    """A relative of Llama with mixtures of experts in some of its layers, or in all."""

    def feed_forward(self, layer: LayerWeights) -> FeedForward:
        assert layer.config.mixture is not None
        return mixture_block(layer) if layer.config.mixture.layers[layer.index] else mlp_block(layer)
