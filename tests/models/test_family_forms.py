"""The forms in which checkpoints of the dense families come: without a head, with labels, within a model for images."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from asyncengine.config import EngineConfig
from asyncengine.errors import MissingWeightError, UnsupportedModelError, WeightMismatchError
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.models.config import RawConfig
from asyncengine.models.registry import find_family
from asyncengine.models.weights.shard import WHOLE, Part
from asyncengine.models.weights.source import WeightSource
from asyncengine.runner.steps.model_runner import CpuModelRunner
from tests.engine.test_embeddings import classes_are_those_of_transformers
from tests.models import tiny
from tests.models.test_checkpoints import check_vectors, edit
from tests.models.test_config_keys import log_probabilities

VARIANTS = [
    "gemma2",
    "gemma3",
    "gemma4-shared",
    "gemma4-experts",
    "phi3",
    "smollm3",
    "seed-oss",
    "ministral3",
    "olmo2",
    "olmo3",
    "exaone4",
    "granite",
    "cohere2",
    "glm",
    "glm4",
    "qwen2-moe",
    "mixtral",
    "olmoe",
    "glm4-moe",
    "deepseek-v3",
    "deepseek-v2",
    "glm4-moe-lite",
    "minimax-m2",
    "gpt-oss",
]
UNLABELLED = {"granite", "cohere2", "olmoe", "glm4-moe", "minimax-m2", "gemma4-shared", "gemma4-experts"}
UNLABELLED |= {"deepseek-v2", "glm4-moe-lite"}
"""transformers has no classification model of these."""
PROMPT = [(11 * i + 5) % tiny.VOCAB_SIZE for i in range(30)]


def load(path: Path) -> CpuModelRunner:
    settings = {"num_kv_blocks": 16, "dtype": "float32"}
    return CpuModelRunner.load(EngineConfig.from_kwargs(str(path), settings), ops=ReferenceOps())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", VARIANTS)
async def test_models_without_a_head_give_the_vectors_of_transformers(tmp_path: Path, variant: str) -> None:
    model: Any = tiny.build_model(variant, tie_word_embeddings=False)
    model.base_model.save_pretrained(tmp_path)
    await check_vectors(tmp_path, generates=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant not in UNLABELLED])
async def test_labels_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    await classes_are_those_of_transformers(tmp_path, {}, variant, 7)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_that_are_missing_or_wrong_name_themselves(tmp_path: Path, variant: str) -> None:
    """Each tensor of the first layer, and each that is in no layer."""
    tiny.build_model(variant, tie_word_embeddings=True).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".layers." in name and ".layers.0." not in name:
            continue
        save_file({other: tensors[other] for other in tensors if other != name}, file)
        with pytest.raises(MissingWeightError, match=f"tensor {name} is not in"):
            load(tmp_path)
        save_file(tensors | {name: torch.zeros(len(tensor) + 1, *tensor.shape[1:])}, file)
        with pytest.raises(WeightMismatchError, match=rf"tensor {name} in .*: expected shape"):
            load(tmp_path)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("variant", [*VARIANTS, "qwen3-moe"])
def test_a_tied_matrix_may_have_the_name_of_the_head(tmp_path: Path, variant: str) -> None:
    tiny.build_model(variant, tie_word_embeddings=True).save_pretrained(tmp_path)
    expected = log_probabilities(load(tmp_path))
    rename(tmp_path, {"model.embed_tokens.": "lm_head."})
    # The tensors lie elsewhere in the file now, and products of torch may add up in another order there.
    torch.testing.assert_close(log_probabilities(load(tmp_path)), expected)


class Counter:
    """Weights of no size that count themselves, each once."""

    owned_bytes = 0

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def get(self, name: str, *shape: int, part: Part = WHOLE) -> torch.Tensor:
        tensor = torch.empty(shape, device="meta")
        self.counts[name] = tensor.numel()
        return part.of(tensor)

    def float32(self, name: str, count: int) -> torch.Tensor:
        self.get(name, count)
        if name.endswith("correction_bias"):
            self.counts[name] = 0  # no parameter, but a buffer
        return torch.zeros(count)


@pytest.mark.parametrize("family", sorted({tiny.VARIANTS[variant][0] for variant in VARIANTS}))
def test_the_shape_of_each_family_by_default_has_as_many_parameters_as_in_transformers(family: str) -> None:
    """Config files that leave out what is the default, where a family's published files do."""
    kind = getattr(transformers, f"{family}ForCausalLM")
    # The heads of GLM-4.5 that every published file states: without it they would be of 42 elements.
    stated = {"Glm4Moe": {"head_dim": 128}, "DeepseekV2": {"num_experts_per_tok": 6}}.get(family, {})
    config = kind.config_class(num_hidden_layers=3, **stated)
    with torch.device("meta"):
        theirs = kind(config)
    short = {"architectures": [kind.__name__], "num_hidden_layers": 3}
    values = short if family in ("Gemma2", "Gemma3", "Gemma4") else config.to_dict() | short
    raw, counter = RawConfig(values, "config.json"), Counter()
    chosen = find_family(raw)[1]
    chosen.build(chosen.read_config(raw), WeightSource(cast(Any, counter)), ReferenceOps(), 16)
    scalars = sum(name.endswith("layer_scalar") for name, _ in theirs.named_buffers())
    assert sum(counter.counts.values()) == sum(parameter.numel() for parameter in theirs.parameters()) + scalars


# ---- The language model of a model for images ----

VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def model_for_images(kind: str) -> Any:
    """A random model whose language model is of the kind."""
    text = {name: value for name, value in tiny.VARIANTS[kind][1].items() if name != "pad_token_id"}
    config: Any
    if kind == "gemma3":
        config = transformers.Gemma3Config(
            text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_index=198
        )
    elif kind == "gemma4-shared":
        config = transformers.Gemma4Config(text_config=text, vision_config=VISION | {"model_type": "gemma4_vision"})
    else:
        config = transformers.Mistral3Config(
            text_config=text | {"model_type": "ministral3" if kind == "ministral3" else "mistral"},
            vision_config=VISION | {"model_type": "pixtral", "head_dim": 8},
            image_token_index=198,
            tie_word_embeddings=False,
        )
    config.eos_token_id, config.text_config.eos_token_id = 7, 9
    torch.manual_seed(3)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1, 0.2)
    return model


def rename(path: Path, names: dict[str, str]) -> None:
    """Replace beginnings of tensors' names."""
    renamed = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        old = next((old for old in names if name.startswith(old)), "")
        renamed[names.get(old, "") + name.removeprefix(old)] = tensor
    save_file(renamed, path / "model.safetensors")


PUBLISHED = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
"""The names of the published files; transformers writes others."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("names", [{}, PUBLISHED], ids=["transformers", "published"])
@pytest.mark.parametrize("kind", ["gemma3", "gemma4-shared", "ministral3", "mistral-window"])
def test_text_of_a_model_for_images(
    tmp_path: Path, kind: str, names: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    model = model_for_images(kind)
    model.save_pretrained(tmp_path)
    rename(tmp_path, names)
    with caplog.at_level(logging.WARNING):
        runner = load(tmp_path)
    assert "tensors for images are left out: images are not served" in caplog.text
    assert "does not use" not in caplog.text
    assert runner.info.eos_token_ids == (7, 9)
    model.generation_config.eos_token_id = None
    driver = tiny.Driver(runner)
    sequence = driver.add(PROMPT, 60)
    driver.run([sequence], 20, 7)
    assert sequence.generated == tiny.generate(model, PROMPT, 20)


def test_a_model_for_images_in_short(tmp_path: Path) -> None:
    """The published 4B has no more than this in its config.json."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    values = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    raw = RawConfig(values, "config.json")
    config = find_family(raw)[1].read_config(raw)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert config.max_positions == 131_072
    assert config.layer_windows == tuple(0 if i % 6 == 5 else 1024 for i in range(34))
    assert [(rope.theta, rope.factor) for rope in config.layer_ropes[4:6] if rope] == [(10_000.0, 1.0), (1e6, 8.0)]
    assert config.tie_word_embeddings
    assert raw.dtype == "bfloat16"


def test_kimi_k2_is_a_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    """The config.json of Kimi K2 has DeepSeek's architecture, its own type and code, and positions by old names."""
    model = tiny.build_model("deepseek-v3-kimi-k2")
    model.save_pretrained(tmp_path)
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    edit(
        tmp_path / "config.json", model_type="kimi_k2",
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        rope_parameters=None, rope_theta=rope.pop("rope_theta"), rope_scaling={"type": rope.pop("rope_type")} | rope,
        scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, num_nextn_predict_layers=0,
        aux_loss_alpha=0.001, seq_aux=True, pretraining_tp=1,
    )  # fmt: skip
    driver = tiny.Driver(load(tmp_path))
    sequence = driver.add(PROMPT, 60)
    driver.run([sequence], 20, 7)
    assert sequence.generated == tiny.generate(model, PROMPT, 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2"}, "model_type = 'qwen2'"),
        ({"is_causal": False}, "is_causal = False"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_keys_of_the_text_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model_for_images("gemma3").save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit(tmp_path / "config.json", text_config=text | changes)
    with pytest.raises(UnsupportedModelError, match=f"config.json, text_config: .*{message}"):
        load(tmp_path)
