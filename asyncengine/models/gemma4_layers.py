"""The layers of Gemma 4, and the blocks that other families do not have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine.kernels.ops import (
    AttentionLayer,
    Batch,
    Experts,
    Handle,
    HeadNorms,
    ModelOps,
    Norm,
    Residual,
    RoutingRule,
)
from asyncengine.kernels.weight import dense
from asyncengine.models.config import LayerInputs, Mixture, ModelConfig
from asyncengine.models.decoder import AttentionBlock, FeedForward, MLPBlock, Router
from asyncengine.models.llama import LayerWeights, mlp_block
from asyncengine.models.weights.source import WeightSource


def attention_block(layer: LayerWeights, cos_sin: Tensor | None) -> AttentionBlock:
    config, spec, names = layer.config, layer.config.kv_spec(layer.index), layer.config.layer_norms
    assert spec is not None
    shares = layer.index >= config.first_sharing_layer
    dim, hidden, q_size = spec.head_dim, config.hidden_size, config.num_heads * spec.head_dim
    sizes = {"q": q_size} if shares else {"q": q_size, "k": spec.width, "v": spec.width}
    stored_as = {"v": "k"} if config.keys_are_values and not spec.window else {}
    qkv = layer.linear("self_attn", sizes, hidden, "rows", bias=config.qkv_bias, stored_as=stored_as)
    q = layer.norm("self_attn.q_norm", dim).weight
    k = q if shares else layer.norm("self_attn.k_norm", dim).weight
    norms = HeadNorms(q, k, config.norm_eps, torch.ones(dim, device=layer.ops.device))
    attention = AttentionLayer(
        config.num_heads, norms, cos_sin, config.layer_scales[layer.index], spec.window, shares=shares
    )
    output = layer.linear("self_attn", {"o": hidden}, q_size, "columns", bias=config.output_bias)
    before, behind = map(layer.block_norm, (names.before_attention, names.behind_attention))
    return AttentionBlock(before, qkv, attention, output, behind)


class MixtureBesideMLP(NamedTuple):
    """residual += norm(norm(mlp(norm(residual))) + norm(experts(norm(residual)))), routed by a norm of its own."""

    mlp: MLPBlock
    behind_mlp: Norm
    before_router: Norm
    router: Router
    before_experts: Norm
    experts: Experts[Handle]
    behind_experts: Norm

    def forward(self, ops: ModelOps, residual: Residual, batch: Batch) -> None:
        x, mlp = ops.plain(residual, batch), self.mlp
        assert mlp.norm is not None
        _, routing = ops.route(residual, self.before_router, self.router.weight, self.router.rule, batch)
        mixed = ops.experts(ops.rms_norm(x, self.before_experts, batch), routing, self.experts, batch)
        inner = ops.activated(ops.linear(ops.rms_norm(x, mlp.norm, batch), mlp.up, batch), mlp.activation, batch)
        own = ops.rms_norm(ops.linear(inner, mlp.down, batch), self.behind_mlp, batch)
        ops.add_(own + ops.rms_norm(mixed, self.behind_experts, batch), residual, batch, mlp.output_norm)


def mixture_block(layer: LayerWeights, mixture: Mixture) -> MixtureBesideMLP:
    config, ops, weights = layer.config, layer.ops, layer.weights
    count, inner, hidden, name = mixture.num_experts, mixture.intermediate_size, config.hidden_size, layer.name
    up = weights.tensor(f"{name}.experts.gate_up_proj", count, 2 * inner, hidden)
    down = weights.tensor(f"{name}.experts.down_proj", count, hidden, inner)
    experts = ops.make_experts(
        [[dense(part) for part in both.split(inner)] for both in up], [dense(one) for one in down], config.activation
    )
    router = ops.make_linear([weights.table(f"{name}.router.proj", count, hidden)], [None])
    factors = weights.tensor(f"{name}.router.per_expert_scale", count).float()
    scale = weights.tensor(f"{name}.router.scale", hidden).float() * hidden**-0.5
    return MixtureBesideMLP(
        mlp_block(layer),
        layer.norm("post_feedforward_layernorm_1", hidden),
        Norm(scale, None, config.norm_eps),
        Router(router, RoutingRule(mixture.top_k, sums_to_one=mixture.sums_to_one, factors=factors)),
        layer.norm("pre_feedforward_layernorm_2", hidden),
        experts,
        layer.norm("post_feedforward_layernorm_2", hidden),
    )


class InputBlock(NamedTuple):
    """residual += norm(projection · (gelu(gate · residual) * the layer's own embedding of the token))."""

    gate: Handle
    projection: Handle
    norm: Norm

    def forward(self, ops: ModelOps, residual: Residual, own: Tensor, batch: Batch) -> None:
        gate = ops.linear(ops.plain(residual, batch), self.gate, batch)
        x = ops.activated(torch.cat((gate, own), 1), "gelu_tanh_mul", batch)
        ops.add_(ops.linear(x, self.projection, batch), residual, batch, self.norm)


class LayerEmbeddings(NamedTuple):
    """The layers' own embeddings of tokens: of their ids, and of their common embedding."""

    table: Tensor
    """[V, layers * size]"""
    projection: Handle
    norm: Norm

    @classmethod
    def load(cls, config: ModelConfig, inputs: LayerInputs, weights: WeightSource, ops: ModelOps) -> LayerEmbeddings:
        width, hidden = config.num_layers * inputs.size, config.hidden_size
        table = weights.tensor("model.embed_tokens_per_layer.weight", inputs.vocab_size, width)
        projection = ops.make_linear([weights.weight("model.per_layer_model_projection", width, hidden)], [None])
        norm = weights.tensor("model.per_layer_projection_norm.weight", inputs.size).float()
        # The product is to be divided by the root of hidden first, and the sum of both embeddings by that of 2.
        return cls(table, projection, Norm(norm * 0.5**0.5, None, config.norm_eps * hidden))

    def of_step(self, ops: ModelOps, residual: Residual, batch: Batch) -> Tensor:
        """[T, layers, size], for the residual that a step begins with."""
        size = len(self.norm.weight)
        x = ops.linear(ops.plain(residual, batch), self.projection, batch)
        rows: Tensor = F.embedding(ops.input_ids(batch), self.table) * (0.5 * size) ** 0.5
        normed = ops.rms_norm(x.reshape(-1, size), self.norm, batch)
        return normed.view(len(x), -1, size) + rows.view(len(x), -1, size)


class Gemma4Layer(NamedTuple):
    attention: AttentionBlock
    feed_forward: FeedForward
    inputs: InputBlock | None
    scale: Tensor
    """[1]: factor on the residual behind the layer"""

    def forward(
        self, ops: ModelOps, residual: Residual, cache: Any, batch: Batch, is_last: bool, own: Tensor | None = None
    ) -> None:
        """``own`` [T, size] is the layer's own embedding of the tokens."""
        self.attention.forward(ops, residual, cache, batch, is_last)
        self.feed_forward.forward(ops, residual, batch)
        if self.inputs is not None and own is not None:
            self.inputs.forward(ops, residual, own, batch)
        ops.plain(residual, batch).mul_(self.scale)


def load_layer(layer: LayerWeights, cos_sin: Tensor | None) -> Gemma4Layer:
    config, hidden = layer.config, layer.config.hidden_size
    attention = attention_block(layer, cos_sin)
    if config.wide_sharing_mlp and layer.index >= config.first_sharing_layer:
        wide = replace(config, intermediate_size=2 * config.intermediate_size)
        layer = LayerWeights(wide, layer.index, layer.weights, layer.ops)
    inputs = None
    if config.layer_inputs is not None:
        size, linear = config.layer_inputs.size, layer.ops.make_linear
        gate = layer.weights.weight(f"{layer.name}.per_layer_input_gate", size, hidden)
        projection = layer.weights.weight(f"{layer.name}.per_layer_projection", hidden, size)
        norm = layer.norm("post_per_layer_input_norm", hidden)
        inputs = InputBlock(linear([gate], [None]), linear([projection], [None]), norm)
    mixture = config.mixture
    block = mlp_block(layer) if mixture is None else mixture_block(layer, mixture)
    return Gemma4Layer(attention, block, inputs, layer.weights.tensor(f"{layer.name}.layer_scalar", 1))
