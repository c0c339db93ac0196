"""DeepseekV3ForCausalLM and its relatives (DeepSeek-AI 2024): latent attention, and mixtures behind the first layers.

DeepSeek-V2 chooses experts by a softmax, Kimi K2 is a DeepSeek-V3, and GLM-4.7-Flash names the layers with a mixture.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asyncengine.models.config import ExpertNames, ModelConfig, RawConfig
from asyncengine.models.decoder import DecoderLayer, Layer
from asyncengine.models.files import excerpt
from asyncengine.models.latent import latent_block, read_latent_config
from asyncengine.models.llama import LayerWeights
from asyncengine.models.mixture import MixtureForCausalLM, read_groups, with_mixture

NAMES = ExpertNames(shared="shared_experts")
_ALIASES = {"num_local_experts": "n_routed_experts"}
_V3 = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5, "max_position_embeddings": 4096,
}  # fmt: skip
_V2 = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 64,
    "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1407, "max_position_embeddings": 2048,
}  # fmt: skip
_LITE = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202_752,
}  # fmt: skip


def read_config(raw: RawConfig) -> ModelConfig:
    raw = raw.renamed(_ALIASES).with_defaults(_V3)
    raw.require("scoring_func", "sigmoid")
    raw.require("topk_method", "noaux_tc")
    config = read_latent_config(raw, default_rank=1536, interleaved=raw.flag("rope_interleave", True))
    return _with_corrected_mixture(config, raw, _behind_dense(raw, config, 3))


def read_lite_config(raw: RawConfig) -> ModelConfig:
    """Read the configuration of Glm4MoeLiteForCausalLM."""
    raw = raw.renamed(_ALIASES).with_defaults(_LITE)
    config = read_latent_config(raw, default_rank=768, interleaved=raw.flag("rope_interleave", True))
    types = raw.get("mlp_layer_types", list, None)
    if types is None:
        # transformers reads no number of dense layers in this family.
        raw.require("first_k_dense_replace", 1)
        types = ["dense"] + ["sparse"] * (config.num_layers - 1)
    if len(types) != config.num_layers or not all(kind in ("dense", "sparse") for kind in types):
        raise raw.unsupported(f"mlp_layer_types = {excerpt(types)} for {config.num_layers} layers")
    return _with_corrected_mixture(config, raw, tuple(kind == "sparse" for kind in types))


def read_v2_config(raw: RawConfig) -> ModelConfig:
    """Read the configuration of DeepseekV2ForCausalLM."""
    raw = raw.renamed({"num_experts": "n_routed_experts"}).with_defaults(_V2)
    for key, value in (("mlp_bias", False), ("norm_topk_prob", False), ("scoring_func", "softmax")):
        raw.require(key, value)
    method = raw.get("topk_method", str, "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise raw.unsupported(f"topk_method = {excerpt(method)}")
    config = read_latent_config(raw, default_rank=1536, interleaved=True)
    experts, top_k = raw.integer("n_routed_experts"), raw.integer("num_experts_per_tok")
    groups: dict[str, int] = {}
    if method != "greedy":
        groups = read_groups(raw, experts, top_k) | {"group_scores": 1}
    return _with_mixture(config, raw, _behind_dense(raw, config, 0), shared=2, **groups)


def _behind_dense(raw: RawConfig, config: ModelConfig, default: int) -> tuple[bool, ...]:
    """The layers with a mixture: all behind the first ones."""
    raw.require("moe_layer_freq", 1)
    dense = raw.get("first_k_dense_replace", int, default)
    return tuple(index >= dense for index in range(config.num_layers))


def _with_corrected_mixture(config: ModelConfig, raw: RawConfig, layers: tuple[bool, ...]) -> ModelConfig:
    return _with_mixture(
        config,
        raw,
        layers,
        shared=1,
        scores="sigmoid",
        correction="gate.e_score_correction_bias",
        sums_to_one=raw.flag("norm_topk_prob", True),
        **read_groups(raw, raw.integer("n_routed_experts"), raw.integer("num_experts_per_tok")),
    )


def _with_mixture(
    config: ModelConfig, raw: RawConfig, layers: tuple[bool, ...], *, shared: int, **settings: Any
) -> ModelConfig:
    """``shared`` is the family's default of n_shared_experts."""
    inner = raw.integer("moe_intermediate_size")
    return with_mixture(
        config,
        raw,
        layers=layers,
        num_experts=raw.integer("n_routed_experts"),
        intermediate_size=inner,
        scale=raw.number("routed_scaling_factor", 1.0),
        shared_size=inner * raw.integer("n_shared_experts", shared),
        names=NAMES,
        **settings,
    )


class DeepseekForCausalLM(MixtureForCausalLM):
    def layer(self, layer: LayerWeights, cos_sin: Tensor | None, query_scales: Tensor | None) -> Layer:
        return DecoderLayer(latent_block(layer, cos_sin), self.feed_forward(layer))
