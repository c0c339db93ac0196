"""Parts of decoders: blocks that read a residual, as a rule through a norm, and add to it, and the model around them.

A family reads its config and its weights, and composes blocks. A mixture of experts is another feed-forward block, a
recurrent layer another mixer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from asyncengine.kernels.latent import LatentLayer
from asyncengine.kernels.ops import (
    Activation,
    AttentionLayer,
    Batch,
    Experts,
    Handle,
    LayerCache,
    LayerKVCache,
    LayerLatentCache,
    LayerStates,
    ModelOps,
    Norm,
    Residual,
    RoutingRule,
)
from asyncengine.kernels.states import DeltaNet, Mamba2, ShortConv
from asyncengine.models.alibi import FusedAttentionBlock
from asyncengine.models.config import ModelConfig
from asyncengine.models.weights.source import WeightSource


class Mixer(Protocol):
    """The block of a layer in which tokens meet. ``residual`` is [T, H]."""

    def forward(self, ops: ModelOps, residual: Residual, cache: Any, batch: Batch, is_last: bool) -> None:
        """Add to the residual; what later steps need goes to the cache, the layer's ``LayerCache``.

        In the model's last layer it calls ``Ops.keep_sampled`` before it adds.
        """


class FeedForward(Protocol):
    """The block of a layer in which each token is by itself."""

    def forward(self, ops: ModelOps, residual: Residual, batch: Batch) -> None:
        """Add to the residual."""


class AttentionBlock(NamedTuple):
    """residual += output · attention(qkv · norm(residual)); with an output norm, the norm of that product.

    With a gate, attention's result is multiplied by its sigmoid before the last product.
    """

    norm: Norm | None
    qkv: Handle
    layer: AttentionLayer
    output: Handle
    output_norm: Norm | None = None
    gate_size: int = 0
    """Numbers of a token's gate, which ``qkv`` makes behind queries, keys and values."""

    def attend(self, ops: ModelOps, residual: Residual, cache: LayerKVCache, batch: Batch, is_last: bool) -> Tensor:
        """Everything before the product with ``output``, whose input is returned."""
        heads, gate = ops.norm_linear(residual, self.norm, self.qkv, batch), None
        if self.gate_size:
            heads, gate = heads.tensor_split((heads.shape[1] - self.gate_size,), dim=1)
        x = ops.attention(heads, self.layer, cache, batch)
        ops.exchange(heads, x, residual, self.layer, cache, batch)
        if gate is not None:
            x = ops.gated(x, gate, batch)
        return ops.keep_sampled(x, residual, batch) if is_last else x

    def forward(self, ops: ModelOps, residual: Residual, cache: LayerKVCache, batch: Batch, is_last: bool) -> None:
        x = self.attend(ops, residual, cache, batch, is_last)
        ops.linear_add_(x, self.output, residual, batch, self.output_norm)


def _add_mixed(ops: ModelOps, x: Tensor, output: Handle, residual: Residual, batch: Batch, is_last: bool) -> None:
    """residual += output · x; in the model's last layer for the rows that are sampled from."""
    if is_last:
        x = ops.keep_sampled(x, residual, batch)
    ops.linear_add_(x, output, residual, batch)


class ShortConvBlock(NamedTuple):
    """residual += output · (c * conv(b * x)), where b, c and x are the thirds of inputs · norm(residual)."""

    norm: Norm
    inputs: Handle
    conv: ShortConv
    output: Handle

    def forward(self, ops: ModelOps, residual: Residual, cache: LayerStates, batch: Batch, is_last: bool) -> None:
        b, c, x = ops.norm_linear(residual, self.norm, self.inputs, batch).chunk(3, dim=-1)
        y = c * ops.short_conv(b * x, self.conv, cache, batch)
        _add_mixed(ops, y, self.output, residual, batch, is_last)


class Mamba2Block(NamedTuple):
    """residual += output · mixer(inputs · norm(residual))."""

    norm: Norm | None
    inputs: Handle
    mixer: Mamba2
    output: Handle

    def mix(self, ops: ModelOps, residual: Residual, cache: LayerStates, batch: Batch) -> Tensor:
        """Everything before the product with ``output``, whose input is returned."""
        return ops.mamba2(ops.norm_linear(residual, self.norm, self.inputs, batch), self.mixer, cache, batch)

    def forward(self, ops: ModelOps, residual: Residual, cache: LayerStates, batch: Batch, is_last: bool) -> None:
        x = self.mix(ops, residual, cache, batch)
        _add_mixed(ops, x, self.output, residual, batch, is_last)


class DeltaNetBlock(NamedTuple):
    """residual += output · mixer(inputs · norm(residual))."""

    norm: Norm | None
    inputs: Handle
    mixer: DeltaNet
    output: Handle

    def forward(self, ops: ModelOps, residual: Residual, cache: LayerStates, batch: Batch, is_last: bool) -> None:
        x = ops.delta_net(ops.norm_linear(residual, self.norm, self.inputs, batch), self.mixer, cache, batch)
        _add_mixed(ops, x, self.output, residual, batch, is_last)


class LatentAttentionBlock(NamedTuple):
    """residual += output · attention, over latents.

    ``inputs`` · norm(residual) is a row of the queries, or with a ``query_norm`` of the latent numbers of which
    ``queries`` makes them; behind it the token's latent and its key.
    """

    norm: Norm
    inputs: Handle
    query_size: int
    """Numbers of a token in the first part of ``inputs``."""
    query_norm: Norm | None
    queries: Handle | None
    layer: LatentLayer
    output: Handle

    def forward(self, ops: ModelOps, residual: Residual, cache: LayerLatentCache, batch: Batch, is_last: bool) -> None:
        layer, size = self.layer, self.query_size
        x = ops.norm_linear(residual, self.norm, self.inputs, batch)
        q, rows = x[:, :size], x[:, size : size + layer.width]
        if self.query_norm is not None and self.queries is not None:
            q = ops.linear(ops.rms_norm(q, self.query_norm, batch), self.queries, batch)
        x = ops.latent_attention(q.unflatten(1, (layer.num_heads, -1)), rows, layer, cache, batch)
        _add_mixed(ops, x, self.output, residual, batch, is_last)


class MLPBlock(NamedTuple):
    """residual += down · activation(up · norm(residual)); with an output norm, the norm of that product."""

    norm: Norm | None
    up: Handle
    activation: Activation
    down: Handle
    output_norm: Norm | None = None

    def forward(self, ops: ModelOps, residual: Residual, batch: Batch) -> None:
        x = ops.norm_linear(residual, self.norm, self.up, batch, self.activation)
        ops.linear_add_(x, self.down, residual, batch, self.output_norm)


class Router(NamedTuple):
    """Chooses the experts of each row by the products with its weights."""

    weight: Handle
    """weight [E, H], or [E + 1, H] with the gate of the rule's shared expert"""
    rule: RoutingRule


class SharedExpert(NamedTuple):
    """An expert beside a mixture that computes every row: down · activation(up · x), with a gate times a sigmoid of
    gate · x."""

    up: Handle
    activation: Activation
    down: Handle
    gate: Handle | None = None
    """weight [1, H]"""


class MixtureBlock(NamedTuple):
    """residual += the weighted results of each row's experts for norm(residual), and that of a shared expert which is
    not one of the experts; with an output norm, the norm of what the mixture adds."""

    norm: Norm | None
    router: Router
    experts: Experts[Handle]
    output_norm: Norm | None = None
    shared: SharedExpert | None = None

    def forward(self, ops: ModelOps, residual: Residual, batch: Batch) -> None:
        x, routing = ops.route(residual, self.norm, self.router.weight, self.router.rule, batch)
        shared = self.shared
        if shared is None:
            ops.experts_add_(x, routing, self.experts, residual, batch, self.output_norm)
            return
        inner = ops.norm_linear(residual, self.norm, shared.up, batch, shared.activation)
        if shared.gate is None:
            ops.experts_add_(x, routing, self.experts, residual, batch)
            ops.linear_add_(inner, shared.down, residual, batch)
            return
        y = ops.gated(ops.linear(inner, shared.down, batch), ops.linear(x, shared.gate, batch), batch)
        ops.experts_add_(x, routing, self.experts, residual, batch)
        ops.add_(y, residual, batch)


class Layer(Protocol):
    """A layer of a decoder."""

    def forward(self, ops: ModelOps, residual: Residual, cache: Any, batch: Batch, is_last: bool) -> None:
        """Add to the residual, as ``Mixer.forward`` and ``FeedForward.forward`` together."""


class ParallelLayer(NamedTuple):
    """Attention and an MLP that read the same residual, and are both added to it."""

    attention: AttentionBlock | FusedAttentionBlock
    mlp: MLPBlock

    def forward(self, ops: ModelOps, residual: Residual, cache: LayerKVCache, batch: Batch, is_last: bool) -> None:
        x = self.attention.attend(ops, residual, cache, batch, is_last)
        y = ops.norm_linear(residual, self.mlp.norm, self.mlp.up, batch, self.mlp.activation)
        ops.linear_add_(x, self.attention.output, residual, batch)
        ops.linear_add_(y, self.mlp.down, residual, batch)


class DecoderLayer(NamedTuple):
    mixer: Mixer
    feed_forward: FeedForward

    def forward(self, ops: ModelOps, residual: Residual, cache: LayerCache, batch: Batch, is_last: bool) -> None:
        self.mixer.forward(ops, residual, cache, batch, is_last)
        self.feed_forward.forward(ops, residual, batch)


class BlocksLayer(NamedTuple):
    """A mixer, behind which there are any number of feed-forward blocks."""

    mixer: Mixer
    feed_forwards: tuple[FeedForward, ...] = ()

    def forward(self, ops: ModelOps, residual: Residual, cache: LayerCache, batch: Batch, is_last: bool) -> None:
        self.mixer.forward(ops, residual, cache, batch, is_last)
        for block in self.feed_forwards:
            block.forward(ops, residual, batch)


class Decoder:
    """Layers with an embedding before them and a head behind.

    Embedded tokens are multiplied by ``embedding_scale``, logits by ``logit_scale``, and then capped at
    ± ``logit_softcap``, unless it is 0. With ``splits_head`` each rank computes a part of the logits.
    """

    def __init__(
        self,
        ops: ModelOps,
        layers: Sequence[Layer],
        *,
        embedding: Handle,
        norm: Norm,
        head: Handle,
        splits_head: bool = False,
        position_table: Tensor | None = None,
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
        logit_softcap: float = 0.0,
    ) -> None:
        self._ops = ops
        self._layers = tuple(layers)
        self._embedding = embedding
        self._norm = norm
        self._head = head
        self.splits_head = splits_head
        self._position_table = position_table
        self._embedding_scale = embedding_scale
        self._logit_scale = logit_scale
        self._logit_softcap = logit_softcap

    def forward(self, batch: Batch, caches: Iterable[LayerCache]) -> Any:
        """``run``, then ``logits``."""
        return self.logits(self.run(batch, caches), batch)

    def embed(self, batch: Batch) -> Residual:
        """The residual before the first layer."""
        return self._ops.embed(batch, self._embedding, self._position_table, self._embedding_scale)

    def run(self, batch: Batch, caches: Iterable[LayerCache]) -> Residual:
        """The layers of the step, which write its caches."""
        ops = self._ops
        residual = self.embed(batch)
        last = len(self._layers) - 1
        for index, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            layer.forward(ops, residual, cache, batch, index == last)
        return residual

    def logits(self, residual: Residual, batch: Batch) -> Any:
        """Return ``Ops.logits`` of the residual that ``run`` returned, float32 [num_samples, vocab_size] as a rule."""
        return self._ops.logits(residual, self._norm, self._head, batch, self._logit_softcap, self._logit_scale)

    def hidden(self, residual: Residual, batch: Batch) -> Tensor:
        """The normed states of what ``run`` left, [num_samples, H] in the model's dtype; ``logits`` may come before."""
        return self._ops.hidden(residual, self._norm, batch)


def load_ends(config: ModelConfig, weights: WeightSource, ops: ModelOps, *, copy: bool = False) -> dict[str, Any]:
    """The embedding and the head, as ``Decoder`` takes them. ``copy``: see ``make_embedding``.

    Ranks share the rows of a head whose number they divide. A tied head is then a part of the table, which every rank
    looks its tokens up in. A tied head that is packed is a copy of it.
    """
    table = weights.table(config.embedding, config.vocab_size, config.hidden_size)
    splits, tied = not config.labels and weights.divides(config.vocab_size), config.tie_word_embeddings
    both = tied and not splits and not weights.packs_head
    head = embedding = ops.make_embedding(table, tied=both, copy=copy)
    if not tied:
        head = ops.make_head(weights.head(*config.head_shape, cut="rows" if splits else "whole"))
    elif not both:
        head = ops.make_head(weights.tied_head(weights.own_rows(table) if splits else table))
    return {"embedding": embedding, "head": head, "splits_head": splits}
