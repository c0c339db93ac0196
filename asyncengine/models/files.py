"""Files of a model directory, which is untrusted: kind and size are checked before a file is opened.

Imports nothing heavy, so that the tokenizer's files can be read with it as well.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any

from asyncengine.errors import ModelError, ModelNotFoundError

MAX_CONFIG_BYTES = 1 << 20
"""Largest config.json and generation_config.json; those of real models have a few kilobytes."""


class _Excerpt(reprlib.Repr):
    """repr of a value from a file: a short one, whatever its length and depth."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = 80


excerpt = _Excerpt().repr


def checked_size(path: Path, max_bytes: int | None = None) -> int:
    """Bytes of ``path``. Raises ModelError unless it is a regular file of at most ``max_bytes``.

    To open a FIFO would wait for ever, and devices may have no end. Links are followed: the hub's cache consists of
    them.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as e:
        raise ModelError(f"cannot read {path}: {e}") from e
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path} is not a regular file")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ModelError(f"{path} has {status.st_size:,} bytes; at most {max_bytes:,} are read")
    return status.st_size


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises ModelNotFoundError if there is none, ModelError for a wrong one."""
    path = directory / "config.json"
    if not os.path.lexists(path):
        raise ModelNotFoundError(f"{directory} has no config.json: it is not a model directory")
    return read_json(path)


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in ``path``; raises ModelError if it is not one, or larger than ``max_bytes``."""
    checked_size(path, max_bytes)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ModelError(f"cannot read {path}: it is nested too deeply") from None
    except (OSError, ValueError) as e:
        raise ModelError(f"cannot read {path}: {e}") from e
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def read_optional_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """``read_json``, or an empty object if there is nothing of that name."""
    return read_json(path, max_bytes) if os.path.lexists(path) else {}
