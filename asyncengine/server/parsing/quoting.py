"""A Lark grammar of a text, made into the grammar of that text within a string of a tool call.

Within such a string a quote and a backslash have a backslash before them, and every other character is itself: new
lines too, which the parsers of calls take though JSON does not. So the quoted grammar has the rules of the given one,
and every literal and expression in it matches the escaped form of its text.

llguidance looks one byte ahead where a terminal may end. Both escapes begin with the same byte, so it cannot leave a
terminal that may go on with one of them for a terminal that begins with the other one. Grammars in which two such
terminals are neighbours in a rule are refused. Where they meet in another way, the grammar takes fewer texts than it
says, and never others.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from itertools import pairwise

_SPECIAL = frozenset('"\\')
"""Characters with an escape."""
_PLAIN = r'[^"\\]'
_NONE = frozenset[str]()
_Sets = tuple[frozenset[str], frozenset[str]]
"""Special characters that a terminal may begin with, and those that may come in it later."""
_NO_SETS: _Sets = (_NONE, _NONE)
_KINDS = {"d": _NONE, "w": _NONE, "s": _NONE, "D": _SPECIAL, "W": _SPECIAL, "S": _SPECIAL}
"""Special characters in the classes that a letter names."""
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_COMMON = {
    "DIGIT": r"[0-9]",
    "HEXDIGIT": r"[0-9a-fA-F]",
    "INT": r"[0-9]+",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+\-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?",
    "SIGNED_FLOAT": r"[+\-]?(?:[0-9]+[eE][+\-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?)",
    "NUMBER": r"[0-9]+|[0-9]+[eE][+\-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+\-]?(?:[0-9]+|[0-9]+[eE][+\-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?)",
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "LETTER": r"[a-zA-Z]",
    "WORD": r"[a-zA-Z]+",
    "CNAME": r"[_a-zA-Z][_a-zA-Z0-9]*",
    "ESCAPED_STRING": r'"(?:[^"\\]|\\[^\n])*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
}
"""Terminals that grammars import."""
_STRING = r'"(?:[^"\\\n]|\\.)*"'
_TOKEN = re.compile(
    r"(?P<comment>//[^\n]*|\#[^\n]*)"
    rf"|(?P<range>{_STRING}\s*\.\.\s*{_STRING})"
    rf"|(?P<string>{_STRING}i?)"
    r"|(?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)"
    r"|(?P<import>%import\s+common\s*(?:\.\s*(?P<one>\w+)(?:\s*->\s*(?P<as>\w+))?|\((?P<many>[\w\s,]*)\)))"
    r"|(?P<ignore>%ignore\b)"
    r"|(?P<foreign>%\w*|<[^\n]*)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<rest>\s+|[^\s\"/%<#])"
)
_QUANTIFIER = re.compile(r"\{\d+(?:,\d*)?\}|\{,\d+\}")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{([0-9a-fA-F]{1,8})\}")
_GROUP = re.compile(r"\((?:\?(?::|P?<[A-Za-z_]\w*>))?(?!\?)")
_FLAGS = re.compile(r"\(\?([ims]+)\)")
_META = frozenset(r"\.+*?()|[]{}^$#&-~/")


class QuotingError(ValueError):
    """The grammar has something that has no quoted form here. The message names it."""


def quoted_text(text: str) -> str:
    """``text`` as it stands between the quotes of a string."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


@lru_cache(maxsize=32)
def quoted_lark(grammar: str) -> str:
    """The grammar of the escaped texts of ``grammar``. Raises QuotingError."""
    return _Grammar().quoted(grammar)


class _Grammar:
    """Reads a grammar token by token."""

    def __init__(self) -> None:
        self._sets: dict[str, _Sets] = {}
        """Character sets of terminals by their name, and of literals and expressions by their text."""
        self._row: list[str] = []
        """Terminals, names and signs in their order."""

    def quoted(self, grammar: str) -> str:
        out, at = [], 0
        while at < len(grammar):
            found = _TOKEN.match(grammar, at)
            if found is None:
                raise QuotingError(f"unexpected text at {grammar[at : at + 20]!r}")
            at = found.end()
            out.append(self._token(found))
            if found.lastgroup != "comment" and not found.group().isspace():
                self._row.append(found.group())
        self._name_terminals()
        self._check_neighbours()
        return "".join(out)

    def _name_terminals(self) -> None:
        """A terminal may begin with whatever its parts may begin with, and have all of that later."""
        for _ in range(2):  # a terminal may have parts that are defined behind it
            head = ""
            for token, after in pairwise([*self._row, ""]):
                if after == ":" and token.isupper():
                    head = token
                elif after == ":":
                    head = ""
                elif head and token in self._sets:
                    begins, later = self._sets.get(head, _NO_SETS)
                    more = self._sets[token]
                    self._sets[head] = (begins | more[0], later | more[0] | more[1])

    def _check_neighbours(self) -> None:
        in_rule, last = False, ""
        for token, after in pairwise([*self._row, ""]):
            if after == ":":
                in_rule, last = not token.isupper(), ""
            elif token in self._sets and in_rule:
                later, begins = self._sets.get(last, _NO_SETS)[1], self._sets[token][0]
                if any(a != b for a in later for b in begins):
                    raise QuotingError(
                        f"{last:.60} is followed by {token:.60}: text between quotes must be one terminal with its "
                        "quotes, or exclude quotes and backslashes"
                    )
                last = token
            elif token == "|" or token.isidentifier():
                last = ""

    def _token(self, found: re.Match[str]) -> str:
        token = found.group()
        match found.lastgroup:
            case "comment":
                return ""
            case "range":
                first, last = (_string(text) for text in re.findall(_STRING, token))
                if len(first) != 1 or len(last) != 1:
                    raise QuotingError(f"a range of more than characters: {token!r:.60}")
                return self._expression(token, f"[{_escaped(first)}-{_escaped(last)}]", "")
            case "string" if token.endswith("i"):
                return self._expression(token, "".join(map(_escaped, _string(token[:-1]))), "i")
            case "string":
                text = _string(token)
                self._sets[token] = (_SPECIAL & set(text[:1]), _NONE)
                return json.dumps(quoted_text(text), ensure_ascii=False)
            case "regex":
                body, _, flags = token[1:].rpartition("/")
                return self._expression(token, body, flags)
            case "foreign":
                raise QuotingError(f"{token!r:.60} is not supported in the grammar of a tool's input")
            case "ignore" | "name" | "rest":
                return token
        if found["many"] is not None:
            names = [name.strip() for name in found["many"].split(",")]
            return "\n".join(self._import(name, name) for name in names if name)
        return self._import(found["one"], found["as"] or found["one"])

    def _import(self, name: str, own: str) -> str:
        if name not in _COMMON:
            raise QuotingError(f"common.{name} is not known")
        return f"{own}: {self._expression(own, _COMMON[name], '')}"

    def _expression(self, token: str, body: str, flags: str) -> str:
        """The quoted form of ``/body/flags``, which is what ``token`` says."""
        if found := _FLAGS.match(body):
            body, flags = body[found.end() :], flags + found[1]
        if "x" in flags:
            raise QuotingError("the flag x of an expression is not supported")
        read = _Expression(body, dot=r"[\x00-\x{10FFFF}]" if "s" in flags else r"[^\n]")
        quoted = f"/{read.quoted()}/{'i' if 'i' in flags else ''}"
        self._sets[token] = (frozenset(read.begins), frozenset(read.later))
        return quoted


def _string(token: str) -> str:
    try:
        value = json.loads(token, strict=False)
    except ValueError:
        raise QuotingError(f"{token!r:.60} has an unknown escape") from None
    return str(value)


def _escaped(char: str) -> str:
    """An expression for one character, itself."""
    if char < " ":
        return f"\\x{ord(char):02x}"
    return f"\\{char}" if char in _META else char


class _Expression:
    """Reads an expression character by character; each that may match a special character becomes a group."""

    def __init__(self, text: str, dot: str) -> None:
        """``dot``: the characters that a dot matches."""
        self._text = text
        self._dot = dot
        self._at = 0
        self._open = [True]
        """Flags of the expression and each open group: True if nothing need come before its next character."""
        self.begins: set[str] = set()
        """Special characters that a match may begin with."""
        self.later: set[str] = set()
        """Special characters that may come in a match after its first character."""

    def quoted(self) -> str:
        out = []
        while self._at < len(self._text):
            out.append(self._next())
        return "".join(out)

    def _next(self) -> str:
        char = self._text[self._at]
        if char in "^$":
            raise self._unknown()
        if char == "(":
            found = _GROUP.match(self._text, self._at)
            if found is None:
                raise self._unknown()
            self._at = found.end()
            self._open.append(self._open[-1])
            return "(?:"
        if char == "{" and (found := _QUANTIFIER.match(self._text, self._at)):
            self._at = found.end()
            return found.group()
        if char == "[":
            return self._class()
        if char == "\\":
            return self._escape()
        self._at += 1
        match char:
            case ".":
                return self._one(self._dot, _SPECIAL)
            case ")":
                return self._group_end()
            case "|":
                self._open[-1] = self._open[-2] if len(self._open) > 1 else True
                return char
        return char if char in "*+?" else self._literal(char)

    def _group_end(self) -> str:
        if len(self._open) < 2:
            raise QuotingError(f"unbalanced brackets in {self._text!r:.60}")
        self._open.pop()
        self._open[-1] = self._open[-1] and self._is_optional()
        return ")"

    def _is_optional(self) -> bool:
        """Return whether the text goes on with a quantifier that allows no repetition."""
        return self._text.startswith(("*", "?", "{0", "{,"), self._at)

    def _escape(self) -> str:
        kind = self._text[self._at + 1 : self._at + 2]
        if kind in _KINDS:
            self._at += 2
            return self._one(f"\\{kind}", _KINDS[kind])
        return self._literal(self._escaped_char())

    def _escaped_char(self) -> str:
        """The character of the escape that comes next."""
        if found := _HEX.match(self._text, self._at + 1):
            self._at = found.end()
            number = int(next(filter(None, found.groups())), 16)
            if number > 0x10FFFF:
                raise self._unknown()
            return chr(number)
        char = self._text[self._at + 1 : self._at + 2]
        if char in _CONTROLS or (char and not char.isalnum()):
            self._at += 2
            return _CONTROLS.get(char, char)
        raise self._unknown()

    def _class(self) -> str:
        begun = self._at
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        special: frozenset[str] = _NONE
        first = True
        while first or not self._text.startswith("]", self._at):
            first = False
            special |= self._member()
        self._at += 1
        return self._one(self._text[begun : self._at], _SPECIAL - special if negated else special)

    def _member(self) -> frozenset[str]:
        """The special characters in the next member of a class."""
        if self._text.startswith(("[", "&&", "--", "~~"), self._at):
            raise self._unknown()
        if self._text.startswith("\\", self._at) and (kind := self._text[self._at + 1 : self._at + 2]) in _KINDS:
            self._at += 2
            return _KINDS[kind]
        first = last = self._member_char()
        if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
            self._at += 1
            last = self._member_char()
        return frozenset(char for char in _SPECIAL if first <= char <= last)

    def _member_char(self) -> str:
        if self._text.startswith("\\", self._at):
            return self._escaped_char()
        if self._at >= len(self._text):
            raise QuotingError(f"a class of characters does not end: {self._text!r:.60}")
        self._at += 1
        return self._text[self._at - 1]

    def _literal(self, char: str) -> str:
        return self._one(_escaped(char), _SPECIAL & {char})

    def _one(self, plain: str, special: frozenset[str]) -> str:
        """An expression for one character: ``plain`` without the special ones, or the escape of one of these."""
        repeats = self._text.startswith(("*", "+", "{"), self._at)
        if self._open[-1]:
            self.begins |= special
        if not self._open[-1] or repeats or len(self._open) > 1:
            self.later |= special
        self._open[-1] = self._open[-1] and self._is_optional()
        if not special:
            return plain
        escapes = rf"\\[{''.join(map(_escaped, sorted(special)))}]"
        return f"(?:{escapes})" if plain in map(_escaped, _SPECIAL) else f"(?:[{plain}&&{_PLAIN}]|{escapes})"

    def _unknown(self) -> QuotingError:
        rest = self._text[self._at : self._at + 20]
        return QuotingError(f"{rest!r} is not supported in an expression of a tool's grammar")
