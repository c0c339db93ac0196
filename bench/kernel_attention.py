"""Paged attention on CUDA against the bandwidth and the matrix rate of the card.

    python bench/kernel_attention.py [decode prefill layer] [--shape llama-3.1-8b] [--decode-tile 16,64,4,4,2 ...]
        [--json FILE]

A graph holds one call per copy of the KV cache, with copies enough that each is cold in the L2 cache when its turn
comes; its replay is timed with events, so that the gap between two kernels counts, as it does in a step. One row of
every case is compared with torch first. Bytes are those of the visible keys and values, operations those of the
visible pairs.

``layer`` measures decode attention with what surrounds it, from the output of the QKV projection on: in turn a product
that writes the projection's output, and then attention, in one of these ways: fused with and without programmatic
launch, as separate kernels with and without it, and by torch over contiguous keys and values. The product's own time,
from a graph of products alone, is taken off. Its kernel is a plain one of our own, so that it can take part in
programmatic launch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median
from asyncengine.kernels import pdl as pdl_kernels
from asyncengine.kernels.device_step import DeviceStep, allocate_step
from asyncengine.kernels.ops import HeadNorms
from asyncengine.kernels.triton_attention import paged_attention
from asyncengine.kernels.triton_decode import decode_attention
from asyncengine.kernels.triton_rows import rotary_store_kv, store_kv
from asyncengine.kernels.work_list import AttentionShape, Tile, WorkList, choose_tiles

SHAPES = {
    "llama-3.1-8b": AttentionShape(32, 8, 128, torch.bfloat16),
    "qwen3-0.6b": AttentionShape(16, 8, 128, torch.bfloat16),
    "gpt2": AttentionShape(12, 12, 64, torch.bfloat16),
}
DECODES = [
    *((rows, context) for rows in (1, 8, 64, 256) for context in (128, 256, 2048, 16384)),
    (1, 32768),
    (1, 131072),
    (64, 2049),  # one tile over
    (40, 2048),  # rows that do not divide among the programs
]
PREFILLS = [(1, 2048, 0), (1, 2048, 16384), (1, 64, 32768), (16, 128, 0)]
"""rows, tokens of each, context before them"""
LAYERS = [(1, 128), (1, 288), (1, 2048), (8, 288), (64, 288), (256, 288), (256, 2048)]
"""rows and context, which the new token ends"""
HIDDEN = {"llama-3.1-8b": 4096, "qwen3-0.6b": 1024, "gpt2": 768}
WAYS = ("fused, pdl", "fused", "separate, pdl", "separate", "torch")
BLOCK_SIZE = 16
COLD_BYTES = 256e6
MAX_CALLS = 256
MAX_CACHE_BYTES = 24e9


@dataclass(frozen=True)
class Case:
    shape: AttentionShape
    lengths: list[tuple[int, int]]
    """query and context of each row"""

    @property
    def kv_bytes(self) -> int:
        tokens = sum(query + context for query, context in self.lengths)
        return 2 * tokens * self.shape.num_kv_heads * self.shape.head_dim * self.shape.dtype.itemsize

    @property
    def flops(self) -> float:
        pairs = sum(query * context + query * (query + 1) / 2 for query, context in self.lengths)
        return 4 * pairs * self.shape.num_heads * self.shape.head_dim


@dataclass(frozen=True)
class Bench:
    case: Case
    step: DeviceStep
    caches: list[tuple[Tensor, Tensor]]
    q: Tensor
    out: Tensor

    def call(self, work: WorkList, copy: int) -> None:
        k, v = self.caches[copy]
        paged_attention(self.q, k, v, self.step, work, self.case.shape.head_dim**-0.5, 0, self.out)


def prepare(case: Case) -> Bench:
    shape, rows = case.shape, len(case.lengths)
    per_row = max(-(-(query + context) // BLOCK_SIZE) for query, context in case.lengths)
    tokens = sum(query for query, _ in case.lengths)
    cuda = torch.device("cuda")
    step = allocate_step(rows, per_row, rows, tokens, cuda)
    step.slots.block_tables.copy_(torch.randperm(rows * per_row, device=cuda).view(rows, per_row))
    starts = torch.tensor([0, *(query for query, _ in case.lengths)]).cumsum(0)[:-1]
    step.row_slot.copy_(torch.arange(rows))
    step.row_query_start.copy_(starts)
    step.row_query_len.copy_(torch.tensor([query for query, _ in case.lengths]))
    step.row_context_len.copy_(torch.tensor([context for _, context in case.lengths]))
    copies = min(MAX_CALLS, max(2, round(COLD_BYTES / case.kv_bytes)))
    size = (rows * per_row, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    caches = [
        (torch.randn(size, dtype=shape.dtype, device=cuda), torch.randn(size, dtype=shape.dtype, device=cuda))
        for _ in range(copies if 2 * case.kv_bytes <= MAX_CACHE_BYTES else 1)
    ]
    qkv = torch.randn(tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, device=cuda).to(shape.dtype)
    out = torch.full((tokens, shape.num_heads * shape.head_dim), torch.nan, dtype=shape.dtype, device=cuda)
    return Bench(case, step, caches, qkv[:, : shape.num_heads], out)


def verify(bench: Bench, work: WorkList) -> None:
    """The last row of the first cache in float32, by torch."""
    shape, (query, context) = bench.case.shape, bench.case.lengths[-1]
    work.build(bench.step)
    bench.call(work, 0)
    position = torch.arange(query + context, device="cuda")
    blocks = bench.step.slots.block_tables[-1].long()[position // BLOCK_SIZE]
    k, v = (cache[blocks, :, position % BLOCK_SIZE].float() for cache in bench.caches[0])
    q = bench.q[-query:].float().unflatten(1, (shape.num_kv_heads, shape.group))
    score = torch.einsum("qhgd,khd->hgqk", q, k) * shape.head_dim**-0.5
    score.masked_fill_(position > position[context:, None], -torch.inf)
    expected = torch.einsum("hgqk,khd->qhgd", score.softmax(-1), v).flatten(1)
    error = (bench.out[-query:].float() - expected).norm() / expected.norm()
    if not error < 1e-2 or bench.out.isnan().any():
        raise SystemExit(f"wrong result: error {error:.2e}, {bench.out.isnan().sum()} elements not written")


def time_graph(body: Callable[[], None], calls: int, repeats: int) -> float:
    """Median microseconds of one of the ``calls`` that ``body`` makes."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        body()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        body()
    graph.replay()
    samples = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / calls)
    return median(samples)


def measure(case: Case, tiles: tuple[Tile, Tile], args: argparse.Namespace) -> tuple[float, float]:
    """Microseconds of one attention call, and of building the work list."""
    bench = prepare(case)
    work = WorkList.allocate(
        case.shape,
        max_rows=len(case.lengths),
        max_tokens=len(bench.q),
        max_context=max(query + context for query, context in case.lengths),
        device=bench.q.device,
        split_tokens=args.split_tokens,
        min_split_tokens=args.min_split_tokens,
        item_cost=args.item_cost,
        tiles=tiles,
    )
    if all(query == 1 for query, _ in case.lengths):
        work = work.decode_only
    verify(bench, work)

    def all_copies() -> None:
        for copy in range(len(bench.caches)):
            bench.call(work, copy)

    def ten_lists() -> None:
        for _ in range(10):
            work.build(bench.step)

    return time_graph(all_copies, len(bench.caches), args.repeats), time_graph(ten_lists, 10, args.repeats)


# ---- a layer's attention, from the projection on ----


@triton.jit
def _product_kernel(x, weight, out, K: tl.constexpr, N, M, ROWS: tl.constexpr, PDL: tl.constexpr):  # type: ignore
    """out [M, N] = x [M, K] weight [N, K]^T, 32 columns a program. The first weights are fetched early."""
    column = tl.program_id(0) * 32 + tl.arange(0, 32)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, 128)
    w = tl.load(weight + column[:, None] * K + k[None, :])
    pdl_kernels.wait(PDL)
    acc = tl.zeros([ROWS, 32], tl.float32)
    for first in range(0, K, 128):
        after = tl.load(weight + column[:, None] * K + first + 128 + k[None, :], mask=first + 128 + k[None, :] < K)
        value = tl.load(x + row[:, None] * K + first + k[None, :], mask=row[:, None] < M, other=0.0)
        acc += tl.dot(value, tl.trans(w))
        w = after
    tl.store(out + row[:, None] * N + column[None, :], acc.to(out.dtype.element_ty), mask=row[:, None] < M)


@dataclass(frozen=True)
class Layer:
    """The tensors of ``bench``'s layers, one per copy of the cache, with the projection in front."""

    bench: Bench
    x: Tensor
    weights: list[Tensor]
    norms: HeadNorms | None
    cos_sin: Tensor | None
    work: WorkList
    arrivals: Tensor
    contiguous: list[tuple[Tensor, Tensor]]
    """what torch reads"""

    @property
    def heads(self) -> Tensor:
        assert self.bench.q._base is not None
        return self.bench.q._base

    def project(self, copy: int, pdl: bool) -> None:
        heads, weight = self.heads, self.weights[copy % len(self.weights)]
        rows = min(64, max(16, triton.next_power_of_2(len(heads))))
        grid = (len(weight) // 32, triton.cdiv(len(heads), rows))
        _product_kernel[grid](
            self.x, weight, heads, weight.shape[1], len(weight), len(heads), rows, **pdl_kernels.launch_options(pdl)
        )

    def chain(self, way: str | None) -> Callable[[], None]:
        def body() -> None:
            for copy in range(len(self.bench.caches)):
                self.project(copy, way is not None and "pdl" in way)
                if way is not None:
                    self.attend(way, copy)

        return body

    def attend(self, way: str, copy: int) -> None:
        bench, shape = self.bench, self.bench.case.shape
        k, v = bench.caches[copy]
        scale, pdl = shape.head_dim**-0.5, "pdl" in way
        if way.startswith("fused"):
            decode_attention(
                self.heads, shape.num_heads, self.norms, self.cos_sin, k, v, bench.step, scale, 0, bench.out,
                self.arrivals, pdl=pdl,
            )  # fmt: skip
        elif way.startswith("separate"):
            if self.cos_sin is None:
                new_k, new_v = self.heads[:, shape.num_heads :].chunk(2, 1)
                store_kv(new_k, new_v, bench.step.slot_mapping, k, v, pdl=pdl)
            else:
                q_norm, k_norm, eps = self.norms or (None, None, 0.0)
                rotary_store_kv(
                    self.heads, shape.num_heads, q_norm, k_norm, eps, self.cos_sin, bench.step.positions,
                    bench.step.slot_mapping, k, v, pdl=pdl,
                )  # fmt: skip
            paged_attention(bench.q, k, v, bench.step, self.work, scale, 0, bench.out, pdl=pdl)
        else:  # attention alone, of unrotated heads: torch's best case
            k, v = self.contiguous[copy]
            F.scaled_dot_product_attention(bench.q[:, :, None], k, v, scale=scale, enable_gqa=True)


def prepare_layer(name: str, rows: int, context: int, tiles: tuple[Tile, Tile], args: argparse.Namespace) -> Layer:
    shape = SHAPES[name]
    bench = prepare(Case(shape, [(1, context - 1)] * rows))
    step, cuda = bench.step, bench.q.device
    step.positions.fill_(context - 1)
    last = step.slots.block_tables[:, (context - 1) // BLOCK_SIZE].long()
    step.slot_mapping.copy_(last * BLOCK_SIZE + (context - 1) % BLOCK_SIZE)

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=cuda).to(shape.dtype)

    features = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    weights = [random(features, HIDDEN[name]) * HIDDEN[name] ** -0.5 for _ in range(min(len(bench.caches), 32))]
    norms = HeadNorms(random(shape.head_dim), random(shape.head_dim), 1e-6) if name.startswith("qwen3") else None
    cos_sin = None if name == "gpt2" else torch.randn(context, shape.head_dim, device=cuda)
    room = {"max_rows": rows, "max_tokens": rows, "max_context": context, "device": cuda}
    splits = {"split_tokens": args.split_tokens, "min_split_tokens": args.min_split_tokens, "item_cost": args.item_cost}
    work = WorkList.allocate(shape, **room, **splits, tiles=tiles).decode_only
    work.build(step)
    arrivals = torch.zeros(rows * shape.num_kv_heads, dtype=torch.int32, device=cuda)
    contiguous = []
    if "torch" in args.ways:
        for _ in bench.caches:
            k, v = random(2, rows, shape.num_kv_heads, context, shape.head_dim)
            contiguous.append((k, v))
    x = random(rows, HIDDEN[name])
    return Layer(bench, x, weights, norms, cos_sin, work, arrivals, contiguous)


def layer_error(layer: Layer) -> float:
    """Of output and caches of the fused way, relative to what the separate kernels give."""
    k, v = layer.bench.caches[0]
    new = layer.bench.step.slot_mapping
    results = []
    for way in ("separate", "fused, pdl"):
        for cache in (k, v):
            cache[new // BLOCK_SIZE, :, new % BLOCK_SIZE] = torch.nan
        layer.bench.out.fill_(torch.nan)
        layer.project(0, "pdl" in way)
        layer.attend(way, 0)
        results.append([layer.bench.out.float(), k.float(), v.float()])
    return sum(float((mine - other).norm() / other.norm()) for other, mine in zip(*results, strict=True))


def layer_figures(name: str, tiles: tuple[Tile, Tile], args: argparse.Namespace) -> Iterator[Figure]:
    for rows, context in args.layer:
        layer = prepare_layer(name, rows, context, tiles, args)
        error, calls = layer_error(layer), len(layer.bench.caches)
        label = f"{name} layer {rows} x {context} {as_text(tiles[0])}"
        if not error < 1e-2:
            raise SystemExit(f"wrong result: {label}, error {error:.2e}")
        product_us = time_graph(layer.chain(None), calls, args.repeats)
        yield Figure(f"{label}: product alone", product_us, "us")
        for way in args.ways:
            us = time_graph(layer.chain(way), calls, args.repeats) - product_us
            yield Figure(f"{label}: {way}", us, "us")
        del layer
        torch.cuda.empty_cache()


def tile(text: str) -> Tile:
    return Tile(*(int(field) for field in text.split(",")))


def figures(args: argparse.Namespace) -> Iterator[Figure]:
    for name in args.shape:
        shape = SHAPES[name]
        decode, prefill = choose_tiles(shape)
        for chosen in (args.decode_tile or [decode]) if "layer" in args.what else ():
            yield from layer_figures(name, (chosen, prefill), args)
        for chosen in args.decode_tile or [decode]:
            for rows, context in DECODES if "decode" in args.what else ():
                # The query's own key is the last of the context that the table names.
                case = Case(shape, [(1, context - 1)] * rows)
                if case.kv_bytes > MAX_CACHE_BYTES:
                    continue
                attention_us, build_us = measure(case, (chosen, prefill), args)
                label = f"{name} decode {rows} x {context} {as_text(chosen)}"
                yield Figure(label, attention_us, "us")
                yield Figure(f"{label}: bandwidth", case.kv_bytes / attention_us / 1e6, "TB/s")
                yield Figure(f"{label}: work list", build_us, "us")
                torch.cuda.empty_cache()
        for chosen in args.prefill_tile or [prefill]:
            for rows, query, context in PREFILLS if "prefill" in args.what else ():
                case = Case(shape, [(query, context)] * rows)
                attention_us, build_us = measure(case, (decode, chosen), args)
                label = f"{name} prefill {rows} x {query} after {context} {as_text(chosen)}"
                yield Figure(label, attention_us, "us")
                yield Figure(f"{label}: rate", case.flops / attention_us / 1e6, "TFLOP/s")
                yield Figure(f"{label}: work list", build_us, "us")
                torch.cuda.empty_cache()


def pair(text: str) -> tuple[int, int]:
    rows, context = text.split("x")
    return int(rows), int(context)


def as_text(tile: Tile) -> str:
    return f"[{tile.rows},{tile.keys},{tile.warps},{tile.stages},{tile.programs_per_sm}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="*", default=["decode", "prefill"], help="decode, prefill, layer")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    fields = "rows,keys,warps,stages,programs per multiprocessor"
    parser.add_argument("--decode-tile", nargs="+", type=tile, metavar="TILE", help=fields)
    parser.add_argument("--prefill-tile", nargs="+", type=tile, metavar="TILE")
    parser.add_argument("--split-tokens", type=int, default=0)
    parser.add_argument("--min-split-tokens", type=int, default=256)
    parser.add_argument("--item-cost", type=int, default=1)
    parser.add_argument("--layer", nargs="+", type=pair, default=LAYERS, metavar="ROWSxCONTEXT")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    done = []
    for figure in figures(args):
        print(f"{figure.name:<64} {figure.value:>10.2f} {figure.unit}", flush=True)
        done.append(figure)
    if args.json:
        settings = {
            "split_tokens": args.split_tokens,
            "min_split_tokens": args.min_split_tokens,
            "item_cost": args.item_cost,
        }
        more = {"gpu": torch.cuda.get_device_name()}
        record = report.record("kernel_attention", done, repeats=args.repeats, settings=settings, **more)
        report.write(args.json, record)


if __name__ == "__main__":
    main()
