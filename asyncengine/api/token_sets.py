"""A set of tokens that many prompts of a request share."""

from __future__ import annotations

from asyncengine.api.checks import integer, sequence

_LARGEST = 2**31 - 1


class TokenSet(tuple[int, ...]):
    """Token ids, each once, in the order that they were given. Its bitmap is made once for all prompts."""

    _bitmap: tuple[int, list[int]] | None = None

    @classmethod
    def checked(cls, name: str, value: object, limit: int) -> TokenSet:
        """Make a set of a list of at most ``limit`` ids, with repetitions. Raises InvalidRequestError that names
        ``name``."""
        if isinstance(value, TokenSet):
            return value
        items = sequence(name, value, limit, "tokens")
        # By the interpreter's own loops: half a million ids take some 30 ms.
        if set(map(type, items)) - {int} or min(items, default=0) < 0 or max(items, default=0) > _LARGEST:
            items = tuple(integer(name, item, 0, _LARGEST) for item in items)
        return cls(dict.fromkeys(items))

    def bitmap(self, vocab_size: int) -> list[int]:
        """Signed words of 32 bits; token t is bit t % 32 of word t // 32. Every token is below ``vocab_size``."""
        if self._bitmap is None or self._bitmap[0] != vocab_size:
            words = -(-vocab_size // 32)
            flags = bytearray(b"0") * (32 * words)
            for token in self:
                flags[-1 - token] = 49  # the digit 1
            packed = int(flags, 2).to_bytes(4 * words, "little")
            self._bitmap = vocab_size, memoryview(packed).cast("i").tolist()
        return self._bitmap[1]
