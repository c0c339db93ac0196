"""Text behind a prompt: what the whole has beyond the prompt's own, for every kind of decoder."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncengine import SamplingParams
from asyncengine.text.detokenizer import _CONTEXT, IncrementalDetokenizer
from asyncengine.text.stops import StopStringMatcher, stop_matcher
from asyncengine.text.tokenizer import Tokenizer
from tests.amounts import examples
from tests.text.kinds import KINDS, SPECIALS

TOKENIZERS = {name: Tokenizer(make()) for name, make in KINDS.items()}


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    found = [tokenizer.backend.token_to_id(token) for token in tokens]
    known = [token_id for token_id in found if token_id is not None]
    assert known == found, tokens
    return known


def text_behind(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True) -> str:
    """Return the text behind a prompt, made in pieces of one token, by a copy."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip, prompt=prompt).copy()
    return "".join(detokenizer.push([token]) for token in output) + detokenizer.flush()


@pytest.mark.parametrize(
    ("kind", "prompt", "output", "text"),
    [
        ("metaspace", ["▁hello"], ["▁world"], " world"),
        ("metaspace", ["▁hello", "▁"], ["▁world"], " world"),
        ("metaspace", ["<s>"], ["▁world"], "world"),
        ("metaspace-first", ["▁hello"], ["▁world", "s"], " worlds"),
        ("metaspace-never", ["hello"], ["▁world"], " world"),
        ("metaspace-never", ["<s>"], ["▁world"], " world"),
        ("byte-fallback", ["▁hello"], ["▁world"], " world"),
        ("byte-fallback", ["<s>"], ["▁world"], "world"),
        ("byte-fallback", ["▁hello", "</s>", "<s>"], ["▁world"], " world"),
        ("byte-fallback", ["▁hello", "<0xC3>"], ["<0xA9>", "s"], "és"),
        ("word-piece", ["hello"], ["world", "##s"], " worlds"),
        ("word-piece", ["<s>"], ["world"], "world"),
        ("word-piece", ["hello"], [",", "it"], ", it"),
        ("byte-level", ["hello"], ["Ġworld"], " world"),
        ("byte-level", ["hello", "Ã"], ["©", "s"], "és"),
        # Bytes that nothing completes are the prompt's.
        ("byte-level", ["hello", "Ã"], ["Ġworld"], " world"),
        ("byte-level", ["hello", "Ã"], ["Ã", "s"], "\ufffds"),
        ("byte-level", ["hello", "Ã"], [], ""),
        ("byte-fallback", ["▁hello", "<0xF0>", "<0x9F>"], ["▁world"], " world"),
        ("byte-fallback", ["▁hello", "<0xF0>", "<0x9F>"], ["<0xC3>", "s"], "\ufffds"),
    ],
)
def test_the_first_space_of_an_output_stays(kind: str, prompt: list[str], output: list[str], text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert text_behind(tokenizer, ids_of(tokenizer, *prompt), ids_of(tokenizer, *output)) == text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), skip=st.booleans(), times=st.sampled_from([1, 1, 40]))
def test_a_text_is_what_the_whole_has_beyond_the_prompt(kind: str, data: st.DataObject, skip: bool, times: int) -> None:
    """Whole characters: where bytes are missing the whole is not defined. Long prompts too, of which a part counts."""
    tokenizer = TOKENIZERS[kind]
    bytes_too = kind != "byte-level"
    plain = [i for t, i in tokenizer.backend.get_vocab().items() if len(t.encode()) and t[:3] != "<0x" and i < 34]
    e = ids_of(tokenizer, "<0xC3>", "<0xA9>") if bytes_too and kind == "byte-fallback" else []
    pieces = st.lists(st.one_of(st.sampled_from([[i] for i in plain]), st.just(e)), max_size=6)
    prompt = [i for piece in data.draw(pieces) for i in piece] * times
    output = [i for piece in data.draw(pieces) for i in piece]
    before, whole = (tokenizer.decode(ids, skip) for ids in (prompt, prompt + output))
    assert whole.startswith(before)
    assert text_behind(tokenizer, prompt, output, skip) == whole[len(before) :]


def test_a_prompt_of_many_silent_tokens_and_of_many_bytes() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    (bos,) = ids_of(tokenizer, "<s>")
    hello, world = ids_of(tokenizer, "▁hello", "▁world")
    assert text_behind(tokenizer, [hello, *[bos] * 1000], [world]) == " world"
    e = ids_of(tokenizer, "<0xF0>", "<0x9F>", "<0xA6>", "<0x8A>")  # a fox of four bytes
    for cut in range(4):
        run = [hello, *(e * _CONTEXT)[: 4 * _CONTEXT - cut]]
        rest = e[4 - cut :] if cut else []
        assert text_behind(tokenizer, run, [*rest, *e]) == "\U0001f98a" * (1 + bool(cut)), cut


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_grammar_has_seen_is_not_stripped(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    params = SamplingParams(structured_outputs={"choice": [" world"]})
    word = {"word-piece": "world", "byte-level": "Ġworld"}.get(kind, "▁world")
    for prompt in ([], ids_of(tokenizer, "<s>")):
        detokenizer = IncrementalDetokenizer.of(tokenizer, params, prompt)
        assert detokenizer.push(ids_of(tokenizer, word)) == " world"


# ---- stop strings with special tokens ----


def searched(tokenizer: Tokenizer, params: SamplingParams, tokens: list[str]) -> tuple[str, str | None]:
    """The text up to the stop string, as a sequence makes it."""
    matcher = stop_matcher(tokenizer, params)
    assert matcher is not None
    detokenizer = IncrementalDetokenizer.of(tokenizer, params, [])
    out = ""
    for token in ids_of(tokenizer, *tokens):
        text, stop = matcher.push(detokenizer.push([token]) + matcher.stand_ins.get(token, ""))
        out += text
        if stop is not None:
            return out, stop
    return out + matcher.flush(), None


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "metaspace"])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stop", "tokens", "text", "found"),
    [
        (["<|im_end|>"], ["hello", "<|im_end|>", "s"], "hello", "<|im_end|>"),
        (["</s>"], ["hello", "<|im_end|>", "</s>"], "hello", "</s>"),
        (["s<|im_end|>"], ["hello", "<|im_end|>", "s", "<|im_end|>"], "hello", "s<|im_end|>"),
        (["<|im_end|>s"], ["<|im_end|>", "hello", "<|im_end|>", "s"], "hello", "<|im_end|>s"),
        (["</s><s>", "no"], ["hello", "</s>", "no"], "hello", "no"),
        (["</s><s>"], ["hello", "</s>", "<s>"], "hello", "</s><s>"),
        (["<|im_end|>s"], ["hello", "<|im_end|>", "no"], "hellono", None),
        (["im_end"], ["hello", "<|im_end|>", "no"], "hellono", None),
    ],
)
def test_special_tokens_stop(
    kind: str, include: bool, stop: list[str], tokens: list[str], text: str, found: str | None
) -> None:
    params = SamplingParams(stop=stop, include_stop_str_in_output=include)
    wanted = text + (found or "") if include else text
    assert searched(TOKENIZERS[kind], params, tokens) == (wanted, found)


def test_kept_and_written_special_tokens_stop_as_text() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    (end,) = ids_of(tokenizer, "<|im_end|>")
    for more in ({"skip_special_tokens": False}, {"kept_special_tokens": [end]}):
        params = SamplingParams(stop="<|im_end|>", **more)
        assert stop_matcher(tokenizer, params).stand_ins == {}
        assert searched(tokenizer, params, ["hello", "<|im_end|>"]) == ("hello", "<|im_end|>")


def test_a_stop_string_with_a_stand_in_of_its_own_finds_no_special_token() -> None:
    matcher = StopStringMatcher(["\ud800", SPECIALS[2]], hidden={2: SPECIALS[2]})
    assert matcher.stand_ins == {2: "\ud801"}
    assert matcher.push("a\ud801") == ("a", SPECIALS[2])
