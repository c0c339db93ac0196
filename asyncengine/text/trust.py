"""Tokenizers that may run in this process: their time and memory are in proportion to the text.

tokenizer.json is a small program: its regular expressions may take exponential time, and its replacements may make a
gigabyte of a kilobyte. Programs that are known not to are listed here. All others encode in the process of
asyncengine.text.sandbox_program; a decoder, which runs for each token, must be known.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

from asyncengine.errors import UnsupportedModelError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_SPLITS = frozenset(
    {
        # GPT-2; also with digits one by one, and CLIP's
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
        # Llama 3 (cl100k of tiktoken), Qwen 2 and 3, Qwen 3.5
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        # Mistral (tekken) and o200k of tiktoken
        rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        # numbers in groups, as Falcon and others split them first
        r"[0-9][0-9][0-9]",
        r"\p{N}{1,3}",
        r"\p{N}",
        r"\d",
    }
)
"""Patterns in which no repeated part contains another, and no two neighbours repeat the same characters: a run of n
characters is looked at a fixed number of times, wherever the match begins."""
_REPLACED = frozenset({" {2,}", r"\s+", r"\s", r"\n", r"[\n\r\t]", r"\s{2,}|[\n\r\t]"})
"""Patterns of replacements, for which the same holds."""
_LINEAR_NORMALIZERS = {
    "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Nmt", "BertNormalizer", "ByteLevel",
}  # fmt: skip
_LINEAR_PRE_TOKENIZERS = {
    "ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits", "Punctuation",
    "CharDelimiterSplit", "UnicodeScripts", "FixedLength",
}  # fmt: skip
_KNOWN_DECODERS = {"ByteLevel", "WordPiece", "Metaspace", "ByteFallback", "Fuse", "Strip", "BPEDecoder", "CTC"}
_LONGEST_AFFIX = 16
"""Characters that are put before or after each word or piece."""
_LONGEST_MAPPED = 64
"""Bytes that a character may become: Unicode's own longest compatibility mapping has 33."""
_LONGEST_WORD = 1000
"""Characters of a word that WordPiece, whose time is in proportion to their square, looks at, and of a token of
Unigram, whose time is in proportion to them."""
_LARGEST_DECODED = 64.0
"""Characters that replacements make of one of a token."""


def encodes_in_proportion(backend: Any, longest_token: int) -> bool:
    """Return whether a ``tokenizers.Tokenizer`` is known to encode in time and memory in proportion to the text.

    ``longest_token`` is the length in characters of the longest token of its vocabulary.
    """
    return (
        all(_is_linear_normalizer(step) for step in _steps(backend.normalizer, "normalizers"))
        and all(_is_linear_pre_tokenizer(step) for step in _steps(backend.pre_tokenizer, "pretokenizers"))
        and _is_linear_model(backend.model, longest_token)
    )


def check_decoder(backend: Any, source: str) -> None:
    """Raise UnsupportedModelError, naming ``source``, for a decoder that could take long for a token."""
    growth = 1.0
    for step in _steps(backend.decoder, "decoders"):
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
                growth *= max(1.0, len(new) / len(old))
            case {"type": str(kind)} if kind in _KNOWN_DECODERS:
                pass
            case _:
                raise UnsupportedModelError(f"{source}: a decoder like {json.dumps(step)[:200]} is not supported")
    if growth > _LARGEST_DECODED:
        raise UnsupportedModelError(f"{source}: the decoder makes {growth:.0f} times as much text of a token")


def _steps(component: Any, key: str) -> Iterator[dict[str, Any]]:
    """The steps of a tokenizer's component as tokenizer.json describes them, sequences taken apart."""
    if component is None:
        return
    waiting = [json.loads(component.__getstate__())]
    while waiting:
        step = waiting.pop()
        if step.get("type") == "Sequence":
            waiting += reversed(step[key])
        else:
            yield step


def _is_linear_normalizer(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(old) > 0 and len(new) <= len(old)
        case {"type": "Replace", "pattern": {"Regex": str(pattern)}, "content": str(new)}:
            return pattern in _REPLACED and len(new) <= 1
        case {"type": "Prepend", "prepend": str(prefix)}:
            return len(prefix) <= _LONGEST_AFFIX
        case {"type": "Precompiled", "precompiled_charsmap": str(mapping)}:
            return _longest_mapped(mapping) <= _LONGEST_MAPPED
    return step.get("type") in _LINEAR_NORMALIZERS


def _longest_mapped(charsmap: str) -> int:
    """Bytes of the longest text in SentencePiece's table: size of a trie, the trie, texts that end with 0."""
    try:
        table = base64.b64decode(charsmap)
    except ValueError:
        return 1 << 30
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


def _is_linear_pre_tokenizer(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "Split", "pattern": {"String": str(text)}}:
            return bool(text)
        case {"type": "Split", "pattern": {"Regex": str(pattern)}}:
            return pattern in _SPLITS or pattern in _REPLACED
    return step.get("type") in _LINEAR_PRE_TOKENIZERS


def _is_linear_model(model: Any, longest_token: int) -> bool:
    if type(model).__name__ == "Unigram" and longest_token > _LONGEST_WORD:  # it tries each length at each character
        return False
    affixes = (getattr(model, name, None) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix"))
    longest_word = getattr(model, "max_input_chars_per_word", 0)
    return max(map(len, affixes)) <= _LONGEST_AFFIX and longest_word <= _LONGEST_WORD
