"""bench/kernels.py attention: attention of decode and prefill over the paged cache, and the work list that it follows.

One row of every case is compared with torch first. Bytes are those of the visible keys and values, operations those of
the visible pairs. Rows of one token take kernels of their own in a step, which also norm, rotate and store: one if they
have few keys ("few keys"), else the one with a work list ("paged") that an engine takes on the device. Where a batch
could take the first but for the length of its rows, both are measured. torch reads contiguous keys and values of the
same sizes; it has nothing for rows of different lengths.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
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

from asyncengine.kernels.cuda.attention.few_keys import decode_attention, longest_context
from asyncengine.kernels.cuda.attention.paged_decode import paged_decode_attention
from asyncengine.kernels.cuda.attention.tma_decode import streamed_decode_attention
from asyncengine.kernels.cuda.attention.work.lists import (
    AttentionShape,
    Tile,
    WorkList,
    choose_cut,
    choose_mixed_tiles,
    choose_tiles,
    multiprocessors,
)
from asyncengine.kernels.cuda.ops import attend_stored
from asyncengine.kernels.cuda.rows.rotary import rotary_store_kv, store_kv
from asyncengine.kernels.cuda.step.tensors import DeviceStep, allocate_step
from asyncengine.kernels.cuda.trials import examine
from asyncengine.kernels.ops import HeadNorms, split_heads
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
"""Of decode and of prefill."""
Ways = dict[str, Callable[[int], None]]
"""Kernels that attend over a copy of the cache, by name."""


# ---- cases ----


@dataclass(frozen=True)
class Case:
    c: ModelConfig
    rows: list[Row]

    @property
    def kv_bytes(self) -> int:
        tokens = sum(query + context for query, context in self.rows)
        return 2 * tokens * self.c.num_kv_heads * self.c.head_dim * ELEMENT_BYTES

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
            yield f"{rows} x {context}", Case(c, decode_rows([context - 1] * rows)), TARGETS.get((rows, context))
    long = min(LONG, c.max_positions)
    for rows in args.ragged:
        yield f"{rows - 1} x {SHORT}, 1 x {long}", Case(c, ragged(rows, long)), None


def lines(args: argparse.Namespace, timer: Timer) -> Lines:
    for shape in args.shape:
        c = read_model(shape)
        prefills = [rows for rows in args.prefill if rows[0].query + rows[0].context <= c.max_positions]
        for tiles in tile_pairs(c, args):
            work = allocate_work(c, prefills, tiles, timer.device, args)
            decode_work = functools.cache(partial(allocate_decode_work, c, tiles, timer.device, args))
            label = shape if tiles is None else f"{shape} {as_text(tiles)}"
            for size, case, target in decode_cases(c, args):
                if case.kv_bytes <= MAX_CACHE_BYTES:
                    listed = decode_work(len(case.rows), case.longest - 1)
                    yield from decode_lines(label, size, Bench(case, timer, args.pdl), listed, target)
            for rows in prefills:
                yield from prefill_lines(label, Bench(Case(c, rows), timer, args.pdl), work)
            decodes = [[Row(1, SHORT - 1)] * rows for rows in args.decode_rows]
            for step in (*decodes, *prefills[:1]):
                listed = decode_work(len(step), step[0].context) if step[0].query == 1 else work
                yield build_line(label, Bench(Case(c, step), timer, args.pdl, copies=0), listed)


def _streams(tiles: Tiles | None, device: torch.device, args: Any) -> bool:
    """Whether the engine's choice of tiles is Gluon's, if that has some."""
    return not tiles and examine(device).tma and not args.work.get("split_tokens")


def allocate_work(
    c: ModelConfig, prefills: Sequence[Sequence[Row]], tiles: Tiles | None, device: torch.device, args: Any
) -> WorkList:
    """One for all cases, as an engine has it; its sizes are constants of the kernels, which are then compiled once."""
    shape = attention_shape(c)
    if _streams(tiles, device, args):
        tiles = choose_mixed_tiles(shape, BLOCK_SIZE, 0)
    rows = max([256, *args.decode_rows])
    tokens = max([2048, rows, *(sum(row.query for row in one) for one in prefills)])
    room = {"max_rows": rows, "max_tokens": tokens, "max_context": 131072}
    return WorkList.allocate(shape, device=device, tiles=tiles, **room, **args.work)


def allocate_decode_work(
    c: ModelConfig, tiles: Tiles | None, device: torch.device, args: Any, rows: int, context: int
) -> WorkList:
    """That of steps of one-token rows, after so many tokens at most: as an engine has it, or as the options say."""
    shape, cut = attention_shape(c), None
    if _streams(tiles, device, args):
        cut = choose_cut(rows, context, shape, BLOCK_SIZE, multiprocessors(device))
    if cut is None:
        return allocate_work(c, [], tiles, device, args).decode_only
    max_rows, max_tokens = (rows, rows) if cut.whole_tokens else (max(256, rows), max(2048, rows))
    room = {"max_rows": max_rows, "max_tokens": max_tokens, "max_context": 131072}
    options = {"whole_tokens": cut.whole_tokens, "late": cut.late} | args.work
    return WorkList.allocate(shape, device=device, tiles=(cut.tile, None), **room, **options)


def attention_shape(c: ModelConfig) -> AttentionShape:
    return AttentionShape(c.num_heads, c.num_kv_heads, c.head_dim, DTYPE)


def tile_pairs(c: ModelConfig, args: argparse.Namespace) -> Iterable[Tiles | None]:
    """Those of the options, each with every other; None is what the engine takes."""
    if not args.decode_tile and not args.prefill_tile:
        return [None]
    decode, prefill = choose_tiles(attention_shape(c))
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
        self.caches = [
            (torch.randn(size, dtype=DTYPE, device=device), torch.randn(size, dtype=DTYPE, device=device))
            for _ in range(copies)
        ]
        tokens = sum(row.query for row in case.rows)
        self.heads = torch.randn(tokens, c.num_heads + 2 * c.num_kv_heads, c.head_dim, dtype=DTYPE, device=device)
        self.q, self.k, self.v = split_heads(self.heads, c.num_heads)
        self.out = torch.full((tokens, c.num_heads * c.head_dim), torch.nan, dtype=DTYPE, device=device)
        ones = torch.ones(c.head_dim, dtype=DTYPE, device=device)
        self.norms = HeadNorms(ones, ones, 1e-6) if c.qk_norm else None
        self.cos_sin = None if c.rope is None else torch.randn(case.longest, c.head_dim, device=device)
        self.arrivals = torch.zeros(rows * c.num_heads, dtype=torch.int32, device=device)
        self.scale = c.head_dim**-0.5

    def paged(self, work: WorkList, copy: int, pdl: bool | None = None) -> None:
        k, v = self.caches[copy]
        pdl = self.pdl if pdl is None else pdl
        attend_stored(self.q, k, v, self.step, work, self.scale, 0, self.out, pdl=pdl)

    def few(self, copy: int, pdl: bool | None = None) -> None:
        k, v = self.caches[copy]
        decode_attention(
            self.heads, self.case.c.num_heads, self.norms, self.cos_sin, k, v, self.step, self.scale, 0, self.out,
            self.arrivals, pdl=self.pdl if pdl is None else pdl,
        )  # fmt: skip

    def listed(self, work: WorkList, copy: int, pdl: bool | None = None) -> None:
        k, v = self.caches[copy]
        attend = streamed_decode_attention if work.decode.tile.streamed else paged_decode_attention
        attend(
            self.heads, self.case.c.num_heads, self.norms, self.cos_sin, k, v, self.step, work, self.scale, 0,
            self.out, pdl=self.pdl if pdl is None else pdl,
        )  # fmt: skip

    def store(self, copy: int, pdl: bool | None = None) -> None:
        """What ``few`` and ``listed`` do before attention; rotates the queries in place."""
        k, v = self.caches[copy]
        pdl = self.pdl if pdl is None else pdl
        if self.cos_sin is None:
            store_kv(self.k, self.v, self.step.slot_mapping, k, v, pdl=pdl)
            return
        q_norm, k_norm, eps = self.norms or (None, None, 0.0)
        rotary_store_kv(
            self.heads, self.case.c.num_heads, q_norm, k_norm, eps, self.cos_sin, self.step.positions,
            self.step.slot_mapping, k, v, pdl=pdl,
        )  # fmt: skip

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
        calls = []
        for caches in self.caches:
            k, v = (x.view(rows, c.num_kv_heads, -1, c.head_dim)[:, :, :total] for x in caches)
            if query > 1:  # no kernel of torch's takes both grouped heads and this mask
                k, v = (x.repeat_interleave(c.num_heads // c.num_kv_heads, 1) for x in (k, v))
            calls.append(partial(F.scaled_dot_product_attention, q, k, v, **options))
        return calls

    def torch_us(self) -> float | None:
        if not self.case.is_even:
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


def decode_lines(shape: str, size: str, bench: Bench, work: WorkList, target: float | None) -> Lines:
    case, copies = bench.case, range(len(bench.caches))
    short = longest_context(len(case.rows), work.shape, multiprocessors(bench.timer.device))
    work.build(bench.step)
    verify(bench, work, f"{shape} {size}")
    torch_us = bench.torch_us()
    fused: Ways = {"paged": partial(bench.listed, work)} if work.takes_heads else {}
    if short:
        fused["few keys"] = bench.few
    verify_fused(bench, work, fused, f"{shape} {size}")
    for kernel, attend in ({"paged": partial(bench.paged, work)} | fused).items():
        taken = (case.longest - 1 <= short) == (kernel == "few keys")
        yield Line(
            "attention", f"decode, {kernel}", shape, size, bench.timer.us([partial(attend, copy) for copy in copies]),
            case.kv_bytes, case.flops, torch_us, "scaled_dot_product_attention", target if taken else None,
        )  # fmt: skip


def prefill_lines(shape: str, bench: Bench, work: WorkList) -> Lines:
    case, (query, context) = bench.case, bench.case.rows[0]
    size = f"{len(case.rows)} x {query} after {context}"
    work.build(bench.step)
    verify(bench, work, f"{shape} {size}")
    us = bench.timer.us([partial(bench.paged, work, copy) for copy in range(len(bench.caches))])
    torch_us = bench.torch_us()
    way = "scaled_dot_product_attention"
    yield Line("attention", "prefill", shape, size, us, case.kv_bytes, case.flops, torch_us, way)


def build_line(shape: str, bench: Bench, work: WorkList) -> Line:
    """Once per step. It reads the rows, and writes about an item for each."""
    rows = bench.case.rows
    us = bench.timer.us([partial(work.build, bench.step, bench.pdl)] * 16)
    size = f"{len(rows)} rows of {rows[0].query}"
    return Line("attention", "work list", shape, size, us, len(rows) * (16 + 64))


# ---- checks ----


def verify(bench: Bench, work: WorkList, label: str) -> None:
    """The last row of the first cache in float32, by torch. SystemExit if it is wrong."""
    c, (query, context) = bench.case.c, bench.case.rows[-1]
    bench.paged(work, 0)
    position = torch.arange(query + context, device=bench.q.device)
    blocks = bench.step.slots.block_tables[-1].long()[position // BLOCK_SIZE]
    k, v = (cache[blocks, :, position % BLOCK_SIZE].float() for cache in bench.caches[0])
    q = bench.q[-query:].float().unflatten(1, (c.num_kv_heads, c.num_heads // c.num_kv_heads))
    score = torch.einsum("qhgd,khd->hgqk", q, k) * bench.scale
    score.masked_fill_(position > position[context:, None], -torch.inf)
    expected = torch.einsum("hgqk,khd->qhgd", score.softmax(-1), v).flatten(1)
    error = float((bench.out[-query:].float() - expected).norm() / expected.norm())
    if not error < 1e-2 or bench.out.isnan().any():
        raise SystemExit(f"wrong result: {label}, error {error:.2e}, {bench.out.isnan().sum()} elements not written")


def verify_fused(bench: Bench, work: WorkList, ways: Ways, label: str) -> None:
    """Outputs and new keys and values of kernels that do everything, beside those of the separate ones."""
    heads, (k, v) = bench.heads.clone(), bench.caches[0]
    new = bench.step.slot_mapping

    def results(attend: Callable[[], None]) -> list[Tensor]:
        bench.heads.copy_(heads)
        for cache in (k, v):
            cache[new // BLOCK_SIZE, :, new % BLOCK_SIZE] = torch.nan
        bench.out.fill_(torch.nan)
        attend()
        return [bench.out.float(), *(cache[new // BLOCK_SIZE, :, new % BLOCK_SIZE].float() for cache in (k, v))]

    def separate() -> None:
        bench.store(0)
        bench.paged(work, 0)

    expected = results(separate)
    for way, attend in ways.items():
        both = zip(expected, results(partial(attend, 0)), strict=True)
        error = sum(float((mine - other).norm() / other.norm()) for other, mine in both)
        if not error < 1e-2:
            raise SystemExit(f"wrong result: {label}, {way}, error {error:.2e}")
