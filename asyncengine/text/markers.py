"""Markers of the part in which a model reasons before it answers, by families of models."""

from __future__ import annotations

from typing import NamedTuple


class Markers(NamedTuple):
    """The texts, mostly of one token each, that begin and end the part."""

    begin: str
    end: str


REASONING = {
    "think": Markers("<think>", "</think>"),
    "cohere": Markers("<|START_THINKING|>", "<|END_THINKING|>"),
    "mistral": Markers("[THINK]", "[/THINK]"),
}
TAIL = 32
"""Tokens at a prompt's end that may hold a marker that the chat template wrote, however many tokens it consists of."""


def under_way(markers: Markers, tail: str, continued: str = "") -> bool | None:
    """Return whether an output begins inside the part: True, False if the prompt has ended it, None if the prompt has
    no marker.

    Only what the chat template put at the end of the prompt counts, ``tail`` being that end: a message may well speak
    of markers. ``continued`` is the message that the output continues, if it does.
    """
    if continued:
        begun, ended = continued.rfind(markers.begin), continued.rfind(markers.end)
        return None if begun == ended else begun > ended
    tail = tail.rstrip()
    if tail.endswith(markers.begin):
        return True
    return False if tail.endswith(markers.end) else None
