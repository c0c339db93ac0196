"""Eviction policies of the L2 cache for copies by the tensor memory accelerator, for which Gluon has no word.

A step's keys and values are far more than the cache holds and are read once. Kept as long as anything else, they drive
out what the next kernel needs: the rows that 64 programs multiply with, block tables, work items. So a copy of theirs
is marked to be evicted first, and that of rows that many programs read to be evicted last.

A mark is a comment in the kernel's PTX, for all copies behind it up to the next mark: one call may be several copies.
So a kernel that marks one marks all. On the way to ptxas the mark becomes an operand of those instructions: Triton
calls a hook with the stages of every compilation. Kernels without a mark, and copies marked with NO_POLICY, pass as
they are. Where Triton has no such hook, or writes the instruction in another way, a copy is as it would be without its
mark.

The effect of a mark is no part of Triton's cache key, but its text is: whoever changes the one changes the other.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_MARK = re.compile(r"// asyncengine: copies from here on: (\w+)")
_POLICIES = ("evict_first", "evict_last")
_COPY = re.compile(
    r"(?P<before>\s*(?:@%p\d+ )?cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global\.mbarrier::complete_tx::bytes)"
    r"(?P<operands> [^;]*);"
)


def _mark(policy: str) -> str:
    return f"mov.b32 $0, 0; // asyncengine: copies from here on: {policy}"


EVICT_FIRST, EVICT_LAST = (_mark(policy) for policy in _POLICIES)
NO_POLICY = _mark("no_policy")
"""A copy without a policy. That differs from a policy of evict_normal, which costs 4% of a step."""


def marks_of_operands(blocks: int, *, hints: bool) -> dict[str, str]:
    """Constants for a kernel that multiplies rows, in so many blocks, with weights.

    With one block a program is the only one that reads its weights, so they leave the cache first; rows are read by
    many.
    """
    if not hints:
        return {"W_MARK": NO_POLICY, "X_MARK": NO_POLICY}
    return {"W_MARK": EVICT_FIRST if blocks == 1 else NO_POLICY, "X_MARK": EVICT_LAST}


@gluon.jit
def mark_copies(POLICY: gl.constexpr):
    """Mark the copies from here on: their lines leave the cache before all others, after all others, or as usual."""
    gl.inline_asm_elementwise(POLICY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


def with_policies(ptx: str) -> str:
    """``ptx`` with the policies that its marks say."""
    lines, policy = [], ""
    for line in ptx.split("\n"):
        if mark := _MARK.search(line):
            policy = mark[1]
        elif policy in _POLICIES and (copy := _COPY.fullmatch(line)):
            create = f"createpolicy.fractional.L2::{policy}.b64 policy, 1.0;"
            line = f"{{ .reg .b64 policy; {create}{copy['before']}.L2::cache_hint{copy['operands']}, policy; }}"
        lines.append(line)
    return "\n".join(lines)


def _install() -> None:
    runtime: Any = knobs.runtime
    others: Callable[..., Any] | None = getattr(runtime, "add_stages_inspection_hook", None)

    def add_policies(backend: Any = None, stages: Any = None, *compilation: Any, **more: Any) -> Any:
        result = others(backend, stages, *compilation, **more) if others else ("", "")
        if stages is None:  # later versions ask for what belongs into a cache key
            return result
        if make_ptx := stages.get("ptx"):
            stages["ptx"] = lambda source, metadata: with_policies(make_ptx(source, metadata))
        return result

    runtime.add_stages_inspection_hook = add_policies


_install()
