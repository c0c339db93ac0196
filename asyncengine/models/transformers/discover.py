"""Notes on a model: where it attends, in which order, over which keys, and what its layers see.

A model of transformers says none of this in its config alone. It is built without memory and run once over a few
tokens; what it hands to the attention function is noted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from asyncengine.errors import UnsupportedModelError
from asyncengine.kernels.ops import KVSpec
from asyncengine.models.transformers.interface import MaskFunction, hooked
from asyncengine.models.transformers.linears import is_linear, weight_of

TOKENS = 5
"""Tokens of the run; no size of a model is likely to be the same."""
_FAR = 1 << 16
"""Last position at which masks are looked at."""
_HARMLESS = {
    "dropout",
    "scaling",
    "sliding_window",
    "softcap",
    "s_aux",
    "is_causal",
    "position_ids",
    "use_cache",
    "indices",
}
"""Keywords of an attention function that are understood, or say nothing new."""
_IGNORED = {
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "cache_position",
}


@dataclass(frozen=True, slots=True)
class Site:
    """One call of the attention function in a pass over the layers."""

    module: str
    """Name of the module that calls."""
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int
    softcap: float
    sinks: str
    """Name of the parameter with the score of each head that belongs to no key; empty without one."""
    chosen: bool
    """The layer would choose among more tokens than the model serves here; of these a token sees all."""

    @property
    def spec(self) -> KVSpec:
        """The layer's part of the cache. Keys and values of unlike sizes take the larger one, filled up with zeros."""
        return KVSpec(self.num_kv_heads, max(self.key_dim, self.value_dim), self.window)


@dataclass
class _Mask:
    window: int
    """Tokens that a query sees, 0 for all before it; -1 for what no layer of the cache can do."""
    tensor: Tensor = field(repr=False)


class Recorder:
    """Hooks that note the calls of a run, and compute nothing."""

    def __init__(self, model: Any, longest: int) -> None:
        self.sites: list[Site] = []
        self._longest = longest
        self._most_chosen: int = getattr(model.config.get_text_config(decoder=True), "index_topk", None) or 0
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._masks: list[_Mask] = []

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **how: Any) -> Tensor:
        name = self._names[id(module)]
        where = f"{name} ({type(module).__name__})"
        if unknown := sorted(
            key for key, value in how.items() if value is not None and key not in _HARMLESS | _IGNORED
        ):
            raise UnsupportedModelError(f"{where} attends with {', '.join(unknown)}, which is not supported")
        sinks, chosen = self._parameter(how.get("s_aux"), where), how.get("indices") is not None
        if chosen and self._most_chosen < self._longest:
            raise UnsupportedModelError(
                f"{where} chooses {self._most_chosen} of the tokens to attend to: only texts of as many tokens are "
                "served, with max_model_len"
            )
        if q.shape[0] != 1 or k.shape[2] != q.shape[2] or v.shape[2] != k.shape[2]:
            raise UnsupportedModelError(f"{where} attends to {k.shape[2]} keys for {q.shape[2]} tokens of one text")
        if q.shape[1] % k.shape[1] or v.shape[1] != k.shape[1]:
            raise UnsupportedModelError(f"{where} has {q.shape[1]} heads over {k.shape[1]} and {v.shape[1]}")
        scale = how.get("scaling")
        self.sites.append(
            Site(
                name, q.shape[1], k.shape[1], k.shape[3], v.shape[3],
                float(q.shape[3] ** -0.5 if scale is None else scale),
                self._window(mask, where, bool(how.get("is_causal", getattr(module, "is_causal", True)))),
                float(how.get("softcap") or 0.0), sinks, chosen,
            )
        )  # fmt: skip
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    def _parameter(self, tensor: Tensor | None, where: str) -> str:
        """The name of a parameter; empty for None."""
        if tensor is None:
            return ""
        name: str | None = self._parameters.get(id(tensor))
        if name is None:
            raise UnsupportedModelError(f"{where} has sinks that it computes, which is not supported")
        return name

    def mix(self, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def mask(self, sees: MaskFunction, queries: int, keys: int, device: torch.device) -> Tensor | None:
        # A value for each element: what a model makes of a mask is no longer this tensor.
        tensor = torch.zeros(1, 1, queries, keys, dtype=torch.bool, device=device)
        self._masks.append(_Mask(_window_of(sees, min(self._longest - 1, _FAR)), tensor))
        return tensor

    def _window(self, mask: Tensor | None, where: str, is_causal: bool) -> int:
        if mask is None:
            if not is_causal:
                raise UnsupportedModelError(f"{where} sees tokens that come later, which is not supported")
            return 0
        window = next((noted.window for noted in self._masks if noted.tensor is mask), -2)
        if window < 0:
            why = (
                "has a mask of its own"
                if window == -2
                else "sees other tokens than those before it, or a window of them"
            )
            raise UnsupportedModelError(f"{where} {why}, which is not supported")
        return window


def _window_of(sees: MaskFunction, last: int) -> int:
    """The window that a mask is, 0 for none, up to the ``last`` position; -1 if it is no causal mask with or without a
    window."""
    zero = torch.tensor(0)

    def row(query: int) -> Tensor:
        return sees(zero, zero, torch.tensor(query), torch.arange(query + 2)).expand(query + 2)

    try:
        window = int(row(last).sum())
        window = 0 if window == last + 1 else window
        for query in {min(query, last) for query in (0, 1, 7, max(0, window - 1), window, window + 1, 1000, last)}:
            first = max(0, query - window + 1) if window else 0
            keys = torch.arange(query + 2)
            if not torch.equal(row(query), (keys <= query) & (keys >= first)):
                return -1
    except IndexError:
        return -1
    return window


@contextmanager
def stubbed(model: Any, head: nn.Module) -> Iterator[None]:
    """Put a module in the place of a model's head meanwhile."""
    owner, name = head_place(model)
    own = getattr(owner, name)
    setattr(owner, name, head)
    try:
        yield
    finally:
        setattr(owner, name, own)


def head_place(model: Any) -> tuple[nn.Module, str]:
    """The module that has a model's head, and the head's name in it."""
    head = model.get_output_embeddings()
    for module in model.modules():
        for name, child in module.named_children():
            if child is head and head is not model.get_input_embeddings():
                return module, name
    raise UnsupportedModelError(f"{type(model).__name__} has no head over its vocabulary")


class Head(nn.Module):
    """Stands in for a model's head: it keeps what the head would read, and answers for each token with ``answer``."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.x: Tensor | None = None
        self.weight = self._answer = answer  # modules may ask for its dtype

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return self._answer.expand(*x.shape[:-1], -1)


@dataclass(frozen=True, slots=True)
class Notes:
    """Everything that a run of a model tells."""

    sites: tuple[Site, ...]
    hidden_size: int
    """Numbers of a token that the head reads."""
    logit_scale: float
    logit_softcap: float
    groups: tuple[tuple[str, ...], ...] = ()
    """Names of linear layers, those of a module that read one tensor together."""
    num_parameters: int = 0


_LOW, _HIGH = 1e-3, 1e30
_ANSWERS = (-_HIGH, -40.0, -3.0, -_LOW, 0.0, _LOW, 0.5, 1.0, 7.0, 40.0, _HIGH)


def spread(model: nn.Module) -> None:
    """Give a model on the meta device numbers on the CPU: zeros, each tensor over the memory of one element.

    For models that read a tensor while they run.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(_zeros(parameter), requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, _zeros(buffer))


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype).expand(like.shape)


def discover(model: Any, longest: int) -> Notes:
    """Run a model without memory, whose config has the implementation PROBE, for texts of up to ``longest`` tokens.

    Raises UnsupportedModelError for a layer that makes no call, or one that the cache cannot serve.
    """
    recorder, head = Recorder(model, longest), Head(torch.tensor(_ANSWERS))
    out = _run(model, recorder, head)
    check_layers(model, recorder.sites)
    assert head.x is not None
    return Notes(tuple(recorder.sites), head.x.shape[-1], *_read_logits(out.logits, type(model).__name__))


def find_groups(model: Any, longest: int) -> tuple[tuple[str, ...], ...]:
    """``Notes.groups`` of a model without memory. It is run once more with the layers of a group as views of one
    product: if it does not take these, each layer is by itself.
    """
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    calls: dict[tuple[str, int], dict[str, None]] = {}
    inputs: list[Tensor] = []  # kept, so that no other has its id

    def note(name: str, x: Tensor) -> None:
        inputs.append(x)
        calls.setdefault((name.rpartition(".")[0], id(x)), {})[name] = None

    handles = [
        module.register_forward_pre_hook(lambda _, given, name=name: note(name, given[0]))
        for name, module in linears.items()
    ]
    _run(model, Recorder(model, longest), Head(torch.tensor(_ANSWERS)))
    for handle in handles:
        handle.remove()
    alone, seen = tuple((name,) for name in linears), set[str]()
    groups = []
    for names in map(tuple, calls.values()):
        if not seen.intersection(names):
            seen.update(names)
            groups.append(names)
    for names in groups:
        width = sum(len(weight_of(linears[name])) for name in names)
        for name in names if len(names) > 1 else ():
            model.set_submodule(name, _View(linears[name], width))
    try:
        _run(model, Recorder(model, longest), Head(torch.tensor(_ANSWERS)))
    except (RuntimeError, AttributeError):
        return alone
    return (*groups, *((name,) for name in linears if name not in seen))


class _View(nn.Module):
    """A linear layer whose result is a view of a wider one."""

    def __init__(self, linear: nn.Module, width: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_of(linear).shape
        self._width = width

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self._width)[..., : self.out_features]


def _run(model: Any, recorder: Recorder, head: Head) -> Any:
    device = next(model.parameters()).device
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device=device)
    positions = torch.arange(TOKENS, device=device)[None]
    every = torch.ones_like(ids)  # without it positions are read, to see whether there are several texts
    with torch.no_grad(), hooked(recorder), stubbed(model, head):
        return model(input_ids=ids, position_ids=positions, attention_mask=every, use_cache=False)


def _read_logits(logits: Tensor, name: str) -> tuple[float, float]:
    """The scale and the soft cap (0: none) that make a model's logits of the answers of its head.

    Raises UnsupportedModelError if they are made in another way.
    """
    wrong = UnsupportedModelError(f"{name} computes more of its logits than a scale and a soft cap")
    if logits.device.type == "meta" or logits.shape != (1, TOKENS, len(_ANSWERS)):
        raise wrong
    given, got = torch.tensor(_ANSWERS, dtype=torch.float64), logits[0, 0].double()
    scale = float(got[_ANSWERS.index(_LOW)]) / _LOW
    softcap = float(got[-1]) if abs(float(got[-1])) < 1e6 else 0.0
    made = given * scale
    if softcap > 0:
        scale, made = round(scale, 12), softcap * torch.tanh(made / softcap)
    if not scale > 0 or not torch.allclose(made, got, rtol=1e-4, atol=0):
        raise wrong
    return scale, softcap


def check_layers(model: nn.Module, sites: Sequence[Site]) -> None:
    """Raises UnsupportedModelError, naming index and type, for a layer of which no module attends."""
    for name, modules in model.named_modules():
        if not isinstance(modules, nn.ModuleList):
            continue
        attends = [any(f"{site.module}.".startswith(f"{name}.{i}.") for site in sites) for i in range(len(modules))]
        if any(attends) and not all(attends):
            index = attends.index(False)
            kind = type(modules[index]).__name__
            raise UnsupportedModelError(f"layer {index} ({kind}) makes no call of the attention interface")
    if not sites:
        raise UnsupportedModelError(f"{type(model).__name__} makes no call of the attention interface")
