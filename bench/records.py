"""Measures the records of bench/results anew, a chunk at a time.

    python bench/records.py [CHUNK ...] [--out DIR] [--list]

A chunk is a list of benchmarks that takes at most nine minutes on an H100 or H200 (gpu-1 to gpu-5, in the order of what
they are worth), or on two cores (cpu-1 to cpu-5). Each benchmark has a limit on its time; one that fails or takes
longer leaves the others alone, and the command ends with 1. ``--list`` prints the commands.

A record names the commit that it measured. In a checkout that must be clean. A copy without git says it by the
environment variable ASYNCENGINE_COMMIT.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpu_common import child_environment

from asyncengine.cli.benchmarks import report

ROOT = Path(__file__).resolve().parents[1]
CHUNK_LIMIT_S = 540
_LAST_WORDS_S = 10
CLEAN = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True)
class Measurement:
    """One benchmark and the record that it writes."""

    record: str
    """The file's name without its suffix."""
    command: str
    """Command line after ``python``. {disk} is a folder that is empty before and removed afterwards."""
    limit_s: int


_FEATURES = " ".join(
    f"--feature '{name}'"
    for name in ("a temperature", "penalties, 16 biases", "top-20 log probabilities", "chosen log probability")
)
_HYBRID = "--only hybrid --repeats 1 --in-flight 256 --hybrid-host-gb 52 --contexts 2048 --ways swap,auto"

CHUNKS: dict[str, tuple[Measurement, ...]] = {
    "gpu-1": (
        Measurement(
            "memory", "bench/memory.py --only prefix --disk {disk} --pool-gb 5 --host-gb 10 --repeats 2", 150,
        ),
        Measurement("memory_resume", "bench/memory.py --only resume --repeats 2", 130),
        Measurement("long_prompt", "bench/long_prompt.py --repeats 3", 160),
        Measurement("slow_mask", "bench/slow_mask.py", 90),
    ),
    "gpu-2": (
        Measurement("features", f"bench/features.py --model gpt2 --model llama-3.1-8b {_FEATURES} --repeats 3", 240),
        Measurement(
            "features_schema",
            "bench/features.py --model llama-3.1-8b --rows 64 --feature 'JSON schema' --repeats 3", 100,
        ),
        Measurement("embeddings", "bench/embeddings.py", 90),
        Measurement(
            "kernels_fp8_kv",
            "bench/kernels.py attention --shape llama-3.1-8b --kv-cache-dtype auto fp8 --contexts 16384 "
            "--decode-rows 64 --ragged 8 --prefill 1x2048+14336 --no-targets --repeats 5", 90,
        ),
    ),
    "gpu-3": (
        Measurement("decode", "bench/decode.py", 350),
        Measurement("streaming", "bench/streaming.py", 180),
    ),
    "gpu-4": (
        Measurement("overlap", "bench/overlap.py", 340),
        Measurement("prefill", "bench/prefill.py", 190),
    ),
    "gpu-5": (
        Measurement("memory_hybrid", f"bench/memory.py {_HYBRID} --pools 1,3.5 --warm-up 30 --seconds 10", 330),
        Measurement(
            "decode_fp8", "bench/decode.py --model llama-3.1-8b --contexts '' --quantization fp8", 110,
        ),
        Measurement(
            "decode_invariant",
            "bench/decode.py --model gpt2 --batches 1,64 --contexts '' --batch-invariant", 90,
        ),
    ),
    "cpu-1": (
        Measurement("core", "-m asyncengine bench core", 60),
        Measurement("startup", "bench/startup.py --wait 3", 120),
    ),
    "cpu-2": (Measurement("server_sim", "bench/server_sim.py --wait 3", 240),),
    "cpu-3": (Measurement("hostile", "bench/hostile.py", 480),),
    "cpu-4": (Measurement("cpu_generation", "bench/cpu_generation.py --repeats 3 --wait 3", 240),),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("chunk", nargs="*", default=list(CHUNKS), help=f"of {', '.join(CHUNKS)} (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results", help="folder for the records")
    parser.add_argument("--list", action="store_true", help="print the commands")
    args = parser.parse_args()
    if unknown := set(args.chunk) - CHUNKS.keys():
        parser.error(f"there is no chunk {', '.join(sorted(unknown))}")
    if args.list:
        for name in args.chunk:
            print(f"{name}: at most {sum(one.limit_s for one in CHUNKS[name])} s")
            for one in CHUNKS[name]:
                print(f"  {one.limit_s:>4} s  python {one.command} --json {one.record}.json")
        return
    check_commit(report.commit())
    if failed := [one.record for name in args.chunk for one in CHUNKS[name] if not measure(one, args.out)]:
        raise SystemExit(f"no record of {', '.join(failed)}")


def check_commit(commit: str) -> None:
    """Raises SystemExit where a record would not say which code it measured."""
    if CLEAN.fullmatch(commit) is None:
        raise SystemExit(f"a record must name the commit that it measured, and this is {commit}: see --help")


def measure(one: Measurement, folder: Path) -> bool:
    """Run a measurement. Returns whether it wrote its record in time."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{one.record}.json"
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as disk:
        command = [sys.executable, *words(one, disk), "--json", str(target)]
        print(f"== {one.record}: {' '.join(command[1:])}", flush=True)
        done = run(command, one.limit_s)
    print(f"== {one.record}: {done} after {time.monotonic() - started:.0f} s", flush=True)
    return done == "written" and target.exists()


def words(one: Measurement, disk: str) -> list[str]:
    """Return the command line of a measurement, after ``python``."""
    return shlex.split(one.command.format(disk=disk))


def run(command: Sequence[str], limit_s: float) -> str:
    """Run it in a session of its own: "written", or why not. Some benchmarks keep what they have when interrupted."""
    with subprocess.Popen(command, cwd=ROOT, env=child_environment(), start_new_session=True) as process:
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS_S)
            return "took too long"
        finally:
            with suppress(ProcessLookupError):  # also of processes that it left
                os.killpg(process.pid, signal.SIGKILL)
    return "written" if status == 0 else f"ended with {status}"


if __name__ == "__main__":
    main()
