"""DeviceSteps: a loaded model as steps that read and write device memory alone."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncengine import _core
from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.attention.few_keys import longest_context
from asyncengine.kernels.cuda.attention.work.lists import (
    AttentionShape,
    Cut,
    Tile,
    WorkList,
    choose_cut,
    choose_late,
    choose_mixed_tiles,
    choose_streamed_tile,
    multiprocessors,
)
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps
from asyncengine.kernels.cuda.sampling.sample import sample
from asyncengine.kernels.cuda.step.ingest import StepSource, copy_blocks, ingest, make_source
from asyncengine.kernels.cuda.step.tensors import DeviceStep, allocate_step
from asyncengine.runner.buckets import ANY_CONTEXT, Bucket, choose_buckets
from asyncengine.runner.memory import KVCache
from asyncengine.runner.model_runner import LoadedModel

_INVARIANT_SPLITS = 8
"""Pieces of the longest context in batch-invariant mode: more would take more memory, fewer leave the GPU idle."""

ARGMAX = _core.Need(0)
SAMPLING = _core.Need.temperature | _core.Need.filters
VARIANTS = (ARGMAX, SAMPLING)
"""Needs that steps have variants for, the cheapest first; the last serves those of all."""


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Where a captured step finds its StepInput and leaves its tokens."""

    staging: _core.Staging
    source: StepSource

    @classmethod
    def allocate(
        cls, staging: _core.Staging, device: torch.device
    ) -> StepBuffers:
        """Views of the staging rings, or what is copied to and from on the device: a buffer, of inputs also a ring."""
        words, ring = staging.input_stride // 4, staging.num_steps
        host_inputs = _view(staging.input, ring * staging.input_stride, torch.int32).view(ring, words)
        host_inputs.zero_()  # an empty step: what warm-up and capture run
        host_outputs = _view(staging.output, ring * staging.output_stride, torch.int64).view(ring, -1)
        if staging.mode == "mapped":
            return cls(staging, make_source(host_inputs, host_outputs, device, fetch=True))
        ahead = staging.mode == "ahead"
        inputs = torch.zeros(ring if ahead else 1, words, dtype=torch.int32, device=device)
        outputs = host_outputs if ahead else torch.zeros(1, staging.output_words, dtype=torch.int64, device=device)
        staging.set_device_buffers(inputs.data_ptr(), outputs.data_ptr())
        return cls(staging, make_source(inputs, outputs, device, fetch=False))


def _view(address: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
    """Host memory that somebody else owns, as a tensor."""
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=dtype)


def attention_shape(loaded: LoadedModel) -> AttentionShape:
    model = loaded.config
    return AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, loaded.dtype)


def _split_tokens(max_model_len: int) -> int:
    return max(1, -(-max_model_len // (1024 * _INVARIANT_SPLITS))) * 1024


def _may_stream(config: EngineConfig, ops: CudaOps) -> bool:
    """Whether Gluon may compute attention."""
    return ops.options.streamed and not config.batch_invariant


def _is_streamed(config: EngineConfig, loaded: LoadedModel, ops: CudaOps) -> bool:
    """Whether Gluon computes the attention of decode steps."""
    tile = choose_streamed_tile(attention_shape(loaded), config.block_size)
    return _may_stream(config, ops) and tile is not None


def step_buckets(config: EngineConfig, loaded: LoadedModel, ops: CudaOps) -> list[Bucket]:
    """The buckets of a model's steps: those of few keys are where decode_attention is the faster way.

    Where Gluon computes attention that is faster; of a lone row (a step of Qwen3 at 288 tokens 532 us instead of 577,
    of the 8B 3,755 instead of 3,812) only if query heads share keys (of GPT-2 199 us instead of 194). There the short
    contexts of many rows have buckets of their own too, without late lanes (see ``choose_late``).
    """
    shape, sms = attention_shape(loaded), multiprocessors(ops.device)
    streamed = _is_streamed(config, loaded, ops)

    def few_keys(tokens: int) -> int:
        return 0 if config.batch_invariant else longest_context(tokens, shape, sms)

    def short_context(rows: int) -> int:
        if streamed and (rows > 1 or shape.group > 1):
            return choose_late(rows, shape, config.block_size, sms) or 0
        return few_keys(rows)

    return choose_buckets(
        config.max_num_seqs, config.max_num_batched_tokens, loaded.max_model_len, short_context, few_keys
    )


class _StepWork:
    """The work lists of steps, by sliding window. Buckets of a kind share their memory."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, ops: CudaOps) -> None:
        shape, sms = attention_shape(loaded), multiprocessors(ops.device)
        windows = sorted(set(loaded.config.layer_windows))

        def tiles_for(window: int) -> tuple[Tile, Tile] | None:
            """Of steps with rows of several tokens; None is what a work list chooses."""
            return choose_mixed_tiles(shape, config.block_size, window) if _may_stream(config, ops) else None

        def allocate(
            tile: Tile | None = None, *, max_rows: int = config.max_num_seqs, **cut: Any
        ) -> dict[int, WorkList]:
            """With a tile for decode steps alone."""
            return {
                window: WorkList.allocate(
                    shape, max_rows=max_rows, max_tokens=config.max_num_batched_tokens,
                    max_context=loaded.max_model_len, device=ops.device, window=window,
                    tiles=(tile, None) if tile else tiles_for(window), **cut,
                )
                for window in windows
            }  # fmt: skip

        self._any = allocate(split_tokens=_split_tokens(loaded.max_model_len) if config.batch_invariant else 0)
        streamed = _is_streamed(config, loaded, ops)

        def choose(rows: int, context: int) -> Cut | None:
            return choose_cut(rows, context, shape, config.block_size, sms) if streamed else None

        self._choose = choose
        counts = range(1, config.max_num_seqs + 1)
        self._decode: dict[Cut | None, dict[int, WorkList]] = {}
        self._decode[None] = {window: work.decode_only for window, work in self._any.items()}
        for cut in {choose(rows, context) for rows in counts for context in (0, ANY_CONTEXT)}:
            if cut:
                most = cut.tile.count_lanes(shape, sms) if cut.whole_tokens else config.max_num_seqs
                self._decode[cut] = allocate(
                    cut.tile, max_rows=min(most, config.max_num_seqs), whole_tokens=cut.whole_tokens, late=cut.late
                )

    def of(self, bucket: Bucket) -> dict[int, WorkList]:
        if not bucket.single_token_rows:
            return self._any
        return self._decode[self._choose(bucket.max_rows, bucket.max_context)]

    def has_few_keys(self, bucket: Bucket) -> bool:
        """Whether decode_attention computes its steps. Those that are only too short for late lanes have a list."""
        cut = self._choose(bucket.max_rows, ANY_CONTEXT) if bucket.single_token_rows else None
        return bucket.max_context < ANY_CONTEXT and not (cut and cut.late)


class DeviceSteps:
    """Everything that a step touches on the device, allocated once. ``run`` enqueues one step and waits for nothing."""

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, ops: CudaOps, buffers: StepBuffers, cache: KVCache
    ) -> None:
        self._block_size = config.block_size
        self._pdl = ops.options.pdl
        self._model = loaded.model
        self._buffers = buffers
        self.cache = cache
        self._step = allocate_step(
            config.max_num_seqs,
            -(-loaded.max_model_len // config.block_size),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            ops.device,
            buffers.staging.records_begin,
        )
        self._work = _StepWork(config, loaded, ops)
        self._planes = cache.memory.flatten(0, 1)

    @property
    def source(self) -> StepSource:
        """Where steps find their StepInput and leave their tokens."""
        return self._buffers.source

    @property
    def state(self) -> DeviceStep:
        """The largest bucket's tensors."""
        return self._step

    def run(self, bucket: Bucket, needs: int) -> None:
        """Enqueue the next step, which must fit ``bucket`` and whose rows may need no more than ``needs``."""
        source = self._buffers.source
        step = self._step.bucket(bucket.max_rows, bucket.max_tokens)
        batch = CudaBatch(step, self._work.of(bucket), self._work.has_few_keys(bucket), needs)
        with torch.inference_mode():
            ingest(source, step, self._block_size, pdl=self._pdl, needs=needs)
            batch.build_work(pdl=self._pdl)
            logits = self._model.forward(batch, self.cache.layers)
            assert logits is not None
            sample(logits, step, source.header, source.outputs, needs=needs, pdl=self._pdl)

    def copy_blocks(self) -> None:
        """Enqueue the block copies of the next step, which comes after them."""
        copy_blocks(self._buffers.source, self._planes)

    def restart(self, next_step: int = 1) -> None:
        """Forget the steps run so far: the next one is number ``next_step``, the first unless it says otherwise."""
        self._buffers.source.restart(next_step)
