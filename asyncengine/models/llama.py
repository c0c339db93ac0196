"""LlamaForCausalLM, and the decoder that its relatives share.

Touvron et al. 2023: RMS norm before each block, rotary positions, grouped queries, SiLU-gated MLP.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from asyncengine.kernels.ops import Activation, AttentionLayer, Handle, HeadNorms, KVSpec, ModelOps, Norm
from asyncengine.models.config import ModelConfig, RawConfig, require_full_attention
from asyncengine.models.decoder import (
    AttentionBlock,
    Decoder,
    DecoderLayer,
    FeedForward,
    Layer,
    MLPBlock,
    ParallelLayer,
    load_ends,
)
from asyncengine.models.files import excerpt
from asyncengine.models.rope_settings import read_rope, scaled_positions
from asyncengine.models.rotary import head_order, rotary_table
from asyncengine.models.weights.shard import Cut
from asyncengine.models.weights.source import WeightSource

logger = logging.getLogger(__name__)

_SILU: Mapping[str, Activation] = {"silu": "silu_mul", "swish": "silu_mul"}


def read_decoder_config(
    raw: RawConfig,
    *,
    activations: Mapping[str, Activation] = _SILU,
    activation_key: str = "hidden_act",
    eps_key: str = "rms_norm_eps",
    default_kv_heads: int | None = None,
    layer_windows: tuple[int, ...] | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    rope_theta: float = 10_000.0,
    partial_rotary: float | None = None,
) -> ModelConfig:
    """Read the configuration of a relative of Llama; keywords are the points in which they differ.

    ``activations`` maps the values of ``activation_key``, the first of which an absent key means. ``rope_theta`` and
    ``partial_rotary`` are as in ``read_rope``.
    """
    activation = raw.get(activation_key, str, next(iter(activations)))
    if activation not in activations:
        raise raw.unsupported(f"{activation_key} = {excerpt(activation)}")
    hidden_size = raw.integer("hidden_size")
    num_layers = raw.integer("num_hidden_layers")
    num_heads = raw.integer("num_attention_heads")
    # As in transformers: absent means the family's default, null means as many as query heads.
    absent = "num_key_value_heads" not in raw.values
    num_kv_heads = raw.integer("num_key_value_heads", default_kv_heads if absent and default_kv_heads else num_heads)
    if head_dim is None and raw.values.get("head_dim") is None and hidden_size % num_heads:
        raise raw.unsupported(f"hidden_size = {hidden_size} over {num_heads} heads without head_dim")
    head_dim = raw.integer("head_dim", head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise raw.unsupported(f"{num_heads} attention heads over {num_kv_heads} key-value heads")
    if head_dim % 2:
        raise raw.unsupported(f"an odd head_dim ({head_dim})")
    max_positions = raw.integer("max_position_embeddings")
    rope = read_rope(raw, max_positions, head_dim, theta=rope_theta, partial=partial_rotary)
    if layer_windows is None:
        layer_windows = require_full_attention(raw, num_layers, max_positions)
    return ModelConfig(
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=scaled_positions(rope, max_positions),
        norm_eps=raw.number(eps_key, 1e-6),
        activation=activations[activation],
        tie_word_embeddings=raw.flag("tie_word_embeddings", False),
        initializer_range=raw.number("initializer_range", 0.02),
        layer_scales=(head_dim**-0.5,) * num_layers,
        layer_caches=tuple(KVSpec(num_kv_heads, head_dim, window) for window in layer_windows),
        layer_ropes=(rope,) * num_layers,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def read_config(raw: RawConfig) -> ModelConfig:
    attention_bias = raw.flag("attention_bias", False)
    return read_decoder_config(
        raw, qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=raw.flag("mlp_bias", False)
    )


class LayerWeights:
    """The weights of one layer, in the names of Llama's checkpoints."""

    def __init__(
        self, config: ModelConfig, index: int, weights: WeightSource, ops: ModelOps, number: int | None = None
    ) -> None:
        """``number``: the layer's own number in the checkpoint; None: its index."""
        self.config = config
        self.index = index
        self.number = index if number is None else number
        self.weights = weights
        self.ops = ops

    @property
    def name(self) -> str:
        """Name of the layer's module."""
        return f"{self.config.layers}.{self.number}"

    def module(self, name: str) -> str:
        """The name of a module of the layer in the checkpoint, by its name in a Llama."""
        return f"{self.name}.{self.config.module_names.get(name, name)}"

    def linear(
        self,
        block: str,
        sizes: Mapping[str, int],
        in_size: int,
        cut: Cut,
        *,
        bias: bool,
        fused: str | None = None,
        stored_as: Mapping[str, str] = MappingProxyType({}),
        order: Tensor | None = None,
        gated: int = 0,
    ) -> Handle:
        """Projections ``sizes`` of one input, by name; side by side.

        With ``fused`` the checkpoint has one of that name, which holds them one below another; ``stored_as`` has the
        names under which it has others. The rows of all but values ("v") take an ``order`` within each head.
        With ``gated`` each head of queries ("q") has so many rows, and as many of its gate ("gate") behind.
        """
        total, first = sum(sizes.values()), 0
        matrices, biases = [], []
        for name, size in sizes.items():
            module = self.module(f"{block}.{fused or stored_as.get(name, name)}_proj")
            rows = (first, first + size) if fused else None
            how: Any = {"cut": cut, "rows": rows, "order": None if name == "v" else order}
            stored = total if fused else size
            if gated and name in ("q", "gate"):
                own = torch.arange(gated, 2 * gated) if name == "gate" else order
                how |= {"order": torch.arange(gated) if own is None else own, "head_rows": 2 * gated}
                stored = 2 * size
            matrices.append(self.weights.weight(module, stored, in_size, **how))
            biases.append(self.weights.bias(module, stored, **how) if bias else None)
            first += size
        return self.ops.make_linear(self.weights.side_by_side(matrices), biases)

    def norm(self, name: str, size: int) -> Norm:
        return make_norm(self.config, self.weights.tensor(f"{self.module(name)}.weight", size))

    def block_norm(self, name: str | None) -> Norm | None:
        """A norm of the residual, or of what is added to it; None if the layer has none there."""
        return None if name is None else self.norm(name, self.config.hidden_size)


def make_norm(config: ModelConfig, weight: Tensor) -> Norm:
    if config.norm_weight_offset:
        weight = weight.float() + config.norm_weight_offset
    return Norm(weight, torch.zeros_like(weight) if config.centered_norms else None, config.norm_eps)


def attention_block(layer: LayerWeights, cos_sin: Tensor | None, query_scales: Tensor | None = None) -> AttentionBlock:
    config, cache, names = layer.config, layer.config.kv_spec(layer.index), layer.config.layer_norms
    assert cache is not None
    dim, hidden, q_size, kv_size = cache.head_dim, config.hidden_size, config.num_heads * cache.head_dim, cache.width
    order = head_order(config.layer_ropes[layer.index], dim)
    sizes = {"q": q_size, "k": kv_size, "v": kv_size}
    qkv = layer.linear(
        "self_attn",
        sizes | {"gate": q_size} if config.gated_queries else sizes,
        hidden,
        "rows",
        bias=config.qkv_bias,
        fused="qkv" if config.fused_qkv else None,
        stored_as={"gate": "q"},
        order=order,
        gated=dim if config.gated_queries else 0,
    )
    head_norms: HeadNorms | None = None
    if config.qk_norm:
        sizes = {"q": q_size, "k": kv_size} if config.qk_norm_over_all else {"q": dim, "k": dim}
        q, k = (layer.norm(f"self_attn.{x}_norm", size).weight for x, size in sizes.items())
        if order is not None:
            q, k = (weight.view(-1, dim)[:, order].flatten() for weight in (q, k))
        head_norms = HeadNorms(q, k, config.norm_eps)
    sinks = None
    if config.attention_sinks:
        sinks = layer.weights.float32(f"{layer.name}.self_attn.sinks", config.num_heads)
    attention = AttentionLayer(
        layer.weights.own(config.num_heads), head_norms, cos_sin, config.layer_scales[layer.index], cache.window,
        config.score_softcap, query_scales, sinks,
    )  # fmt: skip
    output = layer.linear("self_attn", {"o": hidden}, q_size, "columns", bias=config.output_bias)
    before, behind = map(layer.block_norm, (names.before_attention, names.behind_attention))
    gate_size = layer.weights.own(q_size) if config.gated_queries else 0
    return AttentionBlock(before, qkv, attention, output, behind, gate_size)


def mlp_block(layer: LayerWeights, norm: Norm | None = None) -> MLPBlock:
    """The MLP of a layer; with a ``norm``, behind this one and not behind its own."""
    config, names = layer.config, layer.config.layer_norms
    hidden, inner = config.hidden_size, config.intermediate_size
    fused = "gate_up" if config.fused_gate_up else None
    up = layer.linear("mlp", {"gate": inner, "up": inner}, hidden, "rows", bias=config.mlp_bias, fused=fused)
    down = layer.linear("mlp", {"down": hidden}, inner, "columns", bias=config.mlp_bias)
    before, behind = map(layer.block_norm, (names.before_mlp, names.behind_mlp))
    return MLPBlock(norm or before, up, config.activation, down, behind)


def query_scales(config: ModelConfig, max_positions: int) -> Tensor | None:
    """float32 [max_positions]: factors on the queries; None where none is needed."""
    if config.query_growth is None or max_positions <= config.query_growth.positions:
        return None
    rate, positions = config.query_growth
    return 1 + rate * torch.log1p((torch.arange(max_positions) // positions).float())


def _tell_of_long_factors(config: ModelConfig, max_positions: int) -> None:
    for rope in config.ropes:
        if rope is not None and rope.kind == "longrope" and max_positions > rope.original_max_positions:
            logger.warning(
                "longrope: every text is computed with the factors for long ones, since the engine serves %d tokens; "
                "with max_model_len = %d it would have those for short ones",
                max_positions,
                rope.original_max_positions,
            )


class LlamaForCausalLM(Decoder):
    """The decoder with its embedding and its head, loaded while it is built.

    ``max_positions`` bounds the rotary tables, so it is the longest sequence that can be run.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: ModelOps, max_positions: int) -> None:
        kinds = list(zip(config.layer_ropes, config.head_dims, strict=True))
        tables = {
            (rope, dim): rotary_table(rope, dim, max_positions).to(ops.device)
            for rope, dim in dict.fromkeys(kinds)
            if rope in config.ropes
        }
        _tell_of_long_factors(config, max_positions)
        scales = query_scales(config, max_positions)
        if scales is not None:
            scales = scales.to(ops.device)
        ends = load_ends(config, weights, ops)
        layers: list[Layer] = []
        for index, kind in enumerate(kinds):
            layers.append(self.layer(LayerWeights(config, index, weights, ops), tables.get(kind), scales))
        weight = weights.tensor(f"{config.final_norm}.weight", config.hidden_size)
        norm = make_norm(config, weight)
        scale = config.embedding_scale
        if config.round_embedding_scale:
            scale = torch.tensor(scale, dtype=weight.dtype).item()
        super().__init__(
            ops,
            layers,
            norm=norm,
            **ends,
            embedding_scale=scale,
            logit_scale=config.logit_scale,
            logit_softcap=config.logit_softcap,
        )

    def layer(self, layer: LayerWeights, cos_sin: Tensor | None, query_scales: Tensor | None) -> Layer:
        """A layer of the decoder; for relatives that have another."""
        attention = attention_block(layer, cos_sin, query_scales)
        if layer.config.parallel_blocks:
            return ParallelLayer(attention, mlp_block(layer, attention.norm))
        return DecoderLayer(attention, self.feed_forward(layer))

    def feed_forward(self, layer: LayerWeights) -> FeedForward:
        """The feed-forward block of a layer; for relatives that have another."""
        return mlp_block(layer)
