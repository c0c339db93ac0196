"""Pieces and the flush, joined, against decode of the whole, for each kind of decoder."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from asyncengine.text.detokenizer import IncrementalDetokenizer
from asyncengine.text.tokenizer import Tokenizer
from tests.fuzz.source import Source
from tests.text.test_detokenizer import (
    BYTE_IDS,
    BYTE_LEVEL,
    METASPACE,
    PREFIX_SPACE,
    WORDS,
    decode_with_fallback,
    ends_unfinished,
)


def tokenizer_with(decoder: decoders.Decoder, *tokens: str) -> Tokenizer:
    backend = Backend(models.WordLevel({token: i for i, token in enumerate(("<unk>", *tokens))}, "<unk>"))
    backend.decoder = decoder
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


SPACES = tokenizer_with(decoders.Metaspace(), "▁the", "▁", "▁▁", "a", "é▁b", "😀")
SUFFIXES = tokenizer_with(decoders.BPEDecoder(suffix="</w>"), "the</w>", "th", "e</w>", "</w>", "é")
JOINED = tokenizer_with(decoders.Fuse(), "the", " ", "  ", "é", "😀")
TOKENIZERS = (BYTE_LEVEL, PREFIX_SPACE, METASPACE, WORDS, SPACES, SUFFIXES, JOINED)


def one_input(data: bytes) -> None:
    source = Source(data)
    tokenizer = source.pick(TOKENIZERS)
    skip = source.flag()
    stream = IncrementalDetokenizer(tokenizer, skip)
    ids: list[int] = []
    text = ""
    while source.left:
        piece = [token_id(source, tokenizer) for _ in range(source.integer(0, 4))]
        ids += piece
        text += stream.push(piece)
    assert text + stream.flush() == expected(tokenizer, ids, skip)


def token_id(source: Source, tokenizer: Tokenizer) -> int:
    """Any id, some that do not exist; byte tokens more often, so that characters are cut and mixed up."""
    if tokenizer is METASPACE and source.flag():
        return source.pick([token for token in BYTE_IDS if token is not None])
    return source.integer(0, tokenizer.vocab_size + 3)


def expected(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    if tokenizer is METASPACE:
        return decode_with_fallback(tokenizer, ids, skip)
    whole = tokenizer.decode(ids, skip)
    if tokenizer in (BYTE_LEVEL, PREFIX_SPACE) and ends_unfinished(tokenizer, ids, skip):
        return whole[:-1]
    return whole
