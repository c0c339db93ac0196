"""GGUF files of a model: one, or several numbered ones."""

from __future__ import annotations

from pathlib import Path

from asyncengine.errors import MissingWeightError, ModelError
from asyncengine.models.files import excerpt
from asyncengine.models.gguf.paths import PART, SUFFIX
from asyncengine.models.gguf.reader import Header, read_header

_MAX_PARTS = 1 << 10


def read_model(path: Path) -> Header:
    """The header of the first file, with the tensors of all that belong to it. Raises ModelError."""
    header = read_header(path)
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or not 0 <= count <= _MAX_PARTS:
        raise ModelError(f"{path}: split.count = {excerpt(count)} cannot be")
    if count <= 1:
        return header
    part = PART.fullmatch(path.name)
    if part is None or int(part[3]) != count or int(part[2]) != 1:
        raise ModelError(f"{path} is one of {count} files: name the first, which ends in -00001-of-{count:05}{SUFFIX}")
    tensors = dict(header.tensors)
    for number in range(2, count + 1):
        other = path.with_name(f"{part[1]}-{number:05}-of-{count:05}{SUFFIX}")
        if not other.exists():
            raise MissingWeightError(
                f"{other.name}, one of {count} files that belong together, is not in {path.parent}"
            )
        more = read_header(other).tensors
        if both := tensors.keys() & more.keys():
            raise ModelError(f"{other}: tensor {excerpt(min(both))} is in another file too")
        tensors |= more
    return Header(header.metadata, tensors)
