"""Tokenizers of each kind of decoder, made on the spot, over the same few words."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from asyncengine.text.detokenizer import _BYTE_OF

WORDS = ("hello", "world", "he", "yes", "no", "it", "is", ",", ".", "s")
SPECIALS = ("<s>", "</s>", "<|im_end|>")


def _spaced(space: str) -> dict[str, int]:
    """Return a vocabulary of each word as it follows a space and as it does not, the space itself, and all bytes."""
    tokens = [*SPECIALS, "<unk>", space, "\n", *WORDS, *(space + word for word in WORDS)]
    return {token: i for i, token in enumerate([*tokens, *(f"<0x{b:02X}>" for b in range(256))])}


def _finished(backend: Tokenizer) -> Tokenizer:
    backend.add_special_tokens(list(SPECIALS))
    return backend


def metaspace(scheme: str) -> Tokenizer:
    """Words with ▁ for the space before them."""
    backend = Tokenizer(models.WordLevel(_spaced("▁"), "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _finished(backend)


def byte_fallback() -> Tokenizer:
    """Llama 2's decoder: ▁ is a space, byte tokens are bytes, the first space is stripped."""
    backend = Tokenizer(models.BPE(_spaced("▁"), [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(backend)


def word_piece() -> Tokenizer:
    """BERT's: words, and ## before pieces that continue one."""
    tokens = [*SPECIALS, "<unk>", *WORDS, *(f"##{word}" for word in WORDS)]
    backend = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return _finished(backend)


def byte_level() -> Tokenizer:
    """GPT-2's: characters that stand for bytes."""
    tokens = [*SPECIALS, "<unk>", *WORDS, *("Ġ" + word for word in WORDS), *sorted(set(_BYTE_OF) - set(WORDS))]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _finished(backend)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "metaspace": lambda: metaspace("always"),
    "metaspace-first": lambda: metaspace("first"),
    "metaspace-never": lambda: metaspace("never"),
    "byte-fallback": byte_fallback,
    "word-piece": word_piece,
    "byte-level": byte_level,
}
