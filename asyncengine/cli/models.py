"""``asyncengine models``: the families, or how one model will run and what it takes, before anything is loaded."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from asyncengine.api.model_info import snapshot_places
from asyncengine.cli import flags
from asyncengine.cli.embed import add_model, check_model
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError

if TYPE_CHECKING:
    from asyncengine.runner.describe import FamilyReport, ModelReport

_FLAGS = (
    "revision", "load_format", "dtype", "model_impl", "trust_remote_code", "quantization",
    "head_quantization", "device",
    "tensor_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "prefill_chunk_size",
    "block_size", "kv_cache_dtype", "state_dtype", "state_snapshot_tokens", "window_groups", "kv_cache_memory_bytes",
    "num_kv_blocks", "gpu_memory_utilization",
)  # fmt: skip
"""Flags of the engine on which the answer depends."""
_COMMON = ("dtype", "quantization", "device", "max_model_len", "max_num_seqs", "kv_cache_dtype", "state_dtype")
_COLUMNS = {
    "fp8_weights": "fp8 weights",
    "float8_cache": "fp8 cache",
    "prefix_cache": "prefix cache",
    "host_tier": "host tier",
    "disk_tier": "disk tier",
    "hybrid_attention": "hybrid attention",
    "ranks": "ranks",
    "vectors": "vectors",
    "labels": "labels",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [options]"
    add_model(parser)
    parser.add_argument(
        "--memory",
        metavar="N",
        type=flags.integer,
        default=argparse.SUPPRESS,
        help="memory of the GPU, or with --device cpu of the host. An example: 80GiB (default: this machine's)",
    )
    parser.add_argument("--json", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help="print JSON")
    others = {field.name for field in dataclasses.fields(EngineConfig)} - set(_FLAGS)
    flags.add_dataclass(parser, EngineConfig, "engine", exclude=others, common=_COMMON)


def run(args: argparse.Namespace) -> int:
    if "model" not in args:
        from asyncengine.runner.describe import describe_families

        families = describe_families()
        _print(args, [dataclasses.asdict(family) for family in families], _family_table(families))
        return 0
    if getattr(args, "memory", 1) < 1:
        raise ConfigError("memory must be at least 1 byte")
    check_model(args)
    from asyncengine.runner.backend import choose_device
    from asyncengine.runner.describe import describe_model

    config = EngineConfig(**flags.values(args, EngineConfig))
    memory: int | None = getattr(args, "memory", None)
    device = "cuda" if config.device == "auto" and memory is not None else choose_device(config)
    if config.device == "auto":
        config = dataclasses.replace(config, device=device)
    report = describe_model(config, device, memory)
    _print(args, dataclasses.asdict(report), _lines(report))
    return 0 if report.way != "refused" and not report.obstacle else 1


def _print(args: argparse.Namespace, values: Any, lines: Iterable[str]) -> None:
    print(json.dumps(values, indent=1) if getattr(args, "json", False) else "\n".join(lines))


def _family_table(families: Sequence[FamilyReport]) -> Iterable[str]:
    rows = [("architecture", "model_type", *_COLUMNS.values())]
    for family in families:
        marks = ("yes" if getattr(family, name) else "-" for name in _COLUMNS)
        rows.append((family.architecture, ", ".join(family.model_types), *marks))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()


def _lines(report: ModelReport) -> Iterable[str]:
    yield f"{report.model}: {report.way}"
    yield f"  {report.reason}"
    if report.way == "refused":
        return
    place = "the host" if report.device != "cuda" else "a GPU" if report.ranks == 1 else f"{report.ranks} GPUs"
    about = "about " if report.device == "cuda" else ""
    source = "" if report.has_weights else ", of config.json alone: there are no weights"
    quantized = "" if report.quantization == "none" else f", layers in {report.quantization}"
    yield f"  dtype            {report.dtype}{quantized}, on {place}"
    yield f"  parameters       {report.num_parameters:,}"
    yield f"  weights          {bytes_text(report.weight_bytes)}, {report.bits_per_weight:g} bits a parameter{source}"
    if report.ranks > 1:
        yield f"  ranks            {report.ranks}, each with {bytes_text(report.rank_weight_bytes)} of the weights"
    for form in report.weight_formats:
        yield f"  projections      {form}"
    if report.head_format:
        yield f"  head             {report.head_format}"
    a_sequence = f"{bytes_text(report.kv_bytes_per_sequence)} a sequence of {report.context:,}"
    yield f"  keys and values  {bytes_text(report.kv_bytes_per_token)} a token, at most {a_sequence}"
    if report.state_bytes_per_sequence:
        size, snapshots = report.state_bytes_per_sequence, report.state_snapshots or 0
        kept = f"{snapshots:,} snapshots, {bytes_text(snapshots * size)}"
        yield f"  states           {bytes_text(size)} a sequence; room for {kept}"
        yield f"  snapshots        {snapshot_places(report.state_snapshot_tokens or 0)}"
    room = f"{about}{bytes_text(report.kv_memory_bytes)} for {report.kv_tokens:,} tokens"
    yield f"  memory           {bytes_text(report.memory_bytes)} of {place}, {room}"
    fitting = "no sequence fits" if not report.sequences else f"sequences that fit: {about}{report.sequences}"
    yield f"  context          {report.context:,} tokens; {fitting}"
    if report.obstacle:
        yield f"  does not load    {report.obstacle}"


def bytes_text(count: int | None) -> str:
    """Bytes in the largest unit of which there is one."""
    number, units = float(count or 0), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1024 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return f"{number:,.4g} {units[0]}"
