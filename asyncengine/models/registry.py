"""Registry of model families, by the entries of config.json's "architectures"."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from asyncengine.errors import ModelError, UnsupportedModelError
from asyncengine.kernels.ops import Batch, BatchT, LayerCache, ModelOps
from asyncengine.models import (
    bamba,
    bloom,
    cohere2,
    deepseek,
    exaone4,
    falcon,
    falcon_h1,
    gemma2,
    gemma3,
    gemma4,
    glm,
    glm4_moe,
    gpt2,
    gpt_oss,
    granite,
    granite_hybrid,
    lfm2,
    llama,
    mamba2,
    minimax_m2,
    ministral3,
    mistral,
    mixtral,
    mpt,
    nemotron_h,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
)
from asyncengine.models.config import ModelConfig, RawConfig
from asyncengine.models.files import excerpt
from asyncengine.models.weights.formats.base import TensorSource
from asyncengine.models.weights.formats.choose import METHODS, MXFP4, check_method
from asyncengine.models.weights.source import WeightSource

logger = logging.getLogger(__name__)


class CausalLM(Protocol[BatchT]):
    """A loaded model, for steps in the form of the kernel package that it was built over."""

    splits_head: bool
    """Each of several ranks computes a part of the logits."""

    def forward(self, batch: BatchT, caches: Iterable[LayerCache]) -> Any:
        """``run``, then ``logits``."""

    def run(self, batch: BatchT, caches: Iterable[LayerCache]) -> Any:
        """The layers of the step, which write its caches: a residual for the next two."""

    def logits(self, residual: Any, batch: BatchT) -> Any:
        """Return ``Ops.logits``, float32 [num_samples, vocab_size] as a rule."""

    def hidden(self, residual: Any, batch: BatchT) -> Tensor:
        """The normed states of the samples, [num_samples, H] in the model's dtype; ``logits`` may come before."""


class Family(NamedTuple):
    read_config: Callable[[RawConfig], ModelConfig]
    build: Callable[[ModelConfig, WeightSource, ModelOps, int], CausalLM[Batch]]
    model_types: tuple[str, ...]
    """Values of model_type, by which transformers chooses its class."""
    quantizable: bool = True
    """True if float8 kernels can serve the family: its norms are RMS norms and its activation is silu_mul."""
    packings: tuple[str, ...] = tuple(METHODS)
    """Values of quant_method in quantization_config whose tensors the family reads."""
    num_parameters: int = 0
    """Parameters of the one model that modules of transformers compute; 0 for native code."""
    reads: tuple[str, ...] = ()
    """Keys that the family implements, for which others have the value of ``_ONE_VALUE``."""


FAMILIES = {
    "GPT2LMHeadModel": Family(gpt2.read_config, gpt2.GPT2LMHeadModel, ("gpt2",), quantizable=False),
    "LlamaForCausalLM": Family(llama.read_config, llama.LlamaForCausalLM, ("llama",)),
    "MistralForCausalLM": Family(mistral.read_config, mistral.MistralForCausalLM, ("mistral", "ministral")),
    "MinistralForCausalLM": Family(mistral.read_config, mistral.MistralForCausalLM, ("mistral", "ministral")),
    "Qwen2ForCausalLM": Family(qwen2.read_config, qwen2.Qwen2ForCausalLM, ("qwen2",)),
    "Qwen3ForCausalLM": Family(qwen3.read_config, qwen3.Qwen3ForCausalLM, ("qwen3",)),
    "Qwen3MoeForCausalLM": Family(qwen3_moe.read_config, qwen3_moe.Qwen3MoeForCausalLM, ("qwen3_moe",)),
    "Qwen2MoeForCausalLM": Family(qwen2_moe.read_config, qwen2_moe.Qwen2MoeForCausalLM, ("qwen2_moe",)),
    "MixtralForCausalLM": Family(mixtral.read_config, mixtral.MixtralForCausalLM, ("mixtral",)),
    "OlmoeForCausalLM": Family(olmoe.read_config, olmoe.OlmoeForCausalLM, ("olmoe",)),
    "Glm4MoeForCausalLM": Family(glm4_moe.read_config, glm4_moe.Glm4MoeForCausalLM, ("glm4_moe",)),
    "DeepseekV3ForCausalLM": Family(deepseek.read_config, deepseek.DeepseekForCausalLM, ("deepseek_v3",)),
    "DeepseekV2ForCausalLM": Family(deepseek.read_v2_config, deepseek.DeepseekForCausalLM, ("deepseek_v2",)),
    "Glm4MoeLiteForCausalLM": Family(deepseek.read_lite_config, deepseek.DeepseekForCausalLM, ("glm4_moe_lite",)),
    "MiniMaxM2ForCausalLM": Family(minimax_m2.read_config, minimax_m2.MiniMaxM2ForCausalLM, ("minimax_m2",)),
    "GptOssForCausalLM": Family(
        gpt_oss.read_config, gpt_oss.GptOssForCausalLM, ("gpt_oss",), quantizable=False, packings=(MXFP4,)
    ),
    "Gemma2ForCausalLM": Family(gemma2.read_config, gemma2.Gemma2ForCausalLM, ("gemma2",), quantizable=False),
    "Gemma3ForCausalLM": Family(gemma3.read_config, gemma3.Gemma3ForCausalLM, ("gemma3_text",), quantizable=False),
    "Gemma4ForCausalLM": Family(
        gemma4.read_config, gemma4.Gemma4ForCausalLM, ("gemma4_text",), quantizable=False, reads=("per_layer_config",)
    ),
    "Lfm2ForCausalLM": Family(lfm2.read_config, lfm2.Lfm2ForCausalLM, ("lfm2",), quantizable=False),
    "Lfm2MoeForCausalLM": Family(lfm2.read_mixture_config, lfm2.Lfm2MoeForCausalLM, ("lfm2_moe",), quantizable=False),
    "Qwen3NextForCausalLM": Family(
        qwen3_next.read_config, qwen3_next.Qwen3NextForCausalLM, ("qwen3_next",), quantizable=False
    ),
    "Qwen3_5ForCausalLM": Family(
        qwen3_next.read_qwen35_config, qwen3_next.Qwen3NextForCausalLM, ("qwen3_5_text",), quantizable=False
    ),
    "Qwen3_5MoeForCausalLM": Family(
        qwen3_next.read_qwen35_moe_config, qwen3_next.Qwen3NextForCausalLM, ("qwen3_5_moe_text",), quantizable=False
    ),
    "Mamba2ForCausalLM": Family(mamba2.read_config, mamba2.Mamba2ForCausalLM, ("mamba2",), quantizable=False),
    "BambaForCausalLM": Family(bamba.read_config, bamba.BambaForCausalLM, ("bamba",), quantizable=False),
    "GraniteMoeHybridForCausalLM": Family(
        granite_hybrid.read_config, granite_hybrid.GraniteMoeHybridForCausalLM, ("granitemoehybrid",), quantizable=False
    ),
    "FalconH1ForCausalLM": Family(
        falcon_h1.read_config, falcon_h1.FalconH1ForCausalLM, ("falcon_h1",), quantizable=False
    ),
    "NemotronHForCausalLM": Family(
        nemotron_h.read_config, nemotron_h.NemotronHForCausalLM, ("nemotron_h",), quantizable=False
    ),
    "Phi3ForCausalLM": Family(phi3.read_config, phi3.Phi3ForCausalLM, ("phi3",)),
    "SmolLM3ForCausalLM": Family(smollm3.read_config, smollm3.SmolLM3ForCausalLM, ("smollm3",)),
    "SeedOssForCausalLM": Family(seed_oss.read_config, seed_oss.SeedOssForCausalLM, ("seed_oss",)),
    "Ministral3ForCausalLM": Family(ministral3.read_config, ministral3.Ministral3ForCausalLM, ("ministral3",)),
    "Olmo2ForCausalLM": Family(olmo2.read_config, olmo2.Olmo2ForCausalLM, ("olmo2",), quantizable=False),
    "Olmo3ForCausalLM": Family(olmo3.read_config, olmo3.Olmo3ForCausalLM, ("olmo3",), quantizable=False),
    "Exaone4ForCausalLM": Family(exaone4.read_config, exaone4.Exaone4ForCausalLM, ("exaone4",), quantizable=False),
    "GraniteForCausalLM": Family(granite.read_config, granite.GraniteForCausalLM, ("granite",)),
    "Cohere2ForCausalLM": Family(cohere2.read_config, cohere2.Cohere2ForCausalLM, ("cohere2",), quantizable=False),
    "GlmForCausalLM": Family(glm.read_config, glm.GlmForCausalLM, ("glm",)),
    "BloomForCausalLM": Family(bloom.read_config, bloom.BloomForCausalLM, ("bloom",), quantizable=False),
    "MptForCausalLM": Family(mpt.read_config, mpt.MptForCausalLM, ("mpt",), quantizable=False),
    "FalconForCausalLM": Family(falcon.read_config, falcon.FalconForCausalLM, ("falcon",), quantizable=False),
    "Glm4ForCausalLM": Family(glm.read_glm4_config, glm.Glm4ForCausalLM, ("glm4",), quantizable=False),
}


MAX_LABELS = 1 << 12


def _classifier(family: Family) -> Family:
    """The family's models with a head for labels."""
    return family._replace(read_config=lambda raw: _with_labels(raw, family.read_config(raw)))


def _with_labels(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    """Labels by id2label; without it num_labels of them, two by default, as transformers has it."""
    named = raw.get("id2label", dict, None)
    if named is None:
        count = raw.get("num_labels", int, 2)
        if not 1 <= count <= MAX_LABELS:
            raise ModelError(f"{raw.source}: 'num_labels' must be in [1, {MAX_LABELS}], found {excerpt(count)}")
        labels = tuple(f"LABEL_{i}" for i in range(count))
    else:
        labels = tuple(named.get(str(i)) for i in range(len(named)))
        if not 1 <= len(labels) <= MAX_LABELS or not all(isinstance(label, str) for label in labels):
            raise ModelError(f"{raw.source}: 'id2label' must name 1 to {MAX_LABELS} labels by 0, 1, ...")
    kind = raw.get("problem_type", str, None)
    if kind == "regression":
        raise raw.unsupported("problem_type = regression")
    exclusive = len(labels) > 1 and kind != "multi_label_classification"
    return replace(
        config, labels=labels, exclusive_labels=exclusive, tie_word_embeddings=False, logit_scale=1.0, logit_softcap=0.0
    )


def _text_part(model_type: str, *architectures: str) -> Family:
    """Models for images whose language model is one of these families; the first, if the config does not say."""
    kinds = {kind: FAMILIES[name] for name in architectures for kind in FAMILIES[name].model_types}
    first = FAMILIES[architectures[0]]

    def read_config(raw: RawConfig) -> ModelConfig:
        text = raw.text_part()
        _require_one_value(text, first.reads)
        kind = text.get("model_type", str, first.model_types[0])
        if kind not in kinds:
            raise text.unsupported(f"model_type = {excerpt(kind)}")
        return kinds[kind].read_config(text)

    return first._replace(read_config=read_config, model_types=(model_type,))


FAMILIES["Gemma3ForConditionalGeneration"] = _text_part("gemma3", "Gemma3ForCausalLM")
FAMILIES["Gemma4ForConditionalGeneration"] = _text_part("gemma4", "Gemma4ForCausalLM")
FAMILIES["Qwen3_5ForConditionalGeneration"] = _text_part("qwen3_5", "Qwen3_5ForCausalLM")
FAMILIES["Qwen3_5MoeForConditionalGeneration"] = _text_part("qwen3_5_moe", "Qwen3_5MoeForCausalLM")
FAMILIES["Mistral3ForConditionalGeneration"] = _text_part("mistral3", "MistralForCausalLM", "Ministral3ForCausalLM")

for _name, _causal in (
    ("GPT2", "GPT2LMHeadModel"),
    ("Llama", "LlamaForCausalLM"),
    ("Mistral", "MistralForCausalLM"),
    ("Ministral", "MinistralForCausalLM"),
    ("Qwen2", "Qwen2ForCausalLM"),
    ("Qwen3", "Qwen3ForCausalLM"),
    ("Qwen3Moe", "Qwen3MoeForCausalLM"),
    ("Qwen2Moe", "Qwen2MoeForCausalLM"),
    ("Mixtral", "MixtralForCausalLM"),
    ("Olmoe", "OlmoeForCausalLM"),
    ("Glm4Moe", "Glm4MoeForCausalLM"),
    ("DeepseekV3", "DeepseekV3ForCausalLM"),
    ("DeepseekV2", "DeepseekV2ForCausalLM"),
    ("Glm4MoeLite", "Glm4MoeLiteForCausalLM"),
    ("MiniMaxM2", "MiniMaxM2ForCausalLM"),
    ("GptOss", "GptOssForCausalLM"),
    ("Gemma2", "Gemma2ForCausalLM"),
    ("Gemma3Text", "Gemma3ForCausalLM"),
    ("Gemma3", "Gemma3ForConditionalGeneration"),
    ("Gemma4Text", "Gemma4ForCausalLM"),
    ("Gemma4", "Gemma4ForConditionalGeneration"),
    ("Lfm2", "Lfm2ForCausalLM"),
    ("Lfm2Moe", "Lfm2MoeForCausalLM"),
    ("Phi3", "Phi3ForCausalLM"),
    ("SmolLM3", "SmolLM3ForCausalLM"),
    ("SeedOss", "SeedOssForCausalLM"),
    ("Ministral3", "Ministral3ForCausalLM"),
    ("Mistral3", "Mistral3ForConditionalGeneration"),
    ("Olmo2", "Olmo2ForCausalLM"),
    ("Olmo3", "Olmo3ForCausalLM"),
    ("Exaone4", "Exaone4ForCausalLM"),
    ("Granite", "GraniteForCausalLM"),
    ("Cohere2", "Cohere2ForCausalLM"),
    ("Glm", "GlmForCausalLM"),
    ("Glm4", "Glm4ForCausalLM"),
):
    # transformers has no such class of some.
    if _name not in (
        "Granite",
        "Cohere2",
        "Olmoe",
        "Glm4Moe",
        "Glm4MoeLite",
        "MiniMaxM2",
        "Gemma4Text",
        "Gemma4",
        "Lfm2",
        "Lfm2Moe",
    ):
        FAMILIES[f"{_name}ForSequenceClassification"] = _classifier(FAMILIES[_causal])
    # Saved without a head, as embedding models are. The weights say whether there is one (``settle_head``).
    FAMILIES[f"{_name}Model"] = FAMILIES[_causal]


def settle_head(config: ModelConfig, weights: TensorSource) -> ModelConfig:
    """The configuration with the head that the weights have.

    As in transformers, a tied matrix may have the head's name or the embedding's, and a head that differs from the
    embedding is used although the configuration ties them. A model without a head of either kind gives vectors alone:
    the embedding stands in for its head.
    """
    head, embedding = (f"{module}.weight" for module in (config.head_shape[0], config.embedding))
    if config.labels or config.foreign:
        return config
    if not config.tie_word_embeddings:
        if any(f"{config.head_shape[0]}.{name}" in weights for name in ("weight", "qweight", "weight_packed")):
            return config
        logger.warning("the checkpoint has no %s: the model gives vectors and generates no text", head)
        return replace(config, tie_word_embeddings=True, has_head=False)
    if head not in weights:
        return config
    if embedding not in weights:
        return replace(config, embedding=config.head_shape[0])
    if weights.equal(embedding, head):
        return config
    logger.warning("tie_word_embeddings is ignored: the checkpoint has %s and another %s", embedding, head)
    return replace(config, tie_word_embeddings=False)


def settle_rotation(config: ModelConfig, weights: TensorSource) -> ModelConfig:
    """The configuration with the pairs of elements that the weights' order of queries and keys has rotated."""
    if not weights.rotates_neighbours:
        return config
    return replace(config, layer_ropes=tuple(rope and replace(rope, interleaved=True) for rope in config.layer_ropes))


_ONE_VALUE: dict[str, Any] = {
    "quantization_config": None,
    "is_causal": True,
    "per_layer_config": None,
    "attention_chunk_size": None,
    "kv_sharing_modes": None,
    "transformers_weights": None,
}
"""Keys by which transformers changes the computation of any family, and the values that are implemented."""


def _require_one_value(raw: RawConfig, but: Iterable[str] = ()) -> None:
    for key in _ONE_VALUE.keys() - set(but):
        raw.require(key, _ONE_VALUE[key])


ModelImpl = Literal["auto", "native", "transformers"]


def choose_family(
    raw: RawConfig, impl: ModelImpl = "auto", *, max_model_len: int | None = None, trust_remote_code: bool = False
) -> tuple[str, Family]:
    """``find_family`` or, if there is none or if ``impl`` says so, the modules of transformers as a family."""
    named = [name for name in raw.get("architectures", list, []) if isinstance(name, str)]
    if impl == "native" or (impl == "auto" and (not named or any(name in FAMILIES for name in named))):
        return find_family(raw)
    for key in ("quantization_config", "transformers_weights"):
        raw.require(key, None)
    # Its import takes seconds.
    from asyncengine.models.transformers.decoder import TransformersModel
    from asyncengine.models.transformers.source import read_source

    source = read_source(raw, longest=max_model_len, trust_remote_code=trust_remote_code)

    def make(config: ModelConfig, weights: WeightSource, ops: ModelOps, max_positions: int) -> CausalLM[Batch]:
        return TransformersModel(source, config, weights, ops, max_positions)

    config, count = source.model_config(), source.notes.num_parameters
    return source.architecture, Family(lambda raw: config, make, (), quantizable=False, num_parameters=count)


def find_family(raw: RawConfig) -> tuple[str, Family]:
    """The first of the architectures that is implemented.

    Raises UnsupportedModelError if there is none, if model_type names another family, or for keys that change the
    computation of any family.
    """
    architectures = raw.get("architectures", list, [])
    name = next((name for name in architectures if isinstance(name, str) and name in FAMILIES), None)
    if name is None:
        found = excerpt(architectures) if architectures else "none"
        names = ", ".join(name for name in FAMILIES if name.endswith(("ForCausalLM", "LMHeadModel")))
        _require_one_value(raw)
        raise UnsupportedModelError(
            f"{raw.source}: architecture {found} is not supported; supported are {names}, "
            "and their bases and classifiers"
        )
    family = FAMILIES[name]
    check_method(raw, family.packings)
    _require_one_value(raw, (*family.reads, "quantization_config"))
    kind = raw.get("model_type", str, None)
    if kind not in family.model_types and any(kind in other.model_types for other in FAMILIES.values()):
        raise raw.unsupported(f"model_type = {excerpt(kind)} with architecture {name}")
    return name, family
