"""``asyncengine collect-env``: what a bug report needs, and no secret."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from asyncengine.cli.flags import ENVIRONMENT_PREFIX
from asyncengine.version import VERSION

_PACKAGES = (
    "torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub",
    "aiohttp", "uvloop", "msgspec", "prometheus_client", "jinja2",
)  # fmt: skip
_ISA = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_bf16", "amx_int8", "amx_tile", "asimd", "sve", "bf16",
)  # fmt: skip
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "LD_PRELOAD")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace) -> int:
    for name, value in _report():
        print(f"{name + ':':<20} {value}")
    return 0


def _report() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} ({platform.python_implementation()}, {sys.platform})"
    yield "platform", platform.platform()
    yield "libc", " ".join(platform.libc_ver())
    yield "asyncengine", VERSION
    for package in _PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            yield package, "not installed"
    native = importlib.util.find_spec("asyncengine._core")
    yield "native module", native.origin or "found" if native else "not built"
    if native:
        yield "CPU kernels", _kernels()
    yield from hardware()
    for name in sorted(os.environ):
        if name in _VARIABLES or (name.startswith(ENVIRONMENT_PREFIX) and "KEY" not in name):
            yield name, os.environ[name]


def hardware() -> Iterator[tuple[str, str]]:
    """Processor, instruction sets, cores, memory and GPUs, by name."""
    yield from _processor()
    yield from _memory()
    yield from _gpus()


def _processor() -> Iterator[tuple[str, str]]:
    facts = _colon_file("/proc/cpuinfo")
    yield "processor", facts.get("model name") or platform.processor() or platform.machine()
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    yield "instruction sets", " ".join(name for name in _ISA if name in flags) or "unknown"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "cores", f"{usable} usable of {os.cpu_count()}"
    quota = _read("/sys/fs/cgroup/cpu.max")
    if quota and not quota.startswith("max"):
        yield "cpu quota", quota


def _kernels() -> str:
    try:
        from asyncengine._core import CpuKernels
    except ImportError as exc:  # built for another Python, or for other libraries
        return f"the native module cannot be loaded: {exc}"
    kernels = CpuKernels(1)
    return f"{kernels.isa}, for blocks of GGUF {kernels.block_kernels}"


def _memory() -> Iterator[tuple[str, str]]:
    facts = _colon_file("/proc/meminfo")
    for name in ("MemTotal", "MemAvailable"):
        if name in facts:
            yield name, f"{int(facts[name].split()[0]) / 2**20:.1f} GiB"
    limit = _read("/sys/fs/cgroup/memory.max")
    if limit and limit != "max":
        yield "memory limit", f"{int(limit) / 2**30:.1f} GiB"


def _gpus() -> Iterator[tuple[str, str]]:
    try:
        import torch
    except ImportError:
        return
    yield "CUDA of torch", torch.version.cuda or "none: a build for the CPU"
    driver = _read("/proc/driver/nvidia/version").partition("\n")[0]
    if driver:
        yield "NVIDIA driver", driver
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        yield f"GPU {i}", f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, compute capability {gpu.major}.{gpu.minor}"


def _colon_file(path: str) -> dict[str, str]:
    """The first value of each ``name: value`` line."""
    facts: dict[str, str] = {}
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    return facts


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:  # another kernel
        return ""
