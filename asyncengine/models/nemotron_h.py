"""NemotronHForCausalLM (NVIDIA 2025, Nemotron 3): Mamba-2, attention without positions, MLPs and mixtures.

The checkpoint counts every block as a layer. Here a layer is a mixer with the blocks behind it up to the next mixer.
"""

from __future__ import annotations

from typing import Any

from asyncengine.models.config import ExpertNames, LayerNorms, ModelConfig, RawConfig
from asyncengine.models.decoder import BlocksLayer, FeedForward, Layer, Mixer, MLPBlock
from asyncengine.models.files import excerpt
from asyncengine.models.llama import LayerWeights, LlamaForCausalLM, attention_block, read_decoder_config
from asyncengine.models.mixture import mixture_block, read_groups, with_mixture
from asyncengine.models.state_space import mamba2_block, read_state_space, with_mixers

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 21_504, "num_attention_heads": 32,
    "head_dim": 128, "max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2",
    "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
    "n_routed_experts": 8, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
    "num_experts_per_tok": 2,
}  # fmt: skip
_OLD_NAMES = {
    "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit", "layer_types": "layers_block_type",
    "num_local_experts": "n_routed_experts",
}  # fmt: skip
_NAMES = {
    "mamba_num_heads": "mamba_n_heads", "mamba_head_dim": "mamba_d_head", "ssm_state_size": "mamba_d_state",
    "n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_bias": "mamba_proj_bias",
    "use_conv_bias": "mamba_conv_bias", "layer_norm_epsilon": "rms_norm_eps",
}  # fmt: skip
_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_OTHER_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
_MODULES = {f"{block}.{name}_proj": f"mixer.{name}_proj" for block, name in (
    *(("self_attn", name) for name in "qkvo"), ("mlp", "up"), ("mlp", "down")
)}  # fmt: skip
_MIXERS = ("mamba", "attention")


def _read_blocks(raw: RawConfig) -> tuple[tuple[str, ...], ...]:
    """The kinds of the blocks of each layer."""
    pattern = raw.get("hybrid_override_pattern", str, "ME*-")
    kinds = raw.get("layers_block_type", list, [_KINDS.get(kind, kind) for kind in pattern])
    kinds = [_OTHER_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    if not kinds or any(kind not in _KINDS.values() for kind in kinds):
        raise raw.unsupported(f"layers_block_type = {excerpt(kinds)}")
    if kinds[0] not in _MIXERS:
        raise raw.unsupported(f"layers_block_type that begins with {kinds[0]}")
    layers: list[tuple[str, ...]] = []
    for kind in kinds:
        if kind in _MIXERS:
            layers.append((kind,))
        else:
            layers[-1] += (kind,)
    return tuple(layers)


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.with_defaults(_DEFAULTS).renamed(_OLD_NAMES).renamed(_NAMES)
    raw.require("mamba_hidden_act", "silu")
    raw.require("sliding_window", None)
    raw.require("moe_latent_size", None)
    raw.require("attention_bias", False)
    blocks = _read_blocks(raw)
    if any("moe" in kinds for kinds in blocks):
        raw.require("mlp_bias", False)
    config = read_decoder_config(
        raw.changed({"num_hidden_layers": len(blocks), "layer_types": None}),
        activations={"relu2": "relu2"},
        activation_key="mlp_hidden_act",
        default_kv_heads=8,
        mlp_bias=raw.flag("mlp_bias", False),
    )
    inner = raw.integer("mamba_n_heads") * raw.integer("mamba_d_head")
    config = with_mixers(
        config,
        read_state_space(raw, inner, module="mixer"),
        ["attention" in kinds for kinds in blocks],
        blocks=blocks,
        layer_ropes=(None,) * config.num_layers,
        layers="backbone.layers",
        embedding="backbone.embeddings",
        final_norm="backbone.norm_f",
        layer_norms=LayerNorms("norm", "norm"),
        module_names=_MODULES,
    )
    if not any("moe" in kinds for kinds in blocks):
        return config
    experts = raw.integer("n_routed_experts")
    return with_mixture(
        config,
        raw,
        num_experts=experts,
        layers=tuple("moe" in kinds for kinds in blocks),
        intermediate_size=raw.integer("moe_intermediate_size"),
        scores="sigmoid",
        correction="gate.e_score_correction_bias",
        sums_to_one=raw.flag("norm_topk_prob", True),
        scale=raw.number("routed_scaling_factor", 1.0),
        shared_size=raw.integer("moe_shared_expert_intermediate_size"),
        names=ExpertNames("mixer", gate="", shared="shared_experts"),
        **read_groups(raw, experts, raw.integer("num_experts_per_tok")),
    )


def _mlp_block(layer: LayerWeights) -> MLPBlock:
    config, hidden, inner = layer.config, layer.config.hidden_size, layer.config.intermediate_size
    up = layer.linear("mlp", {"up": inner}, hidden, "rows", bias=config.mlp_bias)
    down = layer.linear("mlp", {"down": hidden}, inner, "columns", bias=config.mlp_bias)
    return MLPBlock(layer.block_norm("norm"), up, config.activation, down)


class NemotronHForCausalLM(LlamaForCausalLM):
    def layer(self, layer: LayerWeights, cos_sin: Any, query_scales: Any) -> Layer:
        config = layer.config
        first = sum(map(len, config.blocks[: layer.index]))
        weights = [
            LayerWeights(config, layer.index, layer.weights, layer.ops, first + i)
            for i in range(len(config.blocks[layer.index]))
        ]
        mixer: Mixer
        if config.blocks[layer.index][0] == "mamba":
            mixer = mamba2_block(weights[0], weights[0].block_norm("norm"))
        else:
            mixer = attention_block(weights[0], cos_sin)
        behind: list[FeedForward] = [
            mixture_block(own) if kind == "moe" else _mlp_block(own)
            for own, kind in zip(weights[1:], config.blocks[layer.index][1:], strict=True)
        ]
        return BlocksLayer(mixer, tuple(behind))
