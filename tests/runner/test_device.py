"""A device is named by its number, from the configuration down to every call that is made for it."""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncengine import AsyncEngine, EngineConfig, SamplingParams, _core
from asyncengine.bundled import path as bundled_path
from asyncengine.cli import flags
from asyncengine.errors import ConfigError
from asyncengine.runner.backend import choose_device, load_backend
from asyncengine.runner.cuda_runner import CudaRunner, find_gpu
from asyncengine.runner.state import memory
from asyncengine.runner.steps.model_runner import CpuModelRunner, cpu_ops
from asyncengine.text.tokenizer import placeholder_tokenizer
from tests.kernels import simulated_cuda
from tests.models import tiny

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(bundled_path())


def config(device: str) -> EngineConfig:
    return EngineConfig(model=MODEL, device=device)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device | None]:
    """Two GPUs that torch sees; the current one of this thread is the last of the list."""
    current: list[torch.device | None] = [None]

    @contextlib.contextmanager
    def use(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.device", use)
    return current


@pytest.mark.parametrize(("name", "kind", "index"), [("cpu", "cpu", 0), ("cuda", "cuda", 0), ("cuda:1", "cuda", 1)])
def test_a_device_is_a_kind_and_a_number(name: str, kind: str, index: int) -> None:
    assert choose_device(config(name)) == kind
    assert config(name).device_index == index
    parser = argparse.ArgumentParser()
    flags.add_dataclass(parser, EngineConfig, "engine", exclude=["model"])
    assert parser.parse_args(["--device", name]).device == name


@pytest.mark.parametrize(
    "name", ["", "gpu", "cuda:", "cuda:-1", "cuda:01", "cuda:1.0", "cuda:99999", "cuda:1 ", "CUDA:0", "cuda:\u0661"]
)  # fmt: skip
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="device must be auto, cpu, cuda or cuda:NUMBER"):
        config(name)


def test_what_needs_a_gpu_is_refused_on_the_cpu_alone() -> None:
    assert EngineConfig(model=MODEL, device="cuda:1", quantization="fp8").quantization == "fp8"
    with pytest.raises(ConfigError, match="needs a GPU"):
        EngineConfig(model=MODEL, device="cpu", quantization="fp8")


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(
    two_gpus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_gpu(config("cuda:1")) == torch.device("cuda", 1)
    assert find_gpu(config("cuda")) == find_gpu(config("auto")) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="device=cuda:99, but torch sees 2 GPUs, cuda:0 to cuda:1"):
        load_backend(config("cuda:99"), progress=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match="device=cuda:1, but torch sees one GPU, cuda:0"):
        find_gpu(config("cuda:1"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="device=cuda:1, but torch sees no GPU"):
        find_gpu(config("cuda:1"))


def test_model_and_graphs_are_made_where_the_device_is_current(
    two_gpus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def load(config: EngineConfig, device: torch.device, *, progress: bool) -> CudaRunner:
        seen.append((device, two_gpus[-1]))
        runner = object.__new__(CudaRunner)
        runner.cuda_stream = SimpleNamespace(device=device)  # type: ignore[assignment]
        return runner

    def make(self: CudaRunner, config: EngineConfig, *, progress: bool, measure: bool) -> str:
        seen.append((self.cuda_stream.device, two_gpus[-1]))
        return "a step loop"

    monkeypatch.setattr(CudaRunner, "_load", load)
    monkeypatch.setattr(CudaRunner, "_make_step_loop", make)
    runner = CudaRunner.load(config("cuda:1"))
    assert runner.make_step_loop(config("cuda:1"), progress=False) == "a step loop"
    assert seen == [(torch.device("cuda", 1),) * 2] * 2
    assert two_gpus == [None]


def test_memory_is_counted_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {0: 10 << 30, 1: 70 << 30}
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free[device.index], 80 << 30))
    budgets = [memory.device_budget(config("cuda"), torch.device("cuda", i), 0, 0, 0) for i in (0, 1)]
    assert budgets[1] - budgets[0] == 60 << 30


def test_a_model_names_its_gpu() -> None:
    cpu = CpuModelRunner.load(config("cpu"), progress=False, ops=cpu_ops(config("cpu"))).info
    assert (cpu.device_index, cpu.device_label) == (None, "cpu")
    assert replace(cpu, device="NVIDIA H200", device_index=1).device_label == "NVIDIA H200 (cuda:1)"


# Functions of torch.cuda that take the current device where they are given none.
TAKE_A_DEVICE = {
    "Stream", "current_stream", "get_device_capability", "get_device_name", "get_device_properties",
    "max_memory_allocated", "mem_get_info", "memory_allocated", "reset_peak_memory_stats", "synchronize",
}  # fmt: skip
IMPLICIT = {"current_device", "set_device"}


def test_no_module_asks_torch_for_the_current_device() -> None:
    found = []
    for path in sorted((ROOT / "asyncengine").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != "torch.cuda":
                continue
            if node.attr in IMPLICIT:
                found.append((path.name, node.attr))
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("torch.cuda."):
                name = ast.unparse(call.func).removeprefix("torch.cuda.")
                if name in TAKE_A_DEVICE and not call.args:
                    found.append((path.name, name))
    # A thread that compiles makes the device of its launches current, for good.
    assert found == [("compiling.py", "set_device")]


def test_a_second_device_serves_while_the_first_is_anothers(tmp_path: Path) -> None:
    """Memory, graphs, steps, copies to the host and their end: every call is made where the device is current."""
    tiny.build_model("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    placeholder_tokenizer(tiny.VOCAB_SIZE).backend.save(str(tmp_path / "tokenizer.json"))
    first, wrong = _core.SimulatedDevice(vocab_size=8), _core.SimulatedDevice.wrong_device_calls()
    settings = EngineConfig(
        model=str(tmp_path), dtype="float32", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16,
        num_kv_blocks=8, host_kv_memory_bytes=1 << 20, step_timeout_s=600.0,
    )  # fmt: skip

    async def main() -> tuple[int, int]:
        async with AsyncEngine(settings, simulated_cuda.load) as engine:
            backend: Any = engine._life.backend
            output = await engine.generate([3, 4, 5], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
            index = _core.CudaDevice.simulated(backend.keep_alive[1]).index
            return len(output.outputs[0].token_ids), index

    count, index = asyncio.run(main())
    gc.collect()
    assert count == 2
    assert index != _core.CudaDevice.simulated(first).index
    assert _core.SimulatedDevice.wrong_device_calls() == wrong
