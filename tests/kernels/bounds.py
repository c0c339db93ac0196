"""Kernels in Triton's interpreter touch no byte beside the tensors that they were given.

A GPU reads beside a tensor without a fault as long as something lies there. Here each load, store and atomic operation
is compared with the storages of the launch's arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_EXCHANGES = frozenset(("sum_few_kernel", "sum_many_kernel", "gather_kernel", "share_kernel"))
"""Kernels that read addresses of other ranks' memory from a tensor."""


class Bounds:
    """The storages of a launch, as addresses."""

    def __init__(self) -> None:
        self._begins = self._ends = np.empty(0, np.uint64)
        self.kernel = ""

    def enter(self, kernel: str, arguments: Any) -> None:
        storages = {one.data_ptr(): one.nbytes() for one in _storages(arguments)}
        found = sorted((begin, begin + size) for begin, size in storages.items() if size)
        self._begins, self._ends = np.array(found, np.uint64).reshape(-1, 2).T
        self.kernel = kernel

    def check(self, pointers: np.ndarray[Any, Any], mask: np.ndarray[Any, Any] | None, size: int) -> None:
        """Raises IndexError if an element of ``size`` bytes lies beside all storages."""
        if self.kernel in _EXCHANGES:
            return
        live = pointers if mask is None or mask.all() else pointers[np.broadcast_to(mask, pointers.shape).astype(bool)]
        if not live.size:
            return
        first, last = live.min(), live.max()
        at = int(np.searchsorted(self._begins, first, "right")) - 1
        if at >= 0 and int(last) + size <= int(self._ends[at]):
            return
        of_each = np.searchsorted(self._begins, live, "right").astype(np.int64) - 1
        outside = (of_each < 0) | (live + np.uint64(size) > self._ends[of_each])
        if outside.any():
            count = f"{int(outside.sum())} of {live.size} elements"
            raise IndexError(f"{self.kernel} touches memory beside its tensors: {count}")


def _storages(arguments: Any) -> Any:
    for one in arguments:
        base = getattr(one, "base", one)
        if isinstance(base, torch.Tensor):
            yield base.untyped_storage()
        elif isinstance(base, tuple | list):
            yield from _storages(base)


def watch(interpreter: Any) -> None:
    """Check all memory operations of kernels from now on. To be called once."""
    bounds, executor, builder = Bounds(), interpreter.GridExecutor, interpreter.InterpreterBuilder
    init, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        on_host = init(self, args, kwargs)
        bounds.enter(self.fn.__name__, (*on_host[0], *on_host[1].values()))
        return on_host

    def size_of(pointers: Any) -> int:
        return max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        bounds.check(pointers.data, mask.data, size_of(pointers))
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        bounds.check(pointers.data, mask.data, size_of(pointers))
        return store(self, pointers, value, mask, *rest)

    def checked_rmw(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        bounds.check(pointers.data, mask.data, size_of(pointers))
        return rmw(self, op, pointers, value, mask, *rest)

    def checked_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        bounds.check(pointers.data, None, size_of(pointers))
        return cas(self, pointers, *rest)

    executor._init_args_hst = init_args
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_rmw, builder.create_atomic_cas = checked_rmw, checked_cas
