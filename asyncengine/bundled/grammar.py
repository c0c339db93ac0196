"""The language of the bundled model: small stories, written by `generate` and checked by `parse`.

Both walk the same compiled rules (`asyncengine.bundled.rules`): what one can write is what the other accepts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from asyncengine.bundled.rules import PRONOUN_OF, RULES, VALUES

Story = dict[str, str]
"""Variables that a text fixes: name, kind, trait, place, tale, friend, … sex and friendsex are "he" or "she"."""

_DOMAIN_OF = {"friendkind": "kind", "friendsex": "sex"}
_NAME = re.compile(r"[A-Z][a-z]{1,11}")
_SEX_OF = {"name": "sex", "friend": "friendsex"}
_PRONOUNS = {
    "he": {"he": "he", "she": "she"},
    "him": {"he": "him", "she": "her"},
    "his": {"he": "his", "she": "her"},
    "himself": {"he": "himself", "she": "herself"},
}


@dataclass(frozen=True)
class _Rule:
    symbol: str


@dataclass(frozen=True)
class _Hole:
    """A place where a variable is spoken: `spelling` maps value to text; None allows any capitalised word."""

    variable: str
    spelling: Mapping[str, str] | None


_Piece = str | _Rule | _Hole


def _hole(symbol: str) -> _Hole:
    """The hole that a symbol names: {kind}, {a kind}, {tale=lost}, {he}, {friendhim}, {Friendhe} …"""
    if "=" in symbol:
        variable, value = symbol.split("=")
        return _Hole(variable, {value: ""})
    if symbol in _SEX_OF:
        return _Hole(symbol, None)
    owner, pronoun = ("friend", symbol[6:]) if symbol.lower().startswith("friend") else ("", symbol)
    if pronoun.lower() in _PRONOUNS:
        forms = _PRONOUNS[pronoun.lower()]
        capital = symbol[0].isupper()
        return _Hole(owner + "sex", {k: v.capitalize() if capital else v for k, v in forms.items()})
    variable = symbol.removeprefix("a ")
    values = VALUES[_DOMAIN_OF.get(variable, variable)]
    if variable == symbol:
        return _Hole(variable, {value: value for value in values})
    return _Hole(variable, {value: ("an " if value[0] in "aeiou" else "a ") + value for value in values})


def _compile(text: str) -> tuple[_Piece, ...]:
    pieces = re.split(r"\{(.*?)\}", text)
    return tuple(
        piece if i % 2 == 0 else _Rule(piece) if piece in RULES else _hole(piece)
        for i, piece in enumerate(pieces)
        if piece
    )


_COMPILED = {symbol: [_compile(text) for text in texts] for symbol, texts in RULES.items()}


def _bind(story: Story, variable: str, value: str) -> Story | None:
    """The story with one more variable fixed; None if that contradicts what is fixed already."""
    if variable in story:
        return story if story[variable] == value else None
    if variable in _SEX_OF and value in (story.get("name"), story.get("friend")):
        return None
    bound = {**story, variable: value}
    if variable in _SEX_OF and value in PRONOUN_OF:
        return _bind(bound, _SEX_OF[variable], PRONOUN_OF[value])
    return bound


def _readings(hole: _Hole, text: str, at: int) -> Iterator[tuple[str, int]]:
    """Yield each value that the text can be speaking of at this position, and the place where the text goes on behind
    it."""
    if hole.spelling is None:
        if word := _NAME.match(text, at):
            yield word.group(), word.end()
        return
    for value, spelled in hole.spelling.items():
        if text.startswith(spelled, at):
            yield value, at + len(spelled)


def _match(pieces: tuple[_Piece, ...], text: str, at: int, story: Story) -> Story | None:
    """Match the rest of the text with the pieces still to come, trying alternatives in order."""
    if not pieces:
        return story if at == len(text) else None
    head, rest = pieces[0], pieces[1:]
    if isinstance(head, str):
        return _match(rest, text, at + len(head), story) if text.startswith(head, at) else None
    if isinstance(head, _Rule):
        matches = (_match(body + rest, text, at, story) for body in _COMPILED[head.symbol])
    else:
        matches = (
            _match(rest, text, end, bound)
            for value, end in _readings(head, text, at)
            if (bound := _bind(story, head.variable, value)) is not None
        )
    return next((match for match in matches if match is not None), None)


_ONSETS = ("b", "d", "f", "g", "gr", "h", "k", "l", "m", "n", "p", "qu", "r", "s", "t", "tr", "v", "w", "z")
_T = TypeVar("_T")


def invent_name(rng: random.Random) -> str:
    """A name that nobody has, such as Torvalo or Quemi."""
    name = "".join(rng.choice(_ONSETS) + rng.choice("aeiouy") for _ in range(rng.randint(2, 3)))
    return (name + rng.choice(("", "", "n", "x", "l", "r", "sh"))).capitalize()


def _shuffled(rng: random.Random, items: Sequence[_T]) -> Iterator[_T]:
    """The items in random order; mostly only the first is asked for, and only that one is drawn."""
    pool = list(items)
    while pool:
        yield pool.pop(int(rng.random() * len(pool)))


def _values(rng: random.Random, hole: _Hole, story: Story, anyone: bool) -> Iterator[str]:
    """Values to try in turn: the one already fixed, or all in random order."""
    if hole.variable in story:
        yield story[hole.variable]
    elif hole.spelling is not None:
        yield from _shuffled(rng, tuple(hole.spelling))
    elif anyone:
        yield invent_name(rng) if rng.random() < 0.3 else rng.choice(tuple(PRONOUN_OF))
        yield invent_name(rng)
    else:
        yield from _shuffled(rng, VALUES[hole.variable])


def _write(rng: random.Random, pieces: tuple[_Piece, ...], story: Story, anyone: bool) -> tuple[str, Story] | None:
    """A random text for the pieces, and the story with what the text fixes; None if the story allows none."""
    text = ""
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
        elif isinstance(piece, _Rule):
            tries = (_write(rng, body, story, anyone) for body in _shuffled(rng, _COMPILED[piece.symbol]))
            if (written := next((t for t in tries if t is not None), None)) is None:
                return None
            text, story = text + written[0], written[1]
        else:
            for value in _values(rng, piece, story, anyone):
                spelled = value if piece.spelling is None else piece.spelling.get(value)
                if spelled is not None and (bound := _bind(story, piece.variable, value)) is not None:
                    text, story = text + spelled, bound
                    break
            else:
                return None
    return text, story


def write(
    rng: random.Random, symbol: str, story: Mapping[str, str] | None = None, *, anyone: bool = False
) -> tuple[str, Story]:
    """A random text of one symbol of RULES that obeys what `story` fixes, and what is fixed thereafter.

    With `anyone`, hero and friend may have any name, also one that is made up. Raises ValueError if there is
    no such text."""
    written = _write(rng, (_Rule(symbol),), dict(story or {}), anyone)
    if written is None:
        raise ValueError(f"no {symbol} obeys {story}")
    return written


def generate(rng: random.Random, given: Mapping[str, str] | None = None) -> str:
    """A random story, in which the variables of `given` have the values given."""
    return write(rng, "story", given)[0]


def parse(text: str) -> Story | None:
    """Return the variables that a story fixes, or None if the text is not exactly one well-formed story."""
    return _match((_Rule("story"),), text, 0, {})
