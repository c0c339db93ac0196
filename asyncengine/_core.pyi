"""The native core. Addresses are ``Tensor.data_ptr()``; strides count elements.

Calls that compute release the GIL.
"""

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# ---- CPU kernels ----

class Dtype(enum.Enum):
    float32 = 0
    bfloat16 = 1

class Activation(enum.Enum):
    silu_mul = 0
    gelu_tanh = 1
    gelu = 2

class StepBatch:
    """A step as the forward sees it. The arrays are views that the next step overwrites."""

    def __init__(
        self,
        input_ids: Sequence[int],
        positions: Sequence[int],
        slot_mapping: Sequence[int],
        query_start: Sequence[int],
        context_len: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        sample_index: Sequence[int],
        sample_position: Sequence[int] = ...,
        sampling: Sequence[tuple[float, int, float, float, int]] = ...,
    ) -> None:
        """For tests: owns copies. sampling: (temperature, top_k, top_p, min_p, seed) per sampled row.

        Raises ValueError where lengths contradict each other.
        """
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def input_ids(self) -> npt.NDArray[np.int64]: ...
    @property
    def positions(self) -> npt.NDArray[np.int64]: ...
    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]: ...
    @property
    def query_start(self) -> npt.NDArray[np.int32]: ...
    @property
    def context_len(self) -> npt.NDArray[np.int32]: ...
    @property
    def sample_index(self) -> npt.NDArray[np.int64]: ...
    def block_table(self, row: int, num_blocks: int) -> npt.NDArray[np.int32]:
        """The first num_blocks block ids of a row; how many there are, the caller knows from its length."""

class CpuLinear:
    """Addresses of weights [rows[i], k] and biases [rows[i]] (0: none); the caller keeps the memory."""

    def __init__(
        self, weights: Sequence[int], rows: Sequence[int], biases: Sequence[int], k: int, dtype: Dtype
    ) -> None: ...

class PagedKV:
    """A layer's cache: k [num_blocks, Hk, head_dim, block_size], v [num_blocks, Hk, block_size, head_dim]."""

    def __init__(self, k: int, v: int, num_kv_heads: int, head_dim: int, block_size: int) -> None: ...

class CpuKernels:
    """Kernels over num_threads threads; isa is "auto" or one of available_isas(). One caller at a time."""

    def __init__(self, num_threads: int, isa: str = "auto") -> None: ...
    @staticmethod
    def available_isas() -> list[str]: ...
    @property
    def isa(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    def linear(
        self, weights: CpuLinear, x: int, x_stride: int, rows: int, y: int, y_float32: bool, /
    ) -> None: ...
    def norm(
        self,
        dtype: Dtype,
        x: int,
        x_stride: int,
        residual: int,
        weight: int,
        bias: int,
        y: int,
        y_stride: int,
        tokens: int,
        heads: int,
        width: int,
        eps: float,
        /,
    ) -> None: ...
    def activation(
        self, dtype: Dtype, kind: Activation, x: int, y: int, rows: int, width: int, /
    ) -> None: ...
    def rotary(
        self,
        dtype: Dtype,
        x: int,
        token_stride: int,
        tokens: int,
        heads: int,
        head_dim: int,
        cos_sin: int,
        positions: int,
        /,
    ) -> None: ...
    def store_kv(
        self, dtype: Dtype, k: int, k_stride: int, v: int, v_stride: int, cache: PagedKV, batch: StepBatch, /
    ) -> None: ...
    def paged_attention(
        self,
        dtype: Dtype,
        q: int,
        q_stride: int,
        tokens: int,
        num_q_heads: int,
        out: int,
        cache: PagedKV,
        batch: StepBatch,
        scale: float,
        window: int,
        /,
    ) -> None: ...
    def sample(self, logits: int, vocab: int, batch: StepBatch, tokens: int, /) -> None: ...
