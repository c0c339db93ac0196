"""Keys of config.json that change the computation: each has the effect that transformers gives it, or is refused."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from asyncengine.config import EngineConfig
from asyncengine.errors import ModelError, UnsupportedModelError
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.models.config import RawConfig
from asyncengine.models.registry import find_family
from asyncengine.runner.steps.model_runner import CpuModelRunner
from tests.models import tiny
from tests.models.config_sources import HARMLESS, NOT_IN_FILES, ROTARY, SHARED, SOURCES

PROMPT = [(7 * i + 3) % tiny.VOCAB_SIZE for i in range(45)]
PACKAGE = Path(transformers.__file__).parent

# ---- Every key is looked at ----

_SENSES = re.compile("(Gemma4|Qwen3_5(Moe)?)(Vision|Audio|Clippable|Model$|ForConditionalGeneration)")
"""Classes of models for images and sounds, beside their language model."""


class Recording(dict[str, Any]):
    """A mapping that records the keys that were looked at."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def __or__(self, other: dict[str, Any]) -> Recording:  # type: ignore[override]
        return self._joined({**self, **other})

    def __ror__(self, other: dict[str, Any]) -> Recording:  # type: ignore[override]
        return self._joined({**other, **self})

    def _joined(self, values: dict[str, Any]) -> Recording:
        joined = Recording(values)
        joined.seen = self.seen
        return joined

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)


def keys_read(path: Path) -> set[str]:
    """Attributes of a configuration that a source file of transformers reads."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not isinstance(node, ast.ClassDef) or not _SENSES.match(node.name)]
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return {key for node in ast.walk(tree) if id(node) not in called for key in _keys(node) if key[0] != "_"}


def _keys(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_config(node.value):
        yield node.attr
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and _is_config(node.args[0]):
        yield from [key.value for key in node.args[1:2] if isinstance(key, ast.Constant) and isinstance(key.value, str)]


def _is_config(node: ast.expr) -> bool:
    return ast.unparse(node) in ("config", "self.config", "effective_config", "layer_config", "decoder_config")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", SOURCES)
def test_every_key_that_transformers_reads_is_read_refused_or_harmless(variant: str) -> None:
    paths = [PACKAGE / name for name in SHARED]
    for name in SOURCES[variant]:
        paths += [PACKAGE / "models" / name / f"modeling_{name}.py"]
    wanted = set().union(*map(keys_read, paths))
    assert {"num_attention_heads", "sliding_window", "is_causal"} <= wanted, "the parser finds the keys"
    fields = {name for name in type(tiny.build_model(variant).config).__dataclass_fields__ if name[0] != "_"}
    wanted |= fields - set(transformers.PreTrainedConfig.__dataclass_fields__)
    raw = RawConfig(Recording(config_of(variant)), "config.json")
    find_family(raw)[1].read_config(raw)
    ignored = wanted - raw.values.seen - set(HARMLESS) - NOT_IN_FILES  # type: ignore[attr-defined]
    if variant in ("gpt2", "bloom", "mpt-clipped"):
        ignored -= ROTARY | {"max_position_embeddings"}
    if variant == "falcon":
        ignored.discard("head_dim")  # no key: a property of the configuration
    assert ignored == set(), sorted(ignored)


def config_of(variant: str) -> dict[str, Any]:
    model = tiny.build_model(variant)
    values = json.loads(json.dumps(model.config.to_dict()))
    return {**values, "architectures": [type(model).__name__]}


# ---- Keys that are honoured ----

ROPE = {"rope_theta": 10000.0}
TYPES = ["full_attention", "sliding_attention", "full_attention"]
HONOURED: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral with layer_types": ("mistral-window", {"layer_types": TYPES}),
    "Mistral with old names in layer_types": ("mistral-window", {"layer_types": ["attention", *TYPES[1:]]}),
    "Mistral with null for layer_types": ("mistral-window", {"layer_types": None}),
    "Mistral with a window of one token": ("mistral-window", {"sliding_window": 1}),
    "Qwen2 with layer_types": ("qwen2-window", {"layer_types": TYPES}),
    "Qwen2 with a null window": ("qwen2-window", {"sliding_window": None, "layer_types": None}),
    "Qwen2 with max_window_layers": ("qwen2-window", {"max_window_layers": 2, "layer_types": None}),
    "Qwen2 with a head_dim": ("qwen2", {"head_dim": 12}),
    "Qwen3 with layer_types": ("qwen3-window-biased", {"layer_types": TYPES}),
    "Qwen3 with an unused window": ("qwen3", {"sliding_window": 3, "use_sliding_window": False}),
    "Llama with a window past the context": ("llama", {"sliding_window": 128}),
    "Llama with layer_types": ("llama", {"layer_types": ["full_attention"] * 3}),
    "Llama with another epsilon": ("llama", {"rms_norm_eps": 0.3}),
    "Llama with rope_theta": ("llama", {"rope_parameters": None, "rope_theta": 321.0}),
    "Llama with linear scaling": ("llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.5}}),
    "Llama with an old name of the scaling": (
        "llama", {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "Llama with dynamic scaling": ("llama", {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}}),
    "Llama with llama3 scaling": ("llama", {"rope_parameters": tiny.LLAMA3_ROPE}),
    "Llama with yarn": ("llama", {"rope_parameters": tiny.YARN_ROPE}),
    "Llama with yarn and scales": (
        "llama",
        {"rope_parameters": tiny.YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False, "beta_slow": 2}},
    ),
    "Llama with yarn and a factor of attention": (
        "llama", {"rope_parameters": tiny.YARN_ROPE | {"attention_factor": 1.7}},
    ),
    "Llama with the original length outside": (
        "llama",
        {
            "rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0},
            "original_max_position_embeddings": 32,
        },
    ),
    "Llama with longrope": ("llama", {"rope_parameters": tiny.LONG_ROPE}),
    "Gemma 2 with a window in the upper layers": (
        "gemma2", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "Gemma 2 with its own name of the activation": ("gemma2", {"hidden_act": "gelu"}),
    "Gemma 2 without caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "Gemma 3 with older names of the bases": (
        "gemma3",
        {"rope_parameters": None, "rope_theta": 5000.0, "rope_local_base_freq": 70.0,
         "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "Gemma 3 with a pattern of windows": ("gemma3", {"layer_types": None, "sliding_window_pattern": 2}),
    "Gemma 3 with scaled positions in a layer type": (
        "gemma3", {"rope_parameters": {"sliding_attention": tiny.YARN_ROPE, "full_attention": None}},
    ),
    "Phi-3 with the oldest name of longrope": (
        "phi3",
        {"rope_parameters": None, "rope_theta": 700.0, "partial_rotary_factor": 0.5,
         "original_max_position_embeddings": 32,
         "rope_scaling": {"type": "su", "original_max_position_embeddings": 32,
                          "short_factor": [1.0, 1.3], "long_factor": [2.0, 5.0]}},
    ),
    "LFM2 with the layers with attention": ("lfm2", {"layer_types": None, "full_attn_idxs": [1]}),
    "LFM2 with another epsilon": ("lfm2", {"norm_eps": 0.3}),
    "Nemotron-H with a pattern": (
        "nemotron-h", {"layers_block_type": None, "hybrid_override_pattern": "M-M*-"},
    ),
    "Phi-3 with a window": ("phi3", {"sliding_window": 4}),
    "SmolLM3 with layer_types": ("smollm3", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 6}),
    "SmolLM3 with an interval": ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2}),
    "SmolLM3 with more layers said than there are": ("smollm3", {"no_rope_layers": [0, 0, 1, 0, 1, 1]}),
    "Seed-OSS without biases": ("seed-oss", {"attention_bias": False}),
    "Ministral 3 with the positions outside": ("ministral3", {"original_max_position_embeddings": 20}),
    "OLMo 2 with yarn": ("olmo2", {"rope_parameters": tiny.YARN_ROPE}),
    "OLMo 3 with yarn as older files have it": (
        "olmo3", {"rope_parameters": None, "rope_theta": 3000.0, "rope_scaling": tiny.YARN_ROPE},
    ),
    "OLMo 3 without layer_types": ("olmo3", {"layer_types": None}),
    "EXAONE 4 with a pattern of windows": ("exaone4", {"layer_types": None, "sliding_window_pattern": 2}),
    "EXAONE 4 with layer_types": ("exaone4", {"layer_types": [*TYPES, "sliding_attention"]}),
    "EXAONE 4 without a window": ("exaone4-no-window", {}),
    "Granite with factors that are integers": (
        "granite",
        {"embedding_multiplier": 12, "residual_multiplier": 1, "attention_multiplier": 1, "logits_scaling": 8},
    ),
    "Cohere 2 with a pattern of windows": ("cohere2", {"layer_types": None, "sliding_window_pattern": 2}),
    "Cohere 2 with yarn": ("cohere2", {"rope_parameters": tiny.YARN_ROPE}),
    "GLM with other names of the rotary settings": (
        "glm", {"rope_parameters": None, "rope_theta": 300.0, "partial_rotary_factor": 1.0},
    ),
    "GLM-4 without biases": ("glm4", {"attention_bias": False}),
    "Bloom with the other names of its sizes": (
        "bloom", {"n_layer": 7, "num_hidden_layers": 2, "num_attention_heads": 2, "n_embed": 32},
    ),
    "MPT with a scale of scores": ("mpt", {"attn_config": {"softmax_scale": 0.1}}),
    "Falcon with yarn": ("falcon", {"rope_parameters": tiny.YARN_ROPE}),
    "Falcon with another activation": ("falcon", {"activation": "gelu_new"}),
    "GPT-2 with the other names of its sizes": (
        "gpt2",
        {"n_layer": 7, "num_hidden_layers": 2, "num_attention_heads": 3, "n_positions": 9,
         "max_position_embeddings": 128, "n_embd": 30, "hidden_size": 60},
    ),
    "GPT-2 without scales of scores": ("gpt2", {"scale_attn_weights": False}),
    "GPT-2 with scales by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "GPT-2 with other precision": ("gpt2", {"reorder_and_upcast_attn": True}),
    "GPT-2 with another epsilon": ("gpt2", {"layer_norm_epsilon": 0.2}),
    "GPT-2 with another activation": ("gpt2", {"activation_function": "gelu"}),
}  # fmt: skip


def edited(path: Path, variant: str, changes: dict[str, Any]) -> Path:
    """A checkpoint whose config.json has ``changes``."""
    tiny.build_model(variant, **{key: changes[key] for key in ("head_dim",) if key in changes}).save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def load(path: Path, **config: Any) -> CpuModelRunner:
    settings = {"num_kv_blocks": 16, "dtype": "float32", **config}
    return CpuModelRunner.load(EngineConfig.from_kwargs(str(path), settings), ops=ReferenceOps())


def log_probabilities(runner: CpuModelRunner) -> torch.Tensor:
    """Return the log probabilities of the token behind the prompt."""
    driver = tiny.Driver(runner)
    driver.step([(driver.add(PROMPT, len(PROMPT) + 1), len(PROMPT))])
    return driver.logits[0].log_softmax(-1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", HONOURED)
def test_log_probabilities_equal_transformers(tmp_path: Path, name: str) -> None:
    """Log probabilities equal those of the model that transformers makes of the directory; most differ from those of
    the config without the key."""
    path = edited(tmp_path, *HONOURED[name])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(log_probabilities(load(path)), expected, atol=1e-3, rtol=1e-3)


# ---- Keys that are refused ----

SLIDING = ["sliding_attention"] * 3


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("llama", {"is_causal": False}, "is_causal = False"),
        ("qwen2", {"is_causal": None}, "is_causal = None"),
        ("llama", {"per_layer_config": {"1": {"intermediate_size": 7}}}, "per_layer_config"),
        ("llama", {"attention_chunk_size": 8}, "attention_chunk_size = 8"),
        ("gpt2", {"kv_sharing_modes": ["reuse"] * 3}, "kv_sharing_modes"),
        ("llama", {"transformers_weights": "other.safetensors"}, "transformers_weights = 'other.safetensors'"),
        ("llama", {"sliding_window": 127}, "sliding_window = 127"),
        ("gpt2", {"sliding_window": 5}, "sliding_window = 5"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("bloom", {"seq_length": 65_537}, "linear biases over 65537 positions"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi = False"),
        ("mpt", {"attn_config": {"alibi_bias_max": 4}}, "alibi_bias_max = 4"),
        ("mpt", {"attn_config": {"prefix_lm": True}}, "prefix_lm = True"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale = 'inv_sqrt_d_model'"),
        ("falcon", {"activation": "relu"}, "activation = 'relu'"),
        ("falcon-groups", {"num_kv_heads": 4}, "6 attention heads over 4 key-value heads"),
        ("falcon-groups", {"parallel_attn": False}, "new_decoder_architecture with parallel_attn = False"),
        ("llama", {"layer_types": SLIDING}, "sliding_attention in layer_types"),
        ("gpt2", {"layer_types": SLIDING}, "sliding_attention in layer_types"),
        ("mistral-no-window", {"layer_types": SLIDING}, "sliding_attention in layer_types without a sliding window"),
        ("mistral-window", {"layer_types": ["chunked_attention"] * 3}, "layer type 'chunked_attention'"),
        ("qwen2", {"layer_types": SLIDING}, "sliding_attention in layer_types without a sliding window"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer type 'linear_attention'"),
        ("lfm2", {"layer_types": ["conv", "sliding_attention", "conv"]}, "layer_types = .*sliding_attention"),
        ("lfm2", {"full_attn_idxs": [True], "layer_types": None}, "full_attn_idxs"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache = 1"),
        ("lfm2-moe", {"num_dense_layers": -1}, "num_dense_layers = -1"),
        ("mamba2", {"time_step_limit": [0.5, 0.1]}, r"time_step_limit = \[0.5, 0.1\]"),
        ("mamba2", {"num_heads": 5}, "5 Mamba heads of 16 for 96 values"),
        ("bamba", {"mamba_n_groups": 4}, "6 Mamba heads in 4 groups"),
        ("bamba", {"attn_layer_indices": [True]}, "attn_layer_indices"),
        ("granite-hybrid", {"layer_types": ["mamba", "conv", "mamba"]}, "layer_types = .*conv"),
        ("granite-hybrid", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
        ("falcon-h1", {"ssm_multipliers": [1.0]}, r"ssm_multipliers = \[1.0\]"),
        ("falcon-h1", {"attention_bias": True}, "attention_bias with attention_in_multiplier"),
        ("nemotron-h", {"layers_block_type": ["mlp", "attention"]}, "layers_block_type that begins with mlp"),
        ("nemotron-h", {"moe_latent_size": 8}, "moe_latent_size = 8"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types with 1 entries for 3 layers"),
        ("llama", {"model_type": "qwen2"}, "model_type = 'qwen2' with architecture LlamaForCausalLM"),
        ("llama", {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}, "for each layer type"),
        ("llama", {"rope_parameters": ROPE | {"rope_type": "proportional"}}, "proportional"),
        ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "mrope"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers = \[1, 0\] for 4 layers"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, r"no_rope_layers = "),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, r"no_rope_layer_interval = 0"),
        ("granite", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("cohere2", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ("gemma3", {"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        (
            "glm4",
            {"rope_parameters": ROPE | {"partial_rotary_factor": 0.4}},
            "partial_rotary_factor = 0.4 of heads of 8",
        ),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLG"}, "sliding_window_pattern = 'LLG'"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ("olmo3", {"layer_types": ["chunked_attention"] * 4}, "layer type 'chunked_attention'"),
        ("ministral3", {"layer_types": TYPES, "sliding_window": 5}, "layer_types in a family with one"),
        ("phi3", {"layer_types": ["full_attention"] * 3, "sliding_window": 5}, "layer_types in a family with one"),
        ("phi3", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.0}}, "rope scaling 'linear' in this"),
        (
            "phi3",
            {"rope_parameters": ROPE | {"partial_rotary_factor": 0.4}},
            "partial_rotary_factor = 0.4 of heads of 8",
        ),
        ("qwen3-moe", {"num_experts_per_tok": 8}, "num_experts_per_tok = 8 of 7 experts"),
        ("qwen3-moe", {"mlp_only_layers": ["all"]}, r"mlp_only_layers = \['all'\]"),
        (
            "qwen3-moe",
            {"layer_types": TYPES, "use_sliding_window": True, "sliding_window": 5},
            "layer_types in a family with one",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ("gemma4", {"per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config = .* of layer 1"),
        ("gemma4", {"per_layer_config": {"3": {"head_dim": 8}}}, "per_layer_config = "),
        ("gemma4", {"per_layer_config": {"0": {"num_key_value_heads": 4}}}, "4 key-value heads of 8 in layer 0"),
        ("gemma4", {"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2 of layers without a like before them"),
        ("gemma4-shared", {"vocab_size_per_layer_input": 5}, "vocab_size_per_layer_input = 5 below vocab_size"),
        ("gemma4-experts", {"top_k_experts": 8}, "top_k_experts = 8 of 7 experts"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("gemma3", {"rope_parameters": ROPE}, "rope_parameters that are not for layer types"),
        (
            "gemma3",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling without rope_type",
        ),
        ("olmo3", {"rope_parameters": {"full_attention": tiny.YARN_ROPE | {"truncate": False}}}, "truncate = False"),
        ("mistral-window", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("gpt2", {"activation_function": "quick_gelu"}, "activation_function = 'quick_gelu'"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_keys_that_are_refused_by_name(tmp_path: Path, variant: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"config\.json.*{message}"):
        load(edited(tmp_path, variant, changes))


# ---- The context of scaled positions ----


@pytest.mark.parametrize(
    ("rope", "outside", "expected"),
    [
        ({"rope_type": "default"}, {}, 128),
        ({"rope_type": "linear", "factor": 4.0}, {}, 512),
        ({"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 32}, {}, 128),
        ({"rope_type": "linear", "factor": 8.0}, {"original_max_position_embeddings": 32}, 256),
        ({"rope_type": "yarn", "factor": 4.0}, {}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, {}, 128),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}, {}, 256),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, {}, 128),
        ({"rope_type": "dynamic", "factor": 4.0}, {}, 128),
        (tiny.LLAMA3_ROPE, {}, 128),
    ],
)
def test_scaled_positions_give_their_context(
    tmp_path: Path, rope: dict[str, Any], outside: dict[str, Any], expected: int
) -> None:
    path = edited(tmp_path, "llama", {"rope_parameters": ROPE | rope} | outside)
    assert load(path, num_kv_blocks=64).info.max_model_len == expected


def test_tokens_behind_the_original_positions_equal_transformers(tmp_path: Path) -> None:
    path = edited(tmp_path, "llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    runner = load(path, num_kv_blocks=32)
    prompt = (PROMPT * 9)[:400]
    driver = tiny.Driver(runner)
    sequence = driver.add(prompt, 412)
    driver.run([sequence], 12, 64)
    assert sequence.generated == tiny.generate(theirs, prompt, 12)


@pytest.mark.parametrize(("max_model_len", "length"), [(32, 12), (32, 20), (128, 33), (128, 90)])
def test_longrope_has_the_factors_of_the_longest_text(
    tmp_path: Path, max_model_len: int, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers chooses by the length of each text. An engine chooses once: for 32 tokens or for more."""
    path = edited(tmp_path, "phi3", {"original_max_position_embeddings": 32, "rope_parameters": ROPE | {
        "rope_type": "longrope", "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.3], "long_factor": [2.0, 5.0],
    }})  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    driver = tiny.Driver(load(path, max_model_len=max_model_len))
    assert ("with max_model_len = 32 it would" in caplog.text) == (max_model_len > 32)
    prompt = (PROMPT * 3)[:length]
    sequence = driver.add(prompt, length + 12)
    driver.run([sequence], 12, 7)
    assert sequence.generated == tiny.generate(theirs, prompt, 12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_factor": [1.0]}, "'short_factor' must have 2 numbers, found 1"),
        ({"long_factor": [1.0, 0]}, "'long_factor' must be positive, found 0"),
        ({"long_factor": None}, "lacks 'long_factor'"),
        ({"factor": -1}, "'factor' must be positive"),
    ],
)
def test_factors_of_longrope_that_are_wrong(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0, 1.3], "long_factor": [2.0, 5.0]}
    path = edited(tmp_path, "phi3", {"partial_rotary_factor": 0.5, "rope_parameters": ROPE | rope | changes})
    with pytest.raises(ModelError, match=rf"config\.json, rope scaling.*{message}"):
        load(path)


# ---- Ends outside the vocabulary ----


@pytest.mark.parametrize("wrong", [tiny.VOCAB_SIZE, 2**70, -1])
def test_ends_that_never_come_are_left_out(tmp_path: Path, wrong: int, caplog: pytest.LogCaptureFixture) -> None:
    """Ids outside the vocabulary give a warning, as in transformers."""
    path = edited(tmp_path, "llama", {"eos_token_id": wrong})
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, wrong]}))
    assert load(path).info.eos_token_ids == (0,)
    messages = [record.getMessage() for record in caplog.records if "eos_token_id" in record.getMessage()]
    assert len(messages) == 2
    assert all("ids from 0 to 198" in message and len(message) < 1000 for message in messages)


def test_a_scaled_length_has_a_limit(tmp_path: Path) -> None:
    path = edited(tmp_path, "llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 1e6}})
    with pytest.raises(ModelError, match=r"config\.json.*'factor' times the original positions"):
        load(path)
