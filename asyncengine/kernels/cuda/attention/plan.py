"""The value that says how a kind of layer attends in the steps of a bucket. choose.py makes it, kernels obey it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Kernel = Literal["few_keys", "paged", "paged_decode", "tma_decode", "tma_prefill"]
"""A file of this folder, which has a function ``run`` (see run.py)."""
Rows = Literal["one", "several", "any"]
"""Rows of a step by their tokens: those of one token, those of several, all of them."""
Source = Literal["table", "measured", "formula"]
"""Origin of a choice: a table that was measured before, a measurement at start-up, or a formula."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    float8_cache: bool = False
    """Keys and values are in float8 in the cache; otherwise they are in ``dtype``."""

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


class LayerKind(NamedTuple):
    """Layers that attend alike: one plan and one work list are for all of them."""

    shape: AttentionShape
    window: int = 0
    """window of ``AttentionLayer``; 0 is none"""
    softcap: float = 0.0
    """softcap of ``AttentionLayer``; 0 is none"""

    sinks: bool = False
    """A score of each head takes its part of the softmax: sinks of ``AttentionLayer``."""
    prepared: bool = False
    """A kernel of its own prepares the heads in every step: of layers that norm values, or that may share those of
    others."""

    @property
    def key(self) -> tuple[int, float, int, int]:
        """Key that tells the kinds of one model's layers apart: window, softcap, heads of keys and their size."""
        return self.window, self.softcap, self.shape.num_kv_heads, self.shape.head_dim


@dataclass(frozen=True, slots=True)
class Tile:
    """Layout of one variant of an attention kernel."""

    rows: int
    """packed (token, head of the group) rows of a dot: a power of two, 16 at least; 1 where there are no dots"""
    keys: int
    """KV tokens of one turn of the loop: a power of two"""
    warps: int
    stages: int
    programs_per_sm: int

    def count_teams(self, shape: AttentionShape, sms: int) -> int:
        """Teams whose programs, one for each KV head, have room at once on so many multiprocessors."""
        return max(1, self.programs_per_sm * sms // shape.num_kv_heads)


class Cut(NamedTuple):
    """Division of the keys of a step's rows among programs by a work list (see work/lists.py)."""

    kind: Literal["line", "late", "apart", "fixed"]
    """along the line, along the line with late teams behind it, each row apart, or in splits of fixed length"""
    tokens: int = 0
    """apart: of the longest row that is not cut; fixed: of a split"""


class Launch(NamedTuple):
    """One kernel, and the rows whose attention it computes."""

    kernel: Kernel
    tile: Tile
    rows: Rows
    stored: bool
    """Another kernel has normed and rotated the heads and stored keys and values before. Otherwise this one does."""
    pieces: int = 1
    """most programs of few_keys that share a row's query head; a power of two"""
    beside: bool = False
    """true for tma_prefill if the kernel before is tma_decode, beside which it runs"""

    def __str__(self) -> str:
        tile = self.tile
        words = [f"{tile.rows} x {tile.keys}", f"{tile.warps} warps", f"{tile.stages} stages"]
        if self.kernel == "few_keys":
            words[0], words[2] = f"{tile.keys} keys", f"{self.pieces} pieces"
        return f"{self.kernel} [{', '.join(words)}] for {_ROWS[self.rows]}"


_ROWS = {"one": "rows of one token", "several": "rows of several tokens", "any": "all rows"}


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Plan of attention of a kind of layer in the steps of a bucket."""

    layer: LayerKind
    launches: tuple[Launch, ...]
    """kernels of the step, in order of launch"""
    cut: Cut | None
    """Cut of the work; None: the kernel needs no work list."""
    source: Source = "formula"

    @property
    def prepares(self) -> bool:
        """A kernel of its own norms and rotates the heads and stores keys and values, before all others."""
        return any(launch.stored for launch in self.launches)

    def tile(self, rows: Rows) -> Tile | None:
        """Return the tile of the launch for such rows; None if no launch has such rows."""
        return next((launch.tile for launch in self.launches if launch.rows == rows), None)

    def __str__(self) -> str:
        cut = "no work list" if self.cut is None else _CUTS[self.cut.kind].format(self.cut.tokens)
        prepared = ["rotary and store"] if self.prepares else []
        float8 = "; keys and values in float8" if self.layer.shape.float8_cache else ""
        return f"{'; '.join([*prepared, *map(str, self.launches)])}; {cut}{float8} ({self.source})"


_CUTS = {
    "line": "cut along the line",
    "late": "cut along the line, late teams",
    "apart": "cut apart beyond {} tokens",
    "fixed": "splits of {} tokens",
}
