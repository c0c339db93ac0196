"""The plans of a model's steps, for any card and without its weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.attention.choose import describe as describe_attention
from asyncengine.kernels.cuda.attention.latent_run import choose_plans
from asyncengine.kernels.cuda.gpu import H200, KNOWN, Gpu
from asyncengine.kernels.cuda.linear.choose import Choice
from asyncengine.kernels.cuda.linear.formats.base import as_tensor
from asyncengine.kernels.cuda.linear.handle import CudaLinear
from asyncengine.kernels.cuda.linear.plan import Fused, Plan, Site, fused_activation
from asyncengine.kernels.cuda.linear.residual import Residual
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.cuda.trials import examine
from asyncengine.kernels.latent import LatentLayer
from asyncengine.kernels.ops import (
    Activation,
    AttentionLayer,
    Experts,
    LayerKVCache,
    LayerLatentCache,
    LayerStates,
    Norm,
    Routing,
    RoutingRule,
    is_gated,
)
from asyncengine.kernels.states import DeltaNet, Mamba2, ShortConv
from asyncengine.runner.cuda_runner import cuda_options
from asyncengine.runner.state.memory import without_memory
from asyncengine.runner.steps.buckets import ANY_CONTEXT, Bucket
from asyncengine.runner.steps.device_steps import VARIANTS, attention_kinds, attention_limits, step_buckets
from asyncengine.runner.steps.model_runner import load_model

_NOWHERE = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Projection:
    """A kind of projection of a step, and how it is computed."""

    name: str
    """qkv, o, up, down, linear, head; greedy head, of a step whose rows are all sampled greedily"""
    site: Site
    choice: Choice

    @property
    def fused(self) -> str:
        """The operations around the product."""
        site = self.site
        norm = f"{site.norm} norm" if site.norm != "none" else ""
        words = (norm, site.activation, "bias" if site.bias else "", "add" if site.add else "")
        return ", ".join(word for word in words if word)

    @property
    def tile(self) -> str:
        """Sizes of the tile: rows of the weight, rows of x and K, with the rest of the plan where it is not the
        default."""
        plan, default = self.choice.plan, Plan("cublas")
        if plan.kind == "cublas":
            return "-"
        sizes = " x ".join(str(size) for size in (plan.columns, plan.rows, plan.inner) if size)
        others = ("stages", "split", "ahead")
        words = [f"{name} {getattr(plan, name)}" for name in others if getattr(plan, name) != getattr(default, name)]
        return ", ".join((sizes, f"{plan.warps} warps", *words))

    def as_dict(self) -> dict[str, Any]:
        plan, source = self.choice
        return {"name": self.name, **self.site._asdict(), "plan": asdict(plan), "source": source}


@dataclass(slots=True)
class BucketPlan:
    """The plans of a bucket's steps."""

    bucket: Bucket
    projections: list[Projection] = field(default_factory=list)
    attention: list[str] = field(default_factory=list)
    """plan of each kind of layer"""

    @property
    def title(self) -> str:
        rows, tokens, single, context, _ = self.bucket
        kind = f"{rows} {'rows' if rows > 1 else 'row'} of one token" if single else f"{tokens} tokens of {rows} rows"
        return f"{kind}, contexts of at most {context:,}" if context < ANY_CONTEXT else kind

    def as_dict(self) -> dict[str, Any]:
        rows, tokens, single, context, _ = self.bucket
        return {
            "max_rows": rows,
            "max_tokens": tokens,
            "single_token_rows": single,
            "max_context": context if context < ANY_CONTEXT else None,
            "projections": [projection.as_dict() for projection in self.projections],
            "attention": self.attention,
        }


def choose_gpu(name: str | None) -> Gpu:
    """The known card whose name has these letters; without a name this machine's, or the H200. Raises ConfigError."""
    if name is None:
        return examine(torch.device("cuda", 0)) if torch.cuda.is_available() else H200
    for gpu in KNOWN:
        if name.lower() in gpu.name.lower():
            return gpu
    raise ConfigError(f"no card named {name!r} is known, but {', '.join(gpu.name for gpu in KNOWN)}")


def plan_steps(config: EngineConfig, gpu: Gpu) -> list[BucketPlan]:
    """Plan the steps of all buckets, ascending. ``config`` has load_format="dummy": config.json is read, and no
    weights.

    Raises ModelError if the directory cannot be used, ConfigError if the configuration fits neither model nor card.
    """
    ops = _PlanOps(_NOWHERE, cuda_options(config, gpu))
    loaded = load_model(config, ops)
    steps = []
    ops.sums, ops.float8_cache = loaded.ranks > 1, config.float8_cache
    caches = without_memory(loaded.config, _NOWHERE)
    kinds = attention_kinds(loaded.config, loaded.dtype, float8_cache=config.float8_cache)
    limits = attention_limits(config, loaded.max_model_len)
    for bucket in step_buckets(config, loaded, ops):
        ops.step = BucketPlan(bucket, attention=[str(describe_attention(bucket, kind, gpu, limits)) for kind in kinds])
        step = allocate_step(bucket.max_rows, 1, bucket.max_rows, bucket.max_tokens, _NOWHERE)
        for needs in reversed(VARIANTS):
            loaded.model.forward(CudaBatch(step, needs=needs), iter(caches))
        steps.append(ops.step)
    return steps


class _PlanOps(CudaOps):
    """Operations that choose, note the choice in ``step``, and compute nothing."""

    step: BucketPlan
    sums: bool = False
    """Ranks add up what goes to the residual, in a kernel behind the product."""
    float8_cache: bool = False
    _heads: Tensor | None = None
    """heads of the attention before"""

    def embed(
        self, batch: CudaBatch, embedding: CudaLinear, position_table: Tensor | None = None, scale: float = 1.0
    ) -> Residual:
        table = as_tensor(embedding.weight)
        return Residual(table.new_empty(len(batch.step.input_ids), table.shape[1]))

    def norm_linear(
        self,
        residual: Residual,
        norm: Norm | None,
        handle: CudaLinear,
        batch: CudaBatch,
        activation: Activation | None = None,
    ) -> Tensor:
        handle = handle if activation is None else handle.exact()
        fused = fused_activation(activation)
        self._note("up" if activation else "qkv", handle, residual.x, len(residual.x), norm, fused)
        return residual.x.new_empty(len(residual.x), min(handle.columns(fused), handle.out_features))

    def linear_add_(
        self, x: Any, handle: CudaLinear, residual: Residual, batch: CudaBatch, norm: Norm | None = None
    ) -> None:
        name = "o" if x is self._heads else "down"
        self._note(name, handle.exact(), residual.x, len(residual.x), None, None, add=norm is None and not self.sums)

    def normed(self, residual: Residual, norm: Norm, batch: CudaBatch) -> Tensor:
        return torch.empty_like(residual.x)

    def rms_norm(self, x: Tensor, norm: Norm, batch: CudaBatch) -> Tensor:
        return torch.empty_like(x)

    def activated(self, x: Tensor, activation: Activation, batch: CudaBatch) -> Tensor:
        return x.new_empty(len(x), x.shape[1] // 2 if is_gated(activation) else x.shape[1])

    def gated(self, x: Tensor, gate: Tensor, batch: CudaBatch) -> Tensor:
        return x

    def linear(self, x: Any, handle: CudaLinear, batch: CudaBatch) -> Tensor:
        handle = handle.exact()
        self._note("linear", handle, x, len(x), None, None)
        return torch.empty(len(x), handle.out_features, dtype=handle.format.result_dtype(x), device=_NOWHERE)

    def route(
        self, residual: Residual, norm: Norm | None, router: CudaLinear, rule: RoutingRule, batch: CudaBatch
    ) -> tuple[Tensor, Routing]:
        x = residual.x
        if not self.routes_rows(x, norm, router):
            self._note("router", router, x, len(x), None, None)
        shape = len(x), rule.top_k + (rule.shared != "none")
        return x, Routing(x.new_empty(shape), x.new_empty(shape))

    def experts(self, x: Tensor, routing: Routing, experts: Experts[CudaLinear], batch: CudaBatch) -> Tensor:
        return torch.empty_like(x)

    def experts_add_(
        self,
        x: Tensor,
        routing: Routing,
        experts: Experts[CudaLinear],
        residual: Residual,
        batch: CudaBatch,
        norm: Norm | None = None,
    ) -> None:
        pass

    def add_(self, x: Tensor, residual: Residual, batch: CudaBatch, norm: Norm | None = None) -> None:
        pass

    def attention(self, heads: Tensor, layer: AttentionLayer, cache: LayerKVCache, batch: CudaBatch) -> Tensor:
        self._heads = heads.new_empty(len(heads), 1)
        return self._heads

    def latent_attention(
        self, q: Tensor, rows: Tensor, layer: LatentLayer, cache: LayerLatentCache, batch: CudaBatch
    ) -> Tensor:
        how = {"single_token_rows": self.step.bucket.single_token_rows, "float8": self.float8_cache}
        plans = choose_plans(q, layer, batch.step, self.gpu, **how)
        absorbed = f"{plans.absorbed}; latents in float8" if self.float8_cache else str(plans.absorbed)
        for words in (absorbed, *([] if plans.expanded is None else [str(plans.expanded)])):
            if words not in self.step.attention:
                self.step.attention.append(words)
        self._heads = q.new_empty(len(q), 1)
        return self._heads

    def short_conv(self, x: Tensor, conv: ShortConv, cache: LayerStates, batch: CudaBatch) -> Tensor:
        return torch.empty_like(x)

    def mamba2(self, x: Tensor, mixer: Mamba2, cache: LayerStates, batch: CudaBatch) -> Tensor:
        return x.new_empty(len(x), mixer.inner)

    def delta_net(self, x: Tensor, mixer: DeltaNet, cache: LayerStates, batch: CudaBatch) -> Tensor:
        return x.new_empty(len(x), mixer.inner)

    def logits(
        self,
        residual: Residual,
        norm: Norm | None,
        handle: CudaLinear,
        batch: CudaBatch,
        softcap: float = 0.0,
        scale: float = 1.0,
    ) -> Tensor:
        rows = len(batch.step.sample_index)
        if self.greedy_site(residual, norm, handle, batch) is not None:
            self._note("greedy head", handle, residual.x, rows, norm, "argmax")
        else:
            self._note("head", handle, residual.x, rows, norm, None)
        return residual.x

    def _note(
        self, name: str, handle: CudaLinear, x: Tensor, rows: int, norm: Norm | None, fused: Fused | None,
        *, add: bool = False,
    ) -> None:  # fmt: skip
        site = handle.site(rows, x.dtype, norm, fused, add=add)
        projection = Projection(name, site, self.choices.choice(site))
        if projection not in self.step.projections:
            self.step.projections.append(projection)
