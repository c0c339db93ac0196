"""Token ids to text while they arrive, and the search for stop strings in that text.

Text that has been handed out is final, and no part of a character or of a stop string is ever handed out.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from asyncengine.tokenization import Tokenizer, decode_with

_REPLACEMENT = "\ufffd"
# A character has at most four bytes: a window that ends in U+FFFD after so many tokens is invalid for good.
_WINDOW_LIMIT = 8


class IncrementalDetokenizer:
    """One sequence's text, piece by piece, in constant time per token.

    What ``push`` returns, joined, is ``tokenizer.decode`` of all ids, without an unfinished character at the
    end. There is one difference, with tokenizers that fall back to byte tokens: ``decode`` turns a run of
    byte tokens into U+FFFD as a whole if it is invalid anywhere, while here the characters that were
    complete before the invalid byte stay.
    """

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool = True, kept: Sequence[int] = ()) -> None:
        """Without a tokenizer there is no text. ``kept``: special tokens that are not skipped."""
        self._decoder = _NO_TEXT if tokenizer is None else _make_decoder(tokenizer, skip_special_tokens, kept)

    def push(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` complete: at times without their last character, or with earlier bytes."""
        return self._decoder.push(ids)

    def flush(self) -> str:
        """What is held back after the last token, an unfinished character excepted."""
        return self._decoder.flush()


class _Decoder(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class _NoText:
    def push(self, ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


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


_Factories = dict[tuple[bool, tuple[int, ...]], Callable[[], _Decoder]]
_decoder_factories: WeakKeyDictionary[Tokenizer, _Factories] = WeakKeyDictionary()
_MAX_FACTORIES = 16
"""Of a tokenizer: one for each set of kept tokens, which are those of the model's own markers, or a user's choice."""


def _make_decoder(tokenizer: Tokenizer, skip: bool, kept: Sequence[int]) -> _Decoder:
    factories = _decoder_factories.setdefault(tokenizer, {})
    key = (skip, tuple(kept))
    if key not in factories:
        if len(factories) >= _MAX_FACTORIES:
            factories.clear()
        factories[key] = _decoder_factory(tokenizer, skip, kept)
    return factories[key]()


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    decoder = tokenizer.backend.decoder
    spec: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
    return list(spec["decoders"]) if spec["type"] == "Sequence" else [spec]


def _decoder_factory(tokenizer: Tokenizer, skip: bool, kept: Sequence[int]) -> Callable[[], _Decoder]:
    """How to decode, read from the tokenizer's own decoder."""
    silent = tokenizer.special_token_ids.difference(kept) if skip else frozenset()
    match _decoder_steps(tokenizer):
        case [{"type": "ByteLevel"}] | [{"type": "ByteLevel"}, {"type": "Fuse"}]:
            byte_pieces = _Pieces(tokenizer, silent, _byte_level_piece)
            return lambda: _ByteLevelDecoder(byte_pieces)
        case [
            {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *rest,
        ] if (strip := _left_strip(rest)) is not None:
            fallback_pieces = _Pieces(tokenizer, silent, lambda token: _fallback_piece(token, old, new))
            return lambda: _ByteFallbackDecoder(fallback_pieces, *strip)
    # The backend, not the tokenizer: what is kept for a tokenizer may not keep it alive.
    decode = functools.partial(decode_with, tokenizer.backend, skip_special_tokens=skip and not kept)
    id_to_token = tokenizer.backend.id_to_token
    return lambda: _WindowDecoder(decode, lambda i: i in silent or id_to_token(i) is None)


_bytes_of_tokens: WeakKeyDictionary[Tokenizer, Callable[[int], bytes]] = WeakKeyDictionary()


def token_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Of a token id: the bytes that it adds to a text that others have begun, special tokens written out."""
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
    """For any other decoder: the text of a few tokens with the next one, less their text without it."""

    def __init__(self, decode: Callable[[list[int]], str], silent: Callable[[int], bool]) -> None:
        self._decode = decode
        self._silent = silent  # whether decode leaves a token out
        self._ids: list[int] = []
        self._emitted = 0  # tokens of the window whose text is out

    def push(self, ids: Sequence[int]) -> str:
        return "".join(map(self._push_one, ids))

    def flush(self) -> str:
        return self._pending().rstrip(_REPLACEMENT)

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


class StopStringMatcher:
    """Finds the stop string that is complete first; of several that end together, the longest.

    Whatever the pieces in which text arrives, the result is the same. Text is held back only while it may
    be the beginning of a stop string. One Knuth-Morris-Pratt automaton per string, so time is linear.
    """

    def __init__(self, stops: Iterable[str], include: bool = False) -> None:
        """``include`` keeps the stop string itself in the text."""
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop string that end the text so far
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to hand out, the stop string found or None). After a match the matcher is spent."""
        if not self._held and self._first_chars.isdisjoint(text):
            return text, None  # the usual case: nothing begins here
        matched = self._matched
        for position, char in enumerate(text):
            for i, stop in enumerate(self._stops):
                length = matched[i]
                while length and stop[length] != char:
                    length = self._failures[i][length]
                if stop[length] == char:
                    length += 1
                if length == len(stop):
                    seen = self._held + text[: position + 1]
                    self._held = ""
                    return (seen if self._include else seen[: -len(stop)]), stop
                matched[i] = length
        seen = self._held + text
        safe = len(seen) - max(matched)
        self._held = seen[safe:]
        return seen[:safe], None

    def flush(self) -> str:
        """The text held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return held


@functools.lru_cache(maxsize=64)  # the sequences of a request, and often its successors, have the same
def _failure_table(pattern: str) -> list[int]:
    """table[n]: length of the longest proper prefix of pattern[:n] that is also its suffix."""
    table = [0, 0]
    for char in pattern[1:]:
        length = table[-1]
        while length and pattern[length] != char:
            length = table[length]
        table.append(length + 1 if pattern[length] == char else 0)
    return table
