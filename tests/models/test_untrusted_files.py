"""A model directory is written by others: whatever its files hold, a ModelError names file and key, or it loads."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import resource
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import asyncengine
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError, MissingWeightError, ModelError, UnsupportedModelError, WeightMismatchError
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.models.config import RawConfig
from asyncengine.models.files import MAX_CONFIG_BYTES, read_json, read_optional_json
from asyncengine.models.registry import find_family
from asyncengine.models.rotary import rotary_table
from asyncengine.models.weights import checkpoint as loader
from asyncengine.models.weights.checkpoint import Checkpoint, find_shards
from asyncengine.runner.steps.model_runner import CpuModelRunner
from tests.amounts import examples
from tests.models import tiny

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    tiny.build_model("llama").save_pretrained(path)
    return path


@pytest.fixture
def llama(saved: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(saved, copy)
    return copy


@pytest.fixture
def sharded(llama: Path) -> Path:
    """The same weights in one shard with an index."""
    (llama / "model.safetensors").rename(llama / "shard.safetensors")
    names = dict.fromkeys(loader._open_shard(llama / "shard.safetensors").keys(), "shard.safetensors")
    write(llama / loader.INDEX_FILE, {"weight_map": names})
    return llama


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def edit(path: Path, **changes: object) -> None:
    write(path, {**json.loads(path.read_text()), **changes})


def load(path: Path, **config: Any) -> CpuModelRunner:
    settings = {"num_kv_blocks": 16, **config}
    return CpuModelRunner.load(EngineConfig.from_kwargs(str(path), settings), ops=ReferenceOps())


# JSON


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEEP, "nested too deeply"),
        ('{"a": ' + DEEP + "}", "nested too deeply"),
        ('{"eos_token_id": 1' + "0" * 5000 + "}", "digits"),
        ("\ufeff{}", "BOM"),
        ("{} {}", "Extra data"),
        ("\x00", "cannot read"),
    ],
)
def test_json_that_cannot_be_read(sharded: Path, name: str, text: str, message: str) -> None:
    (sharded / name).write_text(text)
    with pytest.raises(ModelError, match=message) as caught:
        load(sharded)
    assert name in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEEP, "Expected `object`"),
        ('{"metadata": ' + DEEP + ', "weight_map": {}}', "nested too deeply"),
        ("\ufeff{}", "malformed"),
        ("", "truncated"),
        ("{}", "weight_map"),
        ('{"weight_map": []}', "weight_map"),
        ('{"weight_map": {"a": 1}}', "weight_map"),
        ('{"weight_map": {"a": "\\ud800"}}', "truncated"),
    ],
)
def test_index_that_cannot_be_read(sharded: Path, text: str, message: str) -> None:
    (sharded / loader.INDEX_FILE).write_text(text)
    with pytest.raises(ModelError, match=rf"{loader.INDEX_FILE}.*{message}") as caught:
        load(sharded)
    assert len(str(caught.value)) < 1000


def test_no_objects_are_made_of_what_an_index_has_beside_its_map(sharded: Path) -> None:
    """60 MB of empty lists took 18 seconds and 1.6 GB."""
    index = sharded / loader.INDEX_FILE
    index.write_text('{"metadata": [' + "[]," * 20_000_000 + "[]]," + index.read_text()[1:])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert load(sharded).info.vocab_size == tiny.VOCAB_SIZE
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000, "kilobytes"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", loader.INDEX_FILE, "shard.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "dangling link", "loop"])
def test_what_is_no_regular_file_is_never_opened(sharded: Path, name: str, kind: str) -> None:
    path = sharded / name
    path.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case "dangling link":
            path.symlink_to("nothing")
        case "loop":
            path.symlink_to(name)
    with pytest.raises(ModelError, match=name):
        load(sharded)


def test_large_json_is_not_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.json", "generation_config.json"):
        os.truncate(llama / name, MAX_CONFIG_BYTES + 1)
        with pytest.raises(ModelError, match=rf"{name} has 1,048,577 bytes"):
            read_json(llama / name)
    assert read_optional_json(llama / "nothing.json") == {}
    (llama / "model.safetensors").unlink()
    with (llama / loader.INDEX_FILE).open("w") as file:
        file.truncate(loader.MAX_INDEX_BYTES + 1)
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(ModelError, match=loader.INDEX_FILE):
        find_shards(llama)


# Values


@pytest.mark.parametrize(
    ("variant", "key", "value"),
    [
        ("llama", "num_hidden_layers", 10**9),
        ("gpt2", "n_layer", 10**9),
        ("mistral-window", "num_hidden_layers", 10**9),
        ("qwen2-window", "num_hidden_layers", 10**9),
        ("llama", "hidden_size", 2**62),
        ("gpt2", "n_embd", 2**62),
        ("llama", "intermediate_size", 2**62),
        ("llama", "vocab_size", 1 << 45),
        ("llama", "num_attention_heads", 10**300),
        ("llama", "head_dim", 2**40),
        ("llama", "max_position_embeddings", 10**12),
        ("mistral-window", "sliding_window", 2**63),
        ("llama", "rms_norm_eps", 10**400),
        ("llama", "rms_norm_eps", float("inf")),
        ("llama", "initializer_range", 10**400),
        ("llama", "eos_token_id", 1.0),
        ("llama", "eos_token_id", [0, "</s>"]),
        ("llama", "eos_token_id", [1] * 1000),
        ("llama", "hidden_size", [[[[[[[[[0]]]]]]]]] * 10_000),
        ("llama", "hidden_act", "x" * 10_000),
        ("llama", "architectures", ["x" * 10_000]),
        ("llama", "quantization_config", {"quant_method": "x" * 10_000}),
        ("llama", "dtype", "x" * 10_000),
        ("qwen3-window-biased", "layer_types", [["full_attention"]] * 3),
        ("qwen3-window-biased", "layer_types", [{}, "full_attention", None]),
    ],
)
def test_implausible_values(tmp_path: Path, variant: str, key: str, value: object) -> None:
    """Refused at once, by name, and without a line of a thousand characters."""
    tiny.build_config(variant).save_pretrained(tmp_path)
    family = tiny.VARIANTS[variant][0]
    head = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    edit(tmp_path / "config.json", **{"architectures": [head], key: value})
    start = time.monotonic()
    with pytest.raises(ModelError) as caught:
        load(tmp_path, load_format="dummy")
    assert time.monotonic() - start < 10
    words = {"layer_types": "layer type", "quantization_config": "quantization_config", "architectures": "architecture"}
    assert words.get(key, key) in str(caught.value)
    assert "config.json" in str(caught.value) or key == "dtype"
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 10**400},
        {"rope_theta": 1},
        {"rope_type": "linear", "factor": 10**400},
        {"rope_type": "yarn", "factor": 1e6, "original_max_position_embeddings": 2**24},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e308},
        {"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e-320},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 10**400, "mscale_all_dim": 1},
        {"rope_type": "yarn", "factor": 22026.46579480671, "mscale": 1, "mscale_all_dim": -1},
        {"rope_type": ["yarn"]},
        {"rope_type": "x" * 10_000},
    ],
)
def test_implausible_rotary_settings(llama: Path, rope: dict[str, object]) -> None:
    edit(llama / "config.json", rope_parameters={"rope_theta": 10_000.0, **rope})
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        load(llama)
    assert len(str(caught.value)) < 1000


def test_generation_config_is_checked_before_weights_are_read(llama: Path) -> None:
    write(llama / "generation_config.json", {"eos_token_id": [0, None]})
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"generation_config\.json: 'eos_token_id' must hold token ids"):
        load(llama)


def test_positions_that_do_not_fit_into_memory(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(llama / "config.json", max_position_embeddings=2**24)
    monkeypatch.setattr("asyncengine.runner.steps.model_runner.total_memory", lambda: 2**36)
    with pytest.raises(ConfigError, match="or max_model_len"):  # block tables of 256 GB
        load(llama, max_num_seqs=2**16, max_num_batched_tokens=2**16)
    monkeypatch.setattr("asyncengine.runner.steps.model_runner.total_memory", lambda: 2**20)
    with pytest.raises(ConfigError, match="or max_model_len"):
        load(llama)
    assert load(llama, max_model_len=100).info.max_model_len == 100


def test_heads_that_do_not_divide_the_hidden_size(llama: Path) -> None:
    edit(llama / "config.json", hidden_size=50, head_dim=None)
    with pytest.raises(UnsupportedModelError, match="hidden_size = 50 over 6 heads"):
        load(llama)


@functools.cache
def config_of(variant: str) -> dict[str, Any]:
    """The content of the config.json of a variant."""
    family, config = tiny.VARIANTS[variant][0], tiny.build_config(variant).to_dict()
    return config | {"architectures": ["GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"]}


numbers = st.one_of(
    st.integers(),
    st.integers(-2, 200),
    st.floats(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400, -(10**400), 1e308, 5e-324, 10**9]),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=20)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)
ROPE_KEYS = [
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate",
    "partial_rotary_factor", "short_factor", "long_factor", "llama_4_scaling_beta",
]  # fmt: skip
rope_values = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope"])},
    optional=dict.fromkeys(ROPE_KEYS[2:], values),
)


@st.composite
def damaged_configs(draw: st.DrawFn) -> dict[str, Any]:
    config = dict(config_of(draw(st.sampled_from(sorted(tiny.VARIANTS)))))
    for key in draw(st.lists(st.sampled_from(sorted(config)), max_size=4)):
        config[key] = draw(values)
    if draw(st.booleans()):
        config[draw(st.sampled_from(["rope_scaling", "rope_parameters"]))] = draw(rope_values | values)
    return config


@settings(max_examples=examples(400))
@given(config=damaged_configs())
@example(config=config_of("llama") | {"rope_theta": 10**400})
def test_any_value_of_any_key(config: dict[str, Any]) -> None:
    """The configuration is read, with whatever is computed from it before weights are, or refused."""
    raw = RawConfig(json.loads(json.dumps(config)), "config.json")
    start = time.monotonic()
    with contextlib.suppress(ModelError):
        _, family = find_family(raw)
        model = family.read_config(raw)
        raw.token_ids("eos_token_id", model.vocab_size)
        loader.choose_dtype("auto", raw.dtype)
        for rope, dim in set(zip(model.layer_ropes, model.head_dims, strict=True)):
            rotary_table(rope, dim, min(model.max_positions, 64))
    assert time.monotonic() - start < 10


SHAPE_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "num_key_value_heads", "max_position_embeddings", "sliding_window", "n_embd", "n_head", "n_inner", "n_positions",
)  # fmt: skip
sizes = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 10, 14, 16, 18, 33, 34, 62, 66, 96, 126, 130, 200, 258, 514])


@pytest.fixture(scope="module")
def kernels() -> CpuOps:
    return CpuOps(1)


@settings(max_examples=examples(100))
@given(
    name=st.sampled_from(sorted(tiny.VARIANTS)),
    changes=st.dictionaries(st.sampled_from(SHAPE_KEYS), sizes, max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    chunk=st.sampled_from([1, 7, 64]),
)
def test_any_shape_runs_in_the_native_kernels_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory,
    kernels: CpuOps,
    name: str,
    changes: dict[str, int],
    dtype: str,
    chunk: int,
) -> None:
    directory = tmp_path_factory.mktemp("shape")
    write(directory / "config.json", config_of(name) | {"eos_token_id": None} | changes)
    config = EngineConfig(model=str(directory), load_format="dummy", dtype=dtype, num_kv_blocks=64)  # type: ignore[arg-type]
    try:
        runner = CpuModelRunner.load(config, ops=kernels)
    except UnsupportedModelError:
        return
    driver = tiny.Driver(runner, native=True)
    longest, vocabulary = runner.info.max_model_len, runner.info.vocab_size
    prompt = [i % vocabulary for i in range(min(20, longest - 1))]
    if prompt:
        count = min(5, longest - len(prompt))
        driver.run([driver.add(prompt, len(prompt) + count)], count, chunk)
        assert len(driver.logits) == count


# Weights


@pytest.mark.parametrize(
    "file",
    [
        "../model/shard.safetensors", "./shard.safetensors", "sub/shard.safetensors", "..", ".", "", ".hidden",
        "/etc/hostname", "\\\\server\\share", "..\\shard.safetensors", "C:shard.safetensors", "shard.safetensors\0",
        "shard\n.safetensors", "x" * 300,
    ],
)  # fmt: skip
def test_an_index_names_files_of_its_directory(sharded: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_map = json.loads((sharded / loader.INDEX_FILE).read_text())["weight_map"]
    write(sharded / loader.INDEX_FILE, {"weight_map": weight_map | {"model.norm.weight": file}})
    (sharded / "sub").mkdir()
    shutil.copy(sharded / "shard.safetensors", sharded / "sub")
    monkeypatch.setattr(loader, "safe_open", lambda *args, **kwargs: pytest.fail("a file was opened"))
    with pytest.raises(ModelError, match="'weight_map' must name files of its directory"):
        load(sharded)


def test_links_of_the_hubs_cache_are_followed(sharded: Path) -> None:
    """snapshots/COMMIT/FILE → ../../blobs/HASH"""
    blobs, snapshot = sharded.parent / "blobs", sharded.parent / "snapshots" / "0a1b2c"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(sharded.iterdir())):
        file.rename(blobs / f"{i:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:064x}")
    assert load(snapshot).info.vocab_size == tiny.VOCAB_SIZE


def safetensors_bytes(header: object, data: bytes, *, length: int | None = None, pad: int = 0) -> bytes:
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + b" " * pad
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


ZEROS = bytes(32)
GOOD = {"a": entry("F32", [8], 0, 32)}


@pytest.mark.parametrize(
    ("file", "error", "message"),
    [
        (b"", ModelError, "damaged"),
        (b"\0" * 7, ModelError, "damaged"),
        (safetensors_bytes(GOOD, ZEROS[:-1]), ModelError, "damaged"),
        (safetensors_bytes(GOOD, ZEROS + b"\0"), ModelError, "damaged"),
        (safetensors_bytes(GOOD, ZEROS, length=0), ModelError, "damaged"),
        (safetensors_bytes(GOOD, ZEROS, length=10), ModelError, "damaged"),
        (safetensors_bytes(GOOD, ZEROS, length=2**63), ModelError, "damaged"),
        (safetensors_bytes(GOOD, ZEROS, length=(32 << 20) + 1), ModelError, "at most 33,554,432 are read"),
        (safetensors_bytes(b"[]", ZEROS), ModelError, "damaged"),
        (safetensors_bytes(b'{"a":' + DEEP.encode() + b"}", ZEROS), ModelError, "damaged"),
        (safetensors_bytes({"a": GOOD["a"], "b": entry("F32", [8], 0, 32)}, ZEROS), ModelError, "damaged"),
        (safetensors_bytes({"a": entry("F32", [8], 32, 0)}, ZEROS), ModelError, "damaged"),
        (safetensors_bytes({"a": entry("F32", [-8], 0, 32)}, ZEROS), ModelError, "damaged"),
        (safetensors_bytes({"a": entry("F32", [2**62, 2**62], 0, 32)}, ZEROS), ModelError, "damaged"),
        (safetensors_bytes({"a": entry("X" * 10_000, [8], 0, 32)}, ZEROS), ModelError, "damaged"),
        (safetensors_bytes({"a": entry("F32", [0], 0, 0)}, b""), WeightMismatchError, r"found \(0,\)"),
        (safetensors_bytes({"a": entry("F32", [0, 2**63], 0, 0)}, b""), WeightMismatchError, "tensor a"),
        (safetensors_bytes({"a": entry("F32", [1] * 9999, 0, 4)}, bytes(4)), WeightMismatchError, "tensor a"),
        (safetensors_bytes({"a": entry("F6_E2M3", [8], 0, 6)}, bytes(6)), WeightMismatchError, "cannot be read"),
        (safetensors_bytes({"a": entry("I32", [8], 0, 32)}, ZEROS), WeightMismatchError, "expected floats"),
        (safetensors_bytes({"b": GOOD["a"]}, ZEROS), MissingWeightError, "tensor a"),
    ],
)
def test_damaged_weights(tmp_path: Path, file: bytes, error: type[ModelError], message: str) -> None:
    (tmp_path / loader.SINGLE_FILE).write_bytes(file)
    with pytest.raises(error, match=message) as caught:
        Checkpoint(tmp_path, torch.float32).get("a", 8)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("pad", range(4))
def test_weights_are_aligned_wherever_the_file_has_them(tmp_path: Path, pad: int) -> None:
    """Files of old writers have headers of any length, and kernels read elements at multiples of their size."""
    expected = torch.arange(8, dtype=torch.float32)
    (tmp_path / loader.SINGLE_FILE).write_bytes(safetensors_bytes(GOOD, expected.numpy().tobytes(), pad=pad))
    checkpoint = Checkpoint(tmp_path, torch.float32)
    tensor = checkpoint.get("a", 8)
    assert tensor.data_ptr() % 4 == 0
    assert torch.equal(tensor, expected)
    in_place = (8 + len(json.dumps(GOOD)) + pad) % 4 == 0
    assert (checkpoint.mapped_bytes, checkpoint.owned_bytes) == ((32, 0) if in_place else (0, 32))


def test_names_of_unused_tensors_cannot_forge_lines_of_the_log(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = Checkpoint(llama, torch.float32)
    tensors = {name: checkpoint._read(name, shape) for name, shape in shapes(checkpoint).items()}
    save_file(tensors | {"x\nERROR:": torch.ones(1), "y" * 10_000: torch.ones(1)}, llama / "model.safetensors")
    load(llama)
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 1000


def shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    (path,) = set(checkpoint._shard_of.values())
    file = loader._open_shard(path)
    return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


# Code in files


def test_nothing_that_runs_code_from_a_file_is_used() -> None:
    """pickle and its relatives. Our own processes get their work through socket pairs; they answer with plain bytes."""
    forbidden = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    calls = {"eval", "exec", "torch.load", "np.load", "numpy.load", "torch.jit.load", "torch.hub.load"}
    package = Path(asyncengine.__file__).parent
    pickles = "kernels/cuda/launch/compile_processes.py"
    allowed = {(pickles, "pickle"), ("text/sandbox_program.py", "marshal"), ("text/sandbox.py", "marshal")}
    found = set()
    for path in sorted(package.rglob("*.py")):
        here = path.relative_to(package).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
                if node.module == "torch":
                    names += [f"torch.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Call):
                names = [ast.unparse(node.func)]
                for keyword in node.keywords:
                    value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                    given = ast.unparse(keyword.value) in ("trust_remote_code", "config.trust_remote_code")
                    if keyword.arg in ("trust_remote_code", "allow_pickle") and value is not False and not given:
                        found.add((here, keyword.arg))
            found |= {(here, name) for name in names if name in forbidden | calls}
    assert found == allowed
