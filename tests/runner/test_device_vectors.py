"""Embeddings and classes of whole engines on the CUDA path, beside transformers.

Without a GPU the kernels are interpreted, which takes a second a step: models of one layer, and few steps.
tests/gpu/test_embeddings.py has more.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from asyncengine import InvalidRequestError, SamplingParams
from asyncengine.text.tokenizer import placeholder_tokenizer
from tests.engine.test_embeddings import assert_close, build_classifier
from tests.kernels.simulated_cuda import make_engine
from tests.models import tiny

SMALL: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_blocks": 24, "max_model_len": 64, "dtype": "float32",
    "step_timeout_s": 600.0,
}  # fmt: skip
PROMPTS = [[5, 9, 2, 7, 7, 1, 30, 2, 17, 40, 41, 42, 3, 3, 8, 11, 12, 19, 6], [5], [100, 3, 77]]


def save(model: transformers.PreTrainedModel, path: Path) -> str:
    model.save_pretrained(path)
    placeholder_tokenizer(tiny.VOCAB_SIZE).backend.save(str(path / "tokenizer.json"))
    return str(path)


def states(model: transformers.PreTrainedModel, prompt: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        found: np.ndarray[Any, Any] = model.base_model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("variant", "chunk"), [("gpt2", 8), ("qwen3", None)])
def test_means_and_last_states_beside_tokens(tmp_path: Path, variant: str, chunk: int | None) -> None:
    model = tiny.build_model(variant, **{"n_layer" if variant == "gpt2" else "num_hidden_layers": 1})
    path = save(model, tmp_path)
    tokens = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=1)

    async def main() -> None:
        async with make_engine(path, **SMALL | {"prefill_chunk_size": chunk}) as engine:
            generated = asyncio.ensure_future(engine.generate(PROMPTS[2], tokens))
            means, last = await asyncio.gather(
                engine.embed(PROMPTS, pooling="mean", normalize=False),
                engine.embed(PROMPTS[:1], pooling="last", normalize=False),
            )
            assert means.usage.cached_tokens == 0
            assert_close(means.vectors, np.stack([states(model, prompt).mean(0) for prompt in PROMPTS]))
            assert_close(last.vectors, states(model, PROMPTS[0])[-1:])
            assert list((await generated).token_ids) == tiny.generate(model, PROMPTS[2], 5)

    asyncio.run(main())


def test_a_preempted_prompt_is_summed_up_anew(tmp_path: Path) -> None:
    model = tiny.build_model("llama", num_hidden_layers=1)
    path = save(model, tmp_path)
    prompt = [*PROMPTS[0], *range(50, 63)]

    async def main() -> None:
        settings = {"num_kv_blocks": 3, "max_model_len": 48, "prefill_chunk_size": 5, "enable_prefix_caching": False}
        async with make_engine(path, **SMALL | settings) as engine:
            embedded = asyncio.ensure_future(engine.embed([prompt], pooling="mean", normalize=False, priority=1))
            while not engine.stats().num_steps:  # noqa: ASYNC110  # nothing to wait for
                await asyncio.sleep(0.001)
            params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
            output = await engine.generate([7] * 15, params)
            assert engine.stats().num_preemptions > 0
            assert list(output.token_ids) == tiny.generate(model, [7] * 15, 4)
            assert_close((await embedded).vectors, states(model, prompt).mean(0, keepdims=True))

    asyncio.run(main())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("variant", "labels", "chunk"), [("gpt2", 3, 8), ("qwen2", 1, None), ("mistral-window", 17, None)]
)
def test_classes_are_those_of_transformers(tmp_path: Path, variant: str, labels: int, chunk: int | None) -> None:
    layers = "n_layer" if variant == "gpt2" else "num_hidden_layers"
    model = build_classifier(variant, **{"num_labels": labels, layers: 1})
    path = save(model, tmp_path)
    with torch.no_grad():
        wanted = torch.cat([model(torch.tensor([prompt])).logits for prompt in PROMPTS])

    async def main() -> None:
        async with make_engine(path, **SMALL | {"prefill_chunk_size": chunk}) as engine:
            assert len(engine.model_info.labels) == labels
            output = await engine.classify(PROMPTS)
            assert_close(output.logits, wanted.numpy())
            again = await engine.classify(PROMPTS[:1])
            assert again.usage.cached_tokens > 0
            assert_close(again.logits, wanted[:1].numpy())
            with pytest.raises(InvalidRequestError, match="ForSequenceClassification"):
                await engine.generate([1, 2])

    asyncio.run(main())
