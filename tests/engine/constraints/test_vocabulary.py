"""The tokenizer that grammars see: exactly the rows of the embedding."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import llguidance
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from asyncengine.engine.constraints.vocabulary import describe
from tests.models import tiny


def unigram() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = tiny.metaspace_tokenizer().decoder
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(tiny.CORPUS, trainer)
    made.add_tokens(["two words"])
    return made


def with_a_hole() -> tokenizers.Tokenizer:
    """Two tokens that no file has any more leave their ids free."""
    values = json.loads(tiny.metaspace_tokenizer().to_str())
    for token in ("fox", "▁fox"):
        values["model"]["vocab"].pop(token, None)
    values["model"]["merges"] = []
    return tokenizers.Tokenizer.from_str(json.dumps(values))


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level": tiny.byte_level_tokenizer,
    "metaspace": tiny.metaspace_tokenizer,
    "unigram": unigram,
    "with a hole": with_a_hole,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("surplus", [-9, -1, 0, 1, 44])
def test_every_row_has_its_token_and_no_other(kind: str, surplus: int) -> None:
    backend = KINDS[kind]()
    vocabulary = backend.get_vocab()
    rows = max(vocabulary.values()) + 1 + surplus
    end = rows - 1
    made = llguidance.LLTokenizer(describe(backend, rows, [end]), n_vocab=rows, eos_token=[end])
    assert (made.vocab_size, made.eos_token) == (rows, end)
    whole = llguidance.LLTokenizer(describe(backend, rows + 64, [end]), n_vocab=rows + 64, eos_token=[end])
    for token, i in vocabulary.items():
        if i < end:
            assert made.decode_bytes([i]) == whole.decode_bytes([i]), token
    letter = next(token for token in ("a", "▁a", "Ġa") if vocabulary.get(token, end) < end)
    matcher = llguidance.LLMatcher(made, llguidance.LLMatcher.grammar_from_regex(r"[ a]{1,2}"))
    first = rows_of(matcher)
    assert vocabulary[letter] in first
    assert max(first) < rows
    matcher.consume_token(vocabulary[letter])
    assert end in rows_of(matcher)


def rows_of(matcher: llguidance.LLMatcher) -> set[int]:
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())
