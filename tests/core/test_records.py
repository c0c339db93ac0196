"""Records cross between the core and Python under the names, types and defaults that their lists declare."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from asyncengine import _core

ROOT = Path(__file__).resolve().parents[2]
STUB = {node.name: node for node in ast.parse((ROOT / "asyncengine/_core.pyi").read_text()).body
        if isinstance(node, ast.ClassDef)}  # fmt: skip
FIELD = re.compile(r"^FIELD\(([^,]+(?:<[^>]*>)?), (\w+), (.*?)\)(?:\s*//.*)?$")
USE = re.compile(r'#define RECORD (\w+)\n#define FIELDS "([^"]+)"')
# Names in Python where they differ from the core's.
NAMES = {
    "SequenceRecord": "Record",
    "TokensOfSteps": "StepTokens",
    "Point": "CostPoint",
    "Copy": "CostCopy",
    "Factors": "CostFactors",
}
TYPES = {
    "int32_t": "int",
    "int64_t": "int",
    "uint64_t": "int",
    "uint32_t": "int",
    "float": "float",
    "double": "float",
    "Seconds": "float",
    "bool": "bool",
    "std::string": "str",
    "const float*": "int",
    "py::bytes": "bytes",
    "FinishReason": "FinishReason",
}
"""Types in Python by those in C++; others are compared by their annotation's presence alone."""


def records() -> dict[str, list[tuple[str, str, str]]]:
    """(C++ type, name, default) of each field, by the record's name in Python."""
    found = {}
    for header in sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".cpp"}):
        for record, listed in USE.findall(header.read_text()):
            lines = (ROOT / "csrc" / listed).read_text().splitlines()
            fields = [(m[1], m[2], m[3]) for line in lines if (m := FIELD.match(line))]
            assert len(fields) == sum(line.startswith("FIELD") for line in lines), listed
            found[NAMES.get(record, record)] = fields
    return found


RECORDS = records()


def members(name: str) -> dict[str, str]:
    """Annotations of the stub's class, by name."""
    return {
        node.target.id: ast.unparse(node.annotation)
        for node in STUB[name].body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def keywords(name: str) -> dict[str, tuple[str, str]]:
    """Annotations and defaults of the stub's constructor, by name."""
    constructor = next(node for node in STUB[name].body if isinstance(node, ast.FunctionDef))
    assert constructor.name == "__init__"
    arguments = constructor.args
    assert [a.arg for a in arguments.args] == ["self"], "a record is made from keywords"
    found = {}
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        assert argument.annotation is not None
        assert default is not None
        found[argument.arg] = (ast.unparse(argument.annotation), ast.unparse(default))
    return found


def native_keywords(name: str) -> dict[str, str]:
    """Defaults of the native constructor, by name, as pybind11 writes its signature."""
    signature = str(getattr(_core, name).__init__.__doc__).split("\n")[0]
    assert "*, " in signature
    return dict(re.findall(r"(\w+): [^=]*? = (<[^>]*>|\[\]|\(\)|'[^']*'|[^,)]+)", signature.split("*, ")[1]))


def is_tuple(name: str) -> bool:
    return issubclass(getattr(_core, name), tuple)


def literal(default: str) -> Any:
    """Value of a C++ default, or None if that is not a plain number, boolean or empty."""
    default = re.sub(r"^Seconds\((.*)\)$", r"\1.0", default)
    plain = default.replace("'", "").removesuffix(".f").removesuffix("f")
    try:
        return ast.literal_eval({"true": "True", "false": "False", "nullptr": "0"}.get(plain, plain))
    except (ValueError, SyntaxError):
        return None


def test_every_list_is_a_record_of_the_module() -> None:
    lists = {path.name for path in (ROOT / "csrc").rglob("*.inl") if re.search(r"^FIELD\(", path.read_text(), re.M)}
    assert len(lists) == len(RECORDS) >= 10
    assert all(hasattr(_core, name) and name in STUB for name in RECORDS)


@pytest.mark.parametrize("name", [name for name in RECORDS if is_tuple(name)])
def test_a_named_tuple_has_the_fields_of_its_list(name: str) -> None:
    fields, native, stub = RECORDS[name], getattr(_core, name), members(name)
    names = [field for _, field, _ in fields]
    assert native.__match_args__ == tuple(names)
    described = [field for field in stub if not field.startswith("n_")]
    assert described == names
    for cpp, field, _ in fields:
        assert TYPES.get(cpp, stub[field]) == stub[field], field
    if hasattr(native, "_field_defaults"):
        for cpp, field, default in fields:
            if cpp in TYPES and literal(default) is not None:
                assert native._field_defaults[field] == literal(default), field
        assert native()._replace(**{names[0]: 7})[0] == 7
        assert native().__reduce_ex__(2)[1][0] is native


@pytest.mark.parametrize("name", [name for name in RECORDS if not is_tuple(name)])
def test_a_constructor_takes_the_fields_of_its_list(name: str) -> None:
    fields, stub, native = RECORDS[name], keywords(name), native_keywords(name)
    assert list(native) == [field for _, field, _ in fields]
    assert list(stub) == list(native)
    for cpp, field, default in fields:
        annotation, written = stub[field]
        assert TYPES.get(cpp, annotation) == annotation, field
        value = literal(default)
        if value is not None and value != {}:
            assert ast.literal_eval(written) == pytest.approx(value), field
            assert ast.literal_eval(native[field]) == pytest.approx(value), field
    for field, annotation in members(name).items():
        assert stub[field][0] in annotation if field in stub else field in {"needs", "ENOUGH_TOKENS"}, field


@pytest.mark.parametrize("name", [name for name in RECORDS if not is_tuple(name)])
def test_an_unknown_keyword_and_a_wrong_type_are_refused(name: str) -> None:
    native = getattr(_core, name)
    with pytest.raises(TypeError):
        native(no_such_field=1)
    with pytest.raises(TypeError):
        native(**{RECORDS[name][0][1]: object()})
    with pytest.raises(TypeError):
        native(1)


def test_a_pointer_crosses_as_its_address() -> None:
    layer = _core.HostLayer(scale=0.5, window=7, softcap=2.0, scales=4096)
    assert (layer.scale, layer.window, layer.softcap, layer.scales) == (0.5, 7, 2.0, 4096)
