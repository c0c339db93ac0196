"""GGUF files: a model's shape, its tensors and its tokenizer, or ModelError."""

from __future__ import annotations

import struct
from contextlib import closing, suppress
from typing import Any

import torch

from asyncengine.errors import ModelError
from asyncengine.kernels.blocks import SIZES, BlockType, row_bytes
from asyncengine.models.config import RawConfig
from asyncengine.models.registry import find_family
from asyncengine.models.rotary import rotary_table
from asyncengine.models.weights.gguf import GgufTensors
from asyncengine.text.tokenizer import Tokenizer
from tests.fuzz.source import NUMBERS, Source, scratch_directory

ARCHITECTURES = (*("llama",) * 6, *("qwen2",) * 2, "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "mamba", "")
SHAPE = {
    "context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32,
    "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e4,
}  # fmt: skip
KEYS = (
    *SHAPE, "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "attention.sliding_window", "expert_count", "expert_used_count", "vocab_size",
    "expert_feed_forward_length", "attn_logit_softcapping", "final_logit_softcapping", "unheard_of",
)  # fmt: skip
TENSORS = {
    "token_embd.weight": (8, 32), "output_norm.weight": (32,), "blk.0.attn_q.weight": (32, 32),
    "rope_freqs.weight": (8,), "rope_factors_long.weight": (8,), "rope_factors_short.weight": (8,),
    "output.weight": (8, 32),
}  # fmt: skip
TOKENS = ("a", "b", "ab", "c", "<s>", "</s>", "\u2581", "\u0120a", "<0x41>", "")
WORDS = ("llama", "gpt2", "bert", "default", "qwen2", "llama-bpe", "linear", "yarn", "none", "longrope")
SIZES_OF_LIES = (0, 1, 2, 31, 33, 2**16, 2**31, 2**40, 2**63, 2**64 - 1)
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

PATH = scratch_directory() / "model.gguf"


def one_input(data: bytes) -> None:
    source = Source(data)
    PATH.write_bytes(b"GGUF" + source.rest() if source.byte() % 8 == 7 else file(source))
    with suppress(ModelError):
        raw = RawConfig.load(PATH)
        _, family = find_family(raw)
        model = family.read_config(raw)
        for rope, dim in set(zip(model.layer_ropes, model.head_dims, strict=True)):
            rotary_table(rope, dim, min(model.max_positions, 16))
    with suppress(ModelError), closing(GgufTensors(PATH, torch.float32)) as tensors:
        for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"):
            with suppress(ModelError):
                assert tensors.get(name, 8, 32).shape == (8, 32)
        tensors.finish()
    with suppress(ModelError):
        Tokenizer.from_pretrained(str(PATH)).encode("ab a")


def file(source: Source) -> bytes:
    """A file that is right, but for a few of its numbers."""
    architecture = source.pick(ARCHITECTURES)
    values: dict[str, Any] = {"general.architecture": architecture}
    values |= {f"{architecture}.{key}": value for key, value in SHAPE.items()}
    for _ in range(source.integer(0, 6)):
        values[f"{architecture}.{source.pick(KEYS)}"] = value(source)
    if source.flag():
        values |= tokenizer(source)
    entries = [text(source, key) + packed(source, value) for key, value in values.items()]
    offset, table = 0, []
    for name, shape in TENSORS.items():
        if source.byte() % 16 >= (3 if "rope" in name else 14):
            continue
        common = (0,) if len(shape) == 1 else (0, 1, 8, 2, 20, 30)
        kind = source.pick(common) if source.byte() % 16 != 15 else source.pick((4, 99, *SIZES))
        axes = [n if source.byte() % 16 != 15 else source.pick(SIZES_OF_LIES) for n in shape[::-1]]
        place = offset if source.byte() % 16 != 15 else source.pick(SIZES_OF_LIES)
        table.append(text(source, name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, kind, place))
        offset += -(-size_of(kind, shape) // 32) * 32
    counts = [n if source.byte() % 16 != 15 else source.pick(SIZES_OF_LIES) for n in (len(table), len(entries))]
    head = b"GGUF" + struct.pack("<IQQ", source.pick((*(3,) * 9, 2, 1)), *counts) + b"".join(entries) + b"".join(table)
    return head + bytes(-len(head) % 32) + b"\x3f" * (offset if source.byte() % 8 != 7 else source.byte())


def size_of(kind: int, shape: tuple[int, ...]) -> int:
    with suppress(ValueError):
        return (
            shape[0] * row_bytes(BlockType(kind), shape[-1]) if len(shape) > 1 else row_bytes(BlockType(kind), shape[0])
        )
    return 32


def tokenizer(source: Source) -> dict[str, Any]:
    tokens = [source.pick(TOKENS) for _ in range(source.integer(0, 12))]
    values: dict[str, Any] = {"model": source.pick(WORDS[:3]), "tokens": tokens, "pre": source.pick(WORDS)}
    values["merges"] = [source.pick(("a b", "b a", "a", " ")) for _ in range(source.integer(0, 3))]
    values["scores"] = [float(source.byte()) for _ in tokens]
    values["token_type"] = [source.byte() % 7 for _ in tokens]
    values |= {f"{name}_token_id": source.byte() % 16 for name in ("bos", "eos", "unknown")}
    values["add_bos_token"] = source.flag()
    for name in list(values):
        if source.byte() % 8 == 7:
            values[name] = value(source)
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def value(source: Source) -> Any:
    match source.byte() % 4:
        case 0:
            return source.pick(NUMBERS)
        case 1:
            return source.pick(WORDS)
        case 2:
            return [source.pick(NUMBERS) for _ in range(source.integer(0, 3))]
    return source.byte()


def text(source: Source, words: str) -> bytes:
    data = words.encode(errors="replace")
    return struct.pack("<Q", len(data) if source.byte() % 32 != 31 else source.pick(SIZES_OF_LIES)) + data


def packed(source: Source, value: Any) -> bytes:
    """A value with its type; a list has the type of its first element."""
    if isinstance(value, list):
        kind = kind_of(value[0]) if value else 4
        count = len(value) if source.byte() % 16 != 15 else source.pick(SIZES_OF_LIES)
        return struct.pack("<IIQ", 9, kind, count) + b"".join(element(source, kind, one) for one in value)
    return struct.pack("<I", kind_of(value)) + element(source, kind_of(value), value)


def kind_of(value: Any) -> int:
    if isinstance(value, str):
        return 8
    if isinstance(value, bool):
        return 7
    return 12 if isinstance(value, float) else 10 if value >= 0 else 11


def element(source: Source, kind: int, value: Any) -> bytes:
    if kind == 8:
        return text(source, str(value))
    try:
        return struct.pack(f"<{FORMATS[kind]}", value)
    except (struct.error, OverflowError):
        return bytes(struct.calcsize(f"<{FORMATS[kind]}"))
