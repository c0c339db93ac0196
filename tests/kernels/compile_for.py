"""Compiles a kernel whenever it would be launched, for a GPU that is not there: ``python -m`` runs a step of a model.

Nothing is computed. It shows on any machine that kernels compile, and with what registers and memory. The target is a
compute capability without its point: 80 is Ampere (A100), 89 Ada (L40S), 90 Hopper (H100, H200).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from asyncengine.kernels.cuda.gpu import A100, H200, L40S, Gpu
from tests.kernels.forked import WITHOUT_PTXAS

if TYPE_CHECKING:
    from asyncengine.kernels.float8 import Quantization


HOPPER = 90


class CompileOnly(DriverBase):  # type: ignore[misc]
    """A driver that names its target and has nothing else."""

    def __init__(self, target: int = HOPPER) -> None:
        self._target = GPUTarget("cuda", target, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


class Counting(CompileOnly):
    """Loads kernels and launches them, as far as Triton can tell; keeps the names of those compiled and launched."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[str] = []
        self.launched: list[str] = []
        self.too_large: set[str] = set()
        self.launcher_cls = lambda source, metadata: lambda *args: self.launched.append(source.name)
        self.utils = self
        if WITHOUT_PTXAS in os.environ:
            leave_out_code()
        triton.runtime.driver.set_active(self)
        triton.knobs.compilation.listener = lambda src, **_: self.compiled.append(src.name)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        if name in self.too_large:
            raise triton.OutOfResources(shared, 0, "shared memory")
        return 1, 1, 0, 0, 1024


def leave_out_ptxas() -> None:
    """Have kernels end as PTX in this process, if the environment says so: ptxas takes a third of the time."""
    if WITHOUT_PTXAS in os.environ:
        CUDABackend.make_cubin = lambda self, source, metadata, options, capability: b""


def leave_out_code() -> None:
    """Have kernels end before LLVM in this process, for tests of which kernels compile, and when."""

    def make_llir(self: CUDABackend, source: Any, metadata: dict[str, Any], options: Any, capability: int) -> str:
        sizes = ("shared", "tmem_size", "global_scratch_size", "profile_scratch_size")
        metadata |= dict.fromkeys(sizes, 0) | {"global_scratch_align": 1, "profile_scratch_align": 1}
        metadata["name"] = re.findall(r"tt\.func public @(\w+)", str(source))[0]
        return ""

    CUDABackend.make_llir = make_llir
    CUDABackend.make_ptx = lambda self, source, metadata, options, capability: ""
    CUDABackend.make_cubin = lambda self, source, metadata, options, capability: b""


def leave_out_products() -> None:
    """Have the products of PyTorch's libraries give any numbers: the processor would take seconds for them."""
    from asyncengine.kernels.cuda.linear.formats.dense import Dense
    from asyncengine.kernels.cuda.linear.formats.float8 import Float8

    for form in (Dense, Float8):  # cuBLAS's and the scaled product
        form.product = lambda self, x, weight, bias, dtype, tile_rows=0: (  # type: ignore[method-assign]
            torch.empty(len(x), len(weight), dtype=dtype)
        )
    torch.addmm = lambda to, x, weight, out: out  # type: ignore[assignment]


def install(target: int = HOPPER) -> dict[str, Any]:
    """Let launches compile for ``target`` from now on. Returns the kernels compiled so far, by name and constants."""
    leave_out_ptxas()
    triton.runtime.driver.set_active(CompileOnly(target))
    launch, compiled = JITFunction.run, {}

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        compiled[f"{self.fn.__name__} {kernel.hash[:8]}"] = kernel
        return kernel

    JITFunction.run = run
    return compiled


def card_for(target: int) -> Gpu:
    """A card that has this compute capability."""
    return {80: A100, 89: L40S, HOPPER: H200}[target]


def spills(kernel: Any) -> list[str]:
    """A word for it if registers do not do for what install() compiled, and it keeps something in memory.

    Without ptxas that is not known, and there is no word.
    """
    if WITHOUT_PTXAS in os.environ:
        return []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kept = sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))
    return ["spills"] if kept else []


def policies(kernel: Any) -> set[str]:
    """Return the policies with which the copies of a kernel that install() compiled keep their data in the L2 cache."""
    copies = [line for line in kernel.asm["ptx"].splitlines() if "cp.async.bulk.tensor" in line]
    assert all(("L2::evict_" in line) == ("L2::cache_hint" in line) for line in copies)
    return {(re.findall(r"L2::(evict_\w+)", line) or ["as usual"])[0] for line in copies}


def stale_bounds(kernel: Any) -> list[str]:
    """A word for it if a loop within another begins or ends where it did in the turn before.

    Triton 3.6 takes what a loop over items hands on to its next turn for dead if it only bounds loops, and has them
    run as for the first item.
    """
    lines = [line.split(" loc(")[0] for line in kernel.asm["ttgir"].splitlines()]
    depth = [len(line) - len(line.lstrip()) for line in lines]
    for i, line in enumerate(lines):
        if not (loop := re.search(r"scf\.for %\w+ = (%[\w#]+) to (%[\w#]+)", line)):
            continue
        outer, inside = i, depth[i]
        while outer > 0 and not (depth[outer] < inside and "scf.for" in lines[outer]):
            outer, inside = outer - 1, min(inside, depth[outer])
        if outer == 0:
            continue
        last = next(j for j in range(i, len(lines)) if "scf.yield" in lines[j] and depth[j] == depth[outer] + 2)
        made = {}
        for text in lines[outer + 1 : i]:
            if text.lstrip().startswith("%"):  # others, stores and yields, make nothing
                name, *made[name] = re.findall(r"%\w+", text)
        induction = re.findall(r"scf\.for (%\w+)", lines[outer])
        handed = dict(
            zip(
                re.findall(r"(%\w+) = %", lines[outer].partition("iter_args(")[2]),
                re.findall(r"%[\w#]+", lines[last].partition(":")[0]),
                strict=False,
            )
        )
        bounds = [name for name in loop.groups() if not name.startswith("%c")]  # others are constants
        if not all(_changes(name, made, handed, induction) for name in bounds):
            return ["stale"]
    return []


def _changes(name: str, made: dict[str, list[str]], handed: dict[str, str], induction: list[str]) -> bool:
    """Return whether a value in a loop may be another in the next turn."""
    if name in handed:
        return handed[name] != name
    return name in induction or any(_changes(operand, made, handed, induction) for operand in made.get(name, ()))


def main(target: str, directory: str, dtype: str, quantization: Quantization = "none", amount: str = "all") -> None:
    from asyncengine import _core
    from asyncengine.config import EngineConfig
    from asyncengine.kernels.cuda.linear.plan import Plan, Site
    from asyncengine.kernels.cuda.linear.tables import PlanTable
    from asyncengine.kernels.cuda.ops import CudaOps, CudaOptions
    from asyncengine.kernels.cuda.sampling.vectors import store_vectors
    from asyncengine.kernels.cuda.step.ingest import ingest
    from asyncengine.kernels.cuda.step.tensors import allocate_step
    from asyncengine.runner.host.rows import HostRows
    from asyncengine.runner.start.prepare import make_steps
    from asyncengine.runner.steps.buckets import Bucket
    from asyncengine.runner.steps.device_steps import ARGMAX, EVERYTHING, SAMPLING
    from asyncengine.runner.steps.model_runner import load_model

    compiled = install(int(target))
    leave_out_products()
    config = EngineConfig(
        model=directory, dtype=dtype, load_format="dummy", max_num_seqs=4, max_num_batched_tokens=64, num_kv_blocks=8,
        max_model_len=128, quantization=quantization, staging="mapped",  # which has a kernel more
        hybrid_attention="always", host_kv_memory_bytes=1 << 20,
    )  # fmt: skip
    card = card_for(int(target))
    ops = CudaOps(torch.device("cpu"), CudaOptions(gpu=replace(card, tma=False)))
    loaded = load_model(config, ops)
    device = _core.SimulatedDevice(vocab_size=2)
    native = _core.CudaDevice.simulated(device)
    host_rows = HostRows.make(config, native, loaded)
    assert (host_rows is None) == (dtype == "float16"), "whose rows do not decode on the host"
    steps, _ = make_steps(config, loaded, ops, native, 8, host_rows)
    steps.state.input_ids.zero_()
    # Rows with several samples, records and entries, which no captured variant has.
    several = allocate_step(4, 8, 4, 64, ops.device, 12)
    ingest(steps.source, several, config.block_size, needs=int(~_core.Need(0)))
    ingest(steps.source, allocate_step(4, 8, 4, 64, ops.device, window_groups=2), config.block_size)
    hidden = torch.zeros(4, 64, dtype=loaded.dtype)
    store_vectors(hidden, several, steps.source.header, steps.source.outputs, 12, pdl=ops.options.pdl)
    if quantization == "fp8":  # which has kernels of ours for few rows, whatever the card
        for rows in (1, 4):
            steps.run(Bucket(rows, rows, True), ARGMAX)
    steps.run(Bucket(4, 64, False), ARGMAX)
    steps.run(Bucket(4, 64, False), SAMPLING)
    steps.run(Bucket(4, 64, False), EVERYTHING)
    if host_rows is not None:
        steps.run(Bucket(4, 64, False, lanes=host_rows.num_lanes), EVERYTHING)
    steps.run(Bucket(4, 4, True, 64), ARGMAX)
    steps.run(Bucket(4, 8, False, 64), ARGMAX)
    steps.run(Bucket(4, 4, True), ARGMAX)
    steps.copy_blocks()
    if (
        quantization == "none" and dtype == "bfloat16" and int(target) == HOPPER
    ):  # and what Hopper takes instead, where there is something
        c, plan = loaded.config, Plan("tma", 128, 64, 4, 8, stages=4, fused_norm=False)
        head = Site(c.vocab_size, c.hidden_size, 8, "rms", "argmax", False, False)
        up = head._replace(columns=c.intermediate_size, activation="silu_mul")
        plans = PlanTable({head: plan, up: plan})
        for hints in (True, False):
            streaming = CudaOps(ops.device, CudaOptions(plans, gpu=card, l2_cache_hints=hints))
            loaded = load_model(config, streaming)
            steps, _ = make_steps(config, loaded, streaming, native, 8)
            steps.state.input_ids.zero_()
            steps.run(Bucket(4, 4, True), ARGMAX)
            if amount == "all":
                steps.run(Bucket(1, 1, True), ARGMAX)
                steps.run(Bucket(4, 64, False), ARGMAX)
    for name, kernel in compiled.items():
        size = f"shared {kernel.metadata.shared} bytes, {kernel.metadata.num_warps} warps"
        print(f"{name}: {size}, copies {', '.join(sorted(policies(kernel))) or 'none'}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main(*sys.argv[1:])  # type: ignore[arg-type]
