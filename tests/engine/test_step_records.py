"""Results of a step beside tokens: vectors and log probabilities, from the step loop on the CPU."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncengine import SamplingParams, _core
from asyncengine.config import EngineConfig
from asyncengine.engine.slot_entries import request_extras
from asyncengine.runner.backend import Backend, load_backend
from tests.models import tiny

PROMPTS = [list(range(3, 40)), [7], list(range(50, 66))]
COUNT = 6


def submit(backend: Backend, key: int, prompt: list[int], max_tokens: int, extras: _core.RequestExtras) -> None:
    accepted = backend.step_loop.submit(_core.RequestSpec(id=key, prompt=prompt, max_tokens=max_tokens, extras=extras))
    assert accepted == _core.SubmitResult.accepted


def drive(backend: Backend, count: int) -> dict[int, list[_core.SequenceNews]]:
    """News by request, until ``count`` requests have ended."""
    news: dict[int, list[_core.SequenceNews]] = {}
    ended, deadline = 0, time.monotonic() + 60
    while ended < count:
        assert time.monotonic() < deadline
        backend.step_loop.advance()
        fresh, alive = backend.step_loop.drain()
        assert alive, backend.step_loop.error
        for one in fresh:
            news.setdefault(one.request, []).append(one)
            ended += one.finish != _core.FinishReason.none
    return news


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_beside_tokens(tmp_path: Path, dtype: str, chunk: int | None) -> None:
    model = tiny.build_model("llama")
    model.save_pretrained(tmp_path)
    settings = {"dtype": dtype, "num_kv_blocks": 32, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    config = EngineConfig.from_kwargs(
        str(tmp_path), {**settings, "skip_tokenizer_init": True, "prefill_chunk_size": chunk}
    )
    backend = load_backend(config, progress=False)
    width = model.config.hidden_size
    vector = _core.RequestExtras(needs=_core.Need.vector, result_words=1 + width)
    submit(backend, 1, PROMPTS[1], COUNT, _core.RequestExtras())
    for key, prompt in enumerate(PROMPTS, 2):
        submit(backend, key, prompt, 1, vector)
    submit(backend, 5, PROMPTS[1], 1, _core.RequestExtras(needs=_core.Need.vector, result_words=width))
    try:
        news = drive(backend, 5)
    finally:
        assert backend.stop(10.0)
    tokens = [token for one in news[1] for token in one.tokens]
    assert len(tokens) == COUNT
    if dtype == "float32":
        assert tokens == tiny.generate(model, PROMPTS[1], COUNT)
    for key, prompt in enumerate(PROMPTS, 2):
        (one,) = news[key]
        assert (one.tokens, one.finish) == ([], _core.FinishReason.stop)
        (record,) = one.records
        assert (record.kind, record.token) == (_core.RecordKind.vector, -1)
        with torch.no_grad():
            expected = model.model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
        error = np.linalg.norm(np.frombuffer(record.payload, np.float32) - expected)
        assert error < (1e-5 if dtype == "float32" else 0.15) * np.linalg.norm(expected)
    assert [one.finish for one in news[5]] == [_core.FinishReason.failed]  # its record had no room


def test_log_probabilities_come_beside_their_tokens(tmp_path: Path) -> None:
    """A delivery has the log probabilities of several tokens, in order; those of the prompt are records that no token
    has."""
    tiny.build_model("llama").save_pretrained(tmp_path)
    settings = {"dtype": "float32", "num_kv_blocks": 32, "max_num_seqs": 4, "skip_tokenizer_init": True}
    backend = load_backend(EngineConfig.from_kwargs(str(tmp_path), settings), progress=False)
    params = SamplingParams(max_tokens=COUNT, temperature=0.0, logprobs=2, prompt_logprobs=1)
    extras = request_extras(params, len(PROMPTS[0]), [], backend.model_info)
    try:
        submit(backend, 1, PROMPTS[0], COUNT, extras)
        submit(backend, 2, PROMPTS[1], COUNT, _core.RequestExtras())
        deadline = time.monotonic() + 60
        backend.step_loop.advance()
        while not backend.step_loop.quiescent:
            assert time.monotonic() < deadline
            backend.step_loop.advance()
        (one, other), _ = backend.step_loop.drain()
    finally:
        assert backend.stop(10.0)
    assert (len(one.tokens), len(other.tokens)) == (COUNT, COUNT)
    assert (other.logprobs, other.records) == ((), ())
    assert [struct.unpack_from("<ii", payload)[1] for payload in one.logprobs] == one.tokens
    assert {len(payload) for payload in one.logprobs} == {4 * (1 + 2 * 3)}
    assert [(r.kind, r.token) for r in one.records] == [(_core.RecordKind.logprobs, -1)] * (len(PROMPTS[0]) - 1)
    assert [struct.unpack_from("<ii", r.payload)[1] for r in one.records] == PROMPTS[0][1:]
