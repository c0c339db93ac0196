"""Kernels that can be compiled without being launched, by many threads at once.

A step has some fifty of them, of a second each. Triton compiles outside of the interpreter lock for the most part.
"""
# mypy: disable-error-code="import-untyped, no-untyped-call"

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton

_thread = threading.local()


class Kernel:
    """A jitted function. In a thread that is ``compiling`` a launch compiles it and does no more."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.jit = triton.jit(function, **options)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        seen: _Seen | None = getattr(_thread, "seen", None)
        return self.jit[grid] if seen is None else partial(self._compile, grid, seen)

    def _compile(self, grid: Any, seen: _Seen, *args: Any, **constants: Any) -> None:
        if seen.add((self, tuple(map(_kind, args)), tuple(sorted(constants.items(), key=lambda item: item[0])))):
            self.jit.warmup(*args, grid=grid, **constants)


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Kernel]:
    """triton.jit with its options, for what is launched."""
    return lambda function: Kernel(function, **options)


class _Seen:
    """What some thread compiles or has compiled."""

    def __init__(self) -> None:
        self._keys: set[Any] = set()
        self._lock = threading.Lock()

    def add(self, key: Any) -> bool:
        with self._lock:
            new = key not in self._keys
            self._keys.add(key)
            return new


def _kind(argument: Any) -> Any:
    """What Triton may specialize a kernel for."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument.bit_length() > 31
    return type(argument)


def compile_all(enqueue: Iterable[Callable[[], None]], threads: int) -> None:
    """Compile what these functions launch. They run on threads and streams of their own; what else they do, they do."""
    seen = _Seen()

    def run(function: Callable[[], None]) -> None:
        with _compiling(seen), torch.cuda.stream(torch.cuda.Stream()):
            function()

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(run, enqueue):
            pass
    torch.cuda.synchronize()


@contextmanager
def _compiling(seen: _Seen) -> Iterator[None]:
    _thread.seen = seen
    try:
        yield
    finally:
        _thread.seen = None
