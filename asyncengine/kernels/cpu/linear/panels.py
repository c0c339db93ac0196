"""Panels: a layout of weights in which native kernels multiply faster than by rows."""

from __future__ import annotations

from torch import Tensor

from asyncengine._core import CpuKernels
from asyncengine.kernels.cpu.checks import native_dtype
from asyncengine.kernels.cpu.memory import HugePages


def is_transposed(weight: Tensor) -> bool:
    """Return whether a weight is the transposed view of a contiguous one, and not contiguous itself."""
    return not weight.is_contiguous() and weight.T.is_contiguous()


class Panels:
    """Copies weights into panels for the instruction set of ``kernels``."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._memory = HugePages()

    def copy(self, weight: Tensor) -> Tensor:
        """weight [N, K], contiguous or transposed, as [N / W, K / P, W, P], W the vector width, P elements in 4 bytes.

        Zeros fill N up to two panels and K to a multiple of panel_steps.
        """
        dtype, width, parts = native_dtype(weight.dtype), self._kernels.vector_width, 4 // weight.element_size()
        n, k = weight.shape
        filled_n, filled_k = n + -n % (2 * width), k + -k % self._kernels.panel_steps(dtype)
        panels = self._memory.empty((filled_n // width, filled_k // parts, width, parts), weight.dtype)
        self._kernels.pack_panels(dtype, weight.data_ptr(), is_transposed(weight), n, k, panels.data_ptr())
        return panels
