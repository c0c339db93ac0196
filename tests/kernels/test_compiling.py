"""Kernels compile side by side, before a step launches them: without a GPU, on a driver that counts."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest
from triton.runtime.build import compile_module_from_src

import asyncengine.kernels.cuda.launch.compiling  # noqa: F401 - which has Triton load apart
from tests.amounts import has_all_cases
from tests.kernels.forked import WITHOUT_PTXAS, run_forked

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "case",
    [
        "launches_only_compile",
        "what_fails_raises_when_it_is_launched",
        "an_interrupt_ends_it",
        "other_threads_launch",
        "plans_compile_without_operands",
        "a_plan_compiles_once",
        "the_cache_finds_kernels_in_any_order",
        "processes_compile",
        "a_compilation_starts_processes",
        "a_process_that_dies_is_done_without",
    ],
)
def test_launches(tmp_path: Path, case: str) -> None:
    run(tmp_path / "triton", tmp_path / "own", case)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's cache for all steps, which have kernels in common. A kernel that is found counts as compiled."""
    return tmp_path_factory.mktemp("triton")


@pytest.mark.parametrize(
    "case",
    [
        "large_steps_launch_what_was_compiled",
        "many_rows_launch_what_was_compiled",
        "steps_with_lanes_launch_what_was_compiled",
        pytest.param("steps_find_their_kernels", marks=pytest.mark.exhaustive),
        "a_second_start_measures_nothing",
    ],
)
def test_steps(tmp_path: Path, cache: Path, case: str) -> None:
    run(cache, tmp_path / "own", case, str(tmp_path))


def run(cache: Path, own: Path, *arguments: str) -> None:
    without_ptxas = {} if has_all_cases() else {WITHOUT_PTXAS: "1"}
    run_forked(
        ["-m", "tests.kernels.side_by_side", *arguments], TRITON_CACHE_DIR=str(cache), ASYNCENGINE_CACHE=str(own),
        **without_ptxas,
    )  # fmt: skip


def test_whatever_a_step_launches_can_be_compiled_alone() -> None:
    """A bare triton.jit among them would run in a dry run, on memory that nothing has written."""
    launched = 0
    for path in sorted((ROOT / "asyncengine" / "kernels").rglob("*.py")):
        if path.name == "trials.py":  # they are no part of a step
            continue
        tree = ast.parse(path.read_text())
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            names = {ast.unparse(decorator).partition("(")[0] for decorator in function.decorator_list}
            compiles = bool(names & {"kernel", "GluonKernel"})
            bare = bool(names & {"triton.jit", "gluon.jit"})
            assert compiles or not bare or not is_launched(tree, function.name), function.name
            launched += compiles
    assert launched >= 19


def is_launched(tree: ast.Module, name: str) -> bool:
    """Return whether a module names a function elsewhere than in a call: to launch it, or to choose what to launch.

    A function that a kernel hands to its warps or to a reduction, or that becomes one in Gluon, does not count.
    """
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {id(call.func) for call in calls}
    takers = ("gl.warp_specialize", "gl.reduce", "gluon.jit")
    called |= {id(n) for call in calls if ast.unparse(call.func) in takers for n in ast.walk(call)}
    return any(isinstance(node, ast.Name) and node.id == name and id(node) not in called for node in ast.walk(tree))


MODULE = """
#include <Python.h>
static PyObject *value(PyObject *self, PyObject *none) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"value", value, METH_NOARGS, 0}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__same", 0, -1, methods};
PyMODINIT_FUNC PyInit___same(void) { return PyModule_Create(&module); }
"""


@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="Triton finds no compiler")
def test_a_launcher_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another launcher of the same name is loaded once more, as by threads that load kernels side by side."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    one, two, again = (compile_module_from_src(MODULE % i, "__same") for i in (1, 2, 1))
    assert [module.value() for module in (one, two, again)] == [1, 2, 1]
