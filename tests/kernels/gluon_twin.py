"""Kernels in Gluon, executed in torch: a program after another, without layouts, which no value depends on.

Triton's interpreter does not run Gluon. This has the operations that the kernels of linear/direct.py,
experts/direct.py, recurrent/delta_step.py and attention/latent_decode.py take.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from triton.experimental.gluon._runtime import GluonJITFunction

from tests.kernels.ptx import WORD, execute


class Value(torch.Tensor):
    """A tensor of a kernel."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]

    @property
    def shape(self) -> list[int]:  # type: ignore[override]
        return list(super().shape)

    def to(self, dtype: torch.dtype, *, bitcast: bool = False) -> Value:  # type: ignore[override]
        plain = self.as_subclass(torch.Tensor)
        return (plain.contiguous().view(dtype) if bitcast else plain.to(dtype)).as_subclass(Value)


class Pointer:
    """Places in the memory of a tensor."""

    def __init__(self, memory: torch.Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.at + more)

    def places(self, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Places, and whether each is meant; IndexError if one that is meant lies outside."""
        at = torch.as_tensor(self.at).as_subclass(torch.Tensor)
        if mask is None:
            return at, None
        at, mask = torch.broadcast_tensors(at, mask.as_subclass(torch.Tensor))
        return torch.where(mask, at, 0), mask


class Shared:
    """A tile in shared memory."""

    def __init__(self, tile: torch.Tensor) -> None:
        self.tile, self.dtype, self.shape = tile, tile.dtype, list(tile.shape)

    def index(self, row: int) -> Shared:
        return Shared(self.tile[int(row)])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.tile.permute(tuple(order)))

    def load(self, layout: None) -> Value:
        return self.tile.clone().as_subclass(Value)

    def store(self, value: torch.Tensor) -> None:
        assert value.shape == self.shape
        self.tile.copy_(value)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: None) -> Shared:
        return Shared(self.tile.view(dtype).view(shape))


class AsyncCopy:
    """Stands for ``async_copy``: each copy is over at once."""

    @staticmethod
    def async_copy_global_to_shared(shared: Shared, pointer: Pointer, mask: torch.Tensor | None = None) -> None:
        shared.store(Language.load(pointer, mask, float("nan")))

    @staticmethod
    def commit_group() -> None: ...

    @staticmethod
    def wait_group(count: int) -> None: ...


class Language:
    """Stands for ``triton.experimental.gluon.language`` in a program."""

    float16, bfloat16, float32 = torch.float16, torch.bfloat16, torch.float32
    int16, int32, int64 = torch.int16, torch.int32, torch.int64
    constexpr = staticmethod(lambda value: value)
    static_range = staticmethod(range)
    exp, log, abs, rsqrt = map(staticmethod, (torch.exp, torch.log, torch.abs, torch.rsqrt))
    exp2, NVMMASharedLayout = staticmethod(torch.exp2), SimpleNamespace(get_default_for=lambda *_: None)
    thread_barrier = staticmethod(lambda: None)

    def __init__(self, program: Sequence[int], grid: Sequence[int]) -> None:
        self.program_id, self.num_programs = program.__getitem__, grid.__getitem__
        for kind in ("Blocked", "Slice", "DotOperand", "NVMMADistributed", "DistributedLinear", "SwizzledShared"):
            setattr(self, f"{kind}Layout", lambda *_: None)

    @staticmethod
    def arange(first: int, last: int, layout: None) -> Value:
        return torch.arange(first, last).as_subclass(Value)

    @staticmethod
    def full(shape: list[int], value: float, dtype: torch.dtype, layout: None) -> Value:
        return torch.full(shape, value, dtype=dtype).as_subclass(Value)

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: None) -> Value:
        return self.full(shape, 0, dtype, layout)

    @staticmethod
    def zeros_like(t: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(t)

    @staticmethod
    def static_assert(holds: bool) -> None:
        assert holds

    @staticmethod
    def where(condition: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
        return torch.where(torch.as_tensor(condition).as_subclass(torch.Tensor), a, b)

    @staticmethod
    def minimum(a: Any, b: Any) -> torch.Tensor:
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))

    @staticmethod
    def maximum(a: Any, b: Any) -> torch.Tensor:
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))

    @staticmethod
    def allocate_shared_memory(
        dtype: torch.dtype, shape: list[int], layout: None, value: torch.Tensor | None = None
    ) -> Shared:
        shared = Shared(torch.full(shape, float("nan"), dtype=dtype))
        if value is not None:
            shared.store(value)
        return shared

    @staticmethod
    def load(pointer: Pointer, mask: torch.Tensor | None = None, other: float = 0) -> Value:
        at, meant = pointer.places(mask)
        loaded = pointer.memory[at]
        return (loaded if meant is None else torch.where(meant, loaded, other)).as_subclass(Value)

    @staticmethod
    def store(pointer: Pointer, value: torch.Tensor, mask: torch.Tensor, cache_modifier: str = "") -> None:
        at, meant = pointer.places(mask)
        assert meant is not None
        pointer.memory[at[meant]] = value.as_subclass(torch.Tensor)[meant]

    @staticmethod
    def join(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.stack((a, b), -1)

    @staticmethod
    def split(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert t.shape[-1] == 2
        return t[..., 0], t[..., 1]

    @staticmethod
    def reshape(t: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return t.reshape(tuple(shape))

    @staticmethod
    def permute(t: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        return t.permute(tuple(order))

    @staticmethod
    def convert_layout(t: torch.Tensor, layout: None) -> torch.Tensor:
        return t

    @staticmethod
    def sum(t: torch.Tensor, dim: int) -> torch.Tensor:
        return t.sum(dim)

    @staticmethod
    def max(t: torch.Tensor, dim: int) -> torch.Tensor:
        return t.amax(dim)

    @staticmethod
    def inline_asm_elementwise(
        text: Any, constraints: str, args: list[torch.Tensor], **options: Any
    ) -> tuple[Value, ...]:
        """The halves that instructions make of words of 32 bits."""
        count, shape = constraints.count("="), args[0].shape
        words = [word.as_subclass(torch.Tensor).expand(shape).flatten().long() & WORD for word in args]
        made = execute(getattr(text, "value", text), {f"${count + i}": word for i, word in enumerate(words)})
        results = (made[f"${i}"].to(torch.uint16).view(torch.int16).view(shape) for i in range(count))
        return tuple(result.as_subclass(Value) for result in results)


def mma(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    """acc + a b, exact as far as float64 is, in float32."""
    return (acc.double() + a.double() @ b.double()).float()


def mma_of_shared(a: Shared, b: Shared, acc: torch.Tensor, *, use_acc: bool = True, is_async: bool) -> torch.Tensor:
    """``mma`` of tiles in shared memory."""
    return mma(a.tile, b.tile, acc if use_acc else torch.zeros_like(acc))


def run_in_torch(patch: pytest.MonkeyPatch, name: str, *modules: ModuleType, **others: Callable[..., Any]) -> None:
    """Launches of the kernel ``name`` of the first of the modules run here, until the patch is undone.

    ``others`` stand for functions of the modules that have these names.
    """
    kernel = inspect.unwrap(getattr(modules[0], name).fn)
    for module in modules:
        for word, value in list(vars(module).items()):
            if isinstance(value, GluonJITFunction):
                patch.setattr(module, word, others.get(word, value.fn))
            elif word in others:
                patch.setattr(module, word, others[word])

    class Launcher:
        def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
            def launch(*args: Any, **constants: Any) -> None:
                pointers = [Pointer(_memory(a)) if isinstance(a, torch.Tensor) else a for a in args]
                known = inspect.signature(kernel).parameters
                constants = {word: value for word, value in constants.items() if word in known}
                for program in product(*map(range, grid)):
                    for module in modules:
                        patch.setattr(module, "gl", Language(program, grid))
                    kernel(*pointers, **constants)

            return launch

    patch.setattr(modules[0], name, Launcher())


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All elements from the tensor's first one to its last."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((length,), (1,))
