"""Variants of families with mixtures of experts: settings beside those of ``tiny.DECODER``."""

from __future__ import annotations

from typing import Any

LATENT = {
    "num_key_value_heads": 6, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16,
}  # fmt: skip

#: name → (family as transformers calls it, settings)
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_local_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
    ),
    "qwen3-moe-window-biased": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 4, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True,
            "use_sliding_window": True, "sliding_window": 6, "tie_word_embeddings": True,
        },
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 56, "initializer_range": 0.2,
        },
    ),
    "qwen2-moe-window": (
        "Qwen2Moe",
        {
            "num_hidden_layers": 4, "num_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 2,
            "use_sliding_window": True, "sliding_window": 7, "qkv_bias": False, "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": (
        "Mixtral",
        {
            "head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 6,
            "tie_word_embeddings": True,
        },
    ),
    "olmoe": (
        "Olmoe",
        {"num_experts": 8, "num_experts_per_tok": 3, "initializer_range": 0.2, "pad_token_id": None},
    ),
    "olmoe-biased": (
        "Olmoe",
        {
            "num_key_value_heads": 6, "num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40,
            "norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True, "pad_token_id": None,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
            "routed_scaling_factor": 2.5,
        },
    ),
    "glm4-moe-groups": (
        "Glm4Moe",
        {
            "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
            "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "first_k_dense_replace": 2, "use_qk_norm": True,
            "attention_bias": True, "tie_word_embeddings": True,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        LATENT
        | {
            "q_lora_rank": 20, "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
            "first_k_dense_replace": 1, "moe_intermediate_size": 32, "initializer_range": 0.2,
        },
    ),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        LATENT
        | {
            "q_lora_rank": None, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 2, "moe_intermediate_size": 32, "n_shared_experts": 2, "attention_bias": True,
            "norm_topk_prob": False, "rope_interleave": False, "tie_word_embeddings": True, "initializer_range": 0.2,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 900.0,
                "mscale": 1.0, "mscale_all_dim": 0.8,
            },
        },
    ),
    "deepseek-v3-kimi-k2": (
        "DeepseekV3",
        LATENT
        | {
            "q_lora_rank": 24, "n_routed_experts": 12, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1, "moe_intermediate_size": 24, "n_shared_experts": 1,
            "routed_scaling_factor": 2.827, "initializer_range": 0.2,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16, "rope_theta": 50_000.0,
                "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            },
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        LATENT
        | {
            "q_lora_rank": None, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "n_shared_experts": 1,
        },
    ),
    "deepseek-v2-groups": (
        "DeepseekV2",
        LATENT
        | {
            "q_lora_rank": 16, "n_routed_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 24,
            "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7, "attention_bias": True, "tie_word_embeddings": True,
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        LATENT
        | {"q_lora_rank": 20, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "glm4-moe-lite-mixed": (
        "Glm4MoeLite",
        LATENT
        | {
            "q_lora_rank": None, "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2,
            "topk_group": 1, "moe_intermediate_size": 24, "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rms_norm_eps": 1e-3, "attention_bias": True, "tie_word_embeddings": True,
        },
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40,
            "rope_parameters": {"rope_type": "default", "rope_theta": 900.0, "partial_rotary_factor": 0.5},
        },
    ),
    "minimax-m2-whole": (
        "MiniMaxM2",
        {
            "head_dim": 8, "num_key_value_heads": 3, "num_local_experts": 4, "num_experts_per_tok": 3,
            "intermediate_size": 24, "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2,
            "intermediate_size": 40, "sliding_window": 6, "initializer_range": 0.2,
        },
    ),
    "gpt-oss-unbiased": (
        "GptOss",
        {
            "head_dim": 8, "num_key_value_heads": 3, "num_local_experts": 4, "num_experts_per_tok": 4,
            "intermediate_size": 24, "sliding_window": 9, "attention_bias": False, "initializer_range": 0.2,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}, "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip
