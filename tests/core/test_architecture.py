"""Imports go downwards only, as in the design; the stub says what the native module has; files fit in the head."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncengine import _core

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "asyncengine"
CSRC = ROOT / "csrc"

# From the bottom up. A module imports from lower layers, and within its own.
LAYERS: list[set[str]] = [
    {"errors", "_core", "bundled", "sandbox"},
    {"config", "request", "model_info", "stats", "fairness"},
    {"kernels"},
    {"models"},
    {"runner"},
    {"tokenizer_trust", "text_threads", "sandbox_process"},
    {"tokenization"},
    {"detokenizer", "prompts"},
    {"backend"},
    {"stream"},
    {"engine"},
    {"__init__", "testing"},
    {"server"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# A stream knows the engine it belongs to, and the engine its streams: one thing in two files.
SAME_THING = {("stream", "engine")}


def component(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST, *, typing_only: bool = False) -> set[str]:
    """Top-level components of asyncengine that a module imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            parts = node.module.split(".")
            if parts[0] == "asyncengine":
                found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {parts[1] if len(parts) > 1 else "__init__" for parts in names if parts[0] == "asyncengine"}
    # `from asyncengine import X` where X is no module names a public object.
    return {name if name in RANK else "__init__" for name in found}


def python_files() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py"))


def test_every_component_has_a_layer() -> None:
    assert {component(path) for path in python_files()} <= RANK.keys()


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_python_imports_go_downwards(path: Path) -> None:
    here = component(path)
    for target in imports(ast.parse(path.read_text())):
        if target != here and (here, target) not in SAME_THING:
            assert RANK[target] < RANK[here], f"{here} imports {target}, which is not below it"


def test_the_server_uses_the_public_engine_api_only() -> None:
    public = {"__init__", "config", "errors", "request", "engine", "stats", "server", "model_info", "tokenization"}
    scans_json = {"bodies.py": {"_core"}}
    for path in sorted((PACKAGE / "server").rglob("*.py")):
        assert imports(ast.parse(path.read_text())) <= public | scans_json.get(path.name, set()), path


def test_relative_imports_are_not_used() -> None:
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), path


NATIVE_MAY_INCLUDE = {
    "core": {"core"},
    "platform": {"core", "platform"},
    "step_loop": {"core", "platform", "step_loop"},
    "bindings": {"core", "platform", "step_loop", "bindings"},
}


def native_files() -> list[Path]:
    return sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cpp", ".inl"})


def test_native_includes_go_downwards() -> None:
    assert {p.relative_to(CSRC).parts[0] for p in native_files()} == NATIVE_MAY_INCLUDE.keys()
    for path in native_files():
        folder = path.relative_to(CSRC).parts[0]
        for include in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
            assert (CSRC / include).is_file(), f"{path.name} includes {include!r}, which is not relative to csrc/"
            assert include.split("/")[0] in NATIVE_MAY_INCLUDE[folder], f"{folder}/{path.name} includes {include}"


def test_only_the_bindings_know_python_and_nobody_knows_cuda_or_torch() -> None:
    for path in native_files():
        text = path.read_text()
        headers = re.findall(r"^\s*#\s*include\s+[<\"]([^>\"]+)", text, re.MULTILINE)
        for header in headers:
            assert not re.match(r"(cuda|cublas|torch|ATen|c10|nvrtc)", header.split("/")[-1].split("_runtime")[0]) or (
                header == "platform/cuda_runtime.h"
            ), f"{path.name} includes {header}"
            assert header.split("/")[0] not in {"torch", "ATen", "c10", "cuda"}, f"{path.name} includes {header}"
            if path.relative_to(CSRC).parts[0] != "bindings":
                assert not header.startswith("pybind11"), f"{path.name} includes {header}"
                assert header != "Python.h", f"{path.name} includes {header}"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["asyncengine", "asyncengine.testing", "asyncengine.cli.main", "asyncengine.server"])
def test_importing_is_light(module: str) -> None:
    heavy = ("torch", "transformers", "numpy", "aiohttp", "jinja2", "huggingface_hub")
    loaded = run_python(f"import sys, {module}; print(*[m for m in {heavy!r} if m in sys.modules])").split()
    allowed = {"asyncengine.server": {"aiohttp", "jinja2"}}.get(module, set())
    assert set(loaded) <= allowed, f"import {module} loads {loaded}"


def stub_names(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    names: dict[str, ast.stmt] = {}
    for node in body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names[name] = node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names[name] = node
    return {name: node for name, node in names.items() if not name.startswith("_") or name == "__init__"}


def native_names(thing: object) -> set[str]:
    names = {name for name in vars(thing) if not name.startswith("_")}
    if inspect.isclass(thing) and "__init__" in vars(thing):
        names.add("__init__")
    return names


def is_enum(thing: object) -> bool:
    return hasattr(thing, "__members__")


def test_the_stub_names_exactly_what_the_module_has() -> None:
    stub = stub_names(ast.parse((PACKAGE / "_core.pyi").read_text()).body)
    assert stub.keys() == native_names(_core)
    for name, node in stub.items():
        native = getattr(_core, name)
        if not isinstance(node, ast.ClassDef):
            continue
        if is_enum(native):
            members = {m: n.value.value for m, n in stub_names(node.body).items()}  # type: ignore[attr-defined]
            assert members == {m: int(v) for m, v in native.__members__.items()}, name
            continue
        described = stub_names(node.body)
        has = native_names(native)
        # pybind11 gives a class that cannot be constructed an __init__ that says so.
        assert described.keys() == has or described.keys() == has - {"__init__"}, name
        for member, definition in described.items():
            if isinstance(definition, ast.FunctionDef):
                check_signature(f"{name}.{member}", definition, native.__dict__[member])


def check_signature(name: str, stub: ast.FunctionDef, native: object) -> None:
    decorators = {d.id for d in stub.decorator_list if isinstance(d, ast.Name)}
    assert isinstance(native, property) == ("property" in decorators), name
    assert isinstance(native, staticmethod) == ("staticmethod" in decorators), name
    if isinstance(native, property):
        return
    # The first line of a pybind11 docstring is the signature.
    function = native.__func__ if isinstance(native, staticmethod) else native
    signature = str(function.__doc__).split("\n")[0]
    described = [a.arg for a in stub.args.posonlyargs + stub.args.args + stub.args.kwonlyargs if a.arg != "self"]
    parameters = re.findall(r"(\w+): ", re.sub(r"\[[^()]*?\]", "", signature.split(" -> ")[0]))
    parameters = [p for p in parameters if p != "self"]
    assert len(parameters) == len(described), f"{name}: {signature}"
    if not all(re.fullmatch(r"arg\d*", p) for p in parameters):
        assert parameters == described, f"{name}: {signature}"


def test_files_fit_in_the_head() -> None:
    folders = [PACKAGE, CSRC, ROOT / "tests", ROOT / "bench"]
    suffixes = {".py", ".pyi", ".h", ".cpp", ".inl"}
    for path in (p for folder in folders for p in folder.rglob("*") if p.suffix in suffixes):
        with path.open() as file:
            lines = sum(1 for _ in file)
        assert lines <= 600, f"{path.relative_to(ROOT)} has {lines} lines"
