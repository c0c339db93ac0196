"""The Python tests of cancellation, preemption and the scheduler's models, over a core that is built with sanitizers.

    python tests/sanitized.py address|thread

The interpreter and torch are not instrumented, so leaks are not looked for, and tests that fork are left out under the
thread sanitizer, which does not follow a fork. Exits with 0 if the tests pass without a report. Linux, GCC.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pybind11

ROOT = Path(__file__).resolve().parents[1]
FLAGS = {"address": "address,undefined", "thread": "thread"}
LIBRARIES = {"address": "libasan.so", "thread": "libtsan.so"}
TESTS = ("tests/core/test_state_machine.py", "tests/engine/test_simulated_life.py", "tests/engine/test_simulated.py",
         "tests/engine/test_fairness.py")  # fmt: skip
LEFT_OUT = "not script and not process and not fork and not timing"


def build(kind: str, tree: Path) -> None:
    """The core with its bindings, beside a copy of the package and its tests."""
    built = ROOT / "build" / f"python-{kind}"
    subprocess.run(
        [
            "cmake", "-S", str(ROOT), "-B", str(built), "-G", "Ninja",
            "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS=-O1",
            f"-DASYNCENGINE_SANITIZE={FLAGS[kind]}", f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        ],
        check=True,
    )  # fmt: skip
    subprocess.run(["cmake", "--build", str(built)], check=True)
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("asyncengine", "tests", "bench"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    for module in built.glob("_core*.so"):
        shutil.copy(module, tree / "asyncengine")
    # An environment that finds this copy, and not what is installed, before the packages of the running one.
    venv.create(tree / "venv", symlinks=True)
    packages = sysconfig.get_path("purelib")
    (next((tree / "venv" / "lib").glob("python*")) / "site-packages" / "tree.pth").write_text(f"{tree}\n{packages}\n")


def library(name: str) -> str:
    found = subprocess.run(["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return found.stdout.strip()


def main() -> int:
    kind = sys.argv[1]
    tree = ROOT / "build" / f"tree-{kind}"
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    build(kind, tree)
    environment = os.environ | {
        "LD_PRELOAD": f"{library(LIBRARIES[kind])} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "report_signal_unsafe=0 history_size=4 exitcode=66",
    }
    command = [str(tree / "venv/bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    return subprocess.run([*command, *TESTS, "-k", LEFT_OUT], cwd=tree, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
