"""Exaone4ForCausalLM (LG AI Research 2025): norms behind the blocks, normed queries and keys.

Models with windows rotate queries and keys in the layers that have one, and in no other.
"""

from __future__ import annotations

from dataclasses import replace

from asyncengine.models.config import NORMS_BEHIND, ModelConfig, RawConfig, read_layer_windows, read_period
from asyncengine.models.files import excerpt
from asyncengine.models.llama import LlamaForCausalLM, read_decoder_config


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.with_defaults({"sliding_window": 4096, "num_key_value_heads": 32, "rms_norm_eps": 1e-5})
    window = 0 if raw.values["sliding_window"] is None else raw.integer("sliding_window")
    slides = _sliding_layers(raw)
    config = read_decoder_config(raw, layer_windows=read_layer_windows(raw, window, slides), qk_norm=True)
    ropes = config.layer_ropes
    if window:
        ropes = tuple(rope if slides else None for rope, slides in zip(ropes, config.layer_windows, strict=True))
    return replace(config, layer_ropes=ropes, layer_norms=NORMS_BEHIND)


def _sliding_layers(raw: RawConfig) -> list[bool]:
    """The layers with a window where there are no layer_types: all but each that sliding_window_pattern counts to."""
    num_layers, pattern = raw.integer("num_hidden_layers"), raw.get("sliding_window_pattern", (int, str), 4)
    if raw.values["sliding_window"] is None or raw.get("layer_types", list, None) is not None:
        return [False] * num_layers
    if isinstance(pattern, str):
        raise raw.unsupported(f"sliding_window_pattern = {excerpt(pattern)} without layer_types")
    period = read_period(raw, "sliding_window_pattern", 4)
    return [(i + 1) % period != 0 for i in range(num_layers)]


class Exaone4ForCausalLM(LlamaForCausalLM):
    pass
