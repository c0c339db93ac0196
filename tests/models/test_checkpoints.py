"""Forms of a checkpoint that transformers loads: each family in each form gives what transformers gives."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model

from asyncengine import AsyncEngine, InvalidRequestError, SamplingParams
from asyncengine.errors import MissingWeightError
from tests.models import tiny

PROMPT = [5, 9, 3, 70, 12]
COUNT = 12
VARIANTS = {"gpt2": "GPT2", "llama": "Llama", "mistral-window": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
TRUNKS = {"gpt2": "transformer."}
EMBEDDINGS = {"gpt2": "transformer.wte.weight"}
variants = pytest.mark.parametrize("variant", VARIANTS)


def trunk(variant: str) -> str:
    return TRUNKS.get(variant, "model.")


def embedding(variant: str) -> str:
    return EMBEDDINGS.get(variant, "model.embed_tokens.weight")


def save(path: Path, model: Any, tensors: dict[str, torch.Tensor] | None = None) -> None:
    model.save_pretrained(path)
    if tensors is not None:
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def engine_of(path: Path) -> AsyncEngine:
    return AsyncEngine.from_pretrained(
        str(path), progress=False, cpu_threads=1, num_kv_blocks=32, dtype="float32", skip_tokenizer_init=True
    )


async def check_tokens(path: Path) -> None:
    """Check tokens against the model that transformers makes of the same directory."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    async with engine_of(path) as engine:
        output = await engine.generate(PROMPT, SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True))
        assert engine.model_info.generates
    assert list(output.outputs[0].token_ids) == tiny.generate(theirs, PROMPT, COUNT)


async def check_vectors(path: Path, *, generates: bool) -> None:
    theirs = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).last_hidden_state[0, -1].numpy()
    async with engine_of(path) as engine:
        output = await engine.embed([PROMPT], normalize=False)
        assert engine.model_info.generates == generates
        if not generates:
            with pytest.raises(InvalidRequestError, match="has no head and generates no text"):
                await engine.generate(PROMPT)
    np.testing.assert_allclose(output.vectors[0], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.sampled(3)
@variants
@pytest.mark.parametrize("tied", [True, False])
async def test_names_without_the_trunks(tmp_path: Path, variant: str, tied: bool) -> None:
    model = tiny.build_model(variant, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save(tmp_path, model, {name.removeprefix(trunk(variant)): tensor for name, tensor in tensors.items()})
    await check_tokens(tmp_path)


@variants
@pytest.mark.parametrize("tied", [True, False])
async def test_a_model_saved_without_its_head(tmp_path: Path, variant: str, tied: bool) -> None:
    """Embedding models are saved so: with the base model's class and names. A tied head is the embedding, which is
    there."""
    model: Any = tiny.build_model(variant, tie_word_embeddings=tied)
    model.base_model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [VARIANTS[variant] + "Model"]
    await check_vectors(tmp_path, generates=tied)


@variants
async def test_a_head_that_is_missing(tmp_path: Path, variant: str, caplog: pytest.LogCaptureFixture) -> None:
    """Although config.json names the class that has one."""
    model = tiny.build_model(variant, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save(tmp_path, model, tensors)
    with caplog.at_level(logging.WARNING):
        await check_vectors(tmp_path, generates=False)
    assert "lm_head.weight" in caplog.text


@pytest.mark.sampled(3)
@variants
@pytest.mark.parametrize("stored", ["the embedding's", "the head's", "both"])
async def test_the_name_of_a_tied_matrix(tmp_path: Path, variant: str, stored: str) -> None:
    model = tiny.build_model(variant, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    matrix = tensors.pop(embedding(variant))
    tensors |= {} if stored == "the head's" else {embedding(variant): matrix}
    tensors |= {} if stored == "the embedding's" else {"lm_head.weight": matrix}
    save(tmp_path, model, tensors)
    await check_tokens(tmp_path)
    await check_vectors(tmp_path, generates=True) if stored != "the head's" else None


@variants
async def test_a_head_that_differs_from_the_embedding_is_not_tied(tmp_path: Path, variant: str) -> None:
    """Fine-tuned heads are stored beside a configuration that still ties them."""
    model = tiny.build_model(variant, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", tie_word_embeddings=True)
    await check_tokens(tmp_path)


@variants
async def test_names_that_share_a_tensor(tmp_path: Path, variant: str) -> None:
    """safetensors' save_model keeps one of them, and notes the others in the header."""
    model = tiny.build_model(variant, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    save_model(model, str(tmp_path / "model.safetensors"))
    await check_tokens(tmp_path)


MISTRALS = {
    "model.embed_tokens": "tok_embeddings", "lm_head": "output", "model.norm": "norm", "model.": "",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
}  # fmt: skip


@pytest.mark.parametrize("variant", ["mistral-window", "ministral3", "llama-odd-heads-biased"])
async def test_a_consolidated_file(tmp_path: Path, variant: str) -> None:
    """Mistral's own form: other names, and neighbours of a head are rotated together."""
    model = tiny.build_model(variant)
    model.save_pretrained(tmp_path)
    heads = {"q": model.config.num_attention_heads, "k": model.config.num_key_value_heads}
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if (kind := name[-len("q_proj.weight") :][:1]) in heads and name.endswith("_proj.weight"):
            tensor = tensor.unflatten(0, (heads[kind], 2, -1)).transpose(1, 2).flatten(0, 2)
        elif "self_attn" in name and name.endswith((".q_proj.bias", ".k_proj.bias")):
            tensor = tensor.unflatten(0, (heads[name.split(".")[-2][0]], 2, -1)).transpose(1, 2).flatten()
        for theirs, own in MISTRALS.items():
            name = name.replace(theirs, own)
        tensors[name] = tensor.contiguous()
    save_file(tensors, tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors").unlink()
    async with engine_of(tmp_path) as engine:
        output = await engine.generate(PROMPT, SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True))
        assert engine.model_info.num_parameters == model.num_parameters()
    assert list(output.token_ids) == tiny.generate(model, PROMPT, COUNT)
    del tensors["layers.1.attention.wo.weight"]
    save_file(tensors, tmp_path / "consolidated.safetensors")
    with pytest.raises(MissingWeightError, match=r"layers\.1\.self_attn\.o_proj\.weight is not in"):
        async with engine_of(tmp_path):
            pass
