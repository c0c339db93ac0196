"""BambaForCausalLM (IBM, Princeton, UIUC 2024): a Llama with Mamba-2 in all layers but a few."""

from __future__ import annotations

from typing import Any

from asyncengine.models.config import LayerNorms, ModelConfig, RawConfig
from asyncengine.models.files import excerpt
from asyncengine.models.llama import read_decoder_config
from asyncengine.models.state_space import DEFAULTS, StateSpaceForCausalLM, read_kinds, read_state_space, with_mixers

_DEFAULTS: dict[str, Any] = DEFAULTS | {
    "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 262_144,
}  # fmt: skip
NAMES = {f"mlp.{name}_proj": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")}
NORMS = LayerNorms("input_layernorm", "pre_ff_layernorm")


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.with_defaults(_DEFAULTS)
    biased = raw.flag("attention_bias", False)
    config = read_decoder_config(
        raw.changed({"layer_types": None}),
        default_kv_heads=8,
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=raw.flag("mlp_bias", False),
        partial_rotary=0.5,
    )
    attends = raw.get("attn_layer_indices", list, [])
    if any(isinstance(index, bool) or not isinstance(index, int) for index in attends):
        raise raw.unsupported(f"attn_layer_indices = {excerpt(attends)}")
    kinds = ["attention" if index in attends else "mamba" for index in range(config.num_layers)]
    mixers = read_state_space(raw, raw.integer("mamba_expand") * config.hidden_size)
    return with_mixers(
        config,
        mixers,
        read_kinds(raw, "layers_block_type", kinds),
        final_norm="model.final_layernorm",
        layer_norms=NORMS,
        module_names=NAMES,
    )


class BambaForCausalLM(StateSpaceForCausalLM):
    pass
