"""The plans worth measuring for a kind of projection on a card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.linear.choose import fallback
from asyncengine.kernels.cuda.linear.formats.grouped import DIRECT_TILES, Grouped, takes_direct
from asyncengine.kernels.cuda.linear.formats.registry import format_of_kind, shared_bytes
from asyncengine.kernels.cuda.linear.grouped import DIRECT_ROWS, TILE, TILE_COLUMNS
from asyncengine.kernels.cuda.linear.plan import SKINNY_ROWS, Plan, Site, round_rows


def candidates(site: Site, gpu: Gpu) -> Iterator[Plan]:
    """Plans worth measuring, ``fallback`` first; tma plans only where the card runs them."""
    yield fallback(site)
    form = format_of_kind(site.weight)
    if isinstance(form, Grouped):
        direct = takes_direct(site, gpu)
        if direct:
            yield from _direct(site, gpu)
        if form.coded and (not direct or site.rows > DIRECT_ROWS // 2):
            yield from _coded(site, gpu)
        return
    gated = site.activation == "silu_mul"
    whole = () if site.activation == "argmax" else (*_vector(site), *_skinny(site), *_tiled(site, gpu))
    for plan in (*whole, *(_tma(site, gpu) if gpu.tma else ())):
        if plan.fits(site.columns, site.inner, gated) and plan != fallback(site):
            yield plan
            if format_of_kind(site.weight).own_rows and plan.fused_norm:
                yield replace(plan, fused_norm=False)


def _coded(site: Site, gpu: Gpu) -> Iterator[Plan]:
    for rows in sorted({min(most, max(8, round_rows(site.rows))) for most in (16, 64)}):
        for columns, warps in ((32, 2), (64, 2), (64, 4), (128, 4)):
            blocks = -(-site.rows // rows)
            for split in (1, 2, 4, 8):
                programs = -(-site.weight_rows // columns) * blocks * split
                if programs < gpu.multiprocessors // 2 or (split > 1 and programs > 8 * gpu.multiprocessors):
                    continue
                for stages in (3, 4):
                    plan = Plan("coded", columns, TILE, warps, rows, split, stages, fused_norm=False)
                    if rows * columns <= 128 * 32 * warps // 4 and plan.fits(site.columns, site.inner, gated=False):
                        yield plan


def _direct(site: Site, gpu: Gpu) -> Iterator[Plan]:
    """Programs of few of the weight's rows for few of x's, whose sums fit in registers; as many tiles in a step as the
    weight has.

    Loads that stay ahead take registers. They are worth trying where a program has the multiprocessor to itself, which
    several warps share, for a loop of many steps.
    """
    rows, tile = max(8, round_rows(site.rows)), DIRECT_TILES[site.weight]
    tiles = site.inner // tile
    for columns, warps, units in ((32, 4, 2), (16, 8, 2), (16, 4, 4), (16, 8, 4), (32, 8, 1), (32, 4, 1), (16, 8, 1),
                                  (16, 4, 1), (16, 4, 2), (16, 16, 1), (32, 8, 2), (64, 4, 1)):  # fmt: skip
        x = units * rows * tile  # elements of it in a step of a warp
        if warps * units > tiles or x > 32 * TILE or columns * rows > 1024 or (warps == 16 and rows > 8):
            continue
        if site.weight not in TILE_COLUMNS and columns * rows * units > 512:
            continue  # registers have sums of each small group, of all units at once
        for ahead in (1, 0) if columns * rows >= 512 else (1,):
            plan = Plan("direct", columns, tile, warps, rows, 1, units, ahead, fused_norm=False)
            if plan.fits(site.columns, site.inner, gated=site.activation == "silu_mul"):
                yield plan
                registers = units * columns // 2 + x // 64 + columns * rows // 32  # of a step, and of the sums
                roomy = site.weight in TILE_COLUMNS and registers <= 72
                alone = warps >= 8 and site.weight_rows <= columns * gpu.multiprocessors
                if ahead and roomy and alone and tiles > 4 * warps * units:
                    yield replace(plan, holds=True)


def _packed(site: Site) -> float:
    """Elements of the weight in half a register."""
    return 16 / format_of_kind(site.weight).bits[site.weight]


def _vector(site: Site) -> Iterator[Plan]:
    if site.rows > 1:
        return
    for columns in (4, 8, 16, 32):
        for inner in (256, 512, 1024):
            for warps in (2, 4, 8):
                per_thread = columns * -(-site.inner // inner) * inner / (32 * warps) / _packed(site)
                if 24 <= per_thread <= 160 and site.weight_rows / columns >= 60:
                    yield Plan("vector", columns, inner, warps)


def _skinny(site: Site) -> Iterator[Plan]:
    if site.rows > SKINNY_ROWS:
        return
    for columns in (16, 32):
        for warps in (2, 4, 8):
            for inner in (32, 64, 128, 256):
                steps = -(-site.inner // (warps * inner))
                per_thread, of_x = columns * inner / 32 / _packed(site), max(8, site.rows) * inner / 32
                if steps * warps * inner > 1.4 * site.inner or per_thread < 16:
                    continue
                if per_thread * steps <= 200 and of_x * steps <= 256 and steps <= 6:
                    yield Plan("skinny", columns, inner, warps)
                elif site.norm == "layer":
                    continue
                elif per_thread <= 128 and of_x <= 128:
                    fused = not format_of_kind(site.weight).own_rows and site.rows * site.inner <= 8192
                    for ahead in (1, 2, 3):
                        if ahead < steps and per_thread * (ahead + 1) <= 256:
                            yield Plan("skinny", columns, inner, warps, ahead=ahead, fused_norm=fused)


def _tiled(site: Site, gpu: Gpu) -> Iterator[Plan]:
    if site.rows == 1 and not format_of_kind(site.weight).own_rows:
        return
    for rows in sorted({min(64, max(16, site.rows)), min(128, max(16, site.rows)), max(16, site.rows)}):
        for columns in (32, 64, 128):
            for inner in (64, 128, 256):
                for split in (1, 2, 4, 8):
                    blocks = -(-site.rows // rows)
                    programs = site.weight_rows / columns * split * blocks
                    steps = site.inner / split / inner
                    if split > 1 and (programs > 400 or site.activation == "silu_mul"):
                        continue
                    if programs < 64 or steps < 2 or programs / split > 1 << 15:
                        continue
                    for warps in (4, 8):
                        accumulators = rows * columns / (32 * warps)
                        for stages in (3, 4, 6):
                            plan = Plan("tiled", columns, inner, warps, rows, split, stages, fused_norm=False)
                            shared = shared_bytes(plan, site.weight)
                            if 4 <= accumulators <= 128 and 30_000 <= shared <= gpu.tile_bytes and stages <= steps + 2:
                                yield plan


def _tma(site: Site, gpu: Gpu) -> Iterator[Plan]:
    if site.rows < 8 or not format_of_kind(site.weight).takes_tma(site):
        return
    for rows in (8, 16, 32, 64, 128, 256):
        if not site.rows <= 8 * rows <= 8 * site.rows:
            continue
        for columns in (64, 128, 256) if site.activation == "argmax" and rows >= 64 else (64, 128):
            for inner in (64, 128, 256) if rows <= 64 else (64, 128):
                for split in (1, 2, 4) if site.add else (1,):
                    tiles = -(-site.weight_rows // columns) * split
                    programs = tiles * -(-site.rows // rows)
                    steps = site.inner // split // inner
                    sums = rows * columns // 128
                    if steps < 2 or sums > 256 or programs < 24 or (split > 1 and programs > 300):
                        continue
                    if rows < min(64, site.rows) and tiles > gpu.multiprocessors:
                        continue  # weights would be read several times, and nobody was idle
                    for stages in _stages((rows + columns) * inner * 2, steps, gpu):
                        plan = Plan("tma", columns, inner, 4, rows, split, stages, fused_norm=False)
                        if sums <= 128:
                            yield plan
                        if sums >= 64:
                            yield replace(plan, warps=8)
    yield from _narrow(site, gpu)


def _narrow(site: Site, gpu: Gpu) -> Iterator[Plan]:
    """Tma plans of 16 or 32 of the weight's rows, where tiles of 64 leave multiprocessors idle."""
    if site.activation == "argmax":
        return
    for rows in (8, 16, 32, 64):
        blocks = -(-site.rows // rows)
        if not site.rows <= 4 * rows <= 4 * site.rows or site.weight_rows // 64 * blocks > gpu.multiprocessors:
            continue
        for columns in (16, 32):
            for split in (1, 2) if site.add else (1,):
                if site.weight_rows // columns * blocks * split > 2 * gpu.multiprocessors:
                    continue
                for inner in (128, 256):
                    steps = site.inner // split // inner
                    for stages in _stages((rows + columns) * inner * 2, steps, gpu):
                        plan = Plan("tma", columns, inner, 4, rows, split, stages, fused_norm=False)
                        yield plan
                        if rows >= 32:
                            yield replace(plan, warps=8)


def _stages(size: int, steps: int, gpu: Gpu) -> list[int]:
    """Return the counts of stages for which shared memory has room: for two programs of a multiprocessor, for one, and
    for one with nothing to spare.

    The last may not compile: a program keeps more than its tiles in shared memory.
    """
    rooms = gpu.tile_bytes_of_two, gpu.tile_bytes, gpu.most_tile_bytes
    return [n for n in sorted({min(steps, room // size) for room in rooms}) if n > 1]
