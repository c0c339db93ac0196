"""Properties of a card: every limit that a choice of a kernel or of a tile depends on."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Gpu:
    """A card, or the interpreter in its place. Choices take one as a value, so that any card can be planned for."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    """bytes of shared memory that one program may have"""
    l2_bytes: int
    dependent_launch: bool = False
    """Kernels may start before the one ahead of them ends (see launch/programmatic.py)."""
    tma: bool = False
    """Kernels in Gluon run: the tensor memory accelerator copies their tiles."""

    @property
    def has_float8(self) -> bool:
        """Tensor cores multiply float8."""
        return self.capability >= (8, 9)

    @property
    def may_launch_dependently(self) -> bool:
        """The hardware can; whether the driver and Triton can, a trial shows."""
        return self.capability >= (9, 0)

    @property
    def may_use_tma(self) -> bool:
        """The hardware has Hopper's instructions, which the kernels in Gluon are written in; Blackwell has others."""
        return self.capability[0] == 9

    @property
    def tile_bytes(self) -> int:
        """Bytes of shared memory for the tiles of a program that has a multiprocessor to itself.

        A program keeps barriers and sums there, too: 12 KB are left for these.
        """
        return self.shared_bytes - 12_448

    @property
    def tile_bytes_of_two(self) -> int:
        """Bytes of shared memory for the tiles of each of two programs that share a multiprocessor."""
        return self.tile_bytes // 2

    @property
    def most_tile_bytes(self) -> int:
        """Bytes of shared memory for tiles beside next to nothing else."""
        return self.shared_bytes - 4_448


A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 << 10, 40 << 20)
L40S = Gpu("NVIDIA L40S", (8, 9), 142, 99 << 10, 96 << 20)
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 << 10, 50 << 20, dependent_launch=True, tma=True)
H200 = replace(H100, name="NVIDIA H200")
B200 = Gpu("NVIDIA B200", (10, 0), 148, 227 << 10, 126 << 20, dependent_launch=True)
KNOWN = (A100, L40S, H100, H200, B200)

INTERPRETER = Gpu("interpreter", (8, 9), 8, 227 << 10, 1 << 20)
"""Float8 as on Ada; of multiprocessors as many as a test can wait for."""


@functools.cache
def describe(device: torch.device) -> Gpu:
    """The card as the driver describes it. ``dependent_launch`` and ``tma`` are for whoever has tried them to say."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        properties.name,
        (properties.major, properties.minor),
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        properties.L2_cache_size,
    )
