"""Events of the KV cache: a router that knows vLLM's structures has the same view of the prefix cache as the engine."""

from __future__ import annotations

import asyncio
import functools
import operator
import os
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from asyncengine import AsyncEngine, DataParallelEngine, EngineDeadError, SamplingParams, _core, testing
from asyncengine.errors import ConfigError
from asyncengine.server.config import ServerConfig
from asyncengine.server.kv_events import INTERVAL_S, KVEventPublisher, PrefixView
from asyncengine.text.tokenizer import placeholder_tokenizer
from tests.models import tiny

BLOCK = 16
# vLLM 0.33's structures (vllm/distributed/kv_events.py): an event is a map with its tag under "type", a batch an array.
FIELDS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "BlockStored": (
        ("block_hashes", list[bytes | int]),
        ("parent_block_hash", bytes | int | None),
        ("token_ids", list[int]),
        ("block_size", int),
        ("lora_id", int | None),
        ("medium", str | None),
        ("lora_name", str | None),
        ("extra_keys", list[tuple[Any, ...] | None] | None, None),
        ("group_idx", int | None, None),
        ("kv_cache_spec_kind", str | None, None),
        ("kv_cache_spec_sliding_window", int | None, None),
        ("locality", str | None, None),
        ("ownership", str | None, None),
        ("session_id", str | None, None),
        ("lookahead_token_ids", list[list[int]] | None, None),
    ),
    "BlockRemoved": (
        ("block_hashes", list[bytes | int]),
        ("medium", str | None),
        ("group_idx", int | None, None),
        ("locality", str | None, None),
        ("ownership", str | None, None),
    ),
    "AllBlocksCleared": (),
}
EVENTS = {
    name: msgspec.defstruct(name, fields, omit_defaults=True, forbid_unknown_fields=True, tag=True)
    for name, fields in FIELDS.items()
}
ANY_EVENT: Any = functools.reduce(operator.or_, EVENTS.values())
BATCH: Any = msgspec.defstruct(
    "KVEventBatch",
    [("ts", float), ("events", list[ANY_EVENT]), ("data_parallel_rank", int | None, None)],
    array_like=True,
    omit_defaults=True,
)


class Router:
    """The view of a router: for each block the block before it, its tokens and its memory; for each window group the
    blocks that it has."""

    def __init__(self, window_groups: int = 0, window: int | None = None) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], str, str]] = {}
        self.of_groups: dict[int, set[int]] = {group: set() for group in range(1, 1 + window_groups)}
        self.window = window
        self.ranks: set[int] = set()

    def take(self, payload: bytes) -> None:
        batch = msgspec.msgpack.decode(payload, type=BATCH)
        self.ranks.add(batch.data_parallel_rank)
        for event in batch.events:
            match type(event).__name__:
                case "BlockStored" if event.group_idx:
                    assert event.kv_cache_spec_kind == "sliding_window"
                    assert event.kv_cache_spec_sliding_window == self.window
                    assert len(event.token_ids) == BLOCK * len(event.block_hashes)
                    assert self.of_groups[event.group_idx].isdisjoint(event.block_hashes)
                    self.of_groups[event.group_idx].update(event.block_hashes)
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved" if event.group_idx:
                    assert self.of_groups[event.group_idx].issuperset(event.block_hashes)
                    self.of_groups[event.group_idx].difference_update(event.block_hashes)
                case "BlockRemoved":
                    for block in event.block_hashes:
                        if block in self.blocks and self.blocks[block][2] == event.medium:
                            del self.blocks[block]
                case _:
                    self.blocks.clear()
                    for known in self.of_groups.values():
                        known.clear()
        assert all(known <= self.blocks.keys() for known in self.of_groups.values())

    def _store(self, event: Any) -> None:
        assert event.block_size == BLOCK
        assert len(event.token_ids) == BLOCK * len(event.block_hashes)
        parent = event.parent_block_hash
        salt = event.extra_keys[0][0] if event.extra_keys else ""
        for i, block in enumerate(event.block_hashes):
            assert block not in self.blocks
            assert parent is None or parent in self.blocks
            self.blocks[block] = parent, tuple(event.token_ids[i * BLOCK : (i + 1) * BLOCK]), event.medium, salt
            parent, salt = block, ""

    def chain(self, tokens: list[int], salt: str = "") -> list[int]:
        """Return a prompt's first blocks that group 0 has."""
        known = {(parent, tokens, salt): block for block, (parent, tokens, _, salt) in self.blocks.items()}
        chain: list[int] = []
        while (block := known.get((chain[-1] if chain else None, tuple(tokens[:BLOCK]), salt))) is not None:
            chain.append(block)
            tokens, salt = tokens[BLOCK:], ""
        return chain

    def matched(self, tokens: list[int], salt: str = "") -> int:
        """Count the blocks that a prompt finds: all in group 0, and the last ones in each window group."""
        chain, seen = self.chain(tokens, salt), -(-((self.window or 1) - 1) // BLOCK)
        for count in range(len(chain), 0, -1):
            if all(known.issuperset(chain[max(0, count - seen) : count]) for known in self.of_groups.values()):
                return count
        return 0


def payload_of(view: PrefixView, changes: list[_core.BlockChange]) -> bytes:
    return msgspec.msgpack.encode([0.0, view.events(changes), 0])


@pytest.mark.parametrize(("window_groups", "window"), [(0, None), (1, 1), (2, 16), (2, 20)])
def test_the_view_is_the_prefix_cache(window_groups: int, window: int | None) -> None:
    """Prompts that share beginnings come and go in a small pool: what the router finds is what the engine finds."""
    rng = random.Random(3)
    blocks = _core.BlockManager(24 + 20 * window_groups, BLOCK, True, num_events=4096, window_groups=window_groups)
    view, router = PrefixView(window or 0), Router(window_groups, window)
    saw: Counter[str] = Counter()
    prompts = [([rng.randrange(3) for _ in range(BLOCK)], salt) for salt in (0, 0, 7) for _ in range(3)]
    known: list[tuple[list[int], int]] = []
    for turn in range(300):
        tokens, salt = rng.choice(known or prompts) if rng.random() < 0.5 else rng.choice(prompts)
        tokens = tokens[: BLOCK * rng.randint(1, 6)] + [rng.randrange(2) for _ in range(BLOCK)] * rng.randint(0, 2)
        held = blocks.match_prefix(tokens, salt)
        for block in held:
            blocks.retain(block)
        windows: list[int] = []
        chain = _core.BlockManager.root_chain(salt)
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            if start // BLOCK == len(held):
                held.append(blocks.allocate())
            chain = blocks.publish(held[start // BLOCK], chain, tokens[start : start + BLOCK])
            entry = blocks.match_prefix(tokens[: start + BLOCK], salt)[-1]
            for group in range(window_groups):
                if rng.random() < 0.9:
                    windows.append(blocks.allocate())
                    blocks.accompany(entry, group, windows[-1])
        known = [*known, (tokens, salt)][-40:]
        for block in rng.choice((windows + held, held[::-1] + windows)):  # the wrong way round, beginnings go first
            blocks.release(block)
        if turn % 7 == 0:
            router.take(payload_of(view, blocks.changes(4096)))
            assert len(view) == len(router.blocks)
            for tokens, salt in known:
                found = router.matched(tokens, f"{salt:016x}" if salt else "")
                chain_found = blocks.match_prefix(tokens, salt)
                expected = blocks.match_windows(chain_found, window) if window else len(chain_found)
                assert found == expected, (turn, tokens, salt)
                saw["found"] += found > 0
                saw["shorter"] += found < len(chain_found)
    assert saw["found"] > 100
    assert (saw["shorter"] > 20) == (window is not None and window > 1)


def test_a_block_that_is_known_under_another_chain_keeps_its_windows() -> None:
    """A fork publishes the beginning anew that was evicted, and behind it a block that a sequence still holds."""
    blocks = _core.BlockManager(4, BLOCK, True, num_events=64, window_groups=1)
    view, router = PrefixView(16), Router(1, 16)
    root, first, second = _core.BlockManager.root_chain(0), [1] * BLOCK, [2] * BLOCK
    begin, held, window = (blocks.allocate() for _ in range(3))
    blocks.publish(held, blocks.publish(begin, root, first), second)
    blocks.accompany(held, 0, window)
    blocks.release(begin)
    taken = [blocks.allocate(), blocks.allocate()]
    router.take(payload_of(view, blocks.changes(64)))
    assert not router.blocks
    blocks.publish(held, blocks.publish(taken[0], root, first), second)
    router.take(payload_of(view, blocks.changes(64)))
    assert router.matched(first + second) == blocks.match_windows(blocks.match_prefix(first + second, 0), 16) == 2


def test_events_of_one_group_are_written_as_before() -> None:
    """The bytes of a salted chain of two blocks, and of its removal."""
    blocks = _core.BlockManager(2, BLOCK, True, num_events=64)
    view, held = PrefixView(), [blocks.allocate(), blocks.allocate()]
    chain = _core.BlockManager.root_chain(7)
    for token, block in enumerate(held, 5):
        chain = blocks.publish(block, chain, [token] * BLOCK)
    stored = payload_of(view, blocks.changes(64))
    names = msgspec.msgpack.decode(stored)[1][0]["block_hashes"]
    event = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": None}
    event |= {"token_ids": [5] * BLOCK + [6] * BLOCK, "block_size": BLOCK, "lora_id": None, "medium": "GPU"}
    event |= {"lora_name": None, "extra_keys": [[f"{7:016x}"], None], "group_idx": 0}
    event |= {"kv_cache_spec_kind": "full_attention"}
    assert stored == msgspec.msgpack.encode([0.0, [event], 0])
    for block in held:
        blocks.release(block)
    blocks.allocate()
    removal = {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", "group_idx": 0}
    assert payload_of(view, blocks.changes(64)) == msgspec.msgpack.encode([0.0, [removal], 0])


def test_lost_changes_clear_the_view() -> None:
    blocks = _core.BlockManager(8, BLOCK, True, num_events=4)
    view, router = PrefixView(), Router()

    def publish(number: int) -> None:
        block = blocks.allocate()
        blocks.publish(block, _core.BlockManager.root_chain(0), [number] * BLOCK)
        blocks.release(block)

    for number in range(3):
        publish(number)
    router.take(payload_of(view, blocks.changes(2)))
    assert len(router.blocks) == 2
    for number in range(3, 9):
        publish(number)
    router.take(payload_of(view, blocks.changes(100)))
    assert not router.blocks
    publish(20)
    router.take(payload_of(view, blocks.changes(100)))
    assert router.matched([20] * BLOCK) == 1


def test_losses_are_a_statistic() -> None:
    config = _core.SchedulerConfig(num_blocks=16, max_num_seqs=1, max_model_len=128, num_block_events=1)
    harness = _core.SchedulerHarness(config, 1)
    harness.add(_core.RequestSpec(id=1, prompt=[5] * 3, max_tokens=80), 1)
    harness.time_steps(70)
    assert harness.stats["kv_events_lost"] >= 3


async def test_blocks_that_go_to_the_host_change_their_medium() -> None:
    """A full pool of the device hands blocks to the host's. A router still finds the prompt there."""
    rng = random.Random(7)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    prompts = [[rng.randrange(3, 900) for _ in range(160)] for _ in range(4)]
    view, router = PrefixView(), Router()
    async with testing.SimulatedEngine(
        num_kv_blocks=16, max_model_len=256, host_kv_memory_bytes=1 << 20, kv_events=True
    ) as engine:
        for prompt in prompts:
            await engine.generate(prompt, params)
        router.take(payload_of(view, engine.block_changes(1000)[0]))
        assert {medium for _, _, medium, _ in router.blocks.values()} == {"GPU", "CPU"}
        found = [router.matched(prompt) for prompt in prompts]
        output = await engine.generate(prompts[0], params)
        assert output.usage.cached_tokens == BLOCK * min(found[0], 9)
        router.take(payload_of(view, engine.block_changes(1000)[0]))
        assert len(router.blocks) == len(view)


@pytest.mark.parametrize("window_groups", [True, False])
async def test_a_router_knows_the_prefix_of_a_model_with_windows(tmp_path: Any, window_groups: bool) -> None:
    """Prompts of Gemma 3 evict one another's blocks. What the router finds is what each prompt finds."""
    rng = random.Random(11)
    tiny.build_model("gemma3", max_position_embeddings=512).save_pretrained(tmp_path)
    placeholder_tokenizer(tiny.VOCAB_SIZE).backend.save(str(tmp_path / "tokenizer.json"))
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    begins = [[rng.randrange(tiny.VOCAB_SIZE) for _ in range(120)] for _ in range(2)]
    found: Counter[str] = Counter()
    async with AsyncEngine.from_pretrained(
        str(tmp_path), device="cpu", cpu_threads=1, dtype="float32", progress=False, max_model_len=200,
        num_kv_blocks=14, max_num_batched_tokens=24, max_num_seqs=2, kv_events=True, window_groups=window_groups,
    ) as engine:  # fmt: skip
        info = engine.model_info
        assert (info.window_groups > 0) == window_groups
        view, router = PrefixView(info.group_window), Router(info.window_groups, info.group_window or None)
        for _ in range(50):
            prompt = rng.choice(begins)[: rng.randint(1, 120)]
            prompt = prompt + [rng.randrange(tiny.VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
            whole = prompt[: (len(prompt) - 1) // BLOCK * BLOCK]
            expected, in_group_0 = router.matched(whole), len(router.chain(whole))
            output = await engine.generate(prompt, params)
            assert output.usage.cached_tokens == BLOCK * expected
            router.take(payload_of(view, engine.block_changes(4096)[0]))
            found["some"] += expected > 0
            found["less"] += expected < in_group_0
    assert found["some"] > 10
    assert (found["less"] > 0) == window_groups


async def received(subscriber: Any, router: Router, until: Any) -> list[int]:
    """Take what comes until ``until()`` is true and nothing follows. Returns the numbers of the batches.

    A removal and a storing that are under way may leave as many blocks as there are, so that the last batch is known
    only by the silence behind it. The publisher looks for changes some times in it, on this event loop.
    """
    numbers = []
    async with asyncio.timeout(60):
        while not until() or await subscriber.poll(1000 * 6 * INTERVAL_S):
            topic, number, payload = await subscriber.recv_multipart()
            assert topic == b"kv@pod"
            numbers.append(int.from_bytes(number, "big"))
            router.take(payload)
    return numbers


async def test_a_router_follows_an_engine_over_zmq(tmp_path: Any) -> None:
    """Random prompts evict one another. The router's blocks are the engine's; a replay gives the
    same."""
    rng = random.Random(5)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    endpoints = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    async with (
        testing.SimulatedEngine(num_kv_blocks=32, max_model_len=256, kv_events=True) as engine,
        KVEventPublisher(engine, *endpoints, topic="kv@pod"),
    ):
        with (
            zmq.asyncio.Context() as context,
            context.socket(zmq.SUB) as subscriber,
            context.socket(zmq.DEALER) as asking,
        ):
            subscriber.subscribe("kv@")
            subscriber.connect(endpoints[0])
            await asyncio.sleep(0.3)
            begin = [rng.randrange(3, 900) for _ in range(64)]
            prompts = [
                begin[: rng.choice((0, 32, 64))] + [rng.randrange(3, 900) for _ in range(rng.randint(20, 120))]
                for _ in range(24)
            ]
            await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
            router = Router()

            def has_as_many_blocks() -> bool:
                return len(router.blocks) == engine.debug_stats().cached_blocks

            numbers = await received(subscriber, router, has_as_many_blocks)
            assert all(b == a + 1 for a, b in pairwise(numbers))
            assert {medium for _, _, medium, _ in router.blocks.values()} == {"GPU"}
            for prompt in prompts[-3:]:  # what the engine finds in its cache is what the router says
                expected = router.matched(prompt[: (len(prompt) - 1) // BLOCK * BLOCK])
                output = await engine.generate(prompt, params)
                assert output.usage.cached_tokens == BLOCK * expected
                await received(subscriber, router, has_as_many_blocks)
            asking.connect(endpoints[1])
            again = Router()
            for wrong in ([b"x"], [b"", b"12345"], [b"", b"", b"", b""]):
                await asking.send_multipart(wrong)
            await asking.send_multipart([b"", (2**64 - 1).to_bytes(8, "big")])
            async with asyncio.timeout(60):
                assert await asking.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
            await asking.send_multipart([b"", (0).to_bytes(8, "big")])
            async with asyncio.timeout(60):
                while (frames := await asking.recv_multipart())[2] != b"\xff" * 8:
                    assert frames[:2] == [b"", b"kv@pod"]
                    again.take(frames[3])
            assert frames == [b"", b"", b"\xff" * 8, b""]
            assert again.blocks == router.blocks


async def test_each_engine_publishes_under_its_rank(tmp_path: Any) -> None:
    """Engines behind one have an address each. One that dies takes its blocks with it."""
    engines = [testing.SimulatedEngine(num_kv_blocks=32, max_model_len=256, kv_events=True) for _ in range(2)]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    async with DataParallelEngine(engines) as front, KVEventPublisher(front, f"ipc://{tmp_path}/events"):
        with zmq.asyncio.Context() as context:
            routers = []
            for rank, engine in enumerate(engines):
                with context.socket(zmq.SUB) as subscriber:
                    subscriber.subscribe("")
                    subscriber.connect(f"ipc://{tmp_path}/events" + ("_dp1" if rank else ""))
                    routers.append(router := Router())
                    while not await subscriber.poll(60):  # until the subscription has arrived
                        await engine.generate([3 + byte for byte in os.urandom(40)], params)
                    async with asyncio.timeout(60):
                        router.take((await subscriber.recv_multipart())[2])
                        assert router.blocks
                        assert router.ranks == {rank}
                        if rank:
                            engine.device.fail_at(1)
                            with pytest.raises(EngineDeadError):
                                await engine.generate([5] * 40, params)
                            while router.blocks:
                                router.take((await subscriber.recv_multipart())[2])


async def test_refusals(tmp_path: Any) -> None:
    async with testing.SimulatedEngine(num_kv_blocks=8, max_model_len=64) as engine:
        with pytest.raises(ConfigError, match="start it with kv_events"):
            async with KVEventPublisher(engine, f"ipc://{tmp_path}/events"):
                pass
    async with testing.SimulatedEngine(num_kv_blocks=8, max_model_len=64, kv_events=True) as engine:
        with pytest.raises(ConfigError, match="cannot be bound"):
            async with KVEventPublisher(engine, f"ipc://{tmp_path}/no/such/folder"):
                pass
    for fields, reason in (
        ({"kv_events_endpoint": "http://x"}, "must be like"),
        ({"kv_events_endpoint": "tcp://*:65536"}, "must be like"),
        ({"kv_events_endpoint": "ipc://" + "x" * 200}, "must be like"),
        ({"kv_events_endpoint": "ipc://a b"}, "must be like"),
        ({"kv_events_endpoint": "tcp://*:1", "kv_events_replay_endpoint": "tcp://*:1"}, "must differ"),
        ({"kv_events_endpoint": "tcp://*:1", "kv_events_topic": "\ud800"}, "printable"),
        ({"kv_events_topic": "kv"}, "needs kv_events_endpoint"),
        ({"kv_events_endpoint": "tcp://*:1", "kv_events_topic": "x" * 257}, "256 characters"),
    ):
        with pytest.raises(ConfigError, match=reason):
            ServerConfig(**fields)  # type: ignore[arg-type]
