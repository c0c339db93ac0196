"""Gemma4ForCausalLM (Gemma team 2026): Gemma 3 with values that are normed, and much that differs from layer to layer.

Layers without a window have heads of their own size and number, and their values may be their keys. The last layers may
share keys and values with earlier ones. Each layer may have an embedding of its own, and a mixture of experts beside
its MLP. Of Gemma4ForConditionalGeneration the text model is served.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from asyncengine.kernels.ops import Batch, KVSpec, LayerCache, ModelOps, Residual, SharedSpec
from asyncengine.models import gemma2
from asyncengine.models.config import LayerInputs, Mixture, ModelConfig, RawConfig
from asyncengine.models.decoder import Layer
from asyncengine.models.files import excerpt
from asyncengine.models.gemma4_layers import Gemma4Layer, LayerEmbeddings, load_layer
from asyncengine.models.llama import LayerWeights, LlamaForCausalLM
from asyncengine.models.rope_settings import read_rope, rope_of_layer_type
from asyncengine.models.weights.source import WeightSource

_DEFAULTS: dict[str, Any] = gemma2.DEFAULTS | {
    "vocab_size": 262_144,
    "num_hidden_layers": 30,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "final_logit_softcapping": None,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.with_defaults(_DEFAULTS).changed({"query_pre_attn_scalar": 1})  # scores are not scaled
    if raw.values.get("use_bidirectional_attention") == "vision":  # of tokens of images alone
        raw = raw.changed({"use_bidirectional_attention": False})
    elif raw.values.get("use_bidirectional_attention") is not None:
        raise raw.unsupported(f"use_bidirectional_attention = {excerpt(raw.values['use_bidirectional_attention'])}")
    if raw.values.get("rope_parameters") is None:
        raw = raw.changed({"rope_parameters": _ROPES})
    types = raw.get("layer_types", list, None)
    if types:  # the last layer sees everything, whatever its type
        raw = raw.changed({"layer_types": [*types[:-1], "full_attention"]})
    num_layers = raw.integer("num_hidden_layers")
    slides = [(i + 1) % 6 != 0 and i + 1 < num_layers for i in range(num_layers)]
    ropes = [rope_of_layer_type(raw, f"{kind}_attention", 0.0) for kind in ("full", "sliding")]
    config = gemma2.read_gemma_config(ropes[1], slides)
    specs = _read_specs(raw, config.layer_windows)
    mixture = None
    if raw.flag("enable_moe_block", False):
        num_experts, top_k = raw.integer("num_experts"), raw.integer("top_k_experts")
        if top_k > num_experts:
            raise raw.unsupported(f"top_k_experts = {top_k} of {num_experts} experts")
        inner = raw.integer("moe_intermediate_size")
        layers, dense = (True,) * num_layers, config.intermediate_size  # beside the experts of each layer
        mixture = Mixture(num_experts, top_k, inner, layers, sums_to_one=True, shared_size=dense)
    inputs = None
    if raw.get("hidden_size_per_layer_input", int, 0):
        inputs = LayerInputs(raw.integer("hidden_size_per_layer_input"), raw.integer("vocab_size_per_layer_input"))
        if inputs.vocab_size < config.vocab_size:
            raise raw.unsupported(f"vocab_size_per_layer_input = {inputs.vocab_size} below vocab_size")
    return replace(
        config,
        layer_caches=_share(raw, specs),
        layer_ropes=tuple(
            read_rope(ropes[spec.window > 0], config.max_positions, spec.head_dim, proportional=True) for spec in specs
        ),
        qk_norm=True,
        norms_values=True,
        norm_weight_offset=0.0,
        keys_are_values=raw.flag("attention_k_eq_v", False),
        wide_sharing_mlp=raw.flag("use_double_wide_mlp", False),
        mixture=mixture,
        layer_inputs=inputs,
    )


def _read_specs(raw: RawConfig, windows: Sequence[int]) -> list[KVSpec]:
    """The keys and values of each layer, as if none shared them; per_layer_config has what differs from the others."""
    by_layer = raw.get("per_layer_config", dict, None)
    if by_layer is None:
        own = {"head_dim": raw.integer("global_head_dim")}
        if raw.flag("attention_k_eq_v", False) and raw.values.get("num_global_key_value_heads") is not None:
            own["num_key_value_heads"] = raw.integer("num_global_key_value_heads")
        by_layer = {str(i): own for i, window in enumerate(windows) if not window}
    if by_layer.keys() - set(map(str, range(len(windows)))):
        raise raw.unsupported(f"per_layer_config = {excerpt(by_layer)}")
    specs = []
    for index, window in enumerate(windows):
        own = by_layer.get(str(index), {})
        if not isinstance(own, dict) or own.keys() - {"head_dim", "num_key_value_heads"}:
            raise raw.unsupported(f"per_layer_config = {excerpt(own)} of layer {index}")
        layer = raw.changed(own)
        spec = KVSpec(layer.integer("num_key_value_heads"), layer.integer("head_dim"), window)
        if raw.integer("num_attention_heads") % spec.num_heads or spec.head_dim % 2:
            raise raw.unsupported(f"{spec.num_heads} key-value heads of {spec.head_dim} in layer {index}")
        specs.append(spec)
    return specs


def _share(raw: RawConfig, specs: Sequence[KVSpec]) -> tuple[KVSpec | SharedSpec, ...]:
    """The last num_kv_shared_layers share keys and values with the last layer before them of their own type."""
    count = raw.get("num_kv_shared_layers", int, 0)
    first = len(specs) - count
    sources = {spec.window: index for index, spec in enumerate(specs[: max(0, first)])}
    shared = specs[max(0, first) :]
    if count < 0 or any(spec.window not in sources or specs[sources[spec.window]] != spec for spec in shared):
        raise raw.unsupported(f"num_kv_shared_layers = {excerpt(count)} of layers without a like before them")
    return (*specs[:first], *(SharedSpec(sources[spec.window]) for spec in shared))


class Gemma4ForCausalLM(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, weights: WeightSource, ops: ModelOps, max_positions: int) -> None:
        super().__init__(config, weights, ops, max_positions)
        inputs = config.layer_inputs
        self._inputs = None if inputs is None else LayerEmbeddings.load(config, inputs, weights, ops)
        self._first_sharing = config.first_sharing_layer

    def layer(self, layer: LayerWeights, cos_sin: Tensor | None, query_scales: Tensor | None) -> Layer:
        return load_layer(layer, cos_sin)

    def run(self, batch: Batch, caches: Iterable[LayerCache]) -> Residual:
        ops = self._ops
        residual = ops.embed(batch, self._embedding, None, self._embedding_scale)
        inputs = None if self._inputs is None else self._inputs.of_step(ops, residual, batch)
        for index, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            if index == self._first_sharing:
                batch, kept = ops.sampled_step(residual, batch)
                if kept is not None and not len(kept):
                    break
                inputs = inputs if inputs is None or kept is None else inputs[kept]
            assert isinstance(layer, Gemma4Layer)
            own = None if inputs is None else inputs[:, index]
            is_last = own is None and index + 1 == len(self._layers)  # embeddings of dropped tokens would be left
            layer.forward(ops, residual, cache, batch, is_last, own)
        return residual
