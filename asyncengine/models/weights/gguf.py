"""GgufTensors: the tensors of GGUF files as a model asks for them."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from asyncengine.errors import MissingWeightError, UnsupportedModelError, WeightMismatchError
from asyncengine.kernels.blocks import FLOATS, BlockType, dequantize
from asyncengine.kernels.regroup import REGROUPED, regroup
from asyncengine.kernels.weight import BLOCKS, PackedWeight
from asyncengine.models.files import checked_size, excerpt
from asyncengine.models.gguf.files import read_model
from asyncengine.models.gguf.mapped import MappedFiles
from asyncengine.models.gguf.names import stored_name
from asyncengine.models.gguf.reader import StoredTensor
from asyncengine.models.gguf.settings import ARCHITECTURES, architecture_of
from asyncengine.models.weights.checkpoint import Progress
from asyncengine.models.weights.formats.base import Dense, TensorSource
from asyncengine.models.weights.shard import WHOLE, Part

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_PAGE = 4096
_UNUSED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the settings are read from."""


class GgufTensors:
    """A TensorSource over GGUF files. On torch's device "meta" shapes are checked, and tensors hold nothing.

    With ``keeps_blocks``, on the CPU, matrices in blocks stay where the file is mapped.
    """

    def __init__(
        self, path: Path, dtype: torch.dtype, *, device: torch.device = _CPU, progress: bool = False,
        keeps_blocks: bool = True,
    ) -> None:  # fmt: skip
        self.num_parameters = 0
        self.mapped_bytes = 0
        self.owned_bytes = 0
        self._path = path
        self._dtype = dtype
        self._device = device
        header = read_model(path)
        self._tensors = header.tensors
        self._architecture = architecture_of(header, path)
        self._kind = ARCHITECTURES[self._architecture]
        self._files = MappedFiles()
        self._used: set[str] = set()
        size = sum(checked_size(file) for file in {tensor.path for tensor in self._tensors.values()})
        self._progress = Progress(size, enabled=progress)
        kinds = {tensor.kind for tensor in self._tensors.values() if tensor.kind not in FLOATS}
        self.keeps_blocks = bool(kinds) and keeps_blocks
        """Matrices that are quantised stay in blocks."""
        if not keeps_blocks and (others := sorted(kind.name for kind in kinds - REGROUPED.keys())):
            logger.warning("%s: no GPU kernel reads %s: these weights become %s", path, ", ".join(others), dtype)

    def kind_of(self, name: str) -> BlockType:
        """The type of a tensor. Raises MissingWeightError if there is none."""
        return self._find(name)[0].kind

    @property
    def rotates_neighbours(self) -> bool:
        """Queries and keys of llama lie in the order in which neighbours are rotated together."""
        return self._kind.interleaved

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def __contains__(self, name: str) -> bool:
        return (stored := stored_name(name, self._architecture)) is not None and stored.name in self._tensors

    def equal(self, name: str, other: str) -> bool:
        """Return whether two tensors have the same bytes."""
        one, two = (self._find(key)[0] for key in (name, other))
        same = one.kind == two.kind and one.shape == two.shape
        return same and torch.equal(self._files.bytes_of(one), self._files.bytes_of(two))

    def stored(self) -> dict[str, Tensor] | None:
        """Modules of transformers cannot be given GGUF files."""
        raise UnsupportedModelError(f"{self._path}: model_impl=transformers does not read GGUF files")

    def get(self, name: str, *shape: int, part: Part = WHOLE) -> Tensor:
        return self._own(self._floats(name, shape, part).to(self._dtype))

    def get_transposed(self, name: str, *shape: int, part: Part = WHOLE) -> Tensor:
        """A file has no transposed matrix: what a family asks for so is copied."""
        return self.get(name, *shape, part=part).T.contiguous().T

    def float32(self, name: str, count: int) -> Tensor:
        return self._own(self._floats(name, (count,), WHOLE))

    def uint8(self, name: str, *shape: int) -> Tensor:
        """A file has no tensors of bytes."""
        raise MissingWeightError(f"tensor {name} is not in {self._path}")

    @property
    def is_random(self) -> bool:
        return False

    def is_float(self, name: str) -> bool:
        """Every tensor is read as floats."""
        return name in self

    def raw(
        self,
        name: str,
        *shapes: tuple[int, ...],
        kinds: tuple[torch.dtype, ...],
        parameters: int = 0,
        elements: bool = False,
    ) -> Tensor:
        """A file has no tensors of the formats of other checkpoints."""
        raise MissingWeightError(f"tensor {name} is not in {self._path}")

    def sized(self, name: str) -> int | None:
        return _count(self._find(name)[0].shape)

    def release(self, given: Tensor, owned: int) -> None:
        self.owned_bytes = owned

    def keep(self, weight: PackedWeight) -> PackedWeight:
        self.owned_bytes += weight.nbytes
        return weight

    def scales(self, name: str, count: int) -> Tensor | None:
        """A file has no scales of keys and values."""
        return None

    def blocks(self, name: str, shape: tuple[int, int], part: Part) -> PackedWeight:
        """The rows of a matrix [N, K] in blocks. Raises as ``get`` does, UnsupportedModelError for ranks that share
        columns."""
        if part.ranks > 1 and part.axis:
            raise UnsupportedModelError(f"{name} in blocks cannot be cut for {part.ranks} ranks along its columns")
        stored, whole = self._read(name, shape)
        taken = part.of(whole).contiguous()
        in_place = taken.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        if self._device == _CPU and in_place:
            taken.flatten()[::_PAGE].sum()  # reads the pages now, and not at the first request
            self.mapped_bytes += taken.nbytes
        else:
            self.owned_bytes += taken.nbytes
        taken = taken if self._device == _CPU else taken.to(self._device)
        return PackedWeight(BLOCKS, {"blocks": taken}, len(taken), shape[1], self._dtype, stored.kind)

    def close(self) -> None:
        """Close the bar; tensors that are mapped stay mapped."""
        self._progress.close()

    def finish(self) -> None:
        """The model is built: complete the bar and log the tensors it has not asked for."""
        self._progress.complete()
        if extra := sorted(self._tensors.keys() - self._used - set(_UNUSED)):
            shown = ", ".join(map(excerpt, extra[:5])) + (", ..." if len(extra) > 5 else "")
            logger.warning("%s holds %d tensors that the model does not use: %s", self._path, len(extra), shown)

    def _own(self, tensor: Tensor) -> Tensor:
        self.owned_bytes += tensor.nbytes
        return tensor.to(self._device).contiguous()

    def _floats(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        stored, whole = self._read(name, shape)
        if self._device.type == "meta":
            return part.of(torch.empty(shape, device="meta"))
        in_rows = len(shape) > 1 and part.axis == 0  # cut before they are unpacked
        numbers = dequantize(stored.kind, part.of(whole)) if in_rows else part.of(dequantize(stored.kind, whole))
        offset = self._kind.norm_offset if len(shape) == 1 and name.endswith("norm.weight") else 0.0
        return numbers - offset

    def _find(self, name: str) -> tuple[StoredTensor, int | None, str]:
        place = stored_name(name, self._architecture)
        if place is None or place.name not in self._tensors:
            shown = "" if place is None else f", as {place.name},"
            raise MissingWeightError(f"tensor {name} is not{shown} in {self._path}")
        return self._tensors[place.name], place.expert, place.name

    def _read(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, Tensor]:
        """A tensor of this shape, uint8 [rows, bytes of a row]."""
        stored, expert, key = self._find(name)
        found = stored.shape if expert is None else stored.shape[1:]
        if expert is not None and (len(stored.shape) != 3 or expert >= stored.shape[0]):
            found = stored.shape
        if found != shape and (found, shape) != ((shape[-1],), (1, shape[-1])):
            raise WeightMismatchError(
                f"tensor {key} in {stored.path}: expected shape {shape}, found {excerpt(stored.shape)}"
            )
        whole = self._files.bytes_of(stored)
        if key not in self._used:
            self._used.add(key)
            self._progress.add(stored.num_bytes)
        self.num_parameters += _count(shape)
        own = whole if expert is None else whole[expert]
        return stored, own.view(*shape[:-1], -1)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


class GgufFormat(Dense):
    """Matrices as a GGUF file has them, whatever the type of each is.

    Where blocks are not kept, projections of the types of ``REGROUPED`` stay packed in groups, and others become the
    model's dtype.
    """

    packed = BLOCKS

    def __init__(self, source: GgufTensors) -> None:
        self._source = source

    def weight(
        self, tensors: TensorSource, module: str, shape: tuple[int, int], part: Part, *, transposed: bool
    ) -> PackedWeight:
        source, name = self._source, f"{module}.weight"
        kind = source.kind_of(name)
        if transposed or kind in FLOATS or not (source.keeps_blocks or kind in REGROUPED):
            return super().weight(source, module, shape, part, transposed=transposed)
        if source.keeps_blocks:
            return source.blocks(name, shape, part)
        before = source.owned_bytes, source.mapped_bytes
        packed = regroup(source.blocks(name, shape, part))
        source.owned_bytes, source.mapped_bytes = before
        return source.keep(packed)

    def table(self, tensors: TensorSource, module: str, shape: tuple[int, int], part: Part) -> PackedWeight:
        """The embedding or the head, which other kernels than those of groups read."""
        if not self._source.keeps_blocks:
            return super().table(self._source, module, shape, part)
        return self.weight(tensors, module, shape, part, transposed=False)
