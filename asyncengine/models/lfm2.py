"""Lfm2ForCausalLM (Liquid AI 2025): short convolutions between two gates, with attention in some layers.

A layer with a convolution keeps its last inputs as a state. Lfm2MoeForCausalLM has mixtures of experts in all but its
first layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from asyncengine.kernels.ops import CacheSpec, Handle, StateSpec
from asyncengine.kernels.states import ShortConv
from asyncengine.models.config import ExpertNames, LayerNorms, ModelConfig, RawConfig, require_full_attention
from asyncengine.models.decoder import DecoderLayer, Layer, ShortConvBlock
from asyncengine.models.files import excerpt
from asyncengine.models.llama import LayerWeights, LlamaForCausalLM, make_norm, read_decoder_config
from asyncengine.models.mixture import MixtureForCausalLM, with_mixture

_OTHER_NAMES = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 65_536, "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 128_000,
    "norm_eps": 1e-5, "tie_word_embeddings": True, "conv_L_cache": 3,
}  # fmt: skip
_OF_DENSE: dict[str, Any] = {"hidden_size": 2560, "intermediate_size": 12_288, "block_multiple_of": 256}
_OF_MIXTURE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_experts": 32,
    "num_experts_per_tok": 4,
}  # fmt: skip
_NAMES = {
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.renamed(_OTHER_NAMES).with_defaults(_DEFAULTS | _OF_DENSE)
    inner = raw.integer("intermediate_size")
    factor, unit = raw.number("block_ffn_dim_multiplier", 1.0), raw.integer("block_multiple_of")
    if raw.flag("block_auto_adjust_ff_dim", True):
        inner = int(2 * inner / 3)
        if raw.values.get("block_ffn_dim_multiplier", factor) is not None:
            inner = -(-int(factor * inner) // unit) * unit
    layers = raw.integer("num_hidden_layers")
    attends = raw.get("full_attn_idxs", list, list(range(layers)))
    if any(isinstance(index, bool) or not isinstance(index, int) for index in attends):
        raise raw.unsupported(f"full_attn_idxs = {excerpt(attends)}")
    return _read(raw.changed({"intermediate_size": inner}), [i in attends for i in range(layers)])


def read_mixture_config(raw: RawConfig) -> ModelConfig:
    raw = raw.renamed(_OTHER_NAMES).with_defaults(_DEFAULTS | _OF_MIXTURE)
    config = _read(raw, [True] * raw.integer("num_hidden_layers"))
    dense = raw.get("num_dense_layers", int, 2)
    if dense < 0:
        raise raw.unsupported(f"num_dense_layers = {dense}")
    return with_mixture(
        config,
        raw,
        layers=tuple(index >= dense for index in range(config.num_layers)),
        intermediate_size=raw.integer("moe_intermediate_size"),
        scores="sigmoid",
        sums_to_one=raw.flag("norm_topk_prob", True),
        sum_offset=1e-6,
        scale=raw.number("routed_scaling_factor", 1.0),
        correction="expert_bias" if raw.flag("use_expert_bias", True) else "",
        names=ExpertNames("feed_forward", "w1", "w3", "w2"),
    )


def _read(raw: RawConfig, attends: list[bool]) -> ModelConfig:
    """The configuration; ``attends`` names the layers with attention if there are no layer_types."""
    types = raw.get("layer_types", list, ["full_attention" if attention else "conv" for attention in attends])
    if len(types) != len(attends) or any(kind not in ("conv", "full_attention") for kind in types):
        raise raw.unsupported(f"layer_types = {excerpt(types)} for {len(attends)} layers")
    plain = raw.changed({"layer_types": None})
    windows = require_full_attention(plain, len(types), raw.integer("max_position_embeddings"))
    config = read_decoder_config(
        raw.changed({"hidden_act": "silu"}),
        eps_key="norm_eps",
        default_kv_heads=8,
        layer_windows=windows,
        qk_norm=True,
        rope_theta=1e6,
    )
    conv_size = raw.integer("conv_L_cache")
    if conv_size < 2:
        raise raw.unsupported(f"conv_L_cache = {conv_size}")
    state = StateSpec(ShortConv.state_bytes(conv_size, config.hidden_size))
    caches: list[CacheSpec] = [
        state if kind == "conv" else spec for kind, spec in zip(types, config.layer_caches, strict=True)
    ]
    return replace(
        config,
        layer_caches=tuple(caches),
        layer_norms=LayerNorms("operator_norm", "ffn_norm"),
        final_norm="model.embedding_norm",
        module_names=_NAMES,
        conv_size=conv_size,
        conv_bias=raw.flag("conv_bias", False),
    )


def _short_conv_block(layer: LayerWeights) -> ShortConvBlock:
    config, weights, hidden = layer.config, layer.weights, layer.config.hidden_size
    name, bias = layer.module("conv"), config.conv_bias

    def linear(module: str, size: int) -> Handle:
        module = f"{name}.{module}"
        return layer.ops.make_linear(
            [weights.weight(module, size, hidden)], [weights.bias(module, size) if bias else None]
        )

    kernel = weights.tensor(f"{name}.conv.weight", hidden, 1, config.conv_size)
    conv = ShortConv(
        kernel[:, 0].t().float().contiguous(), weights.bias(f"{name}.conv", hidden).float() if bias else None
    )
    norm = make_norm(config, weights.tensor(f"{layer.name}.operator_norm.weight", hidden))
    return ShortConvBlock(norm, linear("in_proj", 3 * hidden), conv, linear("out_proj", hidden))


class Lfm2ForCausalLM(LlamaForCausalLM):
    def layer(self, layer: LayerWeights, cos_sin: Tensor | None, query_scales: Tensor | None) -> Layer:
        if isinstance(layer.config.layer_caches[layer.index], StateSpec):
            return DecoderLayer(_short_conv_block(layer), self.feed_forward(layer))
        return super().layer(layer, cos_sin, query_scales)


class Lfm2MoeForCausalLM(Lfm2ForCausalLM, MixtureForCausalLM):
    pass
