"""Latent attention of a model: its settings and its weights."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from asyncengine.kernels.latent import LatentLayer
from asyncengine.kernels.ops import Norm
from asyncengine.kernels.weight import DENSE, tensors_of
from asyncengine.models.config import ModelConfig, RawConfig
from asyncengine.models.decoder import LatentAttentionBlock
from asyncengine.models.llama import LayerWeights, read_decoder_config
from asyncengine.models.mixer_shapes import Latent
from asyncengine.models.rotary import RopeConfig, head_order

NORM_EPS = 1e-6
"""Epsilon of the norms of latents, whatever that of other norms is."""


def read_latent_config(raw: RawConfig, *, default_rank: int | None, interleaved: bool) -> ModelConfig:
    """Read the configuration of a relative of Llama with latent attention in every layer.

    The sizes of heads have the family's defaults in ``raw`` already. ``default_rank`` is that of q_lora_rank, whose
    null means that queries are made of the residual. ``interleaved``: neighbours are rotated together.
    """
    rank = raw.values.get("q_lora_rank", default_rank)
    latent = Latent(
        raw.integer("kv_lora_rank"),
        raw.integer("qk_rope_head_dim"),
        raw.integer("qk_nope_head_dim"),
        raw.integer("v_head_dim"),
        0 if rank is None else raw.integer("q_lora_rank", default_rank or 0),
    )
    biased = raw.flag("attention_bias", False)
    # Only a part of each head is rotated, and a head of this size is what tables of positions are for.
    sizes = {"head_dim": latent.rope_dim, "num_key_value_heads": None}
    config = read_decoder_config(raw.changed(sizes), qkv_bias=biased, output_bias=biased)
    ropes = tuple(rope and replace(rope, interleaved=interleaved) for rope in config.layer_ropes)
    scale = latent.query_dim**-0.5 * _scale_of_positions(raw, config.layer_ropes[0])
    return replace(
        config,
        latent=latent,
        num_kv_heads=1,
        layer_caches=(latent.spec,) * config.num_layers,
        layer_scales=(scale,) * config.num_layers,
        layer_ropes=ropes,
    )


def _scale_of_positions(raw: RawConfig, rope: RopeConfig | None) -> float:
    """The factor that mscale_all_dim of scaled positions puts on the scores."""
    scaling = raw.get("rope_scaling", dict, None) or raw.get("rope_parameters", dict, None) or {}
    settings = RawConfig(scaling, f"{raw.source}, rope scaling")
    if rope is None or rope.kind == "default" or not settings.get("mscale_all_dim", (int, float), 0):
        return 1.0
    if rope.kind == "dynamic":
        raise settings.unsupported("mscale_all_dim with dynamic scaling")
    growth = 0.1 * settings.number("mscale_all_dim") * math.log(rope.factor) if rope.factor > 1 else 0.0
    return (1 + growth) ** 2


def latent_block(layer: LayerWeights, cos_sin: Tensor | None) -> LatentAttentionBlock:
    """The latent attention of a layer, in the names of DeepSeek's checkpoints."""
    config, weights, ops, latent = layer.config, layer.weights, layer.ops, layer.config.latent
    assert latent is not None
    assert cos_sin is not None
    name, hidden, heads = f"{layer.name}.self_attn", config.hidden_size, config.num_heads
    turned = head_order(config.layer_ropes[layer.index], latent.rope_dim)
    of_query, of_row = (_behind(size, turned) for size in (latent.key_dim, latent.rank))
    rank, of_queries = latent.query_rank, heads * latent.query_dim
    # Ranks share heads. Each makes all latents.
    own, own_queries = weights.own(heads), weights.own(of_queries)
    matrices, biases = [], []
    if rank:
        matrices.append(weights.weight(f"{name}.q_a_proj", rank, hidden))
        biases.append(weights.bias(f"{name}.q_a_proj", rank) if config.qkv_bias else None)
    else:
        matrices.append(weights.weight(f"{name}.q_proj", of_queries, hidden, cut="rows", order=of_query))
        zeros = torch.zeros(own_queries, dtype=weights.dtype, device=ops.device)
        biases.append(zeros if config.qkv_bias else None)
    module, width = f"{name}.kv_a_proj_with_mqa", latent.spec.width
    matrices.append(weights.weight(module, width, hidden, order=of_row))
    biases.append(weights.bias(module, width, order=of_row) if config.qkv_bias else None)
    inputs = ops.make_linear(weights.side_by_side(matrices), biases)
    query_norm, queries = None, None
    if rank:
        query_norm = Norm(weights.tensor(f"{name}.q_a_layernorm.weight", rank), None, NORM_EPS)
        matrix = weights.weight(f"{name}.q_b_proj", of_queries, rank, cut="rows", order=of_query)
        queries = ops.make_linear([matrix], [None])
    up = weights.table(f"{name}.kv_b_proj", heads * (latent.key_dim + latent.value_dim), latent.rank, cut="rows")
    [whole] = tensors_of([up], "weight", DENSE)
    attention = LatentLayer(
        own, latent.rank, latent.rope_dim, weights.tensor(f"{name}.kv_a_layernorm.weight", latent.rank), NORM_EPS,
        cos_sin, config.layer_scales[layer.index],
        ops.make_latent_up(whole.view(own, -1, latent.rank), latent.key_dim),
    )  # fmt: skip
    output = layer.linear("self_attn", {"o": hidden}, heads * latent.value_dim, "columns", bias=config.output_bias)
    before = layer.block_norm(config.layer_norms.before_attention)
    assert before is not None
    return LatentAttentionBlock(before, inputs, rank or own_queries, query_norm, queries, attention, output)


def _behind(size: int, order: Tensor | None) -> Tensor | None:
    """An order of rows that begin with so many in their own order."""
    return None if order is None else torch.cat((torch.arange(size), size + order))
