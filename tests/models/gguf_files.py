"""GGUF files of small models, written by the gguf package, beside checkpoints of the same numbers in float32."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from tests.models import tiny

Array = npt.NDArray[Any]
ARCHITECTURES = {
    "Llama": "llama", "Mixtral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3", "Qwen2Moe": "qwen2moe",
    "Qwen3Moe": "qwen3moe", "Gemma2": "gemma2", "Gemma3": "gemma3", "Phi3": "phi3",
}  # fmt: skip
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


def random_blocks(kind: Type, rows: int, columns: int, seed: int = 0, size: float = 1.0) -> Array:
    """Blocks uint8 [rows, bytes] of random codes. Scales are such that numbers have about this size."""
    numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(seed)
    blocks = draw.integers(0, 256, (rows * columns // numbers, num_bytes), dtype=np.uint8)
    # Places of the float16 scales, and about the largest number for a scale of 1.
    places, largest = {
        Type.Q4_0: ((0,), 8), Type.Q4_1: ((0, 2), 16), Type.Q5_0: ((0,), 16), Type.Q5_1: ((0, 2), 32),
        Type.Q8_0: ((0,), 128), Type.IQ4_NL: ((0,), 128), Type.Q2_K: ((80, 82), 45), Type.Q3_K: ((108,), 128),
        Type.Q4_K: ((0, 2), 945), Type.Q5_K: ((0, 2), 1953), Type.Q6_K: ((208,), 4096), Type.IQ4_XS: ((0,), 4096),
    }[kind]  # fmt: skip
    for at in places:
        scales = draw.uniform(0.5, 1.0, len(blocks)) * size / largest
        blocks[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def to_blocks(matrix: Array, kind: Type, seed: int) -> Array:
    """A matrix in a type; random numbers where the package has no quantiser for it."""
    try:
        return gguf.quants.quantize(matrix, kind)
    except NotImplementedError:
        flat = matrix.reshape(-1, matrix.shape[-1])
        return random_blocks(kind, *flat.shape, seed, float(2 * np.std(matrix))).reshape(*matrix.shape[:-1], -1)


def neighbours(matrix: Array, heads: int) -> Array:
    """The rows of queries or keys in llama.cpp's order: those that are rotated together are neighbours."""
    halves = matrix.reshape(heads, 2, -1, *matrix.shape[1:])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def write_model(
    directory: Path, variant: str, kind: Callable[[str], Type], *, tokenizer: Any = None, **changes: Any
) -> tuple[Path, Path]:
    """A GGUF file, and a checkpoint of the same numbers. ``kind``: the type of a matrix by its name in the file."""
    family, plain = tiny.VARIANTS[variant][0], directory / "plain"
    tiny.build_model(variant, **changes).save_pretrained(plain)
    config = json.loads((plain / "config.json").read_text())
    stored = {name: tensor.float().numpy() for name, tensor in load_file(plain / "model.safetensors").items()}
    arch = ARCHITECTURES[family]
    path = directory / "model.gguf"
    writer = gguf.GGUFWriter(path, arch)
    write_settings(writer, arch, config)
    if tokenizer is not None:
        tokenizer(writer)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config["num_hidden_layers"]
    )
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    experts: dict[str, list[str]] = {}
    for name in sorted(stored, key=lambda n: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", n)]):
        match = EXPERT.fullmatch(name)
        experts.setdefault(f"{match[1]}.{match[3]}.weight" if match else name, []).append(name)
    for seed, (name, members) in enumerate(experts.items()):
        module, _, suffix = name.rpartition(".")
        own = f"{names.get_name(module)}.{suffix}"
        tensor = np.stack([stored[m] for m in members]) if EXPERT.fullmatch(members[0]) else stored[name]
        head_count = next((count for key, count in heads.items() if arch == "llama" and module.endswith(key)), 0)
        if own.endswith("ffn_gate_inp_shexp.weight"):
            tensor = tensor[0]
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        ordered = neighbours(tensor, head_count) if head_count else tensor
        if tensor.ndim < 2 or "_inp" in own:
            writer.add_tensor(own, ordered)
            continue
        wanted = kind(own)
        blocks = to_blocks(ordered, wanted, seed)
        numbers = gguf.quants.dequantize(blocks, wanted)
        if head_count:
            rows = neighbours(np.arange(len(tensor)), head_count)
            numbers = numbers[np.argsort(rows)]
        writer.add_tensor(own, blocks, raw_dtype=wanted)
        for i, member in enumerate(members):
            stored[member] = numbers[i] if EXPERT.fullmatch(member) else numbers
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = {name: torch.from_numpy(np.array(tensor, np.float32)) for name, tensor in stored.items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return path, plain


def write_settings(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("full_attention", rope).get("rope_theta", 10_000.0))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    writer.add_rope_dimension_count(int(head_dim * partial))
    if arch == "phi3" and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if count := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if "shared_expert_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if arch.startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
