"""The class of transformers that runs a model directory, and its configuration in the engine's terms."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel, initialization
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from asyncengine.errors import AsyncEngineError, ModelError, UnsupportedModelError
from asyncengine.models.config import MAX_POSITIONS, ModelConfig, RawConfig
from asyncengine.models.files import excerpt
from asyncengine.models.transformers.discover import Notes, discover, find_groups, spread
from asyncengine.models.transformers.interface import PROBE, STEP

_SIZES = (
    "num_hidden_layers", "n_layer", "num_attention_heads", "num_key_value_heads", "n_head", "head_dim", "hidden_size",
    "n_embd", "intermediate_size", "n_inner", "moe_intermediate_size", "num_experts", "num_experts_per_tok",
    "vocab_size", "max_position_embeddings", "n_positions",
)  # fmt: skip
"""Keys that are checked before transformers makes anything of them."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model that transformers builds."""

    architecture: str
    kind: type[PreTrainedModel]
    config: PreTrainedConfig
    """of the whole model; every build takes a copy"""
    notes: Notes
    has_head: bool
    """False for a checkpoint of the layers alone"""

    @property
    def implementation(self) -> str:
        """Name of the attention that the model is built with: layers that choose what they see read a mask for that."""
        return PROBE if any(site.chosen for site in self.notes.sites) else STEP

    def model_config(self) -> ModelConfig:
        text = self.config.get_text_config(decoder=True)
        sites = self.notes.sites
        heads, kv_heads, dim = sites[0].num_heads, sites[0].num_kv_heads, sites[0].spec.head_dim
        return ModelConfig(
            vocab_size=text.vocab_size,
            hidden_size=self.notes.hidden_size,
            intermediate_size=getattr(text, "intermediate_size", None) or 4 * self.notes.hidden_size,
            num_layers=len(sites),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            max_positions=max_positions(text),
            norm_eps=0.0,
            activation="silu_mul",
            tie_word_embeddings=False,
            initializer_range=float(getattr(text, "initializer_range", None) or 0.02),
            layer_scales=tuple(site.scale for site in sites),
            layer_caches=tuple(site.spec for site in sites),
            layer_ropes=(None,) * len(sites),
            score_softcap=sites[0].softcap,
            attention_sinks=any(site.sinks for site in sites),
            logit_scale=self.notes.logit_scale,
            logit_softcap=self.notes.logit_softcap,
            has_head=self.has_head,
            foreign=True,
        )


def read_source(raw: RawConfig, *, longest: int | None = None, trust_remote_code: bool = False) -> Source:
    """Find the class and run it without memory, for texts of up to ``longest`` tokens; None: the config's.

    Raises UnsupportedModelError for a model that cannot be served, by what it is that cannot; ModelError for a
    config.json that transformers refuses.
    """
    for key in _SIZES:
        if isinstance(raw.values.get(key), int):
            raw.integer(key)
    directory = Path(raw.source).parent
    remote = raw.get("auto_map", dict, {}).get("AutoModelForCausalLM")
    if not trust_remote_code and raw.get("model_type", str, "") not in CONFIG_MAPPING:
        raise _unknown(raw, hint=remote is not None)
    with quietly():
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
        except Exception as e:
            raise ModelError(f"{raw.source}: transformers cannot read it: {brief(e)}") from e
        architecture, kind, has_head = _find_class(raw, config, trust_remote_code=trust_remote_code)
        if getattr(config, "is_encoder_decoder", False):
            raise raw.unsupported(f"{architecture}, which has an encoder and a decoder,")
        if not kind.is_backend_compatible():
            raise raw.unsupported(f"{architecture}, which does not let another attention than its own run,")
        text = config.get_text_config(decoder=True)
        longest = longest or max_positions(text)
        try:
            notes = _run(kind, config, longest)
        except AsyncEngineError as e:
            raise UnsupportedModelError(f"{raw.source}: {architecture} is not supported: {e}") from e
        except Exception as e:
            raise raw.unsupported(f"{architecture}, which does not run without memory ({brief(e)}),") from e
    _check(raw, architecture, notes)
    if window := _moving_window(text, notes, longest):
        raise raw.unsupported(f"sliding_window = {window} without max_model_len = {window} in {architecture}")
    return Source(architecture, kind, config, notes, has_head)


def _run(kind: type[PreTrainedModel], config: PreTrainedConfig, longest: int) -> Notes:
    with torch.device("meta"):
        model = build(kind, config, PROBE, torch.float32)
    model.tie_weights()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    try:
        notes = discover(model, longest)
    except (RuntimeError, NotImplementedError):  # it reads a tensor
        spread(model)
        notes = discover(model, longest)
    return dataclasses.replace(notes, groups=find_groups(model, longest), num_parameters=num_parameters)


def _find_class(
    raw: RawConfig, config: PreTrainedConfig, *, trust_remote_code: bool
) -> tuple[str, type[PreTrainedModel], bool]:
    """The name of the architecture, the class that generates, and whether the checkpoint has a head for it."""
    names = _names(raw)
    remote = raw.get("auto_map", dict, {}).get("AutoModelForCausalLM")
    if remote is not None and trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return names[0] if names else str(remote), get_class_from_dynamic_module(remote, Path(raw.source).parent), True
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    name = next((name for name in names if hasattr(transformers, name)), None)
    if name is None or causal is None:
        raise _unknown(raw, hint=remote is not None)
    own = getattr(transformers, name)
    kind = getattr(transformers, causal if isinstance(causal, str) else causal[0])
    if own is kind or own.__name__.endswith(("ForCausalLM", "LMHeadModel")):
        return name, own, True
    if own.__name__.endswith("Model"):
        return name, kind, False
    raise raw.unsupported(f"architecture {name}, which generates no text,")


def _names(raw: RawConfig) -> list[str]:
    return [name for name in raw.get("architectures", list, []) if isinstance(name, str)]


def _unknown(raw: RawConfig, *, hint: bool) -> UnsupportedModelError:
    found = excerpt(_names(raw)) if _names(raw) else "none"
    more = "; --trust-remote-code would run the code that comes with it" if hint else ""
    return UnsupportedModelError(
        f"{raw.source}: architecture {found} is not supported: neither asyncengine nor transformers "
        f"{transformers.__version__} has a causal language model of that name{more}"
    )


def build(kind: type[PreTrainedModel], config: PreTrainedConfig, implementation: str, dtype: torch.dtype) -> Any:
    """A model on the current device whose attention and experts go to the hooks. Its weights are not set."""
    own = copy.deepcopy(config)
    with initialization.no_init_weights():
        model = kind._from_config(
            own, dtype=dtype, attn_implementation=implementation, experts_implementation=implementation
        )
    return model.eval()


def _check(raw: RawConfig, architecture: str, notes: Notes) -> None:
    """Raises UnsupportedModelError for what the operations have not, or have for all layers alike."""
    sites = notes.sites
    if raw.get("model_type", str, "") == "xmod":
        raise raw.unsupported(f"{architecture}, whose adapters are chosen by the language of a text,")
    if len({site.num_heads for site in sites}) > 1:
        raise raw.unsupported(f"{architecture} with numbers of heads that differ by layer")
    if len({site.softcap for site in sites}) > 1:
        raise raw.unsupported(f"{architecture} with soft caps of scores that differ by layer")


def _moving_window(text: PreTrainedConfig, notes: Notes, longest: int) -> int:
    """A window that transformers applies to its cache and not to its masks: it sees less when it generates than in a
    prompt. 0: none."""
    window = getattr(text, "sliding_window", None)
    if getattr(text, "layer_types", None) or not isinstance(window, int) or window >= longest:
        return 0
    return 0 if any(site.window for site in notes.sites) else window


def max_positions(text: PreTrainedConfig) -> int:
    """Tokens of the longest text; where a config does not say it, as many as a table of positions may have."""
    most = getattr(text, "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        return MAX_POSITIONS
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]
    for kind in kinds:
        if kind.get("rope_type") in ("linear", "yarn"):
            original = kind.get("original_max_position_embeddings") or most
            most = max(most, int(float(kind.get("factor") or 1.0) * original))
    return min(most, MAX_POSITIONS)


@contextmanager
def naming(architecture: str) -> Iterator[None]:
    """Let a refusal name the architecture, and an error of its modules be one."""
    try:
        yield
    except UnsupportedModelError as e:
        raise UnsupportedModelError(f"{architecture} is not supported: {e}") from e
    except Exception as e:
        raise UnsupportedModelError(f"{architecture} does not run over the rows of a step: {brief(e)}") from e


@contextmanager
def quietly() -> Iterator[None]:
    """Let transformers log errors alone, and show no bars, meanwhile."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def brief(error: Exception) -> str:
    """The kind and the start of a library's message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
