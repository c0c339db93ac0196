"""Choice of the kernel that computes a projection: from a measured table, by a formula, or by default.

A table gives the plan that was fastest on the card, for up to 256 rows. A formula gives the plan for more rows. A
default serves where a table is needed and knows nothing. An engine asks ``Choices``, once for each projection of a
bucket.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Literal, NamedTuple

from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.linear.formats.registry import format_of_kind, runs_on
from asyncengine.kernels.cuda.linear.plan import CUBLAS, INVARIANT, MAX_ROWS, Plan, Site, round_rows
from asyncengine.kernels.cuda.linear.tables import PlanTable

Source = Literal["table", "measured", "formula", "default", "setting"]
"""Origin of a choice. table: of the package. measured: on this card, at this start or an earlier one. formula: for many
rows. default: no table knows the site. setting: the engine's configuration or the model's dtype leaves one plan."""
ROWS_OF_CUBLAS = 192
"""Most rows for which cuBLAS is chosen, from MAX_ROWS / 2 on, where many products make an element: see
``is_for_formula``."""
FEW_PRODUCTS = 3072
"""Most products of an element of the result for which tma plans are chosen by formula. Qwen3 and GPT-2, which have no
more, take 2 to 15% less with tma plans for steps of 300 to 2,000 tokens; the 8B, which has 4,096 and more, takes 0 to
4% longer."""
LARGE_TILES = ((128, 256, 8), (128, 128, 8), (128, 64, 4), (64, 128, 4), (64, 64, 4))
"""Tiles for more than MAX_ROWS rows: rows of the weight, rows of x, warps. The first one runs out of registers if the
kernel adds to the residual, or with the exact GELU."""


def fallback(site: Site) -> Plan:
    """Return a plan that can always be run: cuBLAS, if it takes such a matrix."""
    return CUBLAS if format_of_kind(site.weight).takes_library(site) else INVARIANT


def default_plan(site: Site, gpu: Gpu) -> Plan:
    """Return the plan of a site that no table knows: that of its format's pattern, if the plan fits."""
    plan = format_of_kind(site.weight).pattern(site, gpu)
    if plan is None or not plan.fits(site.columns, site.inner, site.activation == "silu_mul"):
        return fallback(site)
    return plan if runs_on(plan, gpu, site.weight) else fallback(site)


def _takes_tma(site: Site) -> bool:
    return format_of_kind(site.weight).takes_tma(site)


def is_for_formula(site: Site) -> bool:
    """Return whether ``plan_for_many_rows`` gives the plan, in place of a table. The site's rows are not rounded.

    A table's plans for 256 rows multiply as many when there are 160. Where many products make an element, that is what
    takes the time: a step of the 8B with 160 rows takes 0.86 of it by cuBLAS, with 192 rows 0.90.
    """
    many_products = site.inner > FEW_PRODUCTS and _takes_tma(site) and site.activation != "argmax"
    return site.rows > MAX_ROWS or (many_products and MAX_ROWS // 2 < site.rows <= ROWS_OF_CUBLAS)


@cache
def plan_for_many_rows(site: Site, gpu: Gpu) -> Plan:
    """Return a plan for a site of which ``is_for_formula`` is true: a tma plan, with all that surrounds the product, or
    cuBLAS.

    cuBLAS multiplies faster, but leaves activations, norms and some sums to kernels of their own, which weigh more
    where few products make an element. Tiles are chosen such that the programs should be over first.
    """
    if not gpu.tma or not _takes_tma(site) or site.inner > FEW_PRODUCTS or site.activation == "argmax":
        return fallback(site)
    plans = (
        Plan("tma", columns, 64, warps, rows, 1, gpu.tile_bytes // ((columns + rows) * 128), fused_norm=False)
        for columns, rows, warps in LARGE_TILES[1 if site.add or site.activation == "gelu" else 0 :]
    )
    fitting = [plan for plan in plans if plan.fits(site.columns, site.inner, site.activation == "silu_mul")]
    return min((*fitting, CUBLAS), key=partial(_clocks, site, gpu.multiprocessors))


def _clocks(site: Site, multiprocessors: int, plan: Plan) -> float:
    """Estimate the clocks of a multiprocessor: the start and end of a program or a kernel, products, bytes of tiles or
    results.

    Fitted to four models at 272 to 2,048 rows, 140 sites, where what it chooses takes 1% longer than the fastest. For
    cuBLAS it is a twentieth more than was measured: alike, the plan that needs fewer kernels is to be taken.
    """
    products = site.weight_rows * site.inner * site.rows / multiprocessors
    if plan.kind == "cublas":
        stored = site.columns * site.rows if site.add or site.activation else 0
        return 13_650 + products / 1515 + stored / 505
    size, moved = plan.columns * plan.rows, (plan.columns + plan.rows) * 2
    programs = -(-site.weight_rows // plan.columns) * -(-site.rows // plan.rows)
    return -(-programs // multiprocessors) * (4200 + size / 9 + site.inner * max(size / 1700, moved / 63))


class Choice(NamedTuple):
    """The plan of a projection, and the origin of the choice."""

    plan: Plan
    source: Source


def choose(site: Site, gpu: Gpu, table: PlanTable) -> Choice:
    """The plan of a site whose rows are not rounded."""
    if format_of_kind(site.weight).takes_library_alone(site):
        return Choice(CUBLAS, "setting")
    if is_for_formula(site):
        return Choice(plan_for_many_rows(site, gpu), "formula")
    site = site._replace(rows=round_rows(site.rows))
    plan = table.find(site)
    if plan is None or not runs_on(plan, gpu, site.weight):
        return Choice(default_plan(site, gpu), "default")
    return Choice(plan, "measured" if table.is_measured(site) else "table")


class Choices:
    """The plans of an engine's projections. Each is chosen once and kept until new plans are measured."""

    def __init__(self, table: PlanTable, gpu: Gpu, *, batch_invariant: bool = False) -> None:
        self.table = table
        self.gpu = gpu
        self.missing: set[Site] = set()
        """Sites, of rounded rows, that were asked for and that the table does not know."""
        self._batch_invariant = batch_invariant
        self._made: dict[Site, Choice] = {}

    def choice(self, site: Site) -> Choice:
        """Return the choice for a site whose rows are not rounded."""
        if self._batch_invariant:
            return Choice(format_of_kind(site.weight).invariant, "setting")
        if (made := self._made.get(site)) is None:
            made = self._made[site] = choose(site, self.gpu, self.table)
            rounded = site._replace(rows=round_rows(site.rows))
            if made.source == "default" and self.table.find(rounded) is None:
                self.missing.add(rounded)
        return made

    def plan(self, site: Site) -> Plan:
        """Return the plan for a site whose rows are not rounded."""
        return self.choice(site).plan

    def learn(self, measured: PlanTable) -> None:
        """Plans measured for missing sites take effect from the next choice on."""
        self.table.update(measured)
        self.missing.difference_update(site for site, _ in measured.items())
        self._made.clear()
