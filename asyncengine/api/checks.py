"""Checks of a user's values, and what errors say of them."""

from __future__ import annotations

import itertools
import math
import numbers
import reprlib
from collections.abc import Iterable
from typing import Any

from asyncengine.errors import InvalidRequestError

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def quoted(value: object) -> str:
    """A user's value for an error text: its ``repr`` if that is short, with its middle left out if it is not."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python prints 4,300 digits at most
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str | bytes | int | float | None):
        return _SHORT.repr(value)
    return f"an object of type {type(value).__name__}"  # whose repr may be long, slow, or fail


def said(exc: BaseException) -> str:
    """An exception of unknown code for an error text: 500 characters of its ``repr``, or its type if that fails."""
    try:
        return repr(exc)[:500]
    except BaseException:
        return type(exc).__name__


def number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidRequestError(f"{name} must be a number, got {quoted(value)}", param=name)
    try:
        x = float(value)
    except OverflowError:
        x = math.inf
    inside = low < x <= high if open_low else low <= x <= high
    if not math.isfinite(x) or not inside:
        bracket = "(" if open_low else "["
        raise InvalidRequestError(f"{name} must be in {bracket}{low:g}, {high:g}], got {x:g}", param=name)
    return x


def integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidRequestError(f"{name} must be an integer, got {quoted(value)}", param=name)
    x = int(value)
    if not low <= x <= high:
        raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {quoted(x)}", param=name)
    return x


def sequence(name: str, value: object, limit: int, unit: str) -> tuple[Any, ...]:
    """Return the items of a list, of which ``limit`` are read at most. Raises InvalidRequestError if there are more."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name} must be a list, got {quoted(value)}", param=name)
    items = tuple(itertools.islice(value, limit + 1))
    if len(items) > limit:
        raise InvalidRequestError(f"{name}: at most {limit} {unit} are allowed", param=name)
    return items
