"""The incremental detokenizer against decode of the whole, the stop matcher against a search from scratch."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from asyncengine.text.detokenizer import IncrementalDetokenizer
from asyncengine.text.stops import StopStringMatcher
from asyncengine.text.tokenizer import Tokenizer, placeholder_tokenizer
from tests.amounts import examples
from tests.models import tiny


def word_tokenizer() -> Backend:
    backend = Backend(models.WordLevel({"<unk>": 0, "the": 1, "##re": 2, "is": 3, ".": 4, "é": 5}, "<unk>"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["<s>"])
    return backend


BYTE_LEVEL = Tokenizer(tiny.byte_level_tokenizer())
PREFIX_SPACE = Tokenizer(tiny.byte_level_tokenizer(add_prefix_space=True))
METASPACE = Tokenizer(tiny.metaspace_tokenizer())
WORDS = Tokenizer(word_tokenizer())
BYTE_IDS = [METASPACE.backend.token_to_id(f"<0x{b:02X}>") for b in range(256)]

# Mostly tokens of single bytes, so that characters get split, cut short and mixed up; some ids do not exist.
byte_level_ids = st.lists(st.one_of(st.integers(2, 260), st.integers(0, BYTE_LEVEL.vocab_size + 3)))
metaspace_ids = st.lists(st.one_of(st.sampled_from(BYTE_IDS), st.integers(0, METASPACE.vocab_size + 3)))
chunk_sizes = st.lists(st.integers(1, 5), min_size=1)


def in_chunks(items, sizes):
    start = 0
    while start < len(items):
        for size in sizes:
            yield items[start : start + size]
            start += size


def detokenize(tokenizer: Tokenizer, ids: list[int], skip: bool, sizes: list[int]) -> str:
    stream = IncrementalDetokenizer(tokenizer, skip)
    return "".join(stream.push(chunk) for chunk in in_chunks(ids, sizes)) + stream.flush()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PREFIX_SPACE], ids=["plain", "prefix-space"])
@settings(max_examples=examples(200), deadline=None)
@given(ids=byte_level_ids, skip=st.booleans(), sizes=chunk_sizes)
def test_byte_level_equals_decode(tokenizer, ids, skip, sizes):
    whole = tokenizer.decode(ids, skip)
    expected = whole[:-1] if ends_unfinished(tokenizer, ids, skip) else whole
    assert detokenize(tokenizer, ids, skip, sizes) == expected


def ends_unfinished(tokenizer: Tokenizer, ids: list[int], skip: bool) -> bool:
    """Return whether the bytes of ``ids`` end inside a character that further bytes could complete."""
    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    tokens = [tokenizer.backend.id_to_token(i) for i in ids if not (skip and i in tokenizer.special_token_ids)]
    data = b"".join(
        bytes(byte_of[c] for c in t) if set(t) <= set(byte_of) else t.encode() for t in tokens if t is not None
    )
    for start in range(max(0, len(data) - 3), len(data)):
        for count in (1, 2, 3):
            for tail in itertools.product(b"\x80\x90\xa0\xbf", repeat=count):
                with contextlib.suppress(UnicodeDecodeError):
                    if len((data[start:] + bytes(tail)).decode()) == 1:
                        return True
    return False


def decode_with_fallback(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """decode, except that a run of byte tokens keeps its valid beginning; an unfinished end is dropped."""
    parts: list[str | bytearray] = [""]
    for i in ids:
        token = tokenizer.backend.id_to_token(i)
        if token is None or (skip and i in tokenizer.special_token_ids):
            continue
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            if not isinstance(parts[-1], bytearray):
                parts.append(bytearray())
            parts[-1].append(int(token[3:5], 16))
        else:
            parts.append(token.replace("▁", " "))
    text = ""
    for n, part in enumerate(parts):
        if isinstance(part, str):
            text += part
            continue
        try:
            text += part.decode()
        except UnicodeDecodeError as e:
            unfinished = e.reason == "unexpected end of data" and n == len(parts) - 1
            text += part[: e.start].decode() + "\ufffd" * (0 if unfinished else len(part) - e.start)
    return text.removeprefix(" ")


@settings(max_examples=examples(300), deadline=None)
@given(ids=metaspace_ids, skip=st.booleans(), sizes=chunk_sizes)
def test_byte_fallback_equals_decode(ids, skip, sizes):
    text = detokenize(METASPACE, ids, skip, sizes)
    assert text == decode_with_fallback(METASPACE, ids, skip)
    # If decode finds nothing invalid, it gives the same text.
    whole = METASPACE.decode(ids, skip)
    if "\ufffd" not in whole:
        assert text == whole


@settings(max_examples=examples(100), deadline=None)
@given(text=st.text(), tail=st.integers(0, 3), sizes=chunk_sizes)
def test_byte_fallback_streams_valid_text(text, tail, sizes):
    ids = [BYTE_IDS[b] for b in text.encode()] + [BYTE_IDS[b] for b in "😀".encode()[:tail]]
    # decode strips one leading space, whatever kind of token it came from.
    assert detokenize(METASPACE, ids, True, sizes) == text.removeprefix(" ")


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 8)), skip=st.booleans(), sizes=chunk_sizes)
def test_other_decoders_equal_decode(ids, skip, sizes):
    assert detokenize(WORDS, ids, skip, sizes) == WORDS.decode(ids, skip)


def test_tokens_without_text_do_not_pile_up():
    """Skipped ones, and ids beyond the vocabulary: the window would be decoded whole for each of them."""
    special = WORDS.backend.token_to_id("<s>")
    stream = IncrementalDetokenizer(WORDS)
    assert stream.push([1, 2]) == "there"
    for token in (special, WORDS.vocab_size + 3):
        assert stream.push([token] * 1000) == ""
    decoder: Any = stream._decoder
    assert len(decoder._ids) <= 2
    assert stream.push([3]) + stream.flush() == " is"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", [word_tokenizer, tiny.byte_level_tokenizer, tiny.metaspace_tokenizer])
def test_a_tokenizer_is_freed(make):
    tokenizer = Tokenizer(make())
    IncrementalDetokenizer(tokenizer).push([1])
    alive = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte-level", "byte-fallback"])
@settings(deadline=None)
@given(text=st.text())
def test_characters_come_whole_and_at_once(tokenizer, text):
    stream = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    done = ""
    silent = 0
    for i in ids:
        piece = stream.push([i])
        silent = 0 if piece else silent + 1
        assert silent <= 4, "three tokens of an unfinished character and a leading space that is stripped"
        done += piece
        assert whole.startswith(done)
    assert done + stream.flush() == whole


def test_invalid_bytes_come_at_once():
    """A run of invalid bytes is not collected: each is handed out when the next token shows it is invalid."""
    lead = BYTE_LEVEL.backend.token_to_id("Ã")  # the byte C3, which opens a character of two bytes
    for tokenizer, token in ((BYTE_LEVEL, lead), (METASPACE, BYTE_IDS[0xC3])):
        stream = IncrementalDetokenizer(tokenizer)
        lengths = [len(stream.push([token])) for _ in range(5000)]
        assert lengths[0] == 0
        assert max(lengths) <= 2
        assert sum(lengths) >= 4999


def reference_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(start, stop) of the match that ends first, the longest of those that end together."""
    found = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    return min(found)[1:] if found else None


stop_alphabet = st.text("ab\u00e9", min_size=1, max_size=6)


@settings(max_examples=examples(300), deadline=None)
@given(
    text=st.text("ab\u00e9", max_size=40),
    stops=st.lists(stop_alphabet, max_size=4),
    include=st.booleans(),
    sizes=chunk_sizes,
)
def test_stop_matcher_equals_search(text, stops, include, sizes):
    matcher = StopStringMatcher(stops, include)
    expected = reference_stop(text, stops)
    out = ""
    seen = ""
    for piece in in_chunks(text, sizes):
        emitted, stop = matcher.push(piece)
        out += emitted
        seen += piece
        if stop is not None:
            assert expected is not None
            start, wanted = expected
            assert stop == wanted
            assert out == text[: start + len(stop) if include else start]
            assert matcher.flush() == ""
            return
        # Exactly the longest end of the text that may become a stop string is held back.
        held = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert out == seen[: len(seen) - held]
    assert expected is None
    assert out + matcher.flush() == text


def test_stop_matcher_is_linear_in_the_worst_case():
    """A long periodic stop string against text that almost matches it everywhere."""
    stop = "a" * 50_000 + "b"
    matcher = StopStringMatcher([stop])
    out = "".join(matcher.push("a" * 1000)[0] for _ in range(200))
    assert out == "a" * 150_000
    assert matcher.push("b") == ("", stop)


def test_matchers_of_the_same_string_share_its_table():
    """3,000 sequences of one request, with stop strings of a thousand characters, took seconds and a gigabyte."""
    first, second = (StopStringMatcher(["ab" * 500]) for _ in range(2))
    assert first._failures[0] is second._failures[0]


def test_no_stop_strings_hold_nothing_back():
    matcher = StopStringMatcher([])
    assert matcher.push("text") == ("text", None)
    assert matcher.flush() == ""


def test_a_decoder_that_fuses_after_byte_level_is_byte_level() -> None:
    """Characters of many tokens are never split: a window of few tokens would do that."""
    backend = placeholder_tokenizer(300).backend
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    tokenizer = Tokenizer(backend)
    text = "ǷǷ 🦊" * 5
    ids = backend.encode(text).ids
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == text == tokenizer.decode(ids)
