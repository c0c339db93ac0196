"""Tokens that a request allows: each once, and their bitmap against a plain one."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncengine import InvalidRequestError, SamplingParams
from asyncengine.api.token_sets import TokenSet


@given(st.lists(st.integers(0, 99), max_size=200), st.integers(100, 200))
def test_the_bitmap_has_the_tokens(tokens: list[int], vocab: int) -> None:
    made = TokenSet.checked("x", tokens, 1000)
    assert made == tuple(dict.fromkeys(tokens))
    words = made.bitmap(vocab)
    assert len(words) == -(-vocab // 32)
    assert all(-(2**31) <= word < 2**31 for word in words)
    assert {t for t in range(32 * len(words)) if words[t // 32] >> t % 32 & 1} == set(tokens)
    assert made.bitmap(vocab) is words


def test_half_a_million_repetitions_are_looked_at_once() -> None:
    given_ = [i % 4000 for i in range(480_000)]
    began = time.thread_time()
    params = SamplingParams(allowed_token_ids=given_)
    for _ in range(1024):
        assert len(replace(params, temperature=0.0).allowed_token_ids or ()) == 4000
        assert isinstance(params.allowed_token_ids, TokenSet)
        assert len(params.allowed_token_ids.bitmap(4096)) == 128
    assert time.thread_time() - began < 2.0  # one prompt alone took 0.2 s


@pytest.mark.parametrize("wrong", [[-1], [2**31], [True], ["1"], [1.5], "12", 5])
def test_wrong_tokens_are_named(wrong: object) -> None:
    with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=wrong)  # type: ignore[arg-type]
