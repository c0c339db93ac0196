"""The stop matcher against a search from scratch: first complete, longest of those that end together."""

from __future__ import annotations

from asyncengine.text.stops import StopStringMatcher
from tests.fuzz.source import Source

ALPHABET = "aabé"


def one_input(data: bytes) -> None:
    source = Source(data)
    stops = [text for _ in range(source.integer(0, 4)) if (text := source.text(ALPHABET, 7))]
    include = source.flag()
    matcher = StopStringMatcher(stops, include)
    text = out = ""
    while source.left:
        piece = source.text(ALPHABET, 5)
        emitted, found = matcher.push(piece)
        out += emitted
        expected = None
        for _ in piece:
            text += piece[0]
            piece = piece[1:]
            expected = max((s for s in stops if text.endswith(s)), key=len, default=None)
            if expected is not None:
                break
        assert found == expected
        if found is not None:
            assert out == (text if include else text.removesuffix(found))
            assert matcher.flush() == ""
            return
        # Text that may become a stop string is held back, and no other text.
        held = max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)
        assert out == text[: len(text) - held]
    assert out + matcher.flush() == text
