"""What kernels want of the hardware and Gluon has no word for, as marks in their PTX.

A mark is a comment. On the way to ptxas it becomes what it says: Triton calls a hook with the stages of every
compilation. Kernels without a mark pass as they are. Where Triton has no such hook, or writes its PTX in another way, a
kernel is as it would be without its marks: slower, not wrong. What becomes of a mark is no part of Triton's cache key,
but its text is: whoever changes the one changes the other.

**How long a copy stays in the L2 cache.** A step's keys and values are far more than the cache holds and are read once.
Kept as long as anything else, they drive out what the next kernel needs: the rows that 64 programs multiply with, block
tables, work items. So copies of theirs by the tensor memory accelerator are marked to be evicted first, and those of
rows that many programs read to be evicted last. A mark is for all copies behind it up to the next one, since one call
may be several copies; so a kernel that marks one marks all.

**Programs in pairs.** Two programs that are side by side in the grid and read the same weights run at the same time on
multiprocessors that are side by side too, as a cluster of two. They share no memory; what one asks the L2 cache for,
the other does just then.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_POLICY = re.compile(r"// asyncengine: copies from here on: (\w+)")
_POLICIES = ("evict_first", "evict_last")
_COPY = re.compile(
    r"(?P<before>\s*(?:@%p\d+ )?cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global\.mbarrier::complete_tx::bytes)"
    r"(?P<operands> [^;]*);"
)
_IN_PAIRS = "// asyncengine: in pairs"
_THREADS = re.compile(r"\.reqntid \d+(, \d+)*")


def _mark(comment: str) -> str:
    return f"mov.b32 $0, 0; {comment}"


EVICT_FIRST, EVICT_LAST = (_mark(f"// asyncengine: copies from here on: {policy}") for policy in _POLICIES)
NO_POLICY = _mark("// asyncengine: copies from here on: no_policy")
"""Which is not the same as a policy of evict_normal: that costs 4% of a step."""
_PAIRS = gl.constexpr(_mark(_IN_PAIRS))


@gluon.jit
def mark_copies(POLICY: gl.constexpr):
    """When what is copied from here on makes room in the cache: before anything else, after it, or as usual."""
    gl.inline_asm_elementwise(POLICY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def run_in_pairs():
    """Of a grid whose first size is even."""
    gl.inline_asm_elementwise(_PAIRS, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


def with_marks(ptx: str) -> str:
    """``ptx`` with what its marks say."""
    lines, policy, in_pairs = [], "", _IN_PAIRS in ptx
    for line in ptx.split("\n"):
        if mark := _POLICY.search(line):
            policy = mark[1]
        elif policy in _POLICIES and (copy := _COPY.fullmatch(line)):
            create = f"createpolicy.fractional.L2::{policy}.b64 policy, 1.0;"
            line = f"{{ .reg .b64 policy; {create}{copy['before']}.L2::cache_hint{copy['operands']}, policy; }}"
        elif in_pairs and _THREADS.fullmatch(line):
            line += "\n.explicitcluster\n.reqnctapercluster 2, 1, 1"
        lines.append(line)
    return "\n".join(lines)


def _install() -> None:
    runtime: Any = knobs.runtime
    others: Callable[..., Any] | None = getattr(runtime, "add_stages_inspection_hook", None)

    def add_marks(backend: Any = None, stages: Any = None, *compilation: Any, **more: Any) -> Any:
        result = others(backend, stages, *compilation, **more) if others else ("", "")
        if stages is None:  # later versions ask for what belongs into a cache key
            return result
        if make_ptx := stages.get("ptx"):
            stages["ptx"] = lambda source, metadata: with_marks(make_ptx(source, metadata))
        return result

    runtime.add_stages_inspection_hook = add_marks


_install()
