"""Command-line flags out of configuration dataclasses, so that the two cannot drift apart.

A field ``max_model_len`` becomes ``--max-model-len``, with the field's type and its docstring as help. The environment
variable ``ASYNCENGINE_MAX_MODEL_LEN`` and the key ``max_model_len`` of a configuration file stand behind it, in this
order. Only values that somebody gave reach the namespace; defaults stay the dataclass's business. A field that may be
None takes the word none. An integer may have a unit: 8k, 4GiB.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from asyncengine.api.field_docs import field_docs
from asyncengine.errors import ConfigError

ENVIRONMENT_PREFIX = "ASYNCENGINE_"
OTHER_VARIABLES = ("ASYNCENGINE_CACHE",)
"""Environment variables that the package reads and that stand for no flag."""
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_MAX_CONFIG_BYTES = 1 << 20
_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)([kmgt]|[KMGT]i?)([Bb]?)", re.ASCII)


def environment_name(dest: str) -> str:
    """The variable that stands in for a flag: ASYNCENGINE_<FLAG>."""
    return ENVIRONMENT_PREFIX + dest.upper()


def add_dataclass(
    parser: argparse.ArgumentParser,
    cls: type,
    title: str,
    *,
    exclude: Collection[str] = (),
    defaults: Mapping[str, object] | None = None,
    several: Collection[str] = (),
    common: Collection[str] | None = None,
) -> None:
    """One flag per field of ``cls``, in a group of their own. ``defaults`` differ from the fields'. A flag for a field
    of ``several`` takes all values that follow it. The short help shows the fields of ``common`` alone; None: all."""
    group = parser.add_argument_group(title)
    docs = field_docs(cls)
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name not in exclude and not _is_callable(hints[field.name]):
            default = (defaults or {}).get(field.name, field.default)
            many = field.name in several
            action = _add_field(group, field.name, hints[field.name], docs.get(field.name, ""), default, many)
            action.is_rare = common is not None and field.name not in common  # type: ignore[attr-defined]
            action.group = title  # type: ignore[attr-defined]


def add_config(parser: argparse.ArgumentParser) -> None:
    """``--config``, the file that ``read_config`` reads, and how the help tells of it and of the environment."""
    parser.epilog = f"Each is also a variable ({environment_name('model')}, ...) and a key of --config's file."
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help='TOML file with values of these options. An example: max_model_len = "8k"; the command line and the '
        "environment come first.",
    )


def values(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Return the values that the command line and the environment give to fields of ``cls``."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in vars(args).items() if name in names}


def read_environment(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fill what the command line left open. Exits with a usage error on a value that does not parse."""
    for action in parser._actions:
        text = os.environ.get(environment_name(action.dest))
        if text is None or action.dest == "help" or hasattr(args, action.dest):
            continue
        try:
            value = _parse(action, text)
        except (ValueError, argparse.ArgumentTypeError):
            expected = f" (one of {', '.join(action.choices)})" if action.choices else ""
            parser.error(f"environment variable {environment_name(action.dest)}: invalid value {text!r}{expected}")
        setattr(args, action.dest, value)


def read_config(parser: argparse.ArgumentParser, args: argparse.Namespace, path: str) -> None:
    """Fill what command line and environment left open from a TOML file whose keys are the flags' names.

    Words of a key are joined by underscores or dashes. Raises ConfigError for a file that cannot be read, an unknown
    key, and a value that its flag would not take.
    """
    known = {action.dest: action for action in parser._actions if action.option_strings or action.dest == "model"}
    for unknown in ("help", "config", "version"):
        known.pop(unknown, None)
    for key, value in _toml(path).items():
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: unknown key {key!r}{did_you_mean(name, known)}")
        if not hasattr(args, name):
            try:
                setattr(args, name, _from_toml(known[name], value))
            except (TypeError, ValueError, argparse.ArgumentTypeError):
                raise ConfigError(f"{path}: invalid value {value!r} for {key}") from None


def _toml(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
        if len(text) > _MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is longer than {_MAX_CONFIG_BYTES} bytes, which a configuration file may have")
        return tomllib.loads(text.decode())
    except OSError as exc:
        raise ConfigError(f"the configuration file cannot be read: {exc}") from None
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{path} is no TOML: {exc}") from None


def _from_toml(action: argparse.Action, value: Any) -> Any:
    """The value of one key as its flag would read it. Raises ValueError, TypeError."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return value if isinstance(value, bool) else _boolean(_scalar(value))
    if isinstance(action, _AddEntry):
        entries = [_parse(action, f"{key}={_scalar(each)}") for key, each in value.items()]
        return {key: each for entry in entries for key, each in entry.items()}
    if isinstance(action, argparse._AppendAction) or action.nargs == "+":
        items = value if isinstance(value, list) else [value]
        convert = action.type if callable(action.type) else str
        return [convert(_scalar(item)) for item in items]
    if isinstance(value, dict):
        value = json.dumps(value)
    return _parse(action, _scalar(value))


def _scalar(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(value)
    return str(value)


def unknown_variables(known: Collection[str]) -> list[str]:
    """Environment variables with the prefix that stand for no flag of ``known``, a sentence for each."""
    names = {environment_name(dest) for dest in known} | set(OTHER_VARIABLES)
    wrong = sorted(name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX) and name not in names)
    return [f"environment variable {name} is not known{did_you_mean(name, names)}" for name in wrong]


def value_of(cls: type, name: str, text: str) -> Any:
    """The value of one field of ``cls`` as its flag would read it. Raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False)
    add_dataclass(parser, cls, "")
    action = next((action for action in parser._actions if action.dest == name), None)
    if action is None:
        raise ConfigError(f"there is no {name!r}{did_you_mean(name, [action.dest for action in parser._actions])}")
    try:
        return _parse(action, text)
    except (ValueError, argparse.ArgumentTypeError):
        raise ConfigError(f"invalid value {text!r} for {name}") from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error text: the nearest of ``known``, or nothing if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def actions_of(parser: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    """Return a parser's options, positional arguments and subcommands; one action has the subcommands' parsers as
    ``choices``."""
    return parser._actions


def _parse(action: argparse.Action, text: str) -> Any:
    if isinstance(action, argparse.BooleanOptionalAction):
        return _boolean(text)
    if action.nargs == "+":
        return text.split()
    value = action.type(text) if callable(action.type) else text
    if action.choices is not None and value not in action.choices:
        raise ValueError(text)
    return [value] if isinstance(action, argparse._AppendAction) else value


def _boolean(text: str) -> bool:
    lower = text.lower()
    if lower not in _TRUE + _FALSE:
        raise ValueError(text)
    return lower in _TRUE


def _add_field(
    group: argparse._ArgumentGroup, name: str, hint: Any, doc: str, default: object, several: bool
) -> argparse.Action:
    flag = "--" + name.replace("_", "-")
    text = doc.replace("%", "%%")
    if default is not False and default not in (None, (), dataclasses.MISSING):
        text = f"{text} (default: {default})".strip()
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
    if hint is bool:
        return group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    if get_origin(hint) is Literal:
        return group.add_argument(flag, choices=get_args(hint), **options)
    kinds = list(get_args(hint)) or [hint]
    if get_origin(hint) is Mapping:
        entry = _entry(*get_args(hint))
        return group.add_argument(flag, type=entry, action=_AddEntry, metavar="KEY=VALUE", **options)
    if hint_of_items := next((kind for kind in [hint, *kinds] if get_origin(kind) is Sequence), None):
        (kind,) = get_args(hint_of_items)
        options |= {"action": "append", "help": f"{text} May be repeated.".strip()}
        if several:
            options |= {"action": "extend", "nargs": "+"}
    else:  # a dataclass may be given in other forms, too
        given = [kind for kind in kinds if kind is not NoneType]
        (kind,) = [kind for kind in given if dataclasses.is_dataclass(kind)] or given
    if dataclasses.is_dataclass(kind):
        kind = json_object
    elif kind is int:
        kind = integer
    convert = _or_none(kind) if NoneType in kinds and "action" not in options else kind
    return group.add_argument(flag, type=convert, metavar=_METAVARS[kind], **options)


def integer(text: str) -> int:
    """An integer, which may have a unit: k, m, g and t count in thousands, K, M, G, T and KiB, MiB, GiB, TiB in 1,024s,
    kB in thousands. Raises ValueError for anything else, also where the product is no integer."""
    match = _WITH_UNIT.fullmatch(text)
    if match is None:
        return int(text)
    number, unit, byte = match.groups()
    base = 1000 if unit.islower() or (byte and not unit.endswith("i")) else 1024
    exact: Fraction = Fraction(number) * base ** ("kmgt".index(unit[0].lower()) + 1)
    if exact.denominator != 1:
        raise ValueError(text)
    return exact.numerator


integer.__name__ = "int"  # argparse names it where a value is wrong


def _is_callable(hint: Any) -> bool:
    """Return whether a field takes a function, which no flag can give."""
    return any(get_origin(kind) is Callable for kind in (hint, *get_args(hint)))


def json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


_METAVARS = {integer: "N", float: "X", str: "TEXT", json_object: "JSON"}


class _AddEntry(argparse.Action):
    """Adds one entry to the mapping of the flag, which may be repeated."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: object = None) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), **values})


def _entry(key: Callable[[str], Any], value: Callable[[str], Any]) -> Callable[[str], dict[Any, Any]]:
    def entry(text: str) -> dict[Any, Any]:
        left, _, right = text.partition("=")
        return {key(left): value(right)}

    return entry


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        return None if text == "none" else kind(text)

    convert.__name__ = getattr(kind, "__name__", "value")  # argparse names it when a value is wrong
    return convert
