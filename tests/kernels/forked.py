"""Runs code in processes that have imported torch and Triton already, without the interpreter of kernels.

An import takes two seconds, and a test of what compiles little more. A process that has imported everything forks for
each script: nothing that one does to Triton is seen by the next.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_PTXAS = "KERNELS_WITHOUT_PTXAS"
"""Environment variable with which kernels compile to PTX and no further, or, for tests of what
compiles when, end before LLVM. Registers are then not known."""


def run_forked(arguments: Sequence[str], **environment: str) -> list[str]:
    """The lines that ``python ARGUMENTS`` prints (-c CODE ... or -m MODULE ...); it must end with 0."""
    with tempfile.TemporaryDirectory() as directory:
        printed, errors = Path(directory) / "printed", Path(directory) / "errors"
        job = {"arguments": arguments, "environment": environment, "files": [str(printed), str(errors)]}
        parent = _parent()
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(json.dumps(job) + "\n")
        parent.stdin.flush()
        status = parent.stdout.readline()
        assert status == "0\n", errors.read_text()[-3000:]
        return printed.read_text().splitlines()


@cache
def _parent() -> subprocess.Popen[str]:
    """Start the parent of forks. It ends when its standard input does, at the latest with this process."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.kernels.forked"], cwd=ROOT, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    atexit.register(parent.communicate)
    return parent


def serve() -> None:
    """A line of standard input is a job; its exit status is a line of standard output."""
    for module in ("tests.kernels.compile_for", "asyncengine.runner.host.rows", "asyncengine.runner.start.tuning"):
        import_module(module)  # and with them torch, Triton and the kernels of a step

    for line in sys.stdin:
        job = json.loads(line)
        if (child := os.fork()) == 0:
            os._exit(_run(job["arguments"], job["environment"], job["files"]))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(arguments: Sequence[str], environment: Mapping[str, str], files: Sequence[str]) -> int:
    """The exit status."""
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    kind, what, *rest = arguments
    sys.argv = [kind, *rest]
    try:
        if kind == "-c":
            exec(compile(what, "<script>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(what, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    serve()
