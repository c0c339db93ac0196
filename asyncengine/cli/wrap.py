"""Text that comes in pieces, broken at words where a terminal's line ends."""

from __future__ import annotations

import unicodedata


class Wrap:
    """Breaks lines between words. The last word of a piece is held back until it is known to be whole."""

    def __init__(self, columns: int) -> None:
        """``columns`` of the terminal; a longer word is printed as it is, and the terminal breaks it."""
        self._columns = columns
        self._column = 0
        self._space = ""
        self._word = ""
        self._width = 0  # of the word
        self._goes_on = False  # the word began in text that was printed

    def feed(self, text: str) -> str:
        """The part of all text so far that can be printed now."""
        printed: list[str] = []
        for character in text:
            width = _width(character)
            if character.isspace():
                printed.append(self._take_word())
                self._goes_on = False
                if character == "\n":
                    printed.append("\n")
                    self._column, self._space = 0, ""
                else:
                    self._space += character
                continue
            if width == 2:
                printed.append(self._take_word())  # scripts of wide characters have no spaces
            elif width and self._width >= self._columns:  # no line holds the word: its end need not be awaited
                printed.append(self._take_word())
                self._goes_on = True
            self._word += character
            self._width += width
            if width == 2:
                printed.append(self._take_word())
        return "".join(printed)

    def flush(self) -> str:
        """The text that was held back."""
        return self._take_word() + self._space

    def _take_word(self) -> str:
        if not self._word:
            return ""
        before = self._space
        if self._goes_on:
            self._column %= self._columns
        elif self._column + len(before) + self._width > self._columns and self._column:
            before = "\n"
            self._column = 0
        else:
            self._column += len(before)
        self._column += self._width
        word, self._word, self._space, self._width = before + self._word, "", "", 0
        self._goes_on = False
        return word


def _width(character: str) -> int:
    """Columns that a character takes."""
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
