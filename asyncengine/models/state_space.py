"""Mixers of Mamba-2 in the place of attention: what families with them have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from asyncengine.kernels.ops import CacheSpec, Handle, JointSpec, Norm, StateSpec
from asyncengine.kernels.states import Mamba2, ShortConv
from asyncengine.models.config import ModelConfig, RawConfig
from asyncengine.models.decoder import DecoderLayer, Layer, Mamba2Block
from asyncengine.models.files import excerpt
from asyncengine.models.llama import LayerWeights, LlamaForCausalLM
from asyncengine.models.mixer_shapes import StateSpace

DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Values of absent keys in families that name them in this way."""


def read_state_space(raw: RawConfig, inner: int, **settings: Any) -> StateSpace:
    """The mixers of a config whose keys have the names that Bamba gives them. ``inner`` is the number of values of a
    token; keywords are fields of ``StateSpace``."""
    heads, groups, biased = (
        raw.integer("mamba_n_heads"),
        raw.integer("mamba_n_groups"),
        raw.flag("mamba_proj_bias", False),
    )
    named = raw.values.get("mamba_d_head")
    head_dim = inner // heads if named in (None, "auto") else raw.integer("mamba_d_head")
    if head_dim * heads != inner:
        raise raw.unsupported(f"{heads} Mamba heads of {head_dim} for {inner} values")
    if heads % groups:
        raise raw.unsupported(f"{heads} Mamba heads in {groups} groups")
    size = raw.integer("mamba_d_conv")
    if size < 2:
        raise raw.unsupported(f"mamba_d_conv = {size}")
    mixers = StateSpace(
        heads,
        head_dim,
        raw.integer("mamba_d_state"),
        groups,
        size,
        raw.number("rms_norm_eps"),
        raw.flag("mamba_conv_bias", True),
        biased,
        biased,
        _read_time_steps(raw),
    )
    return mixers._replace(**settings)


def _read_time_steps(raw: RawConfig) -> tuple[float, float]:
    """The range of time steps. transformers writes infinity as {"__float__": "Infinity"}."""
    limits = raw.get("time_step_limit", (list, tuple), [0.0, math.inf])
    values = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits]
    numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(values) != 2 or len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
        raise raw.unsupported(f"time_step_limit = {excerpt(limits)}")
    return numbers[0], numbers[1]


LAYER_KINDS = {"linear_attention": False, "mamba": False, "full_attention": True, "attention": True}
"""Names of kinds of layers: True for attention."""


def read_kinds(raw: RawConfig, key: str, default: Sequence[str]) -> list[bool]:
    """The layers with attention, True for each, by a list of kinds that is as long as the default."""
    kinds = raw.get(key, list, list(default))
    if len(kinds) != len(default) or not all(isinstance(kind, str) and kind in LAYER_KINDS for kind in kinds):
        raise raw.unsupported(f"{key} = {excerpt(kinds)} for {len(default)} layers")
    return [LAYER_KINDS[kind] for kind in kinds]


def with_mixers(config: ModelConfig, mixers: StateSpace, attends: Sequence[bool], **changes: Any) -> ModelConfig:
    """Return the config with mixers in the layers that do not attend. Keywords are fields of ``ModelConfig``."""
    caches: list[CacheSpec] = [
        spec if attention else mixers.spec for attention, spec in zip(attends, config.layer_caches, strict=True)
    ]
    return replace(config, state_space=mixers, layer_caches=tuple(caches), **changes)


def with_half_states(config: ModelConfig) -> ModelConfig:
    """Return the config with the states of recurrences in bfloat16. Those of convolutions stay in float32."""
    mixers = {name: mixer._replace(half=True) for name in ("state_space", "delta") if (mixer := getattr(config, name))}
    if not mixers:
        return config
    [mixer] = mixers.values()

    def half(spec: CacheSpec) -> CacheSpec:
        if isinstance(spec, JointSpec):
            return spec._replace(state=mixer.spec)
        return mixer.spec if isinstance(spec, StateSpec) else spec

    return replace(config, layer_caches=tuple(map(half, config.layer_caches)), **mixers)


def mamba2_block(layer: LayerWeights, norm: Norm | None, input_scale: float = 1.0) -> Mamba2Block:
    """A mixer behind ``norm``. A bias of its first product is divided by ``input_scale``."""
    config, weights, mixers = layer.config, layer.weights, layer.config.state_space
    assert mixers is not None
    hidden, name, heads = config.hidden_size, f"{layer.name}.{mixers.module}", mixers.num_heads

    def linear(module: str, rows: int, columns: int, biased: bool, scale: float = 1.0) -> Handle:
        module = f"{name}.{module}"
        bias = weights.bias(module, rows) if biased else None
        if bias is not None and scale != 1:
            bias = bias / scale
        return layer.ops.make_linear([weights.weight(module, rows, columns)], [bias])

    conv = weights.tensor(f"{name}.conv1d.weight", mixers.channels, 1, mixers.conv_size)
    mixer = Mamba2(
        ShortConv(
            conv[:, 0].t().float().contiguous(),
            weights.bias(f"{name}.conv1d", mixers.channels).float() if mixers.conv_bias else None,
            silu=True,
        ),
        -weights.float32(f"{name}.A_log", heads).exp(),
        weights.float32(f"{name}.D", heads),
        weights.float32(f"{name}.dt_bias", heads),
        mixers.head_dim,
        mixers.state_size,
        mixers.groups,
        mixers.dt_range,
        weights.float32(f"{name}.norm.weight", mixers.inner) if mixers.normed else None,
        mixers.eps,
        mixers.norm_before_gate,
        torch.bfloat16 if mixers.half else torch.float32,
    )
    inputs = linear("in_proj", mixer.width, hidden, mixers.input_bias, input_scale)
    return Mamba2Block(norm, inputs, mixer, linear("out_proj", hidden, mixers.inner, mixers.output_bias))


class StateSpaceForCausalLM(LlamaForCausalLM):
    """A relative of Llama with mixers of Mamba-2 in the layers that keep no keys and values."""

    def layer(self, layer: LayerWeights, cos_sin: Any, query_scales: Any) -> Layer:
        if layer.config.kv_spec(layer.index) is not None:
            return super().layer(layer, cos_sin, query_scales)
        norm = layer.block_norm(layer.config.layer_norms.before_attention)
        return DecoderLayer(mamba2_block(layer, norm), self.feed_forward(layer))
