"""A checkpoint of an architecture that comes as Python code in its directory."""

from __future__ import annotations

import json
from pathlib import Path

import transformers

from tests.models.tiny import build_model

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def save_with_code(directory: Path) -> transformers.PreTrainedModel:
    """Save a model of an architecture that comes as Python code in its directory."""
    model = build_model("llama")
    model.save_pretrained(directory)
    (directory / "modeling_own.py").write_text(CODE)
    path = directory / "config.json"
    own = {
        "model_type": "own", "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }  # fmt: skip
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    return model
