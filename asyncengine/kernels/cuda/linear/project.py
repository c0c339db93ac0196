"""Projections by the kernel of their plan, with what the kernel does not do in kernels before and behind it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.launch.programmatic import TmaOptions
from asyncengine.kernels.cuda.linear.coded import coded_linear
from asyncengine.kernels.cuda.linear.formats.base import Matrix, as_tensor
from asyncengine.kernels.cuda.linear.grouped import GroupedMatrix
from asyncengine.kernels.cuda.linear.handle import CudaLinear
from asyncengine.kernels.cuda.linear.plan import FusedActivation, Plan, fused_activation
from asyncengine.kernels.cuda.linear.residual import Operand, Residual, Unnormed, fold_norm
from asyncengine.kernels.cuda.linear.tiled import MAX_ARRIVALS, linear
from asyncengine.kernels.cuda.rows.activation import activate_rows
from asyncengine.kernels.cuda.rows.tensors import empty_rows
from asyncengine.kernels.ops import Activation, Norm

try:
    from asyncengine.kernels.cuda.linear import direct, tma, tma_ranks
except ImportError:  # Gluon is an experimental part of Triton, which another version may have elsewhere
    direct = tma = tma_ranks = None  # type: ignore[assignment]


class Projections:
    """Launches projections, and keeps the memory that these share."""

    def __init__(self, device: torch.device, gpu: Gpu, options: TmaOptions) -> None:
        self._device = device
        self._gpu = gpu
        self._options = options
        self._pdl = options["pdl"]
        self._folded: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """Weights that follow a LayerNorm, and the results of ``fold_norm`` for them, by address."""
        self._arrivals = torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=device)

    def project(
        self,
        operand: Operand,
        handle: CudaLinear,
        plan: Plan,
        activation: Activation | None = None,
        dtype: torch.dtype | None = None,
    ) -> Matrix:
        """activation(x W^T + bias) in ``dtype``, that of x if it is None: [M, N].

        An activation that is a kernel of its own behind float8 weights gives quantised rows.
        """
        fused = fused_activation(activation)
        if activation is not None and fused is None:
            return activate_rows(as_tensor(self.project(operand, handle, plan, dtype=dtype)), activation, pdl=self._pdl)
        x, norm, index = operand
        if isinstance(x, Unnormed):
            assert norm is not None
            y = self._end_norm(x, norm, handle, plan, fused)
            return y[:, : handle.out_features]
        form = handle.format
        dtype = dtype or form.result_dtype(x)
        if plan.kind == "cublas":
            y = form.product(x, handle.weight, handle.bias, dtype, plan.rows)
            if activation is not None:
                return form.activate(y, activation, pdl=self._pdl)
        else:
            rows = len(x) if index is None else len(index)
            y = empty_rows(rows, handle.columns(fused), dtype, self._device)
            self._launch(operand, handle, plan, out=y, activation=fused)
        return y[:, : handle.out_features]  # a gate's result is half as wide, and never padded

    def operand(self, x: Matrix, handle: CudaLinear, plan: Plan) -> Operand:
        """x as a product without a norm multiplies it."""
        return Operand(handle.format.operand(x, plan, pdl=self._pdl))

    def add(self, x: Matrix, handle: CudaLinear, plan: Plan, residual: Residual) -> None:
        """residual += x W^T + bias. The weights are without padding."""
        to = residual.settle()
        form, weight, bias = handle.format, handle.weight, handle.bias
        x = form.operand(x, plan, pdl=self._pdl)
        if plan.leaves_parts:
            residual.leave_parts(tma.tma_parts(as_tensor(x), as_tensor(weight), plan, bias=bias, **self._options))
        elif self._gpu.tma and form.prepares_norms and plan.prepares_norm and to.dtype == torch.bfloat16:
            residual.put_off(partial(self._add, Operand(x), handle, plan, to))
        elif plan.kind != "cublas":
            self._launch(Operand(x), handle, plan, out=to, add=True)
        else:
            form.add_product(to, x, weight, bias, plan.rows)

    def ranks(self, x: Tensor, handle: CudaLinear, plan: Plan) -> Tensor:
        """int64 [M, tiles]: of the logits of x the greatest rank in each tile of the vocabulary."""
        exact = handle.exact()
        return tma_ranks.tma_ranks(x, as_tensor(exact.weight), plan, gpu=self._gpu, bias=exact.bias, **self._options)

    def _add(self, operand: Operand, handle: CudaLinear, plan: Plan, to: Tensor, norm: Norm | None) -> Unnormed | None:
        """An addition that was put off, by a plan that can prepare the norm which reads the sum."""
        if norm is None:
            self._launch(operand, handle, plan, out=to, add=True)
            return None
        x, weight, bias = as_tensor(operand.x), handle.weight, handle.bias
        if isinstance(weight, GroupedMatrix):
            return direct.direct_sum(x, weight, plan, out=to, norm=norm, bias=bias, pdl=self._pdl)
        weight = as_tensor(weight)
        if plan.kind == "tma":
            return tma.tma_sum(x, weight, plan, out=to, norm=norm, bias=bias, **self._options)
        return linear(x, weight, plan, out=to, bias=bias, add=True, reader=norm, pdl=self._pdl)

    def _end_norm(
        self, x: Unnormed, norm: Norm, handle: CudaLinear, plan: Plan, activation: FusedActivation | None
    ) -> Tensor:
        y = empty_rows(len(x.x), handle.columns(activation), x.x.dtype, self._device)
        if isinstance(handle.weight, GroupedMatrix):
            direct.direct_linear(
                x, handle.weight, plan, out=y, bias=handle.bias, activation=activation, pdl=self._pdl
            )  # fmt: skip
            return y
        weight = as_tensor(handle.weight)
        bias, shift = self._fold(norm, weight, handle.bias)
        tma.tma_linear(x, weight, plan, out=y, bias=bias, shift=shift, activation=activation, **self._options)
        return y

    def _fold(self, norm: Norm, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if norm.bias is None:
            return bias, None
        address = weight.data_ptr()
        if address not in self._folded:  # when a step first runs, before any is captured
            self._folded[address] = weight, *fold_norm(norm, weight, bias)
        return self._folded[address][1:]

    def _launch(
        self,
        operand: Operand,
        handle: CudaLinear,
        plan: Plan,
        *,
        out: Tensor,
        activation: FusedActivation | None = None,
        add: bool = False,
    ) -> None:
        """The plan's kernel. A tma kernel takes neither a norm nor an index."""
        x, norm, index = operand
        weight, bias = handle.weight, handle.bias
        assert not isinstance(x, Unnormed)
        if plan.kind == "tma":
            assert norm is None
            assert index is None
            tma.tma_linear(
                as_tensor(x), as_tensor(weight), plan, out=out, bias=bias, activation=activation, add=add,
                **self._options,
            )  # fmt: skip
        elif plan.kind == "coded":
            assert isinstance(x, Tensor)
            assert isinstance(weight, GroupedMatrix)
            coded_linear(
                x, weight, plan, out=out, bias=bias, activation=activation, add=add, arrivals=self._arrivals,
                pdl=self._pdl,
            )  # fmt: skip
        elif plan.kind == "direct":
            assert isinstance(x, Tensor)
            assert isinstance(weight, GroupedMatrix)
            direct.direct_linear(x, weight, plan, out=out, bias=bias, activation=activation, add=add, pdl=self._pdl)
        else:
            linear(
                x, weight, plan, out=out, bias=bias, norm=norm, activation=activation, add=add, index=index,
                arrivals=self._arrivals, pdl=self._pdl,
            )  # fmt: skip
