"""Requests to the hub, which cannot be reached from here."""

from __future__ import annotations

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils._paths import filter_repo_objects

from asyncengine.errors import ModelNotFoundError
from asyncengine.models.weights import hub


@pytest.mark.parametrize("kind", ["repository", "offline", "revision", "connection"])
def test_failures(monkeypatch, kind):
    def fail(*args: object, **kwargs: object) -> str:
        if kind == "offline":
            raise errors.LocalEntryNotFoundError("no connection")
        if kind == "connection":
            raise Exception("peer closed connection")  # as httpx does, whose errors are no OSError
        raise OSError(f"404 for {kind}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFoundError, match="there is no directory 'some/model'") as info:
        hub.resolve_model("some/model", revision="v2" if kind == "revision" else None)
    assert info.value.__cause__ is not None
    assert ("v2" in str(info.value)) == (kind == "revision")


def test_download(tmp_path, monkeypatch):
    asked = {}

    def download(name: str, *, revision: str | None, **patterns: list[str]) -> str:
        asked.update(name=name, revision=revision)
        asked["files"] = list(filter_repo_objects(files, **patterns))
        return str(tmp_path)

    small = [
        "config.json", "tokenizer.model", "spiece.model", "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ]  # fmt: skip
    weights = ["model.safetensors", "model-00001-of-00002.safetensors"]
    files = [
        *small, *weights, "pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.safetensors",
        "checkpoint-500/model.safetensors", "onnx/config.json", "additional/config.json", "a/config.json",
        "additional_chat_templates_old/a.jinja", "additional_chat_templates/old/a.jinja",
        "additional_chat_template/b.json",
    ]  # fmt: skip
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.resolve_model("owner/name", revision="main") == tmp_path
    assert asked == {"name": "owner/name", "revision": "main", "files": small + weights}
    hub.resolve_model("owner/name", weights=False)
    assert asked["files"] == small
