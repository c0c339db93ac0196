"""FalconH1ForCausalLM (TII 2025): attention and Mamba-2 side by side in every layer, with factors on their products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncengine.kernels.ops import Batch, JointSpec, KVSpec, LayerJointCache, ModelOps, Residual
from asyncengine.models.bamba import NAMES, NORMS
from asyncengine.models.config import ModelConfig, RawConfig
from asyncengine.models.decoder import AttentionBlock, DecoderLayer, Layer, Mamba2Block, MLPBlock
from asyncengine.models.files import excerpt
from asyncengine.models.llama import LayerWeights, LlamaForCausalLM, attention_block, mlp_block, read_decoder_config
from asyncengine.models.mixer_shapes import Multipliers
from asyncengine.models.state_space import DEFAULTS, mamba2_block, read_state_space

_DEFAULTS: dict[str, Any] = DEFAULTS | {
    "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 8192, "mamba_d_ssm": 1024,
}  # fmt: skip


def read_config(raw: RawConfig) -> ModelConfig:
    """Factors on what attention reads and on its keys are factors on scores, and the first one on its result."""
    raw = raw.with_defaults(_DEFAULTS)
    biased = raw.flag("attention_bias", False)
    config = read_decoder_config(
        raw, default_kv_heads=8, qkv_bias=biased, output_bias=biased, mlp_bias=raw.flag("mlp_bias", False)
    )
    if raw.values["mamba_d_ssm"] is None:
        inner = raw.integer("mamba_expand") * config.hidden_size
    else:
        inner = raw.integer("mamba_d_ssm")
    before = raw.number("attention_in_multiplier", 1.0)
    if biased and before != 1:
        raise raw.unsupported("attention_bias with attention_in_multiplier")
    mixers = read_state_space(
        raw,
        inner,
        normed=raw.flag("mamba_rms_norm", False),
        norm_before_gate=raw.flag("mamba_norm_before_gate", True),
        output_bias=raw.flag("projectors_bias", False),
    )
    scale = before**2 * raw.number("key_multiplier", 1.0) * config.head_dim**-0.5
    kinds = [JointSpec(spec, mixers.spec) for spec in config.layer_caches if isinstance(spec, KVSpec)]
    return replace(
        config,
        state_space=mixers,
        multipliers=Multipliers(
            attention=before * raw.number("attention_out_multiplier", 1.0),
            mixer_input=raw.number("ssm_in_multiplier", 1.0),
            mixer_parts=_numbers(raw, "ssm_multipliers", 5),
            mixer=raw.number("ssm_out_multiplier", 1.0),
            mlp=_numbers(raw, "mlp_multipliers", 2),
        ),
        layer_caches=tuple(kinds),
        layer_scales=(scale,) * config.num_layers,
        embedding_scale=raw.number("embedding_multiplier", 1.0),
        logit_scale=raw.number("lm_head_multiplier", 1.0),
        final_norm="model.final_layernorm",
        layer_norms=NORMS,
        module_names=NAMES,
    )


def _numbers(raw: RawConfig, key: str, count: int) -> tuple[float, ...]:
    values = raw.get(key, list, [1.0] * count)
    if len(values) != count:
        raise raw.unsupported(f"{key} = {excerpt(values)}")
    return tuple(RawConfig({key: value}, raw.source).number(key) for value in values)


class _JointBlock(NamedTuple):
    """residual += a * (output of attention) + m * (output of the mixer), both of norm(residual)."""

    attention: AttentionBlock
    mixer: Mamba2Block
    inputs: Tensor
    """[mixer.width]: factors on the mixer's inputs, in the model's dtype"""
    a: float
    m: float

    def forward(self, ops: ModelOps, residual: Residual, cache: LayerJointCache, batch: Batch, is_last: bool) -> None:
        inputs = ops.norm_linear(residual, self.mixer.norm, self.mixer.inputs, batch) * self.inputs
        x = ops.mamba2(inputs, self.mixer.mixer, cache.states, batch)
        y = ops.linear(x, self.mixer.output, batch) * self.m
        x = self.attention.attend(ops, residual, cache.kv, batch, is_last=False)
        y += ops.linear(x, self.attention.output, batch) * self.a
        ops.add_(ops.keep_sampled(y, residual, batch) if is_last else y, residual, batch)


class _ScaledMLP(NamedTuple):
    """residual += factors[1] * down · (silu(factors[0] * gate · x) * (up · x)) for x = norm(residual)."""

    mlp: MLPBlock
    factors: tuple[float, ...]

    def forward(self, ops: ModelOps, residual: Residual, batch: Batch) -> None:
        x = ops.norm_linear(residual, self.mlp.norm, self.mlp.up, batch)
        x[:, : x.shape[1] // 2] *= self.factors[0]
        y = ops.linear(ops.activated(x, self.mlp.activation, batch), self.mlp.down, batch)
        ops.add_(y * self.factors[1], residual, batch)


def _factors(config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Factors on the inputs of a mixer: those of its gate, its values, b, c and time steps."""
    mixers, factors = config.state_space, config.multipliers
    assert mixers is not None
    assert factors is not None
    of_groups = mixers.groups * mixers.state_size
    sizes = torch.tensor([mixers.inner, mixers.inner, of_groups, of_groups, mixers.num_heads])
    return torch.tensor(factors.mixer_parts).mul(factors.mixer_input).repeat_interleave(sizes).to(dtype)


class FalconH1ForCausalLM(LlamaForCausalLM):
    def layer(self, layer: LayerWeights, cos_sin: Any, query_scales: Any) -> Layer:
        config, factors = layer.config, layer.config.multipliers
        assert factors is not None
        attention = attention_block(layer, cos_sin)
        mixer = mamba2_block(layer, attention.norm, input_scale=factors.mixer_input)
        inputs = _factors(config, layer.weights.dtype).to(layer.ops.device)
        block = _JointBlock(attention, mixer, inputs, factors.attention, factors.mixer)
        return DecoderLayer(block, _ScaledMLP(mlp_block(layer), factors.mlp))
