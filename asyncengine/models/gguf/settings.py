"""The keys of config.json that the metadata of a GGUF file stand for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncengine.errors import ModelError, UnsupportedModelError
from asyncengine.kernels.blocks import BlockType, dequantize
from asyncengine.models.files import excerpt
from asyncengine.models.gguf.files import read_model
from asyncengine.models.gguf.mapped import MappedFiles
from asyncengine.models.gguf.reader import Header

_COMMON = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "embedding_length": "hidden_size", "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.key_length": "head_dim",
}  # fmt: skip
_EXPERTS = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip
_GEMMA = {
    "attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
_READ_APART = {
    "vocab_size", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.finetuned",
    "rope.scaling.yarn_log_multiplier", "attention.value_length", "attention.sliding_window_pattern",
    "rope.freq_base_swa", "tensor_data_layout", "attention.causal", "use_parallel_residual",
    "interleave_moe_layer_step",
}  # fmt: skip
"""Keys that ``_checked`` or ``_rope`` reads, and keys that change nothing."""
_EOS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ROPES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_MAX_FACTORS = 1 << 12


class _Architecture(NamedTuple):
    model_type: str
    family: str
    keys: dict[str, str] = _COMMON
    constants: dict[str, Any] = {}  # noqa: RUF012  # nobody writes to it
    interleaved: bool = False
    """Rows of queries and keys lie in the order in which neighbours are rotated together."""
    norm_offset: float = 0.0
    """The weights of norms in a file are larger by so much than those of the family's checkpoints."""


ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", interleaved=True),
    "mixtral": _Architecture(
        "mixtral", "MixtralForCausalLM", _COMMON | _EXPERTS, {"sliding_window": None}, interleaved=True
    ),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": _Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _COMMON | _EXPERTS),
    "qwen3moe": _Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _COMMON | _EXPERTS, {"norm_topk_prob": True}),
    "gemma2": _Architecture("gemma2", "Gemma2ForCausalLM", _COMMON | _GEMMA, norm_offset=1.0),
    "gemma3": _Architecture("gemma3_text", "Gemma3ForCausalLM", _COMMON | _GEMMA, norm_offset=1.0),
    "phi3": _Architecture(
        "phi3", "Phi3ForCausalLM", _COMMON | {"attention.sliding_window": "sliding_window"}, {"sliding_window": None}
    ),
}
"""By general.architecture; "mixtral" is a llama with experts."""
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
"""Layers of the size of Gemma whose scores are divided by the root of hidden size over heads, and not of a head's."""


def architecture_of(header: Header, path: Path) -> str:
    """A key of ``ARCHITECTURES``. Raises UnsupportedModelError for an architecture that is not known, by name."""
    name = header.metadata.get("general.architecture")
    experts = header.metadata.get("llama.expert_count")
    if name == "llama" and isinstance(experts, int) and experts:
        return "mixtral"
    if not isinstance(name, str) or name not in ARCHITECTURES or name == "mixtral":
        known = ", ".join(name for name in ARCHITECTURES if name != "mixtral")
        raise UnsupportedModelError(f"{path}: the architecture {excerpt(name)} is not read from GGUF, but {known}")
    return name


def read_settings(path: Path) -> dict[str, Any]:
    """config.json of a GGUF file. Raises ModelError for one that is damaged, UnsupportedModelError for metadata that
    change the computation and are not implemented."""
    header = read_model(path)
    name = architecture_of(header, path)
    kind, meta = ARCHITECTURES[name], _Metadata(header, path)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{path} has no matrix token_embd.weight")
    values = {own: meta.plain(key) for key, own in kind.keys.items() if meta.has(key)}
    meta.only({*kind.keys, *_READ_APART}, but_zero={"expert_count", "expert_used_count"})
    values |= kind.constants | {
        "architectures": [kind.family],
        "model_type": kind.model_type,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header),
        "eos_token_id": [i for key in _EOS if isinstance(i := header.metadata.get(f"tokenizer.ggml.{key}"), int)],
        "sliding_window": values.get("sliding_window") or None,
    }
    if "blk.0.attn_q.bias" in header.tensors and name in ("llama", "qwen3", "qwen3moe"):
        values["attention_bias"] = True
    if name in _SCALED_BY_WIDTH:
        values["query_pre_attn_scalar"] = values.get("head_dim", 256)
        if values.get("num_hidden_layers") == _SCALED_BY_WIDTH[name] and (width := _width_of_head(values)):
            values["query_pre_attn_scalar"] = width
    return values | _rope(meta, name, values)


class _Metadata:
    """The metadata of an architecture, with typed access."""

    def __init__(self, header: Header, path: Path) -> None:
        self.header = header
        self.path = path
        self._prefix = f"{header.metadata['general.architecture']}."

    def has(self, key: str) -> bool:
        return self._prefix + key in self.header.metadata

    def plain(self, key: str, default: Any = None) -> Any:
        """A number, a flag or a text; of an array with one value for each layer this value, if it is the same."""
        value = self.header.metadata.get(self._prefix + key, default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            return value[0].item()
        if not isinstance(value, int | float | str | None):
            raise UnsupportedModelError(f"{self.path}: {self._prefix}{key} that differs by layer is not supported")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.plain(key, default)
        if isinstance(value, str) or not 0 < value < 1e9:
            raise ModelError(f"{self.path}: {self._prefix}{key} must be a positive number, found {excerpt(value)}")
        return float(value)

    def only(self, known: set[str], *, but_zero: set[str]) -> None:
        """Raise UnsupportedModelError for another key of the architecture."""
        for whole in self.header.metadata:
            key = whole.removeprefix(self._prefix)
            if whole == key or key in known or (key in but_zero and not self.plain(key)):
                continue
            raise UnsupportedModelError(f"{self.path}: the key {excerpt(whole)} is not supported")


def _dtype(header: Header) -> str:
    """The dtype of activations: that of the matrices, if these are plain floats, and bfloat16 beside blocks."""
    kinds = Counter(tensor.kind for tensor in header.tensors.values() if len(tensor.shape) > 1)
    common = kinds.most_common(1)[0][0] if kinds else BlockType.F32
    return {BlockType.F32: "float32", BlockType.F16: "float16"}.get(common, "bfloat16")


def _rope(meta: _Metadata, name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings. Factors of a tensor, as those of Llama 3, are divisors of the frequencies: longrope's."""
    if name == "gemma3":
        factor = meta.number("rope.scaling.factor", 1.0)
        if meta.plain("rope.scaling.type", "none") not in ("none", "linear"):
            raise UnsupportedModelError(f"{meta.path}: gemma3 with {meta.plain('rope.scaling.type')} is not supported")
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor != 1 else {}
    if (width := _width_of_head(values)) == 0:
        return {}  # the family says what is wrong
    head_dim, context = meta.number("attention.key_length", width), meta.number("context_length", 1)
    rotated = meta.number("rope.dimension_count", head_dim)
    changes: dict[str, Any] = {} if rotated == head_dim else {"partial_rotary_factor": rotated / head_dim}
    original = int(meta.number("rope.scaling.original_context_length", context))
    factors = {tensor: _factors(meta, tensor, int(rotated) // 2) for tensor in _ROPES if tensor in meta.header.tensors}
    if factors:
        long = factors.get("rope_freqs.weight") or factors.get("rope_factors_long.weight")
        short = factors.get("rope_freqs.weight") or factors.get("rope_factors_short.weight")
        if long is None or short is None:
            raise ModelError(f"{meta.path} has factors for long or for short texts, and not both")
        scaling = {"rope_type": "longrope", "long_factor": long, "short_factor": short, "factor": 1.0}
        if "rope_freqs.weight" in factors:
            original, scaling["attention_factor"] = int(context), 1.0
        else:
            scaling["factor"] = max(1.0, context / max(1, original))
            if meta.has("rope.scaling.attn_factor"):
                scaling["attention_factor"] = meta.number("rope.scaling.attn_factor", 1.0)
        return changes | {"rope_scaling": scaling, "original_max_position_embeddings": original}
    kind = meta.plain("rope.scaling.type", "none")
    if kind in ("none", ""):
        return changes
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"{meta.path}: rope.scaling.type = {excerpt(kind)} is not supported")
    scaling = {"rope_type": kind, "factor": meta.number("rope.scaling.factor", 1.0)}
    if meta.has("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    return changes | {"rope_scaling": scaling}


def _width_of_head(values: dict[str, Any]) -> int:
    """Hidden size over heads; 0 if one of them is wrong or missing."""
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    return hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 and hidden > 0 else 0


def _factors(meta: _Metadata, name: str, count: int) -> list[float]:
    tensor = meta.header.tensors[name]
    if tensor.shape != (count,) or count > _MAX_FACTORS:
        raise ModelError(f"{meta.path}: tensor {name} must have {count} numbers, found {excerpt(tensor.shape)}")
    return [float(x) for x in dequantize(tensor.kind, MappedFiles().bytes_of(tensor))]
