"""safetensors files and their index: tensors as asked for, or ModelError."""

from __future__ import annotations

import json
import struct
from contextlib import closing, suppress
from typing import Any

import torch

from asyncengine.errors import ModelError
from asyncengine.models.weights.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from tests.fuzz.source import Source, scratch_directory

# Usual values several times, so that files get past the first check.
DTYPES = (
    *("F32",) * 12, *("BF16",) * 6, "F16", "F64", "BOOL", "U8", "I8", "I16", "I32", "I64", "U64", "F8_E4M3",
    "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "C64", "F128", "",
)  # fmt: skip
NAMES = (*("a",) * 6, *("b",) * 4, "transformer.a", "__metadata__", "")
SIZES = (0, 1, 2, 4, 8, 2**31, 2**62, 2**63, 2**64, -1)
BITS = {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "F16": 16, "BF16": 16, "I16": 16, "F4": 4}
SHARDS = (*("one",) * 12, *("two",) * 12, "three", "../one", "/etc/hostname", "", ".", "directory")

DIRECTORY = scratch_directory()
(DIRECTORY / "directory").mkdir()


def one_input(data: bytes) -> None:
    source = Source(data)
    for name in (SINGLE_FILE, INDEX_FILE, "one", "two"):
        (DIRECTORY / name).unlink(missing_ok=True)
    if sharded := source.byte() % 4 == 0:
        (DIRECTORY / INDEX_FILE).write_bytes(index(source))
    if source.byte() % 4 == 0:
        (DIRECTORY / ("one" if sharded else SINGLE_FILE)).write_bytes(source.rest())
    else:
        for name in ("one", "two") if sharded else (SINGLE_FILE,):
            (DIRECTORY / name).write_bytes(weights(source))
    dtype = source.pick((torch.float32, torch.bfloat16))
    with suppress(ModelError), closing(Checkpoint(DIRECTORY, dtype)) as checkpoint:
        for name in ("a", "transformer.b", ""):
            with suppress(ModelError):
                tensor = checkpoint.get(name, 8)
                assert tensor.shape == (8,)
                assert tensor.dtype == dtype
                assert tensor.data_ptr() % dtype.itemsize == 0
                tensor.sum()
            with suppress(ModelError):  # codes and scales of weights that are packed
                stored = checkpoint.raw(name, (8,), (4, 2), kinds=(torch.uint8, torch.int32, torch.float8_e4m3fn))
                assert stored.numel() == 8
            with suppress(ModelError):
                assert checkpoint.get_transposed(name, 2, 4).shape == (2, 4)
        checkpoint.finish()


def index(source: Source) -> bytes:
    if source.byte() % 8 == 7:
        return json.dumps(source.value()).encode()
    return json.dumps({"weight_map": {source.pick(NAMES): source.pick(SHARDS) for _ in range(3)}}).encode()


def weights(source: Source) -> bytes:
    """A file that is right, but for a few numbers of its header."""
    header: dict[str, Any] = {}
    end = 0
    for _ in range(source.integer(0, 3)):
        dtype = source.pick(DTYPES)
        odd = [source.pick(SIZES) for _ in range(source.integer(0, 3))]
        shape = source.pick(([8], [8], [8], [4, 2], [4, 2], odd))
        size = BITS.get(dtype, 8)
        for n in shape:
            size *= n
        start, end = end, end + (size // 8 if 0 <= size < 1 << 12 else 8)
        offsets = [start, end] if source.byte() % 8 else [source.pick(SIZES), source.pick(SIZES)]
        header[source.pick(NAMES)] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    if source.byte() % 8 == 7:
        header[source.text()] = source.value()
    text = json.dumps(header).encode() + b" " * source.integer(0, 7)
    length = len(text) if source.byte() % 8 else source.pick((0, 1, len(text) - 1, len(text) + 1, 2**63, 2**64 - 1))
    return struct.pack("<Q", max(0, length)) + text + bytes(end if source.byte() % 8 else source.byte())
