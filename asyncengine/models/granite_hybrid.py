"""GraniteMoeHybridForCausalLM, of Granite 4 (IBM 2025): Granite with Mamba-2 in most layers.

Each layer has an MLP, which the checkpoint calls shared, and where there are experts a mixture beside it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncengine.kernels.ops import RoutingRule
from asyncengine.kernels.weight import dense
from asyncengine.models.config import ModelConfig, RawConfig
from asyncengine.models.decoder import FeedForward, MixtureBlock, MLPBlock, Router, SharedExpert
from asyncengine.models.files import excerpt
from asyncengine.models.granite import with_multipliers
from asyncengine.models.llama import LayerWeights, read_decoder_config
from asyncengine.models.mixture import with_mixture
from asyncengine.models.state_space import DEFAULTS, StateSpaceForCausalLM, read_kinds, read_state_space, with_mixers

_DEFAULTS: dict[str, Any] = DEFAULTS | {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "num_local_experts": 8,
    "num_experts_per_tok": 2, "shared_intermediate_size": 1024,
}  # fmt: skip


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.with_defaults(_DEFAULTS).renamed({"layers_block_type": "layer_types"})
    biased = raw.flag("attention_bias", False)
    config = read_decoder_config(raw.changed({"layer_types": None}), qkv_bias=biased, output_bias=biased)
    positions = raw.get("position_embedding_type", str, None)
    if positions not in (None, "nope", "rope"):
        raise raw.unsupported(f"position_embedding_type = {excerpt(positions)}")
    mixers = read_state_space(raw, raw.integer("mamba_expand") * config.hidden_size)
    config = with_mixers(
        with_multipliers(config, raw),
        mixers,
        read_kinds(raw, "layer_types", ["mamba"] * config.num_layers),
        layer_ropes=config.layer_ropes if positions == "rope" else (None,) * config.num_layers,
    )
    shared = raw.integer("shared_intermediate_size")
    if raw.get("num_local_experts", int) == 0:
        return replace(config, intermediate_size=shared)
    return with_mixture(
        config,
        raw,
        num_experts=raw.integer("num_local_experts"),
        layers=(True,) * config.num_layers,
        intermediate_size=config.intermediate_size,
        sums_to_one=True,
        shared_size=shared,
    )


def _shared_mlp(layer: LayerWeights, size: int) -> SharedExpert:
    config, weights, name, hidden = layer.config, layer.weights, f"{layer.name}.shared_mlp", layer.config.hidden_size
    up = [weights.weight(f"{name}.input_linear", 2 * size, hidden, rows=rows) for rows in ((0, size), (size, 2 * size))]
    down = weights.weight(f"{name}.output_linear", hidden, size)
    ops = layer.ops
    return SharedExpert(ops.make_linear(up, [None, None]), config.activation, ops.make_linear([down], [None]))


class GraniteMoeHybridForCausalLM(StateSpaceForCausalLM):
    def feed_forward(self, layer: LayerWeights) -> FeedForward:
        config, mixture, weights, ops = layer.config, layer.config.mixture, layer.weights, layer.ops
        norm = layer.block_norm(config.layer_norms.before_mlp)
        if mixture is None:
            mlp = _shared_mlp(layer, config.intermediate_size)
            return MLPBlock(norm, mlp.up, mlp.activation, mlp.down)
        block, count, hidden, inner = (
            f"{layer.name}.block_sparse_moe", mixture.num_experts, config.hidden_size, mixture.intermediate_size
        )  # fmt: skip
        up = weights.tensor(f"{block}.input_linear.weight", count, 2 * inner, hidden)
        down = weights.tensor(f"{block}.output_linear.weight", count, hidden, inner)
        experts = ops.make_experts(
            [[dense(part) for part in weight.chunk(2)] for weight in up],
            [dense(weight) for weight in down],
            config.activation,
        )
        router = ops.make_linear([weights.table(f"{block}.router.layer", count, hidden)], [None])
        rule = RoutingRule(mixture.top_k, sums_to_one=True)
        shared = _shared_mlp(layer, mixture.shared_size)
        return MixtureBlock(norm, Router(router, rule), experts, shared=shared)
