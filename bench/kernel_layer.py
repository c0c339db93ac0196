"""bench/kernels.py layer: decode attention with what surrounds it, from the output of the QKV projection on.

In turn a product that writes the projection's output, and then attention, in one of these ways: the kernel for few
keys, the one with a work list ("paged"), and separate kernels, each with and without programmatic launch; and by torch
over contiguous keys and values (of unrotated heads, its best case). The product's own time, from a graph of products
alone, is taken off. Its kernel is a plain one of our own, so that it can take part in programmatic launch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from gpu_common import read_model
from kernel_attention import (
    DTYPE,
    Bench,
    Case,
    Listed,
    allocate_decode_work,
    as_text,
    tile_pairs,
    verify_fused,
)
from kernel_timing import Call, Line, Lines, Timer
from replay import decode_rows

from asyncengine.kernels.cuda.launch import programmatic as pdl_kernels

LAYERS = "1x128,1x288,1x2048,8x288,64x288,256x288,256x2048"
"""rows x context, which the new token ends"""


@triton.jit  # type: ignore[untyped-decorator]
def _product_kernel(x, weight, out, K: tl.constexpr, N, M, ROWS: tl.constexpr, PDL: tl.constexpr):  # type: ignore
    """out [M, N] = x [M, K] weight [N, K]^T, N and K multiples of 32 and 128. The first weights are fetched early."""
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


def parse_sizes(text: str) -> list[tuple[int, int]]:
    sizes = []
    for size in text.split(","):
        rows, _, context = size.partition("x")
        sizes.append((int(rows), int(context)))
    return sizes


def lines(args: argparse.Namespace, timer: Timer) -> Lines:
    for shape in args.shape:
        c = read_model(shape)
        for tiles in tile_pairs(c, timer.device, args):
            label = shape if tiles is None else f"{shape} {as_text(tiles)}"
            for rows, context in args.layer:
                if context <= c.max_positions:
                    bench = Bench(Case(c, decode_rows([context - 1] * rows)), timer, args.pdl)
                    listed = allocate_decode_work(c, tiles, timer.device, args, rows, context - 1)
                    listed.work.build(bench.step)
                    ways: dict[str, Callable[[int], None]] = {
                        "few keys": bench.few,
                        "paged": partial(bench.listed, listed),
                    }
                    verify_fused(bench, listed, ways, f"{label} layer {rows} x {context}")
                    yield from layer_lines(label, f"{rows} x {context}", bench, listed)


def layer_lines(shape: str, size: str, bench: Bench, listed: Listed) -> Lines:
    product, copies, case = Product(bench), range(len(bench.caches)), bench.case

    def chain(attend: Callable[[int], object] | None, pdl: bool = False) -> float:
        """Microseconds of a product and what follows it."""
        calls: list[Call] = []
        for copy in copies:
            calls.append(partial(product, copy, pdl))
            calls += [] if attend is None else [partial(attend, copy)]
        return bench.timer.us(calls) * len(calls) / len(copies)

    def separate(copy: int, pdl: bool) -> None:
        bench.store(copy, pdl)
        bench.paged(listed, copy, pdl)

    alone, torch_calls = chain(None), bench.torch_calls()
    torch_us = chain(lambda copy: torch_calls[copy]()) - alone
    for kernel, attend in (("few keys", bench.few), ("paged", partial(bench.listed, listed)), ("separate", separate)):
        for pdl in (True, False) if bench.pdl else (False,):
            us = chain(partial(attend, pdl=pdl), pdl) - alone
            yield Line(
                "layer", f"{kernel}, pdl" if pdl else kernel, shape, size, us, case.kv_bytes, case.flops, torch_us,
                "scaled_dot_product_attention",
            )  # fmt: skip


class Product:
    """A projection that writes ``bench``'s heads, by other weights each time."""

    def __init__(self, bench: Bench) -> None:
        tokens, inner = len(bench.heads), bench.case.c.hidden_size
        columns = bench.heads[0].numel()
        self._heads, self._rows = bench.heads, min(64, max(16, triton.next_power_of_2(tokens)))
        options: dict[str, Any] = {"dtype": DTYPE, "device": bench.heads.device}
        self._weights = [
            torch.randn(columns, inner, **options).mul_(inner**-0.5) for _ in range(min(len(bench.caches), 32))
        ]
        self._x = torch.randn(tokens, inner, **options)

    def __call__(self, copy: int, pdl: bool) -> None:
        weight, tokens = self._weights[copy % len(self._weights)], len(self._x)
        grid = (len(weight) // 32, triton.cdiv(tokens, self._rows))
        _product_kernel[grid](
            self._x, weight, self._heads, weight.shape[1], len(weight), tokens, self._rows,
            **pdl_kernels.launch_options(pdl),
        )  # fmt: skip
