"""The search for stop strings in a text that arrives in pieces, special tokens that the text leaves out included.

A special token that is left out of the text has no characters there, so a stand-in takes its place in what is searched:
a lone surrogate, which no decoded text has. Stand-ins are never handed out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncengine.api.request import SamplingParams
    from asyncengine.text.tokenizer import Tokenizer

_STAND_INS = range(0xD800, 0xE000)


def stop_matcher(tokenizer: Tokenizer | None, params: SamplingParams) -> StopStringMatcher | None:
    """A matcher for the stop strings of a request; None if it has none."""
    if not params.stop_strings:
        return None
    hidden: dict[int, str] = {}
    if tokenizer is not None and params.skip_special_tokens:
        names = tokenizer.special_tokens
        silent = (i for i in names if i not in params.kept_special_tokens and names[i])
        in_stops = (i for i in silent if any(names[i] in stop for stop in params.stop_strings))
        hidden = {i: names[i] for i, _ in zip(in_stops, _STAND_INS, strict=False)}
    return StopStringMatcher(params.stop_strings, params.include_stop_str_in_output, hidden)


class StopStringMatcher:
    """Finds the stop string that is complete first; of several that end together, the longest.

    Whatever the pieces in which text arrives, the result is the same. Text is held back only while it may
    be the beginning of a stop string. One Knuth-Morris-Pratt automaton per string, so time is linear.
    """

    def __init__(self, stops: Iterable[str], include: bool = False, hidden: Mapping[int, str] | None = None) -> None:
        """``include`` keeps the stop string itself in the text. ``hidden``: the text of tokens that the text leaves
        out; a stop string that holds such a text is found by these tokens as well as by its characters."""
        hidden, stops = hidden or {}, tuple(stops)
        free = (char for char in map(chr, _STAND_INS) if not any(char in stop for stop in stops))
        self.stand_ins: dict[int, str] = dict(zip(hidden, free, strict=False))
        """Text to give ``push`` in place of each token that the text leaves out."""
        self._names: dict[str, str] = {}  # what is searched for → the stop string
        longest_first = sorted(hidden, key=lambda token: -len(hidden[token]))
        for stop in stops:
            searched = stop
            for token in longest_first:
                searched = searched.replace(hidden[token], self.stand_ins.get(token, hidden[token]))
            self._names[stop] = self._names[searched] = stop
        self._removed = dict.fromkeys(map(ord, self.stand_ins.values()))
        self._stops = sorted(self._names, key=len, reverse=True)
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop string that end the text so far
        self._include = include
        self._held = ""

    def copy(self) -> StopStringMatcher:
        """Return another matcher for the same strings, at the beginning of a text."""
        twin: StopStringMatcher = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._matched = [0] * len(self._stops)
        twin._held = ""
        return twin

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to hand out, the stop string found or None). After a match the matcher is spent."""
        if not self._held and self._first_chars.isdisjoint(text):
            return self._visible(text), None  # the usual case: nothing begins here
        matched = self._matched
        for position, char in enumerate(text):
            for i, stop in enumerate(self._stops):
                length = matched[i]
                while length and stop[length] != char:
                    length = self._failures[i][length]
                if stop[length] == char:
                    length += 1
                if length == len(stop):
                    before = (self._held + text[: position + 1])[: -len(stop)]
                    self._held = ""
                    found = self._names[stop]
                    return self._visible(before) + (found if self._include else ""), found
                matched[i] = length
        seen = self._held + text
        safe = len(seen) - max(matched)
        self._held = seen[safe:]
        return self._visible(seen[:safe]), None

    def flush(self) -> str:
        """The text held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return self._visible(held)

    def _visible(self, text: str) -> str:
        return text.translate(self._removed) if self._removed else text


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
