"""Log probabilities of prompts and continuations against a full forward, whatever the chunks and what else runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
import transformers

from asyncengine import AsyncEngine, InvalidRequestError, RequestOutput, SamplingParams, bundled_model

TEXTS = [
    "Once upon a time there was a little fox who lived in the forest near the old mill and the quiet river.",
    "The sun",
    "Lily saw a big dog. The dog was happy. Lily and the dog played in the park until the sun went down again.",
]


def full_forward(ids: list[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)


def check_prompt(output: RequestOutput, top: int, start: int = 1) -> None:
    ids, found = list(output.prompt_token_ids), output.prompt_logprobs
    assert found is not None
    assert len(found) == len(ids)
    assert found[:start] == [None] * start
    wanted = full_forward(ids)
    for i in range(start, len(ids)):
        data = found[i]
        assert data is not None
        row = wanted[i - 1]
        assert data.token_id == ids[i]
        assert data.logprob == pytest.approx(float(row[ids[i]]), abs=2e-3)
        assert data.rank == pytest.approx(1 + int((row > row[ids[i]]).sum()), abs=2)
        assert [x.logprob for x in data.top] == pytest.approx(row.topk(top).values.tolist(), abs=2e-3)


async def prompts_are_scored(config: dict[str, Any], chunk: int, depth: int, blocks: int) -> None:
    """Prompts are scored beside plain requests; again once the prefix cache knows them; with several sequences."""
    plain = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    asked = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, prompt_logprobs=3, logprobs=1, n=2)
    settings = {"prefill_chunk_size": chunk, "steps_in_flight": depth, "num_kv_blocks": blocks, "max_model_len": 128}
    async with AsyncEngine.from_pretrained(bundled_model(), progress=False, **config | settings) as engine:
        alone = [await engine.generate(text, plain) for text in TEXTS]
        outputs = await asyncio.gather(
            *(engine.generate(text, given) for _ in range(2) for text in TEXTS for given in (asked, plain))
        )
        assert (engine.stats().num_preemptions > 0) == (blocks < 20)
        again = await engine.generate(TEXTS[0], SamplingParams(max_tokens=0, prompt_logprobs=0, logprob_start_len=20))
    for i, output in enumerate(outputs):
        if i % 2:
            assert output.token_ids == alone[i // 2 % 3].token_ids
            assert output.prompt_logprobs is None
        else:
            check_prompt(output, top=3)
            assert output.outputs[0].token_ids == output.outputs[1].token_ids == alone[i // 2 % 3].token_ids[:20]
            for sequence in output.outputs:
                assert sequence.logprobs is not None
                assert [len(data.top) for data in sequence.logprobs] == [1] * 20
    check_prompt(again, top=0, start=20)
    assert again.usage.cached_tokens == 16 or blocks < 20  # then they are gone
    assert (again.token_ids, again.finish_reason) == ((), "length")


async def continuations_are_scored(config: dict[str, Any]) -> None:
    """The sum of a full forward, alone and together; what they share is computed once."""
    async with AsyncEngine.from_pretrained(bundled_model(), progress=False, **config) as engine:
        encode = engine.tokenizer.encode
        ends = [" and the fox was happy.", " but nobody came", " There", "!"]
        scores = await asyncio.gather(*(engine.score(TEXTS[0], end) for end in ends))
        by_ids = await engine.score(encode(TEXTS[0]), encode(ends[0], add_special_tokens=False))
        plain = await engine.generate(TEXTS[0], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
        greedy = await engine.score(list(plain.prompt_token_ids), list(plain.token_ids))
        assert engine.stats().generation_tokens == 5
        assert by_ids.usage.cached_tokens >= 16
    length = len(encode(TEXTS[0]))
    for end, score in zip(ends, scores, strict=True):
        ids = encode(TEXTS[0] + end)
        wanted = full_forward(ids)
        assert [data.token_id for data in score.logprobs] == ids[length:]
        total = sum(float(wanted[i - 1, ids[i]]) for i in range(length, len(ids)))
        assert score.total == pytest.approx(total, abs=1e-2)
        greedy_ids = [int(wanted[i - 1].argmax()) for i in range(length, len(ids))]
        assert score.is_greedy == (greedy_ids == ids[length:])
    assert by_ids.total == pytest.approx(scores[0].total, abs=1e-2)
    assert greedy.is_greedy


@pytest.mark.sampled(5)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("chunk", "blocks"), [(1, 64), (7, 64), (64, 64), (64, 9)])
async def test_prompts_are_scored(chunk: int, depth: int, blocks: int) -> None:
    await prompts_are_scored({}, chunk, depth, blocks)


async def test_continuations_are_scored() -> None:
    await continuations_are_scored({})


async def test_more_tokens_than_a_step_scores() -> None:
    async with AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine:
        ids = [3 + i * 7 % 900 for i in range(400)]
        output = await engine.generate(ids, SamplingParams(max_tokens=0, prompt_logprobs=20))
    check_prompt(output, top=20)


async def test_prompts_are_cut_and_text_is_left_out() -> None:
    async with AsyncEngine.from_pretrained(bundled_model(), progress=False, max_model_len=64) as engine:
        ids = [3 + i % 900 for i in range(100)]
        plain = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
        cut = await engine.generate(ids, SamplingParams(truncate_prompt_tokens=10, **plain))
        assert cut.prompt_token_ids == tuple(ids[-10:])
        assert cut.token_ids == (await engine.generate(ids[-10:], SamplingParams(**plain))).token_ids
        most = await engine.generate(ids, SamplingParams(truncate_prompt_tokens=-1, **plain))
        assert most.prompt_token_ids == tuple(ids[-60:])
        long = await engine.generate("word " * 90, SamplingParams(truncate_prompt_tokens=5, **plain))
        assert long.usage.prompt_tokens == 5
        silent = await engine.generate(ids[:9], SamplingParams(detokenize=False, **plain))
        assert (silent.text, len(silent.token_ids)) == ("", 4)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt_logprobs": 129}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logprob_start_len": -1}, "logprob_start_len"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"detokenize": False, "stop": "x"}, "stop"),
        ({"detokenize": 1}, "detokenize"),
        ({"spaces_between_special_tokens": "no"}, "spaces_between_special_tokens"),
    ],
)
async def test_wrong_values_are_refused(wrong: dict[str, Any], param: str) -> None:
    async with AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine:
        with pytest.raises(InvalidRequestError) as refused:
            await engine.generate("a b c", SamplingParams(**wrong))
        assert refused.value.param == param


async def test_the_limit_of_log_probabilities_is_configurable() -> None:
    async with AsyncEngine.from_pretrained(bundled_model(), progress=False, max_logprobs=50) as engine:
        output = await engine.generate("The sun", SamplingParams(max_tokens=2, logprobs=50, prompt_logprobs=40))
        assert output.outputs[0].logprobs is not None
        assert len(output.outputs[0].logprobs[0].top) == 50
        check_prompt(output, top=40)


@pytest.mark.parametrize(("prompt", "continuation"), [("a", ""), ("", "a"), ("a", [3]), ([3], "a"), ([3], [])])
async def test_scores_of_nothing_are_refused(prompt: Any, continuation: Any) -> None:
    async with AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine:
        with pytest.raises(InvalidRequestError):
            await engine.score(prompt, continuation)


async def test_log_probabilities_of_a_prompt_in_chunks_are_whole_with_the_first_delta() -> None:
    asked = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=2, logprobs=0)
    async with AsyncEngine.from_pretrained(bundled_model(), progress=False, prefill_chunk_size=16) as engine:
        whole = await engine.generate(list(range(300, 500)), asked)
        stream = await engine.submit(list(range(300, 500)), asked)
        first = await anext(stream)
        found = stream.prompt_logprobs
        assert first.token_ids
        assert found is not None
        assert found == whole.prompt_logprobs
        assert [data is None for data in found] == [True] + [False] * 199
        assert (found[-1], found[0:2], found[::-1][-1]) == (found[199], [None, found[1]], None)
        with pytest.raises(IndexError):
            found[200]
        await stream.aclose()
