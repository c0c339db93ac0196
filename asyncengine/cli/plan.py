"""``asyncengine plan``: which kernel computes what in which step, without running one."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from asyncengine.api.model_info import snapshot_places
from asyncengine.cli import flags
from asyncengine.cli.embed import add_model, check_model
from asyncengine.cli.models import bytes_text
from asyncengine.config import EngineConfig

if TYPE_CHECKING:
    from asyncengine.runner.plans import BucketPlan

_FLAGS = (
    "revision", "dtype", "quantization", "head_quantization", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "block_size", "batch_invariant", "kv_cache_dtype", "state_dtype", "state_snapshot_tokens", "window_groups",
    "prefill_chunk_size", "tensor_parallel_size",
)  # fmt: skip
"""Flags of the engine on which a plan depends."""
_COMMON = (
    "dtype", "quantization", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype",
    "tensor_parallel_size",
)  # fmt: skip
_ANY_MEMORY = 1 << 40
"""Memory of a device: bytes of a sequence do not depend on it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [options]"
    add_model(parser)
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help="plan for this card, part of its name is enough (default: this machine's, or without one the H200)",
    )
    parser.add_argument("--json", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help="print JSON")
    others = {field.name for field in dataclasses.fields(EngineConfig)} - set(_FLAGS)
    flags.add_dataclass(parser, EngineConfig, "engine", exclude=others, common=_COMMON)


def run(args: argparse.Namespace) -> int:
    check_model(args)
    from asyncengine.bundled import path as bundled_path
    from asyncengine.runner.describe import describe_model
    from asyncengine.runner.plans import choose_gpu, plan_steps

    options: dict[str, Any] = flags.values(args, EngineConfig)
    model = options.pop("model", None) or str(bundled_path())
    config = EngineConfig(model=model, load_format="dummy", **options)
    gpu = choose_gpu(getattr(args, "gpu", None))
    steps = plan_steps(config, gpu)
    report = describe_model(config, "cuda", memory_bytes=_ANY_MEMORY)
    if getattr(args, "json", False):
        cache = {"kv_bytes_per_sequence": report.kv_bytes_per_sequence, "context": report.context}
        states = {"num_bytes": report.state_bytes_per_sequence, "snapshot_tokens": report.state_snapshot_tokens}
        plan = {"model": model, "gpu": gpu.name, **cache, **({"states": states} if states["num_bytes"] else {})}
        print(json.dumps(plan | {"steps": [step.as_dict() for step in steps]}, indent=1))
    else:
        print(f"{model} on {gpu.name}")
        for step in steps:
            print(f"\n{step.title}")
            print("\n".join(_table(step)))
        print(f"\nkeys and values: {bytes_text(report.kv_bytes_per_sequence)} a sequence of {report.context:,} tokens")
        if report.state_bytes_per_sequence:
            kept = snapshot_places(report.state_snapshot_tokens or 0)
            print(f"states: {bytes_text(report.state_bytes_per_sequence)} a sequence, kept {kept}")
    return 0


def _table(step: BucketPlan) -> Iterable[str]:
    lines = [
        ("  " + p.name, f"{p.site.weight_rows} x {p.site.inner}", p.fused, p.choice.plan.kind, p.tile, p.choice.source)
        for p in step.projections
    ]
    yield from _aligned([("  projection", "weight", "fused", "kernel", "tile", "source"), *lines])
    for attention in step.attention:
        yield f"  attention   {attention}"


def _aligned(lines: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
