"""Phi3ForCausalLM, of Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024): Llama with fused projections and longrope.

A part of each head may stay as it is.
"""

from __future__ import annotations

from dataclasses import replace

from asyncengine.models.config import ModelConfig, RawConfig, read_one_window
from asyncengine.models.files import excerpt
from asyncengine.models.llama import LlamaForCausalLM, read_decoder_config


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.with_defaults({"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5})
    config = read_decoder_config(_renamed_scaling(raw), layer_windows=read_one_window(raw), partial_rotary=1.0)
    return replace(config, fused_qkv=True, fused_gate_up=True)


def _renamed_scaling(raw: RawConfig) -> RawConfig:
    """Return the config with the name that longrope has today: older files call it su, and some yarn."""
    scaling = raw.get("rope_scaling", dict, None) or raw.get("rope_parameters", dict, {})
    kind = scaling.get("rope_type") or scaling.get("type", "default")
    if kind not in ("default", "longrope", "su", "yarn"):
        raise raw.unsupported(f"rope scaling {excerpt(kind)} in this family")
    renamed = scaling | {"rope_type": "longrope" if kind in ("su", "yarn") else kind}
    return raw.changed({"rope_parameters": renamed, "rope_scaling": None})


class Phi3ForCausalLM(LlamaForCausalLM):
    pass
