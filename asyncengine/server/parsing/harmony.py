"""The format of gpt-oss: messages on channels, ``<|channel|>analysis<|message|>...<|end|>`` and so on."""

from __future__ import annotations

import re

from asyncengine.server.parsing.arguments import checked
from asyncengine.server.parsing.machine import Machine
from asyncengine.server.parsing.parser import CallRules

_MESSAGE = "<|message|>"
_BEGINNINGS = ("<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_WHOLE_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)[\s<]")


class Harmony(Machine):
    """Analysis is reasoning; a message to a function is a call; all others are content."""

    ends = ("<|end|>", "<|return|>", "<|call|>")
    triggers = (*_BEGINNINGS, *ends)
    markers = (*triggers, _MESSAGE, "<|constrain|>")

    def __init__(self, *, calls: bool = True, rules: CallRules | None = None) -> None:
        """Without ``calls``, messages to functions are content as well."""
        super().__init__(rules=rules)
        self._takes_calls = calls
        self._kind = "content"
        self._state = self._begin

    def _begin(self) -> bool:
        """The prompt has begun a message: its header goes on, with a recipient or a channel."""
        starts = [self.starts(marker) for marker in (*_BEGINNINGS, " to=")]
        if any(starts):
            self._state = self._in_header
        elif None in starts:
            return False
        else:
            self._state = self._in_body
        return True

    def _in_header(self) -> bool:
        head = self.head()
        end = head.find(_MESSAGE)
        if end < 0:
            if not self.head_is_whole():
                return False
            if self._ended:
                return self._cut_header(head)
            self._kind, self._state = "content", self._in_raw_header
            return True
        header = head[:end]
        self._at += end + len(_MESSAGE)
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient and recipient[1].startswith(_FUNCTIONS) and self._takes_calls:
            self._kind = "call"
            self.open_call(recipient[1].removeprefix(_FUNCTIONS), "")
        else:
            self._kind = "reasoning" if channel and channel[1] == "analysis" else "content"
        self._state = self._in_body
        return True

    def _cut_header(self, header: str) -> bool:
        """The output ended in a header, which is no text, and may have the name of a function."""
        self._at = len(self._text)
        named = _WHOLE_RECIPIENT.search(header)
        if named and self._is_cut and self._takes_calls:
            self.open_call(named[1], "")
            self.cut_call()
        self._dropped = self._dropped or " to=" in header
        self._kind, self._state = "content", self._in_body
        return False

    def _in_raw_header(self) -> bool:
        """Give up a header that is too long for one: its first character is content, and the text behind it too."""
        self._take(self._text[self._at])
        self._at += 1
        self._state = self._in_body
        return True

    def _in_body(self) -> bool:
        found = self._search.search(self._text, self._at)
        stop = found.start() if found else self._cut(self._partial, self._longest)
        self._take(self._text[self._at : stop])
        self._at = stop
        if self._kind == "call" and (found or self._ended):
            self._end_call(is_whole=found is not None)
        if found is None:
            return False
        if found.group() in self.ends:
            self._at = found.end()
            self._state = self._between
        else:
            self._state = self._in_header
        return True

    def _end_call(self, *, is_whole: bool) -> None:
        """The body of a message to a function has ended; its end has no marker where the output ends as well."""
        self._kind = "content"
        assert self._call is not None
        written = "".join(self._call.arguments)
        if is_whole or (checked(written) is not None and (written or not self._is_cut)):
            self.close_call()
        else:
            self.cut_call()

    def _between(self) -> bool:
        """After a message comes another one."""
        start = self.skip_blanks()
        if start < 0:
            return False
        self._at = start
        starts = [self.starts(marker) for marker in _BEGINNINGS]
        if any(starts):
            self._state = self._in_header
        elif None in starts:
            return False
        else:
            self._kind, self._state = "content", self._in_body
        return True

    def _take(self, text: str) -> None:
        if not text:
            return
        if self._kind == "content":
            self.say(text)
        elif self._kind == "reasoning":
            self._out.reasoning += text
        else:
            self.argue(text)
