"""Token ids to text while they arrive.

Text that has been handed out is final, and no part of a character is ever handed out.
"""

from __future__ import annotations

import codecs
import copy
import functools
import json
import re
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol, Self
from weakref import WeakKeyDictionary

from asyncengine.text.tokenizer import Tokenizer, decode_with

if TYPE_CHECKING:
    from asyncengine.api.request import SamplingParams

_REPLACEMENT = "\ufffd"
# A character has at most four bytes: a window that ends in U+FFFD after so many tokens is invalid for good.
_WINDOW_LIMIT = 8
_FIRST_IDS = 1024
"""Ids among which one has text."""


class IncrementalDetokenizer:
    """One sequence's text, piece by piece, in constant time per token.

    What ``push`` returns, joined, is ``tokenizer.decode`` of all ids, without an unfinished character at the
    end. There is one difference, with tokenizers that fall back to byte tokens: ``decode`` turns a run of
    byte tokens into U+FFFD as a whole if it is invalid anywhere, while here the characters that were
    complete before the invalid byte stay.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        skip_special_tokens: bool = True,
        kept: Sequence[int] = (),
        prompt: Sequence[int] = (),
        *,
        has_begun: bool = False,
    ) -> None:
        """Without a tokenizer there is no text. ``kept``: special tokens that are not skipped.

        ``prompt``: tokens that come before, whose text is not handed out. Decoders strip the first space of a text:
        behind a prompt with text they strip none, and with ``has_begun`` they never do. A character that the prompt
        leaves unfinished comes whole if the output completes it, and not at all otherwise.
        """
        self._decoder: _Decoder = _NO_TEXT
        self._stale = 0
        if tokenizer is None:
            return
        decoding = _decoding_of(tokenizer, skip_special_tokens, kept)
        self._decoder = decoding.make()
        tail, cut = decoding.tail(prompt)
        self._decoder.push(tail)
        if cut or has_begun:
            self._decoder.begin()
        self._stale = self._decoder.num_unfinished()

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, params: SamplingParams, prompt: Sequence[int]) -> Self:
        """Make a detokenizer for an output with ``params`` after ``prompt``. A grammar has seen each space of a
        structured output."""
        has_begun = params.structured_outputs is not None
        return cls(tokenizer, params.skip_special_tokens, params.kept_special_tokens, prompt, has_begun=has_begun)

    def copy(self) -> Self:
        """Return another detokenizer in the same state."""
        twin = copy.copy(self)
        twin._decoder = self._decoder.copy()
        return twin

    def push(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` complete: at times without their last character, or with earlier bytes."""
        text = self._decoder.push(ids)
        return self._without_stale(text) if self._stale and text else text

    def flush(self) -> str:
        """Return the text that is held back after the last token, but for an unfinished character."""
        return self._without_stale(self._decoder.flush())

    def _without_stale(self, text: str) -> str:
        """``text``, the first one, without what stands for the prompt's unfinished character."""
        while self._stale and text.startswith(_REPLACEMENT):
            text = text[1:]
            self._stale -= 1
        self._stale = 0
        return text


class _Decoder(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...
    def begin(self) -> None:
        """The next tokens stand behind text: no space at their beginning is stripped."""

    def num_unfinished(self) -> int:
        """Count the U+FFFD that replace the held-back bytes if no token completes them."""
        ...

    def copy(self) -> Self: ...


class _NoText:
    def push(self, ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def begin(self) -> None:
        pass

    def num_unfinished(self) -> int:
        return 0

    def copy(self) -> Self:
        return self


_NO_TEXT = _NoText()


class _Pieces(dict[int, Any]):
    """Token id → what the token adds to the text, computed when first asked for."""

    def __init__(self, tokenizer: Tokenizer, skipped: Set[int], convert: Callable[[str], Any]) -> None:
        super().__init__()
        self._id_to_token = tokenizer.backend.id_to_token
        self._skipped = skipped
        self._convert = convert

    def __missing__(self, token_id: int) -> Any:
        # An id beyond the vocabulary (embeddings are padded) adds nothing, as in decode.
        token = None if token_id in self._skipped else self._id_to_token(token_id)
        piece = self[token_id] = self._convert(token or "")
        return piece


class _Silent(dict[int, bool]):
    """Token id → whether the token adds nothing to the text, found when first asked for."""

    def __init__(self, tokenizer: Tokenizer, skipped: Set[int]) -> None:
        super().__init__()
        self._id_to_token = tokenizer.backend.id_to_token
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bool:
        # An id beyond the vocabulary (embeddings are padded) adds nothing, as in decode.
        silent = self[token_id] = token_id in self._skipped or self._id_to_token(token_id) is None
        return silent


_CONTEXT, _BYTE_LEVEL_CONTEXT = 32, 4
"""Tokens with text before an output that decide how it is decoded. A character has at most four bytes, each of them a
token. Decoders other than byte-level ones look at runs of tokens."""


class _Decoding:
    """Settings of a tokenizer's decoders: with or without special tokens."""

    def __init__(self, tokenizer: Tokenizer, skip: bool, kept: Sequence[int]) -> None:
        skipped = tokenizer.special_token_ids.difference(kept) if skip else frozenset()
        # The backend, not the tokenizer: what is kept for a tokenizer may not keep it alive.
        self._token_of = tokenizer.backend.id_to_token
        self._is_silent = _Silent(tokenizer, skipped).__getitem__
        self._context = _CONTEXT
        self.make = self._decoder_factory(tokenizer, skipped, skip and not kept)

    def tail(self, prompt: Sequence[int]) -> tuple[list[int], bool]:
        """The last tokens of ``prompt`` that have text, and whether it has others before them."""
        found: list[int] = []
        for token in reversed(prompt):
            if self._is_silent(token):
                continue
            if len(found) == self._context:
                break
            found.append(token)
        else:
            return found[::-1], False
        while found and _CONTINUES_CHARACTER.fullmatch(self._token_of(found[-1]) or ""):
            found.pop()  # its character began before
        return found[::-1], True

    def _decoder_factory(self, tokenizer: Tokenizer, skipped: Set[int], skip: bool) -> Callable[[], _Decoder]:
        """Made of the tokenizer's own decoder. ``skip``: decode leaves out what is silent by itself."""
        match _decoder_steps(tokenizer):
            case [{"type": "ByteLevel"}] | [{"type": "ByteLevel"}, {"type": "Fuse"}]:
                self._context = _BYTE_LEVEL_CONTEXT
                byte_pieces = _Pieces(tokenizer, skipped, _byte_level_piece)
                return lambda: _ByteLevelDecoder(byte_pieces)
            case [
                {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *rest,
            ] if (strip := _left_strip(rest)) is not None:
                fallback_pieces = _Pieces(tokenizer, skipped, lambda token: _fallback_piece(token, old, new))
                return lambda: _ByteFallbackDecoder(fallback_pieces, *strip)
        decode = functools.partial(decode_with, tokenizer.backend, skip_special_tokens=skip)
        return lambda: _WindowDecoder(decode, self._is_silent)


_CONTINUES_CHARACTER = re.compile("<0x[89AB][0-9A-F]>")
_decodings: WeakKeyDictionary[Tokenizer, dict[tuple[bool, tuple[int, ...]], _Decoding]] = WeakKeyDictionary()
_MAX_DECODINGS = 16
"""Decodings kept for a tokenizer: one for each set of kept tokens, which are the model's own markers or a user's
choice."""


def _decoding_of(tokenizer: Tokenizer, skip: bool, kept: Sequence[int]) -> _Decoding:
    known = _decodings.setdefault(tokenizer, {})
    key = (skip, tuple(kept))
    if key not in known:
        if len(known) >= _MAX_DECODINGS:
            known.clear()
        known[key] = _Decoding(tokenizer, skip, kept)
    return known[key]


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    decoder = tokenizer.backend.decoder
    spec: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
    return list(spec["decoders"]) if spec["type"] == "Sequence" else [spec]


_bytes_of_tokens: WeakKeyDictionary[Tokenizer, Callable[[int], bytes]] = WeakKeyDictionary()


def token_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Return a function that maps a token id to the bytes that it adds to a text already begun, special tokens written
    out."""
    found = _bytes_of_tokens.get(tokenizer)
    if found is None:
        found = _bytes_of_tokens[tokenizer] = _make_token_bytes(tokenizer)
    return found


def _make_token_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    match _decoder_steps(tokenizer):
        case [{"type": "ByteLevel"}, *_]:
            return _Pieces(tokenizer, frozenset(), _byte_level_piece).__getitem__
        case [{"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}, {"type": "ByteFallback"}, *_]:
            return _Pieces(
                tokenizer, frozenset(), lambda token: _piece_bytes(_fallback_piece(token, old, new))
            ).__getitem__
    decode = functools.partial(decode_with, tokenizer.backend, skip_special_tokens=False)
    return lambda token_id: decode([token_id, token_id])[len(decode([token_id])) :].encode()


def _piece_bytes(piece: str | int) -> bytes:
    return bytes((piece,)) if isinstance(piece, int) else piece.encode()


def _left_strip(steps: list[dict[str, Any]]) -> tuple[str, int] | None:
    """(character, count at most) that a decoder's last steps strip from the start; None if they do more."""
    match steps:
        case []:
            return " ", 0
        case [{"type": "Strip", "content": str(content), "start": int(start), "stop": 0}]:
            return content, start
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's one character per byte: printable Latin-1 stands for itself, the others for U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_piece(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[c] for c in token)
    except KeyError:  # an added token, which is plain text
        return token.encode()


def _fallback_piece(token: str, old: str, new: str) -> str | int:
    """Text, or the value of a byte token such as <0x0A>."""
    token = token.replace(old, new)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return token
    return token


class _ByteLevelDecoder:
    """Every token is a string of bytes; the text is their UTF-8, U+FFFD for each maximal invalid part."""

    def __init__(self, pieces: _Pieces) -> None:
        self._piece = pieces.__getitem__
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._piece, ids)))

    def flush(self) -> str:
        # Python also holds back an encoded surrogate, which no further byte can make valid: two U+FFFD.
        held = self._utf8.getstate()[0].decode(errors="replace")
        return "" if held == _REPLACEMENT else held

    def begin(self) -> None:
        pass

    def num_unfinished(self) -> int:
        return len(self._utf8.getstate()[0].decode(errors="replace"))

    def copy(self) -> Self:
        twin = copy.copy(self)
        twin._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        twin._utf8.setstate(self._utf8.getstate())
        return twin


class _ByteFallbackDecoder:
    """Tokens are text, or single bytes in runs; a run that is not valid UTF-8 is one U+FFFD per byte."""

    def __init__(self, pieces: _Pieces, stripped: str, strip_count: int) -> None:
        self._pieces = pieces
        self._unfinished = b""
        self._run_is_broken = False
        self._stripped = stripped
        self._strip_left = strip_count

    def push(self, ids: Sequence[int]) -> str:
        out: list[str] = []
        for token_id in ids:
            piece = self._pieces[token_id]
            if isinstance(piece, int):
                out.append(self._add_byte(piece))
            elif piece:
                if self._unfinished:
                    out.append(_REPLACEMENT * len(self._unfinished))
                    self._unfinished = b""
                self._run_is_broken = False
                out.append(piece)
        return self._strip("".join(out))

    def flush(self) -> str:
        return ""

    def begin(self) -> None:
        self._strip_left = 0

    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def copy(self) -> Self:
        return copy.copy(self)

    def _add_byte(self, byte: int) -> str:
        if self._run_is_broken:
            return _REPLACEMENT
        self._unfinished += bytes((byte,))
        try:
            text, used = codecs.utf_8_decode(self._unfinished, "strict", False)
        except UnicodeDecodeError:
            self._run_is_broken = True
            text, used = _REPLACEMENT * len(self._unfinished), len(self._unfinished)
        self._unfinished = self._unfinished[used:]
        return text

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if not text.startswith(self._stripped):
                self._strip_left = 0
                break
            text = text[len(self._stripped) :]
            self._strip_left -= 1
        return text


class _WindowDecoder:
    """Decoder of any other kind: it gives the text of a few tokens with the next one, less their text without that."""

    def __init__(self, decode: Callable[[list[int]], str], silent: Callable[[int], bool]) -> None:
        self._decode = decode
        self._silent = silent  # whether decode leaves a token out
        self._ids: list[int] = []
        self._emitted = 0  # tokens of the window whose text is out

    def push(self, ids: Sequence[int]) -> str:
        return "".join(map(self._push_one, ids))

    def flush(self) -> str:
        return self._pending().rstrip(_REPLACEMENT)

    def begin(self) -> None:
        if not self._ids:
            # A token with text stands for the text before. Tokens of a tokenizer without any text add none either.
            first = next((i for i in range(_FIRST_IDS) if not self._silent(i) and self._decode([i])), None)
            self._ids, self._emitted = ([], 0) if first is None else ([first], 1)

    def num_unfinished(self) -> int:
        pending = self._pending()
        return len(pending) - len(pending.rstrip(_REPLACEMENT))

    def copy(self) -> Self:
        twin = copy.copy(self)
        twin._ids = self._ids.copy()
        return twin

    def _push_one(self, token_id: int) -> str:
        if self._silent(token_id):
            return ""
        self._ids.append(token_id)
        text = self._pending()
        unfinished = text.endswith(_REPLACEMENT) and len(self._ids) - self._emitted < _WINDOW_LIMIT
        if not text or unfinished:
            return ""
        # The tokens just handed out stay as the left context of the next ones.
        del self._ids[: self._emitted]
        self._emitted = len(self._ids)
        return text

    def _pending(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._emitted])) :]
