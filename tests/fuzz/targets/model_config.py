"""config.json and generation_config.json: a model's shape with its rotary table, or ModelError."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import torch

from asyncengine.errors import ModelError
from asyncengine.models.config import RawConfig
from asyncengine.models.registry import FAMILIES, find_family
from asyncengine.models.rotary import rotary_table
from asyncengine.models.weights.checkpoint import choose_dtype
from asyncengine.models.weights.dummy import DummyWeights
from asyncengine.models.weights.formats.choose import METHODS, choose_format
from asyncengine.models.weights.formats.packed import Packed
from asyncengine.runner.steps.model_runner import read_eos_token_ids
from tests.fuzz.source import Source, scratch_directory

GPT2 = {"vocab_size": 199, "n_positions": 128, "n_embd": 60, "n_layer": 3, "n_head": 5}
DECODER = {
    "vocab_size": 199, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
KEYS = (
    *GPT2, *DECODER, "architectures", "quantization_config", "hidden_act", "activation_function", "head_dim",
    "n_inner", "rms_norm_eps", "layer_norm_epsilon", "initializer_range", "tie_word_embeddings", "attention_bias",
    "mlp_bias", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types", "rope_theta", "rope_scaling", "rope_parameters",
    "partial_rotary_factor", "original_max_position_embeddings", "eos_token_id", "dtype", "torch_dtype",
    "model_type", "is_causal", "per_layer_config", "hidden_activation", "query_pre_attn_scalar",
    "sliding_window_pattern", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention",
    "rope_local_base_freq", "no_rope_layers", "no_rope_layer_interval", "attention_out_bias",
    "layer_norm_eps", "logit_scale", "logits_scaling",
    "residual_multiplier", "embedding_multiplier", "attention_multiplier", "text_config",
)  # fmt: skip
ROPE_KEYS = (
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate",
    "partial_rotary_factor", "short_factor", "long_factor", "llama_4_scaling_beta", "full_attention",
    "sliding_attention",
)  # fmt: skip
WORDS = (
    "default",
    "linear",
    "dynamic",
    "llama3",
    "yarn",
    "longrope",
    "silu",
    "gelu",
    "full_attention",
    "sliding_attention",
)

QUANT_KEYS = (
    "bits", "group_size", "zero_point", "version", "modules_to_not_convert", "desc_act", "sym", "checkpoint_format",
    "dynamic", "weight_block_size", "fmt", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "ignore", "format",
    "kv_cache_scheme", "num_bits", "type", "symmetric", "strategy", "block_structure", "actorder",
    "llm_int8_skip_modules",
)  # fmt: skip
RANDOM = DummyWeights(torch.float32, 0.02, 0)

DIRECTORY = scratch_directory()


def one_input(data: bytes) -> None:
    source = Source(data)
    raw = source.byte() % 4 == 0
    (DIRECTORY / "config.json").write_bytes(source.rest() if raw else json.dumps(config(source)).encode())
    generation = {"eos_token_id": source.value()}
    (DIRECTORY / "generation_config.json").write_text(json.dumps(generation if source.flag() else {}))
    with suppress(ModelError):
        read()


def read() -> None:
    """Do all reading and computing that comes before the weights."""
    raw = RawConfig.load(DIRECTORY)
    _, family = find_family(raw)
    model = family.read_config(raw)
    read_eos_token_ids(DIRECTORY, raw, model.vocab_size)
    choose_dtype("auto", raw.dtype)
    form = choose_format("none", raw)
    if isinstance(form, Packed):
        form.is_packed(RANDOM, "model.layers.0.mlp.up_proj")
    for rope, dim in set(zip(model.layer_ropes, model.head_dims, strict=True)):
        rotary_table(rope, dim, min(model.max_positions, 16))


def config(source: Source) -> dict[str, Any]:
    name = source.pick(sorted(FAMILIES))
    values: dict[str, Any] = {"architectures": [name], **(GPT2 if name.startswith("GPT2") else DECODER)}
    for _ in range(source.integer(0, 8)):
        values[source.pick(KEYS)] = value(source)
    if source.flag():
        values["rope_parameters"] = {source.pick(ROPE_KEYS): value(source) for _ in range(source.integer(0, 6))}
    if source.flag():
        quantised = {source.pick(QUANT_KEYS): value(source) for _ in range(source.integer(0, 6))}
        if source.flag():
            weights = {source.pick(QUANT_KEYS): value(source) for _ in range(source.integer(0, 4))}
            quantised["config_groups"] = {"a": {"targets": ["Linear", value(source)], "weights": weights}}
        values["quantization_config"] = quantised | {"quant_method": source.pick((*METHODS, "mxfp4", "other"))}
    if source.flag():
        values["layer_types"] = [value(source) for _ in range(3)]
    return values


def value(source: Source) -> Any:
    return source.pick(WORDS) if source.byte() % 4 == 3 else source.value()
