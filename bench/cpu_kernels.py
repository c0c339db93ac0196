"""CPU kernels beside torch's: ``python -m bench.cpu_kernels [linear] [blocks] [attention] [sample] [mixers]``.

Prints one JSON object per line. Each comparison interleaves its sides and takes the median of the
repeats. Weights are spread over more copies than the caches hold, so that every call reads them from
memory, as a forward does. ``--isa avx512`` keeps a machine with AMX from its tiles.
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
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from asyncengine import _core
from asyncengine.kernels.blocks import FLOATS, SIZES, BlockType, row_bytes
from asyncengine.kernels.cpu import recurrent
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.ops import AttentionCall, AttentionLayer, LayerKVCache, LayerStates
from asyncengine.kernels.states import DeltaNet, Mamba2, ShortConv
from asyncengine.kernels.weight import BLOCKS, PackedWeight, dense
from asyncengine.models.mixer_shapes import Delta, StateSpace

T = TypeVar("T")

GPT2_SHAPES = {
    "qkv": (2304, 768),
    "proj": (768, 768),
    "up": (3072, 768),
    "down": (768, 3072),
    "lm_head": (50257, 768),
}
BLOCK_TYPES = [kind.name for kind in SIZES if kind not in FLOATS]
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


def bench_blocks(ops: CpuOps, repeats: int, batches: list[int], kinds: list[str]) -> Iterator[dict[str, object]]:
    """Products with blocks of GGUF's types, of the shapes of Llama 3.2 1B's feed-forward."""
    step, _ = attention_batch(1, 0, 1, 16)
    draw = torch.Generator().manual_seed(0)
    for kind in (BlockType[name] for name in kinds):
        for n, k in ((8192, 2048), (2048, 8192)):
            size = row_bytes(kind, k)
            blocks = torch.randint(0, 48, (n, size), dtype=torch.uint8, generator=draw)  # of which no half is infinite
            stored = [blocks.clone() for _ in range(max(1, round(CACHE_BYTES / (n * size))))]
            weights = [PackedWeight(BLOCKS, {"blocks": copy}, n, k, torch.bfloat16, kind) for copy in stored]
            handles = cycle([ops.make_linear([weight], [None]) for weight in weights])
            for m in batches:
                x = torch.randn(m, k).bfloat16()
                run = partial(following, partial(ops.multiply, x, batch=step), handles)
                time_s = interleave({"ours": run}, repeats)["ours"]
                yield {
                    "bench": "blocks",
                    "kernels": ops.native.block_kernels,
                    "type": kind.name,
                    "shape": f"{n}x{k}",
                    "m": m,
                    "ours_us": round(time_s * 1e6, 1),
                    "ours_gb_s": round(n * size / time_s / 1e9, 2),
                    "ours_gflop_s": round(2 * m * n * k / time_s / 1e9, 1),
                }


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


def _mamba2() -> tuple[Mamba2, StateSpace]:
    """Mixer of Nemotron 3 Nano."""
    shape = StateSpace(64, 64, 128, 8, 4, 1e-5)
    conv = ShortConv(torch.randn(4, shape.channels), torch.randn(shape.channels), silu=True)
    skip, dt_bias, norm = torch.randn(64), torch.randn(64), torch.ones(shape.inner)
    return Mamba2(conv, -torch.rand(64), skip, dt_bias, 64, 128, 8, (0.0, float("inf")), norm, 1e-5), shape


def _delta_net() -> tuple[DeltaNet, Delta]:
    """Mixer of Qwen3.5-35B-A3B."""
    shape = Delta(16, 32, 128, 128, 4)
    conv = ShortConv(torch.randn(4, shape.channels), silu=True)
    return DeltaNet(conv, -torch.rand(32), torch.randn(32), 16, 128, 128, torch.ones(128), 1e-6), shape


def bench_mixers(ops: CpuOps, repeats: int) -> Iterator[dict[str, object]]:
    """Steps of rows of one token and prompts, beside the recurrence in torch and the chunked one of transformers."""
    made: dict[str, tuple[Mamba2 | DeltaNet, Delta | StateSpace]] = {"mamba2": _mamba2(), "delta_net": _delta_net()}
    for name, (mixer, shape) in made.items():
        for rows, tokens in ((1, 1), (16, 1), (1, 64), (1, 512)):
            cache = LayerStates(torch.zeros(rows, shape.spec.num_bytes, dtype=torch.uint8))
            x = torch.randn(rows * tokens, mixer.width).bfloat16()
            starts = [tokens * row for row in range(rows + 1)]
            zeros = [0] * len(x)
            batch = _core.StepBatch(zeros, zeros, zeros, starts, [0] * rows, [[0]] * rows, [])
            batch.slots[:] = range(rows)
            run = ops.mamba2 if isinstance(mixer, Mamba2) else ops.delta_net
            plain = recurrent.mamba2 if isinstance(mixer, Mamba2) else recurrent.delta_net
            sides: dict[str, Callable[[], object]] = {
                "ours": partial(run, x, mixer, cache, batch),  # type: ignore[arg-type]
                "torch": partial(plain, x, mixer, cache, batch),  # type: ignore[arg-type]
            }
            if tokens > 1:
                sides["transformers"] = partial(_chunked, mixer, x[:tokens].float())
            times = interleave(sides, repeats)
            yield {"bench": "mixers", "mixer": name, "rows": rows, "tokens": tokens} | {
                f"{side}_us": round(seconds * 1e6, 1) for side, seconds in times.items()
            }


def _chunked(mixer: Mamba2 | DeltaNet, x: torch.Tensor) -> object:
    """The recurrence alone, without convolution, gate and norm, as transformers computes it in chunks."""
    tokens, heads = len(x), len(mixer.decay)
    rest = x[:, :heads].sigmoid()[None]
    if isinstance(mixer, Mamba2):
        values = x[:, : mixer.inner].view(1, tokens, heads, mixer.head_dim)
        keys = x[:, : mixer.groups * mixer.state_size].view(1, tokens, mixer.groups, mixer.state_size)
        return mamba2_chunk_scan(
            values, rest, mixer.decay, keys, keys, 256, D=mixer.skip, dt_bias=mixer.dt_bias, dt_softplus=True,
            return_final_states=True,
        )  # fmt: skip
    values = x[:, : mixer.inner].view(1, tokens, heads, mixer.value_dim)
    keys = x[:, : mixer.key_heads * mixer.key_dim].view(1, tokens, mixer.key_heads, mixer.key_dim)
    return torch_chunk_gated_delta_rule(
        keys, keys, values, rest * mixer.decay, rest, output_final_state=True, use_qk_l2norm_in_kernel=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help="linear, blocks, attention, sample, mixers (default: all)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 512])
    parser.add_argument("--type", nargs="+", choices=BLOCK_TYPES, default=["Q8_0", "Q4_K", "Q6_K"], help="of blocks")
    parser.add_argument("--shape", nargs="+", choices=GPT2_SHAPES, default=list(GPT2_SHAPES))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ops = CpuOps(args.threads, args.isa)
    print(
        json.dumps(
            {"isa": ops.isa, "blocks": ops.native.block_kernels, "threads": args.threads, "torch": torch.__version__}
        )
    )
    what = args.what or ["linear", "blocks", "attention", "sample", "mixers"]
    benches = {
        "linear": lambda: bench_linear(ops, args.repeats, args.batch, args.shape),
        "blocks": lambda: bench_blocks(ops, args.repeats, args.batch, args.type),
        "attention": lambda: bench_attention(ops, args.repeats),
        "sample": lambda: bench_sample(ops, args.repeats),
        "mixers": lambda: bench_mixers(ops, args.repeats),
    }
    for name in what:
        for row in benches[name]():
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
