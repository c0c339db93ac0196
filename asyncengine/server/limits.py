"""Limits of each field of a request body, in bytes of JSON, checked before objects are made of the body."""

from __future__ import annotations

from collections.abc import Container, Sequence

import msgspec

from asyncengine.server.errors import bad_request

LONG_FIELD = 64 * 1024
"""Bytes of the JSON of a field that FIELD_BYTES does not have. Fields of this size and longer are looked up."""
#: Limits by field. None: the text of a prompt, which the context bounds, and which is let go once it is tokenized.
#: Each is far above the limit that its own check states, since a character may take twelve bytes of JSON.
FIELD_BYTES: dict[str, int | None] = {
    **dict.fromkeys(
        (
            "prompt", "messages", "input", "instructions", "system", "documents", "query", "queries", "text_1",
            "text_2", "texts",
        )
    ),
    "tokens": None,
    "stop": 256 << 10,
    "stop_sequences": 256 << 10,
    "metadata": 256 << 10,
    "bad_words": 4 << 20,
    "allowed_token_ids": 16 << 20,
    "suffix": 1 << 20,
    "tools": 2 << 20,
    "functions": 2 << 20,
    "chat_template": 4 << 20,
    "chat_template_kwargs": 1 << 20,
    **dict.fromkeys(
        (
            "response_format", "structured_outputs", "text", "output_config", "output_format", "guided_json",
            "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex", "grammar", "ebnf",
        ),
        16 << 20,
    ),
}  # fmt: skip


def check_fields(members: Sequence[tuple[bytes, int]], known: Container[str]) -> None:
    """Raises ApiError 400 that names the first of ``known`` fields that is too long. Unknown ones are skipped anyway.

    ``members`` are those of the body with LONG_FIELD bytes or more, by ``_core.json_shape``.
    """
    for raw, size in members:
        name = _name(raw)
        limit = FIELD_BYTES.get(name, LONG_FIELD)
        if limit is not None and size > limit and name in known:
            raise bad_request(f"{name} has more than {limit} bytes", name)


def _name(raw: bytes) -> str:
    """Return a field's name with its escapes undone: a parser of the body undoes them too."""
    try:
        return str(msgspec.json.decode(b'"%b"' % raw, type=str))
    except ValueError:
        return ""  # the body is not JSON, which its parser says
