"""Which kernel multiplies: a plan for every kind of projection, from a table that was measured on the card.

A *site* is what a projection is: its shape, what is fused with it, and how many rows it has, rounded up. A table gives
the plan that was fastest there. Tables come with the package for cards that it was measured on, and from the cache
directory for others. Where there are more rows than in any table, a formula says it.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import msgspec

from asyncengine.kernels.float8 import scaled_product_takes
from asyncengine.kernels.ops import Activation, Norm

logger = logging.getLogger(__name__)

MAX_ROWS = 256
"""Beyond, arithmetic binds and not memory: see ``plan_for_many_rows``."""
SKINNY_ROWS = 32
ROWS_OF_CUBLAS = 192
"""From MAX_ROWS / 2 on, where many products make an element: see ``is_for_formula``."""
MULTIPROCESSORS = 132
"""Of the H200, for whose size plans are offered."""
HALF_OF_SHARED, ALL_OF_SHARED = 110_000, 220_000
"""Bytes of shared memory, at most, of programs of which a multiprocessor has two, or one."""
FEW_PRODUCTS = 3072
"""Of an element of the result. With streamed plans Qwen3 and GPT-2, which have no more, take 2 to 15% less for steps of
300 to 2,000 tokens, the 8B, which has 4,096 and more, 0 to 4% longer."""
LARGE_TILES = ((128, 256, 8), (128, 128, 8), (128, 64, 4), (64, 128, 4), (64, 64, 4))
"""Of more than MAX_ROWS rows: the weight's rows, those of x, warps. For the first one registers do not do if there is
something to add to, or with the exact GELU."""


NormKind = Literal["none", "rms", "layer"]
PlanKind = Literal["vector", "skinny", "tiled", "streamed", "cublas"]
WeightKind = Literal["bf16", "fp8"]
Fused = Activation | Literal["argmax"]
"""argmax is of a head whose rows are all sampled greedily: the ranks of its tiles (see tma_ranks.py), if the plan is
streamed; else the head gives logits, by the plan of its site without."""


class Site(NamedTuple):
    """A kind of projection. ``inner`` is K; ``columns`` N, for silu_mul that of the result."""

    columns: int
    inner: int
    rows: int
    """see round_rows"""
    norm: NormKind
    activation: Fused | None
    bias: bool
    add: bool
    weight: WeightKind = "bf16"

    @property
    def weight_rows(self) -> int:
        return self.columns * (2 if self.activation == "silu_mul" else 1)

    @property
    def weight_bytes(self) -> int:
        return self.weight_rows * self.inner * (1 if self.weight == "fp8" else 2)


def norm_kind(norm: Norm | None) -> NormKind:
    if norm is None:
        return "none"
    return "rms" if norm.bias is None else "layer"


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel of ``triton_linear`` or ``gluon_linear`` and its tiles, or cuBLAS between kernels for the rest.

    For float8 weights cuBLAS stands for torch's scaled product.
    """

    kind: PlanKind
    columns: int = 0
    """of the weight's rows, in a program"""
    inner: int = 0
    """elements of K in a step: of the program, or of a warp in a skinny one"""
    warps: int = 4
    rows: int = 0
    """of x in a tile"""
    split: int = 1
    stages: int = 1
    ahead: int = 0
    """steps whose weights are loaded ahead of the wait; 0 is all"""
    fused_norm: bool = True
    """the norm, and for float8 weights the quantising of x, is part of the kernel and not one of its own"""

    @property
    def leaves_parts(self) -> bool:
        """Of a sum, for the norm that reads it next (see linear/tma.py)."""
        return self.kind == "streamed" and self.split > 1

    @property
    def shared_bytes(self) -> int:
        """What the tiles of a streamed program take of shared memory."""
        return (self.rows + self.columns) * self.inner * 2 * self.stages

    def fits_head(self, columns: int, inner: int) -> bool:
        """Whether programs that stay can make ranks by it: of whole sums, with memory for a step that is to come."""
        whole = self.kind == "streamed" and self.columns >= 64 and self.split == 1 and self.stages > 1
        return whole and self.fits(columns, inner, gated=False)

    def fits(self, columns: int, inner: int, gated: bool) -> bool:
        """Whether it can multiply weights of this shape. Needs no norm."""
        if self.kind == "cublas":
            return True
        if self.kind == "streamed" and (self.inner % 64 or inner % 8 or (gated and columns % 8)):
            return False  # copies are of 128 bytes or, at the end, 16, and of 8 rows of the gate and of up in turn
        if self.kind == "streamed" and self.columns < 64 and self.inner < 16 * self.warps:
            return False  # each warp has a stretch of K
        if self.kind in ("tiled", "streamed"):
            return self.split == 1 or inner % (self.split * self.inner) == 0
        if self.ahead * self.warps * self.inner > inner:
            return False  # whole steps are loaded without a mask
        return columns % (self.columns // 2 if gated else self.columns) == 0


CUBLAS = Plan("cublas", fused_norm=False)
INVARIANT = Plan("tiled", columns=64, inner=64, warps=4, rows=64, stages=4, fused_norm=False)
"""The same sums whatever the rows; fits any shape."""


def round_rows(rows: int) -> int:
    """The rows of the site that stands for as many: few sites, since each compiles kernels of its own."""
    return 1 if rows == 1 else max(8, 1 << (rows - 1).bit_length())


def fallback(site: Site) -> Plan:
    """What can always be run: cuBLAS, if it takes such a matrix."""
    fits = site.weight == "bf16" or scaled_product_takes(site.weight_rows, site.inner)
    return CUBLAS if fits else INVARIANT


def default_plan(site: Site) -> Plan:
    """For a site that no table knows.

    For float8 weights a plan by the pattern of what was fastest in bfloat16, since the scaled product takes three
    kernels and is made for many rows.
    """
    if site.weight == "bf16" or site.rows > 64:
        return fallback(site)
    gated = site.activation == "silu_mul"
    if site.rows == 1:
        warps = 2 if site.inner <= 2048 else 4 if site.inner <= 8192 else 8 if site.inner <= 16384 else 16
        inner = min(1024, 1 << (site.inner - 1).bit_length())
        plan = Plan("vector", 4, inner, warps)
    elif site.rows <= 8 and site.inner <= 3072:
        plan = Plan("skinny", 16, 64, 4 if site.inner <= 1024 else 8)
    else:
        columns = 128 if site.weight_rows >= 1 << 14 else 64
        split = 1
        programs = site.weight_rows / columns
        while not gated and split < 8 and programs * split < 100 and site.inner % (256 * split) == 0:
            split *= 2
        plan = Plan("tiled", columns, 128, 4, max(16, site.rows), split, 4, fused_norm=False)
    return plan if plan.fits(site.columns, site.inner, gated) else fallback(site)


def is_for_formula(site: Site) -> bool:
    """Whether ``plan_for_many_rows`` says its plan, and no table. The site's rows are not rounded.

    A table's plans for 256 rows multiply as many when there are 160. Where many products make an element, that is what
    takes the time: a step of the 8B with 160 rows takes 0.86 of it by cuBLAS, with 192 rows 0.90.
    """
    many_products = site.inner > FEW_PRODUCTS and site.weight == "bf16" and site.activation != "argmax"
    return site.rows > MAX_ROWS or (many_products and MAX_ROWS // 2 < site.rows <= ROWS_OF_CUBLAS)


@cache
def plan_for_many_rows(site: Site) -> Plan:
    """For a site of which ``is_for_formula`` is true: streamed, with what surrounds the product, or cuBLAS.

    cuBLAS multiplies faster, but leaves activations, norms and some sums to kernels of their own, which weigh more
    where few products make an element. Of tiles that one is taken whose programs should be over first.
    """
    if site.weight != "bf16" or site.inner > FEW_PRODUCTS or site.activation == "argmax":
        return fallback(site)
    plans = (
        Plan("streamed", columns, 64, warps, rows, 1, ALL_OF_SHARED // ((columns + rows) * 128), fused_norm=False)
        for columns, rows, warps in LARGE_TILES[1 if site.add or site.activation == "gelu" else 0 :]
    )
    fitting = [plan for plan in plans if plan.fits(site.columns, site.inner, site.activation == "silu_mul")]
    return min((*fitting, CUBLAS), key=partial(_clocks, site))


def _clocks(site: Site, plan: Plan) -> float:
    """Of a multiprocessor, about: what begins and ends a program or a kernel, products, bytes of tiles or results.

    Fitted to four models at 272 to 2,048 rows, 140 sites, where what it chooses takes 1% longer than the fastest. Of
    cuBLAS it is a twentieth more than was measured: alike, the plan that needs fewer kernels is to be taken.
    """
    products = site.weight_rows * site.inner * site.rows / MULTIPROCESSORS
    if plan.kind == "cublas":
        stored = site.columns * site.rows if site.add or site.activation else 0
        return 13_650 + products / 1515 + stored / 505
    size, moved = plan.columns * plan.rows, (plan.columns + plan.rows) * 2
    programs = -(-site.weight_rows // plan.columns) * -(-site.rows // plan.rows)
    return -(-programs // MULTIPROCESSORS) * (4200 + size / 9 + site.inner * max(size / 1700, moved / 63))


def candidates(site: Site, *, streamed: bool = True) -> Iterator[Plan]:
    """Plans worth measuring, ``fallback`` first; ``streamed`` ones only where they run."""
    yield fallback(site)
    gated = site.activation == "silu_mul"
    whole = () if site.activation == "argmax" else (*_vector(site), *_skinny(site), *_tiled(site))
    for plan in (*whole, *(_streamed(site) if streamed else ())):
        if plan.fits(site.columns, site.inner, gated) and plan != fallback(site):
            yield plan
            if site.weight == "fp8" and plan.fused_norm:
                yield replace(plan, fused_norm=False)


def _packed(site: Site) -> float:
    """Elements of the weight in half a register."""
    return 2 if site.weight == "fp8" else 1


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
                    fused = site.weight == "bf16" and site.rows * site.inner <= 8192
                    for ahead in (1, 2, 3):
                        if ahead < steps and per_thread * (ahead + 1) <= 256:
                            yield Plan("skinny", columns, inner, warps, ahead=ahead, fused_norm=fused)


def _tiled(site: Site) -> Iterator[Plan]:
    if site.rows == 1 and site.weight == "bf16":
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
                            shared = (rows + columns) * inner * (1 if site.weight == "fp8" else 2) * stages
                            if 4 <= accumulators <= 128 and 30_000 <= shared <= ALL_OF_SHARED and stages <= steps + 2:
                                yield Plan("tiled", columns, inner, warps, rows, split, stages, fused_norm=False)


def _streamed(site: Site) -> Iterator[Plan]:
    if site.rows < 8 or site.weight != "bf16":
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
                    if rows < min(64, site.rows) and tiles > MULTIPROCESSORS:
                        continue  # weights would be read several times, and nobody was idle
                    for stages in _stages((rows + columns) * inner * 2, steps):
                        plan = Plan("streamed", columns, inner, 4, rows, split, stages, fused_norm=False)
                        if sums <= 128:
                            yield plan
                        if sums >= 64:
                            yield replace(plan, warps=8)
    yield from _narrow(site)


def _narrow(site: Site) -> Iterator[Plan]:
    """Streamed plans of 16 or 32 of the weight's rows, where tiles of 64 leave multiprocessors idle."""
    if site.activation == "argmax":
        return
    for rows in (8, 16, 32, 64):
        blocks = -(-site.rows // rows)
        if not site.rows <= 4 * rows <= 4 * site.rows or site.weight_rows // 64 * blocks > MULTIPROCESSORS:
            continue
        for columns in (16, 32):
            for split in (1, 2) if site.add else (1,):
                if site.weight_rows // columns * blocks * split > 2 * MULTIPROCESSORS:
                    continue
                for inner in (128, 256):
                    steps = site.inner // split // inner
                    for stages in _stages((rows + columns) * inner * 2, steps):
                        plan = Plan("streamed", columns, inner, 4, rows, split, stages, fused_norm=False)
                        yield plan
                        if rows >= 32:
                            yield replace(plan, warps=8)


def _stages(size: int, steps: int) -> list[int]:
    """As many as shared memory has for two programs of a multiprocessor, for one, and for one to the last kilobyte.

    What else a program keeps there may leave too little for the last, which then does not compile.
    """
    return [n for n in sorted({min(steps, room // size) for room in (HALF_OF_SHARED, ALL_OF_SHARED, 228_000)}) if n > 1]


# ---- tables ----


class PlanTable:
    """Plans by site. What it lacks is done by ``default_plan``."""

    def __init__(self, plans: dict[Site, Plan] | None = None) -> None:
        self._plans = dict(plans or {})

    @classmethod
    def load(cls, gpu: str) -> PlanTable:
        """The plans that come with the package for this card, overridden by those of the cache directory.

        Other cards with the H200's chip, which differ in their memory alone, start from the H200's plans.
        """
        table = _read(_SHIPPED.joinpath(_SAME_CHIP.get(table_name(gpu), table_name(gpu))))
        table.update(_read(cache_path(gpu)))
        return table

    @classmethod
    def shipped(cls) -> PlanTable:
        """All plans that come with the package, of whatever card."""
        table = cls()
        for path in sorted(_SHIPPED.iterdir(), key=lambda path: path.name):
            if path.name.endswith(".json"):
                table.update(_read(path))
        return table

    @classmethod
    def from_json(cls, text: str) -> PlanTable:
        """Raises ValueError if it is no table."""
        try:
            entries = msgspec.json.decode(text, type=list[tuple[Site, dict[str, Any]]])
            # By way of Plan, which refuses names that it does not know.
            return cls({site: msgspec.convert(asdict(Plan(**plan)), Plan) for site, plan in entries})
        except (TypeError, RecursionError) as e:
            raise ValueError(f"not a table of plans: {e}") from e

    def to_json(self) -> str:
        entries = sorted(self._plans.items(), key=_order)
        lines = (json.dumps([_short_site(site), _short(plan)]) for site, plan in entries)
        return "[\n" + ",\n".join(lines) + "\n]\n"

    def update(self, other: PlanTable) -> None:
        self._plans.update(other._plans)

    def add(self, site: Site, plan: Plan) -> None:
        self._plans[site] = plan

    def find(self, site: Site) -> Plan | None:
        return self._plans.get(site)

    def items(self) -> Iterable[tuple[Site, Plan]]:
        return self._plans.items()

    def norms_are_apart(self, site: Site) -> bool:
        """Whether all norms known to read what ``site`` adds to are kernels of their own, which may add up parts."""
        readers = (s for s in self._plans if s.norm != "none" and s[1:3] == (site.columns, site.rows))
        return not any(self._plans[s].fused_norm for s in readers)

    def __len__(self) -> int:
        return len(self._plans)


def _order(item: tuple[Site, Plan]) -> str:
    return repr(item[0])


def _short_site(site: Site) -> list[Any]:
    """As tables were written before there were other weights than bfloat16."""
    return list(site[:-1] if site.weight == "bf16" else site)


def _short(plan: Plan) -> dict[str, Any]:
    """Without what is default."""
    default = asdict(Plan(plan.kind))
    return {key: value for key, value in asdict(plan).items() if key == "kind" or value != default[key]}


_SHIPPED = files("asyncengine.kernels.cuda.linear").joinpath("plans")
_SAME_CHIP = dict.fromkeys(
    ("nvidia-h100-80gb-hbm3.json", "nvidia-h100-nvl.json", "nvidia-gh200-480gb.json"), "nvidia-h200.json"
)


def _read(path: Traversable) -> PlanTable:
    """A table without plans if there is no such file, or with a warning if it is of no use."""
    if not path.is_file():
        return PlanTable()
    try:
        return PlanTable.from_json(path.read_text())
    except (OSError, ValueError) as e:
        logger.warning("%s is ignored: %s", path, e)
        return PlanTable()


def keep(gpu: str, measured: PlanTable) -> Path:
    """Add plans to those of the cache directory, for later starts; the path of the file. Raises OSError.

    Who reads the file meanwhile finds it whole, old or new. Of two that write it at the same time the last one wins;
    what the other had measured is measured again.
    """
    path = cache_path(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = _read(path)
    table.update(measured)
    written = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        written.write_text(table.to_json())
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)
    return path


def table_name(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def cache_path(gpu: str) -> Path:
    """Where measured plans are kept: ASYNCENGINE_CACHE, or asyncengine in the user's cache directory."""
    base = os.environ.get("ASYNCENGINE_CACHE")
    # Of os, which leaves a ~ that nobody knows as it is, as Triton does for its own cache.
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    directory = Path(base) if base else Path(user) / "asyncengine"
    return directory / "plans" / table_name(gpu)
