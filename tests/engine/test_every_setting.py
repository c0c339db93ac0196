"""Every field of the engine's configuration changes something that one can see, or a sentence says where that is seen.

A probe takes keywords of the configuration and returns what it saw. Each field has one, with two values of the field.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from asyncengine import AsyncEngine, AsyncEngineError, EngineConfig, SamplingParams, bundled_model, testing
from asyncengine.api.request import LONG_TEXT
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.linear.plan import Site
from asyncengine.kernels.cuda.ops import CudaOps
from asyncengine.runner.backend import load_backend
from asyncengine.runner.costs.table import CostTable, HostAttention, Point
from asyncengine.runner.cuda_runner import cuda_options
from asyncengine.runner.describe import describe_model
from asyncengine.runner.loop_config import hybrid_gain
from asyncengine.runner.start import prepare
from asyncengine.runner.state import memory
from asyncengine.text.tokenizer import placeholder_tokenizer
from tests.models.own_code import save_with_code
from tests.runner.test_hybrid_settings import INFO

from .test_late_launch import tokens_until_the_first

MODEL = str(bundled_model())
GEMMA_3 = str(Path(__file__).resolve().parents[2] / "bench/shapes/gemma-3-12b")
CHAT: Any = [{"role": "user", "content": "Tell me of a fox."}]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
STEPPED: dict[str, Any] = {"step_driver": "loop", "steps_in_flight": 1}
PROMPT = list(range(300, 500))

See = Callable[..., Any]


# ---- an engine on the CPU ----


@contextlib.asynccontextmanager
async def on_cpu(**config: Any) -> Any:
    small = {"device": "cpu", "cpu_threads": 1, "num_kv_blocks": 16, "max_model_len": 128, "progress": False}
    async with AsyncEngine.from_pretrained(**{"model": MODEL} | small | config) as engine:
        yield engine


async def story(params: SamplingParams = GREEDY, prompt: Any = "Once upon a time, a fox and a bear", **config: Any):
    """Tokens, log probabilities, text and count of the prompt's tokens; or the error."""
    try:
        async with on_cpu(**config) as engine:
            output = await engine.generate(prompt, params)
            return output.outputs[0].token_ids, output.outputs[0].logprobs, output.text, output.usage.prompt_tokens
    except AsyncEngineError as e:
        return str(e)


async def chat(**config: Any) -> Any:
    return await story(prompt=CHAT, **config)


async def seeds(**config: Any) -> Any:
    return await story(SamplingParams(max_tokens=16, temperature=2.0), **config)


async def modules(**config: Any) -> Any:
    """Why no sequence decodes on the host: modules of transformers cannot; or the kind of error."""
    try:
        async with on_cpu(**config) as engine:
            return engine.model_info.host_obstacle
    except AsyncEngineError as e:
        return type(e)


async def device(**config: Any) -> Any:
    """The kind of device, or the error of a machine without one."""
    try:
        async with on_cpu(**config) as engine:
            return engine.model_info.device
    except AsyncEngineError as e:
        return str(e)


async def children(**config: Any) -> int:
    """Processes that this one has started, while a conversation is answered, beside those of before."""

    def count() -> int:
        return sum(f" {os.getpid()} " in _stat(path) for path in Path("/proc").glob("[0-9]*/stat"))

    before = count()
    async with on_cpu(**config) as engine:
        await engine.generate(CHAT, GREEDY)
        return count() - before


def _stat(path: Path) -> str:
    """The state and the parent of a process: what follows its name, which may have anything in it."""
    with contextlib.suppress(OSError):
        return " ".join(path.read_text().rpartition(")")[2].split()[:2]) + " "
    return ""


async def revision(**config: Any) -> Any:
    """Return the requests that reach the hub."""
    with mock.patch("huggingface_hub.snapshot_download", return_value=MODEL) as asked:
        await device(model="owner/name", **config)
    return {call.kwargs["revision"] for call in asked.call_args_list}


async def threads(**config: Any) -> int:
    """Native threads that an engine adds to this process."""
    before = _native_threads()
    async with on_cpu(**config) as engine:
        await engine.generate("Once", GREEDY)
        return len(_native_threads() - before)


def _native_threads() -> set[int]:
    return {int(thread) for thread in os.listdir("/proc/self/task")} - {t.native_id for t in threading.enumerate()}


async def hosts(**config: Any) -> Any:
    """Return True if sequences decoded on the host, with more of them than the cache holds; or the error."""
    prompts, params = [[300 + i] * 20 for i in range(4)], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    try:
        async with on_cpu(**HOST | {"num_kv_blocks": 8} | config) as engine:
            await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
            return engine.stats().host_row_tokens > 0
    except AsyncEngineError as e:
        return str(e)


async def gain(**config: Any) -> float | None:
    """The throughput that the host adds to a GPU whose cache is full, as predicted."""
    points = [Point(1, 3e6, 0.1), Point(64, 5e6, 0.1)]
    costs = CostTable(points, points, host_attention=[HostAttention(4, 2048, 0.1)])
    config = {"hybrid_form": "workers", "hybrid_workers": 4, **HOST, **ALWAYS, **config}
    info = dataclasses.replace(INFO, num_host_kv_blocks=4000)
    return hybrid_gain(EngineConfig(model="m", **config), info, costs, 16)[1]


# ---- an engine on the simulated device ----


async def steps(**config: Any) -> int:
    """Count the steps of eight requests whose prompts begin alike."""
    async with testing.SimulatedEngine(**STEPPED | config) as engine:
        await asyncio.gather(*(engine.generate([*PROMPT, i], GREEDY_TOKENS) for i in range(8)))
        return engine.stats().num_steps


GREEDY_TOKENS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


async def refusals(**config: Any) -> Any:
    """Return the ends of eight requests of one turn of the loop, on an engine that runs one at a time."""
    async with testing.SimulatedEngine(max_num_seqs=1, **STEPPED | config) as engine:
        prompts = [PROMPT] * 8 if "max_queued_characters" not in config else ["a " * (LONG_TEXT // 2 + 1)] * 8
        jobs = [engine.generate(prompt, GREEDY_TOKENS) for prompt in prompts]
        return [type(result) for result in await asyncio.gather(*jobs, return_exceptions=True)]


async def fits(**config: Any) -> Any:
    """Return True if a prompt of 200 tokens is served; or the error."""
    try:
        async with testing.SimulatedEngine(**config) as engine:
            return len((await engine.generate(PROMPT, GREEDY_TOKENS)).token_ids)
    except AsyncEngineError as e:
        return str(e)


async def hits(**config: Any) -> tuple[bool, ...]:
    """Return whether the cache had prompts that came again, and whether blocks went to the host, and to a disk."""
    async with testing.SimulatedEngine(num_kv_blocks=32, max_model_len=256, **config) as engine:
        for prompt in (PROMPT, PROMPT, PROMPT[::-1], PROMPT[1:], PROMPT):
            await engine.generate(prompt, GREEDY_TOKENS)
        awaited = {"host_kv_memory_bytes": "blocks_to_host", "disk_kv_path": "blocks_to_disk"}
        async with asyncio.timeout(30):  # blocks move in their own time
            while not all(getattr(engine.stats(), awaited[name]) for name in awaited if config.get(name)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        stats = engine.stats()
        return stats.prefix_cache_hits > 0, stats.blocks_to_host > 0, stats.blocks_to_disk > 0


async def changes(**config: Any) -> Any:
    """Kinds of the changes of the prefix cache, or the error of an engine that records none."""
    async with testing.SimulatedEngine(num_kv_blocks=32, max_model_len=256, **config) as engine:
        await engine.generate(PROMPT, GREEDY_TOKENS)
        try:
            return {change.kind for change in engine.block_changes(100)[0]}
        except AsyncEngineError as e:
            return str(e)


async def disk(**config: Any) -> Any:
    """``hits``, or the error of a directory that holds no block."""
    try:
        return await hits(**config)
    except ValueError as e:
        return str(e).partition(" in ")[0]


async def order(*requests: dict[str, Any], **config: Any) -> list[int]:
    """The order in which requests end that were submitted while another had the only slot."""
    ended: list[int] = []
    async with testing.SimulatedEngine(max_num_seqs=1, step_latency_us=2000, **config) as engine:
        running = await engine.submit(PROMPT, SamplingParams(max_tokens=1500, ignore_eos=True))

        async def run(i: int) -> None:
            await engine.generate(PROMPT, GREEDY_TOKENS, **requests[i])
            ended.append(i)

        tasks = []
        for i in range(len(requests)):
            tasks.append(asyncio.create_task(run(i)))
            await asyncio.sleep(0.01)
        await running.aclose()
        await asyncio.gather(*tasks)
    return ended


async def chunks(**config: Any) -> int:
    """The size of the largest step, as the histogram has it, when a long prompt comes while another sequence runs."""
    async with testing.SimulatedEngine(step_latency_us=2000, token_latency_us=2, **config) as engine:
        running = await engine.submit(PROMPT[:8], SamplingParams(max_tokens=1500, ignore_eos=True))
        await anext(running)
        await engine.generate(list(range(300, 1000)) * 2, GREEDY_TOKENS)
        await running.aclose()
        return max(i for i, count in enumerate(engine.stats().step_tokens.counts) if count)


async def flights(**config: Any) -> int:
    """The most steps that were in flight together."""
    async with testing.SimulatedEngine(step_latency_us=2000, late_launch=False, **config) as engine:
        params, most = SamplingParams(max_tokens=40, ignore_eos=True), 0
        async for _ in engine.stream(PROMPT, params):
            most = max(most, engine.stats().num_steps_in_flight)
        return most


async def launches(**config: Any) -> int:
    """Tokens that are made until the first of a request that arrives as a step begins: fewer if that step waits."""
    async with testing.SimulatedEngine(step_latency_us=30_000, **config) as engine:
        return min(await tokens_until_the_first(engine, 8))


async def hangs(**config: Any) -> Any:
    """Return the end of a request whose step takes a second."""
    async with testing.SimulatedEngine(**config) as engine:
        engine.device.hang_at(3)
        asyncio.get_running_loop().call_later(1.0, engine.device.resume)
        [result] = await asyncio.gather(engine.generate(PROMPT, GREEDY_TOKENS), return_exceptions=True)
        return type(result)


async def native_threads(**config: Any) -> int:
    """``threads`` of an engine on the simulated device."""
    before = _native_threads()
    async with testing.SimulatedEngine(**config) as engine:
        await engine.generate(PROMPT, GREEDY_TOKENS)
        return len(_native_threads() - before)


async def pinned(**config: Any) -> bool:
    """Return True if a thread of the process runs on one core alone."""
    async with testing.SimulatedEngine(**config) as engine:
        await engine.generate(PROMPT, GREEDY_TOKENS)
        return any(len(os.sched_getaffinity(int(thread))) == 1 for thread in os.listdir("/proc/self/task"))


# ---- what a GPU's engine is made of ----


async def budget(**config: Any) -> int:
    """Bytes for the KV cache of a card of 80 GB."""
    with mock.patch("torch.cuda.mem_get_info", return_value=(70 << 30, 80 << 30)):
        return memory.device_budget(EngineConfig(model="m", **config), torch.device("cuda", 0), 1 << 20, 1 << 20, 50)


async def tuned(**config: Any) -> int:
    """Count the measurements of plans, at a start, for projections that no table knows."""
    ops: Any = SimpleNamespace(device=torch.device("cpu"), choices=SimpleNamespace(missing=["a site"]))
    nothing: Any = None
    with mock.patch.object(prepare, "_compile"), mock.patch.object(prepare, "tune_missing") as measured:
        prepare.prepare_kernels(EngineConfig(model="m", **config), ops, nothing, [], nothing)
    return measured.call_count


async def compilers(**config: Any) -> Any:
    """Return the number of processes that are to compile kernels."""
    with mock.patch("asyncengine.runner.backend.compile_processes") as started, contextlib.suppress(Exception):
        started.side_effect = RuntimeError
        load_backend(EngineConfig(model=MODEL, device="cuda", **config), progress=False)
    return started.call_args.args


MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"], "vocab_size": 16, "num_heads": 2, "head_dim": 8, "hidden_size": 8,
    "state_size": 4, "n_groups": 1, "num_hidden_layers": 1,
}  # fmt: skip


async def states(**config: Any) -> Any:
    """Return the bytes of the states of a small Mamba-2."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MAMBA2))
        return describe_model(EngineConfig(model=folder, **config), "cpu").state_bytes_per_sequence


async def intervals(**config: Any) -> Any:
    """Return the tokens between the snapshots of a small Mamba-2."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MAMBA2))
        return describe_model(EngineConfig(model=folder, **config), "cpu").state_snapshot_tokens


async def sequence_bytes(**config: Any) -> Any:
    """Return the bytes of keys and values of the longest sequence of a model that mixes windows with layers without."""
    return describe_model(EngineConfig(model=GEMMA_3, load_format="dummy", **config), "cpu").kv_bytes_per_sequence


async def head(**config: Any) -> Any:
    """Return the bytes of the weights of the bundled model, and the format of its head."""
    report = describe_model(EngineConfig(model=MODEL, **config), "cpu")
    return report.weight_bytes, report.head_format


async def told(**config: Any) -> int:
    """Count the sentences about rounding that a start logs."""
    with mock.patch("asyncengine.runner.rounding.logger.info") as log:
        await story(**config)
    return log.call_count


async def kernels(**config: Any) -> Any:
    """Return the plans of projections of eight rows, and the hints with which their tiles are loaded."""
    ops = CudaOps(torch.device("cpu"), cuda_options(EngineConfig(model="m", **config), H200))
    site = Site(4096, 4096, 8, "none", None, False, False)
    return ops.choices.plan(site), ops.options.for_tma


# ---- the fields ----


@dataclasses.dataclass(frozen=True)
class Change:
    """A field's two values, and where the difference is seen."""

    see: See
    one: Any
    other: Any
    beside: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Other fields, the same for both."""


class InFolder:
    """A path that is made for the test."""

    def __init__(self, make: Callable[[Path], Path]) -> None:
        self.make = make


def _template(folder: Path) -> Path:
    path = folder / "template.jinja"
    path.write_text("{{ messages[0].content }} and nothing else")
    return path


def _tokenizer(folder: Path) -> Path:
    placeholder_tokenizer(1024).backend.save(str(folder / "tokenizer.json"))
    return folder


def _own_code(folder: Path) -> Path:
    save_with_code(folder)
    return folder


async def aged(**config: Any) -> list[int]:
    return await order({"priority": 5}, {"priority": 0}, **config)


async def shared(**config: Any) -> list[int]:
    return await order(*[{"tenant": "a"}] * 4, {"tenant": "b"}, **config)


async def many_logprobs(**config: Any) -> Any:
    return await story(SamplingParams(max_tokens=1, temperature=0.0, logprobs=10), **config)


HOST: dict[str, Any] = {"host_kv_memory_bytes": 1 << 20}
ALWAYS: dict[str, Any] = {"hybrid_attention": "always"}

CHANGES = {
    "model": Change(story, MODEL, "/no/such/model"),
    "tokenizer": Change(story, None, InFolder(_tokenizer)),
    "skip_tokenizer_init": Change(story, False, True),
    "revision": Change(revision, None, "branch"),
    "chat_template": Change(chat, None, InFolder(_template)),
    "sandbox": Change(children, True, False),
    "sandbox_timeout_s": Change(chat, 60.0, 1e-6),
    "load_format": Change(story, "auto", "dummy"),
    "dtype": Change(story, "float32", "bfloat16"),
    "model_impl": Change(modules, "auto", "transformers"),
    "trust_remote_code": Change(modules, False, True, {"model": InFolder(_own_code), "tokenizer": "none"}),
    "quantization": Change(story, "none", "fp8", {"device": "auto", "dtype": "bfloat16"}),
    "head_quantization": Change(head, "none", "int8"),
    "measure_quantization": Change(told, False, True, {"quantization": "int8"}),
    "device": Change(device, "cpu", "cuda"),
    "seed": Change(seeds, 0, 1),
    "max_model_len": Change(fits, 2048, 64),
    "max_num_seqs": Change(steps, 256, 2),
    "max_num_batched_tokens": Change(steps, 2048, 64, {"max_num_seqs": 16, "prefill_chunk_size": None}),
    "prefill_chunk_size": Change(steps, 512, 16),
    "target_itl_ms": Change(chunks, None, 2.3),
    "target_itl_ms_by_priority": Change(chunks, None, "0=2.3"),
    "max_logprobs": Change(many_logprobs, 20, 5),
    "max_queued_requests": Change(refusals, 4096, 2),
    "max_queued_tokens": Change(refusals, 4096, 300),
    "max_queued_characters": Change(refusals, 1 << 20, 2 * LONG_TEXT),
    "priority_ageing_s": Change(aged, 1e6, 1e-6),
    "fair_share_s": Change(shared, 0.0, 1.0),
    "block_size": Change(fits, 32, 16, {"num_kv_blocks": 10}),
    "kv_cache_memory_bytes": Change(story, 1 << 24, 1 << 10, {"num_kv_blocks": None}),
    "kv_cache_dtype": Change(story, "auto", "fp8"),
    "state_snapshot_tokens": Change(intervals, None, 0),
    "state_dtype": Change(states, "float32", "bfloat16"),
    "window_groups": Change(sequence_bytes, True, False),
    "num_kv_blocks": Change(fits, 4096, 4),
    "enable_prefix_caching": Change(hits, True, False),
    "kv_events": Change(changes, False, True),
    "host_kv_memory_bytes": Change(hits, None, 1 << 20),
    "disk_kv_path": Change(hits, None, InFolder(lambda folder: folder), HOST),
    "disk_kv_bytes": Change(disk, 1 << 30, 1, HOST | {"disk_kv_path": InFolder(lambda folder: folder)}),
    "hybrid_attention": Change(hosts, "off", "always", {"hybrid_workers": 1}),
    "hybrid_form": Change(hosts, "workers", "link", ALWAYS | {"device": "auto"}),
    "hybrid_workers": Change(threads, 1, 3, ALWAYS | HOST),
    "hybrid_lanes": Change(gain, 8, 1),
    "steps_in_flight": Change(flights, 1, 2),
    "late_launch": Change(launches, True, False),
    "step_timeout_s": Change(hangs, 600.0, 0.2),
    "step_driver": Change(native_threads, "thread", "loop"),
    "cpu_affinity": Change(pinned, None, min(os.sched_getaffinity(0))),
    "cpu_threads": Change(threads, 1, 3),
    "prefill_attention": Change(story, "native", "sdpa"),
    "gpu_memory_utilization": Change(budget, 0.9, 0.5),
    "enforce_eager": Change(budget, False, True),
    "programmatic_launch": Change(kernels, True, False),
    "l2_cache_hints": Change(kernels, True, False),
    "batch_invariant": Change(kernels, False, True),
    "tune_linear": Change(tuned, True, False),
    "compile_processes": Change(compilers, True, False),
}
UNSEEN = {
    "data_parallel_size": "It makes another engine; tests/engine/test_data_parallel.py looks at several.",
    "tensor_parallel_size": "Several devices compute the same; tests/engine/test_tensor_parallel.py compares them.",
    "fast_prefill": "It leaves out what nobody sees; tests/models/test_shared_layers.py counts the rows.",
    "staging": "It moves the same bytes to a GPU in another way; tests/runner/test_device_steps.py runs each of them.",
}


def test_every_field_has_an_entry() -> None:
    assert not CHANGES.keys() & UNSEEN.keys()
    assert CHANGES.keys() | UNSEEN.keys() == {field.name for field in dataclasses.fields(EngineConfig)}


@pytest.mark.parametrize("field", CHANGES)
def test_a_change_is_seen(field: str, tmp_path: Path) -> None:
    change = CHANGES[field]
    if field == "cpu_affinity" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("every thread has the only core")
    made = iter(range(9))

    def value(given: Any) -> Any:
        if not isinstance(given, InFolder):
            return given
        folder = tmp_path / str(next(made))
        folder.mkdir()
        return str(given.make(folder))

    def look(given: Any) -> Any:
        return asyncio.run(change.see(**{name: value(v) for name, v in change.beside.items()}, **{field: value(given)}))

    seen = look(change.one)
    assert look(change.one) == seen
    assert look(change.other) != seen
