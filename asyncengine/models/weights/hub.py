"""A model directory or a GGUF file from what the user typed: a path, or a repository on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from asyncengine.errors import ModelNotFoundError
from asyncengine.models.gguf.paths import find_gguf, is_gguf

_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_TEMPLATES = "additional_chat_templates"
# Files in folders, but for those templates: onnx/, checkpoint-500/. A pattern cannot say "but for": so there is one for
# each character in which a folder's name may differ, for each beginning of the name, and for all that lies deeper.
_IN_FOLDERS = (
    *(f"{_TEMPLATES[:i]}[!{c}]*/*" for i, c in enumerate(_TEMPLATES)),
    *(f"{_TEMPLATES[:i]}/*" for i in range(len(_TEMPLATES))),
    f"{_TEMPLATES}?*/*",
)
# consolidated.safetensors of Mistral has the same weights once more.
_NEVER_READ = (*_IN_FOLDERS, "consolidated*.safetensors")


def local_directory(path_or_id: str) -> Path | None:
    """The directory or the GGUF file that a user's words name, None for a hub id.

    A directory that holds a GGUF file and no config.json stands for this file. Raises ModelNotFoundError for words that
    can be neither: another file, a path of no directory.
    """
    try:
        path = Path(path_or_id).expanduser()
        if path.is_dir():
            return find_gguf(path) or path
        is_file = path.exists()
    except (OSError, RuntimeError) as e:  # too long, in a folder that is closed to us, or ~ of a user who is not known
        raise ModelNotFoundError(f"there can be no directory {path_or_id!r}: {e}") from e
    if is_file and is_gguf(path):
        return path
    if is_file:
        raise ModelNotFoundError(f"{path} is a file; a model is a directory with config.json in it, or a GGUF file")
    if not _HUB_ID.fullmatch(path_or_id):
        raise ModelNotFoundError(f"there is no directory {path_or_id!r}, nor can that be a hub id (owner/name)")
    return None


def resolve_model(path_or_id: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """The local directory or GGUF file of a model, downloaded from the hub if it is not there yet.

    Only safetensors weights and small text files are downloaded, copies of weights left out, and of folders only
    additional_chat_templates/; without ``weights``, only small files.
    Raises ModelNotFoundError if there is neither such a directory nor such a repository.
    """
    if (path := local_directory(path_or_id)) is not None:
        return path

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [*_SMALL_FILES, "*.safetensors"] if weights else list(_SMALL_FILES)
    try:
        return Path(
            snapshot_download(path_or_id, revision=revision, allow_patterns=patterns, ignore_patterns=list(_NEVER_READ))
        )
    except LocalEntryNotFoundError as e:
        reason = "the hub cannot be reached and the model is not in the local cache"
        raise ModelNotFoundError(f"there is no directory {path_or_id!r}, and {reason}") from e
    except Exception as e:  # whatever its HTTP client raises when a connection breaks, which need be no OSError
        at = f" at revision {revision!r}" if revision else ""
        raise ModelNotFoundError(
            f"there is no directory {path_or_id!r}, and the hub could not supply a model of that name{at}: "
            f"{str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__}. "
            "A private or gated model needs a token (environment variable HF_TOKEN)."
        ) from e
