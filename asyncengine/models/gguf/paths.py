"""Paths of GGUF files. Imports nothing heavy."""

from __future__ import annotations

import re
from pathlib import Path

from asyncengine.errors import ModelError
from asyncengine.models.files import excerpt

SUFFIX = ".gguf"
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Name of one of several files that belong together."""


def is_gguf(path: Path) -> bool:
    """Return whether a model's path names a GGUF file, and no directory."""
    return path.suffix == SUFFIX and not path.is_dir()


def find_gguf(directory: Path) -> Path | None:
    """The GGUF file of a directory without a config.json, the first of numbered ones; None if it has none.

    Raises ModelError if it has several, among which the user is to choose.
    """
    names = sorted(path.name for path in directory.iterdir() if path.suffix == SUFFIX)
    firsts = [name for name in names if (part := PART.fullmatch(name)) is None or int(part[2]) == 1]
    if not firsts or (directory / "config.json").exists():
        return None
    if len(firsts) > 1:
        raise ModelError(f"{directory} has several GGUF files: name one of {', '.join(map(excerpt, firsts[:8]))}")
    return directory / firsts[0]
