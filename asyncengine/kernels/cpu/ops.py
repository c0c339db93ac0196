"""CpuOps: the native CPU kernels over torch tensors. Implements ``asyncengine.kernels.ops.Ops``.

Every result is bit for bit the same however rows are batched, chunked or threaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from asyncengine._core import ActivationFunction, CpuExperts, CpuKernels, CpuNorm, Dtype, PagedKV, StepBatch
from asyncengine.kernels.cpu.base import PrefillAttention, Residual
from asyncengine.kernels.cpu.checks import check, check_heads, check_rows, native_dtype
from asyncengine.kernels.cpu.linear.formats.base import Native
from asyncengine.kernels.cpu.linear.formats.dense import Dense
from asyncengine.kernels.cpu.linear.formats.registry import format_of
from asyncengine.kernels.cpu.linear.handle import CpuLinearHandle, NativeExperts, UnpackedHandle
from asyncengine.kernels.cpu.linear.panels import Panels
from asyncengine.kernels.cpu.memory import Result, ResultPool
from asyncengine.kernels.cpu.mixers import MixerOps
from asyncengine.kernels.float8 import FLOAT8
from asyncengine.kernels.ops import (
    Activation,
    AttentionCall,
    AttentionLayer,
    Experts,
    LayerKVCache,
    Norm,
    Routing,
    is_gated,
)
from asyncengine.kernels.weight import BLOCKS, PackedWeight

# The function, and whether it is gated.
_ACTIVATIONS: dict[Activation, tuple[ActivationFunction, bool]] = {
    name: (ActivationFunction.__members__[name.removesuffix("_mul")], is_gated(name)) for name in get_args(Activation)
}


@dataclass(slots=True)
class _Cache:
    """The KV cache of a layer, and the attention that reads it."""

    k: weakref.ref[Tensor]
    v: weakref.ref[Tensor]
    scales: Tensor | None
    native: PagedKV
    dtype: torch.dtype
    """dtype of heads; a cache in float8 has that of the first heads that attended"""
    native_dtype: Dtype
    num_heads: int
    head_dim: int
    layer: AttentionLayer | None = None  # the last one, checked then, and what belongs to it
    heads_width: int = 0
    attended: Result | None = None


class CpuOps(MixerOps[CpuLinearHandle | UnpackedHandle]):
    """One thread pool and its scratch memory; not for two threads at the same time.

    Tensors are float32 or bfloat16, all of one call in the same dtype, their last axis contiguous.
    A tensor of another dtype, shape or layout raises ValueError.
    """

    def __init__(
        self,
        num_threads: int,
        isa: str = "auto",
        *,
        prefill_attention: PrefillAttention = "native",
        fast_prefill: bool = True,
    ) -> None:
        super().__init__(prefill_attention, fast_prefill=fast_prefill)
        self._native = CpuKernels(num_threads, isa)
        self._caches: dict[int, _Cache] = {}  # by the id of the keys
        self._mixers = {}
        self._results = ResultPool()
        self._shared: dict[tuple[str, int, torch.dtype], Result] = {}
        # The results that a model received last and hands back next, and the parts of its residual: they need no
        # checks.
        self._last = self._embedded = self._added = Result(0, torch.float32)
        self._panels = Panels(self._native)

    @property
    def native(self) -> CpuKernels:
        """The kernels themselves; the step loop samples with them."""
        return self._native

    @property
    def isa(self) -> str:
        """Name of the instruction set in use."""
        return self._native.isa

    @property
    def num_threads(self) -> int:
        return self._native.num_threads

    def make_linear(
        self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]
    ) -> CpuLinearHandle | UnpackedHandle:
        """A handle for weights [N_i, K] and biases [N_i], in any format of linear/formats."""
        if len(biases) != len(weights):
            raise ValueError(f"{len(weights)} weights, but {len(biases)} biases")
        form = format_of(weights)
        packed = form.pack(weights, biases, self._panels, rearrange=False)
        return UnpackedHandle(form, weights, biases) if packed is None else self._handle(weights, packed)

    def make_embedding(
        self, table: PackedWeight, *, tied: bool, copy: bool = False
    ) -> CpuLinearHandle | UnpackedHandle:
        """A handle for a dense table, or for one in blocks."""
        if table.format == BLOCKS:
            return self.make_head(table)
        return self._handle([table], Dense().pack([table], [None], self._panels, rearrange=tied and copy))

    def make_experts(
        self,
        up: Sequence[Sequence[PackedWeight]],
        down: Sequence[PackedWeight],
        activation: Activation,
        up_biases: Sequence[Sequence[Tensor]] | None = None,
        down_biases: Sequence[Tensor] | None = None,
    ) -> Experts[CpuLinearHandle | UnpackedHandle]:
        made = super().make_experts(up, down, activation, up_biases, down_biases)
        if any(weight.format == BLOCKS for weight in (*up[0], down[0])):
            return made
        first, second = ([h.native for h in side if isinstance(h, CpuLinearHandle)] for side in (made.up, made.down))
        if len(first) < made.count or len(second) < made.count:
            return made
        native = CpuExperts(first, second, *_ACTIVATIONS[activation])
        return NativeExperts(made.up, made.down, activation, made.count, native, made.down[0].out_features)

    def experts(
        self,
        x: Tensor,
        routing: Routing,
        handle: Experts[CpuLinearHandle | UnpackedHandle],
        batch: StepBatch,
    ) -> Tensor:
        """Native kernels read the weights of the experts that are hit, once."""
        if not isinstance(handle, NativeExperts):
            return super().experts(x, routing, handle, batch)
        up = handle.up[0]
        assert isinstance(up, CpuLinearHandle)
        check_rows(x, up.dtype, up.in_features)
        ids, weights = routing.ids.to(torch.int64).contiguous(), routing.weights.float().contiguous()
        rows, top_k = ids.shape
        if rows != x.shape[0] or weights.shape != ids.shape:
            raise ValueError(f"routing {list(ids.shape)} and {list(weights.shape)} does not fit x {list(x.shape)}")
        y = self._results.empty((rows, handle.out_features), x.dtype)
        self._native.experts(
            handle.native, x.data_ptr(), x.stride(0), rows, ids.data_ptr(), weights.data_ptr(), top_k, y.data_ptr()
        )
        return y

    def _handle(self, weights: Sequence[PackedWeight], packed: Native) -> CpuLinearHandle:
        rows, (native, tensors, dtype) = sum(weight.out_features for weight in weights), packed
        product, added = (self._result(name, rows, dtype) for name in ("product", "added"))
        return CpuLinearHandle(native, weights[0].in_features, rows, dtype, tensors, product, added)

    def _result(self, name: str, width: int, dtype: torch.dtype) -> Result:
        """The one of that name, for all layers."""
        key = (name, width, dtype)
        found = self._shared.get(key)
        if found is None:
            found = self._shared[key] = Result(width, dtype)
        return found

    def embed(
        self,
        batch: StepBatch,
        embedding: CpuLinearHandle | UnpackedHandle,
        position_table: Tensor | None = None,
        scale: float = 1.0,
    ) -> Residual:
        if isinstance(embedding, UnpackedHandle):
            if position_table is not None:
                raise ValueError("a table of positions goes with a dense embedding")
            table = embedding.weights[0]
            found = embedding.form.rows(table, torch.from_numpy(batch.input_ids))
            return Residual((found * scale).to(table.inputs or torch.float32))
        if position_table is not embedding.position_table and position_table is not None:
            shape = (position_table.shape[0], embedding.in_features)
            check(position_table, embedding.dtype, shape, "position_table")
            embedding.position_table = position_table
        positions = 0 if position_table is None else position_table.data_ptr()
        result, rows = self._result("residual", embedding.in_features, embedding.dtype), batch.num_tokens
        if result.rows != rows:
            result.resize(rows)
        self._native.embed(embedding.native, positions, batch, result.address, scale)
        self._embedded = result
        return Residual(result.tensor)

    def multiply(
        self,
        x: Tensor,
        handle: CpuLinearHandle | UnpackedHandle,
        batch: StepBatch,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x [M, K] (rows may be strided) -> [M, ΣN_i] in x's dtype, or in float32 if out_dtype says so."""
        out_dtype = out_dtype or x.dtype
        check_rows(x, x.dtype if isinstance(handle, UnpackedHandle) else handle.dtype, handle.in_features)
        if out_dtype not in (x.dtype, torch.float32):
            raise ValueError(f"out_dtype must be {x.dtype} or torch.float32, got {out_dtype}")
        y = self._results.empty((x.shape[0], handle.out_features), out_dtype)
        if isinstance(handle, UnpackedHandle):
            handle.form.launch(self._native, handle.weights, handle.biases, x, y, batch)
            return y
        in_float32 = out_dtype == torch.float32
        self._native.linear(handle.native, x.data_ptr(), x.stride(0), x.shape[0], y.data_ptr(), in_float32)
        return y

    def norm_linear(
        self,
        residual: Residual,
        norm: Norm | None,
        handle: CpuLinearHandle | UnpackedHandle,
        batch: StepBatch,
        activation: Activation | None = None,
    ) -> Tensor:
        """The next call for as many features writes the same memory, unless the activation is gated."""
        if norm is None or isinstance(handle, UnpackedHandle):
            return super().norm_linear(residual, norm, handle, batch, activation)
        function, gated = (None, False) if activation is None else _ACTIVATIONS[activation]
        y = self._norm_linear(residual, norm, handle, handle.product, None if gated else function)
        if activation is not None and gated:
            return self.activate(y, activation)
        self._last = handle.product
        return y

    def _logits(
        self, residual: Residual, norm: Norm | None, handle: CpuLinearHandle | UnpackedHandle, batch: StepBatch
    ) -> Tensor:
        if norm is None or isinstance(handle, UnpackedHandle):
            return super()._logits(residual, norm, handle, batch)
        result = self._result("logits", handle.out_features, torch.float32)
        return self._norm_linear(residual, norm, handle, result, None)

    def _norm_linear(
        self,
        residual: Residual,
        norm: Norm,
        handle: CpuLinearHandle,
        result: Result,
        activation: ActivationFunction | None,
    ) -> Tensor:
        if handle.norm is not norm:
            self._put_norm(norm, handle)
        tensor, pending, embedded, added = residual.x, residual.pending, self._embedded, self._added
        if tensor is embedded.tensor and embedded.width == handle.in_features and embedded.dtype is handle.dtype:
            rows, x = embedded.rows, embedded.address
        else:
            rows, x = tensor.shape[0], tensor.data_ptr()
            check(tensor, handle.dtype, (rows, handle.in_features), "the residual")
        to = 0
        if pending is not None:
            to = x
            if pending is added.tensor and added.width == handle.in_features and added.rows == rows:
                x = added.address
            else:
                check(pending, handle.dtype, (rows, handle.in_features), "what is added")
                x = pending.data_ptr()
            residual.pending = None
        if result.rows != rows:
            result.resize(rows)
        assert handle.native_norm is not None
        in_float32 = result.dtype is torch.float32
        self._native.norm_linear(handle.native_norm, handle.native, x, to, rows, result.address, in_float32, activation)
        return result.tensor

    def _put_norm(self, norm: Norm, handle: CpuLinearHandle) -> None:
        float_weight = _check_norm(norm, handle.dtype, handle.in_features)
        bias = 0 if norm.bias is None else norm.bias.data_ptr()
        handle.norm, handle.native_norm = norm, CpuNorm(norm.weight.data_ptr(), bias, norm.eps, float_weight)

    def linear_add_(
        self,
        x: Tensor,
        handle: CpuLinearHandle | UnpackedHandle,
        residual: Residual,
        batch: StepBatch,
        norm: Norm | None = None,
    ) -> None:
        if residual.pending is not None:
            self.plain(residual, batch)
        if isinstance(handle, UnpackedHandle):
            super().linear_add_(x, handle, residual, batch, norm)
            return
        last, result = self._last, handle.added
        if x is last.tensor and last.width == handle.in_features and last.dtype is handle.dtype:
            address, stride, rows = last.address, last.width, last.rows
        else:
            check_rows(x, handle.dtype, handle.in_features)
            address, stride, rows = x.data_ptr(), x.stride(0), x.shape[0]
        if result.rows != rows:
            result.resize(rows)
        self._native.linear(handle.native, address, stride, rows, result.address, False)
        if self.reduction is not None:
            self.reduction(result.tensor, batch)
        if norm is not None:
            self._norm_rows(result.tensor, norm, None, result.tensor)
        self._added = result
        residual.pending = result.tensor

    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        """The norm of the rows of x [M, H], which may be strided; or of residual += x, which is in place."""
        y = self._results.empty((x.shape[0], x.shape[1]), x.dtype)
        self._norm_rows(x, norm, residual, y)
        return y

    def _norm_rows(self, x: Tensor, norm: Norm, residual: Tensor | None, y: Tensor) -> None:
        """``norm`` to y [M, H], which may be x."""
        rows, width = x.shape
        if x.stride(1) != 1:
            raise ValueError(f"x must have contiguous rows, got strides {x.stride()}")
        float_weight = _check_norm(norm, x.dtype, width)
        if residual is not None:
            check(residual, x.dtype, (rows, width), "residual")
        self._native.norm(
            _dtype(x),
            x.data_ptr(),
            x.stride(0),
            0 if residual is None else residual.data_ptr(),
            norm.weight.data_ptr(),
            0 if norm.bias is None else norm.bias.data_ptr(),
            y.data_ptr(),
            width,
            rows,
            1,
            width,
            norm.eps,
            float_weight,
        )

    def head_rms_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """RMS norm over the last axis of the view x [T, H, D], in place."""
        check_heads(x, x.dtype, "x")
        tokens, heads, dim = x.shape
        wide = _check_norm(Norm(weight, None, eps), x.dtype, dim)
        p, stride = x.data_ptr(), x.stride(0)
        self._native.norm(_dtype(x), p, stride, 0, weight.data_ptr(), 0, p, stride, tokens, heads, dim, eps, wide)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """x [M, N] activated; a gated activation takes an even N and halves it."""
        function, gated = _ACTIVATIONS[activation]
        width = x.shape[-1] // (2 if gated else 1)
        if not x.is_contiguous() or (gated and x.shape[-1] % 2):
            raise ValueError(f"{activation} does not take {list(x.shape)} with strides {x.stride()}")
        y = self._results.empty((x.shape[0], width), x.dtype)
        self._native.activation(_dtype(x), function, gated, x.data_ptr(), y.data_ptr(), x.shape[0], width)
        return y

    def soft_cap_(self, x: Tensor, cap: float) -> Tensor:
        rows, width = x.shape
        check(x, torch.float32, (rows, width), "x")
        self._native.soft_cap(x.data_ptr(), rows, width, cap)
        return x

    def rotary_(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        """Rotate the views q [T, Hq, D] and k [T, Hk, D] in place, element i paired with element i + D/2.

        cos_sin is float32 [max_positions, D]: D/2 cosines, then D/2 sines. positions is int64 [T], each
        below max_positions (not checked).
        """
        check(cos_sin, torch.float32, (cos_sin.shape[0], q.shape[-1]), "cos_sin")
        check(positions, torch.int64, (q.shape[0],), "positions")
        for x in (q, k):
            check_heads(x, q.dtype, "q and k")
            tokens, heads, dim = x.shape
            if dim % 2 or tokens != q.shape[0] or dim != q.shape[2]:
                raise ValueError(f"q {list(q.shape)} and k {list(k.shape)} must match, and D be even")
            self._native.rotary(
                _dtype(x),
                x.data_ptr(),
                x.stride(0),
                tokens,
                heads,
                dim,
                cos_sin.data_ptr(),
                positions.data_ptr(),
            )

    def store_kv(self, k: Tensor, v: Tensor, cache: LayerKVCache, batch: StepBatch) -> None:
        """Write the views k, v [T, Hk, D] to the cache slots of batch.slot_mapping; with scales, in float8."""
        native = self._cache(cache, k.dtype).native
        expected = (batch.num_tokens, cache.k.shape[1], cache.k.shape[2])
        for x in (k, v):
            check_heads(x, k.dtype if cache.scales is not None else cache.k.dtype, "k and v")
            if x.shape != expected:
                raise ValueError(f"k and v must be {list(expected)}, got {list(x.shape)}")
        self._native.store_kv(_dtype(k), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), native, batch)

    def paged_attention(self, call: AttentionCall[StepBatch]) -> Tensor:
        q, layer, keys, scales = call.queries, call.layer, call.cache.k, call.cache.scales
        native = self._cache(call.cache, q.dtype).native
        check_heads(q, q.dtype if scales is not None else keys.dtype, "q")
        tokens, heads, dim = q.shape
        if dim != keys.shape[2] or heads % keys.shape[1] or tokens > call.step.num_tokens:
            raise ValueError(f"q {list(q.shape)} does not fit the cache {list(keys.shape)} and the batch")
        if layer.window < 0 or layer.softcap < 0:
            raise ValueError(f"window and softcap must be at least 0, got {layer.window} and {layer.softcap}")
        if layer.sinks is not None:
            check(layer.sinks, torch.float32, (heads,), "sinks")
        out = self._results.empty((tokens, heads * dim), q.dtype)
        self._native.paged_attention(
            _dtype(q), q.data_ptr(), q.stride(0), tokens, heads, out.data_ptr(), native, call.step, layer.scale,
            layer.window, layer.softcap, _address(layer.sinks),
        )  # fmt: skip
        return out

    def attention(self, heads: Tensor, layer: AttentionLayer, cache: LayerKVCache, batch: StepBatch) -> Tensor:
        """``store_heads`` and ``paged_attention`` of heads. The next call writes the same memory."""
        if self._by_sdpa or layer.shares:
            return super().attention(heads, layer, cache, batch)
        seen = self._cache(cache, heads.dtype)
        if seen.layer is not layer:
            self._put_layer(layer, seen)
        last, result = self._last, seen.attended
        assert result is not None
        if heads is last.tensor and last.width == seen.heads_width and last.dtype is seen.dtype:
            address, rows = last.address, last.rows
        else:
            heads = heads.contiguous()  # a gate may lie behind each row
            check(heads, seen.dtype, (batch.num_tokens, seen.heads_width), "heads")
            address, rows = heads.data_ptr(), heads.shape[0]
        self.prepare_heads(heads, seen.head_dim, layer, batch)
        if result.rows != rows:
            result.resize(rows)
        self._native.attention(
            seen.native_dtype, address, rows, layer.num_heads, result.address, seen.native, batch, layer.scale,
            layer.window, layer.softcap, _address(layer.sinks),
        )  # fmt: skip
        self._last = result
        return result.tensor

    def _put_layer(self, layer: AttentionLayer, cache: _Cache) -> None:
        if layer.num_heads % cache.num_heads:
            raise ValueError(f"{layer.num_heads} query heads do not fit {cache.num_heads} of the cache")
        if layer.sinks is not None:
            check(layer.sinks, torch.float32, (layer.num_heads,), "sinks")
        cache.layer, cache.heads_width = layer, (layer.num_heads + 2 * cache.num_heads) * cache.head_dim
        cache.attended = self._result("attention", layer.num_heads * cache.head_dim, cache.dtype)

    def sample(self, logits: Tensor, batch: StepBatch) -> Tensor:
        """Tokens int32 [S] drawn from float32 logits [S, V] by the batch's sampling states.

        -1 where the logits hold NaN or +inf, or no finite value.
        """
        check(logits, torch.float32, (batch.num_samples, logits.shape[-1]), "logits")
        tokens = torch.empty(logits.shape[0], dtype=torch.int32)
        self._native.sample(logits.data_ptr(), logits.shape[-1], batch, tokens.data_ptr())
        return tokens

    def _cache(self, cache: LayerKVCache, dtype: torch.dtype) -> _Cache:
        """A layer's cache, checked the first time it is seen. ``dtype`` is that of heads, if the cache is in float8."""
        keys, values, scales, _, group = cache
        found = self._caches.get(id(keys))
        if found is not None and found.k() is keys and found.v() is values and found.scales is scales:
            return found
        blocks, heads, dim, block_size = keys.shape
        stored, scales_at = keys.dtype, 0
        if scales is None:
            dtype = stored
        else:
            stored, scales_at = FLOAT8, scales.data_ptr()
            check(scales, torch.float32, (2, 2, heads), "scales")
        check(keys, stored, (blocks, heads, dim, block_size), "k_cache")
        check(values, stored, (blocks, heads, block_size, dim), "v_cache")
        native = PagedKV(keys.data_ptr(), values.data_ptr(), heads, dim, block_size, scales_at, group)
        k, v = weakref.ref(keys), weakref.ref(values)
        found = _Cache(k, v, scales, native, dtype, native_dtype(dtype), heads, dim)
        self._caches[id(keys)] = found
        return found


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _dtype(x: Tensor) -> Dtype:
    return native_dtype(x.dtype)


def _check_norm(norm: Norm, dtype: torch.dtype, width: int) -> bool:
    """Raise ValueError unless the norm is for rows [width] of the dtype. Return whether its weight is in float32."""
    wide = norm.bias is None and norm.weight.dtype == torch.float32
    check(norm.weight, torch.float32 if wide else dtype, (width,), "weight")
    if norm.bias is not None:
        check(norm.bias, dtype, (width,), "bias")
    return wide
