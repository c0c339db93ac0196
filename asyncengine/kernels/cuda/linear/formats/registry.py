"""The formats that there are, by the names of packed weights and by the kinds of weight in a site; what these take."""

from __future__ import annotations

from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.linear.formats.base import Format, Matrix
from asyncengine.kernels.cuda.linear.formats.dense import Dense
from asyncengine.kernels.cuda.linear.formats.float8 import Float8
from asyncengine.kernels.cuda.linear.formats.grouped import Grouped
from asyncengine.kernels.cuda.linear.grouped import TILE_COLUMNS, CodedRows, GroupedMatrix
from asyncengine.kernels.cuda.linear.plan import Plan, Site, WeightKind
from asyncengine.kernels.float8 import Quantized
from asyncengine.kernels.weight import DENSE, FLOAT8, GROUPED, INT4

FORMATS: dict[str, Format] = {DENSE: Dense(), FLOAT8: Float8(), **{form: Grouped(form) for form in GROUPED}}
_RARE = {form: Grouped(form, coded=False) for form in GROUPED}
_SMALL_GROUPS = {form: Grouped(form, coded=False, small_groups=True) for form in TILE_COLUMNS}
_BY_KIND = {kind: form for form in (*FORMATS.values(), *_RARE.values(), *_SMALL_GROUPS.values()) for kind in form.bits}


def format_of(weight: Matrix) -> Format:
    """The format of a weight that is packed."""
    if isinstance(weight, GroupedMatrix):
        if weight.has_small_groups:
            return _SMALL_GROUPS[weight.form]
        return (FORMATS if weight.scales_sums else _RARE)[weight.form]
    if isinstance(weight, CodedRows):
        return FORMATS[INT4]
    return FORMATS[FLOAT8 if isinstance(weight, Quantized) else DENSE]


def format_of_kind(kind: WeightKind) -> Format:
    """The format of the weights of a site."""
    return _BY_KIND[kind]


def weight_bytes(site: Site) -> int:
    """Bytes of the site's weights."""
    return _bytes(site.weight_rows * site.inner, site.weight)


def shared_bytes(plan: Plan, kind: WeightKind) -> int:
    """Bytes of shared memory that the tiles of a program take; 0 if the program keeps them in registers."""
    return _bytes(plan.shared_elements(), kind)


def runs_on(plan: Plan, gpu: Gpu, kind: WeightKind) -> bool:
    """Return whether the card has all that the plan's kernel needs for such weights."""
    if (plan.kind in ("tma", "direct") and not gpu.tma) or not format_of_kind(kind).runs_on(gpu):
        return False
    return shared_bytes(plan, kind) <= gpu.shared_bytes


def _bytes(elements: int, kind: WeightKind) -> int:
    return elements * format_of_kind(kind).bits[kind] // 8
