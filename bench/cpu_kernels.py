"""CPU kernels beside torch's: ``python -m bench.cpu_kernels [linear] [attention] [sample]``.

Prints one JSON object per line. Each comparison interleaves its sides and takes the median of the
repeats. Weights are spread over more copies than the caches hold, so that every call reads them from
memory, as a forward does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F

from asyncengine import _core
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.ops import AttentionCall, AttentionLayer, LayerKVCache
from asyncengine.kernels.weight import dense

T = TypeVar("T")

GPT2_SHAPES = {
    "qkv": (2304, 768),
    "proj": (768, 768),
    "up": (3072, 768),
    "down": (768, 3072),
    "lm_head": (50257, 768),
}
CACHE_BYTES = 200e6


def interleave(sides: dict[str, Callable[[], object]], repeats: int, seconds: float = 0.02) -> dict[str, float]:
    """Median seconds of one call of each side; a sample covers as many calls as fill ``seconds``."""
    calls = {}
    for name, side in sides.items():
        side()
        start = time.perf_counter()
        side()
        calls[name] = max(1, int(seconds / (time.perf_counter() - start)))
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                side()
            samples[name].append((time.perf_counter() - start) / calls[name])
    return {name: statistics.median(values) for name, values in samples.items()}


def following(call: Callable[[T], object], items: Iterator[T]) -> object:
    """A call with the next of the items."""
    return call(next(items))


def cycle(items: list[T]) -> Iterator[T]:
    while True:
        yield from items


def bench_linear(ops: CpuOps, repeats: int, batches: list[int], shapes: list[str]) -> Iterator[dict[str, object]]:
    step, _ = attention_batch(1, 0, 1, 16)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in shapes:
            n, k = GPT2_SHAPES[shape]
            weight_bytes = n * k * dtype.itemsize
            copies = [torch.randn(n, k).to(dtype) for _ in range(max(1, round(CACHE_BYTES / weight_bytes)))]
            handles = cycle([ops.make_linear([dense(w)], [None]) for w in copies])
            weights = cycle(copies)
            for m in batches:
                x = torch.randn(m, k).to(dtype)
                seconds = interleave(
                    {
                        "ours": partial(following, partial(ops.multiply, x, batch=step), handles),
                        "torch": partial(following, partial(F.linear, x), weights),
                    },
                    repeats,
                )
                row: dict[str, object] = {"bench": "linear", "shape": shape, "dtype": str(dtype), "m": m}
                for side, time_s in seconds.items():
                    row[f"{side}_us"] = round(time_s * 1e6, 1)
                    row[f"{side}_gb_s"] = round(weight_bytes / time_s / 1e9, 2)
                    row[f"{side}_gflop_s"] = round(2 * m * n * k / time_s / 1e9, 1)
                yield row


def attention_batch(rows: int, context: int, queries: int, block_size: int) -> tuple[_core.StepBatch, int]:
    blocks = -(-(context + queries) // block_size)
    tables = [[r * blocks + b for b in range(blocks)] for r in range(rows)]
    tokens = rows * queries
    starts = [r * queries for r in range(rows + 1)]
    batch = _core.StepBatch([0] * tokens, [0] * tokens, [0] * tokens, starts, [context] * rows, tables, [])
    return batch, rows * blocks


def bench_attention(ops: CpuOps, repeats: int) -> Iterator[dict[str, object]]:
    cases = [(1, 1000, 1), (1, 8000, 1), (16, 1000, 1), (1, 0, 512), (1, 2048, 512)]
    for dtype in (torch.float32, torch.bfloat16):
        for heads, kv_heads, dim in ((12, 12, 64), (32, 8, 128)):
            for rows, context, queries in cases:
                batch, blocks = attention_batch(rows, context, queries, 16)
                k = torch.randn(blocks, kv_heads, dim, 16).to(dtype)
                v = torch.randn(blocks, kv_heads, 16, dim).to(dtype)
                q = torch.randn(rows * queries, heads, dim).to(dtype)
                call = AttentionCall(q, AttentionLayer(heads, None, None, dim**-0.5, 0), LayerKVCache(k, v), batch)
                time_s = interleave({"ours": partial(ops.paged_attention, call)}, repeats)["ours"]
                keys = rows * (context + queries)
                pairs = rows * queries * (context + (queries + 1) / 2)
                yield {
                    "bench": "attention",
                    "dtype": str(dtype),
                    "heads": f"{heads}/{kv_heads}x{dim}",
                    "rows": rows,
                    "context": context,
                    "queries": queries,
                    "ours_us": round(time_s * 1e6, 1),
                    "ours_gb_s": round(2 * keys * kv_heads * dim * dtype.itemsize / time_s / 1e9, 2),
                    "ours_gflop_s": round(4 * pairs * heads * dim / time_s / 1e9, 1),
                }


def bench_sample(ops: CpuOps, repeats: int) -> Iterator[dict[str, object]]:
    cases = {
        "greedy": _core.SamplingState(seed=1),
        "temperature": _core.SamplingState(temperature=0.8, seed=1),
        "top_k": _core.SamplingState(temperature=0.8, top_k=50, seed=1),
        "top_p": _core.SamplingState(temperature=0.8, top_p=0.95, seed=1),
        "all": _core.SamplingState(temperature=0.8, top_k=50, top_p=0.95, min_p=0.05, seed=1),
    }
    logits = torch.randn(1, 150_000) * 3
    for name, sampling in cases.items():
        batch = _core.StepBatch([0], [0], [0], [0, 1], [0], [[0]], [0], [7], [sampling])
        time_s = interleave({"ours": partial(ops.sample, logits, batch)}, repeats)["ours"]
        yield {"bench": "sample", "vocab": 150_000, "case": name, "ours_us": round(time_s * 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help="linear, attention, sample (default: all)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 512])
    parser.add_argument("--shape", nargs="+", choices=GPT2_SHAPES, default=list(GPT2_SHAPES))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ops = CpuOps(args.threads, args.isa)
    print(json.dumps({"isa": ops.isa, "threads": args.threads, "torch": torch.__version__}))
    what = args.what or ["linear", "attention", "sample"]
    benches = {
        "linear": lambda: bench_linear(ops, args.repeats, args.batch, args.shape),
        "attention": lambda: bench_attention(ops, args.repeats),
        "sample": lambda: bench_sample(ops, args.repeats),
    }
    for name in what:
        for row in benches[name]():
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
