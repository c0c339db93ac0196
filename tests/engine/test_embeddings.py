"""Embeddings and classification beside transformers' hidden states and heads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from asyncengine import AsyncEngine, InvalidRequestError, SamplingParams, bundled_model
from tests.models import tiny

PROMPTS = [list(range(3, 70)), [7], list(range(50, 66)), list(range(3, 40)), list(range(3, 70))]
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_kv_blocks": 40, "max_num_seqs": 3, "max_num_batched_tokens": 64,
    "skip_tokenizer_init": True,
}  # fmt: skip
POOLINGS = ["last", "cls", "mean"]


def expected(model: transformers.PreTrainedModel, pooling: str) -> np.ndarray[Any, Any]:
    rows = []
    for prompt in PROMPTS:
        with torch.no_grad():
            states = model.base_model(torch.tensor([prompt])).last_hidden_state[0].double()
        rows.append({"last": states[-1], "cls": states[0], "mean": states.mean(0)}[pooling].numpy())
    return np.stack(rows)


def assert_close(vectors: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors - wanted) < 2e-5 * np.linalg.norm(wanted)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("variant", ["gpt2", "llama", "mistral-window", "qwen2", "qwen3"])
async def test_embeddings_are_those_of_transformers(tmp_path: Path, variant: str, chunk: int, depth: int) -> None:
    await embeddings_are_those_of_transformers(tmp_path, {}, variant, chunk, depth)


async def embeddings_are_those_of_transformers(
    path: Path, device: dict[str, Any], variant: str, chunk: int, depth: int
) -> None:
    model = tiny.build_model(variant)
    model.save_pretrained(path)
    settings = SETTINGS | device | {"prefill_chunk_size": chunk, "steps_in_flight": depth}
    async with AsyncEngine.from_pretrained(path, progress=False, **settings) as engine:
        generated = asyncio.ensure_future(engine.generate([7, 8, 9], SamplingParams(max_tokens=20, temperature=0.0)))
        for pooling in POOLINGS:
            for hits in (False, True):
                output = await engine.embed(PROMPTS, pooling=pooling, normalize=False)
                assert_close(output.vectors, expected(model, pooling))
                assert output.usage.prompt_tokens == sum(map(len, PROMPTS))
                if pooling == "mean" or hits:
                    assert (output.usage.cached_tokens > 0) == (pooling == "last")
        assert list((await generated).outputs[0].token_ids) == tiny.generate(model, [7, 8, 9], 20)


async def test_a_preempted_prompt_is_summed_up_anew(tmp_path: Path) -> None:
    await preempted_prompts_are_summed_up_anew(tmp_path, {})


async def preempted_prompts_are_summed_up_anew(path: Path, device: dict[str, Any]) -> None:
    model = tiny.build_model("llama")
    model.save_pretrained(path)
    settings = SETTINGS | device | {"num_kv_blocks": 8, "prefill_chunk_size": 1}
    async with AsyncEngine.from_pretrained(path, progress=False, **settings) as engine:
        params = SamplingParams(max_tokens=110, temperature=0.0)
        generated = asyncio.ensure_future(engine.generate([7, 8, 9], params))
        output = await engine.embed(PROMPTS, pooling="mean", normalize=False)
        assert engine.stats().num_preemptions > 0
        assert_close(output.vectors, expected(model, "mean"))
        assert list((await generated).outputs[0].token_ids) == tiny.generate(model, [7, 8, 9], 110)


async def test_cancelling_gives_everything_back(tmp_path: Path) -> None:
    tiny.build_model("llama").save_pretrained(tmp_path)
    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **SETTINGS) as engine:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.embed([PROMPTS[0]] * 200), 0.001)
        while engine.stats().num_free_blocks < SETTINGS["num_kv_blocks"]:  # noqa: ASYNC110  # nothing to wait for
            await asyncio.sleep(0.001)
        assert (await engine.embed([[1]])).vectors.shape == (1, 48)


async def test_texts_and_pairs_of_the_bundled_model() -> None:
    queries, documents = ["Once upon a time", "the cat"], ["there was a dog", "the cat"]
    async with AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine:
        one = await engine.embed(queries[0], pooling="mean")
        assert one.vectors.shape == (1, engine.model_info.vector_size)
        sides = [(await engine.embed(texts)).vectors.astype(np.float64) for texts in (queries, documents)]
        scores = (await engine.score_pairs(queries, documents)).scores
        np.testing.assert_allclose(scores, (sides[0] * sides[1]).sum(1), atol=1e-5)
        assert scores[1] == pytest.approx(1.0, abs=1e-5)
        for wrong in (("a", ["b"]), (["a"], ["b", "c"]), ([], []), (["a"], 3), ([1], ["b"])):
            with pytest.raises(InvalidRequestError):
                await engine.score_pairs(*wrong)  # type: ignore[arg-type]


async def test_pairs_by_the_one_label(tmp_path: Path) -> None:
    model = build_classifier("llama", num_labels=1)
    model.config.vocab_size = 4096
    model.resize_token_embeddings(4096)
    model.save_pretrained(tmp_path)
    settings = SETTINGS | {"skip_tokenizer_init": False, "tokenizer": str(bundled_model())}
    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **settings) as engine:
        scores = (await engine.score_pairs(["the cat", "a"], ["sat", "dog"])).scores
        with torch.no_grad():
            ids = [engine.tokenizer.encode(text) for text in ("the cat\nsat", "a\ndog")]
            wanted = torch.cat([model(torch.tensor([i])).logits for i in ids]).sigmoid()[:, 0]
        assert_close(scores, wanted.numpy())


async def test_vectors_are_cut_and_then_scaled(tmp_path: Path) -> None:
    model = tiny.build_model("llama")
    model.save_pretrained(tmp_path)
    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **SETTINGS) as engine:
        output = await engine.embed(PROMPTS, dimensions=5)
        wanted = expected(model, "last")[:, :5]
        assert_close(output.vectors, wanted / np.linalg.norm(wanted, axis=1, keepdims=True))
        first = await engine.embed([PROMPTS[0], PROMPTS[0]])
        assert first.vectors.shape == (2, model.config.hidden_size)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"pooling": "max"}, "pooling"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 49}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"prompts": []}, "prompts"),
        ({"prompts": [[1]] * 2049}, "prompts"),
        ({"prompts": 3}, "prompts"),
        ({"prompts": [[]]}, "prompt"),
        ({"prompts": [[1] * 129]}, "prompt"),
        ({"prompts": [[199]]}, "prompt"),
        ({"prompts": ["text"]}, "prompt"),
        ({"priority": 1001}, "priority"),
        ({"tenant": 7}, "tenant"),
    ],
)
async def test_wrong_arguments_are_refused(tmp_path: Path, arguments: dict[str, Any], param: str) -> None:
    tiny.build_model("llama").save_pretrained(tmp_path)
    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **SETTINGS) as engine:
        with pytest.raises(InvalidRequestError) as error:
            await engine.embed(**{"prompts": [[1, 2]], **arguments})
        assert error.value.param == param
        with pytest.raises(InvalidRequestError, match="LlamaForCausalLM is no classification model"):
            await engine.classify([[1]])
        assert engine.stats().num_steps == 0


def build_classifier(variant: str, **settings: Any) -> transformers.PreTrainedModel:
    family, shape = tiny.VARIANTS[variant]
    family = "Gemma3Text" if family == "Gemma3" else family
    kind = getattr(transformers, f"{family}ForSequenceClassification")
    config = kind.config_class(**(shape | settings), eos_token_id=None, bos_token_id=None)
    config.pad_token_id = 0
    torch.manual_seed(1)
    return kind(config).eval()


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("variant", ["gpt2", "llama", "mistral-window", "qwen2", "qwen3"])
async def test_classes_are_those_of_transformers(tmp_path: Path, variant: str, chunk: int) -> None:
    await classes_are_those_of_transformers(tmp_path, {}, variant, chunk)


async def classes_are_those_of_transformers(path: Path, device: dict[str, Any], variant: str, chunk: int) -> None:
    labels = {0: "good", 1: "bad", 2: "neither"}
    model = build_classifier(variant, id2label=labels)
    model.save_pretrained(path)
    with torch.no_grad():
        wanted = torch.cat([model(torch.tensor([prompt])).logits for prompt in PROMPTS])
    settings = SETTINGS | device | {"prefill_chunk_size": chunk}
    async with AsyncEngine.from_pretrained(path, progress=False, **settings) as engine:
        output = await engine.classify(PROMPTS)
        assert output.labels == tuple(labels.values())
        assert_close(output.logits, wanted.numpy())
        assert_close(output.probabilities, wanted.softmax(1).numpy())
        for refused in (engine.generate([1, 2]), engine.embed([[1, 2]]), engine.score_pairs(["a"], ["b"])):
            with pytest.raises(InvalidRequestError, match="ForSequenceClassification"):
                await refused


async def test_labels_that_do_not_exclude_each_other(tmp_path: Path) -> None:
    model = build_classifier("llama", num_labels=4, problem_type="multi_label_classification")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        wanted = torch.cat([model(torch.tensor([prompt])).logits for prompt in PROMPTS])
    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **SETTINGS) as engine:
        output = await engine.classify(PROMPTS)
        assert output.labels == ("LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3")
        assert_close(output.probabilities, wanted.sigmoid().numpy())
