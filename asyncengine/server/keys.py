"""API keys, and what each allows its requests."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from asyncengine.errors import ConfigError

PRIORITIES = {"high": -10, "normal": 0, "low": 10}
"""Classes of keys. Ten classes are made up for by waiting ten times EngineConfig.priority_ageing_s."""
_HIGHEST = 1000


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it stands in a header."""

    key: bytes
    priority: int | None = None
    """Priority of the key's requests, which may ask for less urgency and not for more; None: requests choose it."""


def read_keys(path: str) -> list[ApiKey]:
    """The keys of a file: one a line, with attributes such as priority=low behind it. Raises ConfigError."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot read api_key_file: {exc}") from None
    found = [_parse(words, i + 1) for i, line in enumerate(lines) if (words := line.split())]
    if not found:
        raise ConfigError(f"api_key_file {path} holds no key")
    return found


def check_key(key: bytes) -> None:
    """Raises ConfigError for a key that no header could bring."""
    if not key or key != key.strip() or any(byte < 32 or byte == 127 for byte in key):
        raise ConfigError(
            "api_key must not be empty, begin or end with white space, or hold control characters: "
            "no header could bring it"
        )


def _parse(words: list[bytes], line: int) -> ApiKey:
    """The error names the line and no word of it: it may be part of a key."""
    key, *attributes = words
    check_key(key)
    priority = None
    for attribute in attributes:
        name, _, value = attribute.decode(errors="replace").partition("=")
        if name != "priority" or priority is not None:
            raise ConfigError(f"api_key_file, line {line}: behind the key only one priority=CLASS may stand")
        priority = PRIORITIES.get(value)
        if priority is None and value.removeprefix("-").isdecimal() and value.isascii() and len(value) < 6:
            priority = int(value)
        if priority is None or abs(priority) > _HIGHEST:
            known = ", ".join(PRIORITIES)
            raise ConfigError(
                f"api_key_file, line {line}: priority must be one of {known} or an integer in [-{_HIGHEST}, {_HIGHEST}]"
            )
    return ApiKey(key, priority)


def digest_of(key: bytes) -> bytes:
    """Digest a key. All digests have one length, and the engine's records hold no secret."""
    return hashlib.blake2b(key, digest_size=16).digest()
