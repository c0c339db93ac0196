"""Docstrings of fields: the string below each field of a class, which Python itself throws away."""

from __future__ import annotations

import ast
import inspect
import textwrap


def field_docs(cls: type) -> dict[str, str]:
    """The string below each field of a class, on one line. Empty where there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError):
        return {}
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as text)),
            ):
                docs[name] = " ".join(text.split())
    return docs


class _Doc:
    """A class's ``__doc__`` with its fields, which is made when somebody asks, as ``help`` does."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: object, owner: type) -> str:
        lines = [f"{name}: {text}" for name, text in field_docs(owner).items()]
        wrapper = textwrap.TextWrapper(
            100, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False, break_long_words=False
        )
        return "\n".join([inspect.cleandoc(self._text), "", "Fields:", *map(wrapper.fill, lines)])


def show_fields(*classes: type) -> None:
    """Have ``help`` show the docstrings of the fields of these classes."""
    for cls in classes:
        setattr(cls, "__doc__", _Doc(cls.__doc__ or ""))  # noqa: B010
