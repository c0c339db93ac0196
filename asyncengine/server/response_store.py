"""Responses that /v1/responses keeps for later requests: in memory, up to a count and a size, each for its owner."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_SIZE = 2 * 2**20
"""Bytes of a response and its items: reading them takes some milliseconds of the event loop's time."""
_OVERHEAD = 512
"""Bytes of an entry beside its documents: its objects, its key and its place."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Both as JSON, so that their size is known."""

    document: bytes
    """As it was answered."""
    items: bytes
    """The items of the conversation, which the next request goes on with: the input, and the output behind it."""
    num_inputs: int
    """How many of them are the input, with those of earlier requests."""

    @property
    def size(self) -> int:
        return len(self.document) + len(self.items) + _OVERHEAD


class ResponseStore:
    """The least recently used responses go first, whoever owns them."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.held_bytes = 0
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, owner: str) -> OwnResponses:
        return OwnResponses(self, owner)

    def takes(self, size: int) -> bool:
        """Whether a response of so many bytes could be kept at all."""
        return self._max_count > 0 and size <= min(self._max_bytes, MAX_SIZE)

    def put(self, key: tuple[str, str], response: StoredResponse) -> None:
        self.pop(key)
        self._entries[key] = response
        self.held_bytes += response.size
        while len(self._entries) > self._max_count or self.held_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.held_bytes -= oldest.size

    def get(self, key: tuple[str, str]) -> StoredResponse | None:
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def pop(self, key: tuple[str, str]) -> StoredResponse | None:
        response = self._entries.pop(key, None)
        if response is not None:
            self.held_bytes -= response.size
        return response


@dataclass(frozen=True, slots=True)
class OwnResponses:
    """What one owner sees of a store."""

    store: ResponseStore
    owner: str

    def takes(self, size: int) -> bool:
        return self.store.takes(size)

    def put(self, response_id: str, response: StoredResponse) -> None:
        self.store.put((self.owner, response_id), response)

    def get(self, response_id: str) -> StoredResponse | None:
        return self.store.get((self.owner, response_id))

    def pop(self, response_id: str) -> StoredResponse | None:
        return self.store.pop((self.owner, response_id))
