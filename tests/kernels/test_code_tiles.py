"""Codes of int4 and int8 in tiles: their order, their conversion, and the part of them that each thread multiplies.

The kernel of direct.py runs on a card alone. Here its threads are imitated: they read, convert and multiply as it does.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine.kernels.cuda.gpu import A100, H200
from asyncengine.kernels.cuda.linear import direct, operands
from asyncengine.kernels.cuda.linear import ends as endings
from asyncengine.kernels.cuda.linear.candidates import candidates
from asyncengine.kernels.cuda.linear.choose import choose, default_plan
from asyncengine.kernels.cuda.linear.coded import coded_linear
from asyncengine.kernels.cuda.linear.decode import FP4_PLACES, INT4_PLACES, bytes_of_word, int4_unit, nibbles_of_word
from asyncengine.kernels.cuda.linear.formats.grouped import Grouped
from asyncengine.kernels.cuda.linear.formats.registry import format_of
from asyncengine.kernels.cuda.linear.grouped import TILE_COLUMNS, GroupedMatrix, _in_lanes, in_tiles, multiply, unpack
from asyncengine.kernels.cuda.linear.plan import Plan, Site
from asyncengine.kernels.cuda.linear.tables import PlanTable
from asyncengine.kernels.grouped import CODES, numbers, unpack_nibbles
from asyncengine.kernels.grouped import unpack as unpack_packed
from asyncengine.kernels.weight import INT4, INT8, PackedWeight
from tests.kernels.gluon_twin import mma, run_in_torch
from tests.kernels.grouped import random_grouped
from tests.kernels.ptx import DTYPES, WORD, execute, halves
from tests.kernels.test_compile import run
from tests.kernels.twins import assert_within


def converted(form: str, words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of words int64 [n] by the instructions of decode.py: of int4 [n, 2 halves, 4 bytes], of int8 [n, 1, 4]"""
    half = dtype == torch.float16
    if form == INT8:
        text, unit, parts = bytes_of_word("word", "p", "q", half=half), 1.0, ["pq"]
    else:
        text, unit, parts = nibbles_of_word("word", "pqrv", half=half), int4_unit(half=half), ["pq", "rv"]
    made = execute(text, {"word": words})
    of_parts = [torch.cat([halves(made[name], dtype).double() for name in part], 1) for part in parts]
    return torch.stack(of_parts, 1) / unit


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_every_byte_becomes_its_numbers(dtype: torch.dtype) -> None:
    """Wherever it stands in a word, whatever stands beside it."""
    codes = torch.stack([torch.arange(256).roll(97 * place) for place in range(4)], 1)
    words = (codes << 8 * torch.arange(4)).sum(1)
    assert torch.equal(converted(INT8, words, dtype)[:, 0], codes.to(torch.uint8).view(torch.int8).double())
    of_halves = torch.stack((codes & 15, codes >> 4), 1) - 8
    lanes = _in_lanes(codes.to(torch.uint8), INT4_PLACES).view(torch.int32).flatten().long() & WORD
    assert torch.equal(converted(INT4, lanes, dtype), of_halves.double())


@pytest.mark.parametrize("places", [INT4_PLACES, FP4_PLACES], ids=["int4", "floats"])
def test_bits_of_four_codes_are_at_their_places(places: tuple[tuple[int, ...], ...]) -> None:
    """Each code alone sets the bits of its places, in the 16 bits of its byte, and together they are all bits."""
    assert sorted(place for of_one in places for place in of_one) == list(range(16))
    for byte, half in product(range(4), range(2)):
        codes = torch.zeros(16, 4, dtype=torch.uint8)
        codes[:, byte] = torch.arange(16) << 4 * half
        lanes = _in_lanes(codes, places).view(torch.uint16).int()
        of_one = places[2 * half + byte // 2]
        for code in range(16):
            expected = sum((code >> 3 - i & 1) << place for i, place in enumerate(of_one))
            assert lanes[code].tolist() == [expected * (byte % 2 == 0), expected * (byte % 2 == 1)]


def packed(weights: list[PackedWeight]) -> GroupedMatrix:
    made = Grouped(weights[0].format).pack(weights, [None] * len(weights)).weight
    assert isinstance(made, GroupedMatrix)
    return made


@pytest.mark.parametrize("form", [INT4, INT8])
def test_tiles_are_a_permutation(form: str) -> None:
    """Every code of 8 rows and a tile's columns lies in its 512 bytes. Weights that fill no tiles stay as they are."""
    width, span = (256, TILE_COLUMNS[form]) if form == INT8 else (128, TILE_COLUMNS[form] // 2)
    codes = torch.randint(256, (16, width), generator=torch.Generator().manual_seed(1)).to(torch.uint8)

    def of_bytes(part: torch.Tensor) -> torch.Tensor:
        return (part if form == INT8 else unpack_nibbles(part)).flatten().sort()[0]

    tiles = in_tiles(form, codes).view(2, width // span, 512)
    for block in range(2):
        for tile in range(width // span):
            of_tile = codes[block * 8 : block * 8 + 8, tile * span : tile * span + span]
            assert torch.equal(of_bytes(tiles[block, tile]), of_bytes(of_tile))
    for part in (codes[:12], codes[:, : width // 4].contiguous()):
        assert in_tiles(form, part) is part


LANE = torch.arange(32)
GROUP, THREAD = LANE // 4, LANE % 4
"""Places of a lane in an operand: its row and its columns."""


def left_operand(numbers: torch.Tensor) -> torch.Tensor:
    """An operand [16, 16] of mma.m16n8k16, of the numbers of each lane: [2 blocks of 8 rows, 32, 4]."""
    made = torch.full((16, 16), torch.nan, dtype=torch.float64)
    for block in range(2):
        for number in range(4):
            made[block * 8 + GROUP, number // 2 * 8 + THREAD * 2 + number % 2] = numbers[block, :, number]
    return made


def right_operand(numbers: torch.Tensor) -> torch.Tensor:
    """The other operand [16, 8], of the numbers of each lane: [32, 4]."""
    made = torch.full((16, 8), torch.nan, dtype=torch.float64)
    for number in range(4):
        made[number // 2 * 8 + THREAD * 2 + number % 2, GROUP] = numbers[:, number]
    return made


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("form", [INT4, INT8])
def test_the_bytes_of_a_thread_are_its_part_of_the_operands(form: str, dtype: torch.dtype) -> None:
    """A warp multiplies 16 rows of a weight with 8 rows of x, tile by tile, with no number of another thread."""
    weight = random_grouped(form, 16, 256, 256)
    codes = packed([weight]).codes.view(torch.uint8).flatten()
    x = torch.randint(-8, 8, (8, 256), generator=torch.Generator().manual_seed(1)).double()
    tile, acc = TILE_COLUMNS[form], torch.zeros(16, 8, dtype=torch.float64)
    tiles = 256 // tile
    for i in range(tiles):
        loads = []
        for block in range(2):
            at = (block * tiles + i) * 512 + LANE * 16
            loads.append(codes[at[:, None] + torch.arange(16)].view(torch.int32).long() & WORD)  # 4 words of a lane
        for word in range(4):
            made = torch.stack([converted(form, load[:, word], dtype) for load in loads])
            for part in range(made.shape[2]):
                columns = i * tile + part * 64 + THREAD[:, None] * 16 + word * 4 + torch.arange(4)
                acc += left_operand(made[:, :, part]) @ right_operand(x[GROUP[:, None], columns])
    assert torch.equal(acc, numbers(weight).double() @ x.T)


SHAPES = {"tiles": (40, 512), "rows without tiles": (36, 512), "columns without tiles": (40, 192)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "settings",
    [
        {"form": INT4, "group": 64, "offsets": True},
        {"form": INT8, "group": 64, "offsets": True},
        {"form": INT8, "group": 0, "dtype": torch.float16, "order": True},
    ],
    ids=["int4", "int8", "int8 by rows"],
)
def test_every_reader_finds_the_codes(settings: dict[str, Any], shape: str, device: torch.device) -> None:
    """Two weights side by side are unpacked, multiplied plainly, and by the kernel of coded.py if it may."""
    rows, columns = SHAPES[shape]
    settings = settings | {"group": settings["group"] or columns}
    weights = [random_grouped(rows=n, columns=columns, seed=3, **settings) for n in (rows - 8, 8)]
    made = packed([replace(w, tensors={name: t.to(device) for name, t in w.tensors.items()}) for w in weights])
    assert made.tiled == (shape == "tiles")
    assert made.shape == (rows, columns)
    matrix = torch.cat([unpack_packed(weight) for weight in weights]).to(device)
    in_order = matrix if made.order is None else matrix[:, made.order.long()]
    torch.testing.assert_close(unpack(made, torch.float32), in_order, rtol=1e-6, atol=1e-6)
    for count in (1, 9):
        x = torch.randn(count, columns, generator=torch.Generator().manual_seed(1)).to(device)
        exact, sizes = x.double() @ matrix.double().T, x.double().abs() @ matrix.double().abs().T
        assert_within(multiply(x, made, None, torch.float32), exact, sizes * 2e-6)
        if made.scales_sums:
            plan, out = Plan("coded", 16, 128, 2, 16, 2, 2), torch.empty(count, rows, device=device)
            arrivals = torch.zeros(64, dtype=torch.int32, device=device)
            coded_linear(x, made, plan, out=out, arrivals=arrivals)
            assert_within(out, exact, sizes * 2e-6)


def test_weights_without_tiles_of_int8_keep_the_kernel_of_coded() -> None:
    """Plans of the other kernel are for tiles, of 16 bits, on cards that have it, at few rows."""
    site = Site(4096, 4096, 8, "none", None, False, False, INT8)
    assert default_plan(site, H200).kind == "direct"
    for other in (
        site._replace(columns=4100),
        site._replace(columns=4100, activation="silu_mul"),
        site._replace(weight=Grouped(INT8).kind(torch.float32)),
        site._replace(rows=64),
    ):
        assert default_plan(other, H200).kind == "coded", other
        assert {plan.kind for plan in candidates(other, H200)} == {"cublas", "coded"}, other
    assert default_plan(site, A100).kind == "coded"
    assert not packed([random_grouped(INT8, 36, 256, 256)]).tiled


@pytest.mark.parametrize("small", [False, True], ids=["", "small groups"])
@pytest.mark.parametrize("form", [INT4, INT8])
@pytest.mark.parametrize("rows", [1, 8, 16, 32])
@pytest.mark.parametrize(("columns", "inner", "activation"), [(14336, 4096, "silu_mul"), (1024, 1024, None)])
def test_plans_of_few_rows_fit(form: str, rows: int, columns: int, inner: int, activation: Any, small: bool) -> None:
    """Steps are no longer than the weight, and tiles have the form's own size."""
    kind = f"{form} in small groups" if small else form
    site = Site(columns, inner, rows, "none", activation, False, False, kind)
    found = [plan for plan in (default_plan(site, H200), *candidates(site, H200)) if plan.kind == "direct"]
    assert len(found) > 3
    for plan in found:
        assert plan.inner == TILE_COLUMNS[form]
        assert plan.rows >= rows
        assert plan.warps * plan.stages * plan.inner <= inner
        assert plan.fits(columns, inner, gated=activation is not None)


def test_loads_stay_ahead_where_a_multiprocessor_has_one_program_of_many_steps() -> None:
    """Registers have room for them, which they lack for small groups. Each such plan is a candidate without, too."""
    down = Site(4096, 14336, 1, "none", None, False, True, INT4)
    held = [plan for plan in candidates(down, H200) if plan.holds]
    assert {(plan.columns, plan.warps, plan.stages) for plan in held} == {(32, 8, 1), (32, 8, 2)}
    assert {replace(plan, holds=False) for plan in held} < set(candidates(down, H200))
    few_steps, many_programs = down._replace(inner=4096), down._replace(columns=14336, activation="silu_mul")
    for other in few_steps, many_programs, down._replace(weight="int4 in small groups"):
        assert not any(plan.holds for plan in candidates(other, H200)), other


def test_kinds_of_small_groups() -> None:
    """The groups of GGUF's types have plans for few rows of 16 bits on Hopper, and the library for the rest."""
    for form, group, kind in (
        (INT8, 32, "int8 in small groups"), (INT8, 16, "int8 in small groups"), (INT8, 64, "int8 in small groups"),
        (INT4, 32, "int4 in small groups"), (INT4, 16, "int4, rare"), (INT4, 64, "int4"), (INT8, 128, "int8"),
    ):  # fmt: skip
        found = format_of(packed([random_grouped(form, 40, 512, group)]))
        assert found.kind(torch.bfloat16) == kind, (form, group)
        if kind.endswith("small groups"):
            assert found.kind(torch.float32) == f"{form}, rare"
            assert format_of(found.make(torch.randn(16, 256))).kind(torch.bfloat16) == kind
    assert format_of(packed([random_grouped(INT8, 36, 256, 32)])).kind(torch.bfloat16) == "int8, rare", "no tiles"
    assert format_of(packed([random_grouped(INT4, 40, 512, 32, table=True)])).kind(torch.bfloat16) == "int4, rare"
    site = Site(4096, 4096, 8, "none", None, False, False, "int8 in small groups")
    assert choose(site, H200, PlanTable({})).plan.kind == "direct"
    for rows, gpu in ((64, H200), (8, A100)):
        other = site._replace(rows=rows)
        assert choose(other, gpu, PlanTable({})).plan.kind == "cublas"
        assert {plan.kind for plan in candidates(other, gpu)} == {"cublas"}


def test_a_weight_to_try_kernels_with_is_tiled() -> None:
    for form in (INT4, INT8):
        made = Grouped(form).make(torch.randn(16, 256).bfloat16())
        assert isinstance(made, GroupedMatrix)
        assert made.tiled
        assert made.codes.dtype == CODES[form]
        assert format_of(made).kind(torch.bfloat16) == form


FEW_ROWS: dict[str, tuple[dict[str, Any], Plan, int, dict[str, Any]]] = {
    "int4": ({"form": INT4, "group": 128, "offsets": True}, Plan("direct", 16, 128, 2, 8, stages=2, ahead=1), 3, {}),
    "int4 in half tiles": ({"form": INT4, "group": 64}, Plan("direct", 32, 128, 2, 16, stages=1), 17, {"add": True}),
    "int4 that holds": (
        {"form": INT4, "group": 128}, Plan("direct", 32, 128, 2, 8, stages=1, ahead=1, holds=True), 3, {"add": True},
    ),
    "int8 by rows": ({"form": INT8, "group": 640}, Plan("direct", 16, 64, 2, 8, stages=2, ahead=1), 1, {}),
    "int8 of a gate": (
        {"form": INT8, "group": 640}, Plan("direct", 32, 64, 4, 16, stages=1, ahead=1), 9, {"activation": "silu_mul"},
    ),
    "int8 with all": (
        {"form": INT8, "group": 128, "offsets": True, "order": True}, Plan("direct", 16, 64, 2, 8, stages=4), 9, {},
    ),
    "int8 in groups": ({"form": INT8, "group": 128}, Plan("direct", 32, 64, 4, 16, stages=2), 5, {"add": True}),
    "Q8_0": ({"form": INT8, "group": 32, "dtype": torch.float16}, Plan("direct", 16, 64, 4, 8, stages=2), 3, {}),
    "Q4_0": ({"form": INT4, "group": 32, "dtype": torch.float16}, Plan("direct", 32, 128, 2, 8, ahead=1), 9, {}),
    "Q4_K": ({"form": INT4, "group": 32, "offsets": True}, Plan("direct", 16, 128, 2, 8, stages=2), 2, {"add": True}),
    "Q6_K": ({"form": INT8, "group": 16}, Plan("direct", 32, 64, 2, 16, ahead=1), 5, {"activation": "silu_mul"}),
    "int8 in whole tiles": ({"form": INT8, "group": 64, "offsets": True}, Plan("direct", 16, 64, 2, 8), 1, {}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("case", FEW_ROWS)
def test_products_of_few_rows(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own code, executed in torch. Weights fill neither the last program nor the last step."""
    run_in_torch(
        monkeypatch, "direct_kernel", direct, operands, endings, mma_v2=mma, along=lambda *_: None,
        sums_layout=lambda *_: None, _sigmoid=torch.sigmoid, _keep_loads_ahead=lambda *_: None,
    )  # fmt: skip
    settings, plan, rows, ends = FEW_ROWS[case]
    weight = random_grouped(rows=48, columns=640, **settings)
    columns = 24 if ends.get("activation") else 48
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(rows, 640, generator=generator) / 8).to(dtype)
    bias, to = torch.randn(48, generator=generator).to(dtype), torch.randn(rows, columns, generator=generator)
    out = to.clone()
    direct.direct_linear(x, packed([weight]), plan, out=out, bias=bias, **ends)
    exact = x.double() @ unpack_packed(weight).double().T + bias.double()
    if ends.get("activation"):
        gate, up = exact.chunk(2, 1)
        exact = torch.nn.functional.silu(gate) * up
    if ends.get("add"):
        exact += to
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)


def held(layout: Any, thread: int) -> set[tuple[int, ...]]:
    """Places of a thread's elements by the bases of a linear layout."""
    places = {(0,) * len(layout.shape)}
    for bit, base in enumerate([*layout.lane_bases, *layout.warp_bases]):
        if thread >> bit & 1:
            places = {tuple(a ^ b for a, b in zip(place, base, strict=True)) for place in places}
    for base in layout.reg_bases:
        places |= {tuple(a ^ b for a, b in zip(place, base, strict=True)) for place in places}
    return places


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("warps", "columns", "rows"), [(4, 16, 8), (8, 16, 8), (4, 64, 8), (4, 32, 32), (8, 128, 32)])
def test_a_thread_has_all_that_it_adds_up(warps: int, columns: int, rows: int, gated: bool) -> None:
    """The sums of all warps, and of the gate and of up. All threads have results, unless there are fewer."""
    width, found = columns // (1 + gated), set()
    each = max(1, width // 32, min(8, width * rows // (32 * warps)))
    layout = operands.sums_layout(warps, columns, rows, each, gated)
    for thread in range(32 * warps):
        places = held(layout, thread)
        found |= places
        results = {place[1:] for place in places}
        assert places == {(warp, *result) for warp in range(warps) for result in results}
        if gated:
            assert results == {(column ^ 8, row) for column, row in results}
        assert len(results) == max(1, width * rows // (32 * warps)) * (1 + gated)
    assert len(found) == warps * columns * rows


PLANS = """
from tests.kernels.compile_for import install, spills
compiled = install()
import torch
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.linear.candidates import candidates
from asyncengine.kernels.cuda.linear.choose import default_plan
from asyncengine.kernels.cuda.linear.direct import direct_linear
from asyncengine.kernels.cuda.linear.formats.registry import format_of
from asyncengine.kernels.cuda.linear.grouped import GroupedMatrix
from asyncengine.kernels.cuda.linear.plan import Site
from asyncengine.kernels.weight import INT4, INT8

def check(weight, rows, holds=False):
    columns, inner = weight.shape
    site = Site(columns, inner, rows, "none", None, False, True, format_of(weight).kind(torch.bfloat16))
    plans = [plan for plan in candidates(site, H200) if plan.holds] if holds else [default_plan(site, H200)]
    x, out = (torch.empty(rows, size, dtype=torch.bfloat16) for size in (inner, columns))
    for plan in plans:
        direct_linear(x, weight, plan, out=out, add=True, pdl=True)

for rows, columns, inner, group in (
    (1, 28672, 4096, 4096), (16, 4096, 14336, 128), (32, 6144, 4096, 4096), (1, 28672, 4096, 32), (16, 4096, 14336, 16),
    (32, 6144, 4096, 32),
):
    codes, scales = torch.empty(columns, inner, dtype=torch.int8), torch.empty(inner // group, columns)
    check(GroupedMatrix(INT8, codes, scales, None, None, None), rows)
for rows, columns, inner in (1, 28672, 4096), (16, 4096, 14336), (32, 6144, 4096):
    codes, scales = torch.empty(columns, inner // 2, dtype=torch.uint8), torch.empty(inner // 32, columns)
    check(GroupedMatrix(INT4, codes, scales, scales, None, None), rows)
for group, offsets in (128, False), (128, True), (64, False), (64, True):
    codes, scales = torch.empty(4096, 7168, dtype=torch.uint8), torch.empty(14336 // group, 4096)
    check(GroupedMatrix(INT4, codes, scales, scales if offsets else None, None, None), 1, holds=True)
for kernel in compiled.values():
    first, *_, last = kernel.asm["ptx"].split("mma.sync")
    loop = kernel.asm["ptx"][len(first) : -len(last)]
    moved = [word for word in ("bar.sync", "shared", "shfl") if word in loop]
    print(":".join(["direct_kernel", *moved, *spills(kernel)]))
"""


def test_no_weight_of_codes_moves_between_threads(tmp_path: Path) -> None:
    """Between the products of a step there are neither barriers nor shared memory, and registers suffice, also for the
    groups of GGUF's types, and where loads stay ahead."""
    assert run(tmp_path, "-c", PLANS) == ["direct_kernel"] * 17
