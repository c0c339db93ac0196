"""Buckets: the sizes of step that graphs are captured for."""

from __future__ import annotations

from typing import NamedTuple


class Bucket(NamedTuple):
    """Steps of at most this many rows and tokens."""

    max_rows: int
    max_tokens: int
    single_token_rows: bool
    """Only for steps whose every row has one token."""


# Rows of a mixed step beyond which all of max_num_seqs are assumed: rows cost little but their logits.
_MIXED_ROWS = 64


def choose_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> list[Bucket]:
    """Ascending; the last one fits every step. Steps are at most a fifth larger than needed, from 64 tokens on."""
    decode = [Bucket(n, n, True) for n in _sizes(max_num_seqs, first=1)]
    mixed = {
        Bucket(min(rows, tokens, max_num_seqs), tokens, False)
        for tokens in _sizes(max_num_batched_tokens, first=8)
        for rows in (_MIXED_ROWS, max_num_seqs)
    }
    return sorted([*decode, *mixed], key=lambda b: (b.max_tokens, not b.single_token_rows, b.max_rows))


def token_buckets(buckets: list[Bucket]) -> list[int]:
    """Token counts of the buckets in which prompts are computed, ascending."""
    return sorted({b.max_tokens for b in buckets if not b.single_token_rows})


def _sizes(largest: int, first: int) -> list[int]:
    """Powers of two up to 16, then four or more sizes between one power of two and the next."""
    sizes, size = [], first
    while size < largest:
        sizes.append(size)
        size += max(size if size < 16 else 8, (1 << (size.bit_length() - 1)) // 4)
    return [*sizes, largest]
