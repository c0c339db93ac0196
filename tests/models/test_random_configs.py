"""Random settings of each family: logits equal those of transformers in float32, or the setting is refused by name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from asyncengine.config import EngineConfig
from asyncengine.errors import ModelError
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.runner.steps.model_runner import CpuModelRunner
from tests.models import tiny
from tests.models.config_sources import SOURCES

PROMPT = [(7 * i + 3) % tiny.VOCAB_SIZE for i in range(45)]
DRAWS, CHANGES = 10, 2
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 777.0}
HALF = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 99.0}
FULL, SLIDING = "full_attention", "sliding_attention"

ROPES = [
    {"rope_type": "default", "rope_theta": 33.0}, LINEAR, {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 50.0},
    tiny.LLAMA3_ROPE, tiny.YARN_ROPE, tiny.YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.3},
    tiny.YARN_ROPE | {"attention_factor": 1.5, "truncate": False}, HALF,
    {SLIDING: {"rope_type": "default", "rope_theta": 50.0}, FULL: LINEAR}, {FULL: tiny.YARN_ROPE | {"truncate": False}},
]  # fmt: skip
TYPES = [
    None, *([kind] * n for kind in (FULL, SLIDING, "chunked_attention") for n in (3, 4, 6)),
    *(([SLIDING, FULL] * 3)[:n] for n in (3, 4, 6)),
]  # fmt: skip

FLAGS = (
    "attention_bias", "mlp_bias", "attention_out_bias", "tie_word_embeddings", "use_sliding_window",
    "use_bidirectional_attention", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "norm_topk_prob",
    "add_cross_attention", "reorder_and_upcast_attn",
)  # fmt: skip
VALUES: dict[str, list[Any]] = {
    "hidden_act": ["gelu", "gelu_pytorch_tanh", "swish"],
    "hidden_activation": ["silu", "gelu_pytorch_tanh"],
    "activation_function": ["gelu", "relu", "gelu_fast", "quick_gelu"],
    **{key: [0.1, 1e-3] for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")},
    **{key: [True, False] for key in FLAGS},
    "head_dim": [8, 12, 24],
    "num_key_value_heads": [1, 2, 3, 6],
    "hidden_size": [36, 72],
    "intermediate_size": [40],
    "num_hidden_layers": [1, 2, 5],
    "n_layer": [1, 2],
    "n_head": [3, 6],
    "n_inner": [17, None],
    "rope_parameters": ROPES,
    "rope_scaling": [*ROPES[:-2], {"type": "linear", "factor": 2.0}],
    "rope_theta": [55.0],
    "rope_local_base_freq": [30.0],
    "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [32],
    "max_position_embeddings": [64, 256],
    "sliding_window": [None, 1, 5, 44, 200],
    "max_window_layers": [0, 1, 99],
    "layer_types": TYPES,
    "sliding_window_pattern": [1, 2, 3, "LLG"],
    "no_rope_layers": [None, [0, 1, 1, 0, 1], [0] * 4],
    "no_rope_layer_interval": [2, 3],
    "attn_logit_softcapping": [2.0, None],
    "final_logit_softcapping": [3.0, None],
    "query_pre_attn_scalar": [5, 64],
    **{key: [0.4, 2] for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier")},
    **{key: [0.5, 3.0] for key in ("logits_scaling", "logit_scale")},
    "num_local_experts": [4],
    "num_experts_per_tok": [1, 4],
    "decoder_sparse_step": [1, 2],
    "mlp_only_layers": [[0], [1]],
    "moe_intermediate_size": [20],
    **{key: [0.5] for key in ("attention_dropout", "attn_pdrop")},
    "is_causal": [False],
    "attention_chunk_size": [8],
}  # fmt: skip
OLD = ("rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")
"""Keys of older files, which stand where there is no rope_parameters."""
OF_ALL = ("layer_types", "is_causal", "attention_chunk_size", "sliding_window", "partial_rotary_factor", *OLD)


def draw(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """Some settings of the family's keys."""
    keys = [key for key in VALUES if key in config or key in OF_ALL]
    changes = {key: rng.choice(VALUES[key]) for key in rng.sample(keys, CHANGES)}
    if changes.keys() & set(OLD) and "rope_parameters" in config:
        changes["rope_parameters"] = None
    if "num_hidden_layers" in changes and "layer_types" in config:
        changes.setdefault("layer_types", None)
    return changes


def write(path: Path, values: dict[str, Any]) -> torch.Tensor | None:
    """Write a random model with this config.json. Return transformers' log probabilities; None: it has no such model.

    A model that it cannot make or run has no weights.
    """
    text = json.dumps(values)
    (path / "config.json").write_text(text)
    (path / "model.safetensors").unlink(missing_ok=True)
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, 0 if name.endswith("bias") else 1, 0.2)
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT])).logits[0, -1]
    except Exception:
        return None
    model.save_pretrained(path)
    (path / "config.json").write_text(text)
    scores: torch.Tensor = logits.log_softmax(-1)
    return scores


def load(path: Path) -> CpuModelRunner | ModelError:
    """The loaded model, or the reason of its refusal."""
    try:
        settings = {"num_kv_blocks": 16, "dtype": "float32"}
        return CpuModelRunner.load(EngineConfig.from_kwargs(str(path), settings), ops=ReferenceOps())
    except ModelError as error:
        return error


def names_one(message: str, changes: dict[str, Any]) -> bool:
    """Return whether a refusal names a setting, or a key within one."""
    within = (key for value in changes.values() if isinstance(value, dict) for key in value)
    has_rope = bool(changes.keys() & {"rope_parameters", *OLD})
    return (has_rope and "rope" in message) or any(name in message for name in (*changes, *within))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("variant", SOURCES)
def test_random_settings_equal_transformers_or_are_refused(tmp_path: Path, variant: str) -> None:
    model = tiny.build_model(variant)
    config = json.loads(json.dumps(model.config.to_dict())) | {"architectures": [type(model).__name__]}
    rng = random.Random(variant)
    compared = 0
    for _ in range(DRAWS):
        changes = draw(rng, config)
        expected = write(tmp_path, config | changes)
        if expected is None or not expected.isfinite().all():
            continue
        runner = load(tmp_path)
        if isinstance(runner, ModelError):
            assert names_one(str(runner), changes), f"{changes}: {runner}"
            continue
        driver = tiny.Driver(runner)
        driver.step([(driver.add(PROMPT, len(PROMPT) + 1), len(PROMPT))])
        error = (driver.logits[0].log_softmax(-1) - expected).abs().max()
        assert error < 2e-3, f"{changes}: log probabilities are {error:.3g} apart"
        compared += 1
    assert compared
