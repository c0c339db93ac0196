"""Kernels that are compiled side by side, before a step launches them.

The steps of a new model have some seventy kernels. One after another, as launches ask for them, they take 17 s: Python,
LLVM, ptxas and, for what launches a kernel, a C compiler. While an engine starts, processes compile them (see
compile_processes.py); elsewhere threads do.
"""
# mypy: disable-error-code="import-untyped, no-untyped-call, misc"

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from threading import RLock
from types import ModuleType
from typing import Any, Self

import torch
import triton
from triton.runtime import build
from triton.runtime.jit import JITCallable, JITFunction

from asyncengine.kernels.cuda.launch.compile_processes import compile_kernel
from asyncengine.kernels.cuda.launch.programmatic import INTERPRETED

_dry: ContextVar[set[Any] | None] = ContextVar("asyncengine_dry_launches", default=None)
"""The launches of a dry run so far; none outside of one."""


_loading = RLock()


def _load_apart(load: Callable[[str, str], ModuleType], name: str, path: str) -> ModuleType:
    """Load the module with which Triton launches a kernel, as a module that does not change later.

    All launchers have one name, and many kernels share a file. CPython, when it loads a file once more, puts what is in
    it into whichever module of that name was loaded last: maybe the launcher of another kernel, that another thread has
    just been given.
    """
    module = ModuleType(name)
    with _loading:
        vars(module).update(vars(load(name, path)))
    return module


if hasattr(build, "_load_module_from_path"):
    build._load_module_from_path = partial(_load_apart, build._load_module_from_path)


class Kernel(JITFunction):
    """A jitted function that is launched from Python. In a dry run it is compiled, and not launched."""

    compile: Callable[..., Any]
    """Triton's, once there is a device."""

    @property
    def cache_key(self) -> str:
        """The same whatever was compiled before: Triton has it hold the constants of callees that have one already."""
        if self.hash is None:
            _hash_callees(self)
        return str(super().cache_key)

    def create_binder(self) -> Any:
        """Triton's, which also sets ``compile``."""
        binder = super().create_binder()
        self.compile = partial(compile_kernel, self.compile)
        return binder

    def run(self, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        launches = _dry.get()
        if launches is None:
            return super().run(*args, grid=grid, warmup=warmup, **constants)
        # Triton's own lookup of a kernel that is not there yet takes a millisecond, and most launches repeat.
        launch = (self, *map(_kind, args), *constants.items())
        if launch not in launches:
            launches.add(launch)
            super().run(*args, grid=grid, warmup=True, **constants)
        return None


def _hash_callees(function: JITCallable) -> None:
    for name in function.fn.__code__.co_names:  # of attributes too, such as tl.sum
        callee = function.__globals__.get(name)
        if isinstance(callee, JITCallable) and callee is not function and callee.hash is None:
            _hash_callees(callee)
            callee.cache_key  # noqa: B018 - reading it makes it


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Wrap a function that is launched, as ``triton.jit`` does, with its options. Functions that kernels call need no
    wrapper."""
    if function is None:
        return lambda function: kernel(function, **options)
    return triton.jit(function, **options) if INTERPRETED else Kernel(function, **options)


def _kind(argument: Any) -> Any:
    """Return the properties of an argument for which Triton may specialize a kernel, or more."""
    if hasattr(argument, "block_shape"):  # a descriptor of tiles
        return argument.base.dtype, *argument.block_shape
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument.bit_length() // 32
    return type(argument)


def compile_launches(enqueue: Iterable[Callable[[], None]], device: torch.device, threads: int) -> None:
    """Call these functions, compile the kernels that they would launch, and load them on ``device``.

    Nothing else that they do is held back: torch's own operations run, on memory that no kernel has written. A kernel
    that does not compile or load is passed over: its first launch tries again, and raises.
    """
    if not INTERPRETED:
        # In a context of its own: nothing of the dry run outlives it, whatever happens.
        copy_context().run(_run_dry, enqueue, device, threads)


def _run_dry(enqueue: Iterable[Callable[[], None]], device: torch.device, threads: int) -> None:
    _dry.set(set())
    loader = _Loader(ThreadPoolExecutor(threads, "compile", initializer=partial(_use, device)))
    with triton.AsyncCompileMode(loader, ignore_errors=True), loader:
        for function in enqueue:
            function()


def _use(device: torch.device) -> None:
    if device.type == "cuda" and device.index is not None:  # else the first one, as in any new thread
        torch.cuda.set_device(device)


class _Loader:
    """An executor for Triton, which also loads what it compiles. Leaving it waits for what was submitted."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._interrupted = False

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(self._compile_and_load, compile_kernel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._interrupted = error[0] is not None
        try:
            self._pool.shutdown()
        except BaseException:
            self._interrupted = True
            raise

    def _compile_and_load(self, compile_kernel: Callable[[], Any]) -> Any:
        if self._interrupted:  # Triton waits for ever for a future that the pool cancels
            raise CancelledError
        compiled = compile_kernel()
        compiled.run  # noqa: B018 - reading it makes the launcher and loads the kernel
        return compiled
