"""DeviceSteps: a loaded model as steps that read and write device memory alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asyncengine._core import Need, Staging
from asyncengine.api.request import MAX_NAMED_TOKENS
from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.attention.choose import Limits, short_context, short_mixed_context
from asyncengine.kernels.cuda.attention.plan import AttentionShape, LayerKind
from asyncengine.kernels.cuda.attention.run import StepAttention
from asyncengine.kernels.cuda.comm.exchange import Exchange, connect_alone
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps
from asyncengine.kernels.cuda.rows.lanes import HostLanes, gather_results
from asyncengine.kernels.cuda.sampling.edits import edit, withhold
from asyncengine.kernels.cuda.sampling.features import allocate_features, follow
from asyncengine.kernels.cuda.sampling.logprobs import store_logprobs
from asyncengine.kernels.cuda.sampling.sample import sample
from asyncengine.kernels.cuda.sampling.vectors import add_up, store_vectors
from asyncengine.kernels.cuda.step.ingest import StepSource, copy_blocks, ingest, make_source
from asyncengine.kernels.cuda.step.states import copy_states
from asyncengine.kernels.cuda.step.tensors import DeviceStep, allocate_step
from asyncengine.kernels.ops import SharedSpec
from asyncengine.models.config import ModelConfig
from asyncengine.runner.loop_config import UPDATE_WORDS
from asyncengine.runner.state.memory import KVCache, host_view
from asyncengine.runner.steps.buckets import Bucket, choose_buckets
from asyncengine.runner.steps.model_runner import LoadedModel

ARGMAX = Need(0)
SAMPLING = Need.temperature | Need.filters
FEATURES = Need.penalties | Need.bias | Need.logprobs | Need.mask | Need.logits
EVERYTHING = SAMPLING | FEATURES | Need.vector | Need.mean
VARIANTS = (ARGMAX, SAMPLING, EVERYTHING)
"""Needs that steps have variants for, the cheapest first; the last serves those of all."""


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Buffers in which a captured step finds its StepInput and leaves its tokens."""

    staging: Staging
    source: StepSource
    board: Tensor
    """int32 [slots, words]: masks (csrc/core/mask_board.h); on the host, where the device can read that"""

    @classmethod
    def allocate(cls, staging: Staging, slots: int, device: torch.device, *, reads_only: bool = False) -> StepBuffers:
        """Views of the staging rings, or what is copied to and from on the device: a buffer, of inputs also a ring.

        ``reads_only``: results stay on the device, those of a rank beside the first.
        """
        words, ring = staging.input_stride // 4, staging.num_steps
        host_inputs = host_view(staging.input, ring * staging.input_stride, torch.int32).view(ring, words)
        host_inputs.zero_()  # an empty step: what warm-up and capture run
        host_outputs = host_view(staging.output, ring * staging.output_stride, torch.int64).view(ring, -1)
        if reads_only:
            host_outputs = torch.zeros_like(host_outputs, device=device)
        if staging.mode == "pageable":  # where the device cannot read the host's memory, no row has a mask
            board = torch.full((slots, staging.mask_stride), -1, dtype=torch.int32, device=device)
        else:
            board = host_view(staging.masks, slots * staging.mask_stride * 4, torch.int32).view(slots, -1)
        if staging.mode == "mapped":
            return cls(staging, make_source(host_inputs, host_outputs, device, fetch=True), board)
        ahead = staging.mode == "ahead"
        inputs = torch.zeros(ring if ahead else 1, words, dtype=torch.int32, device=device)
        outputs = host_outputs if ahead else torch.zeros(1, staging.output_words, dtype=torch.int64, device=device)
        staging.set_device_buffers(inputs.data_ptr(), outputs.data_ptr())
        return cls(staging, make_source(inputs, outputs, device, fetch=False), board)


def attention_kinds(model: ModelConfig, dtype: torch.dtype, *, float8_cache: bool = False) -> list[LayerKind]:
    """The kinds of layer that a model has, by their attention. A layer that shares keys and values is of the kind of
    the layer that stores them."""
    prepared = model.norms_values or any(isinstance(spec, SharedSpec) for spec in model.layer_caches)
    return [
        LayerKind(
            AttentionShape(model.num_heads, spec.num_heads, spec.head_dim, dtype, float8_cache),
            spec.window,
            model.score_softcap,
            model.attention_sinks,
            prepared,
        )
        for spec in sorted(set(model.kv_specs))
    ]


def attention_limits(config: EngineConfig, max_model_len: int) -> Limits:
    return Limits(
        config.max_num_seqs, config.max_num_batched_tokens, max_model_len, config.block_size, config.batch_invariant
    )


def step_buckets(config: EngineConfig, loaded: LoadedModel, ops: CudaOps, lanes: int = 0) -> list[Bucket]:
    """The buckets of a model's steps: short contexts have their own where another plan of attention is for them."""
    kinds = attention_kinds(loaded.config, loaded.dtype, float8_cache=config.float8_cache)
    limits = attention_limits(config, loaded.max_model_len)
    return choose_buckets(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        loaded.max_model_len,
        partial(short_context, layers=kinds, gpu=ops.gpu, limits=limits),
        partial(short_mixed_context, layers=kinds, gpu=ops.gpu, limits=limits),
        lanes,
    )


class DeviceSteps:
    """Everything that a step touches on the device, allocated once. ``run`` enqueues one step and waits for nothing."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        ops: CudaOps,
        buffers: StepBuffers,
        cache: KVCache,
        lanes: HostLanes | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """``lanes``: of buckets that have some. ``exchange``: with the other GPUs that hold the model, if there are
        some; steps wait for none before it is connected."""
        self.block_size = config.block_size
        self._pdl = ops.options.pdl
        self._max_logprobs = config.max_logprobs
        self._classifies = bool(loaded.config.labels)
        self._model = loaded.model
        self._vocab_size = loaded.config.vocab_size
        self._buffers = buffers
        self._lanes = lanes
        self.cache = cache
        self._step = allocate_step(
            config.max_num_seqs,
            -(-loaded.max_model_len // config.block_size),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            ops.device,
            buffers.staging.records_begin,
            lanes=(0, 0) if lanes is None else (len(lanes.staged) + 1, lanes.staged.shape[1]),
            window_groups=cache.window_groups,
        )
        self._exchange = exchange
        if exchange is not None:
            connect_alone(exchange, self._step.slots)
        self._features = allocate_features(
            config.max_num_seqs,
            UPDATE_WORDS + loaded.config.vocab_size // 32,
            loaded.max_model_len,
            loaded.config.vocab_size,
            ops.device,
        )
        self._sums = torch.zeros(config.max_num_seqs, loaded.config.hidden_size, device=ops.device)
        self._attention = StepAttention(
            attention_kinds(loaded.config, loaded.dtype, float8_cache=config.float8_cache),
            attention_limits(config, loaded.max_model_len),
            ops.gpu,
            ops.device,
        )

    @property
    def source(self) -> StepSource:
        """Source of StepInputs and target of tokens for the steps."""
        return self._buffers.source

    @property
    def state(self) -> DeviceStep:
        """The largest bucket's tensors."""
        return self._step

    def run(self, bucket: Bucket, needs: int) -> None:
        """Enqueue the next step, which must fit ``bucket`` and whose rows may need no more than ``needs``."""
        source = self._buffers.source
        # Prompts are scored in steps with log probabilities alone: the others compute no logits for that.
        one_sample = not needs & Need.logprobs
        lanes = self._lanes if bucket.lanes else None
        step = self._step.bucket(
            bucket.max_rows, bucket.max_tokens, one_sample=one_sample, with_lanes=lanes is not None
        )
        batch = CudaBatch(step, self._attention.of(bucket), needs, lanes, bucket.single_token_rows)
        with torch.inference_mode():
            ingest(source, step, self.block_size, pdl=self._pdl, needs=needs, several=not one_sample)
            if lanes is not None:
                gather_results(lanes, step, pdl=self._pdl)
            batch.attention.build(step, pdl=self._pdl)
            residual = self._model.run(batch, self.cache.layers)
            if self._exchange is not None and self._exchange.rank > 0:
                if self._model.splits_head and not self._classifies:
                    self._logits(residual, batch)
                residual.settle()  # the last sum, which all ranks make, may still be put off
                self._share(step)
                return
            if needs & Need.vector:
                self._store_vectors(residual, batch)
            if self._classifies:
                residual.settle()
                return
            logits = self._logits(residual, batch)
            if needs & FEATURES:
                self._sample_with_features(logits, step, needs)
            else:
                sample(logits, step, source.header, source.outputs, needs=needs, pdl=self._pdl)
            self._share(step)

    def _logits(self, residual: Any, batch: CudaBatch) -> Any:
        """The logits of all ranks on the first one."""
        logits = self._model.logits(residual, batch)
        assert logits is not None
        if self._exchange is None or not self._model.splits_head:
            return logits
        return self._exchange.gather(logits, self._vocab_size // self._exchange.ranks)

    def _share(self, step: DeviceStep) -> None:
        """Have the tokens that the first rank samples on all ranks; a classification model makes none."""
        if self._exchange is not None and not self._classifies:
            self._exchange.share(step.slots)

    def _store_vectors(self, residual: Any, batch: CudaBatch) -> None:
        """A classification model's vectors are its logits."""
        source, step, begin = self._buffers.source, batch.step, self._buffers.staging.records_begin
        if self._classifies:
            vectors, sums = self._model.logits(residual, batch), None
            assert vectors is not None
        else:
            vectors, sums = self._model.hidden(residual, batch), self._sums
            add_up(vectors, step, sums, pdl=self._pdl)
        store_vectors(vectors, step, source.header, source.outputs, begin, sums, pdl=self._pdl)

    def _sample_with_features(self, logits: Tensor, step: DeviceStep, needs: int) -> None:
        source, features, pdl = self._buffers.source, self._features, self._pdl
        follow(source, step, features, pdl=pdl)
        raw = edit(logits, self._buffers.board, step, features, pdl=pdl)
        sample(logits, step, source.header, source.outputs, needs=needs, pdl=pdl)
        begin = self._buffers.staging.records_begin
        store_logprobs(
            logits, raw, source, step, features, begin, most=self._max_logprobs, most_named=MAX_NAMED_TOKENS, pdl=pdl
        )
        withhold(logits, source, step, features, begin, pdl=pdl)  # which puts logits in the place of such records

    def copy_blocks(self) -> None:
        """Enqueue the copies of blocks and of states of the next step, which comes after them."""
        for planes in self.cache.groups:
            copy_blocks(self._buffers.source, planes)
        for states in self.cache.states:
            copy_states(self._buffers.source, states)

    def restart(self, next_step: int = 1) -> None:
        """Forget the steps run so far: the next one is number ``next_step``, the first unless it says otherwise."""
        self._buffers.source.restart(next_step)
