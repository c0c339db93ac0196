"""The row kernels on the GPU beside torch's operations, for the shapes of real models.

    python bench/kernel_rows.py [--model gpt2 ...] [--kernel silu_mul ...] [--json FILE]

Each side is a captured graph of calls on copies of the inputs that follow each other, so a figure contains what a
kernel costs inside a step: its launch from a graph and its part of the gap to the next. Before every replay a large
buffer is read through the L2 cache, and no copy is used twice, so inputs come from memory. The share is that of
the bytes that must move, in and out, over the time and the bandwidth of the card (--bandwidth, of one H200).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median
from asyncengine.kernels import triton_rows
from asyncengine.kernels.ops import Norm

SHAPES = Path(__file__).parent / "shapes"
DTYPE = torch.bfloat16
BLOCK_SIZE = 16
FLUSH_BYTES = 512 << 20
COPIES_BYTES = 8 << 30

Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    layers: int
    q_heads: int
    kv_heads: int
    dim: int
    vocab: int
    is_gpt2: bool
    qk_norm: bool

    @classmethod
    def read(cls, model: str) -> Shape:
        raw = json.loads((SHAPES / model / "config.json").read_text())
        if raw["model_type"] == "gpt2":
            hidden, heads = raw["n_embd"], raw["n_head"]
            dim = hidden // heads
            return cls(hidden, 4 * hidden, raw["n_layer"], heads, heads, dim, raw["vocab_size"], True, False)
        return cls(
            raw["hidden_size"],
            raw["intermediate_size"],
            raw["num_hidden_layers"],
            raw["num_attention_heads"],
            raw["num_key_value_heads"],
            raw["head_dim"],
            raw["vocab_size"],
            False,
            raw["model_type"] == "qwen3",
        )


@dataclass(frozen=True)
class Case:
    """One kernel at one size. ``make`` allocates inputs and returns a call of ours and one of torch's on them."""

    name: str
    rows: int
    bytes: int
    make: Callable[[], tuple[Call, Call]]


# ---- rows ----


def row_cases(shape: Shape, tokens: int, device: torch.device) -> Iterator[Case]:
    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(DTYPE)

    def norm() -> tuple[Call, Call]:
        x, w, b = (random(*s, shape.hidden) for s in ((tokens,), (), ()))
        size = (shape.hidden,)
        if shape.is_gpt2:
            return lambda: triton_rows.norm(x, Norm(w, b, 1e-5)), lambda: F.layer_norm(x, size, w, b, 1e-5)
        return lambda: triton_rows.norm(x, Norm(w, None, 1e-5)), lambda: F.rms_norm(x, size, w, 1e-5)

    def activation() -> tuple[Call, Call]:
        if shape.is_gpt2:
            x = random(tokens, shape.inner)
            return lambda: triton_rows.activation(x, "gelu_tanh"), lambda: F.gelu(x, approximate="tanh")
        x = random(tokens, 2 * shape.inner)
        return lambda: triton_rows.activation(x, "silu_mul"), lambda: F.silu(x[:, : shape.inner]) * x[:, shape.inner :]

    def store() -> tuple[Call, Call]:
        n, m = shape.q_heads, shape.q_heads + shape.kv_heads
        heads = random(tokens, m + shape.kv_heads, shape.dim)
        q, k, v = heads[:, :n], heads[:, n:m], heads[:, m:]
        blocks = tokens // BLOCK_SIZE + 1
        k_cache, v_cache = (random(blocks, shape.kv_heads, BLOCK_SIZE, shape.dim) for _ in range(2))
        slots = torch.randperm(blocks * BLOCK_SIZE, device=device)[:tokens]
        block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE

        def write() -> None:
            k_cache[block, :, offset] = k
            v_cache[block, :, offset] = v

        if shape.is_gpt2:
            return lambda: triton_rows.store_kv(k, v, slots, k_cache, v_cache), write
        table = torch.rand(tokens, shape.dim, device=device)
        positions = torch.arange(tokens, device=device, dtype=torch.int32)
        q_norm, k_norm = (random(shape.dim), random(shape.dim)) if shape.qk_norm else (None, None)

        def rotate_and_write() -> None:
            cos, sin = table[positions][:, None, :].chunk(2, -1)
            for x, weight in ((q, q_norm), (k, k_norm)):
                y = x if weight is None else F.rms_norm(x, (shape.dim,), weight, 1e-6)
                a, b = y.float().chunk(2, -1)
                x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
            write()

        def fused() -> None:
            triton_rows.rotary_store_kv(
                heads, n, q_norm, k_norm, 1e-6, table, positions, slots, k_cache, v_cache
            )

        return fused, rotate_and_write

    element = DTYPE.itemsize
    kv = 2 * shape.kv_heads * shape.dim
    rotary = 0 if shape.is_gpt2 else 2 * shape.q_heads * shape.dim * element + 4 * shape.dim
    yield Case("layer_norm" if shape.is_gpt2 else "rms_norm", tokens, 2 * tokens * shape.hidden * element, norm)
    yield Case(
        "gelu_tanh" if shape.is_gpt2 else "silu_mul",
        tokens,
        (2 if shape.is_gpt2 else 3) * tokens * shape.inner * element,
        activation,
    )
    yield Case(
        "store_kv" if shape.is_gpt2 else "rotary_store_kv", tokens, tokens * (2 * kv * element + rotary), store
    )


# ---- measuring ----


def measure(calls: list[Call], flush: Tensor, repeats: int) -> float:
    """Microseconds of one call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()  # compiles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    samples = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for repeat in range(repeats + 2):
        flush.sum()  # reading leaves nothing to be written back
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repeat >= 2:
            samples.append(start.elapsed_time(end) * 1e3 / len(calls))
    return median(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", nargs="+", default=sorted(p.name for p in SHAPES.iterdir() if p.is_dir()))
    parser.add_argument("--kernel", nargs="+", default=[""], help="only kernels whose name begins with one of these")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 256, 2048])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--bandwidth", type=float, default=4.4, metavar="TB/s")
    parser.add_argument("--json", metavar="FILE", help="where the record goes")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    device = torch.device("cuda")
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    print(f"{torch.cuda.get_device_name()}, {DTYPE}, medians of {args.repeats}; share of {args.bandwidth} TB/s")
    print(f"{'model':<14}{'kernel':<22}{'rows':>6}{'ours µs':>10}{'share':>8}{'torch µs':>10}{'share':>8}")
    lines: list[dict[str, object]] = []
    for model in args.model:
        shape = Shape.read(model)
        cases = [case for tokens in args.tokens for case in row_cases(shape, tokens, device)]
        for case in sorted(cases, key=lambda case: case.name):
            if not case.name.startswith(tuple(args.kernel)):
                continue
            copies = [case.make() for _ in range(max(4, min(32, COPIES_BYTES // max(1, case.bytes))))]
            sides = [measure([copy[side] for copy in copies], flush, args.repeats) for side in range(2)]
            shares = [case.bytes / (us * args.bandwidth * 1e6) for us in sides]
            print(
                f"{model:<14}{case.name:<22}{case.rows:>6}{sides[0]:>10.2f}{shares[0]:>8.1%}{sides[1]:>10.2f}{shares[1]:>8.1%}",
                flush=True,
            )
            line = {"model": model, "kernel": case.name, "rows": case.rows, "bytes": case.bytes}
            lines.append(line | {"ours_us": sides[0], "torch_us": sides[1], "ours_share": shares[0]})
    if args.json:
        figures = [
            Figure(f"{line['kernel']}, {line['model']}, {line['rows']} rows", float(str(line["ours_us"])), "µs")
            for line in lines
        ]
        settings = {"device": torch.cuda.get_device_name(), "dtype": str(DTYPE), "bandwidth TB/s": args.bandwidth}
        report.write(
            args.json, report.record("kernel_rows", figures, repeats=args.repeats, settings=settings, lines=lines)
        )


if __name__ == "__main__":
    main()
