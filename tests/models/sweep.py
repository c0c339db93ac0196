"""Every causal family of transformers that declares attention backends, in a tiny variant, against transformers itself.

``python -m tests.models.sweep [MODEL_TYPE ...]`` prints a line a family: whether its greedy tokens are those of
transformers in float32, alone and in batches of chunks, or why not.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from asyncengine.config import EngineConfig
from asyncengine.errors import AsyncEngineError
from asyncengine.runner.steps.model_runner import CpuModelRunner
from tests.models import tiny

COUNT = 12
PROMPTS = (1, 9, 23)
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), tiny.VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "dff", "ffn_hidden_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size"), 40),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "local_attention"), 7),
    "head_dim": 16, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "shared_expert_intermediate_size": 40, "v_head_dim": 12, "initializer_range": 0.25,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), None),
    **dict.fromkeys(("is_decoder", "use_cache"), True),
}  # fmt: skip
"""Values of the keys that a family's config has."""
MOST_PARAMETERS = 20_000_000
NO_GROUPS = {"num_key_value_heads": 4}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "dots3_note_text"), NO_GROUPS),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu", "hy_v4"), NO_GROUPS),
    "longcat_flash": NO_GROUPS | {"head_dim": 8, "zero_expert_num": 2, "num_layers": 2},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 6, "moe_top_k": 2, "hidden_size": 64},
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 16,
    },
    "modernbert-decoder": dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "opt": {"init_std": 0.25},
    "roc_bert": {"initializer_range": 0.6},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX", "de_DE"]},
    "zaya": {"num_experts_per_tok": 1},
    "granitemoehybrid": {"layer_types": ["attention"] * 4, "shared_intermediate_size": 40},
    "moshi": {"sliding_window": 128},
    "llama4_text": {"attention_chunk_size": 128},
    "deepseek_v2": NO_GROUPS | {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "cwm": {"bos_token_id": 0},
}
"""Values for one family."""


def family(kind: str) -> Any:
    """The class of a model type."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    return getattr(transformers, names if isinstance(names, str) else names[0])


def families() -> dict[str, Any]:
    """Model types and their classes."""
    found = {kind: family(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    return {kind: cls for kind, cls in found.items() if cls._supports_attention_backend}


def tiny_config(kind: str) -> Any:
    cls = CONFIG_MAPPING[kind]
    fields = {field.name for field in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in SMALL.items() if key in fields} | OWN.get(kind, {}))


def tiny_model(kind: str, seed: int = 0) -> Any:
    """A random model in float32, norms and biases random as well."""
    torch.manual_seed(seed)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in family(kind)(tiny_config(kind)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"the variant has {size:,} parameters")
    model = family(kind)(tiny_config(kind)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 0, 0.2)
        elif parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1, 0.2)
    return model


def check(kind: str, directory: Path) -> str:
    """Save a tiny model, run it by both, and return a word: "same", or what is not."""
    model = tiny_model(kind)
    model.save_pretrained(directory)
    draw = random.Random(1)
    prompts = [[draw.randrange(tiny.VOCAB_SIZE) for _ in range(n)] for n in PROMPTS]
    expected: list[list[int]] = []
    settings = {
        "num_kv_blocks": 64,
        "cpu_threads": 2,
        "model_impl": "transformers",
        "dtype": "float32",
        "max_model_len": 128,
    }
    runner = CpuModelRunner.load(EngineConfig.from_kwargs(str(directory), settings))
    for chunk in (64, 1, 5):
        driver = tiny.Driver(runner, native=True)
        sequences = [driver.add(prompt, len(prompt) + COUNT) for prompt in prompts]
        driver.run(sequences, COUNT, chunk)
        if not expected:  # the tokens are those that transformers generates if these are them
            expected = [tiny.followers(model, s.tokens[: s.prompt_len], s.generated) for s in sequences]
        for sequence, tokens in zip(sequences, expected, strict=True):
            if sequence.generated != tokens:
                at = next(i for i, (a, b) in enumerate(zip(sequence.generated, tokens, strict=True)) if a != b)
                return f"other tokens in chunks of {chunk}, prompt of {sequence.prompt_len}, from token {at}"
    return (
        "same" if len({tuple(tokens) for tokens in expected}) > 1 else "the continuations do not depend on the prompt"
    )


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results = {}
    for kind in sys.argv[1:] or families():
        with tempfile.TemporaryDirectory() as directory:
            try:
                results[kind] = check(kind, Path(directory))
            except AsyncEngineError as e:
                results[kind] = f"refused: {e}".replace(directory, "")
            except Exception as e:
                if len(sys.argv) == 2:
                    raise
                results[kind] = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        print(f"{kind:24} {results[kind]}", flush=True)
    print(f"{sum(result == 'same' for result in results.values())} of {len(results)} are the same")


if __name__ == "__main__":
    main()
