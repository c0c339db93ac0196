"""The state machine that parsers of the formats are made of.

A state is a method that takes text from the front of what is held, and says whether there may be more to do. What it
takes depends on the text alone, and never on where a piece of it ends: that makes all streams of a text alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from asyncengine.server.parsing.arguments import checked, clean, is_beginning
from asyncengine.server.parsing.inputs import InputReader, input_of
from asyncengine.server.parsing.parser import CallRules, OutputParser, ParsedDelta, ToolCallDelta, new_call_id
from asyncengine.text.markers import Markers

State = Callable[[], bool]
LONGEST_HEAD = 1024
"""Characters between the marker of a call and its arguments: where there are more, it is no call."""


@dataclass(slots=True)
class _Call:
    """A call under way."""

    name: str
    source: str
    """Text of the call before the arguments."""
    arguments: list[str] = field(default_factory=list)


class Machine(OutputParser):
    """Reasoning, content, and the places where tool calls begin."""

    triggers: Sequence[str] = ()
    """Markers in the content that ``triggered`` is called for."""
    markers: tuple[str, ...] = ()
    """All texts of the format that may be special tokens."""

    def __init__(
        self, markers: Markers | None = None, inside: bool | None = None, rules: CallRules | None = None
    ) -> None:
        """``inside``: as markers.under_way says."""
        self._markers = markers
        self.rules = rules or CallRules()
        self._text = ""
        self._at = 0
        self._out = ParsedDelta()
        self._ended = False
        self._is_cut = False
        self._call: _Call | None = None
        self._reader: InputReader | None = None  # of the call that was announced last, if its tool is a custom one
        self._calls = 0
        self._dropped = False  # whether text was left out that would be content elsewhere
        self._blanks: list[str] = []  # white space that waits for what follows it
        self._said = False  # any content yet
        self._trims = False  # white space that comes next, of no meaning after reasoning and calls
        self._search, self._partial, self._longest = _patterns(tuple(self.triggers))
        self._reasoned = False  # any reasoning yet
        self._state: State = self._begin
        if markers is None or inside is False:
            self._state = self._at_content
        elif inside:
            self._reason()

    # ---- the interface ----

    def push(self, text: str) -> ParsedDelta:
        out = self._out = ParsedDelta()
        self._text = self._text[self._at :] + text
        self._at = 0
        while self._state():
            pass
        return out

    def finish(self, *, cut: bool = False) -> ParsedDelta:
        self._ended, self._is_cut = True, cut
        out = self.push("")
        if self.rules.forced:
            if cut and self._dropped and not self._calls and len(self.rules.forced) == 1:
                self._announce(*self.rules.forced)
                self.unfinished = True
        elif not self._calls:
            out.content += "".join(self._blanks)
        return out

    # ---- what states do ----

    def say(self, text: str) -> None:
        """``text`` is content. White space before and after tool calls, and after reasoning, is none."""
        if self.rules.forced:
            self._dropped = self._dropped or not (text == "" or text.isspace())
            return
        if self._trims:
            text = text.lstrip()
        if text and (text := self._hold_blanks(text)):
            self._said, self._trims = True, False
            self._out.content += text

    def _hold_blanks(self, text: str) -> str:
        """``text`` with the white space before it, and without that at its end."""
        spoken = text if not text[-1].isspace() else text.rstrip()
        if not spoken:
            self._blanks.append(text)
            return ""
        held = text[len(spoken) :]
        if self._blanks:
            spoken = "".join((*self._blanks, spoken))
            self._blanks.clear()
        if held:
            self._blanks.append(held)
        return spoken

    def drop(self) -> bool:
        """The output was cut before the name of a call: what is held says nothing to anybody."""
        self._at = len(self._text)
        self._blanks.clear()
        self._dropped = True
        return self.in_text()

    def open_call(self, name: str, source: str) -> None:
        """A tool call begins. ``source``: its text so far, which is content should this prove to be no call."""
        self._call = _Call(clean(name), source)
        if self.rules.live:
            self._announce(self._call.name)

    def argue(self, text: str) -> None:
        """``text`` goes on with the arguments of the call."""
        assert self._call is not None
        if text:
            self._call.arguments.append(text)
            if self.rules.live:
                self._give(text)

    def close_call(self) -> bool:
        """The call is complete. False: its arguments are no JSON object, and all of its text is content."""
        name, source, written = self._taken()
        if self.rules.live:
            self._give("" if written.strip() else "{}")
            return True
        if name in self.rules.inputs:
            self._announce(name, input_of(written))
            return True
        arguments = checked(written)
        if arguments is None:
            self.say(source + written)
            return False
        self._announce(name, "{}" if name in self.rules.bare else arguments)
        return True

    def cut_call(self) -> None:
        """The output has ended within the arguments of the call."""
        name, source, written = self._taken()
        if self.rules.live:
            self.unfinished = self._counts
        elif self._is_cut and name in self.rules.inputs:
            self._announce(name, InputReader().push(written))
            self.unfinished = self._counts
        elif self._is_cut and is_beginning(written):
            self._announce(name, "" if name in self.rules.bare else written)
            self.unfinished = self._counts
        else:
            self.say(source + written)

    def _taken(self) -> tuple[str, str, str]:
        """Name, source and arguments of the call, which is under way no more."""
        call, self._call = self._call, None
        assert call is not None
        return call.name, call.source, "".join(call.arguments)

    def _announce(self, name: str, arguments: str = "") -> None:
        """A call is given. White space before it is no content."""
        self._trims = True
        if not self._said:
            self._blanks.clear()
        self._calls += 1
        custom = name in self.rules.inputs
        self._reader = InputReader() if custom else None
        if self._counts:
            self._out.tool_calls.append(ToolCallDelta(self._calls - 1, new_call_id(), name, arguments, custom))

    def _give(self, arguments: str) -> None:
        if self._reader is not None:
            arguments = self._reader.push(arguments)
        if not arguments or not self._counts:
            return
        last = self._out.tool_calls[-1] if self._out.tool_calls else None
        if last is not None and last.index == self._calls - 1:
            last.arguments += arguments
        else:
            custom = self._reader is not None
            self._out.tool_calls.append(ToolCallDelta(self._calls - 1, None, None, arguments, custom))

    @property
    def _counts(self) -> bool:
        return self.rules.most is None or self._calls <= self.rules.most

    def head(self) -> str:
        """Return the text that may hold the beginning of a call: the same text, whatever the pieces."""
        return self._text[self._at : self._at + LONGEST_HEAD]

    def head_is_whole(self) -> bool:
        """Return whether no further text can change ``head()``."""
        return self._ended or len(self._text) - self._at >= LONGEST_HEAD

    def starts(self, marker: str) -> bool | None:
        """Return whether the held text starts with the marker; None: that is not known yet."""
        if self._text.startswith(marker, self._at):
            return True
        rest = len(self._text) - self._at
        return None if not self._ended and rest < len(marker) and marker.startswith(self._text[self._at :]) else False

    def skip_blanks(self) -> int:
        """Return the place of the first character that is no white space; -1 if there is none yet."""
        found = _NO_BLANK.search(self._text, self._at)
        return -1 if found is None else found.start()

    # ---- states ----

    def _begin(self) -> bool:
        """Reasoning may come, as the first thing in the output."""
        assert self._markers is not None
        start = self.skip_blanks()
        if start < 0 and not self._ended:
            return False
        at, self._at = self._at, max(start, self._at)
        begins = self.starts(self._markers.begin)
        if begins:
            self._at += len(self._markers.begin)
            self._reason()
            return True
        self._at = at
        if begins is None:
            return False
        self._state = self._at_content
        return True

    def _reason(self) -> None:
        assert self._markers is not None
        self._trims = True
        self._until, self._until_partial, self._until_longest = _patterns((self._markers.end,))
        self._state = self._in_reasoning

    def _in_reasoning(self) -> bool:
        found = self._until.search(self._text, self._at)
        stop = found.start() if found else self._cut(self._until_partial, self._until_longest)
        text = self._text[self._at : stop]
        if not self._reasoned:
            text = text.lstrip()
        if text and (text := self._hold_blanks(text)):
            self._reasoned = True
            self._out.reasoning += text
        self._at = found.end() if found else stop
        if found:
            self._blanks.clear()
            self._state = self._at_content
        return found is not None

    def _at_content(self) -> bool:
        """The content begins here."""
        return self.in_text()

    def in_text(self) -> bool:
        """Content goes on."""
        self._state = self._in_content
        return True

    def _in_content(self) -> bool:
        if not self.triggers:
            self.say(self._text[self._at :])
            self._at = len(self._text)
            return False
        found = self._search.search(self._text, self._at)
        stop = found.start() if found else self._cut(self._partial, self._longest)
        if stop > self._at:
            self.say(self._text[self._at : stop])
            self._at = stop
        if found is None:
            return False
        self._at = found.end()
        self.triggered(found.group())
        return True

    def _cut(self, partial: re.Pattern[str], longest: int) -> int:
        """Return the place where a marker begins that the end of the text may be a part of."""
        end = len(self._text)
        if self._ended:
            return end
        found = partial.search(self._text, max(self._at, end - longest))
        return end if found is None else found.start()

    def triggered(self, marker: str) -> None:
        """The content has one of ``triggers``, which is taken: set the state, or say the marker."""
        raise NotImplementedError


_NO_BLANK = re.compile(r"\S")


@lru_cache(maxsize=64)
def _patterns(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """One that finds the markers, one that finds the beginning of one at the end of a text, and its longest length."""
    ordered = sorted(markers, key=len, reverse=True)
    partial = "|".join(f"(?:{_beginnings(marker)})" for marker in ordered)
    longest = max(map(len, ordered), default=1) - 1
    return re.compile("|".join(map(re.escape, ordered))), re.compile(rf"(?:{partial})\Z"), longest


def _beginnings(marker: str) -> str:
    """An expression for all beginnings of ``marker`` but itself."""
    pattern = ""
    for char in reversed(marker[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return re.escape(marker[0]) + pattern
