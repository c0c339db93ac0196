"""Memory of the CPU kernels: results and weights."""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections import defaultdict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Result:
    """Result of an operation, in memory that its next call writes again: steps of one size make no tensor.

    Decode steps are short, and what Python and torch do between two native calls is cold: the weights have just taken
    its place in the caches.
    """

    __slots__ = ("_memory", "address", "dtype", "rows", "tensor", "width")

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.width, self.dtype = width, dtype
        self._memory = torch.empty(0, width, dtype=dtype)
        self.resize(0)

    def resize(self, rows: int) -> None:
        """``tensor`` is another one then."""
        if rows > self._memory.shape[0]:
            self._memory = torch.empty(rows, self.width, dtype=self.dtype)
        self.rows, self.tensor = rows, self._memory[:rows]
        self.address = self.tensor.data_ptr()


class ResultPool:
    """Memory for results, used again once no tensor refers to it.

    The C library gives large blocks back to the system, and to touch a fresh page costs about 1 us: a tenth of
    a prefill.
    """

    _LARGE_BYTES = 1 << 20  # below, malloc does better

    def __init__(self) -> None:
        self._free: defaultdict[int, list[npt.NDArray[np.uint8]]] = defaultdict(list)

    def empty(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        if num_bytes < self._LARGE_BYTES:
            return torch.empty(shape, dtype=dtype)
        size = 1 << (num_bytes - 1).bit_length()
        free = self._free[size]
        memory = free.pop() if free else np.empty(size, np.uint8)
        owner = memory[:num_bytes]  # lives as long as the storage of the tensor
        weakref.finalize(owner, free.append, memory).atexit = False
        return torch.from_numpy(owner).view(dtype).view(shape)


class HugePages:
    """Memory for weights, in huge pages where the system gives them to those who ask.

    A product of few rows asks for its weights well before it needs them; in small pages the look-ups of their addresses
    bind it: 25 GB/s instead of 35. Matrices lie one after the other, so that few pages are cut.
    """

    _PAGE, _CHUNK = 2 << 20, 64 << 20
    _LINE = 64

    def __init__(self) -> None:
        self._free = torch.zeros(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory for a tensor. It is given back with the last tensor of its chunk."""
        num_bytes = math.prod(shape) * dtype.itemsize
        taken = num_bytes + -num_bytes % self._LINE
        if len(self._free) < taken:
            memory = mmap.mmap(-1, max(taken, self._CHUNK) + self._PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without them
                    memory.madvise(mmap.MADV_HUGEPAGE)
            chunk = torch.frombuffer(memory, dtype=torch.uint8)
            self._free = chunk[-chunk.data_ptr() % self._PAGE :]
        used, self._free = self._free[:num_bytes], self._free[taken:]
        return used.view(dtype).view(shape)
