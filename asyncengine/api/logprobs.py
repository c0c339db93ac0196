"""Log probabilities of tokens, as an output has them."""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload


def record_words(others: int) -> int:
    """Return the words of a token's record: the header, the rank, and a token and its number for itself and each other
    token."""
    return 2 + 2 * (1 + others)


class LogProb(NamedTuple):
    """Log probability of a token at one place of a sequence."""

    token_id: int
    logprob: float
    """Natural logarithm of its probability; -inf for a token that cannot come."""


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Log probabilities at the place of a sampled token."""

    token_id: int
    logprob: float
    rank: int
    """1 and how many tokens are more probable."""
    top: tuple[LogProb, ...] = ()
    """The most probable tokens, the most probable first; the lower id first of equals."""
    named: tuple[LogProb, ...] = ()
    """Log probabilities of the tokens in SamplingParams.logprob_token_ids, in that order."""


class LogProbs(Sequence[TokenLogProbs]):
    """Log probabilities of consecutive tokens. Each is decoded when it is looked at: most are read once, or never."""

    __slots__ = ("_num_named", "_num_top", "_records")

    def __init__(self, records: Sequence[bytes], num_top: int, num_named: int) -> None:
        """``records`` as ``csrc/core/step_output.h`` says, of which the first ``num_top`` and the named ones count."""
        self._records = records
        self._num_top = num_top
        self._num_named = num_named

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> TokenLogProbs: ...
    @overload
    def __getitem__(self, index: slice) -> LogProbs: ...
    def __getitem__(self, index: int | slice) -> TokenLogProbs | LogProbs:
        if isinstance(index, slice):
            return LogProbs(self._records[index], self._num_top, self._num_named)
        record = self._records[index]
        (rank,) = struct.unpack_from("<i", record)
        (token, logprob), *others = (LogProb(*pair) for pair in struct.iter_unpack("<if", record[4:]))
        top = len(others) - self._num_named
        return TokenLogProbs(token, logprob, rank, tuple(others[: min(top, self._num_top)]), tuple(others[top:]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


class PromptLogProbs(Sequence[TokenLogProbs | None]):
    """Log probabilities of a prompt's tokens, of which the first ones have none. They are decoded like LogProbs."""

    __slots__ = ("_found", "_missing")

    def __init__(self, missing: int, found: LogProbs) -> None:
        self._missing = missing
        self._found = found

    def __len__(self) -> int:
        return self._missing + len(self._found)

    @overload
    def __getitem__(self, index: int) -> TokenLogProbs | None: ...
    @overload
    def __getitem__(self, index: slice) -> PromptLogProbs | list[TokenLogProbs | None]: ...
    def __getitem__(self, index: int | slice) -> TokenLogProbs | PromptLogProbs | list[TokenLogProbs | None] | None:
        if isinstance(index, slice):
            first, stop, step = index.indices(len(self))
            if step != 1:
                return [self[i] for i in range(first, stop, step)]
            found = self._found[max(0, first - self._missing) : max(0, stop - self._missing)]
            return PromptLogProbs(max(0, min(stop, self._missing) - first), found)
        place = range(len(self))[index]  # IndexError
        return None if place < self._missing else self._found[place - self._missing]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))
