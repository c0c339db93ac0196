"""Compiling side by side, seen on a driver that counts: ``python -m`` runs one of the functions below.

In processes of their own, since in that of the other tests kernels are interpreted.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITCallable

from asyncengine import _core
from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.gpu import H200, INTERPRETER
from asyncengine.kernels.cuda.launch import compile_processes, compiling
from asyncengine.kernels.cuda.launch.compiling import Kernel, compile_launches, kernel
from asyncengine.kernels.cuda.linear.plan import CUBLAS, MAX_ROWS, Plan, Site
from asyncengine.kernels.cuda.linear.tables import PlanTable
from asyncengine.kernels.cuda.linear.tma import tma_linear
from asyncengine.kernels.cuda.ops import CudaOps, CudaOptions
from asyncengine.runner.host.rows import HostRows
from asyncengine.runner.start.prepare import likely, make_steps, prepare_kernels
from asyncengine.runner.start.tuning import Tuner, _Case
from asyncengine.runner.steps.buckets import Bucket
from asyncengine.runner.steps.device_steps import VARIANTS, DeviceSteps, step_buckets
from asyncengine.runner.steps.model_runner import load_model
from tests.kernels.compile_for import Counting, leave_out_products

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
GPU = replace(INTERPRETER, name="NVIDIA H200", tma=True)
KERNELS = "asyncengine.runner.steps.device_steps"


@kernel
def fine(x, N: tl.constexpr):
    tl.store(x + N, N)


@kernel(do_not_specialize=["n"])
def also_fine(x, n):
    tl.store(x, n)


@kernel
def broken(x, N: tl.constexpr):
    tl.static_assert(N == 0, "this is what is wrong")
    tl.store(x, N)


@kernel
def too_large(x):
    tl.store(x, 1)


class Deadly:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


def raised(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as e:
        return e
    raise AssertionError("nothing was raised")


# ---- launches ----


def launches_only_compile(driver: Counting) -> None:
    x = torch.zeros(64, dtype=torch.int32)

    def enqueue() -> None:
        for n in (1, 2, 2, 2):
            fine[(1,)](x, N=n)
        fine[(1,)](x[1:], N=2)  # not aligned: another kernel
        for n in (1, 7, 16):
            also_fine[(1,)](x, n)
        also_fine[(1,)](x, 1 << 40)  # another type

    compile_launches([enqueue, enqueue], CPU, 4)
    assert sorted(driver.compiled) == ["also_fine"] * 2 + ["fine"] * 3
    assert driver.launched == []
    enqueue()
    assert len(driver.compiled) == 5
    assert driver.launched == ["fine"] * 5 + ["also_fine"] * 4


def what_fails_raises_when_it_is_launched(driver: Counting) -> None:
    x = torch.zeros(64, dtype=torch.int32)
    driver.too_large.add("too_large")
    calls = [partial(broken[(1,)], x, N=1), partial(too_large[(1,)], x), partial(fine[(1,)], x, N=1)]
    compile_launches(calls, CPU, 2)
    assert driver.launched == []
    assert sorted(driver.compiled) == ["fine", "too_large"]
    fine[(1,)](x, N=1)
    assert driver.launched == ["fine"]
    ours, theirs = raised(calls[0]), raised(partial(triton.jit(broken.fn)[(1,)], x, N=1))
    assert isinstance(ours, triton.CompilationError)
    assert type(ours) is type(theirs)
    assert str(ours) == str(theirs)
    assert "this is what is wrong" in str(ours)
    assert isinstance(raised(calls[1]), triton.OutOfResources)


def an_interrupt_ends_it(driver: Counting) -> None:
    x = torch.zeros(64, dtype=torch.int32)
    threads = threading.active_count()

    def enqueue() -> None:
        for n in range(40):
            fine[(1,)](x, N=n)
        raise KeyboardInterrupt

    try:
        compile_launches([enqueue], CPU, 2)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("the interrupt was swallowed")
    assert threading.active_count() == threads
    assert len(driver.compiled) < 40, "what had not begun is not waited for"
    assert driver.launched == []
    fine[(1,)](x, N=39)  # launches are launches again
    assert driver.launched == ["fine"]


def other_threads_launch(driver: Counting) -> None:
    x = torch.zeros(64, dtype=torch.int32)
    other = threading.Thread(target=partial(fine[(1,)], x, N=1))

    def enqueue() -> None:
        fine[(1,)](x, N=2)
        other.start()
        other.join()

    compile_launches([enqueue], CPU, 2)
    assert driver.launched == ["fine"]


# ---- processes, which know these kernels by this module's own name ----


def processes_compile(driver: Counting) -> None:
    here = import_module("tests.kernels.side_by_side")
    x, found = torch.zeros(64, dtype=torch.int32), []
    triton.knobs.compilation.listener = lambda src, cache_hit, **_: found.append((src.name, cache_hit))
    with compile_processes.compile_processes(2, KERNELS) as processes:
        processes.start()
        assert processes.ready(60)
        calls = [partial(here.fine[(1,)], x, N=n) for n in range(6)]
        compile_launches([*calls, partial(here.broken[(1,)], x, N=1), partial(fine[(1,)], x, N=9)], CPU, 4)
        assert sorted(found) == [("fine", False)] + [("fine", True)] * 6
        assert processes.compiled == 7
        error = raised(partial(here.broken[(1,)], x, N=1))
    assert "this is what is wrong" in str(error)
    assert driver.launched == []
    for call in calls:
        call()
    assert len(found) == 7
    assert not processes.ready()
    assert threading.active_count() == 1


def a_compilation_starts_processes(driver: Counting) -> None:
    here = import_module("tests.kernels.side_by_side")
    x = torch.zeros(64, dtype=torch.int32)
    with compile_processes.compile_processes(2, KERNELS) as processes:
        assert processes._socket is not None, "the cache is empty"
        assert processes.ready(60)
        compile_launches([partial(here.fine[(1,)], x, N=0)], CPU, 2)
        assert processes.compiled == 1
    for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*"):
        os.utime(path, (0, 0))
    with compile_processes.compile_processes(2, KERNELS) as processes:
        here.fine.device_caches.clear()
        here.fine[(1,)](x, N=0)
        assert driver.compiled == ["fine", "fine"]
        assert processes._socket is None, "it was in the cache"
        here.fine[(1,)](x, N=1)
        assert processes.ready(60)
        with compile_processes.compile_processes(2, KERNELS) as others:
            assert others is None, "one engine's start has them"
        here.fine[(1,)](x, N=2)
        assert processes.compiled == 1
    with compile_processes.compile_processes(1, KERNELS) as processes:
        assert processes is None


def a_process_that_dies_is_done_without(driver: Counting) -> None:
    here = import_module("tests.kernels.side_by_side")
    x = torch.zeros(64, dtype=torch.int32)
    with compile_processes.compile_processes(2, KERNELS) as processes:
        processes.start()
        assert processes.ready(60)
        for _ in range(2):
            processes.compile(SimpleNamespace(fn=here.fine, signature={}, constants=Deadly(), attrs={}), {})
        assert processes.compiled == 0
        processes._process.wait(60)
        assert not processes.ready()
        calls = [partial(here.fine[(1,)], x, N=n) for n in range(6)]
        compile_launches(calls, CPU, 4)
        for call in calls:
            call()
    assert driver.compiled == ["fine"] * 6
    assert driver.launched == ["fine"] * 6
    sys.executable = "/is/not/there"
    with compile_processes.compile_processes(2, KERNELS) as processes:
        processes.start()
        compile_launches([partial(here.fine[(1,)], x, N=7)], CPU, 4)
    assert driver.compiled == ["fine"] * 7
    assert threading.active_count() == 1


# ---- steps ----


class Start:
    """The part of an engine's start that prepares its kernels, with projections that the H200's table knows."""

    def __init__(self, directory: Path, plans: PlanTable, **config: Any) -> None:
        small = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_kv_blocks": 8, "max_model_len": 128}
        self.config = EngineConfig(model=str(directory), dtype="bfloat16", load_format="dummy", **small | config)
        invariant = self.config.batch_invariant
        self.ops = CudaOps(CPU, CudaOptions(plans, pdl=True, batch_invariant=invariant, gpu=GPU))
        self.loaded = load_model(self.config, self.ops)
        self.device = _core.SimulatedDevice(vocab_size=2)
        self.native = _core.CudaDevice.simulated(self.device)
        self.host_rows = HostRows.make(self.config, self.native, self.loaded)
        lanes = 0 if self.host_rows is None else self.host_rows.num_lanes
        self.buckets = step_buckets(self.config, self.loaded, self.ops, lanes)
        self.tuner = FakeTuner()

    def steps(self, num_blocks: int) -> DeviceSteps:
        steps, self.buffers = make_steps(self.config, self.loaded, self.ops, self.native, num_blocks, self.host_rows)
        steps.state.input_ids.zero_()
        return steps

    def prepare(self) -> None:
        prepare_kernels(self.config, self.ops, self.steps(1), self.buckets, self.tuner)


class FakeTuner:
    """Likes the second plan best."""

    def __init__(self) -> None:
        self.compiled: dict[Site, list[Plan]] = {}
        self.measured: list[Site] = []

    def compile(self, plans: Mapping[Site, Iterable[Plan]], threads: int) -> None:
        self.compiled |= {site: list(some) for site, some in plans.items()}

    def fastest(self, site: Site, plans: Iterable[Plan]) -> list[tuple[float, Plan]]:
        self.measured.append(site)
        first, second, *_ = plans
        assert first == CUBLAS
        return [(1.0, second), (2.0, first)]


def one_layer(directory: Path, vocab: int, shape: str = "qwen3-0.6b") -> Path:
    config = json.loads((ROOT / "bench/shapes" / shape / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("layer_types", "max_window_layers")}
    layers = "n_layer" if "n_layer" in config else "num_hidden_layers"
    (directory / "config.json").write_text(json.dumps(config | {layers: 1, "vocab_size": vocab, "eos_token_id": None}))
    return directory


def run_all(steps: DeviceSteps, buckets: list[Bucket]) -> None:
    for bucket in reversed(buckets):
        for variant in VARIANTS:
            steps.run(bucket, variant)
    steps.copy_blocks()


def large_steps_launch_what_was_compiled(driver: Counting, directory: Path) -> None:
    """Each count of tokens has tiles of its own."""
    buckets = launch_what_was_compiled(one_layer(directory, 1000, "gpt2"), max_num_seqs=80, max_num_batched_tokens=1100)
    assert len({bucket.max_tokens for bucket in buckets if bucket.max_tokens > MAX_ROWS}) > 8


def many_rows_launch_what_was_compiled(driver: Counting, directory: Path) -> None:
    """Some counts of rows up to 256 leave projections of many products to cuBLAS, and the operations around them to
    kernels."""
    directory = one_layer(directory, 1000, "llama-3.1-8b")
    buckets = launch_what_was_compiled(directory, max_num_seqs=256, max_num_batched_tokens=256)
    assert {160, 192, 224, 256} <= {bucket.max_rows for bucket in buckets if bucket.single_token_rows}


def steps_with_lanes_launch_what_was_compiled(driver: Counting, directory: Path) -> None:
    hybrid = {"hybrid_attention": "always", "hybrid_lanes": 6, "host_kv_memory_bytes": 1 << 30}
    small = {"max_num_seqs": 40, "max_num_batched_tokens": 300}
    buckets = launch_what_was_compiled(one_layer(directory, 1000), **small, **hybrid)
    assert {bucket.lanes for bucket in buckets} == {0, 6}


def launch_what_was_compiled(directory: Path, **config: Any) -> list[Bucket]:
    """The buckets. Nothing is compiled here: kernels are what Triton tells apart."""
    start = Start(directory, PlanTable.load(GPU.name), tune_linear=False, **config)
    launches: set[Any] = set()

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        kinds = (None if p.do_not_specialize else compiling._kind(x) for p, x in zip(kernel.params, args, strict=False))
        launches.add((kernel, *kinds, *constants.items()))

    compiling.Kernel.run = launch  # type: ignore[method-assign,assignment]
    leave_out_products()
    start.prepare()
    compiled = launches.copy()
    run_all(start.steps(1), start.buckets)
    assert len(compiled) > 40
    assert launches == compiled
    return start.buckets


def steps_find_their_kernels(driver: Counting, directory: Path) -> None:
    """Steps find their kernels with another cache, of a size of its own, in the other order."""
    start = Start(one_layer(directory, vocab=1000), PlanTable.load(GPU.name), tune_linear=False)
    start.prepare()
    assert driver.launched == []
    compiled = sorted(driver.compiled)
    assert {"_ingest", "_tma_decode_kernel", "vector_kernel", "_tma_kernel",
            "finish_kernel", "_copy_blocks"} <= set(compiled)  # fmt: skip
    run_all(start.steps(8), start.buckets)
    assert sorted(driver.compiled) == compiled, "a launch needed a kernel that had not been compiled"
    assert set(driver.launched) == set(compiled), "a kernel was compiled that no launch needed"


def a_second_start_measures_nothing(driver: Counting, directory: Path) -> None:
    def start(**config: Any) -> Start:
        start = Start(directory, PlanTable.load(GPU.name), **config)
        start.prepare()
        return start

    leave_out_products()
    one_layer(directory, vocab=20_000)  # the head is what no table knows
    with patch.object(compiling.Kernel, "run", lambda *args, **constants: None):  # no kernel of these is looked at
        for off in ({"tune_linear": False}, {"programmatic_launch": False}, {"batch_invariant": True}):
            assert start(**off).tuner.measured == []
    first = start()
    assert {site.columns for site in first.tuner.measured} == {20_000}
    rows = [(site.rows, site.activation) for site in first.tuner.measured]
    assert rows == [(1, None), (8, "argmax"), (8, None), (16, None)]  # more samples than rows: prompts that are scored
    assert not first.ops.choices.missing
    compiled = len(driver.compiled)
    run_all(first.steps(8), first.buckets)
    assert len(driver.compiled) == compiled, "steps use the new plans, whose kernels are compiled too"
    assert {"_first_kernel", "_tiles_kernel"} <= set(driver.launched), "steps of more than one row take ranks"
    second = start()
    assert second.tuner.measured == []
    for site in first.tuner.measured:
        assert second.ops.options.plans.find(site) == first.tuner.compiled[site][1]


def the_cache_finds_kernels_in_any_order(driver: Counting) -> None:
    """The first start hashes what it measures before what a step launches, the second has no need to."""
    modules = [module for name, module in sys.modules.items() if name.startswith("asyncengine.kernels.")]
    found = {f"{module.__name__}.{name}": value for module in modules for name, value in vars(module).items()}
    functions = {name: value for name, value in found.items() if isinstance(value, JITCallable)}
    launched = [name for name, function in functions.items() if isinstance(function, Kernel)]
    assert len(launched) > 20
    keys = []
    for names in (launched, launched[::-1]):
        for function in functions.values():
            function.hash, function.used_global_vals = None, {}
        keys.append({name: functions[name].cache_key for name in names})
    assert keys[0] == keys[1]


def plans_compile_without_operands(driver: Counting) -> None:
    sites = [Site(2048, 1536, rows, "rms", "silu_mul", False, False) for rows in (1, 16)]
    sites += [Site(1536, 2048, rows, "none", None, True, True) for rows in (1, 32)]
    sites += [Site(1536, 2048, 8, "layer", None, True, False), Site(32000, 1536, 64, "rms", "argmax", False, False)]
    plans = {site: likely(site, PlanTable.shipped(), H200, 2) for site in sites}
    tuner = Tuner(CPU, H200, pdl=True)
    tuner.compile({site: [CUBLAS, *some] for site, some in plans.items()}, 2)
    compiled = len(driver.compiled)
    assert compiled >= 8
    assert driver.launched == []
    for site, some in plans.items():
        case = _Case.allocate(site, CPU, calls=1)
        for plan in some:
            case.call(tuner._ops(site, plan), case.handles[0])
    assert len(driver.compiled) == compiled, "timing finds what was compiled"
    assert len(driver.launched) >= 10


def a_plan_compiles_once(driver: Counting) -> None:
    """A plan compiles once for all counts of rows that it is for, multiples of 16 or not."""
    plan = Plan("tma", 64, 64, 4, 32, stages=2, fused_norm=False)
    for rows in (17, 24, 32):
        x, weight, out = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((rows, 128), (96, 128), (rows, 96)))
        tma_linear(x, weight, plan, out=out)
    assert driver.compiled == ["_tma_kernel"]
    assert len(driver.launched) == 3


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    globals()[name](Counting(), *map(Path, arguments))
