"""Imports go downwards only, as in the design; the stub says what the native module has; files fit in the head."""

from __future__ import annotations

import ast
import graphlib
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from asyncengine import _core

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "asyncengine"
CSRC = ROOT / "csrc"

# From the bottom up, by paths in the package. An entry is a folder, or a module that stands apart from its folder. A
# module belongs to the longest entry that its path begins with. It imports from lines before its own, and within its
# entry.
LAYERS = """
errors  machine  version  bundled  _core
config
api
kernels
kernels/cpu
kernels/cuda/gpu
kernels/cuda/launch
kernels/cuda/step
kernels/cuda/rows
kernels/cuda/sampling
kernels/cuda/comm
kernels/cuda/attention/plan
kernels/cuda/attention/work
kernels/cuda/attention
kernels/cuda/linear
kernels/cuda/experts
kernels/cuda/recurrent
kernels/cuda
models/files
models/rotary
models/mixer_shapes
models/gguf
models/config
models/weights
models
text
runner/state  runner/costs/table
runner/loop_config
runner/steps
runner/host
runner/costs  runner/start
runner
engine/constraints
engine
__init__  testing
server
cli
integrations
examples
__main__
"""
RANK = {entry: rank for rank, line in enumerate(LAYERS.split("\n")) for entry in line.split()}
# Within an entry modules import each other without a circle, but for these.
CIRCLES = {("server/sse", "server/generation")}  # for the type of an argument
# Modules that import what somebody else names: a program's commands, and the kernels that a process compiles.
IMPORTS_BY_VARIABLE = {"cli/parser", "kernels/cuda/launch/compile_processes"}

NAME = re.compile(r"\basyncengine(?:\.\w+)+")
PROGRAM = re.compile(r"(?:\bimport|\bfrom|-m)\s+asyncengine\b")


def module_of(path: Path) -> str:
    """Return a module's name as in LAYERS; the ``__init__`` of a folder goes by the folder's name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "/".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def module_named(dotted: str) -> str:
    """The module that ``asyncengine.a.b.Name`` is in; public objects are in ``__init__``."""
    parts = dotted.split(".")[1:]
    while parts and not any((PACKAGE.joinpath(*parts[:-1]) / (parts[-1] + s)).exists() for s in ("", ".py", ".pyi")):
        parts.pop()
    return "/".join(parts) or "__init__"


def entry_of(module: str) -> str:
    """The entry of LAYERS for a module; "" for one without."""
    while module and module not in RANK:
        module = module.rpartition("/")[0]
    return module


def imports(tree: ast.AST, strings: bool = True) -> set[str]:
    """Modules of asyncengine that a module imports anywhere in it, for typing too, or names in a string."""
    found: set[str] = set()
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(level=0, module=str(module)) if module.split(".")[0] == "asyncengine":
                found |= {module_named(f"{module}.{alias.name}") for alias in node.names}
            case ast.Import():
                found |= {module_named(a.name) for a in node.names if a.name.split(".")[0] == "asyncengine"}
            case ast.Constant(value=str(text)) if strings and id(node) not in docstrings:
                found |= {module_named(name) for name in NAME.findall(text)}
                if PROGRAM.search(text):
                    found |= imports_of_program(text)
    return found


def imports_of_program(text: str) -> set[str]:
    try:
        return imports(ast.parse(text))
    except SyntaxError:  # a command line, or a part of a program
        return {"__init__"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def python_files() -> tuple[Path, ...]:
    """Return the Python files with code: the ``__init__`` of most folders is a sentence."""
    return tuple(sorted(path for path in PACKAGE.rglob("*.py") if len(parsed(path).body) > 1))


def wrong_imports(here: str, tree: ast.AST) -> set[tuple[str, str]]:
    entry = entry_of(here)
    targets = {target for target in imports(tree) if entry_of(target) not in {"", entry}}
    return {(here, target) for target in targets if RANK[entry_of(target)] >= RANK[entry]}


def test_every_module_has_a_layer() -> None:
    assert [path for path in python_files() if not entry_of(module_of(path))] == []


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_python_imports_go_downwards(path: Path) -> None:
    assert wrong_imports(module_of(path), parsed(path)) == set()


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    found = {module_of(path): imports(parsed(path), strings=False) for path in python_files()}
    for here, target in CIRCLES:
        found[here].remove(target)
    graphlib.TopologicalSorter(found).prepare()  # CycleError names the circle


def test_modules_do_not_import_the_face_of_the_package() -> None:
    """Examples do, which are programs. Modules name the module that they need."""
    for path in python_files():
        nodes = ast.walk(parsed(path)) if entry_of(module_of(path)) != "examples" else ()
        assert not [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "asyncengine"], path


def test_exceptions_are_of_modules_that_exist() -> None:
    there = {module_of(path) for path in python_files()}
    assert {module for pair in CIRCLES for module in pair} | IMPORTS_BY_VARIABLE | PRIVATE.keys() <= there


@pytest.mark.parametrize(
    "source",
    [
        "import asyncengine.engine",
        "from asyncengine import engine",
        "from asyncengine.engine import AsyncEngine",
        "from asyncengine import AsyncEngine",
        "def late():\n    import asyncengine.engine as e",
        "if TYPE_CHECKING:\n    from asyncengine.engine import AsyncEngine",
        "importlib.import_module('asyncengine.engine')",
        "files('asyncengine.server').joinpath('page.html')",
        "command = [sys.executable, '-m', 'asyncengine.cli.main']",
        "load = f'asyncengine.cli.benchmarks.{name}'",
        "program = 'import sys; from asyncengine import engine; engine.run()'",
        "program = 'import asyncengine; asyncengine.run()'",
        "program = 'python -m asyncengine serve'",
    ],
)
def test_an_import_upwards_is_found(source: str) -> None:
    assert wrong_imports("kernels/cuda/rows/rows", ast.parse(source))


@pytest.mark.parametrize(
    ("here", "target", "wrong"),
    [
        ("kernels/cuda/ops", "kernels.cuda.linear.choose", False),
        ("kernels/cuda/linear/choose", "kernels.cuda.linear.tiled", False),
        ("kernels/cuda/linear/tiled", "kernels.cuda.ops", True),
        ("kernels/cuda/linear/tiled", "kernels.cuda.linear.residual", False),
        ("kernels/cuda/attention/paged", "kernels.cuda.linear.tiled", True),
        ("kernels/cuda/attention/paged", "kernels.cuda.attention.work.lists", False),
        ("kernels/cuda/attention/work/lists", "kernels.cuda.attention.paged", True),
        ("kernels/cuda/gpu", "kernels.cuda.launch.gluon", True),
        ("runner/steps/buckets", "runner.start.tuning", True),
    ],
)
def test_layers_are_those_of_the_longest_path(here: str, target: str, wrong: bool) -> None:
    assert bool(wrong_imports(here, ast.parse(f"import asyncengine.{target}"))) == wrong


def test_the_cpu_and_the_gpu_know_nothing_of_each_other() -> None:
    for here, other in (("cpu", "cuda"), ("cuda", "cpu")):
        for path in (PACKAGE / "kernels" / here).rglob("*.py"):
            assert not {m for m in imports(parsed(path)) if m.startswith(f"kernels/{other}")}, path


def test_what_is_imported_by_a_variable_is_known() -> None:
    importers = {"import_module", "__import__"}
    found = set()
    for path in python_files():
        for node in ast.walk(parsed(path)):
            match node:
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[argument, *_]):
                    if name in importers and not isinstance(argument, ast.Constant | ast.JoinedStr):
                        found.add(module_of(path))
    assert found == IMPORTS_BY_VARIABLE


def test_the_server_uses_the_public_engine_api_only() -> None:
    texts = "tokenizer|detokenizer|markers|tool_turns"
    public = re.compile(rf"__init__|config|errors|version|api/\w+|text/({texts})")
    scans_json = {"bodies.py": {"_core"}}
    for path in sorted((PACKAGE / "server").rglob("*.py")):
        used = {module for module in imports(parsed(path)) if entry_of(module) != "server"}
        wrong = {module for module in used - scans_json.get(path.name, set()) if not public.fullmatch(module)}
        assert wrong == set(), path


def test_relative_imports_are_not_used() -> None:
    for path in python_files():
        for node in ast.walk(parsed(path)):
            assert not (isinstance(node, ast.ImportFrom) and node.level), path


# Attributes with a leading underscore that a module uses of objects from elsewhere, and why.
PRIVATE: dict[str, set[str]] = {
    "runner/backend": {"_selector", "_get_backend_id"},  # the pollers of asyncio's loop and of uvloop's
    "cli/flags": {"_actions", "_ArgumentGroup", "_AppendAction"},  # argparse
    "engine/data_parallel": {"_life"},  # of AsyncEngine, its base
    "engine/live_requests": {"_get_running_loop"},  # asyncio's, documented: get_running_loop without an exception
    "kernels/float8": {"_scaled_mm"},  # torch
    "kernels/cuda/launch/compiling": {"_load_module_from_path"},  # Triton
    "models/transformers/experts": {"_apply_gate"},  # transformers
    "models/transformers/source": {"_from_config"},  # transformers
    "server/app": {"_version"},  # aiohttp
    "testing": {"_life"},  # a leak check takes a delivery that nothing announced
}
# Public names that begin with an underscore all the same: of os, of named tuples, of Gluon's shared memory.
NOT_PRIVATE = {"_exit", "_replace", "_asdict", "_fields", "_make", "_reinterpret"}


def privates_of_others(tree: ast.AST) -> set[str]:
    """Names with a leading underscore that a module imports, or takes from objects while it defines none such."""
    used: set[str] = set()
    defined: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                defined.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.keyword(arg=str(name)):
                defined.add(name)
            case ast.Attribute(attr=name, value=owner) if ast.unparse(owner) not in {"self", "cls", "super()"}:
                used.add(name)
            case ast.Call(func=ast.Name(id="getattr" | "setattr"), args=[owner, ast.Constant(value=str(name)), *_]):
                used |= set() if ast.unparse(owner) == "self" else {name}
            case ast.ImportFrom(names=names):
                used |= {alias.name for alias in names}
    return {name for name in used - defined - NOT_PRIVATE - {"_core"} if re.match(r"_(?!_)", name)}


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_leave_each_others_privates_alone(path: Path) -> None:
    assert privates_of_others(parsed(path)) == PRIVATE.get(module_of(path), set())


@pytest.mark.parametrize(
    "source",
    [
        "stream._key",
        "self._engine._check_loop()",
        "stream._key = 1",
        "getattr(engine, '_loop')",
        "from asyncengine.stream import _copy",
        "def f(other):\n    self._a = 1\n    return other._b",
    ],
)
def test_a_reach_into_privates_is_found(source: str) -> None:
    assert len(privates_of_others(ast.parse(source))) == 1


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


def test_only_rows_on_the_host_have_lanes() -> None:
    """The scheduler asks a Placement where a sequence lives; a lane is a host row's, and no vector's or queue's."""
    for path in native_files():
        name = path.relative_to(CSRC).as_posix()
        if name.startswith(("core/", "platform/")) and not name.startswith(("core/hybrid/", "platform/cpu/lanes.h")):
            assert not re.search(r"lanes?(?![a-z])", path.read_text().replace("plane", ""), re.IGNORECASE), name


def test_only_the_bindings_know_python_and_nobody_knows_cuda_or_torch() -> None:
    for path in native_files():
        text = path.read_text()
        headers = re.findall(r"^\s*#\s*include\s+[<\"]([^>\"]+)", text, re.MULTILINE)
        for header in headers:
            ours = header in {"platform/cuda/cuda_runtime.h", "platform/cuda/cuda_device.h"}
            foreign = re.match(r"(cuda|cublas|torch|ATen|c10|nvrtc)", header.split("/")[-1].split("_runtime")[0])
            assert ours or not foreign, f"{path.name} includes {header}"
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
    parameters = re.findall(r"(\w+): ", re.sub(r"\[[^()]*?\]|<[^>]*>", "", signature.split(" -> ")[0]))
    parameters = [p for p in parameters if p != "self"]
    assert len(parameters) == len(described), f"{name}: {signature}"
    if not all(re.fullmatch(r"arg\d*", p) for p in parameters):
        assert parameters == described, f"{name}: {signature}"


# Files that are longer than 500 lines. The list only gets shorter, and they do too.
LONGER = {
    "asyncengine/_core.pyi": 790,
    "tests/models/test_loader.py": 567,
}


def test_files_fit_in_the_head() -> None:
    folders = [PACKAGE, CSRC, ROOT / "tests", ROOT / "bench"]
    suffixes = {".py", ".pyi", ".h", ".cpp", ".inl"}
    longer = {}
    for path in (p for folder in folders for p in folder.rglob("*") if p.suffix in suffixes):
        with path.open() as file:
            lines = sum(1 for _ in file)
        if lines > 500:
            longer[path.relative_to(ROOT).as_posix()] = lines
    assert {name for name, lines in longer.items() if lines > LONGER.get(name, 500)} == set()
    assert LONGER.keys() - longer.keys() == set(), "LONGER can lose these"
