"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits inside for its results.

The rule that every kernel of a step keeps: it calls ``wait`` once, before it reads what this step has written or writes
anything at all, and only then lets the next kernel start. So whatever the kernel before the previous one wrote may be
read even before ``wait``, as may weights and the keys and values of earlier steps; that is what the early start is
for. A kernel that does not know of it (cuBLAS) neither waits nor is waited for early: it is ordered as ever.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def wait(PDL: tl.constexpr):
    """Block until all that the previous kernels wrote is visible, then let the next kernel's programs start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def launch_options(pdl: bool) -> dict[str, Any]:
    """Keywords for the launch of a kernel with a constant ``PDL``; the interpreter knows nothing of the attribute."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
