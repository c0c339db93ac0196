"""The bundled model: its folder, its language, its tokenizer, and that what it writes is well-formed."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jinja2 import TemplateError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncengine import AsyncEngine, RequestOutput, SamplingParams, bundled
from asyncengine.bundled.evaluate import Case, chat_cases, continuations, prefix_cases, report
from asyncengine.bundled.grammar import generate, parse, write
from asyncengine.bundled.rules import PRONOUN_OF
from asyncengine.bundled.train import CHAT_TEMPLATE

RAW_TOKENIZER = Tokenizer.from_file(str(bundled.path() / "tokenizer.json"))
rngs = st.integers(0, 2**32 - 1).map(random.Random)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(bundled.path())


# The folder


def test_folder_holds_a_small_float32_model() -> None:
    files = {file.name: file.stat().st_size for file in bundled.path().iterdir()}
    assert files.keys() == {
        "config.json", "generation_config.json", "model.safetensors", "special_tokens_map.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert sum(files.values()) <= 8_000_000
    tensors = load_file(bundled.path() / "model.safetensors").values()
    assert {str(tensor.dtype) for tensor in tensors} == {"torch.float32"}
    assert 1_000_000 <= sum(tensor.numel() for tensor in tensors) <= 4_000_000


# The language


@given(rngs)
def test_what_is_generated_parses(rng: random.Random) -> None:
    facts = parse(generate(rng))
    assert facts is not None
    assert facts["name"] != facts["friend"]


@given(rngs)
def test_a_story_obeys_the_request(rng: random.Random) -> None:
    _, wanted = write(rng, "request", anyone=True)
    facts = parse(generate(rng, wanted))
    assert facts is not None
    assert wanted.items() <= facts.items()


@given(rngs, st.data())
def test_swapped_words_do_not_parse(rng: random.Random, data: st.DataObject) -> None:
    words = generate(rng).split(" ")
    i = data.draw(st.integers(0, len(words) - 2))
    assume(words[i] != words[i + 1])
    words[i], words[i + 1] = words[i + 1], words[i]
    assert parse(" ".join(words)) is None


@given(rngs, st.data())
def test_a_story_without_one_of_its_sentences_does_not_parse(rng: random.Random, data: st.DataObject) -> None:
    story = generate(rng)
    bounds = [0, *(gap.end() for gap in re.finditer(r'(?<=[.!?"])\s+', story)), len(story)]
    start, end = data.draw(st.sampled_from(list(itertools.pairwise(bounds))))
    assert parse(story[:start] + story[end:]) is None


@given(rngs, st.sampled_from(["name", "friend"]), st.sampled_from(sorted(PRONOUN_OF)), st.data())
def test_a_name_that_changes_does_not_parse(rng: random.Random, variable: str, other: str, data: st.DataObject) -> None:
    story = generate(rng)
    facts = parse(story)
    assert facts is not None
    assume(other != facts[variable])
    mention = data.draw(st.sampled_from(list(re.finditer(rf"\b{facts[variable]}\b", story))))
    assert parse(story[: mention.start()] + other + story[mention.end() :]) is None


@given(rngs, st.data())
def test_a_pronoun_that_does_not_agree_does_not_parse(rng: random.Random, data: st.DataObject) -> None:
    story = generate(rng)
    swap = {"he": "she", "she": "he", "He": "She", "She": "He"}
    pronouns = list(re.finditer(r"\b([Hh]e|[Ss]he)\b", story))
    assume(pronouns)
    pronoun = data.draw(st.sampled_from(pronouns))
    assert parse(story[: pronoun.start()] + swap[pronoun.group()] + story[pronoun.end() :]) is None


@given(rngs)
def test_nothing_may_stand_around_a_story(rng: random.Random) -> None:
    story = generate(rng)
    assert all(parse(text) is None for text in ("", story + " ", " " + story, story[:-1], story + story))


# The tokenizer


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = RAW_TOKENIZER.encode(text, add_special_tokens=False).ids
    assert RAW_TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_plain_text_begins_with_bos_once(tokenizer: Any) -> None:
    ids = tokenizer("Once upon a time").input_ids
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Once upon a time"


def test_the_template_is_that_of_the_training(tokenizer: Any) -> None:
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_chat_template(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Once."},
        {"role": "user", "content": "More"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>Be kind.<|end|><|user|>Hello<|end|><|assistant|>Once.<|end|><|user|>More<|end|><|assistant|>"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer(text, add_special_tokens=False).input_ids
    special = ["<|bos|>", "<|system|>", "<|user|>", "<|end|>", "<|assistant|>"]
    assert [ids.count(tokenizer.convert_tokens_to_ids(token)) for token in special] == [1, 1, 2, 4, 2]


def test_chat_template_refuses_unknown_roles(tokenizer: Any) -> None:
    with pytest.raises(TemplateError, match="Unknown role: narrator"):
        tokenizer.apply_chat_template([{"role": "narrator", "content": "Hm."}], tokenize=False)


# The model


def held_out_cases(tokenizer: Any) -> Iterator[Case]:
    rng = random.Random("tests/models/test_bundled.py")

    def render(messages: list[dict[str, str]]) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    yield from itertools.islice(prefix_cases(rng), 200)
    yield from itertools.islice(chat_cases(rng, render), 100)


@pytest.fixture(scope="module")
def greedy(tokenizer: Any) -> list[tuple[Case, str]]:
    """Held-out prompts and what the engine continues them with."""
    cases = list(held_out_cases(tokenizer))

    async def main() -> list[RequestOutput]:
        async with AsyncEngine.from_pretrained(bundled.path()) as engine:
            params = SamplingParams(max_tokens=256, temperature=0)
            # The tokenizer puts <|bos|> in front of plain text by itself.
            prompts = [case.prompt.removeprefix(tokenizer.bos_token) for case in cases]
            return list(await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts)))

    outputs = asyncio.run(main())
    return [(case, output.text) for case, output in zip(cases, outputs, strict=True)]


def test_greedy_continuations_are_well_formed_stories(greedy: list[tuple[Case, str]]) -> None:
    """At least 95% of each kind are well-formed and as wanted: the model must also tell what the user asked for. When
    the weights were made, 99.9% of 1,000 continued beginnings were so, and 99.7% of 1,000 chats."""
    shares = report([case for case, _ in greedy], [text for _, text in greedy])
    faults = [(case.prompt, text) for case, text in greedy if case.fault(text)]
    assert shares.keys() == {"prefix", "chat"}
    assert all(share["as wanted"] >= 0.95 for share in shares.values()), (shares, faults)


def test_the_engine_tells_the_same_stories_as_transformers(greedy: list[tuple[Case, str]], tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(bundled.path())
    sample = greedy[::25]
    texts = continuations(model, tokenizer, [case.prompt for case, _ in sample])
    assert texts == [text for _, text in sample]
