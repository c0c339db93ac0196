"""A checkpoint written anew with its projections quantised, under the names of compressed-tensors.

Other programs read it, as transformers does with the package compressed-tensors. Files are written one at a time.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError, UnsupportedModelError
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.kernels.float8 import pack_float8
from asyncengine.kernels.grouped import group_size, round_to_groups, squared_error
from asyncengine.kernels.weight import INT4, INT8, PackedWeight
from asyncengine.models.config import RawConfig
from asyncengine.models.registry import find_family, settle_head
from asyncengine.models.weights.checkpoint import INDEX_FILE, Checkpoint, choose_dtype, find_shards
from asyncengine.models.weights.formats.base import Dense, TensorSource
from asyncengine.models.weights.formats.choose import quant_method
from asyncengine.models.weights.hub import resolve_model
from asyncengine.models.weights.shard import Part
from asyncengine.models.weights.source import WeightSource
from asyncengine.runner.rounding import measure

Bits = Literal["fp8", "int8", "int4"]
_META = torch.device("meta")
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


class _Modules(Dense):
    """Notes the modules that a model asks for: projections, and tables that stay as they are."""

    def __init__(self) -> None:
        self.projections: dict[str, str] = {}
        """The model's names of modules, by those of the files."""
        self.tables: dict[str, str] = {}

    def weight(
        self, tensors: TensorSource, module: str, shape: tuple[int, int], part: Part, *, transposed: bool
    ) -> PackedWeight:
        if transposed:
            raise UnsupportedModelError(f"{module} is stored as the transpose of a projection, which cannot be packed")
        self.projections[module] = module
        return super().weight(tensors, module, shape, part, transposed=transposed)

    def table(self, tensors: TensorSource, module: str, shape: tuple[int, int], part: Part) -> PackedWeight:
        self.tables[module] = module
        return super().table(tensors, module, shape, part)


class _NoOps(ReferenceOps):
    """Operations of a model that is never run: its tensors hold nothing."""

    device = _META


class Converted(NamedTuple):
    """A projection that was written."""

    module: str
    group: int
    """Columns that share a scale."""
    error: float
    """Norm of what rounding changed, in norms of the weight."""
    result_error: float | None
    """The same of its results for the inputs of a text (see rounding.py); None for an expert that got none."""


def convert(model: str, out: Path, bits: Bits, *, revision: str | None = None) -> Iterator[Converted]:
    """Write the model's directory to ``out``, and yield each projection when it is rounded.

    Before, a text runs through the model, to measure what rounding changes.

    Raises ConfigError if there is something at ``out``, UnsupportedModelError for a checkpoint that is quantised
    already or whose family has no native code, and ModelError for one that cannot be read.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already: convert writes to a new directory")
    path = resolve_model(model, revision=revision)
    raw = RawConfig.load(path)
    if (method := quant_method(raw)) is not None:
        raise UnsupportedModelError(f"{path}: the weights are quantised already, by {method}")
    modules = _modules_of(path, raw)
    shards: dict[Path, list[str]] = defaultdict(list)
    for name, shard in find_shards(path).items():
        shards[shard].append(name)
    if any(shard.name.startswith("consolidated") for shard in shards):
        raise UnsupportedModelError(f"{path}: a consolidated file is not converted; save it with transformers before")
    config = EngineConfig(model=str(path), device="cpu")
    products = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measured = measure(config, bits, products).errors
    out.mkdir(parents=True, exist_ok=True)
    source = Checkpoint(path, choose_dtype("auto", raw.dtype, _META))
    places: dict[str, str] = {}
    groups: dict[int, list[str]] = defaultdict(list)
    for shard, names in shards.items():
        written: dict[str, Tensor] = {}
        for name in names:
            tensor = source.raw(name, source.shape_of(name), kinds=_KINDS)
            module = name.removesuffix(".weight")
            if module not in modules.projections or not name.endswith(".weight"):
                written[name] = tensor.contiguous()
                continue
            made, packed = _pack(tensor, bits)
            groups[size := 0 if bits == "fp8" else group_size(packed)].append(module)
            written |= {f"{module}.{key}": value.contiguous() for key, value in made.items()}
            error = measured.get(modules.projections[module])
            yield Converted(module, size or tensor.shape[1], _error(packed, tensor), error)
        save_file(written, out / shard.name, {"format": "pt"})
        places |= dict.fromkeys(written, shard.name)
    source.close()
    for pattern in _COPIED:
        for file in path.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, out / file.name)
    settings = _settings(bits, groups, sorted(modules.tables))
    (out / "config.json").write_text(json.dumps(raw.values | {"quantization_config": settings}, indent=1))
    if (out / INDEX_FILE).exists():
        total = sum((out / shard.name).stat().st_size for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (out / INDEX_FILE).write_text(json.dumps(index, indent=1))


_KINDS = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip


def _modules_of(path: Path, raw: RawConfig) -> _Modules:
    """The modules of a model, by the names of their tensors in the files."""
    _, family = find_family(raw)
    tensors = Checkpoint(path, torch.float32, device=_META)
    asked, ops = _Modules(), cast(Any, _NoOps())
    family.build(settle_head(family.read_config(raw), tensors), WeightSource(tensors, asked), ops, 1)
    for names in (asked.projections, asked.tables):
        stored = {tensors.stored_name(f"{module}.weight").removesuffix(".weight"): module for module in names}
        names.clear()
        names.update(stored)
    tensors.close()
    return asked


def _pack(weight: Tensor, bits: Bits) -> tuple[dict[str, Tensor], PackedWeight]:
    """The tensors of a projection by their names behind it, and what they stand for."""
    if bits == "fp8":
        packed = pack_float8(weight)
        return {"weight": packed.tensors["values"], "weight_scale": packed.tensors["scale"][:, None]}, packed
    dtype = weight.dtype if weight.dtype in (torch.bfloat16, torch.float16) else torch.float32
    packed = round_to_groups(INT4 if bits == "int4" else INT8, weight, scale_dtype=dtype)
    codes = packed.tensors["codes"]
    stored = codes if bits == "int4" else codes.view(torch.uint8) ^ 128
    if stored.shape[1] % 4:
        raise UnsupportedModelError(f"rows of {weight.shape[1]} elements are no whole words")
    scales, shape = packed.tensors["scales"].to(dtype), torch.tensor(weight.shape)
    return {"weight_packed": stored.view(torch.int32), "weight_scale": scales, "weight_shape": shape}, packed


def _error(packed: PackedWeight, weight: Tensor) -> float:
    size = torch.linalg.vector_norm(weight, dtype=torch.float32).item() or 1.0
    if packed.format in (INT4, INT8):
        return float(squared_error(packed, weight) ** 0.5 / size)
    made = packed.tensors["values"].float() * packed.tensors["scale"][:, None]
    return float(torch.linalg.vector_norm(made.sub_(weight)).item() / size)


def _settings(bits: Bits, groups: Mapping[int, list[str]], tables: list[str]) -> dict[str, Any]:
    """quantization_config. The projections of all but the most frequent size of groups are named one by one."""
    common = max(groups, key=lambda size: len(groups[size]))
    config_groups = {}
    for number, size in enumerate(sorted(groups, key=lambda size: size == common)):
        weights: dict[str, Any] = {"num_bits": 4 if bits == "int4" else 8, "symmetric": True, "dynamic": False}
        if bits == "fp8":
            weights |= {"type": "float", "strategy": "channel"}
        else:
            weights |= {"type": "int", "strategy": "group", "group_size": size}
        config_groups[f"group_{number}"] = {
            "targets": ["Linear"] if size == common else groups[size],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if bits == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": tables if "lm_head" in tables else [*tables, "lm_head"],
        "config_groups": config_groups,
    }
