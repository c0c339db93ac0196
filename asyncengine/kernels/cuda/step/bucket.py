"""A bucket: the size of step that a graph is captured for."""

from __future__ import annotations

from typing import NamedTuple

ANY_CONTEXT = 2**31 - 1


class Bucket(NamedTuple):
    """Steps of at most this many rows and tokens."""

    max_rows: int
    max_tokens: int
    single_token_rows: bool
    """True: the bucket is only for steps whose every row has one token."""
    max_context: int = ANY_CONTEXT
    """The bucket is only for steps whose rows have at most this many tokens before their new ones."""
    lanes: int = 0
    """The bucket is only for steps with so many lanes for host rows (csrc/core/hybrid/host_rows.h), the last of
    max_tokens."""
