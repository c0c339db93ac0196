"""The operations that a model asks of the machine, and that every kernel package implements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from torch import Tensor, device

from asyncengine.kernels.latent import LatentLayer
from asyncengine.kernels.states import DeltaNet, Mamba2, ShortConv
from asyncengine.kernels.weight import PackedWeight

Activation = Literal["silu_mul", "gelu_tanh_mul", "gelu", "gelu_tanh", "clamped_silu_mul", "relu2"]
"""Names that end in _mul are gated: of gate and up side by side, [M, 2I], silu_mul gives silu(gate) * up, [M, I].

clamped_silu_mul is g * sigmoid(1.702 g) * (u + 1) with g = min(gate, 7) and u = up between -7 and 7. relu2 is the
square of max(x, 0).
"""


def is_gated(activation: str | None) -> bool:
    """Return whether the activation makes one column of two."""
    return activation is not None and activation.endswith("_mul")


class Norm(NamedTuple):
    """A layer norm, or without a bias an RMS norm."""

    weight: Tensor
    """[H] in the model's dtype; of an RMS norm also in float32"""
    bias: Tensor | None
    eps: float


class HeadNorms(NamedTuple):
    """RMS norms of the queries and of the keys, over every head or over all heads together."""

    q: Tensor
    """[D], or [num_heads * D] over all; in the model's dtype or in float32"""
    k: Tensor
    """[D], or [Hk * D] over all; not read where ``AttentionLayer.shares``"""
    eps: float
    v: Tensor | None = None
    """[D]: of the values over every head; None: values stay as they are"""


class AttentionLayer(NamedTuple):
    """Attention of one layer, beside its KV cache."""

    num_heads: int
    """heads of the queries"""
    norms: HeadNorms | None
    cos_sin: Tensor | None
    """float32 [max_positions, D]: D/2 cosines, then D/2 sines, element i of a head paired with element i + D/2; without
    it nothing is rotated"""
    scale: float
    window: int
    """The token at position i sees position j if j <= i and, with a window > 0, i - window < j."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0: they stay as they are."""
    query_scales: Tensor | None = None
    """float32 [max_positions]: factors on the queries by their positions; for layers without norms"""
    sinks: Tensor | None = None
    """float32 [num_heads]: a score of each query head that takes its part of the softmax and has no value"""
    shares: bool = False
    """The layer reads the keys and values that an earlier layer stored, and has queries alone."""


class KVSpec(NamedTuple):
    """A layer that keeps the keys and values of every token, in blocks: a plane of keys and a plane of values."""

    num_heads: int
    head_dim: int
    window: int = 0
    """Tokens that the layer sees, as ``AttentionLayer.window``; 0: all of them."""

    @property
    def planes(self) -> int:
        return 2

    @property
    def width(self) -> int:
        """Numbers of a token in one plane."""
        return self.num_heads * self.head_dim


class SharedSpec(NamedTuple):
    """A layer that keeps nothing: it reads the keys and values of an earlier layer."""

    layer: int
    """Index of that layer, which has a KVSpec."""


class LatentSpec(NamedTuple):
    """A layer that keeps one vector of every token, in blocks of one plane."""

    width: int
    """Numbers of a token."""

    @property
    def planes(self) -> int:
        return 1


class StateSpec(NamedTuple):
    """A layer that keeps a state of fixed size for each sequence, by slot."""

    num_bytes: int
    """Bytes of a slot's state, a multiple of 16."""


PagedSpec: TypeAlias = KVSpec | LatentSpec
"""A layer's part of the blocks of the cache."""


class JointSpec(NamedTuple):
    """A layer that keeps the keys and values of every token, and a state beside them."""

    kv: KVSpec
    state: StateSpec


CacheSpec: TypeAlias = PagedSpec | StateSpec | SharedSpec | JointSpec
"""State that a layer keeps between steps; a kind of cache is a member of this union, and one of ``LayerCache``."""


class LayerKVCache(NamedTuple):
    """Keys and values of one layer; their layout inside a block is the kernel package's own (``transposed_keys``)."""

    k: Tensor
    v: Tensor
    scales: Tensor | None = None
    """float32 [2, 2, Hk], of keys and of values in float8 (float8_cache.py): scales, then their inverses. None: keys
    and values are in the model's dtype."""
    number: int = 0
    """Index of this layer among the layers that keep keys and values."""
    group: int = 0
    """Group of layers that share a block table: 0 sees all tokens, others have a window."""


class LayerLatentCache(NamedTuple):
    """Vectors of one layer."""

    latents: Tensor
    """[num_blocks, block_size, width]"""
    scales: Tensor | None = None
    """float32 [2, 2, 1], of latents and of rotated keys in float8 (float8_cache.py): scales, then their inverses. None:
    both are in the model's dtype."""


class LayerStates(NamedTuple):
    """States of one layer."""

    states: Tensor
    """uint8 [state slots, num_bytes]: first those of the sequences, by slot, then those of snapshots. Every sequence
    begins with zeros, or with the state of the tokens before it; only csrc/core copies states."""


class LayerJointCache(NamedTuple):
    """Keys, values and states of one layer."""

    kv: LayerKVCache
    states: LayerStates


LayerCache: TypeAlias = LayerKVCache | LayerLatentCache | LayerStates | LayerJointCache
"""The memory of what a layer keeps, as ``CacheSpec`` describes it; a layer with a SharedSpec has that of another."""


StepT = TypeVar("StepT")


@dataclass(frozen=True, slots=True)
class AttentionCall(Generic[StepT]):
    """Attention of one layer in one step, as kernels are handed it.

    It is causal attention of the step's rows over the cache: see ``AttentionLayer`` for the positions that a token
    sees.
    """

    heads: Tensor
    """[T, num_heads + 2 Hk, D]: queries, keys and values side by side, those of a token contiguous. A kernel for which
    keys and values are in the cache already reads the queries alone, and there may be nothing else."""
    layer: AttentionLayer
    cache: LayerKVCache
    step: StepT

    @property
    def queries(self) -> Tensor:
        """A view of the queries [T, num_heads, D]."""
        return self.heads[:, : self.layer.num_heads]


def split_heads(heads: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the queries, keys and values in heads [T, num_heads + 2 Hk, D]."""
    last = num_heads + (heads.shape[1] - num_heads) // 2
    return heads[:, :num_heads], heads[:, num_heads:last], heads[:, last:]


class Batch:
    """A step. This and the next two are what a model sees of a package's own types: it only hands them on."""


class Residual:
    """The residual of a step's tokens, [T, H]: every block of a model reads it and adds to it.

    Its rows are the step's tokens in their order; after ``keep_sampled`` they may be those that are sampled from.
    """


class Handle:
    """Weights, in the form that a package multiplies with or looks up."""


class Routing(NamedTuple):
    """The experts that compute a step's rows."""

    weights: Tensor
    """[T, k]: the factor on an expert's result"""
    ids: Tensor
    """integers [T, k]: indices of experts, different ones in a row"""


class RoutingRule(NamedTuple):
    """Rule by which a row's logits, one for each of E experts, choose the experts of the row and their weights."""

    top_k: int
    """Experts that a row chooses: those with the greatest scores."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Scores are probabilities of the softmax over all experts, or sigmoids. A score is an expert's weight."""
    sums_to_one: bool = False
    """The weights of a row's experts are divided by their sum, to which ``sum_offset`` is added."""
    scale: float = 1.0
    """Factor on the weights."""
    correction: Tensor | None = None
    """float32 [E]: added to sigmoids for the choice alone, not for the weights."""
    groups: int = 1
    """Experts lie in groups of one size. A row's experts are of its ``kept_groups`` best groups: of those whose
    ``group_scores`` best experts, one or two, have the greatest sums of scores. With a softmax it is one."""
    kept_groups: int = 1
    sum_offset: float = 1e-20
    group_scores: int = 2
    factors: Tensor | None = None
    """float32 [E]: factor on the weight of each expert, behind all else."""
    shared: Literal["none", "plain", "gated"] = "none"
    """Kind of the expert number E, which computes every row beside the chosen ones, or none if there is no such expert.
    A plain one has the weight 1. A gated one has the sigmoid of one more logit, behind those of the E experts. Nothing
    else of the rule applies to it."""


BatchT = TypeVar("BatchT", contravariant=True)
ResidualT = TypeVar("ResidualT")
HandleT = TypeVar("HandleT")


class Reduction(Protocol):
    """Adds up products of a step over the ranks that hold a model together."""

    def __call__(
        self, product: Tensor, batch: Any, onto: Tensor | None = None, norm: Norm | None = None
    ) -> Tensor | None:
        """Replace a product [T, N] by the sum over all ranks; with ``onto`` [T, N] add the sum to that.

        With a norm, which the CPU's operations do not ask for, return its rows [T, N] of the result.
        """


@dataclass(frozen=True, slots=True)
class Experts(Generic[HandleT]):
    """Feed-forward blocks among which rows are distributed: down · activation(up · x)."""

    up: tuple[HandleT, ...]
    """Weights of the first products: a handle for each expert, or one of all, one below another."""
    down: tuple[HandleT, ...]
    """Weights of the second products, likewise."""
    activation: Activation
    count: int
    """Number of experts."""


class Ops(Protocol[BatchT, ResidualT, HandleT]):
    """A transformer as its machine sees it: a residual, read through norms and added to.

    A package names its own types for a step, a residual and the handle of a weight; models use ``ModelOps``, in which
    these are opaque. Every operation is told the batch, since it may differ by row or by step. Activations are
    [tokens, features] in the model's dtype. The result of an operation is good until it is called again.

    Most blocks need ``norm_linear``, ``attention`` and ``linear_add_``, which kernels fuse with their surroundings.
    ``residual``, ``normed``, ``linear``, ``add_``, ``plain``, ``input_ids`` and ``positions`` are for blocks that
    compute with tensors of their own.
    """

    device: device
    transposed_keys: bool
    """Keys are [num_blocks, Hk, D, block_size] instead of, like the values, [num_blocks, Hk, block_size, D]."""
    reads_blocks: bool
    """Weights in the format BLOCKS are multiplied as they are."""
    expert_codes: bool
    """``make_experts`` keeps weights in int4 as they are. Otherwise they are to be unpacked before."""

    reduction: Reduction | None
    """Called by ``linear_add_`` and ``add_`` for what they add, before norm and addition; None for one rank."""

    def make_linear(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> HandleT:
        """A handle for weights [N_i, K] that share their input, and whose results lie side by side: N = sum of N_i.

        The CPU copies no contiguous dense weight; a transposed view may be copied. Raises ValueError for a format that
        the package does not have, and for weights in several formats.
        """

    def make_head(self, weight: PackedWeight) -> HandleT:
        """A handle for the weight [V, K] of ``logits``."""

    def make_embedding(self, table: PackedWeight, *, tied: bool, copy: bool = False) -> HandleT:
        """A handle for the table [V, H] of ``embed``; if tied, it is one for ``logits`` as well.

        With ``copy`` a tied table may be laid out anew on the CPU, for both its uses: for models whose other matrices
        are copied there anyway. Otherwise it is read where the file is mapped.
        """

    def make_experts(
        self,
        up: Sequence[Sequence[PackedWeight]],
        down: Sequence[PackedWeight],
        activation: Activation,
        up_biases: Sequence[Sequence[Tensor]] | None = None,
        down_biases: Sequence[Tensor] | None = None,
    ) -> Experts[HandleT]:
        """A handle for ``experts``: for each the weights [I, K] of its first product, one or gate and up, and the
        weight [H, I] of its second; with biases one for each weight.

        The CPU copies no contiguous dense weight. A GPU copies none that lie one behind another in one tensor, in this
        order. Raises ValueError if ``up`` and ``down`` differ in length.
        """

    def embed(
        self, batch: BatchT, embedding: HandleT, position_table: Tensor | None = None, scale: float = 1.0
    ) -> ResidualT:
        """The residual that a step begins with: its tokens' rows of the embedding, plus those of their positions.

        Rows of the embedding are multiplied by ``scale``, and rounded. Ids and positions are not checked.
        """

    def residual(self, x: Tensor, batch: BatchT) -> ResidualT:
        """A residual of the rows x [T, H], which are contiguous. What is added to it may be written to x."""

    def norm_linear(
        self,
        residual: ResidualT,
        norm: Norm | None,
        handle: HandleT,
        batch: BatchT,
        activation: Activation | None = None,
    ) -> Any:
        """The normed residual, or without a norm the residual, times the handle's weights, transposed: a Tensor [T, N].

        Activated, if so said, it is [T, N] (gated: [T, N / 2]) in a form of the package's own, which only
        ``linear_add_`` and ``linear`` read.
        """

    def linear_add_(
        self, x: Any, handle: HandleT, residual: ResidualT, batch: BatchT, norm: Norm | None = None
    ) -> None:
        """residual += x times the handle's weights, transposed; x [T, K] may be what ``norm_linear`` activated.

        With a norm the residual grows by the norm of the product.
        """

    def normed(self, residual: ResidualT, norm: Norm, batch: BatchT) -> Tensor:
        """The normed residual [T, H]."""

    def linear(self, x: Tensor, handle: HandleT, batch: BatchT) -> Tensor:
        """x [T, K], which may be what ``norm_linear`` activated, times the handle's weights, transposed: [T, N]."""

    def route(
        self, residual: ResidualT, norm: Norm | None, router: HandleT, rule: RoutingRule, batch: BatchT
    ) -> tuple[Tensor, Routing]:
        """The normed residual [T, H], or without a norm the residual, and the experts of these rows, by the products
        with the router's weights in float32: [E, H], or [E + 1, H] where the rule's shared expert is gated."""

    def rms_norm(self, x: Tensor, norm: Norm, batch: BatchT) -> Tensor:
        """The norm of the rows of x [M, H], where x is no residual."""

    def activated(self, x: Tensor, activation: Activation, batch: BatchT) -> Tensor:
        """x [M, N] activated; a gated activation takes gate and up side by side and halves N."""

    def gated(self, x: Tensor, gate: Tensor, batch: BatchT) -> Tensor:
        """x [M, N] times the sigmoid of gate [M, N] or [M, 1]."""

    def experts(self, x: Tensor, routing: Routing, experts: Experts[HandleT], batch: BatchT) -> Tensor:
        """The results [T, H] of each row's experts for x [T, K], times their weights, added up in float32."""

    def experts_add_(
        self,
        x: Tensor,
        routing: Routing,
        experts: Experts[HandleT],
        residual: ResidualT,
        batch: BatchT,
        norm: Norm | None = None,
    ) -> None:
        """residual += ``experts``, or the norm of that."""

    def add_(self, x: Tensor, residual: ResidualT, batch: BatchT, norm: Norm | None = None) -> None:
        """residual += x [T, H], or the norm of x. It may overwrite x, and may come to it only when the residual is
        read."""

    def plain(self, residual: ResidualT, batch: BatchT) -> Tensor:
        """The residual's rows [T, H], with all that was added. To write to them changes the residual."""

    def input_ids(self, batch: BatchT) -> Tensor:
        """The token ids of the step, integers [T]."""

    def positions(self, batch: BatchT) -> Tensor:
        """The positions of the step's tokens in their sequences, integers [T]."""

    def attention(self, heads: Tensor, layer: AttentionLayer, cache: LayerKVCache, batch: BatchT) -> Tensor:
        """Causal attention of a step over the cache, its own tokens included: [T, num_heads * D].

        heads [T, (num_heads + 2 Hk) * D] holds queries, keys and values side by side. Queries and keys are normed and
        rotated, keys and values stored in the cache's slots of the step. Where ``layer.shares``, heads
        [T, num_heads * D] holds the queries alone, and the cache has their keys and values. May overwrite ``heads``.
        """

    def make_latent_up(self, up: Tensor, key_dim: int) -> Any:
        """A handle for ``LatentLayer.up``: matrices [num_heads, key_dim + value_dim, rank], which a GPU does not copy.

        Those of keys lie before those of values. They are contiguous.
        """

    def latent_attention(
        self, q: Tensor, rows: Tensor, layer: LatentLayer, cache: LayerLatentCache, batch: BatchT
    ) -> Tensor:
        """Causal attention of a step over latents, those of its own tokens included: [T, num_heads * value_dim].

        q [T, num_heads, key_dim + rope] are the queries, and rows [T, width] the new latents before their norm, and the
        new keys. Keys and the last parts of queries are rotated, latents normed, and latents and keys stored in the
        cache's slots of the step. May overwrite ``q`` and ``rows``.
        """

    def short_conv(self, x: Tensor, conv: ShortConv, cache: LayerStates, batch: BatchT) -> Tensor:
        """The convolution of the step's tokens x [T, C], computed in float32: [T, C]. It renews the states' inputs."""

    def mamba2(self, x: Tensor, mixer: Mamba2, cache: LayerStates, batch: BatchT) -> Tensor:
        """The recurrence of the step's tokens x [T, mixer.width], computed in float32: [T, mixer.inner]. It renews the
        states."""

    def delta_net(self, x: Tensor, mixer: DeltaNet, cache: LayerStates, batch: BatchT) -> Tensor:
        """The recurrence of the step's tokens x [T, mixer.width], as ``mamba2``."""

    def exchange(
        self, heads: Tensor, x: Tensor, residual: ResidualT, layer: AttentionLayer, cache: LayerKVCache, batch: BatchT
    ) -> None:
        """Exchange rows behind ``attention`` x of ``heads``: rows that decode on the host leave the step, and others
        enter it.

        csrc/core/hybrid/host_rows.h says how. It does nothing for a step without lanes.
        """

    def keep_sampled(self, x: Tensor, residual: ResidualT, batch: BatchT) -> Tensor:
        """Drop tokens after the last layer's attention x [T, K]: the rest of the model needs only those that are
        sampled from.

        The package may drop the others from the residual, and returns the rows of x that are still in it.
        """

    def sampled_step(self, residual: ResidualT, batch: BatchT) -> tuple[Any, Tensor | None]:
        """Drop tokens before layers that store no keys and values: these layers need only those that are sampled from.

        The package may drop the others from the residual. Returns the step of the tokens that are left, and their
        indices int64 [S]; None if all are left.
        """

    def hidden(self, residual: ResidualT, norm: Norm | None, batch: BatchT) -> Tensor:
        """[num_samples, H]: the normed residual of the tokens that are sampled from, which ``logits`` multiplies.

        For a step with Need.mean it is [T, H]: that of all tokens.
        """

    def logits(
        self,
        residual: ResidualT,
        norm: Norm | None,
        handle: HandleT,
        batch: BatchT,
        softcap: float = 0.0,
        scale: float = 1.0,
    ) -> Any:
        """float32 [num_samples, N] of the tokens whose logits the step wants; None if it wants none.

        They are multiplied by a ``scale`` > 0, and with a ``softcap`` > 0 then softcap * tanh(logit / softcap). If a
        step does not need all of them, the result may be the part that it needs, in the form of the package's own
        sampler.
        """


ModelOps: TypeAlias = Ops[Batch, Residual, Handle]
"""``Ops`` as models see them."""
