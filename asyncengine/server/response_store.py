"""Responses that /v1/responses keeps for later requests: in memory, up to a count and a size, each for its owner."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_SIZE = 2 * 2**20
"""Bytes of a response and its items: reading them takes some milliseconds of the event loop's time."""
_OVERHEAD, _ITEM_OVERHEAD = 512, 256
"""Bytes of an entry and of an item beside their documents: their objects, their keys and their places."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The document and the items as JSON, so that their size is known."""

    document: bytes
    """The response as it was answered."""
    inputs: tuple[bytes, ...] = ()
    """The items that it was made from, those of earlier requests first. Instructions are none of them."""
    outputs: Mapping[str, bytes] = field(default_factory=dict)
    """Items of the response itself, by their ids."""

    @property
    def items(self) -> tuple[bytes, ...]:
        """The conversation with which a next request goes on."""
        return (*self.inputs, *self.outputs.values())

    @property
    def size(self) -> int:
        items = self.items
        return len(self.document) + sum(map(len, items)) + len(items) * _ITEM_OVERHEAD + _OVERHEAD


class ResponseStore:
    """The least recently used responses go first, whoever owns them."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.held_bytes = 0
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._places: dict[tuple[str, str], tuple[str, str]] = {}  # of output items, by owner and id: their responses

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, owner: str) -> OwnResponses:
        return OwnResponses(self, owner)

    def takes(self, size: int) -> bool:
        """Return whether the store could keep a response of so many bytes at all."""
        return self._max_count > 0 and size <= min(self._max_bytes, MAX_SIZE)

    def put(self, key: tuple[str, str], response: StoredResponse) -> None:
        self.pop(key)
        self._entries[key] = response
        self._places |= dict.fromkeys([(key[0], item) for item in response.outputs], key)
        self.held_bytes += response.size
        while len(self._entries) > self._max_count or self.held_bytes > self._max_bytes:
            self.pop(next(iter(self._entries)))

    def get(self, key: tuple[str, str]) -> StoredResponse | None:
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def pop(self, key: tuple[str, str]) -> StoredResponse | None:
        response = self._entries.pop(key, None)
        if response is not None:
            self.held_bytes -= response.size
            for item in response.outputs:
                del self._places[key[0], item]
        return response

    def item(self, owner: str, item_id: str) -> bytes | None:
        """An item of the output of a response of this owner."""
        place = self._places.get((owner, item_id))
        response = None if place is None else self.get(place)
        return None if response is None else response.outputs[item_id]


@dataclass(frozen=True, slots=True)
class OwnResponses:
    """Responses of one owner in a store."""

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

    def item(self, item_id: str) -> bytes | None:
        return self.store.item(self.owner, item_id)
