"""Special tokens and chat templates of a model directory, wherever transformers looks for them.

The files are untrusted. Their kind and size are checked before they are opened, and a wrong value raises ModelError
that names the file and the key.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from asyncengine.errors import ModelError
from asyncengine.models.files import checked_size, excerpt, read_optional_json

MAX_CONFIG_BYTES = 8 << 20
"""Largest file of JSON, and all templates together."""
_MAX_TEMPLATES = 64
_CONFIG = "tokenizer_config.json"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, empty if there is none."""
    return read_optional_json(directory / _CONFIG, MAX_CONFIG_BYTES)


def add_special_tokens(backend: tokenizers.Tokenizer, directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Add to ``backend`` the tokens that tokenizer.json lacks. Returns the named special tokens.

    tokenizer_config.json has them in ``added_tokens_decoder``, and as values of names such as eos_token. Where it has
    no ``added_tokens_decoder``, special_tokens_map.json overrides its names, and added_tokens.json counts too. Tokens
    get the ids that transformers gives them.
    """
    existing: dict[int, AddedToken] = backend.get_added_tokens_decoder()
    values, source = dict(config), dict.fromkeys(config, directory / _CONFIG)
    if "added_tokens_decoder" in config:
        decoder = _decoder(config["added_tokens_decoder"], directory / _CONFIG)
    else:
        path = directory / "special_tokens_map.json"
        overriding = read_optional_json(path, MAX_CONFIG_BYTES)
        values |= overriding
        source |= dict.fromkeys(overriding, path)
        decoder = {}
    named, extra = _special_tokens(values, source)
    if "added_tokens_decoder" not in config:
        specials = {token.content for token in (*named.values(), *extra)}
        decoder = _legacy(directory / "added_tokens.json", specials) | existing
    given = {token.content: token for token in decoder.values()}
    known = {repr(token) for token in existing.values()}
    added = [token for _, token in sorted(decoder.items()) if repr(token) not in known]
    present = {token.content for token in (*existing.values(), *added)}
    for token in (*(given.get(token.content, token) for token in named.values()), *extra):
        if token.content not in present:
            present.add(token.content)
            added.append(token)
    contents = {name: token.content for name, token in named.items()}
    for token in added:
        token.special = token.special or token.content in contents.values()
    if added:
        backend.add_tokens(added)
    return contents


def _special_tokens(
    values: Mapping[str, Any], source: Mapping[str, Path]
) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """The named tokens, and those without a name."""
    named: dict[str, AddedToken] = {}
    for key, value in values.items():
        # Other keys may end so as well: add_bos_token is a flag.
        if (key in _NAMED and value is not None) or (key.endswith("_token") and _is_token(value)):
            named[key] = _token(value, source[key], key)
    extra: list[AddedToken] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = values.get(key)
        if isinstance(more, dict):
            named |= {str(name): _token(value, source[key], f"{key}.{name}") for name, value in more.items()}
        elif isinstance(more, list):
            extra += [_token(value, source[key], f"{key}[{i}]") for i, value in enumerate(more)]
        elif more is not None:
            raise ModelError(f"{source[key]}: {key!r} must hold tokens, found {excerpt(more)}")
    return named, extra


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _decoder(values: Any, path: Path) -> dict[int, AddedToken]:
    key = "added_tokens_decoder"
    if not isinstance(values, dict) or not all(str(i).isascii() and str(i).isdigit() for i in values):
        raise ModelError(f"{path}: {key!r} must hold tokens by their ids, found {excerpt(values)}")
    return {int(i): _token(value, path, f"{key}.{i}", special=False) for i, value in values.items()}


def _legacy(path: Path, specials: Iterable[str]) -> dict[int, AddedToken]:
    """added_tokens.json: ids by token."""
    tokens = {}
    for content, i in read_optional_json(path, MAX_CONFIG_BYTES).items():
        if isinstance(i, bool) or not isinstance(i, int):
            raise ModelError(f"{path}: {excerpt(content)} must have an id, found {excerpt(i)}")
        special = content in specials
        tokens[i] = AddedToken(content, normalized=not special, special=special)
    return tokens


def _token(value: Any, path: Path, key: str, *, special: bool = True) -> AddedToken:
    """A token from its text, or from an object with its flags. ``special`` is the default of the flag."""
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=not special)
    content = value.get("content") if isinstance(value, dict) else None
    flags = {flag: value[flag] for flag in _FLAGS if flag in value} if isinstance(value, dict) else {}
    if not isinstance(content, str) or not all(isinstance(flag, bool) for flag in flags.values()):
        raise ModelError(f"{path}: {excerpt(key)} must be a token, found {excerpt(value)}")
    return AddedToken(content, **{"special": special} | flags)


def read_chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, "default" and others such as "tool_use".

    chat_template.jinja and the files of additional_chat_templates/ count before tokenizer_config.json, where the value
    is one template, an object of templates, or a list of objects with name and template. chat_template.json, in which
    processors of older models have theirs, counts if there is no other.
    """
    stored = _named_templates(config.get("chat_template"), directory / _CONFIG)
    files = _template_files(directory)
    if files:
        return {name: source for name, source in stored.items() if name == "default"} | files
    path = directory / "chat_template.json"
    return stored or _named_templates(read_optional_json(path, MAX_CONFIG_BYTES).get("chat_template"), path)


def _named_templates(stored: Any, path: Path) -> dict[str, str]:
    key = "chat_template"
    if isinstance(stored, list):
        entries = []
        for i, entry in enumerate(stored):
            if not isinstance(entry, dict) or "template" not in entry:
                raise ModelError(f"{path}: {key}[{i}] must have a name and a template, found {excerpt(entry)}")
            entries += [(f"{key}[{i}].name", name := entry.get("name", "default"), name)]
            entries += [(f"{key}[{i}].template", name, entry["template"])]
    elif isinstance(stored, dict):
        entries = [(f"{key}.{excerpt(name)}", name, source) for name, source in stored.items()]
    else:
        entries = [] if stored is None else [(key, "default", stored)]
    for place, _, value in entries:
        if not isinstance(value, str):
            raise ModelError(f"{path}: {place} must be a string, found {excerpt(value)}")
    return {name: source for _, name, source in entries}


def _template_files(directory: Path) -> dict[str, str]:
    paths = {"default": directory / "chat_template.jinja"}
    folder = directory / "additional_chat_templates"
    if folder.is_dir():
        for path in sorted(folder.glob("*.jinja")):
            if len(paths) > _MAX_TEMPLATES:
                raise ModelError(f"{folder} holds more than {_MAX_TEMPLATES} templates")
            paths[path.stem] = path
    templates: dict[str, str] = {}
    left = MAX_CONFIG_BYTES
    for name, path in paths.items():
        if not os.path.lexists(path):
            continue
        left -= checked_size(path, left)
        try:
            templates[name] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as e:
            raise ModelError(f"cannot read {path}: {e}") from e
    return templates
