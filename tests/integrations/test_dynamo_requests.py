"""Dynamo's requests in, and its answers out: by plain functions that need no Dynamo."""

from __future__ import annotations

from typing import Any

import pytest

from asyncengine import SamplingParams, testing
from asyncengine.errors import InvalidRequestError
from asyncengine.integrations.dynamo_requests import cache_salt_of, chunk_of, sampling_params, token_ids_of


def test_a_request_becomes_parameters() -> None:
    request: dict[str, Any] = {
        "token_ids": [1, 2, 3],
        "model": "stories",
        "sampling_options": {
            "n": 2, "best_of": 1, "temperature": 0.5, "top_k": -1, "top_p": None, "use_beam_search": False, "seed": 7,
            "guided_decoding": {"json": None, "regex": "a+", "backend": "xgrammar"}, "logit_bias": {"5": -1.0},
        },
        "stop_conditions": {
            "max_tokens": 9, "stop": ["left to Dynamo"], "stop_token_ids_hidden": [4, 5], "stop_token_ids": [5],
            "min_tokens": None, "ignore_eos": False,
        },
        "output_options": {"logprobs": 2, "prompt_logprobs": None},
        "extra_args": {"nvext": {"cache_salt": "tenant"}},
    }  # fmt: skip
    expected = SamplingParams(
        n=2, temperature=0.5, seed=7, structured_outputs={"regex": "a+"}, logit_bias={5: -1.0}, max_tokens=9,
        stop_token_ids=[5, 4], logprobs=2, detokenize=False,
    )  # fmt: skip
    assert sampling_params(request) == expected
    assert cache_salt_of(request) == "tenant"
    assert token_ids_of(request) == [1, 2, 3]
    bare = {"token_ids": bytes([1, 0, 0, 0, 0, 1, 0, 0])}
    assert token_ids_of(bare) == [1, 256]
    assert sampling_params(bare) == SamplingParams(max_tokens=None, detokenize=False)
    assert cache_salt_of(bare) is None


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        ({"prefill_result": {"disaggregated_params": {}}}, "prefill_result"),
        ({"multi_modal_data": {"image": []}}, "multi_modal_data"),
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
        ({"sampling_options": {"best_of": 3}}, "best_of"),
        ({"sampling_options": {"guided_decoding": {"structural_tag": {}}}}, "structural_tag"),
        ({"stop_conditions": {"max_thinking_tokens": 5}}, "max_thinking_tokens"),
        ({"output_options": {"prompt_logprobs": 0}}, "prompt_logprobs"),
        ({"sampling_options": {"temperature": "hot"}}, "temperature"),
        ({"stop_conditions": {"max_tokens": -4}}, "max_tokens"),
        ({"sampling_options": {"logit_bias": {"x": 1}}}, "logit_bias"),
        ({"sampling_options": []}, "sampling_options"),
        ({"stop_conditions": {"stop_token_ids": 7}}, "stop_token_ids"),
        ({"token_ids": b"123"}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
    ],
)
def test_wrong_requests_are_refused_by_name(request_: dict[str, Any], named: str) -> None:
    request = {"token_ids": [1], **request_}
    with pytest.raises(InvalidRequestError, match=named):
        assert (sampling_params(request), token_ids_of(request)) is None


async def test_deltas_become_chunks() -> None:
    async with testing.SimulatedEngine(max_model_len=256) as engine:
        params = SamplingParams(n=2, max_tokens=3, temperature=0, ignore_eos=True)
        stream = await engine.submit([5, 6, 7], params)
        chunks = [chunk_of(delta, stream.cached_tokens, None) async for delta in stream]
    outputs: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        outputs[chunk["index"]] += chunk["token_ids"]
    assert [len(output) for output in outputs.values()] == [3, 3]
    assert [chunk["finish_reason"] for chunk in chunks if "finish_reason" in chunk] == ["length", "length"]
    assert [chunk["completion_usage"] for chunk in chunks if "completion_usage" in chunk] == [
        {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}
    ]
