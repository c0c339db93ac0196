"""For the tests of programs that embed asyncengine: an engine without a model, and checks that nothing leaked.

    async with testing.SimulatedEngine(step_latency_us=500) as engine, testing.no_leaks(engine):
        ...your code, with a real AsyncEngine in every respect but the model...

With ``replies`` the engine writes the texts that a test gives, and serves all that an engine on the CPU serves:

    replies = {"capital of France": "Paris", "sky": Reply("blue", delay_s=0.1), "bad": EngineError("down")}
    async with testing.SimulatedEngine(replies=replies) as engine:
        assert (await engine.generate("What is the capital of France?")).text == "Paris"

Without, the simulated device sits behind the same function table as CUDA, and the same C++ step loop, scheduler and
block manager run on it: steps take the time you say, and faults and hangs come when you ask for them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from asyncengine._core import CpuKernels, SimulatedDevice, StepLoop
from asyncengine.api.engine_options import EngineOptions
from asyncengine.api.model_info import ModelInfo
from asyncengine.api.request import Prompt, SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.engine.data_parallel import DataParallelEngine
from asyncengine.engine.engine import AsyncEngine
from asyncengine.engine.stream import RequestStream
from asyncengine.runner.backend import Backend
from asyncengine.runner.loop_config import choose_num_host_blocks, step_loop_config
from asyncengine.text.prompts import check_terms, kept_tokens, release_idle
from asyncengine.text.tokenizer import PLACEHOLDER_EOS_TOKEN_ID, placeholder_tokenizer

if TYPE_CHECKING:
    from asyncengine.runner.costs.table import CostTable
    from asyncengine.runner.scripted_model import ScriptedModel

VOCAB_SIZE = 1024
EOS_TOKEN_ID = PLACEHOLDER_EOS_TOKEN_ID
_FIRST_WORD = EOS_TOKEN_ID + 1


@dataclass(frozen=True, slots=True)
class Reply:
    """A text that a simulated engine answers with."""

    text: str
    delay_s: float = 0.0
    """Seconds that the request waits before it is enqueued."""


#: Replies in the order of the requests; by a text that the prompt has, the longest one that fits; or made of the
#: prompt's text. An exception is raised by the request.
Replies = (
    Sequence[str | Reply | Exception] | Mapping[str, str | Reply | Exception] | Callable[[str], str | Reply | Exception]
)


class SimulatedEngine(AsyncEngine):
    """An AsyncEngine whose model is a hash of all tokens before, computed by a simulated device.

    Its text is nonsense in words, and always the same for the same tokens (and seed, if temperature > 0), so a test can
    ask for what is right with ``expected_token_ids``.
    """

    def __init__(
        self,
        *,
        step_latency_us: float = 0.0,
        token_latency_us: float = 0.0,
        ends: bool = False,
        read_kv: bool = True,
        poll_interval_us: float = 20.0,
        replies: Replies | None = None,
        **config: Unpack[EngineOptions],
    ) -> None:
        """A step takes ``step_latency_us``, and ``token_latency_us`` more for each token of its graph's bucket.

        With ``ends`` one token in 768 is the end of the sequence. Without ``read_kv`` the model does not read its
        context back through the KV cache at each step: faster, and blind to errors there. ``config`` are the fields of
        EngineConfig; max_model_len is 2048 and num_kv_blocks 4096 unless they say otherwise.

        ``replies`` are the texts to write, each followed by the end of the sequence. The model then gives embeddings,
        too: vectors of 64 numbers that count the prompt's tokens. A grammar has the last word: a text that it excludes
        becomes one that it allows. Requests with the same prompt and different replies run one after the other.
        """
        self._replies = iter(replies) if isinstance(replies, Sequence) else replies
        self._scripted: ScriptedModel | None = None
        self._submitting: set[str] = set()
        self._names = itertools.count(1)
        self.device = SimulatedDevice(
            vocab_size=VOCAB_SIZE,
            first_token=EOS_TOKEN_ID if ends else _FIRST_WORD,
            step_latency_us=step_latency_us,
            token_latency_us=token_latency_us,
            read_kv=read_kv,
        )
        self._poll_interval_us = poll_interval_us
        self._step_latency_us, self._token_latency_us = step_latency_us, token_latency_us
        options = {"max_model_len": 2048, "num_kv_blocks": 4096, **config}
        super().__init__(EngineConfig.from_kwargs("simulated", options), self._load_simulated)

    def _load_simulated(self, config: EngineConfig) -> Backend:
        assert config.max_model_len is not None
        assert config.num_kv_blocks is not None
        info = ModelInfo(
            name=config.model,
            path=Path(),
            architecture="SimulatedForCausalLM",
            dtype="int32",
            device="simulated device",
            vocab_size=VOCAB_SIZE,
            max_model_len=config.max_model_len,
            eos_token_ids=(EOS_TOKEN_ID,),
            num_parameters=0,
            weight_bytes=0,
            num_kv_blocks=config.num_kv_blocks,
            block_size=config.block_size,
            kv_bytes_per_block=4 * config.block_size,
            num_host_kv_blocks=choose_num_host_blocks(config, 4 * config.block_size, config.num_kv_blocks),
        )
        costs = self._costs(config) if config.needs_costs else None
        if self._replies is None:
            step_loop = StepLoop.on_simulated_device(
                step_loop_config(config, info, costs=costs), self.device, self._poll_interval_us
            )
        else:
            from asyncengine.runner.scripted_model import VECTOR_SIZE, ScriptedModel  # loads NumPy

            info = replace(info, device="cpu", vector_size=VECTOR_SIZE)
            model = self._scripted = ScriptedModel(
                info.num_kv_blocks, info.block_size, VOCAB_SIZE, EOS_TOKEN_ID, self._step_latency_us / 1e6
            )
            step_loop = StepLoop.on_cpu(
                step_loop_config(config, info, costs=costs), model.forward, CpuKernels(1), VOCAB_SIZE,
                model.kv_regions,
            )  # fmt: skip
        tokenizer = None if config.skip_tokenizer_init else placeholder_tokenizer(VOCAB_SIZE)
        return Backend(info, tokenizer, step_loop)

    def _costs(self, config: EngineConfig) -> CostTable:
        """Return the costs that were configured, without a measurement. A token of context takes no time."""
        from asyncengine.runner.costs.table import CostTable, Point  # loads torch

        most = max(2, config.max_num_batched_tokens)
        points = [Point(n, 1e3 * (self._step_latency_us + n * self._token_latency_us), 0.0) for n in (1, most)]
        return CostTable(points, points)

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> RequestStream:
        """``AsyncEngine.submit``. Raises the exception that stands in place of the reply."""
        self._life.serving()
        if self._scripted is not None and (params is None or params.max_tokens != 0):
            request_id = request_id if request_id is not None else f"scripted-{next(self._names)}"
            check_terms(priority, request_id=request_id, cache_salt=cache_salt, tenant=tenant)
            await self._write(prompt, params or SamplingParams(), request_id)
        try:
            return await super().submit(
                prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt, tenant=tenant
            )
        finally:
            if isinstance(request_id, str):
                self._submitting.discard(request_id)

    async def _write(self, prompt: Prompt, params: SamplingParams, request_id: str) -> None:
        """Have the model know the reply to a prompt."""
        assert self._scripted is not None
        ids = await self._life.prompts.token_ids(prompt, kept_tokens(params.truncation, params, self.model_info))
        reply = self._reply(self.tokenizer.decode(ids, skip_special_tokens=False))
        if isinstance(reply, Exception):
            raise reply
        await asyncio.sleep(reply.delay_s)
        from asyncengine.runner.scripted_model import Script

        blanks = frozenset(self.tokenizer.encode(" \n\r\t"))
        script = Script(tuple(ids), tuple(self.tokenizer.encode(reply.text)), request_id, blanks)
        while True:
            live = [s for s in self._scripted.scripts if s.request_id in self._submitting or self._has(s.request_id)]
            if all(s.prompt != script.prompt or s.reply == script.reply for s in live):
                break
            await asyncio.sleep(0.001)
        self._submitting.add(request_id)
        self._scripted.scripts = (*live, script)

    @property
    def has_replies(self) -> bool:
        """True if the model has given replies."""
        return self._replies is not None

    def _has(self, request_id: str) -> bool:
        return self._life.requests.named(request_id) is not None

    def _reply(self, text: str) -> Reply | Exception:
        replies = self._replies
        found: str | Reply | Exception | None
        if isinstance(replies, Mapping):
            fitting = [key for key in replies if key in text]
            found = replies[max(fitting, key=len)] if fitting else None
        elif isinstance(replies, Iterator):
            found = next(replies, None)
        else:
            assert replies is not None
            found = replies(text)
        if found is None:
            return AssertionError(f"replies have none for the prompt {text[-200:]!r}")
        return Reply(found) if isinstance(found, str) else found

    def expected_token_ids(self, prompt: Sequence[int], params: SamplingParams, index: int = 0) -> list[int]:
        """The tokens that sequence ``index`` must get, stop strings left aside; needs max_tokens, and a seed."""
        assert params.max_tokens is not None
        seed = ((params.seed or 0) + index) % 2**64
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS_TOKEN_ID,))}
        tokens = list(prompt)
        while len(tokens) - len(prompt) < params.max_tokens:
            tokens.append(self.device.next_token(tokens, params.temperature, seed))
            if tokens[-1] in stops:
                break
        return tokens[len(prompt) :]


async def settle(engine: AsyncEngine, timeout_s: float = 30.0) -> None:
    """Wait until the engine holds nothing: no block, slot, lease or request. AssertionError with what is left."""
    try:
        async with asyncio.timeout(timeout_s):
            while left := engine.debug_stats().held:
                for one in engine.engines if isinstance(engine, DataParallelEngine) else (engine,):
                    one._life.deliver()  # frees what was released since the last delivery
                await asyncio.sleep(0.005)
    except TimeoutError:
        held = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in left.items())
        raise AssertionError(f"the engine still holds {held}") from None
    stats = engine.debug_stats()
    assert stats.free_blocks + stats.cached_blocks == stats.num_kv_blocks, stats


async def check_at_rest(engine: AsyncEngine, timeout_s: float = 30.0) -> None:
    """``settle``, and if the model is a simulated one, a request that gives what it must."""
    await settle(engine, timeout_s)
    limits = engine.model_info
    if (
        isinstance(engine, SimulatedEngine)
        and not engine.has_replies
        and min(limits.max_model_len, limits.kv_capacity_tokens) >= 12
    ):
        prompt, params = [300, 301, 302, 303], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        output = await engine.generate(prompt, params)
        assert list(output.token_ids) == engine.expected_token_ids(prompt, params)
        await settle(engine, timeout_s)


@asynccontextmanager
async def no_leaks(engine: AsyncEngine | None = None, timeout_s: float = 30.0) -> AsyncIterator[None]:
    """Check that the block leaves no task, thread or file descriptor behind, and ``engine`` empty or closed.

    Raises AssertionError that names what is left after ``timeout_s`` seconds.
    """
    tasks, threads, descriptors = asyncio.all_tasks(), _own_threads(), _open_descriptors()
    yield
    if engine is not None and engine.health != "closed":
        await settle(engine, timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                release_idle()  # threads and a process that wait for the next prompt are no leak
                left = {
                    "tasks": len(asyncio.all_tasks() - tasks),
                    "threads": len(_own_threads() - threads),
                    "file descriptors": _open_descriptors() - descriptors,
                }
                if not any(count > 0 for count in left.values()):
                    return
                await asyncio.sleep(0.005)
    except TimeoutError:
        held = ", ".join(f"{count} {name}" for name, count in left.items() if count > 0)
        raise AssertionError(f"left behind: {held}") from None


def _own_threads() -> set[threading.Thread]:
    # asyncio.to_thread keeps its threads; they are the loop's, not the engine's.
    return {t for t in threading.enumerate() if not t.name.startswith(("asyncio_", "uvloop_"))}


def _open_descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:  # no procfs on this platform
        return len(os.listdir("/dev/fd"))
