"""Bytes of GGUF files, mapped into memory."""

from __future__ import annotations

import mmap
import warnings
from pathlib import Path

import torch
from torch import Tensor

from asyncengine.errors import ModelError
from asyncengine.models.gguf.reader import StoredTensor


class MappedFiles:
    """Files that stay mapped as long as a tensor of theirs lives. Processes share their pages, and none writes."""

    def __init__(self) -> None:
        self._files: dict[Path, Tensor] = {}

    def bytes_of(self, stored: StoredTensor) -> Tensor:
        """uint8 [rows..., bytes of a row], in the file's pages. Raises ModelError if the file got shorter."""
        whole = self._map(stored.path)
        flat = whole[stored.start : stored.start + stored.num_bytes]
        if len(flat) < stored.num_bytes:
            raise ModelError(f"{stored.path} got shorter while it was read")
        return flat.view(*stored.shape[:-1], -1)

    def _map(self, path: Path) -> Tensor:
        if path not in self._files:
            try:
                with path.open("rb") as file:
                    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as e:
                raise ModelError(f"cannot read {path}: {e}") from e
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the memory cannot be written to
                self._files[path] = torch.frombuffer(memory, dtype=torch.uint8)
        return self._files[path]
