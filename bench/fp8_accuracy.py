"""Loss of accuracy by float8: logits of a model with its weights, or its keys and values, in float8 beside those
without.

    python bench/fp8_accuracy.py [--of weights|kv-cache] [--model DIRECTORY ...] [--rows 1,8,64] [--tokens 64]

Sequences are stories of the bundled grammar, or random ids where a directory has no weights (then these are random,
too). All their tokens are given: as prompts of all sequences in one step, and token by token, so many sequences at
once; each count of rows has kernels of its own. Then both continue the first halves greedily. Relative error is that of
all logits together, KL the mean divergence of the two distributions (nats).

The noise beside them is bfloat16 against itself: token by token against prompts. With --device cpu both are plain torch
in float32 (asyncengine.kernels.cpu.reference), which shows what quantising alone does.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from gpu_common import SHAPES, SHAPES_DIR
from torch import Tensor

from asyncengine import _core, bundled_model
from asyncengine.bundled.grammar import generate
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure
from asyncengine.config import EngineConfig
from asyncengine.kernels.cpu.base import BaseOps
from asyncengine.kernels.cpu.reference import ReferenceLinear, ReferenceOps
from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.trials import examine
from asyncengine.kernels.float8 import Quantization, pack_float8
from asyncengine.kernels.float8_cache import with_inverses
from asyncengine.kernels.ops import Ops
from asyncengine.kernels.weight import DENSE, PackedWeight, tensors_of
from asyncengine.runner.state import memory as kv_cache
from asyncengine.runner.state.kv_scales import calibrate_host
from asyncengine.runner.steps.model_runner import LoadedModel, load_model
from asyncengine.text.tokenizer import Tokenizer

_BLOCK = 16
Of = Literal["weights", "kv-cache"]
"""The part of the model that is in float8."""
_PIECE = 512
"""Rows of logits that are compared at a time."""


class Sequences:
    """A model over sequences that are equally long, each with blocks of its own; logits of every token."""

    def __init__(self, loaded: LoadedModel, ops: Ops[Any, Any, Any], rows: int, length: int) -> None:
        self._loaded = loaded
        self._ops = ops
        self._rows = rows
        self._length = length
        self._blocks = -(-length // _BLOCK)
        config = EngineConfig.from_kwargs("", {"block_size": _BLOCK, "max_num_seqs": rows})
        blocks = rows * self._blocks
        self._cache = kv_cache.allocate(config, loaded.config, blocks, loaded.dtype, ops, loaded.kv_scales)
        self._attention: Any = None

    def advance(self, ids: Tensor, context: int) -> Tensor:
        """ids [R, C] behind ``context`` tokens, for the first R sequences: float32 logits [R, C, V]."""
        rows, count = ids.shape
        positions = torch.arange(context, context + count).repeat(rows, 1)
        slots = torch.arange(rows)[:, None] * (self._blocks * _BLOCK) + positions
        make = self._host_batch if isinstance(self._ops, BaseOps) else self._device_batch
        with torch.inference_mode():
            batch = make(ids.flatten(), positions.flatten(), slots.flatten(), rows, context)
            logits = self._loaded.model.forward(batch, self._cache.layers)
        assert logits is not None
        return torch.as_tensor(logits).view(rows, count, -1)

    def _tables(self, rows: int) -> Tensor:
        return torch.arange(rows * self._blocks).view(rows, -1)

    def _host_batch(self, ids: Tensor, positions: Tensor, slots: Tensor, rows: int, context: int) -> Any:
        starts = range(0, len(ids) + 1, len(ids) // rows)
        return _core.StepBatch(
            ids.tolist(), positions.tolist(), slots.tolist(), list(starts), [context] * rows,
            self._tables(rows).tolist(), list(range(len(ids))),
        )  # fmt: skip

    def _device_batch(self, ids: Tensor, positions: Tensor, slots: Tensor, rows: int, context: int) -> Any:
        from asyncengine.kernels.cuda.attention.choose import Limits
        from asyncengine.kernels.cuda.attention.run import StepAttention
        from asyncengine.kernels.cuda.ops import CudaBatch
        from asyncengine.kernels.cuda.step.bucket import Bucket
        from asyncengine.kernels.cuda.step.tensors import allocate_step
        from asyncengine.runner.steps.device_steps import attention_kinds

        config, device = self._loaded.config, self._ops.device
        count = len(ids) // rows
        every_token = torch.arange(len(ids), device=device)
        step = replace(allocate_step(rows, self._blocks, rows, len(ids), device), sample_index=every_token)
        for field, values in (
            (step.input_ids, ids),
            (step.positions, positions),
            (step.slot_mapping, slots),
            (step.slots.block_tables, self._tables(rows)),
            (step.row_slot, torch.arange(rows)),
            (step.row_query_start, torch.arange(rows) * count),
            (step.row_query_len, torch.tensor(count)),
            (step.row_context_len, torch.tensor(context)),
        ):
            field.copy_(values)
        if self._attention is None:
            limits = Limits(self._rows, self._rows * self._length, self._length, _BLOCK)
            float8_cache = self._loaded.kv_scales is not None
            device_ops: Any = self._ops
            gpu: Gpu = device_ops.gpu
            kinds = attention_kinds(config, self._loaded.dtype, float8_cache=float8_cache)
            self._attention = StepAttention(kinds, limits, replace(gpu, tma=False), device)
        batch = CudaBatch(step, self._attention.of(Bucket(rows, len(ids), count == 1)))
        batch.attention.build(step, pdl=False)
        return batch


class RoundingOps(ReferenceOps):
    """Plain torch in any dtype, whose layers have float8 weights, of those that a model gives it."""

    def make_linear(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> ReferenceLinear:
        return super().make_linear([pack_float8(w) for w in tensors_of(weights, "weight", DENSE)], biases)

    def make_head(self, weight: PackedWeight) -> ReferenceLinear:
        return super().make_linear([weight], [None])


def load(
    directory: Path, quantization: Quantization, args: argparse.Namespace, tokens: int,
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
) -> tuple[LoadedModel, Ops[Any, Any, Any]]:  # fmt: skip
    dummy = not any(directory.glob("*.safetensors"))
    config = EngineConfig(
        model=str(directory), load_format="dummy" if dummy else "auto", max_model_len=tokens,
        dtype="float32" if args.device == "cpu" else "bfloat16", kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    ops: Ops[Any, Any, Any]
    if args.device == "cpu":
        ops = RoundingOps() if quantization == "fp8" else ReferenceOps()
        loaded = load_model(config, ops)
        if kv_cache_dtype == "fp8" and loaded.kv_scales is None:
            scales = calibrate_host(loaded.model, loaded.config, loaded.dtype, loaded.max_model_len, ops)
            loaded = replace(loaded, kv_scales=with_inverses(scales))
    else:
        from asyncengine.kernels.cuda.linear.tables import PlanTable
        from asyncengine.kernels.cuda.ops import CudaOps, CudaOptions
        from asyncengine.runner.start.calibration import with_kv_scales

        device = torch.device("cuda", 0)
        plans = PlanTable.load(torch.cuda.get_device_name(device))
        ops = CudaOps(device, CudaOptions(plans, gpu=examine(device)))
        config = replace(config, quantization=quantization)
        loaded = with_kv_scales(config, load_model(config, ops), ops)
    return loaded, ops


def read_texts(directory: Path, count: int, tokens: int) -> Tensor:
    """int64 [count, tokens]: beginnings of stories, those that are long enough."""
    rng = random.Random(0)
    if not any(directory.glob("tokenizer*")):
        vocabulary = json.loads((directory / "config.json").read_text())["vocab_size"]
        return torch.tensor([rng.choices(range(vocabulary), k=tokens) for _ in range(count)])
    tokenizer = Tokenizer.from_pretrained(str(directory))
    texts: list[list[int]] = []
    for _ in range(1000 * count):
        ids = tokenizer.encode(generate(rng))
        if len(ids) >= tokens:
            texts.append(ids[:tokens])
        if len(texts) == count:
            return torch.tensor(texts)
    raise SystemExit(f"too few stories have {tokens} tokens: lower --tokens")


# ---- what is compared ----


def given(model: Sequences, ids: Tensor, chunk: int) -> Tensor:
    """Logits [R, L, V] of all tokens, ``chunk`` of each sequence in a step."""
    parts = [model.advance(ids[:, at : at + chunk], at) for at in range(0, ids.shape[1], chunk)]
    return torch.cat(parts, 1)


def continued(model: Sequences, ids: Tensor, count: int) -> Tensor:
    """Greedy tokens [R, count] behind ids."""
    tokens = [model.advance(ids, 0)[:, -1].argmax(1)]
    for at in range(ids.shape[1], ids.shape[1] + count - 1):
        tokens.append(model.advance(tokens[-1][:, None].cpu(), at)[:, -1].argmax(1))
    return torch.stack(tokens, 1)


def pieces(*logits: Tensor) -> Iterator[tuple[Tensor, ...]]:
    yield from zip(*(torch.split(x.flatten(0, -2), _PIECE) for x in logits), strict=True)


def compare(exact: Tensor, other: Tensor) -> dict[str, float]:
    """Compare logits [R, L, V]."""
    error = norm = divergence = same = 0.0
    count = exact[..., 0].numel()
    for a, b in pieces(exact, other):
        error += float((b - a).square().sum(dtype=torch.float64))
        norm += float(a.square().sum(dtype=torch.float64))
        log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
        divergence += float((log_a.exp() * (log_a - log_b)).sum(dtype=torch.float64))
        same += float((a.argmax(-1) == b.argmax(-1)).sum())
    return {"relative error": math.sqrt(error / norm), "KL": divergence / count, "equal tokens": same / count}


def perplexity(logits: Tensor, ids: Tensor) -> float:
    loss, targets = 0.0, ids[:, 1:].flatten().to(logits.device)
    for x, target in zip((p[0] for p in pieces(logits[:, :-1])), torch.split(targets, _PIECE), strict=True):
        loss += float(torch.nn.functional.cross_entropy(x, target, reduction="sum"))
    return math.exp(loss / len(targets))


def measure(directory: Path, args: argparse.Namespace, of: Of = "weights") -> dict[str, Any]:
    most = max(args.rows)
    ids = read_texts(directory, most, args.tokens)
    models = {}
    for kind in ("none", "fp8"):
        if of == "weights":
            loaded, ops = load(directory, kind, args, args.tokens)
        else:
            loaded, ops = load(directory, "none", args, args.tokens, "fp8" if kind == "fp8" else "auto")
        models[kind] = Sequences(loaded, ops, most, args.tokens)
    exact, quantised = (given(model, ids, args.tokens) for model in models.values())
    result: dict[str, Any] = {
        "perplexity": {"bf16": perplexity(exact, ids), "fp8": perplexity(quantised, ids)},
        "prompts": compare(exact, quantised),
    }
    for rows in args.rows:
        by_token, by_token_fp8 = (given(model, ids[:rows], 1) for model in models.values())
        result[f"rows {rows}"] = compare(by_token, by_token_fp8)
        result[f"noise, rows {rows}"] = compare(exact[:rows], by_token)
    half = args.tokens // 2
    one, other = (continued(model, ids[:, :half], args.tokens - half) for model in models.values())
    same = one == other
    result["continued"] = {
        "equal tokens": float(same.double().mean()),
        "before the first other": float(same.cumprod(1).double().mean()),
    }
    return result


def figures_of(name: str, result: dict[str, Any]) -> Iterator[Figure]:
    for kind, value in result["perplexity"].items():
        yield Figure(f"{name}, perplexity {kind}", value, "")
    for case, values in result.items():
        if case != "perplexity":
            for what, value in values.items():
                unit, scale = ("1e-6 nats", 1e6) if what == "KL" else ("%", 1e2)
                yield Figure(f"{name}, {case}: {what}", scale * value, unit)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--of", default="weights", choices=get_args(Of), help="what is in float8")
    parser.add_argument("--model", nargs="+", help="directories, or shapes of bench/shapes (default: the bundled one)")
    parser.add_argument("--rows", default="1,8,64", help="sequences at once; the largest also for prompts")
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", help="default: bench/results/fp8_accuracy.json, or fp8_kv_accuracy.json")
    args = parser.parse_args()
    args.json = args.json or f"bench/results/fp8_{'kv_' if args.of == 'kv-cache' else ''}accuracy.json"
    args.rows = [int(rows) for rows in args.rows.split(",")]
    results = {}
    for model in args.model or [str(bundled_model())]:
        directory = SHAPES_DIR / model if model in SHAPES else Path(model)
        results[directory.name] = measure(directory, args, args.of)
    figures = [figure for name, result in results.items() for figure in figures_of(name, result)]
    report.print_figures(f"Float8 {args.of} against bfloat16", figures)
    report.write(args.json, report.record("fp8_accuracy", figures, repeats=1, settings=vars(args), results=results))


if __name__ == "__main__":
    main()
