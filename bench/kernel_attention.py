"""bench/kernels.py attention: attention of decode and prefill over the paged cache, and the work list that it follows.

One row of every case is compared with torch first. Bytes are those of the visible keys and values, operations those of
the visible pairs. Rows of one token take kernels of their own in a step, which also norm, rotate and store: one if they
have few keys ("few keys"), else the one with a work list ("paged") that an engine takes on the device. Where a batch
could take the first but for the length of its rows, both are measured. torch reads contiguous keys and values of the
same sizes; it has nothing for rows of different lengths. With ``--kv-cache-dtype auto fp8`` keys and
values are in bfloat16, then in float8.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_common import ELEMENT_BYTES, pairs, read_model
from kernel_timing import Call, Line, Lines, Timer, copies_for
from replay import Row, decode_rows
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from asyncengine.kernels.cuda.attention.call import KernelCall
from asyncengine.kernels.cuda.attention.choose import (
    Limits,
    describe,
    few_keys_context,
    few_keys_pieces,
    few_keys_tile,
    fixed_tile,
    paged_tiles,
)
from asyncengine.kernels.cuda.attention.plan import AttentionPlan, AttentionShape, Cut, Launch, LayerKind, Tile
from asyncengine.kernels.cuda.attention.run import launch_all, prepare
from asyncengine.kernels.cuda.attention.work.lists import Counters, WorkList
from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.step.bucket import ANY_CONTEXT, Bucket
from asyncengine.kernels.cuda.step.tensors import DeviceStep, allocate_step
from asyncengine.kernels.cuda.trials import examine
from asyncengine.kernels.float8 import FLOAT8
from asyncengine.kernels.ops import AttentionLayer, HeadNorms, LayerKVCache
from asyncengine.models.config import ModelConfig

DTYPE = torch.bfloat16
BLOCK_SIZE = 16
DECODES = "128,256,2048,16384,131072"
DECODE_ROWS = "1,8,64,256"
RAGGED = "2,4,8,16"
LONG, SHORT = 32768, 256
"""Contexts of the one long row of a ragged batch, and of its others."""
PREFILLS = "1x2048+0,1x2048+14336,1x512+0,4x512+0,16x128+0,1x64+32704"
TARGETS = {(64, 2048): 0.75, (1, LONG): 0.55}
"""Shares of the bandwidth by rows and context."""
MAX_CACHE_BYTES = 40e9
ALONE_BYTES = 4e9
"""Beyond, one cache is enough: its reads take so long that the gap to a next kernel is nothing beside them."""
MAX_CALLS = 128

Tiles = tuple[Tile, Tile | None]
"""Tiles of decode and of prefill."""
Ways = dict[str, Callable[[int], None]]
"""Kernels that attend over a copy of the cache, by name."""


# ---- cases ----


@dataclass(frozen=True)
class Case:
    c: ModelConfig
    rows: list[Row]
    float8: bool = False
    """true if keys and values are in float8"""

    @property
    def kv_bytes(self) -> int:
        tokens = sum(query + context for query, context in self.rows)
        return 2 * tokens * self.c.num_kv_heads * self.c.head_dim * (1 if self.float8 else ELEMENT_BYTES)

    @property
    def flops(self) -> float:
        return 4 * self.c.num_heads * self.c.head_dim * sum(pairs(*row) for row in self.rows)

    @property
    def is_even(self) -> bool:
        return len(set(self.rows)) == 1

    @property
    def longest(self) -> int:
        return max(query + context for query, context in self.rows)


def parse_prefills(text: str) -> list[list[Row]]:
    """``rows x tokens + context``, separated by commas."""
    cases = []
    for case in filter(None, text.split(",")):
        rows, _, rest = case.partition("x")
        query, _, context = rest.partition("+")
        cases.append([Row(int(query), int(context or 0))] * int(rows))
    return cases


def ragged(rows: int, long: int) -> list[Row]:
    """Short ones and one of ``long`` tokens. The query's own key is the last of its context."""
    return decode_rows([SHORT - 1] * (rows - 1) + [long - 1])


def decode_cases(c: ModelConfig, args: argparse.Namespace) -> Iterable[tuple[str, Case, float | None]]:
    """Size, case and target: even batches, and ragged ones."""
    contexts = dict.fromkeys(min(context, c.max_positions) for context in args.contexts)
    sizes = [(rows, context) for context in contexts for rows in args.decode_rows]
    for rows, context in dict.fromkeys([*sizes, *(size for size in TARGETS if args.targets)]):
        if context <= c.max_positions:
            case = Case(c, decode_rows([context - 1] * rows), args.float8)
            yield f"{rows} x {context}", case, TARGETS.get((rows, context))
    long = min(LONG, c.max_positions)
    for rows in args.ragged:
        yield f"{rows - 1} x {SHORT}, 1 x {long}", Case(c, ragged(rows, long), args.float8), None


def lines(args: argparse.Namespace, timer: Timer) -> Lines:
    for shape, kind in itertools.product(args.shape, args.kv_cache_dtype):
        c, args = read_model(shape), argparse.Namespace(**vars(args) | {"float8": kind == "fp8"})
        prefills = [rows for rows in args.prefill if rows[0].query + rows[0].context <= c.max_positions]
        for tiles in tile_pairs(c, timer.device, args):
            work = allocate_work(c, prefills, tiles, timer.device, args)
            decode_work = functools.cache(partial(allocate_decode_work, c, tiles, timer.device, args))
            label = shape if tiles is None else f"{shape} {as_text(tiles)}"
            label += " fp8 cache" if args.float8 else ""
            for size, case, target in decode_cases(c, args):
                if case.kv_bytes <= MAX_CACHE_BYTES:
                    listed = decode_work(len(case.rows), case.longest - 1)
                    yield from decode_lines(label, size, Bench(case, timer, args.pdl), listed, target)
            for rows in prefills:
                yield from prefill_lines(label, Bench(Case(c, rows, args.float8), timer, args.pdl), work)
            decodes = [[Row(1, SHORT - 1)] * rows for rows in args.decode_rows]
            for step in (*decodes, *prefills[:1]):
                listed = decode_work(len(step), step[0].context) if step[0].query == 1 else work
                yield build_line(label, Bench(Case(c, step, args.float8), timer, args.pdl, copies=0), listed)


@dataclass(frozen=True)
class Listed:
    """A plan with a work list."""

    launches: tuple[Launch, ...]
    work: WorkList

    @property
    def prepares(self) -> bool:
        """The kernels leave it to others to norm, rotate and store."""
        return any(launch.stored for launch in self.launches)

    @property
    def stored(self) -> list[Launch]:
        """The same rows, and those of several tokens, after another kernel has stored their heads."""
        if self.launches[0].kernel != "paged_decode":
            return [launch._replace(stored=True) for launch in self.launches]
        return [Launch("paged", launch.tile, launch.rows, stored=True) for launch in self.launches]


def plan_for(c: ModelConfig, bucket: Bucket, tiles: Tiles | None, gpu: Gpu, args: Any) -> AttentionPlan:
    """The engine's, with a work list; in other tiles, if any are given, or in fixed splits, if the options say so."""
    layer, fixed = LayerKind(attention_shape(c, args.float8)), args.work.get("split_tokens", 0)
    if fixed:
        tile = (tiles and tiles[1]) or fixed_tile(layer.shape, gpu)
        return AttentionPlan(layer, (Launch("paged", tile, "any", stored=True),), Cut("fixed", fixed))
    limits = Limits(max(256, bucket.max_rows), max(2048, bucket.max_tokens), 131072, BLOCK_SIZE)
    capable = replace(gpu, tma=gpu.tma and not tiles)
    plan = describe(bucket, layer, capable, limits)
    if plan.cut is None:  # what longer rows take
        plan = describe(bucket._replace(max_context=ANY_CONTEXT), layer, capable, limits)
    if not tiles:
        return plan
    by_rows = {"one": tiles[0], "several": tiles[1]}
    launches = (launch._replace(tile=by_rows[launch.rows] or launch.tile) for launch in plan.launches)
    return replace(plan, launches=tuple(launches))


def allocate_work(
    c: ModelConfig, prefills: Sequence[Sequence[Row]], tiles: Tiles | None, device: torch.device, args: Any
) -> Listed:
    """One for all cases, as an engine has it; its sizes are constants of the kernels, which are then compiled once."""
    rows = max([256, *args.decode_rows])
    tokens = max([2048, rows, *(sum(row.query for row in one) for one in prefills)])
    gpu = examine(device)
    return _allocate(plan_for(c, Bucket(rows, tokens, False), tiles, gpu, args), rows, tokens, gpu, device, args)


def allocate_decode_work(
    c: ModelConfig, tiles: Tiles | None, device: torch.device, args: Any, rows: int, context: int
) -> Listed:
    """Allocate the work of steps of one-token rows, after so many tokens at most: as an engine has it, or as the
    options say."""
    gpu = examine(device)
    plan = plan_for(c, Bucket(rows, rows, True, context), tiles, gpu, args)
    apart = plan.cut and plan.cut.kind == "apart"
    max_rows, max_tokens = (rows, rows) if apart else (max(256, rows), max(2048, rows))
    return _allocate(plan, max_rows, max_tokens, gpu, device, args)


def _allocate(plan: AttentionPlan, rows: int, tokens: int, gpu: Gpu, device: torch.device, args: Any) -> Listed:
    (shape, window, *_), cut = plan.layer, plan.cut
    assert cut
    decode, prefill = plan.tile("one") or plan.tile("any"), plan.tile("several") or plan.tile("any")
    assert decode
    options = {"whole_tokens": cut.tokens if cut.kind == "apart" else 0, "late": cut.kind == "late"} | args.work
    work = WorkList.allocate(
        shape, (decode, prefill), max_rows=rows, max_tokens=tokens, max_context=131072, device=device, window=window,
        gpu=gpu, **options,
    )  # fmt: skip
    return Listed(plan.launches, work)


def attention_shape(c: ModelConfig, float8: bool) -> AttentionShape:
    return AttentionShape(c.num_heads, c.num_kv_heads, c.head_dim, DTYPE, float8)


def tile_pairs(c: ModelConfig, device: torch.device, args: argparse.Namespace) -> Iterable[Tiles | None]:
    """Pair each tile of the options with each other; None stands for the engine's tiles."""
    if not args.decode_tile and not args.prefill_tile:
        return [None]
    decode, prefill = paged_tiles(attention_shape(c, args.float8), examine(device))
    decodes, prefills = ([parse_tile(text) for text in texts or ()] for texts in (args.decode_tile, args.prefill_tile))
    return itertools.product(decodes or [decode], prefills or [prefill])


def parse_tile(text: str) -> Tile:
    return Tile(*(int(field) for field in text.split(",")))


TILE_FIELDS = ",".join(field.name for field in fields(Tile))


def as_text(tiles: Tiles) -> str:
    texts = (",".join(str(int(getattr(tile, field.name))) for field in fields(Tile)) for tile in tiles if tile)
    return "".join(f"[{text}]" for text in texts)


# ---- measuring ----


class Bench:
    """A case on the device: its step, and caches enough that each is cold when its turn comes."""

    def __init__(self, case: Case, timer: Timer, pdl: bool, copies: int | None = None) -> None:
        c, device = case.c, timer.device
        self.case, self.timer, self.pdl = case, timer, pdl
        rows = len(case.rows)
        self.per_row = -(-case.longest // BLOCK_SIZE)
        self.step = make_step(case.rows, self.per_row, device)
        if copies is None:
            copies = copies_for(case.kv_bytes, MAX_CALLS) if case.kv_bytes <= ALONE_BYTES else 1
        size = (rows * self.per_row, c.num_kv_heads, BLOCK_SIZE, c.head_dim)
        dtype = FLOAT8 if case.float8 else DTYPE
        self.caches = [
            tuple(torch.randn(size, dtype=DTYPE, device=device).to(dtype) for _ in "kv") for _ in range(copies)
        ]
        self.scales = torch.ones(2, 2, c.num_kv_heads, device=device) if case.float8 else None
        tokens = sum(row.query for row in case.rows)
        self.heads = torch.randn(tokens, c.num_heads + 2 * c.num_kv_heads, c.head_dim, dtype=DTYPE, device=device)
        self.q = self.heads[:, : c.num_heads]
        self.out = torch.full((tokens, c.num_heads * c.head_dim), torch.nan, dtype=DTYPE, device=device)
        ones = torch.ones(c.head_dim, dtype=DTYPE, device=device)
        norms = HeadNorms(ones, ones, 1e-6) if c.qk_norm else None
        cos_sin = None if not c.ropes else torch.randn(case.longest, c.head_dim, device=device)
        self.scale = c.head_dim**-0.5
        self.layer = AttentionLayer(c.num_heads, norms, cos_sin, self.scale, 0)
        self.counters = Counters(torch.zeros(rows * c.num_heads, dtype=torch.int32, device=device))

    def paged(self, listed: Listed, copy: int, pdl: bool | None = None) -> None:
        """Over keys and values that are in the cache."""
        self._launch(listed.stored, listed.work, copy, pdl)

    def few(self, copy: int, pdl: bool | None = None) -> None:
        shape, sms = attention_shape(self.case.c, self.case.float8), examine(self.timer.device).multiprocessors
        pieces = few_keys_pieces(len(self.case.rows), shape.num_heads, shape.head_dim, sms)
        self._launch([Launch("few_keys", few_keys_tile(shape), "one", False, pieces)], self.counters, copy, pdl)

    def listed(self, listed: Listed, copy: int, pdl: bool | None = None) -> None:
        self._launch(listed.launches, listed.work, copy, pdl)

    def _launch(self, launches: Sequence[Launch], work: WorkList | Counters, copy: int, pdl: bool | None) -> None:
        pdl = self.pdl if pdl is None else pdl
        launch_all(launches, self._call(work, copy, pdl))

    def store(self, copy: int, pdl: bool | None = None) -> None:
        """Store keys and values, and rotate the queries in place, as ``few`` and ``listed`` do before attention."""
        pdl = self.pdl if pdl is None else pdl
        prepare(self._call(self.counters, copy, pdl))

    def _call(self, work: WorkList | Counters, copy: int, pdl: bool) -> KernelCall:
        k, v = self.caches[copy]
        cache = LayerKVCache(k, v, self.scales)
        return KernelCall(self.heads, self.layer, cache, self.step, work, self.out, pdl=pdl)

    def torch_calls(self) -> list[Call]:
        """scaled_dot_product_attention, over the memory of the caches as if it were contiguous."""
        c, rows, query = self.case.c, len(self.case.rows), self.case.rows[0].query
        total = self.case.longest
        q = self.q.view(rows, query, c.num_heads, c.head_dim).transpose(1, 2)
        options: dict[str, Any] = {"scale": self.scale, "enable_gqa": True}
        if query == total:
            options["is_causal"] = True
        elif query > 1:
            options["attn_mask"] = causal_lower_right(query, total)
        calls: list[Call] = []
        for caches in self.caches:
            k, v = (x.view(rows, c.num_kv_heads, -1, c.head_dim)[:, :, :total] for x in caches)
            if query > 1:  # no kernel of torch's takes both grouped heads and this mask
                k, v = (x.repeat_interleave(c.num_heads // c.num_kv_heads, 1) for x in (k, v))
            calls.append(partial(F.scaled_dot_product_attention, q, k, v, **options))
        return calls

    def torch_us(self) -> float | None:
        if not self.case.is_even or self.case.float8:  # torch reads no such keys and values
            return None
        # The plain kernel would copy every key for each head that shares it.
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        if self.timer.device.type != "cuda":
            kernels.append(SDPBackend.MATH)
        with sdpa_kernel(kernels):
            return self.timer.us_if_possible(self.torch_calls())


def make_step(rows: Sequence[Row], per_row: int, device: torch.device) -> DeviceStep:
    """Blocks of a row lie anywhere."""
    count, tokens = len(rows), sum(row.query for row in rows)
    step = allocate_step(count, per_row, count, tokens, device)
    step.slots.block_tables.copy_(torch.randperm(count * per_row).view(count, per_row))
    queries, contexts = (torch.tensor(values, dtype=torch.int32) for values in zip(*rows, strict=True))
    step.row_slot.copy_(torch.arange(count))
    step.row_query_start.copy_(queries.cumsum(0) - queries)
    step.row_query_len.copy_(queries)
    step.row_context_len.copy_(contexts)
    row = torch.arange(count).repeat_interleave(queries.long())
    position = torch.cat([context + torch.arange(query) for query, context in rows])
    step.positions.copy_(position)
    block = step.slots.block_tables.cpu()[row, position // BLOCK_SIZE]
    step.slot_mapping.copy_(block.long() * BLOCK_SIZE + position % BLOCK_SIZE)
    return step


def decode_lines(shape: str, size: str, bench: Bench, listed: Listed, target: float | None) -> Lines:
    case, copies = bench.case, range(len(bench.caches))
    short = few_keys_context(len(case.rows), attention_shape(case.c, case.float8), examine(bench.timer.device))
    listed.work.build(bench.step)
    verify(bench, listed, f"{shape} {size}")
    torch_us = bench.torch_us()
    fused: Ways = {"paged": partial(bench.listed, listed)} if not listed.prepares else {}
    if short:
        fused["few keys"] = bench.few
    verify_fused(bench, listed, fused, f"{shape} {size}")
    for kernel, attend in ({"paged": partial(bench.paged, listed)} | fused).items():
        taken = (case.longest - 1 <= short) == (kernel == "few keys")
        yield Line(
            "attention", f"decode, {kernel}", shape, size, bench.timer.us([partial(attend, copy) for copy in copies]),
            case.kv_bytes, case.flops, torch_us, "scaled_dot_product_attention", target if taken else None,
        )  # fmt: skip


def prefill_lines(shape: str, bench: Bench, listed: Listed) -> Lines:
    case, (query, context) = bench.case, bench.case.rows[0]
    size = f"{len(case.rows)} x {query} after {context}"
    listed.work.build(bench.step)
    verify(bench, listed, f"{shape} {size}")
    us = bench.timer.us([partial(bench.paged, listed, copy) for copy in range(len(bench.caches))])
    torch_us = bench.torch_us()
    way = "scaled_dot_product_attention"
    yield Line("attention", "prefill", shape, size, us, case.kv_bytes, case.flops, torch_us, way)


def build_line(shape: str, bench: Bench, listed: Listed) -> Line:
    """Once per step. It reads the rows, and writes about an item for each."""
    rows = bench.case.rows
    us = bench.timer.us([partial(listed.work.build, bench.step, bench.pdl)] * 16)
    size = f"{len(rows)} rows of {rows[0].query}"
    return Line("attention", "work list", shape, size, us, len(rows) * (16 + 64))


# ---- checks ----


def read_cells(cache: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
    """float32 [tokens, Hk, D]. By bytes: torch does not index float8 everywhere."""
    return cache.view(torch.uint8)[blocks, :, offsets].view(cache.dtype).float()


def verify(bench: Bench, listed: Listed, label: str) -> None:
    """The last row of the first cache in float32, by torch. SystemExit if it is wrong."""
    c, (query, context) = bench.case.c, bench.case.rows[-1]
    bench.paged(listed, 0)
    position = torch.arange(query + context, device=bench.q.device)
    blocks = bench.step.slots.block_tables[-1].long()[position // BLOCK_SIZE]
    k, v = (read_cells(cache, blocks, position % BLOCK_SIZE) for cache in bench.caches[0])
    q = bench.q[-query:].float().reshape(query, c.num_kv_heads, c.num_heads // c.num_kv_heads, -1)
    score = torch.einsum("qhgd,khd->hgqk", q, k) * bench.scale
    score.masked_fill_(position > position[context:, None], -torch.inf)
    expected = torch.einsum("hgqk,khd->qhgd", score.softmax(-1), v).flatten(1)
    error = float((bench.out[-query:].float() - expected).norm() / expected.norm())
    if not error < 1e-2 or bench.out.isnan().any():
        raise SystemExit(f"wrong result: {label}, error {error:.2e}, {bench.out.isnan().sum()} elements not written")


def verify_fused(bench: Bench, listed: Listed, ways: Ways, label: str) -> None:
    """Outputs and new keys and values of kernels that do everything, beside those of the separate ones."""
    heads, (k, v) = bench.heads.clone(), bench.caches[0]
    new = bench.step.slot_mapping

    def results(attend: Callable[[], None]) -> list[Tensor]:
        bench.heads.copy_(heads)
        for cache in (k, v):
            cache.view(torch.uint8)[new // BLOCK_SIZE, :, new % BLOCK_SIZE] = 0xFF  # NaN
        bench.out.fill_(torch.nan)
        attend()
        return [bench.out.float(), *(read_cells(cache, new // BLOCK_SIZE, new % BLOCK_SIZE) for cache in (k, v))]

    def separate() -> None:
        bench.store(0)
        bench.paged(listed, 0)

    expected = results(separate)
    for way, attend in ways.items():
        both = zip(expected, results(partial(attend, 0)), strict=True)
        error = sum(float((mine - other).norm() / other.norm()) for other, mine in both)
        if not error < 1e-2:
            raise SystemExit(f"wrong result: {label}, {way}, error {error:.2e}")
