"""Settings of a quantised checkpoint: quantization_config of config.json, with typed access.

Names of modules may be given as regular expressions. They come from a file that nobody vouches for, so that only
expressions are taken whose time is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from asyncengine.errors import UnsupportedModelError
from asyncengine.models.config import RawConfig
from asyncengine.models.files import excerpt

MAX_NAMES = 1 << 15
"""Most entries of a list of modules. A mixture may name each of its experts."""
MAX_NAME_LENGTH = 256
MAX_PATTERNS = 256
_MOST_REPEATS, _MOST_CHOICES = 4, 16
_ESCAPED = re.compile(r"\\[.\\dw$^|()+*?\[\]{}/_-]")
_REFUSED = re.compile(r"\\|\{|\)\s*[*+?]|\(\?(?![:!=])|[*+?][*+]")
"""Backreferences, counted repeats, repeats of groups, and groups of other kinds: an expression without them tries a
number of ways that grows with the power of its repeats."""


def compile_pattern(text: str, source: str) -> re.Pattern[str]:
    """A regular expression for names of modules. Raises UnsupportedModelError for one whose time is not bounded."""
    bare = re.sub(r"\[[^\]]*\]", "x", _ESCAPED.sub("x", text))
    repeats = sum(bare.count(sign) for sign in "*+?") - len(re.findall(r"\(\?", bare))
    if len(text) > MAX_NAME_LENGTH or _REFUSED.search(bare) or repeats > _MOST_REPEATS:
        raise UnsupportedModelError(f"{source}: the expression {excerpt(text)} for names of modules is not supported")
    if bare.count("|") > _MOST_CHOICES or bare.count("(") > _MOST_REPEATS:
        raise UnsupportedModelError(f"{source}: the expression {excerpt(text)} for names of modules is not supported")
    try:
        return re.compile(text)
    except re.error as e:
        raise UnsupportedModelError(f"{source}: {excerpt(text)} is no regular expression: {e}") from e


def spellings(module: str) -> Iterator[str]:
    """Yield the names that a module may have in a checkpoint, among them those of a language model within another."""
    bare = module.removeprefix("model.").removeprefix("transformer.")
    yield from (module, bare, f"model.language_model.{bare}", f"language_model.{module}", f"language_model.{bare}")


class ModuleNames:
    """A list of modules by names, parts of names, or expressions behind "re:"."""

    def __init__(self, names: list[Any], source: str, *, parts: bool = False) -> None:
        """``parts``: an entry means the modules below it too, and one without a dot each module of that name."""
        if len(names) > MAX_NAMES or not all(isinstance(n, str) and len(n) <= MAX_NAME_LENGTH for n in names):
            raise UnsupportedModelError(
                f"{source}: at most {MAX_NAMES} names of modules are read, found {excerpt(names)}"
            )
        expressions = [name[3:] for name in names if name.startswith("re:")]
        if len(expressions) > MAX_PATTERNS:
            raise UnsupportedModelError(f"{source}: at most {MAX_PATTERNS} expressions are read")
        self._names = frozenset(names)
        self._patterns = [compile_pattern(text, source) for text in expressions]
        self._parts = parts

    def __contains__(self, module: str) -> bool:
        for name in spellings(module):
            if name in self._names or any(pattern.match(name) for pattern in self._patterns):
                return True
            pieces = name.split(".")
            if self._parts and any(
                ".".join(pieces[first:behind]) in self._names
                for first in range(len(pieces))
                for behind in range(first + 1, len(pieces) + 1)
            ):
                return True
        return False


class QuantSettings(RawConfig):
    """The values of quantization_config, or of a part of it."""

    def part(self, key: str, values: Any) -> QuantSettings:
        """The settings within a value of these. Raises UnsupportedModelError if it is no object."""
        if not isinstance(values, dict):
            raise self.unsupported(f"{key} = {excerpt(values)}")
        return QuantSettings(values, f"{self.source}, {key}")

    def only(self, *known: str) -> None:
        """Raise UnsupportedModelError for a key that is set and not known."""
        for key in self.values.keys() - set(known):
            if self.values[key] is not None:
                raise self.unsupported(f"the key {excerpt(key)} = {excerpt(self.values[key])}")

    def one_of(self, key: str, values: Collection[Any], default: Any = None) -> Any:
        """The value of a key. Raises UnsupportedModelError for one that is not implemented, by name."""
        found = self.values.get(key)
        found = default if found is None else found
        if not any(type(found) is type(value) and found == value for value in values):
            raise self.unsupported(f"{key} = {excerpt(found)}")
        return found

    def names(self, key: str, *, parts: bool = False) -> ModuleNames:
        """The modules that a key lists."""
        return ModuleNames(self.get(key, list, []), f"{self.source}: {key}", parts=parts)

    def group_size(self, key: str, default: int | None = None) -> int | None:
        """Columns of a group, None for all of a row. Raises UnsupportedModelError for a size without kernels."""
        found = self.get(key, int, -1 if default is None else default)
        if found == -1:
            return None
        if not 16 <= found <= 1 << 16 or found & (found - 1):
            raise self.unsupported(f"{key} = {excerpt(found)}, which is no power of two from 16, nor -1")
        return int(found)
