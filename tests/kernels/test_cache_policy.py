"""Marks in PTX become policies of copies, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
from triton import knobs

from asyncengine.kernels.cuda.launch import cache_policy
from asyncengine.kernels.cuda.launch.cache_policy import EVICT_FIRST, EVICT_LAST, NO_POLICY, with_policies

COPY = (
    "\t@%p2 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[%r14], [%rd2, {%r15, %r3}], [%r13];"
)
OTHER = "\tld.global.b32 %r1, [%rd1];"


def mark(policy: str) -> str:
    return "\t" + policy.replace("$0", "%r7")


def policy(line: str) -> str | None:
    if line == COPY:
        return None
    created, hinted = line.split("createpolicy.fractional.L2::")[1].split("cp.async", 1)
    assert hinted == COPY.split("cp.async")[1].replace("bytes [", "bytes.L2::cache_hint [").replace(";", ", policy; }")
    return created.split(".")[0]


def test_a_mark_is_for_all_copies_up_to_the_next() -> None:
    first, last, none = map(mark, (EVICT_FIRST, EVICT_LAST, NO_POLICY))
    ptx = [COPY, first, OTHER, COPY, COPY, last, COPY, none, COPY, first, COPY]
    lines = with_policies("\n".join(ptx)).split("\n")
    assert [line for line in lines if "cp.async" not in line] == [line for line in ptx if line != COPY]
    policies = [policy(line) for line in lines if "cp.async" in line]
    assert policies == [None, "evict_first", "evict_first", "evict_last", None, "evict_first"]


def test_without_marks_nothing_changes() -> None:
    ptx = "\n".join([OTHER, COPY, "// a comment", OTHER, ""])
    assert with_policies(ptx) == ptx


def test_a_hook_that_was_there_is_called_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def other(*arguments: Any) -> tuple[str, str]:
        calls.append(arguments)
        return "key", "hash"

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", other)
    cache_policy._install()
    hook: Any = knobs.runtime.add_stages_inspection_hook
    stages: dict[str, Any] = {"ptx": lambda source, metadata: source + metadata, "cubin": len}
    assert hook("backend", stages, "options", "language", 90) == ("key", "hash")
    assert calls == [("backend", stages, "options", "language", 90)]
    assert stages["ptx"](mark(EVICT_FIRST) + "\n", COPY) == with_policies(mark(EVICT_FIRST) + "\n" + COPY)
    assert stages["cubin"] is len
    assert hook() == ("key", "hash")


def test_other_backends_have_no_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", None)
    cache_policy._install()
    stages = {"amdgcn": len}
    hook: Any = knobs.runtime.add_stages_inspection_hook
    hook("backend", stages, "options", "language", None)
    assert stages == {"amdgcn": len}
