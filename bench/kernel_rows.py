"""bench/kernels.py rows: the kernels that work on each row by itself, and ingest."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gpu_common import read_model
from kernel_timing import Call, Line, Lines, Timer, copies_for
from replay import Row, step_input
from torch import Tensor

from asyncengine.kernels.cuda.rows.activation import activate_rows
from asyncengine.kernels.cuda.rows.lookup import embed
from asyncengine.kernels.cuda.rows.norms import norm_rows
from asyncengine.kernels.cuda.rows.rotary import rotary_store_kv, store_kv
from asyncengine.kernels.cuda.step.ingest import ingest, make_source
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.ops import Norm, split_heads
from asyncengine.models.config import ModelConfig

DTYPE = torch.bfloat16
BLOCK_SIZE = 16
HOST_BANDWIDTH = 55e9
"""Bytes per second that the GPU reads from pinned memory, measured on the H200."""


@dataclass(frozen=True)
class Case:
    """A kernel at one size. ``make`` allocates inputs and returns a call of ours and one of torch's on them."""

    kernel: str
    rows: int
    bytes: int
    make: Callable[[], tuple[Call, Call]]
    way: str


def lines(args: argparse.Namespace, timer: Timer) -> Lines:
    pdl = args.pdl
    for shape in args.shape:
        c = read_model(shape)
        for rows in args.rows:
            one = Cases(c, rows, timer.device, pdl)
            for case in (one.norm(), one.embed(), one.activation(), one.store()):
                copies = [case.make() for _ in range(copies_for(case.bytes))]
                ours, theirs = (timer.us([copy[side] for copy in copies]) for side in range(2))
                yield Line(
                    "rows", case.kernel, shape, f"{case.rows} rows", ours, case.bytes, torch_us=theirs,
                    torch_way=case.way,
                )  # fmt: skip
    decodes = [[Row(1, 500)] * rows for rows in args.rows if rows <= 256]
    for step in (*decodes, [Row(max(args.rows), 0)]):
        yield ingest_line(step, timer, pdl)


class Cases:
    """Tensors and operations of a model's shape at a count of rows."""

    def __init__(self, c: ModelConfig, rows: int, device: torch.device, pdl: bool) -> None:
        self.c, self.rows, self.device, self.pdl = c, rows, device, pdl

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.device, dtype=DTYPE)

    def norm(self) -> Case:
        width, pdl, layered = self.c.hidden_size, self.pdl, not self.c.ropes

        def make() -> tuple[Call, Call]:
            x, w, b = self.random(self.rows, width), self.random(width), self.random(width)
            norm = Norm(w, b if layered else None, 1e-5)

            def theirs() -> Tensor:
                return F.layer_norm(x, (width,), w, b, 1e-5) if layered else F.rms_norm(x, (width,), w, 1e-5)

            return lambda: norm_rows(x, norm, pdl=pdl), theirs

        name, way = ("layer norm", "F.layer_norm") if layered else ("RMS norm", "F.rms_norm")
        return Case(name, self.rows, 2 * self.rows * width * DTYPE.itemsize, make, way)

    def embed(self) -> Case:
        c, pdl, learned = self.c, self.pdl, not self.c.ropes
        table, positions_table = self.random(c.vocab_size, c.hidden_size), self.random(c.max_positions, c.hidden_size)

        def make() -> tuple[Call, Call]:
            ids = torch.randint(c.vocab_size, (self.rows,), dtype=torch.int32, device=self.device)
            positions = torch.randint(c.max_positions, (self.rows,), dtype=torch.int32, device=self.device)

            def theirs() -> Tensor:
                return table[ids] + positions_table[positions] if learned else table[ids]

            of_positions = positions_table if learned else None
            return lambda: embed(ids, table, positions, of_positions, pdl=pdl), theirs

        moved = (3 if learned else 2) * self.rows * c.hidden_size * DTYPE.itemsize
        return Case("embedding", self.rows, moved, make, "indexing")

    def activation(self) -> Case:
        inner, kind, pdl = self.c.intermediate_size, self.c.activation, self.pdl
        gated = kind == "silu_mul"

        def make() -> tuple[Call, Call]:
            x = self.random(self.rows, inner * (2 if gated else 1))

            def theirs() -> Tensor:
                return F.silu(x[:, :inner]) * x[:, inner:] if gated else F.gelu(x, approximate="tanh")

            return lambda: activate_rows(x, kind, pdl=pdl), theirs

        moved = (3 if gated else 2) * self.rows * inner * DTYPE.itemsize
        return Case(kind, self.rows, moved, make, "F.silu and a product" if gated else "F.gelu")

    def store(self) -> Case:
        """Return the case of the KV store, with QK-norm and rotation where the model has them."""
        c = self.c
        kv_bytes = 2 * c.num_kv_heads * c.head_dim * DTYPE.itemsize
        if not c.ropes:
            moved = self.rows * 2 * kv_bytes
            return Case("KV store", self.rows, moved, self._make_store, "indexed assignment")
        rotated = 2 * c.num_heads * c.head_dim * DTYPE.itemsize + 4 * c.head_dim
        name = "QK norm, rotary, KV store" if c.qk_norm else "rotary, KV store"
        moved = self.rows * (2 * kv_bytes + rotated)
        return Case(name, self.rows, moved, self._make_rotary, "F.rms_norm, cat, indexing")

    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Slots that the tokens go to, and two caches that have them."""
        blocks = self.rows // BLOCK_SIZE + 1
        size = (blocks, self.c.num_kv_heads, BLOCK_SIZE, self.c.head_dim)
        slots = torch.randperm(blocks * BLOCK_SIZE, device=self.device)[: self.rows]
        return slots, self.random(*size), self.random(*size)

    def _heads(self) -> Tensor:
        return self.random(self.rows, self.c.num_heads + 2 * self.c.num_kv_heads, self.c.head_dim)

    def _make_store(self) -> tuple[Call, Call]:
        slots, k_cache, v_cache = self._places()
        _, k, v = split_heads(self._heads(), self.c.num_heads)
        pdl = self.pdl

        def ours() -> None:
            store_kv(k, v, slots, k_cache, v_cache, pdl=pdl)

        return ours, lambda: write(k, v, slots, k_cache, v_cache)

    def _make_rotary(self) -> tuple[Call, Call]:
        c, pdl = self.c, self.pdl
        slots, k_cache, v_cache = self._places()
        heads = self._heads()
        q, k, v = split_heads(heads, c.num_heads)
        table = torch.rand(self.rows, c.head_dim, device=self.device)
        positions = torch.arange(self.rows, device=self.device, dtype=torch.int32)
        q_norm, k_norm = (self.random(c.head_dim), self.random(c.head_dim)) if c.qk_norm else (None, None)

        def ours() -> None:
            rotary_store_kv(
                heads, c.num_heads, q_norm, k_norm, 1e-6, table, positions, slots, k_cache, v_cache, pdl=pdl
            )

        def theirs() -> None:
            cos, sin = table[positions][:, None, :].chunk(2, -1)
            for x, weight in ((q, q_norm), (k, k_norm)):
                y = x if weight is None else F.rms_norm(x, (c.head_dim,), weight, 1e-6)
                a, b = y.float().chunk(2, -1)
                x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
            write(k, v, slots, k_cache, v_cache)

        return ours, theirs


def write(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    k_cache[block, :, offset] = k
    v_cache[block, :, offset] = v


def ingest_line(step: list[Row], timer: Timer, pdl: bool) -> Line:
    """Time ingest from pinned host memory, as a step does it; its bytes come over the bus. Beside it a plain copy of
    them."""
    words = torch.tensor(step_input(step), dtype=torch.int32)
    inputs = words[None].contiguous()
    if timer.device.type == "cuda":
        inputs = inputs.pin_memory()
    rows, tokens = len(step), sum(row.query for row in step)
    blocks = -(-max(row.query + row.context for row in step) // BLOCK_SIZE)
    state = allocate_step(rows, blocks, rows, tokens, timer.device)
    outputs = torch.zeros(1, rows, dtype=torch.int64, device=timer.device)
    source = make_source(inputs, outputs, timer.device, fetch=True)
    state.slots.block_tables.copy_(torch.arange(rows * blocks).view(rows, blocks))
    target = torch.empty_like(inputs, device=timer.device)
    ours = timer.us([lambda: ingest(source, state, BLOCK_SIZE, pdl=pdl)] * 16)
    theirs = timer.us([lambda: target.copy_(inputs, non_blocking=True)] * 16)
    size = f"{rows} rows, {tokens} tokens"
    return Line(
        "rows", "ingest", "any", size, ours, inputs.nbytes, torch_us=theirs, torch_way="copy_ to the device",
        bandwidth=HOST_BANDWIDTH,
    )  # fmt: skip
