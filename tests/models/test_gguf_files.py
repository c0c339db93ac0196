"""GGUF files as models: their tokenizers, parts and directories, and files that are damaged or lie."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from asyncengine import AsyncEngine, EngineConfig, SamplingParams
from asyncengine.errors import MissingWeightError, ModelError, ModelNotFoundError, UnsupportedModelError
from asyncengine.models.config import RawConfig
from asyncengine.models.gguf.files import read_model
from asyncengine.models.gguf.paths import find_gguf
from asyncengine.models.gguf.reader import read_header
from asyncengine.models.registry import find_family
from asyncengine.models.weights.gguf import GgufTensors
from asyncengine.runner.describe import describe_model
from asyncengine.text.tokenizer import Tokenizer
from tests.models import tiny
from tests.models.gguf_files import write_model

TEXTS = (*tiny.CORPUS, "a two words Maß </s> b", "  two  spaces", "")


def byte_level(writer: gguf.GGUFWriter) -> None:
    """The tokenizer of Llama 3's kind, as llama.cpp's converter writes it."""
    stored = json.loads(tiny.byte_level_tokenizer().to_str())
    vocabulary = stored["model"]["vocab"]
    added = {token["content"]: token for token in stored["added_tokens"]}
    for content, token in added.items():
        vocabulary.setdefault(content, token["id"])
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [(3 if added[token]["special"] else 4) if token in added else 1 for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in stored["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template(tiny.CHAT_TEMPLATE)


def sentencepiece(writer: gguf.GGUFWriter) -> None:
    """The tokenizer of Llama 2's kind: pieces with scores in the order of their merges."""
    stored = json.loads(tiny.metaspace_tokenizer().to_str())
    tokens = sorted(stored["model"]["vocab"], key=stored["model"]["vocab"].__getitem__)
    made = {"".join(merge): -float(i) for i, merge in enumerate(stored["model"]["merges"])}
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([made.get(token, -1e4) for token in tokens])
    writer.add_token_types([2 if i == 0 else 3 if i < 3 else 6 if i < 259 else 1 for i in range(len(tokens))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def metadata_file(path: Path, fill: Any, arch: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, arch)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("fill", "kind"), [(byte_level, "byte_level"), (sentencepiece, "metaspace")])
def test_tokenizer_is_that_of_the_file(fill: Any, kind: str, tmp_path: Path) -> None:
    original = getattr(tiny, f"{kind}_tokenizer")()
    found = Tokenizer.from_pretrained(str(metadata_file(tmp_path / "x.gguf", fill)))
    for text in TEXTS:
        ids = original.encode(text).ids
        assert found.encode(text) == ids, text
        assert found.backend.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
    assert (found.bos_token_id, found.eos_token_id) == ((0, 1) if kind == "byte_level" else (1, 2))
    assert found.template() == (tiny.CHAT_TEMPLATE if kind == "byte_level" else None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_tokenizer_model("bert"), "'bert'"),
        (lambda w: (w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("unheard-of")), "unheard-of"),
        (lambda w: (w.add_tokenizer_model("gpt2"), w.add_token_merges(["a z"])), "'a z'"),
        (lambda w: w.add_tokenizer_model("llama"), "scores"),
    ],
)
def test_other_tokenizers_are_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["a", "b", "ab"])
        change(writer)

    with pytest.raises(ModelError, match=message):
        Tokenizer.from_pretrained(str(metadata_file(tmp_path / "x.gguf", fill)))


def test_file_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no tokenizer"):
        Tokenizer.from_pretrained(str(metadata_file(tmp_path / "x.gguf", lambda writer: None)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocab_size = tiny.byte_level_tokenizer().get_vocab_size()
    kind = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
    }
    folder = tmp_path_factory.mktemp("gguf")
    path, _ = write_model(folder, "llama", lambda name: Type.Q8_0, tokenizer=byte_level, **kind)
    return path


async def test_engine_of_a_file_and_of_its_directory(model: Path, tmp_path: Path) -> None:
    """A directory without config.json stands for the file in it."""
    (tmp_path / "m.gguf").symlink_to(model)
    outputs = []
    for name in (model, tmp_path):
        settings: dict[str, Any] = {"num_kv_blocks": 16, "cpu_threads": 1, "dtype": "float32"}
        async with AsyncEngine.from_pretrained(str(name), **settings) as engine:
            sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
            output = await engine.generate("The quick brown", sampling)
            outputs.append(output.outputs[0].token_ids)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 6


def test_report(model: Path) -> None:
    report = describe_model(EngineConfig(model=str(model)), "cpu")
    assert (report.way, report.architecture, report.has_weights) == ("native", "LlamaForCausalLM", True)
    assert report.weight_bytes is not None
    assert report.num_parameters is not None
    assert 8.5 <= 8 * report.weight_bytes / report.num_parameters < 9


def test_parts(model: Path, tmp_path: Path) -> None:
    """Tensors of all files belong to the model; a part that is not there is named."""
    whole = gguf.GGUFReader(model)
    for part in (0, 1):
        writer = gguf.GGUFWriter(tmp_path / f"m-{part + 1:05}-of-00002.gguf", "llama")
        writer.add_uint16("split.count", 2)
        for tensor in whole.tensors[part::2]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    first = find_gguf(tmp_path)
    assert first is not None
    assert first.name == "m-00001-of-00002.gguf"
    assert read_model(first).tensors.keys() == read_model(model).tensors.keys()
    with pytest.raises(ModelError, match=r"name the first"):
        read_model(first.with_name("m-00002-of-00002.gguf"))
    first.with_name("m-00002-of-00002.gguf").unlink()
    with pytest.raises(MissingWeightError, match=r"m-00002-of-00002\.gguf"):
        read_model(first)


def test_every_cut_is_refused(model: Path, tmp_path: Path) -> None:
    stored = model.read_bytes()
    tensors = read_header(model).tensors.values()
    last = max(tensor.start + tensor.num_bytes for tensor in tensors)
    path = tmp_path / "cut.gguf"
    header = min(tensor.start for tensor in tensors)
    for size in [*range(0, header, 97), *range(header, last, (last - header) // 9), last - 1]:
        path.write_bytes(stored[:size])
        with pytest.raises(ModelError):
            read_header(path)


def entry(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    axes = struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
    return struct.pack("<Q", len(name)) + name.encode() + axes + struct.pack("<IQ", kind, offset)


def header(*entries: bytes, tensors: tuple[bytes, ...] = (), version: int = 3, counts: Any = None) -> bytes:
    numbers = counts or (len(tensors), len(entries))
    return b"GGUF" + struct.pack("<IQQ", version, *numbers) + b"".join(entries) + b"".join(tensors) + bytes(64)


MANY = 1 << 60
LIES = {
    "another file": b"PK\x03\x04" + bytes(64),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "version": header(version=1),
    "tensors": header(counts=(MANY, 0)),
    "entries": header(counts=(0, MANY)),
    "a key": header(struct.pack("<Q", MANY)),
    "a text": header(entry("a", 8, struct.pack("<Q", MANY))),
    "an array of bytes": header(entry("a", 9, struct.pack("<IQ", 0, MANY))),
    "an array of numbers": header(entry("a", 9, struct.pack("<IQ", 10, 100_000_000))),
    "an array of strings": header(entry("a", 9, struct.pack("<IQ", 8, 900_000))),
    "a string of an array": header(entry("a", 9, struct.pack("<IQQ", 8, 1, MANY))),
    "an array of arrays": header(entry("a", 9, struct.pack("<IQ", 9, 1))),
    "a type of metadata": header(entry("a", 77, b"")),
    "alignment": header(entry("general.alignment", 4, struct.pack("<I", 12))),
    "a type of tensors": header(tensors=(tensor("a", (4,), 99),)),
    "axes": header(tensors=(tensor("a", (1, 1, 1, 1, 1)),)),
    "an empty tensor": header(tensors=(tensor("a", (0, 4)),)),
    "a huge tensor": header(tensors=(tensor("a", (1 << 40, 1 << 40)),)),
    "a tensor behind the file": header(tensors=(tensor("a", (4,), offset=1 << 40),)),
    "an odd offset": header(tensors=(tensor("a", (4,), offset=3),)),
    "a tensor twice": header(tensors=(tensor("a", (4,)), tensor("a", (4,)))),
    "half a block": header(tensors=(tensor("a", (16, 2), 8),)),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused(lie: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(LIES[lie])
    with pytest.raises(ModelError, match=r"x\.gguf"):
        read_header(path)


def settings_of(change: Any, path: Path, arch: str = "llama") -> RawConfig:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_context_length(128)
        writer.add_embedding_length(16)
        writer.add_block_count(1)
        writer.add_feed_forward_length(32)
        writer.add_head_count(2)
        writer.add_tensor("token_embd.weight", np.zeros((7, 16), np.float32))
        change(writer)

    return RawConfig.load(metadata_file(path / "x.gguf", fill, arch))


def test_factors_of_frequencies(tmp_path: Path) -> None:
    """Llama 3's scaling is in a tensor of divisors."""
    factors = np.array([1, 1.5, 4, 8], np.float32)
    raw = settings_of(lambda writer: writer.add_tensor("rope_freqs.weight", factors), tmp_path)
    config = find_family(raw)[1].read_config(raw)
    (rope,) = config.ropes
    assert rope is not None
    assert (rope.short_factor, rope.long_factor, rope.attention_factor) == ((1, 1.5, 4, 8), (1, 1.5, 4, 8), 1.0)
    assert (config.vocab_size, config.tie_word_embeddings, config.max_positions) == (7, True, 128)


@pytest.mark.parametrize(
    ("change", "arch", "message"),
    [
        (lambda w: None, "mamba", "'mamba'"),
        (lambda w: w.add_float32("llama.logit_scale", 2.0), "llama", "llama.logit_scale"),
        (lambda w: w.add_string("llama.rope.scaling.type", "odd"), "llama", "odd"),
        (lambda w: w.add_head_count_kv([1, 2]), "llama", "differs by layer"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.ones(3, np.float32)), "llama", "4 numbers"),
        (lambda w: w.add_string("llama.rope.freq_base", "x"), "llama", "rope_theta"),
    ],
)
def test_metadata_that_change_the_computation_are_refused(change: Any, arch: str, message: str, tmp_path: Path) -> None:
    def read() -> None:
        raw = settings_of(change, tmp_path, arch)
        find_family(raw)[1].read_config(raw)

    with pytest.raises(ModelError, match=message):
        read()


def test_tensors_are_checked(model: Path) -> None:
    tensors = GgufTensors(model, torch.float32)
    assert "model.layers.0.self_attn.q_proj.weight" in tensors
    assert "model.layers.9.self_attn.q_proj.weight" not in tensors
    with pytest.raises(MissingWeightError, match=r"blk\.9\.attn_q\.weight"):
        tensors.get("model.layers.9.self_attn.q_proj.weight", 4, 4)
    with pytest.raises(ModelError, match="expected shape"):
        tensors.get("model.norm.weight", 63)
    with pytest.raises(UnsupportedModelError, match="transformers"):
        tensors.stored()


def test_several_files_of_a_directory_are_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"a\.gguf.*b\.gguf"):
        find_gguf(tmp_path)
