"""Variants of families with mixers that keep a state: settings beside those of ``tiny.DECODER``."""

from __future__ import annotations

from typing import Any

MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 10, "mamba_n_groups": 2, "pad_token_id": None}

NEMOTRON = {
    "mamba_num_heads": 6, "mamba_head_dim": 12, "ssm_state_size": 10, "n_groups": 3, "head_dim": 8,
    "pad_token_id": None, "initializer_range": 0.2,
}  # fmt: skip

DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "head_dim": 16, "pad_token_id": None, "initializer_range": 0.2,
}  # fmt: skip

#: name → (family as transformers calls it, settings)
STATE_SPACES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2", {"num_heads": 6, "head_dim": 16, "state_size": 10, "n_groups": 2, "pad_token_id": None},
    ),
    "mamba2-biased": (
        "Mamba2",
        {
            "num_heads": 9, "head_dim": 16, "state_size": 7, "n_groups": 3, "expand": 3, "conv_kernel": 3,
            "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True, "time_step_limit": [0.01, 0.6],
            "pad_token_id": None,
        },
    ),
    "bamba": ("Bamba", MAMBA | {"attn_layer_indices": [1]}),
    "bamba-biased": (
        "Bamba",
        MAMBA
        | {
            "num_hidden_layers": 4, "attn_layer_indices": [0, 2], "mamba_n_groups": 1, "mamba_d_state": 12,
            "mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True, "mlp_bias": True,
            "tie_word_embeddings": True, "mamba_expand": 1, "mamba_d_head": "auto",
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        MAMBA
        | {
            "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 5, "num_experts_per_tok": 2,
            "intermediate_size": 24, "shared_intermediate_size": 40, "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6, "attention_multiplier": 0.25, "logits_scaling": 5.0,
        },
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybrid",
        MAMBA
        | {
            "num_hidden_layers": 4, "layer_types": ["attention", "mamba", "mamba", "attention"],
            "num_local_experts": 0, "shared_intermediate_size": 56, "position_embedding_type": "rope",
            "mamba_proj_bias": True, "attention_bias": True, "residual_multiplier": 0.7, "tie_word_embeddings": True,
        },
    ),
    "falcon-h1": (
        "FalconH1",
        MAMBA
        | {
            "mamba_d_ssm": 96, "lm_head_multiplier": 0.5, "embedding_multiplier": 2.5, "mlp_multipliers": [0.7, 1.3],
            "key_multiplier": 0.6, "attention_out_multiplier": 0.8, "attention_in_multiplier": 1.2,
            "ssm_multipliers": [0.9, 1.2, 0.7, 1.1, 0.6], "ssm_in_multiplier": 1.4, "ssm_out_multiplier": 0.75,
        },
    ),
    "falcon-h1-normed": (
        "FalconH1",
        MAMBA
        | {
            "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_rms_norm": True, "mamba_proj_bias": True,
            "projectors_bias": True, "attention_bias": True, "mlp_bias": True, "ssm_in_multiplier": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-h1-norm-last": (
        "FalconH1",
        MAMBA
        | {
            "num_hidden_layers": 2, "mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
            "mamba_conv_bias": False,
        },
    ),
    "nemotron-h": (
        "NemotronH",
        NEMOTRON
        | {
            "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
            "use_bias": True, "mlp_bias": True,
        },
    ),
    "nemotron-h-experts": (
        "NemotronH",
        NEMOTRON
        | {
            "layers_block_type": ["full_attention", "moe", "linear_attention", "mlp", "moe", "linear_attention"],
            "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 32, "routed_scaling_factor": 2.5, "n_group": 2, "topk_group": 1,
            "use_conv_bias": False, "tie_word_embeddings": True,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        DELTA
        | {
            "num_hidden_layers": 4, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3-next-biased": (
        "Qwen3Next",
        DELTA
        | {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"], "linear_num_value_heads": 3,
            "linear_num_key_heads": 3, "linear_conv_kernel_dim": 2, "attention_bias": True, "num_experts": 4,
            "num_experts_per_tok": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
            "norm_topk_prob": False, "mlp_only_layers": [1], "tie_word_embeddings": True,
        },
    ),
    "qwen3.5": ("Qwen3_5", DELTA | {"num_hidden_layers": 4}),
    "qwen3.5-biased": (
        "Qwen3_5",
        DELTA
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 1,
            "linear_key_head_dim": 7, "attention_bias": True, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        DELTA
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
            "initializer_range": 0.18,
        },
    ),
    "qwen3.5-moe-tied": (
        "Qwen3_5Moe",
        DELTA
        | {
            "num_hidden_layers": 4, "linear_num_value_heads": 6, "num_experts": 4, "num_experts_per_tok": 4,
            "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "tie_word_embeddings": True,
            "initializer_range": 0.1,
        },
    ),
}  # fmt: skip
