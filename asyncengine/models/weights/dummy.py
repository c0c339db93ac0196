"""Random weights, which stand in for a checkpoint."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncengine.errors import ConfigError
from asyncengine.kernels.weight import PackedWeight
from asyncengine.machine import total_memory
from asyncengine.models.weights.shard import WHOLE, Part

_CPU = torch.device("cpu")


class DummyWeights:
    """A TensorSource of random numbers: matrices normal(0, std), biases 0, norms 1.

    Matrices are cut from one pool of random numbers at random places, which takes an eighth of the time of
    drawing every element. The pool's size is prime, so that the rows of a matrix differ.
    """

    _POOL = 1_048_583

    def __init__(self, dtype: torch.dtype, std: float, seed: int, *, device: torch.device = _CPU) -> None:
        self.num_parameters = 0
        self.mapped_bytes = 0
        self.owned_bytes = 0
        self._room = total_memory() if device == _CPU else None
        self._generator = torch.Generator().manual_seed(seed)
        self._pool = torch.empty(self._POOL).normal_(0, std, generator=self._generator).to(device, dtype)
        on_gpu = device.type == "cuda"
        self._bytes = torch.Generator(device).manual_seed(seed) if on_gpu else self._generator
        """draws on the weights' own device"""

    rotates_neighbours = False

    def stored(self) -> None:
        """Random weights are drawn by shape."""
        return

    def __contains__(self, name: str) -> bool:
        """Random weights have every tensor that a model asks for."""
        return True

    def equal(self, name: str, other: str) -> bool:
        """A tied head is the embedding."""
        return True

    def get(self, name: str, *shape: int, part: Part = WHOLE) -> Tensor:
        if part.rows is not None:
            first, behind = part.rows
            shape, part = (behind - first, *shape[1:]), part._replace(rows=None)
        needed = self.owned_bytes + math.prod(shape) * self._pool.itemsize
        if self._room is not None and needed > self._room:
            raise ConfigError(f"the weights do not fit into memory: {needed:,} bytes of {self._room:,}, up to {name}")
        tensor = torch.empty(shape, dtype=self._pool.dtype, device=self._pool.device)
        if name.endswith(".bias"):
            tensor.zero_()
        elif len(shape) == 1:
            tensor.fill_(1)
        elif not tensor.is_meta:
            self._fill(tensor.view(-1))
        tensor = part.of(tensor).contiguous()
        self.num_parameters += math.prod(shape)
        self.owned_bytes += tensor.nbytes
        return tensor

    def get_transposed(self, name: str, *shape: int, part: Part = WHOLE) -> Tensor:
        """A transposed view of numbers that are drawn for the transpose of ``shape``."""
        axis = 1 - part.axis
        return self.get(name, *shape[::-1], part=part._replace(axis=axis)).T

    @property
    def dtype(self) -> torch.dtype:
        return self._pool.dtype

    def uint8(self, name: str, *shape: int) -> Tensor:
        """Random bytes of two numbers; scales that make weights of them like others."""
        device = self._pool.device
        if name.endswith("_scales"):
            return torch.full(shape, 120, dtype=torch.uint8, device=device)
        self.num_parameters += 2 * math.prod(shape)
        return torch.randint(256, shape, dtype=torch.uint8, device=device, generator=self._bytes)

    is_random = True

    def is_float(self, name: str) -> bool:
        """Every tensor may be taken for one of floats."""
        return True

    def sized(self, name: str) -> int | None:
        """Random tensors have any size."""
        return None

    def raw(
        self,
        name: str,
        *shapes: tuple[int, ...],
        kinds: tuple[torch.dtype, ...],
        parameters: int = 0,
        elements: bool = False,
    ) -> Tensor:
        """Random codes of the first shape and dtype; scales that make small weights of them."""
        shape, kind, device = shapes[0], kinds[0], self._pool.device
        self.num_parameters += parameters
        if kind.is_floating_point and kind.itemsize > 1:
            return torch.full(shape, 1e-3, dtype=kind, device=device)
        count = math.prod(shape) * kind.itemsize
        made = torch.randint(120, (count,), dtype=torch.uint8, device=device, generator=self._bytes)
        return made.view(kind).view(shape)

    def release(self, given: Tensor, owned: int) -> None:
        self.owned_bytes = owned

    def keep(self, weight: PackedWeight) -> PackedWeight:
        self.owned_bytes += weight.nbytes
        return weight

    def float32(self, name: str, count: int) -> Tensor:
        return self.get(name, count).float()

    def scales(self, name: str, count: int) -> Tensor | None:
        """Random weights have no scales."""
        return None

    def close(self) -> None:
        """There is nothing to close."""

    def finish(self) -> None:
        """There is nothing to finish."""

    def _fill(self, flat: Tensor) -> None:
        start = int(torch.randint(self._POOL, (1,), generator=self._generator))
        done = 0
        while done < len(flat):
            piece = self._pool[start : start + len(flat) - done]
            flat[done : done + len(piece)] = piece
            done += len(piece)
            start = 0
