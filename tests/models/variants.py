"""Settings of small models, two or more of each family."""

from __future__ import annotations

from typing import Any

from tests.models.mixtures import MIXTURES
from tests.models.state_spaces import STATE_SPACES

VOCAB_SIZE = 199

GPT2 = {
    "vocab_size": VOCAB_SIZE, "n_positions": 128, "n_embd": 60, "n_layer": 3, "n_head": 5,
    "initializer_range": 0.3,
}  # fmt: skip
DECODER = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "initializer_range": 0.3,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 10000.0,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0,
    "rope_theta": 10000.0,
}  # fmt: skip

BLOOM = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 3, "n_head": 4, "seq_length": 128, "initializer_range": 0.3,
}  # fmt: skip
MPT = {
    "vocab_size": VOCAB_SIZE, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 128, "initializer_range": 0.3,
}  # fmt: skip
FALCON = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
    "ffn_hidden_size": 88, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip
GEMMA = DECODER | {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24, "pad_token_id": None}
GEMMA4 = DECODER | {
    "head_dim": 8, "global_head_dim": 16, "sliding_window": 6, "hidden_size_per_layer_input": 0, "pad_token_id": None,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": 32, "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.0, 1.4, 3.0, 4.0],
}  # fmt: skip

#: name → (family as transformers calls it, settings)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied-scaled": (
        "GPT2",
        GPT2
        | {
            "tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True, "n_inner": 100,
            "activation_function": "gelu",
        },
    ),
    "llama": ("Llama", DECODER),
    "llama-odd-heads-biased": (
        "Llama",
        DECODER
        | {
            "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "attention_bias": True,
            "mlp_bias": True, "tie_word_embeddings": True,
        },
    ),
    "llama-rope-linear": (
        "Llama", DECODER | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}},
    ),
    "llama-rope-dynamic": (
        "Llama", DECODER | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 9000.0}},
    ),
    "llama-rope-llama3": ("Llama", DECODER | {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
    "llama-rope-yarn": ("Llama", DECODER | {"rope_parameters": YARN_ROPE, "head_dim": 16}),
    "mistral-window": ("Mistral", DECODER | {"sliding_window": 7}),
    "mistral-no-window": ("Mistral", DECODER | {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("Qwen2", DECODER | {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        DECODER | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", DECODER | {"head_dim": 20, "tie_word_embeddings": True}),
    "qwen3-window-biased": (
        "Qwen3",
        DECODER
        | {
            "head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 9.0}),
    "gemma2-uncapped-biased": (
        "Gemma2",
        GEMMA
        | {
            "hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "attention_bias": True,
            "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "gemma3": ("Gemma3", GEMMA | {"num_hidden_layers": 6, "initializer_range": 0.15}),
    "gemma3-scaled": (
        "Gemma3",
        GEMMA
        | {
            "head_dim": 12, "num_key_value_heads": 3, "final_logit_softcapping": 20.0, "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 90000.0},
            },
        },
    ),
    "gemma4": (
        "Gemma4",
        GEMMA4 | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 12.0},
    ),
    "gemma4-shared": (
        "Gemma4",
        GEMMA4
        | {
            "num_hidden_layers": 6, "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention"] * 3, "hidden_size_per_layer_input": 10,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "gemma4-experts": (
        "Gemma4",
        GEMMA4
        | {
            "head_dim": 16, "global_head_dim": 8, "enable_moe_block": True, "num_experts": 7, "top_k_experts": 3,
            "moe_intermediate_size": 24, "tie_word_embeddings": False, "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": VOCAB_SIZE + 3,
        },
    ),
    "phi3": (
        "Phi3",
        DECODER
        | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}, "pad_token_id": None},
    ),
    "phi3-longrope": (
        "Phi3",
        DECODER
        | {
            "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 9,
            "tie_word_embeddings": True, "pad_token_id": None, "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope", "partial_rotary_factor": 0.75, "attention_factor": 1.2,
                "short_factor": [1.0, 1.0, 1.2, 1.5, 2.0, 2.5], "long_factor": [1.0, 1.5, 2.0, 2.5, 4.0, 5.0],
            },
        },
    ),
    "smollm3": ("SmolLM3", DECODER | {"num_hidden_layers": 4, "tie_word_embeddings": True, "pad_token_id": None}),
    "smollm3-window-biased": (
        "SmolLM3",
        DECODER
        | {
            "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 7, "attention_bias": True,
            "mlp_bias": True, "no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 8,
            "tie_word_embeddings": False, "pad_token_id": None,
        },
    ),
    "seed-oss": ("SeedOss", DECODER | {"head_dim": 16, "initializer_range": 0.2, "pad_token_id": None}),
    "seed-oss-biased": (
        "SeedOss",
        DECODER
        | {
            "head_dim": 10, "num_key_value_heads": 3, "attention_out_bias": True, "mlp_bias": True,
            "initializer_range": 0.2, "tie_word_embeddings": True, "pad_token_id": None,
        },
    ),
    "ministral3": (
        "Ministral3",
        DECODER
        | {
            "head_dim": 16, "pad_token_id": None,
            "rope_parameters": YARN_ROPE | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.7},
        },
    ),
    "ministral3-window": (
        "Ministral3",
        DECODER
        | {
            "head_dim": 12, "num_key_value_heads": 3, "sliding_window": 11, "tie_word_embeddings": True,
            "pad_token_id": None,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 900.0, "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "olmo2": ("Olmo2", DECODER | {"pad_token_id": None}),
    "olmo2-biased": (
        "Olmo2",
        DECODER
        | {
            "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 7, "attention_bias": True,
            "tie_word_embeddings": True, "pad_token_id": None,
        },
    ),
    "olmo3": ("Olmo3", DECODER | {"num_hidden_layers": 4, "sliding_window": 7, "pad_token_id": None}),
    "olmo3-yarn": (
        "Olmo3",
        DECODER
        | {
            "num_key_value_heads": 3, "sliding_window": 9, "attention_bias": True, "pad_token_id": None,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0}, "full_attention": YARN_ROPE,
            },
        },
    ),
    "exaone4": ("Exaone4", DECODER | {"num_hidden_layers": 4, "sliding_window": 6, "head_dim": 16}),
    "exaone4-no-window": (
        "Exaone4",
        DECODER
        | {
            "sliding_window": None, "num_key_value_heads": 1, "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": True,
        },
    ),
    "granite": (
        "Granite",
        DECODER
        | {
            "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.25,
            "logits_scaling": 5.0, "rms_norm_eps": 0.01,
        },
    ),
    "granite-biased": (
        "Granite",
        DECODER
        | {
            "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 7, "attention_bias": True,
            "mlp_bias": True, "tie_word_embeddings": True, "residual_multiplier": 1.7, "logits_scaling": 0.5,
        },
    ),
    "bloom": ("Bloom", BLOOM),
    "bloom-six-heads": ("Bloom", BLOOM | {"hidden_size": 48, "n_head": 6, "tie_word_embeddings": False}),
    "mpt": ("Mpt", MPT),
    "mpt-clipped": (
        "Mpt",
        MPT | {
            "d_model": 48, "n_heads": 6, "attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.2},
        },
    ),
    "falcon": ("Falcon", FALCON),
    "falcon-groups": ("Falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-one-norm": (
        "Falcon",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "falcon-alibi": (
        "Falcon",
        FALCON | {
            "alibi": True, "parallel_attn": False, "multi_query": False, "bias": True, "tie_word_embeddings": False,
        },
    ),
    "cohere2": (
        "Cohere2",
        DECODER | {"num_hidden_layers": 4, "sliding_window": 7, "logit_scale": 0.3, "pad_token_id": None},
    ),
    "cohere2-biased": (
        "Cohere2",
        DECODER
        | {
            "hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "attention_bias": True,
            "sliding_window": 9, "layer_norm_eps": 0.02, "tie_word_embeddings": False, "pad_token_id": None,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "glm": ("Glm", DECODER | {"head_dim": 8, "pad_token_id": None}),
    "glm-unbiased": (
        "Glm",
        DECODER
        | {
            "head_dim": 16, "num_key_value_heads": 3, "attention_bias": False, "tie_word_embeddings": True,
            "pad_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.75},
        },
    ),
    "glm4": ("Glm4", DECODER | {"head_dim": 8, "pad_token_id": None}),
    "glm4-unbiased": (
        "Glm4",
        DECODER
        | {
            "head_dim": 12, "num_key_value_heads": 6, "attention_bias": False, "tie_word_embeddings": True,
            "rms_norm_eps": 0.01, "pad_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 1.0},
        },
    ),
}  # fmt: skip
VARIANTS |= {
    "lfm2": (
        "Lfm2", DECODER | {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    ),
    "lfm2-biased": (
        "Lfm2",
        DECODER
        | {
            "num_hidden_layers": 4, "full_attn_idxs": [1, 3], "conv_L_cache": 4, "conv_bias": True,
            "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False,
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        DECODER
        | {
            "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        },
    ),
    "lfm2-moe-plain": (
        "Lfm2Moe",
        DECODER
        | {
            "layer_types": ["full_attention", "conv", "conv"], "num_dense_layers": 0, "num_experts": 5,
            "num_experts_per_tok": 3, "moe_intermediate_size": 24, "use_expert_bias": False, "norm_topk_prob": False,
            "routed_scaling_factor": 1.5, "conv_bias": True, "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip
VARIANTS |= {name: (family, DECODER | changes) for name, (family, changes) in STATE_SPACES.items()}
VARIANTS |= {name: (family, DECODER | changes) for name, (family, changes) in MIXTURES.items()}
