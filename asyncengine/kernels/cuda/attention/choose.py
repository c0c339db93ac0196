"""Which attention kernels run for a kind of layer in a bucket of steps, in which tiles, and how their work is cut.

``describe`` decides, once, and gives an ``AttentionPlan``; ``str`` of one is a line for people. Nothing else asks for a
card, a batch-invariant engine or a block size. The kernels:

  few_keys      rows that are few or short: no work list, a row's keys are dealt to a fixed count of programs
  tma_decode    rows of one token, on a card with Hopper's tensor memory accelerator
  tma_prefill   rows of several tokens, likewise
  paged_decode  rows of one token, in steps that have no others
  paged         everything else; with fixed splits, in which alone results do not depend on the batch, all rows

A mixed step has a kernel for its rows of one token and one for the others. Only few_keys, paged_decode and paged cap
scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from asyncengine.kernels.cuda.attention.plan import AttentionPlan, AttentionShape, Cut, Launch, LayerKind, Tile
from asyncengine.kernels.cuda.attention.work.items import ITEM_COST
from asyncengine.kernels.cuda.gpu import Gpu


class StepSize(Protocol):
    """The steps of a bucket; ``asyncengine.runner.buckets.Bucket`` is one."""

    @property
    def max_rows(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def single_token_rows(self) -> bool: ...
    @property
    def max_context(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine's steps never exceed, and how they are computed."""

    max_rows: int
    max_tokens: int
    max_context: int
    """of context and query of a row together"""
    block_size: int
    batch_invariant: bool = False


def describe(bucket: StepSize, layer: LayerKind, gpu: Gpu, limits: Limits) -> AttentionPlan:
    """The plan for such layers in the steps of ``bucket`` on ``gpu``."""
    raise NotImplementedError
