"""Weights from safetensors files, mapped into memory."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncengine.errors import MissingWeightError, ModelError, UnsupportedModelError, WeightMismatchError
from asyncengine.kernels.weight import PackedWeight
from asyncengine.models.files import checked_size, excerpt
from asyncengine.models.weights.shard import WHOLE, Part

logger = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONSOLIDATED_FILE = "consolidated.safetensors"
MAX_INDEX_BYTES = 64 << 20
"""Largest index; that of a model with 700 billion parameters has 9 MB."""
MAX_HEADER_BYTES = 32 << 20
"""Largest header of a weight file, of some 300,000 tensors. The library takes three times as much, and 6 s for it."""

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Buffers that old checkpoints carry along, and heads that are tied to the embedding.
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|attn\.(masked_)?bias$|^(language_model\.)?lm_head\.weight$")
_IMAGES = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector|embed_vision|audio_tower|embed_audio)\.")
"""Names of the tensors by which a model sees images or hears, beside its language model."""
_TRUNK = re.compile(r"^(model|transformer)\.")
_PAGE = 4096
_CPU = torch.device("cpu")


class Progress:
    """A bar on standard error over bytes; nothing at all where that is not a terminal."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar: Any = None
        if enabled:
            from tqdm import tqdm

            # disable=None: tqdm looks whether its stream is a terminal.
            self._bar = tqdm(
                total=total,
                desc="Loading weights",
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                disable=None,
            )

    def add(self, num_bytes: int) -> None:
        if self._bar is not None:
            self._bar.update(num_bytes)

    def complete(self) -> None:
        """Count what is no tensor's: headers, and tensors that the model does not use."""
        if self._bar is not None:
            self._bar.update(self._bar.total - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def find_shards(directory: Path) -> dict[str, Path]:
    """Map each tensor to the file that holds it. Raises MissingWeightError naming the first file that is not there.

    A single file counts before an index, as transformers has it: shards that are stale may lie beside it. An index
    that names anything but files of the directory is refused (ModelError). Mistral's own file counts if there is
    neither.
    """
    index = directory / INDEX_FILE
    single = directory / SINGLE_FILE
    if os.path.lexists(single):
        return dict.fromkeys(_open_shard(single).keys(), single)
    if os.path.lexists(index):
        weight_map = _read_index(index)
        paths = {file: directory / file for file in sorted(set(weight_map.values()))}
        for file, path in paths.items():
            if not _is_file_name(file):
                raise ModelError(f"{index}: 'weight_map' must name files of its directory, found {excerpt(file)}")
            if not os.path.lexists(path):
                raise MissingWeightError(f"shard {file}, which {index} names, is not there")
        return {name: paths[file] for name, file in weight_map.items()}
    consolidated = directory / CONSOLIDATED_FILE
    if os.path.lexists(consolidated):
        return dict.fromkeys(_open_shard(consolidated).keys(), consolidated)
    hint = ""
    if pickles := sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth")):
        name = pickles[0] if pickles[0].isprintable() and len(pickles[0]) < 100 else excerpt(pickles[0])
        hint = f"; {name} is not read, as a pickle may run code: convert it with transformers' save_pretrained"
    raise MissingWeightError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _read_index(path: Path) -> dict[str, str]:
    """File names by tensor. No objects are made of anything else: 64 MB of [] would take 1.6 GB and 18 seconds."""
    checked_size(path, MAX_INDEX_BYTES)
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except RecursionError:
        raise ModelError(f"cannot read {path}: it is nested too deeply") from None
    except (OSError, ValueError) as e:
        raise ModelError(f"cannot read {path}: {_brief(e)}") from e


def _is_file_name(name: str) -> bool:
    """Return whether ``name`` names a file in a directory, on any system: no path, no drive, nothing hidden."""
    return re.fullmatch(r"\w[^/\\:\x00-\x1f]{0,254}", name) is not None


def _open_shard(path: Path) -> Any:
    checked_size(path)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ModelError(
                f"{path} is damaged or incomplete: its header has {length:,} bytes, and at most {MAX_HEADER_BYTES:,} "
                "are read"
            )
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as e:
        raise ModelError(f"{path} is damaged or incomplete: {_brief(e)}") from e


def _brief(error: Exception) -> str:
    """The start of its message: the libraries' messages repeat whole values of the file."""
    return str(error)[:300]


def _aligned(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy if its address is no multiple of its element's size: a header may have any length."""
    return tensor if tensor.data_ptr() % tensor.itemsize == 0 else tensor.clone()


_MISTRALS = {
    "tok_embeddings": "embed_tokens", "output": "lm_head", "norm": "norm", "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj",
}  # fmt: skip
"""Names of modules in a consolidated file, and those of transformers."""


def _names_of_transformers(shard_of: dict[str, Path]) -> dict[str, str]:
    """Names of transformers, without the trunk's, for tensors of a consolidated file; empty for other files."""
    if not any(path.name == CONSOLIDATED_FILE for path in shard_of.values()):
        return {}
    names = {}
    for key in shard_of:
        match = re.fullmatch(r"(layers\.\d+\.|)([\w.]+)\.(weight|bias)", key)
        if match and match[2] in _MISTRALS:
            names[f"{match[1]}{_MISTRALS[match[2]]}.{match[3]}"] = key
    return names


class Checkpoint:
    """A TensorSource over safetensors files.

    A tensor that has the wanted dtype already is used where the file is mapped, without a copy; others
    are converted one by one. ``mapped_bytes`` and ``owned_bytes`` say how much of each there is. On torch's device
    "meta" only the files' headers are read: shapes are checked, and tensors hold nothing.
    """

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        *,
        device: torch.device = _CPU,
        progress: bool = False,
    ) -> None:
        self.num_parameters = 0
        self.mapped_bytes = 0
        self.owned_bytes = 0
        self._dtype = dtype
        self._device = device
        self._shard_of = find_shards(directory)
        self._directory = directory
        self._open: dict[Path, Any] = {}
        self._renamed = _names_of_transformers(self._shard_of)
        self._shared = self._shared_names()
        self._used: set[str] = set()
        self._raw: set[int] = set()  # addresses of the storages that ``raw`` gave
        self._progress = Progress(sum(checked_size(path) for path in set(self._shard_of.values())), enabled=progress)

    @property
    def rotates_neighbours(self) -> bool:
        """Queries and keys lie in the order of Mistral's own files, in which neighbours are rotated together."""
        return bool(self._renamed)

    def __contains__(self, name: str) -> bool:
        return self._key(name) is not None

    def equal(self, name: str, other: str) -> bool:
        """Return whether two tensors that are there have the same elements in the model's dtype.

        On the device "meta" the first rows speak for all.
        """
        read = self._first_rows if self._device.type == "meta" else self._tensor
        one, two = (read(self._require(key)).to(self._dtype) for key in (name, other))
        return torch.equal(one, two)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def stored(self) -> dict[str, Tensor]:
        return {name: self._stored(name) for name in self._shard_of}

    def get(self, name: str, *shape: int, part: Part = WHOLE) -> Tensor:
        whole = self._read(name, shape)
        stored = _aligned(part.of(whole))
        in_place = stored.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        if in_place and stored.is_contiguous() and stored.dtype == self._dtype and self._device == _CPU:
            # Reads the pages now: the bar tells the truth, and the first request does not wait for the disk.
            stored.flatten().view(torch.uint8)[::_PAGE].sum()
            self.mapped_bytes += stored.nbytes
            return stored
        return self._own(stored.to(self._device).to(self._dtype))

    def get_transposed(self, name: str, *shape: int, part: Part = WHOLE) -> Tensor:
        taken = part.of(self._read(name, shape[::-1]).T).T
        stored = _aligned(taken).contiguous().to(self._device)
        self.owned_bytes += stored.numel() * self._dtype.itemsize
        return stored.to(self._dtype).T

    def uint8(self, name: str, *shape: int) -> Tensor:
        return self._read(name, shape, kinds=(torch.uint8,)).to(self._device)

    is_random = False

    def is_float(self, name: str) -> bool:
        key = self._key(name)
        return key is not None and self._header(key).dtype in _FLOATS

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises MissingWeightError if there is none."""
        return tuple(self._header(self._require(name)).shape)

    def stored_name(self, name: str) -> str:
        """The name that the files have for a tensor. Raises MissingWeightError if there is none."""
        return self._require(name)

    def sized(self, name: str) -> int | None:
        return self._header(self._require(name)).numel()

    def raw(
        self,
        name: str,
        *shapes: tuple[int, ...],
        kinds: tuple[torch.dtype, ...],
        parameters: int = 0,
        elements: bool = False,
    ) -> Tensor:
        tensor = _aligned(self._read(name, *shapes, kinds=kinds, elements=elements, parameters=parameters))
        self._raw.add(tensor.untyped_storage().data_ptr())
        return tensor if elements else tensor.to(self._device)

    def release(self, given: Tensor, owned: int) -> None:
        if self.owned_bytes == owned:
            self.mapped_bytes -= given.nbytes
        self.owned_bytes = owned

    def keep(self, weight: PackedWeight) -> PackedWeight:
        for tensor in weight.tensors.values():
            if not tensor.is_meta and tensor.untyped_storage().data_ptr() in self._raw:
                tensor.view(torch.uint8).flatten()[::_PAGE].sum()  # reads the pages now, as ``get`` does
                self.mapped_bytes += tensor.nbytes
            else:
                self.owned_bytes += tensor.nbytes
        return weight

    def float32(self, name: str, count: int) -> Tensor:
        return self._own(self._read(name, (count,)).to(self._device, torch.float32))

    def scales(self, name: str, count: int) -> Tensor | None:
        """float32 [count] on the CPU, of a tensor that has as many elements or one for all; None if there is none.

        Raises WeightMismatchError if it has another shape, or not all are positive.
        """
        if name not in self:
            return None
        stored = self._read(name, (), (1,), (count,), elements=True).float()
        if not (stored.isfinite() & (stored > 0)).all():
            raise WeightMismatchError(f"tensor {name} in {self._directory} is no scale: it is to be positive")
        return stored.reshape(-1).expand(count).clone()

    def close(self) -> None:
        """Close the bar and the files; tensors that are mapped stay mapped."""
        self._progress.close()
        self._open.clear()

    def finish(self) -> None:
        """The model is built: complete the bar and log, in one line, the tensors it has not asked for."""
        self._progress.complete()
        extra = [n for n in self._shard_of if n not in self._used and not _HARMLESS.search(n)]
        if count := sum(_IMAGES.match(n) is not None for n in extra):
            logger.warning("%s: %d tensors for images are left out: images are not served", self._directory, count)
            extra = [n for n in extra if not _IMAGES.match(n)]
        if extra:
            names = (n if n.isprintable() and len(n) < 100 else excerpt(n) for n in sorted(extra)[:5])
            shown = ", ".join(names) + (", ..." if len(extra) > 5 else "")
            logger.warning("%s holds %d tensors that the model does not use: %s", self._directory, len(extra), shown)

    def _own(self, tensor: Tensor) -> Tensor:
        self.owned_bytes += tensor.nbytes
        return tensor.contiguous()

    def _shared_names(self) -> dict[str, str]:
        """Names of tensors that a file holds under another name, as safetensors' save_model notes them."""
        files = set(self._shard_of.values())
        if len(files) != 1:  # it writes a single file
            return {}
        metadata = self._file(*files).metadata() or {}
        return {name: kept for name, kept in metadata.items() if name not in self._shard_of and kept in self._shard_of}

    def _key(self, name: str) -> str | None:
        """The name under which the files hold a tensor.

        Those of a model without a head leave out the trunk's name. Those of a model for images put the name of its
        language model before it, or behind "model".
        """
        bare = _TRUNK.sub("", name)
        for key in (name, bare, f"model.language_model.{bare}", f"language_model.{name}", f"language_model.{bare}"):
            if key in self._shard_of:
                return key
            if key in self._shared:
                return self._shared[key]
            if key in self._renamed:
                return self._renamed[key]
        return None

    def _require(self, name: str) -> str:
        if (key := self._key(name)) is None:
            raise MissingWeightError(f"tensor {name} is not in {self._directory}")
        return key

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = _open_shard(path)
        return self._open[path]

    def _tensor(self, key: str) -> Tensor:
        path = self._shard_of[key]
        file = self._file(path)
        try:
            tensor: Tensor = file.get_tensor(key)
        except Exception as e:  # torch's errors as well, for shapes and types that it does not have
            if key in file.keys():  # noqa: SIM118  # a safetensors file is no mapping
                raise WeightMismatchError(f"tensor {key} in {path} cannot be read: {_brief(e)}") from e
            raise MissingWeightError(f"tensor {key} is not in {path}, where the index places it: {_brief(e)}") from e
        return tensor

    def _first_rows(self, key: str, count: int = 64) -> Tensor:
        """The first rows of a tensor; all of one that has no axis."""
        part = self._file(self._shard_of[key]).get_slice(key)
        rows: Tensor = part[:count] if part.get_shape() else self._tensor(key)
        return rows

    def _header(self, key: str) -> Tensor:
        """A tensor's shape and dtype, on the device "meta"."""
        try:
            shape = self._file(self._shard_of[key]).get_slice(key).get_shape()
            return torch.empty(shape, dtype=self._first_rows(key, 0).dtype, device="meta")
        except ModelError:
            raise
        except Exception:  # the reader of all of it says what is wrong
            return self._tensor(key)

    def _read(
        self,
        name: str,
        *shapes: tuple[int, ...],
        kinds: tuple[torch.dtype, ...] = _FLOATS,
        elements: bool = False,
        parameters: int | None = None,
    ) -> Tensor:
        """A tensor of one of the shapes; on the device "meta" without its elements, unless these are asked for.

        It counts as so many ``parameters``; None: as many as it has elements.
        """
        key = self._require(name)
        path = self._shard_of[key]
        tensor = self._header(key) if self._device.type == "meta" and not elements else self._tensor(key)
        if tuple(tensor.shape) not in shapes:
            expected = " or ".join(map(str, shapes))
            raise WeightMismatchError(
                f"tensor {key} in {path}: expected shape {expected}, found {excerpt(tuple(tensor.shape))}"
            )
        if tensor.dtype not in kinds:
            wanted = "floats" if kinds is _FLOATS else " or ".join(map(str, kinds))
            raise WeightMismatchError(f"tensor {key} in {path}: expected {wanted}, found {tensor.dtype}")
        self._use(key, tensor, tensor.numel() if parameters is None else parameters)
        return tensor

    def _stored(self, key: str) -> Tensor:
        tensor = _aligned(self._tensor(key))
        self._use(key, tensor, tensor.numel())
        if tensor.dtype == self._dtype and self._device == _CPU:
            self.mapped_bytes += tensor.nbytes
        else:
            self.owned_bytes += tensor.numel() * self._dtype.itemsize
        return tensor

    def _use(self, key: str, tensor: Tensor, parameters: int) -> None:
        if key not in self._used:  # several projections may share it
            self._used.add(key)
            self.num_parameters += parameters
            self._progress.add(tensor.nbytes)


def choose_dtype(wanted: str, stored: str, device: torch.device = _CPU) -> torch.dtype:
    """The dtype to compute in: the wanted one, or with "auto" the checkpoint's.

    A checkpoint's float16 becomes float32 on the CPU, whose kernels have no such products.
    """
    name = stored if wanted == "auto" else wanted
    half = torch.float32 if device == _CPU and wanted == "auto" else torch.float16
    dtypes = {"float32": torch.float32, "float16": half, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise UnsupportedModelError(
            f"the checkpoint's dtype {excerpt(name)} is not supported: choose another with dtype="
        )
    return dtypes[name]
