"""Costs of a model's steps and copies on this machine: measured once, kept in the cache directory, and corrected."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import msgspec

from asyncengine._core import CostCopy, CostFactors, CostPoint, CpuKernels, HybridConfig, StepCosts
from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.linear.tables import cache_directory, table_name
from asyncengine.version import VERSION

logger = logging.getLogger(__name__)

FORMAT = 4
"""Files of another one are measured anew."""
_LEARNED = ("decode", "rest", "attention", "hybrid")
"""Names of the CostTable.factors, in their order."""


class Point(msgspec.Struct, frozen=True):
    """Steps of so many tokens."""

    tokens: int
    base_ns: float
    """nanoseconds with no context"""
    context_ns: float
    """more for each token of context: of all decode rows together, or of the chunk of a prompt"""


class Copy(msgspec.Struct, frozen=True):
    """One copy from pinned memory, or to it."""

    num_bytes: int
    ns: float


class HostAttention(msgspec.Struct, frozen=True):
    """Attention of sequences that decode on the host, by one of so many workers that are all busy."""

    workers: int
    tokens: int
    """tokens of context"""
    ns: float
    """nanoseconds for each token of context in one layer"""


class CostTable(msgspec.Struct, frozen=True):
    """Times in nanoseconds; lists ascend."""

    decode: list[Point]
    """points of steps of decode rows alone"""
    prompt: list[Point]
    """points of steps with one chunk of a prompt"""
    to_device: list[Copy] = []
    """empty on the CPU, as the next two are"""
    to_host: list[Copy] = []
    crossing_ns: float = 0.0
    """time from the launch of a kernel that writes to the host until the host sees the write"""
    factors: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    """Measured time per predicted time, as learned while engines ran: of steps that decode alone; of other steps
    without attention; of the attention of chunks; and, beside the first factor, of steps that decode alone with
    lanes."""
    host_attention: list[HostAttention] = []
    """empty where it was not asked for"""
    learned_attend_ns: float = 0.0
    """nanoseconds measured in place of ``host_attention`` while engines ran, the link counted among the workers; 0:
    none"""
    exchange_ns: float = 0.0
    """nanoseconds that lanes for sequences on the host add to a step of a GPU, beside their tokens"""

    def native(self) -> StepCosts:
        decode, prompt = (
            [CostPoint(tokens=p.tokens, base_ns=p.base_ns, context_ns=p.context_ns) for p in points]
            for points in (self.decode, self.prompt)
        )
        to_device, to_host = (
            CostCopy(call_ns=call_ns, byte_ns=byte_ns)
            for call_ns, byte_ns in (fit_copies(self.to_device), fit_copies(self.to_host))
        )
        factors = dict(zip(("decode", "rest", "attention", "hybrid"), self.factors, strict=True))
        return StepCosts(decode, prompt, to_device, to_host, CostFactors(**factors))

    def attend_ns(self, workers: int) -> float:
        """Nanoseconds of one worker for a token of context in a layer, while ``workers`` are busy, or about as many; 0:
        unknown."""
        if not self.host_attention:
            return 0.0
        nearest = min((h.workers for h in self.host_attention), key=lambda count: abs(count - workers))
        measured = [h.ns for h in self.host_attention if h.workers == nearest]
        return sum(measured) / len(measured)

    def attenders(self, form: str, workers: int, token_bytes: float) -> tuple[int, float]:
        """Count the workers that attend on the host, the link counted in, and give ``attend_ns`` of one; 0 if that is
        not known.

        ``form`` is EngineConfig.hybrid_form. ``token_bytes`` are of keys and values of a token in one layer.
        """
        count = workers + (form != "workers")
        if self.learned_attend_ns:
            return count, self.learned_attend_ns
        link_ns, attend_ns = fit_copies(self.to_device)[1] * token_bytes, self.attend_ns(workers)
        if form == "link":
            return count, link_ns
        if form == "workers":
            return count, attend_ns
        return count, count / (workers / attend_ns + 1 / link_ns) if attend_ns and link_ns else 0.0

    def corrected(self, stats: Mapping[str, int]) -> CostTable:
        """Return the table with the factors that a step loop's statistics have learned."""
        decode, rest, attention, hybrid = (stats[f"{part}_cost_ppm"] / 1e6 for part in _LEARNED)
        attended, attend_ns = stats["host_attention_tokens"], self.learned_attend_ns
        if attended >= HybridConfig.ENOUGH_TOKENS:
            attend_ns = stats["host_attention_ns"] / attended
        return msgspec.structs.replace(self, factors=(decode, rest, attention, hybrid), learned_attend_ns=attend_ns)


def fit_copies(copies: list[Copy]) -> tuple[float, float]:
    """Nanoseconds per call and per byte, by the smallest and the largest copy; 0 of none."""
    if not copies:
        return 0.0, 0.0
    small, large = copies[0], copies[-1]
    if large.num_bytes == small.num_bytes:
        return 0.0, small.ns / small.num_bytes
    byte_ns = max(0.0, large.ns - small.ns) / (large.num_bytes - small.num_bytes)
    return max(0.0, small.ns - byte_ns * small.num_bytes), byte_ns


class _File(msgspec.Struct, frozen=True):
    format: int
    of: dict[str, str]
    """properties of which the file's name is a hash"""
    costs: CostTable


@dataclass(frozen=True, slots=True)
class CostFile:
    """File that keeps the costs of one model on one machine."""

    path: Path
    of: dict[str, str]

    @classmethod
    def find(cls, config: EngineConfig, model: object, dtype: str, device: str) -> CostFile:
        """``model`` is a ModelConfig: its fields are the shape. ``device`` is a card's name, or cpu."""
        of = {
            "version": VERSION,
            "model": repr(model),
            "dtype": dtype,
            "quantization": config.quantization,
            "head_quantization": config.head_quantization,
            "device": device,
            "rows": str(config.max_num_seqs),
            "tokens": str(config.max_num_batched_tokens),
            "block_size": str(config.block_size),
            "batch_invariant": str(config.batch_invariant),
            "eager": str(config.enforce_eager),
            "kv_cache_dtype": config.kv_cache_dtype,
        }
        if config.hybrid_attention != "off":
            form, workers = config.hybrid_form_on(device), config.num_hybrid_workers
            of["hybrid"] = f"{config.hybrid_lanes_on(device)} lanes, {workers} workers, {form}"
        if device == "cpu":
            of |= {"threads": str(config.num_threads), "isa": CpuKernels(1).isa}
        digest = hashlib.sha256(repr(sorted(of.items())).encode()).hexdigest()[:16]
        name = f"{table_name(device).removesuffix('.json')}-{digest}.json"
        return cls(cache_directory() / "costs" / name, of)

    def read(self) -> CostTable | None:
        """Read the costs. None if there is no such file, or with a warning if it is of no use."""
        try:
            file = msgspec.json.decode(self.path.read_bytes(), type=_File)
            file.costs.native()  # raises ValueError where points do not ascend
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as e:
            logger.warning("%s is measured anew: %s", self.path, e)
            return None
        known = file.format == FORMAT and file.of == self.of and file.costs.decode and file.costs.prompt
        return file.costs if known else None

    def keep(self, costs: CostTable) -> None:
        """Write the costs. Whoever reads the file meanwhile finds it whole, old or new. A failure is a warning: the
        next engine measures again."""
        written = self.path.with_name(f"{self.path.name}.{uuid4().hex}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                written.write_bytes(msgspec.json.format(msgspec.json.encode(_File(FORMAT, self.of, costs)), indent=1))
                written.replace(self.path)
            finally:
                written.unlink(missing_ok=True)
        except OSError as e:
            logger.warning("the costs of steps cannot be kept, so the next start will measure them again: %s", e)


@dataclass(frozen=True, slots=True)
class KnownCosts:
    """Costs with which an engine starts."""

    file: CostFile
    table: CostTable

    def keep_learned(self, stats: Mapping[str, int]) -> None:
        self.file.keep(self.table.corrected(stats))
