"""Attention for host rows by workers and layout: ``python bench/host_attention.py [--workers 1,2,4] [--tokens 2048]``.

Each worker attends over rows that no cache holds. The shape is that of Llama 3.1 8B: 32 query heads, 8 KV heads of 128.
Layouts are measured in turn. Prints one JSON object per line, of medians of the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics

from asyncengine._core import CpuKernels, Dtype, HostShape, time_host_attention

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
CACHES = {
    "float32": (Dtype.float32, False, 4),
    "bfloat16": (Dtype.bfloat16, False, 2),
    "fp8": (Dtype.bfloat16, True, 1),
}
"""KV caches by name: the dtype of heads, True if keys and values are in float8, bytes of an element."""
LAYOUTS = {"cpu": True, "device": False}
"""Layouts of keys: True if keys are transposed."""


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", default=",".join(str(n) for n in sorted({1, max(1, cores // 2), cores})))
    parser.add_argument("--tokens", type=int, default=2048, help="of context of each row")
    parser.add_argument("--caches", default="bfloat16,fp8", help=f"of {', '.join(CACHES)}")
    parser.add_argument("--isa", default="auto", help=f"auto or of {', '.join(CpuKernels.available_isas())}")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for cache in args.caches.split(","):
        for workers in map(int, args.workers.split(",")):
            samples: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
            for _ in range(args.repeats):
                for layout, transposed in LAYOUTS.items():
                    samples[layout].append(time_row(cache, transposed, workers, args.tokens, args.isa))
            for layout, times in samples.items():
                report(cache, layout, workers, args.tokens, statistics.median(times))


def time_row(cache: str, transposed: bool, workers: int, tokens: int, isa: str) -> float:
    dtype, float8, _ = CACHES[cache]
    shape = HostShape(dtype=dtype, num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    return time_host_attention(shape, BLOCK_SIZE, transposed, workers, tokens, float8=float8, isa=isa)


def report(cache: str, layout: str, workers: int, tokens: int, nanoseconds: float) -> None:
    bandwidth = 2 * KV_HEADS * HEAD_DIM * CACHES[cache][2] / nanoseconds
    line = {
        "cache": cache,
        "layout": layout,
        "workers": workers,
        "tokens": tokens,
        "ns_per_token": round(nanoseconds, 1),
        "gb_per_s_of_worker": round(bandwidth, 2),
        "gb_per_s": round(bandwidth * workers, 2),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
