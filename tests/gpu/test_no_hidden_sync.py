"""Nothing on the step path waits for the GPU: torch's own detector, and one that needs no detector's help.

The second puts a long sleep on the stream that steps run on. Whatever waited for the stream, by whichever call, would
come back only when the event behind the sleep has fired.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from asyncengine import AsyncEngine, SamplingParams, _core
from asyncengine.api.model_info import ModelInfo
from asyncengine.config import EngineConfig
from asyncengine.engine.slot_entries import request_extras
from asyncengine.engine.vectors import vector_extras
from asyncengine.runner.backend import Backend, load_backend

pytestmark = pytest.mark.alone
SMALL: dict[str, Any] = {
    "load_format": "dummy", "dtype": "float32", "device": "cuda", "max_num_seqs": 8, "max_num_batched_tokens": 48,
    "num_kv_blocks": 9, "max_model_len": 96,
}  # fmt: skip
GREEDY = _core.SamplingState(seed=1)
SAMPLED = _core.SamplingState(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, seed=5)


@pytest.fixture(autouse=True)
def short_collections() -> Iterator[None]:
    """Freeze objects as ``asyncengine serve`` does: a collection of all that tests import may take longer than a
    sleep."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def slept(stream: torch.cuda.Stream, milliseconds: int) -> torch.cuda.Event:
    """Keep the stream busy; the event fires when that is over."""
    event = torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(milliseconds * 1_500_000)  # cycles of less than 2 GHz: no shorter than asked for
        event.record(stream)
    return event


class Waits:
    """Rounds of the step loop behind sleeps, and how many of those that launched a step had waited for one."""

    def __init__(self, backend: Backend, sleep_ms: int) -> None:
        self.loop, self.sleep_ms = backend.step_loop, sleep_ms
        self.runner: Any = backend.keep_alive
        self.launches = self.waited = 0

    def run(self, rounds: int) -> None:
        """Run until this many rounds have launched something, or nothing is left to launch."""
        self.sleep()
        for _ in range(rounds):
            before = self.loop.stats()["num_steps"]
            while True:
                # A sleep that is about to end by itself would look as if the launch had waited for it.
                if time.monotonic() - self.began > self.sleep_ms / 2e3:
                    while not self.asleep.query():
                        pass
                    self.sleep()
                self.loop.advance()
                if self.loop.stats()["num_steps"] > before or self.loop.quiescent:
                    break
            if self.loop.stats()["num_steps"] > before:
                self.launches += 1
                self.waited += self.asleep.query()
            self.loop.drain()

    def sleep(self) -> None:
        self.asleep, self.began = slept(self.runner.cuda_stream, self.sleep_ms), time.monotonic()


FEATURES: list[dict[str, Any]] = [
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": {5: 1.0}, "min_tokens": 3},
    {"allowed_token_ids": list(range(60))},
    {"no_repeat_ngram_size": 2},
    {"logprobs": 20, "logprob_token_ids": [1, 2]},
    {"logprobs": 3, "logprobs_mode": "processed_logprobs", "presence_penalty": 0.5},
    {"structured_outputs": {"regex": "[a-z ]+"}},
]


def submit(loop: _core.StepLoop, key: int, draw: random.Random, info: ModelInfo | None = None) -> None:
    """Submit a request. With ``info`` every other one has a feature of FEATURES, each in turn, and some want
    vectors."""
    prompt = [draw.randrange(199) for _ in range(draw.randrange(1, 60))]
    extras, n, max_tokens = _core.RequestExtras(), draw.choice([1, 1, 2]), draw.randrange(10, 36)
    if info is not None and key % 2:
        feature = FEATURES[key // 2 % len(FEATURES)]
        masks = []
        if "structured_outputs" in feature:  # nobody computes the mask after the first one
            n = max_tokens = 1
            masks = [_core.MaskChannel(-(-info.vocab_size // 32))]
            masks[0].write(len(prompt), allows_all=True)
        extras = request_extras(SamplingParams(max_tokens=10, **feature), len(prompt), [1], info, (), masks)
    elif info is not None and key % 4 == 0:
        n = max_tokens = 1
        extras = vector_extras(info, "mean" if key % 8 else "last")
    accepted = loop.submit(
        _core.RequestSpec(
            id=key,
            prompt=prompt,
            n=n,
            max_tokens=max_tokens,
            priority=draw.randrange(3),
            sampling=draw.choice([GREEDY, SAMPLED]),
            stop_tokens=[draw.randrange(199)],
            extras=extras,
        )
    )
    assert accepted == _core.SubmitResult.accepted


def watch(backend: Backend, requests: int, sleep_ms: int, *, features: bool = False) -> Waits:
    """Greedy and sampled requests, forks, aborts, preemption and mixed steps; with ``features``, each of these too."""
    draw, waits = random.Random(1), Waits(backend, sleep_ms)
    for key in range(1, requests + 1):
        submit(backend.step_loop, key, draw, backend.model_info if features else None)
        if draw.random() < 0.2:
            backend.step_loop.abort(draw.randrange(1, key + 1))
        waits.run(5)
    waits.run(100)
    return waits


def check_that_launches_never_wait(config: EngineConfig, happened: str, *, features: bool = False) -> None:
    """``happened``: a counter of the step loop's statistics that must have counted.

    A step's kernels one by one take a millisecond to launch, and on a busy machine a launch takes longer than a sleep
    now and then. Then the same requests come once more, behind longer sleeps: what waits for the device waits for these
    too.
    """
    for sleep_ms in (25, 100) if config.enforce_eager else (5, 50):
        backend = load_backend(config, progress=False)
        waits = watch(backend, 40, sleep_ms, features=features)
        counted = backend.step_loop.stats()[happened]
        assert backend.step_loop.stop(5.0)
        assert waits.launches >= 40
        assert counted > 0
        if waits.waited == 0:
            return
    pytest.fail(f"{waits.waited} of {waits.launches} launches waited for the device")


@pytest.mark.parametrize("staging", ["ahead", "mapped", "pinned"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("features", [False, True], ids=["plain", "features"])
def test_launching_never_waits(tiny_llama, staging, eager, features):
    config = EngineConfig(model=tiny_llama, **SMALL, staging=staging, enforce_eager=eager)
    check_that_launches_never_wait(config, "num_preemptions", features=features)


def test_pageable_staging_makes_another_thread_wait(tiny_llama):
    """Copies from and to memory that is not pinned wait for the device: that is what the mode is slow for."""
    backend = load_backend(EngineConfig(model=tiny_llama, **SMALL, staging="pageable"), progress=False)
    loop, draw = backend.step_loop, random.Random(1)
    submit(loop, 1, draw)
    runner: Any = backend.keep_alive
    asleep = slept(runner.cuda_stream, 200)
    for _ in range(20):
        loop.advance()
    assert loop.stats()["num_steps"] > 0
    assert not asleep.query()
    assert backend.step_loop.stop(5.0)


def test_the_sleep_test_catches_what_waits(tiny_llama):
    backend = load_backend(EngineConfig(model=tiny_llama, **SMALL), progress=False)
    runner: Any = backend.keep_alive
    asleep = slept(runner.cuda_stream, 50)
    runner.steps.state.input_ids.cpu()  # on another stream: does not wait
    assert not asleep.query()
    with torch.cuda.stream(runner.cuda_stream):
        runner.steps.state.input_ids.cpu()
    assert asleep.query()
    assert backend.step_loop.stop(5.0)


@contextmanager
def sync_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):  # that it is a prototype, said once a process
        torch.cuda.set_sync_debug_mode("warn")
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_torch_sees_no_synchronization(tiny_llama):
    async def main() -> None:
        async with AsyncEngine.from_pretrained(tiny_llama, **SMALL, enforce_eager=True) as engine:
            with sync_is_an_error():
                jobs = []
                for i in range(30):
                    feature = FEATURES[i // 2 % (len(FEATURES) - 1)] if i % 2 else {}
                    params = SamplingParams(
                        max_tokens=12, temperature=i % 2, seed=i, top_k=5 * (i % 3), n=1 + i % 2, **feature
                    )
                    jobs.append(asyncio.ensure_future(engine.generate([i + 1] * (1 + 2 * i), params)))
                await asyncio.sleep(0.05)
                for job in jobs[::5]:
                    job.cancel()
                done = await asyncio.gather(*jobs, return_exceptions=True)
        assert not [d for d in done if isinstance(d, Exception)]

    asyncio.run(main())


def test_torch_s_detector_detects():
    x = torch.ones(1, device="cuda")
    with sync_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        x.item()
