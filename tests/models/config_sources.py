"""Files of transformers that read each family's config.json, and the keys that change no result."""

from __future__ import annotations

SOURCES = {
    "gpt2": ["gpt2"],
    "llama": ["llama"],
    "mistral-window": ["mistral", "ministral"],
    "qwen2-window": ["qwen2"],
    "qwen3-window-biased": ["qwen3"],
    "qwen3-moe-window-biased": ["qwen3_moe"],
    "qwen2-moe-window": ["qwen2_moe"],
    "mixtral": ["mixtral"],
    "olmoe": ["olmoe"],
    "glm4-moe": ["glm4_moe"],
    "minimax-m2": ["minimax_m2"],
    "gpt-oss": ["gpt_oss"],
    "gemma2": ["gemma2"],
    "gemma3": ["gemma3"],
    "gemma4-experts": ["gemma4"],
    "lfm2-biased": ["lfm2"],
    "lfm2-moe": ["lfm2_moe"],
    "mamba2-biased": ["mamba2"],
    "bamba": ["bamba"],
    "granite-hybrid": ["granitemoehybrid"],
    "falcon-h1-norm-last": ["falcon_h1"],
    "nemotron-h-experts": ["nemotron_h"],
    "phi3-longrope": ["phi3"],
    "smollm3": ["smollm3"],
    "seed-oss": ["seed_oss"],
    "ministral3": ["ministral3"],
    "olmo2": ["olmo2"],
    "olmo3": ["olmo3"],
    "exaone4": ["exaone4"],
    "granite": ["granite"],
    "cohere2": ["cohere2"],
    "glm": ["glm"],
    "glm4": ["glm4"],
    "bloom": ["bloom"],
    "mpt-clipped": ["mpt"],
    "falcon": ["falcon"],
}
SHARED = ["masking_utils.py", "cache_utils.py", "modeling_rope_utils.py"]
HARMLESS = {
    **dict.fromkeys((f"summary_{x}" for x in ("activation", "first_dropout", "last_dropout")), "a head for choices"),
    **dict.fromkeys((f"summary_{x}" for x in ("proj_to_labels", "type", "use_proj")), "a head for choices"),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), "an output that nobody asks for"),
    **dict.fromkeys(("router_aux_loss_coef", "router_jitter_noise", "embedding_fraction", "init_device"), "training"),
    **dict.fromkeys(
        ("attn_pdrop", "embd_pdrop", "emb_pdrop", "resid_pdrop", "attention_dropout", "residual_dropout"), "dropout"
    ),
    **dict.fromkeys((f"time_step_{x}" for x in ("floor", "max", "min", "rank")), "the first weights"),
    "rescale_prenorm_residual": "the first weights",
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), "the cut of a prompt, which changes no result"),
    **dict.fromkeys(("residual_in_fp32", "mamba_ssm_cache_dtype"), "a precision"),
    "z_loss_coefficient": "training",
    "expand": "a size that others give too",
    "num_logits_to_keep": "tokens that logits are wanted of",
    **dict.fromkeys(("use_mamba_kernels", "moe_shared_expert_overlap"), "the way of a computation"),
    **dict.fromkeys(
        ("num_nextn_predict_layers", "mtp_layers_block_type"), "layers that guess tokens, which are not used"
    ),
    "n_shared_experts": "the number of experts whose size is given in all",
    "hidden_dropout": "dropout of a head for tokens",
    "classifier_dropout": "dropout of a head for tokens",
    "reorder_and_upcast_attn": "the order of products, and their precision in training",
    "pad_token_id": "the row that is not trained",
    "pretraining_tp": "a way to split products in training",
    "output_router_logits": "an output for training",
    "num_mtp_layers": "layers that guess tokens, which are not used",
    "norm_type": "a precision of norms",
    "learned_pos_emb": "MPT has linear biases, and transformers reads no table of positions",
    "return_dict": "the form of the output",
    "use_cache": "keys and values are always kept",
    "num_labels": "id2label says it, where there are labels",
    "id2label": "labels of a classification model alone",
    "problem_type": "labels of a classification model alone",
    "number_of_conv_states": "the number of states that a layer of the family keeps",
    "image_token_id": "images, which are not served",
    "mm_tokens_per_image": "images, which are not served",
    "vision_config": "images, which are not served",
    "text_config": "the language model of a model for images, which is read apart",
}
ROTARY = {"head_dim", "rope_parameters", "original_max_position_embeddings", "partial_rotary_factor", "rope_theta"}
"""Keys of rotary positions, which GPT-2, Bloom and MPT do not have."""
NOT_IN_FILES = {"is_encoder_decoder", "dtype", "eos_token_id", "bos_token_id", "is_heterogeneous", "default_theta"}
"""The ends are read apart, and the others are no keys of a file."""
