"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits inside for its results.

Between two kernels of a graph lie about 1.5 us until the second has launched and fetched its first weights. Launched
early it spends them while the first still works.

The rule: a kernel calls ``wait`` before it reads what this step has computed and before it writes anything. What
may be read ahead of that depends on how far the kernels before have come. ``wait`` lets the next kernel start when it
returns, so what was written two kernels before may be read; with ``start_next`` at its top a kernel lets the next one
start with it, and a run of such kernels may all be there at once. So a step's first kernels, which spread its input,
never call ``start_next``: that input and the keys and values of earlier steps, like weights, may always be read ahead.

Attention of prompts needs nothing of the kernel before it, which computes rows of one token, but of the one before
that, which is over when it starts. So it waits at its end, and who comes next may read nothing of both ahead. If there
are no such rows it starts early, and waits as others do.

A kernel that knows of none of this (cuBLAS) neither starts early nor lets others: it is ordered as ever.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

from typing import Any, TypedDict

import torch
import triton
import triton.language as tl
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
"""Kernels run in Triton's interpreter, which knows no launch attributes and no bfloat16 products."""


def must_widen(dtype: torch.dtype) -> bool:
    """The interpreter multiplies the bits of bfloat16 as if they were integers."""
    return dtype == torch.bfloat16 and INTERPRETED


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the programs of the next kernel start as soon as there is room for them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Block until all that the previous kernels wrote is visible; let the next kernel's programs start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


class TmaOptions(TypedDict, total=False):
    """Options of the launch of a tma kernel. Results are the same."""

    pdl: bool
    l2_cache_hints: bool
    """true by default; see launch/cache_policy.py"""


def launch_options(pdl: bool) -> dict[str, Any]:
    """Keywords for the launch of a kernel with a constant ``PDL``."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
