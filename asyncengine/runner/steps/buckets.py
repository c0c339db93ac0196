"""Choice of the buckets of steps."""

from __future__ import annotations

from collections.abc import Callable

from asyncengine.kernels.cuda.step.bucket import ANY_CONTEXT, Bucket

__all__ = ["ANY_CONTEXT", "Bucket", "choose_buckets", "token_buckets"]

# Rows of a mixed step beyond which all of max_num_seqs are assumed: rows cost little but their logits.
_MIXED_ROWS = 64
# Tokens of a mixed step up to which each is a row of its own to attention.
_FEW_TOKENS = 32


def choose_buckets(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    short_context: Callable[[int], int],
    short_mixed_context: Callable[[int], int],
    lanes: int = 0,
) -> list[Bucket]:
    """Ascending; the last one fits every step. Steps are at most a fifth larger than needed, from 64 tokens on.

    A decode step of n rows has a bucket of its own, with a max_context, while no row has more tokens than
    ``short_context(n)``, and so has a mixed step of n tokens, new ones included, if they are few.

    With ``lanes`` each bucket that has room for them comes twice, without and with lanes; the last one that has lanes
    fits every step that has some. The largest step has room for more tokens than they are.
    """
    decode = []
    for n in _sizes(max_num_seqs, first=1):
        if short := short_context(n):
            decode.append(Bucket(n, n, True, short))
        if short < max_model_len:
            decode.append(Bucket(n, n, True))
    mixed = {
        Bucket(min(rows, tokens, max_num_seqs), tokens, False)
        for tokens in _sizes(max_num_batched_tokens, first=8)
        for rows in (_MIXED_ROWS, max_num_seqs)
    }
    few = [b for b in mixed if b.max_tokens <= _FEW_TOKENS]
    limits = [short_mixed_context(b.max_tokens) - b.max_tokens for b in few]
    mixed |= {b._replace(max_context=limit) for b, limit in zip(few, limits, strict=True) if limit > 0}
    plain = [*decode, *mixed]
    with_lanes = [b._replace(lanes=lanes) for b in plain if 0 < lanes < b.max_tokens]
    return sorted(
        [*plain, *with_lanes],
        key=lambda b: (b.max_tokens, not b.single_token_rows, b.max_rows, b.max_context, b.lanes),
    )


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
