"""GraniteForCausalLM, of Granite 3 (IBM 2024): Llama with factors on embeddings, scores, blocks and logits."""

from __future__ import annotations

from dataclasses import replace

from asyncengine.models.config import ModelConfig, RawConfig
from asyncengine.models.llama import LlamaForCausalLM, read_decoder_config


def read_config(raw: RawConfig) -> ModelConfig:
    attention_bias = raw.flag("attention_bias", False)
    config = read_decoder_config(
        raw, qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=raw.flag("mlp_bias", False)
    )
    return with_multipliers(config, raw)


def with_multipliers(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Return the config with Granite's factors.

    The residual is kept as its quotient by residual_multiplier, so that no product of a block needs that factor. Norms
    do not see the difference, once their epsilon is divided by the factor's square.
    """
    of_blocks = raw.number("residual_multiplier", 1.0)
    return replace(
        config,
        norm_eps=config.norm_eps / of_blocks**2,
        embedding_scale=raw.number("embedding_multiplier", 1.0) / of_blocks,
        layer_scales=(raw.number("attention_multiplier", 1.0),) * config.num_layers,
        logit_scale=1 / raw.number("logits_scaling", 1.0),
    )


class GraniteForCausalLM(LlamaForCausalLM):
    pass
