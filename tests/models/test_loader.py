"""Model directories: what is read, how it is mapped, and the error for everything that is wrong with them."""

from __future__ import annotations

import io
import itertools
import json
import logging
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from asyncengine.config import EngineConfig
from asyncengine.errors import (
    ConfigError,
    MissingWeightError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightMismatchError,
)
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.models.config import RawConfig
from asyncengine.models.registry import find_family
from asyncengine.models.weights.dummy import DummyWeights
from asyncengine.models.weights.shard import WHOLE, Part
from asyncengine.models.weights.source import WeightSource
from asyncengine.runner.steps.model_runner import CpuModelRunner
from tests.models import tiny

PROMPT = [5, 9, 3, 70]


def load(path: Path, **config: object) -> CpuModelRunner:
    settings = {"num_kv_blocks": 16, **config}
    return CpuModelRunner.load(EngineConfig.from_kwargs(str(path), settings), ops=ReferenceOps())


def continuation(runner: CpuModelRunner, count: int = 12) -> list[int]:
    driver = tiny.Driver(runner)
    sequence = driver.add(PROMPT, len(PROMPT) + count)
    driver.run([sequence], count, 64)
    return sequence.generated


@pytest.fixture(scope="module")
def models():
    return {name: tiny.build_model(name) for name in ("llama", "gpt2", "qwen2")}


@pytest.fixture
def llama(models, tmp_path):
    models["llama"].save_pretrained(tmp_path)
    return tmp_path


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors (names with __ for the dots), or drop those that are None."""
    tensors = load_file(path / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file({n: t.clone() for n, t in tensors.items()}, path / "model.safetensors")


# Files that are read


def test_shards(models, tmp_path):
    models["llama"].save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert continuation(load(tmp_path)) == tiny.generate(models["llama"], PROMPT, 12)


def test_gpt2_without_the_name_of_the_trunk(models, tmp_path):
    """The hub has GPT-2 so: no "transformer." prefix, no head, and the causal masks as tensors."""
    models["gpt2"].save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): t.clone() for name, t in tensors.items()}
    tensors.pop("lm_head.weight", None)
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)
    save_file(tensors, tmp_path / "model.safetensors")
    assert continuation(load(tmp_path)) == tiny.generate(models["gpt2"], PROMPT, 12)


def test_config_of_older_transformers(models, tmp_path):
    """rope_theta, rope_scaling and torch_dtype are what rope_parameters and dtype used to be."""
    model = tiny.build_model("llama-rope-llama3")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": config.pop("dtype")}
    rope["type"] = rope.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": rope}))
    runner = load(tmp_path)
    assert runner.info.dtype == "float32"
    assert continuation(runner) == tiny.generate(model, PROMPT, 12)


def test_float16_checkpoint_becomes_float32(models, tmp_path):
    half = tiny.build_model("llama").half()
    half.save_pretrained(tmp_path)
    runner = load(tmp_path)
    assert runner.info.dtype == "float32"
    assert continuation(runner) == tiny.generate(half.float(), PROMPT, 12)


@pytest.mark.parametrize(("wanted", "expected"), [("auto", "bfloat16"), ("float32", "float32")])
def test_dtype(models, tmp_path, wanted, expected):
    tiny.build_model("llama").bfloat16().save_pretrained(tmp_path)
    assert load(tmp_path, dtype=wanted).info.dtype == expected


def test_absent_keys_have_the_defaults_of_transformers(tmp_path):
    """Mistral without sliding_window slides over 4096 tokens; only null means no window."""
    model = tiny.build_model("mistral-window")
    model.config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["MistralForCausalLM"]}
    for window, expected in ((9, 9), (None, 0), ("absent", 4096)):
        values["sliding_window"] = window
        if window == "absent":
            del values["sliding_window"]
        raw = RawConfig(values, "test")
        assert find_family(raw)[1].read_config(raw).layer_windows == (expected,) * 3


def test_info(llama, models):
    edit_json(llama / "config.json", eos_token_id=7)
    edit_json(llama / "generation_config.json", eos_token_id=[9, 7])
    runner = load(llama, max_model_len=100, num_kv_blocks=9, block_size=32)
    info = runner.info
    parameters = sum(p.numel() for p in models["llama"].parameters())
    assert (info.architecture, info.vocab_size, info.max_model_len) == ("LlamaForCausalLM", 199, 100)
    assert info.eos_token_ids == (7, 9)
    assert info.num_parameters == parameters
    assert info.weight_bytes == 4 * parameters
    assert (info.num_kv_blocks, info.block_size, info.kv_capacity_tokens) == (9, 32, 288)
    # Two tensors for each of three layers; two heads of 8 elements, 32 tokens, 4 bytes.
    regions = runner.kv_block_regions()
    assert [size for _, size in regions] == [2 * 8 * 32 * 4] * 6
    assert info.kv_bytes_per_block == sum(size for _, size in regions)
    addresses = sorted(address for address, _ in regions)
    assert all(b - a >= 9 * 2 * 8 * 32 * 4 for a, b in itertools.pairwise(addresses))


def test_block_regions_are_where_the_cache_is(llama):
    """Swapping the bytes of two blocks in every region swaps what two sequences remember."""
    import ctypes

    runner = load(llama)
    driver = tiny.Driver(runner)
    a, b = driver.add([1, 2, 3], 16), driver.add([4, 5, 6], 16)
    driver.step([(a, 3), (b, 3)])
    a.tokens[-1] = b.tokens[-1] = 8
    driver.step([(a, 1), (b, 1)])
    before = driver.logits[-2:]
    for address, size in runner.kv_block_regions():
        x, y = (
            (ctypes.c_char * size).from_address(address + int(a.table[0]) * size),
            (ctypes.c_char * size).from_address(address + int(b.table[0]) * size),
        )
        x.raw, y.raw = y.raw, x.raw
    a.tokens[-1] = b.tokens[-1] = 8
    for sequence in (a, b):
        sequence.tokens.pop()
        sequence.computed -= 1
    driver.step([(a, 1), (b, 1)])
    after = driver.logits[-2:]
    assert torch.equal(before[0], after[1])
    assert torch.equal(before[1], after[0])
    assert not torch.equal(before[0], after[0])


def test_weights_are_used_where_the_file_is_mapped(tmp_path):
    """Loading 100 MB in its own dtype adds no anonymous memory; in another dtype it adds a copy."""
    config = tiny.DECODER | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": 512,
    }
    config |= {"intermediate_size": 16384, "num_attention_heads": 8, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    raw = RawConfig.load(tmp_path)
    model = find_family(raw)[1]
    recorder = Recorder(DummyWeights(torch.float32, 0.02, 0))
    model.build(model.read_config(raw), WeightSource(recorder), ReferenceOps(), 16)
    save_file(recorder.tensors, tmp_path / "model.safetensors")
    del recorder

    script = (
        "import sys, re\n"
        "from asyncengine.config import EngineConfig\n"
        "from asyncengine.kernels.cpu.reference import ReferenceOps\n"
        "from asyncengine.runner.steps.model_runner import CpuModelRunner\n"
        "def anonymous():\n"
        "    status = open('/proc/self/status').read()\n"
        "    return int(re.search(r'RssAnon:\\s+(\\d+)', status)[1]) // 1024\n"
        "before = anonymous()\n"
        "config = EngineConfig(model=sys.argv[1], dtype=sys.argv[2], num_kv_blocks=8)\n"
        "runner = CpuModelRunner.load(config, ops=ReferenceOps())\n"
        "print(runner.info.weight_bytes // 2**20, anonymous() - before)\n"
    )
    grown = {}
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, "-c", script, str(tmp_path), dtype]
        size, grown[dtype] = map(int, subprocess.check_output(command, text=True).split())
        assert size > (90 if dtype == "float32" else 45)
    assert grown["float32"] < 30
    assert grown["bfloat16"] > 45


class Recorder:
    """Passes weights on and keeps them."""

    def __init__(self, source: DummyWeights) -> None:
        self.source = source
        self.tensors: dict[str, torch.Tensor] = {}

    def get(self, name: str, *shape: int, part: Part = WHOLE) -> torch.Tensor:
        self.tensors[name] = self.source.get(name, *shape)
        return self.tensors[name]


# Dummy weights


@pytest.mark.parametrize("variant", ["gpt2", "llama", "qwen3"])
def test_dummy_weights_need_only_config_json(tmp_path, variant):
    tiny.build_model(variant).config.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", architectures=[type(tiny.build_model(variant)).__name__])
    runners = [load(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2)]
    outputs = []
    for runner in runners:
        driver = tiny.Driver(runner)
        driver.run([driver.add(PROMPT, 8)], 4, 64)
        outputs.append(torch.stack(driver.logits))
    assert torch.isfinite(outputs[0]).all()
    assert outputs[0].std() > 0
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_dummy_matrices_are_normal_with_distinct_rows():
    weights = DummyWeights(torch.float32, 0.5, 3)
    matrix = weights.get("x.weight", 3000, 1000)
    assert matrix.mean().abs() < 0.01
    assert (matrix.std() - 0.5).abs() < 0.01
    assert len(set(matrix[:, :4].sum(1).tolist())) > 2990
    assert weights.get("norm.weight", 5).tolist() == [1] * 5
    assert weights.get("x.bias", 5).tolist() == [0] * 5
    assert weights.num_parameters == 3_000_010


@pytest.mark.parametrize("name", ["gpt2", "qwen3-0.6b", "llama-3.1-8b"])
def test_real_shapes(tmp_path, name):
    """config.json files of real models are read; parameter counts are the published ones."""
    config, parameters = REAL[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    raw = RawConfig.load(tmp_path)
    family = find_family(raw)[1]
    counter = Counter()
    family.build(family.read_config(raw), WeightSource(counter), ReferenceOps(), 16)
    assert counter.total == parameters


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def get(self, name: str, *shape: int, part: Part = WHOLE) -> torch.Tensor:
        tensor = torch.empty(shape, device="meta")
        self.total += tensor.numel()
        return tensor

    get_transposed = get


REAL = {
    "gpt2": ({"architectures": ["GPT2LMHeadModel"], "n_layer": 12, "vocab_size": 50257}, 124_439_808),
    "qwen3-0.6b": (
        {
            "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
            "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rope_scaling": None,
            "sliding_window": None, "use_sliding_window": False, "max_window_layers": 28,
            "vocab_size": 151936, "tie_word_embeddings": True, "dtype": "bfloat16",
        },
        596_049_920,
    ),
    "llama-3.1-8b": (
        {
            "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "max_position_embeddings": 131072, "rope_theta": 500000.0, "vocab_size": 128256,
            "rope_scaling": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
        },
        8_030_261_248,
    ),
}  # fmt: skip


# Files that are refused


def test_no_such_model(tmp_path, monkeypatch):
    with pytest.raises(ModelNotFoundError, match="hub id"):
        load(tmp_path / "absent")
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        load(tmp_path)
    for name, kind, text in (("a.bin", ModelNotFoundError, "is a file"), ("a.gguf", ModelError, "is no GGUF file")):
        (tmp_path / name).touch()
        with pytest.raises(kind, match=text):
            load(tmp_path / name)
    for name in ("~nobody-of-this-name/model", "x" * 5000):
        with pytest.raises(ModelNotFoundError, match=name):
            load(name)


ROPE = {"rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "none"),
        ({"architectures": [["LlamaForCausalLM"]]}, "supported are"),
        ({"hidden_act": "relu"}, "relu"),
        ({"num_key_value_heads": 4}, "6 attention heads over 4"),
        ({"head_dim": 7}, "odd head_dim"),
        ({"rope_parameters": ROPE | {"rope_type": "proportional"}}, "proportional"),
        (
            {"rope_parameters": ROPE | {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary",
        ),
        ({"rope_parameters": {"full_attention": ROPE}}, "for each layer type"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_unsupported(llama, changes, message):
    edit_json(llama / "config.json", **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        load(llama)


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("gpt2", {"activation_function": "relu"}, "relu"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"n_head": 7}, "7 heads"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"]}, "1 entries for 3"),
    ],
)
def test_unsupported_in_other_families(models, tmp_path, variant, changes, message):
    models[variant].save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "48"}, "'hidden_size' must be int"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be positive"),
        ({"vocab_size": True}, "'vocab_size' must be int"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' must be bool"),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks 'factor'"),
        ({"rope_parameters": tiny.LLAMA3_ROPE | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, "'factor' must be positive"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be positive"),
        ({"eos_token_id": ["x"]}, "eos_token_id"),
    ],
)
def test_damaged_config(llama, changes, message):
    edit_json(llama / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        load(llama)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_config_that_is_no_object(llama, text):
    (llama / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        load(llama)


def test_a_single_file_counts_before_shards(llama, tmp_path_factory):
    """The single file counts as in transformers; the shards here are another model's, and not all there."""
    shards = tmp_path_factory.mktemp("shards")
    tiny.build_model("llama", seed=1).save_pretrained(shards, max_shard_size="50KB")
    for file in (*shards.glob("*.json"), *shards.glob("*-00001-*")):
        shutil.copy(file, llama)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(llama)
    assert continuation(load(llama)) == tiny.generate(theirs, PROMPT, 12)


def test_missing_shard(models, tmp_path):
    models["llama"].save_pretrained(tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(MissingWeightError, match=shard.name):
        load(tmp_path)


def test_index_that_lies(models, tmp_path):
    models["llama"].save_pretrained(tmp_path, max_shard_size="50KB")
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    name = "model.norm.weight"
    weight_map[name] = next(file for file in weight_map.values() if file != weight_map[name])
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(MissingWeightError, match=name):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": []}))
    with pytest.raises(ModelError, match="weight_map"):
        load(tmp_path)


def test_no_weights_at_all(llama):
    (llama / "model.safetensors").unlink()
    with pytest.raises(MissingWeightError, match=r"model\.safetensors"):
        load(llama)
    (llama / "pytorch_model.bin").touch()
    with pytest.raises(MissingWeightError, match=r"pytorch_model\.bin is not read"):
        load(llama)


def test_missing_tensor(llama):
    edit_weights(llama, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(MissingWeightError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(llama)


def test_wrong_shape(llama):
    edit_weights(llama, model__layers__2__self_attn__k_proj__weight=torch.zeros(16, 47))
    with pytest.raises(WeightMismatchError, match=r"k_proj\.weight.*\(16, 48\).*\(16, 47\)"):
        load(llama)


def test_wrong_dtype(llama):
    edit_weights(llama, model__norm__weight=torch.ones(48, dtype=torch.int8))
    with pytest.raises(WeightMismatchError, match=r"norm\.weight.*int8"):
        load(llama)


def test_extra_tensors_are_named_once(llama, caplog):
    edit_weights(
        llama,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4),
        model__adapter__weight=torch.ones(2),
        vision__weight=torch.ones(2),
    )
    with caplog.at_level(logging.WARNING):
        load(llama)
    (record,) = caplog.records
    assert "2 tensors" in record.getMessage()
    assert "model.adapter.weight, vision.weight" in record.getMessage()


def test_failed_load_reports_only_its_failure(llama, caplog):
    edit_weights(llama, model__norm__weight=None)
    with pytest.raises(MissingWeightError):
        load(llama)
    assert not caplog.records


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "progress", "shown"), [(Terminal, True, 1), (Terminal, False, 0), (io.StringIO, True, 0)]
)
def test_progress_bar(llama, monkeypatch, stream, progress, shown):
    monkeypatch.setattr(sys, "stderr", stream())
    CpuModelRunner.load(EngineConfig(model=str(llama), num_kv_blocks=8), progress=progress, ops=ReferenceOps())
    text = sys.stderr.getvalue()
    assert ("Loading weights: 100%" in text) == bool(shown)
    assert bool(text) == bool(shown)


def damage_end(data: bytes) -> bytes:
    return data[:-100]


def damage_header(data: bytes) -> bytes:
    return data[:8] + b"x" * 20 + data[28:]


def damage_length(data: bytes) -> bytes:
    return struct.pack("<Q", 2**62) + data[8:]


@pytest.mark.parametrize("damage", [damage_end, damage_header, damage_length, lambda data: b""])
@pytest.mark.parametrize("sharded", [False, True])
def test_damaged_file(models, tmp_path, damage, sharded):
    models["llama"].save_pretrained(tmp_path, **({"max_shard_size": "50KB"} if sharded else {}))
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=f"{file.name} is damaged"):
        load(tmp_path)


def test_directory_can_be_copied_and_read_only(llama, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy") / "model"
    shutil.copytree(llama, copy)
    for file in copy.iterdir():
        file.chmod(0o444)
    assert continuation(load(copy)) == continuation(load(llama))


# Sizing


def test_context_longer_than_the_models(llama):
    with pytest.raises(ConfigError, match=r"129.*128"):
        load(llama, max_model_len=129)


def test_weights_that_do_not_fit_into_memory(llama):
    edit_json(llama / "config.json", vocab_size=1 << 22, hidden_size=1 << 17, head_dim=8)
    with pytest.raises(ConfigError, match=r"weights do not fit .*: 2,199,023,255,552 bytes"):
        load(llama, load_format="dummy")


def test_float8_weights_are_for_gpus(llama):
    with pytest.raises(ConfigError, match="quantization=fp8 needs a GPU"):
        load(llama, quantization="fp8")


def test_forward_without_samples(llama):
    driver = tiny.Driver(load(llama))
    sequence = driver.add(PROMPT, 8)
    driver.step([(sequence, 2)])
    assert driver.logits == []
    driver.step([(sequence, 2)])
    assert len(driver.logits) == 1


def test_import_leaves_transformers_alone():
    """Start-up time: transformers costs seconds and is needed for tokenizers without tokenizer.json only."""
    script = (
        "import sys, asyncengine.runner.steps.model_runner, asyncengine.text.tokenizer, asyncengine.text.detokenizer\n"
        "print([m for m in ('transformers', 'huggingface_hub', 'jinja2') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"
