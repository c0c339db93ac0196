"""Events of the KV cache over ZeroMQ, in the wire format of vLLM, for routers that send a prompt where its prefix is.

A message has three frames: the topic, the batch's number as 8 bytes (big-endian), and a batch in MessagePack. A ROUTER
socket sends batches again to a subscriber that missed some. Each engine behind a server has its own sockets and
numbers, as ranks of vLLM do.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from hashlib import sha256
from types import TracebackType
from typing import Any

import msgspec

from asyncengine.api.stats import BlockChange
from asyncengine.errors import ConfigError
from asyncengine.server.config import ServerConfig
from asyncengine.server.engine_api import Engine

logger = logging.getLogger("asyncengine.server")

INTERVAL_S = 0.05
"""Time between two looks for changes."""
_MOST_CHANGES = 512
"""Changes of one engine in a batch: the event loop is held for some ms at most."""
_MOST_REPLAYED = 256
"""Messages that are sent again between two turns of the event loop."""
_MOST_QUEUED = 2000
"""Messages that wait for one subscriber. Further ones are lost to it, which it sees by their numbers."""
_KEPT_BATCHES = 10_000
_KEPT_BYTES = 64 * 2**20
_END = b"\xff" * 8
"""Number of the message that ends a replay."""


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Consecutive blocks of a prompt became known. ``token_ids`` are those of all of them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    """For each block: a digest of the cache_salt, in the first block of a prompt that has one."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    """Tokens that the layers of this group see; None: all."""


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks are no longer known in this memory."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """All that was stored before is no longer known."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events in their order. ``ts`` is in seconds since 1970."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int


class _Block:
    """A block that a prompt can find."""

    __slots__ = ("children", "digest", "groups", "on_host", "parent")

    def __init__(self, digest: bytes, parent: int | None, on_host: bool) -> None:
        self.digest = digest
        self.parent = parent
        self.on_host = on_host
        self.children: set[int] = set()
        self.groups: set[int] = set()
        """Window groups that have a block of their own for these tokens."""

    @property
    def name(self) -> int:
        return int.from_bytes(self.digest[-8:], "big")

    @property
    def medium(self) -> str:
        return "CPU" if self.on_host else "GPU"


class PrefixView:
    """The blocks that prompts find in one engine's prefix cache, as its changes tell.

    A block's hash is the last 8 bytes of a digest of all tokens up to its end and of the salt. All servers agree on it.
    A block whose beginning was evicted cannot be found: it is removed with its beginning.

    Layers with a window may form groups with blocks of their own, which have the hashes of group 0. A prompt begins
    with the longest chain in group 0 that has, in each other group, the last blocks that the token behind it sees.
    """

    def __init__(self, window: int = 0) -> None:
        """``window``: tokens that layers of window groups see."""
        self._window = window
        self._blocks: dict[int, _Block] = {}
        """By chain."""
        self._ends: dict[int, tuple[BlockStored, int]] = {}
        """For each group the event that may go on, and the chain that it ends with."""

    def __len__(self) -> int:
        return len(self._blocks)

    def events(self, changes: Sequence[BlockChange]) -> list[KVEvent]:
        """Return the events of these changes. Neighbours of one kind and group become one event."""
        events: list[KVEvent] = []
        self._ends.clear()
        for change in changes:
            goes_on = False
            match change.kind:
                case "stored":
                    goes_on = self._store_in_group(change, events) if change.group else self._store(change, events)
                case "moved":
                    self._move(change, events)
                case "removed" if change.group:
                    self._remove_from_group(change, events)
                case "removed":
                    self._remove(change.chain, events)
                case _:
                    events = [AllBlocksCleared()] if self._blocks else []
                    self._blocks.clear()
            if not goes_on:
                self._ends.clear()
        return events

    def _store(self, change: BlockChange, events: list[KVEvent]) -> bool:
        parent = None if change.is_first else self._blocks.get(change.parent)
        if parent is None and not change.is_first:
            return False  # no prompt can find it
        digest = sha256((parent.digest if parent else _root(change.parent)) + change.tokens).digest()
        block = _Block(digest, None if change.is_first else change.parent, change.on_host)
        self._blocks[change.chain] = block
        if parent:
            parent.children.add(change.chain)
        self._tell_stored(block, change, events)
        return True

    def _store_in_group(self, change: BlockChange, events: list[KVEvent]) -> bool:
        block = self._blocks.get(change.chain)
        if block is None:
            return False
        block.groups.add(change.group)
        self._tell_stored(block, change, events)
        return True

    def _tell_stored(self, block: _Block, change: BlockChange, events: list[KVEvent]) -> None:
        last, end = self._ends.get(change.group, (None, None))
        if last and end == block.parent and last.medium == block.medium:
            last.block_hashes.append(block.name)
            last.token_ids.extend(_tokens(change))
            if last.extra_keys is not None:
                last.extra_keys.append(None)
        else:
            last = self._stored(block, change)
            events.append(last)
        self._ends[change.group] = last, change.chain

    def _move(self, change: BlockChange, events: list[KVEvent]) -> None:
        block = self._blocks.get(change.chain)
        if block is None:
            return
        _removed(block, 0, events)
        block.on_host = change.on_host
        events.append(self._stored(block, change))

    def _remove_from_group(self, change: BlockChange, events: list[KVEvent]) -> None:
        block = self._blocks.get(change.chain)
        if block is not None:
            block.groups.remove(change.group)
            _removed(block, change.group, events)

    def _remove(self, chain: int, events: list[KVEvent]) -> None:
        block = self._blocks.get(chain)
        if block is not None and block.parent is not None:
            self._blocks[block.parent].children.discard(chain)
        lost = [chain]
        while lost:
            block = self._blocks.pop(lost.pop(), None)
            if block is not None:
                lost.extend(block.children)
                for group in (*sorted(block.groups), 0):
                    _removed(block, group, events)

    def _stored(self, block: _Block, change: BlockChange) -> BlockStored:
        tokens = _tokens(change)
        salted = change.is_first and change.parent != 0
        return BlockStored(
            block_hashes=[block.name],
            parent_block_hash=None if block.parent is None else self._blocks[block.parent].name,
            token_ids=tokens,
            block_size=len(tokens),
            lora_id=None,
            medium=block.medium,
            lora_name=None,
            extra_keys=[[f"{change.parent:016x}"]] if salted else None,
            group_idx=change.group,
            kv_cache_spec_kind="sliding_window" if change.group else "full_attention",
            kv_cache_spec_sliding_window=self._window if change.group else None,
        )


def _root(salt: int) -> bytes:
    return sha256(b"asyncengine" + salt.to_bytes(8, "little")).digest()


def _tokens(change: BlockChange) -> list[int]:
    return memoryview(change.tokens).cast("i").tolist()


def _removed(block: _Block, group: int, events: list[KVEvent]) -> None:
    """Removals in a row may change places: the last one of the group is looked for among them."""
    for last in reversed(events):
        if not isinstance(last, BlockRemoved):
            break
        if last.group_idx == group:
            if last.medium != block.medium:
                break
            last.block_hashes.append(block.name)
            return
    events.append(BlockRemoved([block.name], block.medium, group_idx=group))


class _Kept:
    """The last batches, for replay: their count and their bytes have limits."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def add(self, number: int, payload: bytes) -> None:
        self._batches.append((number, payload))
        self._bytes += len(payload)
        while len(self._batches) > _KEPT_BATCHES or self._bytes > _KEPT_BYTES:
            self._bytes -= len(self._batches.popleft()[1])

    def since(self, first: int) -> list[tuple[int, bytes]]:
        """Return the batches from number ``first`` on, as they are now."""
        return [batch for batch in self._batches if batch[0] >= first]


class _Rank:
    """The sockets of one engine, its batches, and its view."""

    def __init__(self, rank: int, topic: bytes, publish: Any, replay: Any, window: int) -> None:
        """The sockets are of the kinds PUB and ROUTER; ``replay`` may be None. ``window`` is PrefixView's."""
        self._rank = rank
        self._topic = topic
        self._publish = publish
        self._replay = replay
        self._view = PrefixView(window)
        self._number = 0
        self._kept = _Kept()

    def send(self, changes: Sequence[BlockChange], encoder: msgspec.msgpack.Encoder) -> None:
        """Publish these changes as one batch."""
        events = self._view.events(changes)
        if any(isinstance(event, AllBlocksCleared) for event in events):
            logger.warning("events of the KV cache were lost: subscribers are told to forget what they know")
        if not events:
            return
        payload = encoder.encode(KVEventBatch(time.time(), events, self._rank))
        self._publish.send_multipart((self._topic, self._number.to_bytes(8, "big"), payload))
        self._kept.add(self._number, payload)
        self._number += 1

    async def answer(self, no_wait: int, nothing: type[Exception]) -> None:
        """Send batches again to those who ask, for ever."""
        while True:
            try:
                frames = self._replay.recv_multipart(no_wait)
            except nothing:
                await asyncio.sleep(INTERVAL_S)
                continue
            await asyncio.sleep(0)
            if len(frames) != 3 or len(frames[2]) != 8:
                continue  # no request: a client, an empty frame, the number of the first batch
            client, _, first = frames
            for count, (number, payload) in enumerate(self._kept.since(int.from_bytes(first, "big")), 1):
                self._replay.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
                if count % _MOST_REPLAYED == 0:
                    await asyncio.sleep(0)
            self._replay.send_multipart((client, b"", b"", _END, b""))


class KVEventPublisher:
    """Publishes the events of an engine, or of several behind one, from the event loop that the engine runs in.

        async with KVEventPublisher(engine, "tcp://*:5557"):
            ...

    The engine of rank 1 has the next port, and so on; an ipc address gets a suffix, such as _dp1. Raises ConfigError
    without pyzmq, without EngineConfig.kv_events, or where an address cannot be bound.
    """

    def __init__(self, engine: Engine, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        """Addresses are ZeroMQ's, such as tcp://*:5557 or ipc:///run/events; they are bound."""
        self._engine = engine
        self._endpoints = (endpoint, replay_endpoint)
        self._topic = topic.encode()
        self._tasks: list[asyncio.Task[None]] = []
        self._sockets: list[Any] = []
        self._context: Any = None

    async def __aenter__(self) -> KVEventPublisher:
        try:
            import zmq
        except ImportError:
            raise ConfigError("kv_events_endpoint needs pyzmq: pip install 'asyncengine[kv-events]'") from None
        count = len(self._engine.block_changes(0))  # raises where the engine records none
        self._context = zmq.Context()
        publish_at, replay_at = self._endpoints
        ranks = []
        try:
            for number in range(count):
                publish = self._bind(zmq.PUB, _of_rank(publish_at, number), _MOST_QUEUED)
                replay = None
                if replay_at is not None:
                    replay = self._bind(zmq.ROUTER, _of_rank(replay_at, number), 2 * (_KEPT_BATCHES + 1))
                ranks.append(_Rank(number, self._topic, publish, replay, self._engine.model_info.group_window))
                if replay is not None:
                    self._tasks.append(asyncio.create_task(ranks[-1].answer(zmq.NOBLOCK, zmq.Again)))
        except zmq.ZMQError as e:
            await self.__aexit__(None, None, None)
            raise ConfigError(f"the address of KV events cannot be bound: {e}") from None
        self._tasks.append(asyncio.create_task(self._publish(ranks)))
        for task in self._tasks:
            task.add_done_callback(_report)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for socket in self._sockets:
            socket.close(linger=0)
        if self._context is not None:
            self._context.term()
            self._context = None

    def addresses(self) -> list[str]:
        """Addresses that are bound: for each engine that of the publisher, and behind it that of the replay."""
        import zmq

        return [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in self._sockets]

    def _bind(self, kind: int, endpoint: str, most_queued: int) -> Any:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(most_queued)
        socket.bind(endpoint)
        return socket

    async def _publish(self, ranks: Sequence[_Rank]) -> None:
        encoder = msgspec.msgpack.Encoder()
        while True:
            most = 0
            for rank, changes in zip(ranks, self._engine.block_changes(_MOST_CHANGES), strict=True):
                rank.send(changes, encoder)
                most = max(most, len(changes))
            await asyncio.sleep(0 if most >= _MOST_CHANGES else INTERVAL_S)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("events of the KV cache are no longer published", exc_info=error)


def _of_rank(endpoint: str, rank: int) -> str:
    """The address of one engine: ports count up, except those that the system chooses."""
    match = re.fullmatch(r"(tcp://.*:)(\d+|\*)", endpoint)
    if rank == 0 or (match and match[2] in ("*", "0")):
        return endpoint
    return f"{match[1]}{int(match[2]) + rank}" if match else f"{endpoint}_dp{rank}"


def published(config: ServerConfig, engine: Engine) -> AbstractAsyncContextManager[KVEventPublisher | None]:
    """Publish the engine's events meanwhile, where the configuration has an address for them."""
    if config.kv_events_endpoint is None:
        return nullcontext()
    return KVEventPublisher(engine, config.kv_events_endpoint, config.kv_events_replay_endpoint, config.kv_events_topic)
