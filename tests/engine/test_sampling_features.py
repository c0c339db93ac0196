"""Penalties, biases, bans and log probabilities beside transformers' logits processors and log-softmax."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from asyncengine import AsyncEngine, InvalidRequestError, RequestOutput, SamplingParams, bundled_model
from tests.models import tiny

PROMPTS = [list(range(3, 40)), [7, 8, 9, 7, 8], list(range(3, 40)), [11] * 20]
TOKENS = 24
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_kv_blocks": 40, "max_num_seqs": 6, "max_num_batched_tokens": 64,
    "skip_tokenizer_init": True,
}  # fmt: skip
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.6},
    "bias": {"logit_bias": {5: 3.0, 17: -100.0, 20: 1.5}},
    "allowed": {"allowed_token_ids": [4, 9, 31, 32, 33, 60]},
    "ngram": {"no_repeat_ngram_size": 2},
    "all": {
        "presence_penalty": -0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3,
        "logit_bias": {5: 2.0, 6: 2.0}, "allowed_token_ids": list(range(2, 90)), "logprobs": 5,
    },
}  # fmt: skip


def edited(ids: list[int], prompt_len: int, logits: torch.Tensor, feature: dict[str, Any]) -> torch.Tensor:
    """Logits [V] in float32 after the edits of one request, whose tokens so far are ``ids``."""
    processors = LogitsProcessorList()
    if "repetition_penalty" in feature:
        processors.append(RepetitionPenaltyLogitsProcessor(feature["repetition_penalty"]))
    scores = processors(torch.tensor([ids]), logits[None].clone())[0]
    counts = torch.bincount(torch.tensor(ids[prompt_len:], dtype=torch.int64), minlength=len(scores))
    scores -= feature.get("frequency_penalty", 0.0) * counts
    scores -= feature.get("presence_penalty", 0.0) * (counts > 0)
    for token, bias in feature.get("logit_bias", {}).items():
        scores[token] += bias
    if "no_repeat_ngram_size" in feature:
        ngrams = NoRepeatNGramLogitsProcessor(feature["no_repeat_ngram_size"])
        scores = ngrams(torch.tensor([ids]), scores[None])[0]
    if "allowed_token_ids" in feature:
        banned = torch.ones(len(scores), dtype=torch.bool)
        banned[feature["allowed_token_ids"]] = False
        scores[banned] = -math.inf
    return scores


def reference(model: transformers.PreTrainedModel, prompt: list[int], feature: dict[str, Any]) -> list[int]:
    """Greedy tokens."""
    ids = list(prompt)
    while len(ids) < len(prompt) + TOKENS:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].float()
        ids.append(int(edited(ids, len(prompt), logits, feature).argmax()))
    return ids[len(prompt) :]


def params(**feature: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True} | feature))


CASES = [(prompt, feature) for prompt in PROMPTS for feature in FEATURES.values()]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A model's directory, and the tokens of CASES, which no setting of an engine changes."""
    model, directory = tiny.build_model("llama"), tmp_path_factory.mktemp("llama")
    model.save_pretrained(directory)
    return directory, [reference(model, prompt, feature) for prompt, feature in CASES]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("chunk", "blocks"), [(1, 40), (7, 40), (64, 40), (64, 9)])
async def test_edits_are_those_of_transformers(
    llama: tuple[Path, list[list[int]]], chunk: int, blocks: int, depth: int
) -> None:
    """With 9 blocks sequences are preempted; later prompts find prefixes of earlier ones."""
    directory, expected = llama
    settings = SETTINGS | {"prefill_chunk_size": chunk, "num_kv_blocks": blocks, "steps_in_flight": depth}
    async with AsyncEngine.from_pretrained(directory, progress=False, **settings) as engine:
        outputs = await asyncio.gather(*(engine.generate(prompt, params(**f)) for prompt, f in CASES))
        assert (engine.stats().num_preemptions > 0) == (blocks == 9)
    for (prompt, feature), output, tokens in zip(CASES, outputs, expected, strict=True):
        assert list(output.token_ids) == tokens, (prompt[:3], feature)


async def test_every_sequence_has_its_own_history_and_neighbours_change_nothing(tmp_path: Path) -> None:
    tiny.build_model("qwen3").save_pretrained(tmp_path)
    sampled = {"temperature": 1.0, "seed": 3, "n": 3}
    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **SETTINGS) as engine:

        async def tokens(**feature: Any) -> list[tuple[int, ...]]:
            output = await engine.generate(PROMPTS[0], params(**feature))
            return [sequence.token_ids for sequence in output.outputs]

        alone = await tokens(**sampled)
        penalized = await tokens(**sampled, frequency_penalty=1.0)
        together = await asyncio.gather(tokens(**sampled), tokens(**sampled, frequency_penalty=1.0), tokens(logprobs=2))
        assert together[:2] == [alone, penalized]
        assert alone != penalized
        assert len(set(penalized)) == 3


def assert_logprobs(model: Any, output: RequestOutput, prompt: list[int], feature: dict[str, Any], heat: float) -> None:
    ids = list(prompt)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    assert [place.token_id for place in logprobs] == list(output.token_ids)
    for place in logprobs:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].float()
        if feature.get("logprobs_mode") == "processed_logprobs":
            logits = edited(ids, len(prompt), logits, feature) / heat
        wanted = logits.double().log_softmax(0)
        assert place.logprob == pytest.approx(float(wanted[place.token_id]), abs=1e-4)
        assert place.rank == 1 + int((logits > logits[place.token_id]).sum())
        assert [v.logprob for v in place.top] == pytest.approx(wanted.topk(len(place.top)).values.tolist(), abs=1e-4)
        named = feature.get("logprob_token_ids", [])
        assert [v.token_id for v in place.named] == named
        assert [v.logprob for v in place.named] == pytest.approx(wanted[named].tolist(), abs=1e-4)
        ids.append(place.token_id)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("depth", [1, 2])
async def test_log_probabilities_are_those_of_log_softmax(tmp_path: Path, mode: str, depth: int) -> None:
    model = tiny.build_model("llama")
    model.save_pretrained(tmp_path)
    feature = {"logprobs": 7, "logprob_token_ids": [3, 50], "logprobs_mode": mode, "presence_penalty": 0.9}
    settings = SETTINGS | {"steps_in_flight": depth, "num_kv_blocks": 9, "prefill_chunk_size": 7}
    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **settings) as engine:
        given = params(temperature=0.7, seed=5, **feature)
        outputs = await asyncio.gather(*(engine.generate(prompt, given) for prompt in PROMPTS))
        assert engine.stats().num_preemptions > 0
        streamed = [delta async for delta in engine.stream(PROMPTS[1], given)]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_logprobs(model, output, prompt, feature, 0.7)
    assert all(len(delta.logprobs or []) == len(delta.token_ids) for delta in streamed)
    assert [p for delta in streamed for p in delta.logprobs or []] == list(outputs[1].outputs[0].logprobs or ())


async def test_an_end_comes_no_sooner_than_min_tokens(tmp_path: Path) -> None:
    model = tiny.build_model("llama")
    model.save_pretrained(tmp_path)
    tokens = reference(model, PROMPTS[1], {})
    stop = tokens[2]
    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **SETTINGS) as engine:
        early = await engine.generate(PROMPTS[1], params(stop_token_ids=[stop]))
        late = await engine.generate(PROMPTS[1], params(stop_token_ids=[stop], min_tokens=10))
    assert early.token_ids[-1] == stop
    assert len(early.token_ids) <= 3
    ids = list(PROMPTS[1])
    banned = MinNewTokensLengthLogitsProcessor(len(ids), 10, [stop])
    while len(ids) < len(PROMPTS[1]) + len(late.token_ids):
        with torch.no_grad():
            scores = banned(torch.tensor([ids]), model(torch.tensor([ids])).logits[:, -1].float())
        ids.append(int(scores[0].argmax()))
    assert list(late.token_ids) == ids[len(PROMPTS[1]) :]
    assert len(late.token_ids) >= 10


async def test_words_that_are_banned_and_strings_that_stop_too_soon() -> None:
    async with AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine:
        prompt = "Once upon a time"
        text = (await engine.generate(prompt, params(max_tokens=40))).text
        word = max(text.replace(".", " ").replace(",", " ").split(), key=len)
        without = (await engine.generate(prompt, params(max_tokens=40, bad_words=[word]))).text
        assert word in text
        assert word not in without
        stop = text[4:8]
        assert len((await engine.generate(prompt, params(max_tokens=40, stop=stop))).token_ids) < 12
        kept = await engine.generate(prompt, params(max_tokens=40, stop=stop, min_tokens=12))
        assert len(kept.token_ids) >= 12
        assert stop in kept.text


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {3: 101}}, "logit_bias"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"logit_bias": [3]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"logprobs": 129}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprob_token_ids": [1] * 33}, "logprob_token_ids"),
        ({"logprobs_mode": "raw"}, "logprobs_mode"),
    ],
)
def test_wrong_values_are_refused_at_once(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**wrong)
    assert refused.value.param == param


async def test_tokens_outside_the_vocabulary_are_all_named(tmp_path: Path) -> None:
    model = tiny.build_model("llama")
    model.save_pretrained(tmp_path)
    vocab = model.config.vocab_size
    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **SETTINGS) as engine:
        for field, value in (
            ("logit_bias", {1: 1.0, vocab: 1.0, vocab + 7: -1.0}),
            ("allowed_token_ids", [1, vocab, vocab + 7]),
            ("logprob_token_ids", [vocab, vocab + 7]),
        ):
            with pytest.raises(InvalidRequestError, match=f"{vocab}, {vocab + 7} are outside") as refused:
                await engine.generate(PROMPTS[0], params(**{field: value}))
            assert refused.value.param == field
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            await engine.generate(PROMPTS[0], params(bad_words=["a"]))
        assert engine.debug_stats().held == {}


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"choice": ["red"]}, "bad_words": ["red"]}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a{5}"}, "bad_words": ["a", "aa"]}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(ab){50}"}, "no_repeat_ngram_size": 2}, "structured_outputs"),
    ({"allowed_token_ids": [70], "bad_words": ["a"]}, "allowed_token_ids"),
    ({"allowed_token_ids": [1], "min_tokens": 3}, "allowed_token_ids"),
    ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 3}, "allowed_token_ids"),
    ({"allowed_token_ids": [5], "no_repeat_ngram_size": 1}, "allowed_token_ids"),
]


async def test_requests_that_contradict_themselves_are_wrong_requests() -> None:
    async with AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine:
        for fields, param in CONTRADICTIONS:
            assert engine.tokenizer.decode([70]) == "a"
            with pytest.raises(InvalidRequestError, match="bans every token") as refused:
                await engine.generate("x", SamplingParams(max_tokens=20, temperature=0.0, **fields))
            assert refused.value.param == param
            with pytest.raises(InvalidRequestError):
                async for _ in engine.stream("x", SamplingParams(max_tokens=20, temperature=0.0, **fields)):
                    pass
        others: list[dict[str, Any]] = [
            {"allowed_token_ids": [5, 6], "logit_bias": {5: -100.0, 6: -100.0}},
            {"allowed_token_ids": [1, 5], "min_tokens": 3},
            {"structured_outputs": {"choice": ["red", "blue"]}, "bad_words": ["red"]},
        ]
        for served in others:
            assert (await engine.generate("x", SamplingParams(max_tokens=20, temperature=0.0, **served))).token_ids
        assert (await engine.generate("x", params())).token_ids
