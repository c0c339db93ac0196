"""/v1/models: the names of the served model, as clients of OpenAI, vLLM and Anthropic read them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import PurePath

import msgspec

from asyncengine.server.engine_api import ModelInfo


class ModelPermission(msgspec.Struct, kw_only=True):
    """Permissions that older clients of OpenAI and vLLM read: everything that is served may be asked for."""

    id: str = "modelperm-asyncengine"
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "asyncengine"
    root: str
    """The model's own name, whatever it is served as. Of a folder it is the last part of the path: clients do not learn
    where the server keeps its files."""
    parent: None = None
    permission: list[ModelPermission]
    max_model_len: int
    type: str = "model"
    display_name: str
    created_at: str
    """``created`` in RFC 3339, for Anthropic's clients."""
    lifecycle: str = "active"


class ModelList(msgspec.Struct, kw_only=True):
    """A list of OpenAI and a page of Anthropic at once; the page holds all models."""

    object: str = "list"
    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: bool = False


def model_cards(model: ModelInfo, names: Sequence[str], created: int) -> list[ModelCard]:
    """One for each name. ``created`` is in seconds since 1970."""
    path = PurePath(model.name)
    root = path.name if path.is_absolute() or path.parts[:1] == ("..",) else model.name
    created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created))
    return [
        ModelCard(
            id=name,
            created=created,
            root=root,
            permission=[ModelPermission(created=created)],
            max_model_len=model.max_model_len,
            display_name=name,
            created_at=created_at,
        )
        for name in names
    ]
