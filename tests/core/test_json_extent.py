"""The scan that counts a JSON document's values before anybody makes objects of them, against a twin in Python."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncengine import _core

TEXT = st.text(st.sampled_from('a"\\[]{},:/\n\x00é😀'), max_size=40)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXT, inner, max_size=6),
    max_leaves=40,
)


def twin(document: bytes) -> tuple[int, int]:
    """The same in a few lines: without its strings, a document's commas and brackets can be counted."""
    bare, strings = re.subn(rb'"(?:[^"\\]|\\.)*(?:"|\\?$)', b"", document, flags=re.DOTALL)
    depths = [0]
    for byte in bare:
        depths.append(depths[-1] + (byte in b"[{") - (byte in b"]}"))
    return 1 + strings + sum(map(bare.count, (b",", b"[", b"{"))), max(depths)


def extent(value: Any) -> tuple[int, int]:
    """Count by the objects that a parser makes."""
    if not isinstance(value, list | dict):
        return 1 + isinstance(value, str), 0
    inner = [extent(v) for v in (value if isinstance(value, list) else value.values())]
    names = len(value) if isinstance(value, dict) else 0
    return 1 + max(1, names + sum(values for values, _ in inner)), 1 + max((depth for _, depth in inner), default=0)


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_documents(value: Any, indent: int | None, ascii_only: bool) -> None:
    document = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    assert _core.json_extent(document) == twin(document) == extent(value)
    assert _core.json_extent(bytearray(document)) == extent(value)


@given(st.lists(st.sampled_from([b'"', b"\\", b"[", b"]", b"{", b"}", b",", b"a", b" " * 9, b"\xff"])).map(b"".join))
@example(b'"' + b"x" * 7 + b'\\"' + b'y" [')
@example(b'"\\')
@example(b"")
def test_garbage(document: bytes) -> None:
    assert _core.json_extent(document) == twin(document)


@given(VALUES, st.data())
def test_a_document_cut_short_has_no_more_than_the_whole(value: Any, data: st.DataObject) -> None:
    document = json.dumps(value).encode()
    part = document[: data.draw(st.integers(0, len(document)))]
    assert _core.json_extent(part) == twin(part)
    assert _core.json_extent(part) <= _core.json_extent(document)


def test_depth_has_no_limit_of_its_own() -> None:
    assert _core.json_extent(b"[" * 10**6 + b"]" * 10**6) == (10**6 + 1, 10**6)
    assert _core.json_extent(b'{"":' * 10**6) == (2 * 10**6 + 1, 10**6)


def test_only_bytes() -> None:
    with pytest.raises(TypeError):
        _core.json_extent("{}")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bytes"):
        _core.json_extent(memoryview(b"abcd").cast("i"))  # type: ignore[arg-type]


@given(st.dictionaries(TEXT, VALUES, max_size=6), st.sampled_from([None, 1]), st.integers(1, 40))
def test_long_members_are_those_of_the_outermost_object(value: dict[str, Any], indent: int | None, size: int) -> None:
    document = json.dumps(value, indent=indent).encode()
    values, depth, members = _core.json_shape(document, size)
    assert (values, depth) == _core.json_extent(document)
    assert all(told >= size for _, told in members)
    told = {json.loads(b'"%b"' % name): length for name, length in members}
    space = 4 + len(value) if indent else 2  # a colon, and what indentation puts around a member
    for name, each in value.items():
        length = len(json.dumps(each, indent=indent).encode())
        if length + 1 >= size:
            assert told[name] >= length + 1
        if indent is None and name in told:
            assert told[name] <= length + space


@given(st.lists(st.sampled_from([b'"', b"\\", b"[", b"]", b"{", b"}", b",", b":", b"a", b" " * 9])).map(b"".join))
@example(b'{"')
@example(b'{"a')
@example(b'{"a":1}}{"b":2,')
def test_members_of_garbage_lie_within_it(document: bytes) -> None:
    values, depth, members = _core.json_shape(document, 1)
    assert (values, depth) == _core.json_extent(document)
    assert sum(len(name) + size for name, size in members) <= len(document)
