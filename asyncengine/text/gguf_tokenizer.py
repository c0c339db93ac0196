"""The tokenizer and the chat templates of a GGUF file, which is untrusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from asyncengine.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from asyncengine.models.files import excerpt
from asyncengine.models.gguf.reader import Strings, read_header

_KEY = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_MAX_PIECES = 64
"""Longest token, in characters, that is taken apart into merges: the ways are in proportion to its length."""
_MAX_TEMPLATES = 64
_SPACE = "\u2581"

_LETTERS, _CONTRACTIONS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_REST}"
_GPT4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_REST}"
_SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-2", "default", "olmo", "mpt", "phi-2"), None),
}
"""Expressions that cut a text into pieces for byte-level BPE, by tokenizer.ggml.pre; None: GPT-2's."""


class GgufTokenizer(NamedTuple):
    backend: tokenizers.Tokenizer
    specials: dict[str, str]
    """Tokens by names such as "bos_token"."""
    chat_templates: dict[str, str]


def read_gguf_tokenizer(path: Path) -> GgufTokenizer:
    """Raises ModelNotFoundError for a file without a tokenizer, ModelError for a damaged one, UnsupportedModelError for
    a kind that is not known."""
    meta = read_header(path).metadata
    stored = meta.get(f"{_KEY}tokens")
    if not isinstance(stored, Strings):
        raise ModelNotFoundError(f"{path} has no tokenizer: give one with tokenizer=DIRECTORY, or skip_tokenizer_init")
    tokens, kinds = stored.read(), meta.get(f"{_KEY}token_type", np.zeros(0))
    if not isinstance(kinds, np.ndarray) or len(kinds) not in (0, len(tokens)):
        raise ModelError(f"{path}: {_KEY}token_type must have a number for each token")
    architecture = meta.get("general.architecture")
    match meta.get(f"{_KEY}model"):
        case "gpt2":
            backend, tokens = _byte_level(tokens, meta, path), tokens
        case "llama":
            gemma = isinstance(architecture, str) and architecture.startswith("gemma")
            backend, tokens = _sentencepiece(tokens, meta, path, gemma=gemma)
        case kind:
            raise UnsupportedModelError(
                f"{path}: the tokenizer {excerpt(kind)} is not read from GGUF, but 'gpt2' and 'llama': give another "
                "with tokenizer=DIRECTORY"
            )
    _add_tokens(backend, tokens, kinds.tolist())
    specials = {}
    for key, name in _NAMED.items():
        i = meta.get(f"{_KEY}{key}_token_id")
        if isinstance(i, int) and 0 <= i < len(tokens):
            specials[name] = tokens[i]
    _add_ends(backend, specials, meta)
    return GgufTokenizer(backend, specials, _templates(meta, path))


def _vocabulary(tokens: Sequence[str], path: Path) -> dict[str, int]:
    """Ids by token; of several tokens with one text, the first counts."""
    vocabulary: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocabulary.setdefault(token, i)
    if not vocabulary:
        raise ModelError(f"{path}: {_KEY}tokens is empty")
    return vocabulary


def _merges(meta: Mapping[str, Any], vocabulary: Mapping[str, int], path: Path) -> list[tuple[str, str]] | None:
    stored = meta.get(f"{_KEY}merges")
    if not isinstance(stored, Strings):
        return None
    merges = []
    for merge in stored.read():
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelError(f"{path}: the merge {excerpt(merge)} names a token that is not there")
        merges.append((left, right))
    return merges


def _byte_level(tokens: Sequence[str], meta: Mapping[str, Any], path: Path) -> tokenizers.Tokenizer:
    name = meta.get(f"{_KEY}pre", "default")
    if name not in _SPLITS:
        raise UnsupportedModelError(
            f"{path}: {_KEY}pre = {excerpt(name)} is not known: give a tokenizer with tokenizer=DIRECTORY"
        )
    vocabulary, split = _vocabulary(tokens, path), _SPLITS[name]
    merges = _merges(meta, vocabulary, path)
    if merges is None:
        raise ModelError(f"{path} lacks {_KEY}merges")
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split == _LLAMA3))
    if split is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip
    if split == _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    tokens: list[str], meta: Mapping[str, Any], path: Path, *, gemma: bool
) -> tuple[tokenizers.Tokenizer, list[str]]:
    """A tokenizer and the spelling of its tokens.

    Without merges in the file a token is merged of any two that make it up, the better token first: by scores or,
    for Gemma, whose scores are not in the order of its merges, by ids.
    """
    if gemma:
        tokens = [_SPACE * len(token) if token.isspace() and token.strip(" ") == "" else token for token in tokens]
    vocabulary = _vocabulary(tokens, path)
    merges = _merges(meta, vocabulary, path)
    if merges is None:
        scores = meta.get(f"{_KEY}scores")
        if gemma:
            scores = -np.arange(len(tokens))
        if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
            raise ModelError(f"{path}: {_KEY}scores must have a number for each token")
        merges = _merges_by_score(vocabulary, scores.tolist())
    unknown = meta.get(f"{_KEY}unknown_token_id", 0)
    unk = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else tokens[0]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    )
    prefix = bool(meta.get(f"{_KEY}add_space_prefix", not gemma))
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend, tokens


def _merges_by_score(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    found = []
    for token, i in vocabulary.items():
        if len(token) > _MAX_PIECES:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-float(scores[i]), i, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Tokens that are found whole in a text: those of control are special, those that a user defined are not."""
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, own in zip(tokens, kinds, strict=False)
            if own == kind and token
        ]
        if special:
            backend.add_special_tokens(added)
        else:
            backend.add_tokens(added)


def _add_ends(backend: tokenizers.Tokenizer, specials: Mapping[str, str], meta: Mapping[str, Any]) -> None:
    """Tokens at the beginning and the end of a text. Files that do not say so have a beginning where llama.cpp adds
    it."""
    begins = meta.get(f"{_KEY}model") == "llama" or _SPLITS.get(str(meta.get(f"{_KEY}pre"))) == _LLAMA3
    flags = {
        "bos_token": meta.get(f"{_KEY}add_bos_token", begins),
        "eos_token": meta.get(f"{_KEY}add_eos_token", False),
    }
    ends = {name: specials[name] for name, flag in flags.items() if flag is True and name in specials}
    if not ends:
        return
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ends.values()])
    first, last = (f"{ends[name]}:%d" if name in ends else "" for name in ("bos_token", "eos_token"))
    backend.post_processor = processors.TemplateProcessing(
        single=[x for x in (first % 0 if first else "", "$A:0", last % 0 if last else "") if x],
        pair=[x for x in (first % 0 if first else "", "$A:0", first % 1 if first else "", "$B:1") if x],
        special_tokens=[(token, backend.token_to_id(token)) for token in ends.values()],
    )


def _templates(meta: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Templates by name: "default", and others behind tokenizer.chat_template."""
    key = "tokenizer.chat_template"
    found: dict[str, str] = {}
    for name, value in meta.items():
        if name == key or name.startswith(f"{key}."):
            if not isinstance(value, str) or len(found) >= _MAX_TEMPLATES:
                raise ModelError(f"{path}: {excerpt(name)} must be one of at most {_MAX_TEMPLATES} templates")
            found[name.removeprefix(key).removeprefix(".") or "default"] = value
    return found
