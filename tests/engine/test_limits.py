"""Every stated limit of what a request may ask for: at the limit it is served, past it refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from asyncengine import AsyncEngine, InvalidRequestError, SamplingParams, bundled_model
from asyncengine.api.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_NAMED_TOKENS,
    MAX_NGRAM,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)
from asyncengine.api.structured_outputs import MAX_CHOICES
from asyncengine.engine.vectors import MAX_PROMPTS
from asyncengine.text.prompts import MAX_PRIORITY
from tests.models import tiny

PROMPT = list(range(300, 320))
CONTEXT = 128


@asynccontextmanager
async def bundled(**config: Any) -> AsyncIterator[AsyncEngine]:
    settings = {"max_model_len": CONTEXT, "num_kv_blocks": 256, "max_logprobs": MAX_LOGPROBS}
    async with AsyncEngine.from_pretrained(bundled_model(), progress=False, **settings | config) as engine:
        yield engine


def save_model_of_words(directory: Path, count: int) -> list[str]:
    """A model whose tokens are words, each with a space before it and without: each form of a word is one token."""
    words = [f"w{i}" for i in range(count)]
    backend = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*words, *(f"▁{w}" for w in words)])}, words[0]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    backend.save(str(directory / "tokenizer.json"))
    tiny.build_model("llama", vocab_size=2 * count).save_pretrained(directory)
    return words


#: field → (value at the limit, value past it), made for a tokenizer where it needs one.
LIMITS: dict[str, Any] = {
    "n": lambda t: (MAX_N, MAX_N + 1),
    "seed": lambda t: (MAX_SEED, MAX_SEED + 1),
    "stop": lambda t: ([f"{i:x}" * MAX_STOP_LENGTH for i in range(MAX_STOP_STRINGS)], ["x"] * (MAX_STOP_STRINGS + 1)),
    "stop ": lambda t: ("x" * MAX_STOP_LENGTH, "x" * (MAX_STOP_LENGTH + 1)),
    "stop_token_ids": lambda t: (range(MAX_STOP_TOKENS), range(MAX_STOP_TOKENS + 1)),
    "logit_bias": lambda t: (dict.fromkeys(range(MAX_BIASES), -100), dict.fromkeys(range(MAX_BIASES + 1), -100)),
    "logit_bias ": lambda t: ({5: 100}, {5: 100.5}),
    "bad_words": lambda t: (["the " * (MAX_STOP_LENGTH // 4)], ["the " * (MAX_STOP_LENGTH // 4) + "x"]),
    "logprob_token_ids": lambda t: (range(MAX_NAMED_TOKENS), range(MAX_NAMED_TOKENS + 1)),
    "kept_special_tokens": lambda t: (range(MAX_NAMED_TOKENS), range(MAX_NAMED_TOKENS + 1)),
    "no_repeat_ngram_size": lambda t: (MAX_NGRAM, MAX_NGRAM + 1),
    "logprobs": lambda t: (MAX_LOGPROBS, MAX_LOGPROBS + 1),
    "prompt_logprobs": lambda t: (MAX_LOGPROBS, MAX_LOGPROBS + 1),
    "temperature": lambda t: (2, 2.001),
    "presence_penalty": lambda t: (2, 2.001),
    "frequency_penalty": lambda t: (-2, -2.001),
    "repetition_penalty": lambda t: (2, 2.001),
    "max_tokens": lambda t: (CONTEXT - len(PROMPT), CONTEXT - len(PROMPT) + 1),
    "min_tokens": lambda t: (2, 3),
    "timeout": lambda t: (1e6, 1e6 + 1),
    "truncate_prompt_tokens": lambda t: (2**31 - 1, 2**31),
    "structured_outputs": lambda t: tuple(
        {"choice": [f"choice {i}" for i in range(count)]} for count in (MAX_CHOICES, MAX_CHOICES + 1)
    ),
}


@pytest.mark.parametrize("field", LIMITS)
async def test_a_request_at_a_limit_is_served_and_past_it_refused(field: str) -> None:
    async with bundled() as engine:
        (at, past), name = LIMITS[field](engine.tokenizer), field.strip()
        output = await engine.generate(PROMPT, SamplingParams(**{"max_tokens": 2, "seed": 1} | {name: at}))
        assert len(output.outputs) == (MAX_N if name == "n" else 1)
        assert all(sequence.token_ids for sequence in output.outputs)
        with pytest.raises(InvalidRequestError) as error:
            await engine.generate(PROMPT, SamplingParams(**{"max_tokens": 2} | {name: past}))
        assert error.value.param == name


async def test_all_limits_of_a_slot_are_reached_together(tmp_path: Path) -> None:
    """Biases, words, stops and named tokens share the room of a step's updates."""
    words = save_model_of_words(tmp_path, 2 * MAX_STOP_TOKENS)
    names = ("stop", "stop_token_ids", "logit_bias", "logprob_token_ids", "logprobs", "prompt_logprobs")
    settings = {"num_kv_blocks": 64, "max_logprobs": MAX_LOGPROBS}
    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **settings) as engine:
        params = {name: LIMITS[name](engine.tokenizer)[0] for name in names}
        prompt = [i % 500 for i in range(CONTEXT - 4)]
        output = await engine.generate(
            prompt, SamplingParams(max_tokens=4, min_tokens=4, bad_words=words[-MAX_BAD_WORDS:], **params)
        )
        assert len(output.token_ids) == 4


async def test_words_and_their_tokens_have_limits_that_are_reached(tmp_path: Path) -> None:
    words = save_model_of_words(tmp_path, MAX_BAD_WORDS + 20)
    async with AsyncEngine.from_pretrained(tmp_path, progress=False, num_kv_blocks=64) as engine:
        found = await engine._life.prompts.words(words[:MAX_BAD_WORDS], "bad_words")
        assert sum(1 + len(ids) for ids in found) == MAX_BAD_WORD_TOKENS
        params = SamplingParams(max_tokens=40, bad_words=words[:MAX_BAD_WORDS], seed=1)
        output = await engine.generate([1, 2, 3], params)
        assert {engine.tokenizer.decode([token]).strip() for token in output.token_ids} <= set(words[MAX_BAD_WORDS:])
        longer = [*words[: MAX_BAD_WORDS - 1], f"{words[-1]} {words[-2]}"]
        for past, message in ((words[: MAX_BAD_WORDS + 1], "256 words"), (longer, f"{MAX_BAD_WORD_TOKENS} tokens")):
            with pytest.raises(InvalidRequestError, match=f"at most {message}") as error:
                await engine.generate([1, 2, 3], SamplingParams(max_tokens=2, bad_words=past))
            assert error.value.param == "bad_words"


async def test_choices_that_begin_with_each_other() -> None:
    """Both the shorter and the longer one may come, also among as many choices as there may be."""
    for count in (0, MAX_CHOICES - 2):
        texts = ["yes", "yes it is", *(f"other {i}" for i in range(count))]
        async with bundled() as engine:
            for bias, wanted in ((-100.0, "yes it is"), (100.0, "yes")):
                params = SamplingParams(
                    max_tokens=40,
                    temperature=0.0,
                    structured_outputs={"choice": texts},
                    logit_bias={engine.model_info.eos_token_ids[0]: bias, engine.tokenizer.encode("y")[0]: 50.0},
                )
                assert (await engine.generate(PROMPT, params)).text == wanted


@pytest.mark.parametrize("priority", [-MAX_PRIORITY, MAX_PRIORITY])
async def test_priorities(priority: int) -> None:
    async with bundled() as engine:
        params = SamplingParams(max_tokens=1)
        assert (await engine.generate(PROMPT, params, priority=priority)).token_ids
        with pytest.raises(InvalidRequestError):
            await engine.generate(PROMPT, params, priority=priority + (1 if priority > 0 else -1))


@pytest.mark.parametrize("blocks", [CONTEXT // 16, 256])
async def test_a_prompt_fills_the_context_where_nothing_is_generated(blocks: int) -> None:
    """The prompt also fills a cache that holds one such prompt and nothing else."""
    whole = [300 + i % 700 for i in range(CONTEXT)]
    scores = SamplingParams(max_tokens=0, prompt_logprobs=1)
    async with bundled(num_kv_blocks=blocks, block_size=16, max_num_seqs=4) as engine:
        for _ in range(2):  # the second one finds a prefix
            output = await engine.generate(whole, scores)
            assert output.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == CONTEXT
            assert (output.token_ids, output.text, output.finish_reason) == ((), "", "length")
        # The log probabilities of the whole prompt equal those of the same tokens in a shorter prompt.
        shorter = await engine.generate(whole[:-1], scores)
        assert shorter.prompt_logprobs is not None
        assert output.prompt_logprobs is not None
        for long, short in zip(output.prompt_logprobs[1:-1], shorter.prompt_logprobs[1:], strict=True):
            assert long is not None
            assert short is not None
            assert long.logprob == pytest.approx(short.logprob, abs=1e-4)
        scored = await engine.score(whole[:-3], whole[-3:])
        assert len(scored.logprobs) == 3
        embedded = await engine.embed([whole])
        assert embedded.usage.prompt_tokens == CONTEXT
        assert len((await engine.generate(whole[:-1], SamplingParams(max_tokens=1))).token_ids) == 1
        for call in (
            engine.generate(whole, SamplingParams(max_tokens=1)),
            engine.generate([*whole, 1], scores),
            engine.score(whole, [1]),
            engine.embed([[*whole, 1]]),
        ):
            with pytest.raises(InvalidRequestError, match="maximum context length is 128 tokens"):
                await call


async def test_a_classification_fills_the_context(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**tiny.DECODER | {"num_labels": 3}, eos_token_id=None, bos_token_id=None)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    settings = {"skip_tokenizer_init": True, "num_kv_blocks": 64}
    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **settings) as engine:
        context = engine.model_info.max_model_len
        answer = await engine.classify([[i % 199 for i in range(context)]])
        assert answer.probabilities.shape == (1, 3)
        with pytest.raises(InvalidRequestError, match="maximum context length"):
            await engine.classify([[1] * (context + 1)])


async def test_as_many_prompts_as_a_call_may_have() -> None:
    async with bundled(num_kv_blocks=512) as engine:
        prompts = [[300 + i % 500, 301] for i in range(MAX_PROMPTS)]
        assert len((await engine.embed(prompts)).vectors) == MAX_PROMPTS
        with pytest.raises(InvalidRequestError) as error:
            await engine.embed([*prompts, [1]])
        assert error.value.param == "prompts"
