"""Truncated prompts of any length: the same tokens as of the whole text, for a limited amount of work."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from asyncengine import ContextLengthError, Conversation, InvalidRequestError, SamplingParams
from asyncengine.api.request import LONG_TEXT, Kept
from asyncengine.config import EngineConfig
from asyncengine.runner.backend import Backend
from asyncengine.testing import SimulatedEngine, no_leaks
from asyncengine.text import sandbox_program
from asyncengine.text.tokenizer import Tokenizer as OurTokenizer
from tests.models import tiny

CONTEXT = 512


class Engine(SimulatedEngine):
    """A simulated engine with any tokenizer."""

    def __init__(self, backend: Tokenizer | None = None, **config: Any) -> None:
        super().__init__(max_model_len=CONTEXT, **config)
        self._own = backend

    def _load_simulated(self, config: EngineConfig) -> Backend:
        loaded = super()._load_simulated(config)
        if self._own is None:
            return loaded
        templates = {"default": "{% for m in messages %}{{ m.content }}{% endfor %} ."}
        tokenizer = OurTokenizer(self._own, chat_templates=templates)
        return Backend(loaded.model_info, tokenizer, loaded.step_loop)


def text_of(length: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    words = ["the", "fox", "Größe", "日本", "\n", "12345", "quick,", "▁"]
    return " ".join(rng.choice(words) for _ in range(length // 3))[:length]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kept", [1, 5, CONTEXT])
@pytest.mark.parametrize("make", [tiny.byte_level_tokenizer, tiny.metaspace_tokenizer])
def test_a_part_of_a_text_has_the_tokens_of_the_whole(make: Any, kept: int, side: str) -> None:
    backend = make()
    for length in (1, LONG_TEXT, sandbox_program.PIECE + 1, 5 * sandbox_program.PIECE):
        text = text_of(length, length)
        whole = sandbox_program.encode(backend, text, True)
        assert sandbox_program.encode(backend, text, True, CONTEXT, kept, side) == list(Kept(kept, side).of(whole))


def test_no_more_than_a_part_is_tokenized() -> None:
    class Counted:
        def __init__(self) -> None:
            self.backend, self.characters = tiny.byte_level_tokenizer(), 0

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
            self.characters += sum(map(len, texts))
            return self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    for side in ("left", "right"):
        counted = Counted()
        assert len(sandbox_program.encode(counted, text_of(2_000_000), False, CONTEXT, 100, side)) == 100
        assert counted.characters <= 3 * sandbox_program.PIECE


@pytest.mark.sampled(3)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("sandboxed", [True, False])
@pytest.mark.parametrize("is_chat", [True, False])
async def test_prompts_longer_than_any_context_are_truncated(is_chat: bool, sandboxed: bool, side: str) -> None:
    async with Engine(sandbox=sandboxed) as engine, no_leaks(engine):
        longest = CONTEXT * engine.tokenizer.longest_token
        for length in (30, LONG_TEXT + 1, longest + 1, 40 * longest):
            text = ("abc def " * length)[:length]
            prompt: Any = [{"role": "user", "content": text}] if is_chat else text
            whole = engine.tokenizer.encode_chat(prompt) if is_chat else engine.tokenizer.encode(text)
            for kept in (7, -1):
                count = CONTEXT - 2 if kept == -1 else kept
                params = SamplingParams(max_tokens=2, truncate_prompt_tokens=kept, truncation_side=side)
                output = await engine.generate(prompt, params)
                assert list(output.prompt_token_ids) == list(Kept(count, side).of(whole)), (length, kept)
                tokens = await engine.tokenize(prompt, truncate_prompt_tokens=7, truncation_side=side)
                assert tokens == list(Kept(7, side).of(whole))
        with pytest.raises(ContextLengthError):
            await engine.generate(prompt, SamplingParams(max_tokens=2, truncate_prompt_tokens=CONTEXT + 1))
    # Token ids, more than the context has.
    async with Engine() as engine:
        ids = list(range(300, 300 + CONTEXT)) * 2
        params = SamplingParams(max_tokens=1, truncate_prompt_tokens=9, truncation_side=side)
        assert list((await engine.generate(ids, params)).prompt_token_ids) == list(Kept(9, side).of(ids))


async def test_more_messages_than_the_context_has_tokens_are_truncated() -> None:
    chat = Conversation(messages=[{"role": "user", "content": "a"}] * (CONTEXT + 1))
    async with Engine() as engine, no_leaks(engine):
        output = await engine.generate(chat, SamplingParams(max_tokens=1, truncate_prompt_tokens=-1))
        assert len(output.prompt_token_ids) == CONTEXT - 1
        with pytest.raises(ContextLengthError):
            await engine.generate(chat, SamplingParams(max_tokens=1))


def odd_tokenizer() -> Tokenizer:
    """One whose patterns are not known to be harmless, so that it runs in the sandbox."""
    backend = Tokenizer(models.BPE({chr(c): c - 32 for c in range(32, 127)} | {"\n": 95}, []))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a|a)*b"), "isolated")
    return backend


async def test_a_tokenizer_in_the_sandbox_truncates() -> None:
    async with Engine(odd_tokenizer()) as engine, no_leaks(engine):
        text = "xyz " * 50_000
        for side in ("left", "right"):
            params = SamplingParams(max_tokens=1, truncate_prompt_tokens=6, truncation_side=side)
            output = await engine.generate(text, params)
            assert list(output.prompt_token_ids) == list(Kept(6, side).of(engine.tokenizer.encode(text[:400])))


@pytest.mark.parametrize("sandboxed", [True, False])
async def test_words_are_tokenized_where_texts_are(sandboxed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrusted tokenizer gets banned words in its process, a long list of words leaves the event loop."""
    words = [f"w{i} a" for i in range(60)]
    async with Engine(odd_tokenizer() if sandboxed else None) as engine, no_leaks(engine):
        wanted = [engine.tokenizer.encode(s, False) for word in words for s in (word, " " + word)]
        if sandboxed:
            monkeypatch.setattr(OurTokenizer, "encode_all", lambda *a: pytest.fail("this ran in the engine's process"))
        found = await engine._life.prompts.words(words, "bad_words")
        assert found == wanted
        assert await engine._life.prompts.words(words, "bad_words") == found
        long = ["x" * 1000] * 256
        if not sandboxed:
            here: list[int] = []
            encode = OurTokenizer.encode_all

            def counting(tokenizer: OurTokenizer, texts: list[str]) -> Any:
                here.append(len(texts))
                return encode(tokenizer, texts)

            monkeypatch.setattr(OurTokenizer, "encode_all", counting)
            monkeypatch.setattr(engine._life.prompts._threads, "run", fail_in_thread)
            with pytest.raises(InvalidRequestError, match="in a thread") as error:
                await engine._life.prompts.words(long, "bad_words")
            assert error.value.param == "bad_words"
            assert here == []


async def fail_in_thread(size: int, call: Any, *arguments: Any) -> Any:
    raise InvalidRequestError(f"in a thread: {size}", param="prompt")


async def test_a_word_that_takes_for_ever_is_ended() -> None:
    """The pattern's library or the time limit ends it, in the sandbox: the error names the field, and the next request
    runs."""
    backend = odd_tokenizer()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a|aa)+$c"), "isolated")
    async with Engine(backend, sandbox_timeout_s=1.0) as engine, no_leaks(engine):
        with pytest.raises(InvalidRequestError, match="the tokenizer failed") as error:
            await engine.generate([1, 2], SamplingParams(max_tokens=1, bad_words=["a" * 1000]))
        assert error.value.param == "bad_words"
        assert len((await engine.generate([1, 2], SamplingParams(max_tokens=1))).token_ids) == 1


async def test_scores_have_the_limits_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Engine() as engine, no_leaks(engine):
        monkeypatch.setattr(OurTokenizer, "encode", lambda *arguments: pytest.fail("this was tokenized"))
        half = CONTEXT * engine.tokenizer.longest_token // 2 + 1
        for prompt, continuation in (("a" * half, "b" * half), ("a", "b" * 6_000_000), ([1] * CONTEXT, [1])):
            with pytest.raises(ContextLengthError, match="maximum context length is 512"):
                await engine.score(prompt, continuation)
