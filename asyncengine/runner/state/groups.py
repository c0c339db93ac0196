"""Groups of layers that keep different parts of a sequence: those that see all of it, and those that see a window."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from asyncengine.config import EngineConfig
from asyncengine.kernels.ops import KVSpec, SharedSpec
from asyncengine.models.config import ModelConfig

logger = logging.getLogger(__name__)

_MOST_GROUPS = 32
"""Tables of a sequence at most: each costs a step some work for every row."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Division of the layers with keys and values into groups whose blocks are of one size and come from one pool.

    Group 0 are the layers that see all, and as many layers with a window form a group each. A group has a table of its
    own for every sequence, and a window's group lets go of blocks that no query sees any more. Without window groups
    one block holds all layers.
    """

    window_groups: int = 0
    window: int = 0
    """tokens that the layers in window groups see, the most that one does"""
    of_layers: tuple[int, ...] = ()
    """group of each layer that keeps keys and values, in order"""
    places: tuple[int, ...] = ()
    """index of each of these layers in its group"""
    window_blocks: int = 0
    """blocks that a window group holds of one sequence at most: those of the window, and of two steps behind it"""

    @property
    def count(self) -> int:
        """Tables of a sequence."""
        return 1 + self.window_groups

    @property
    def layers(self) -> int:
        """Layers of one block, of which some may be unused."""
        return 1 + max(self.places)

    def blocks_for(self, entries: int) -> int:
        """Count the blocks of a sequence whose table has so many entries."""
        return entries + self.window_groups * min(entries, self.window_blocks)

    def entries_in(self, num_blocks: int) -> int:
        """Entries of the longest table of one sequence that has ``num_blocks`` to itself."""
        return max(num_blocks // self.count, num_blocks - self.window_groups * self.window_blocks)


def choose_groups(config: EngineConfig, model: ModelConfig, max_model_len: int) -> Groups:
    """Divide the layers where that saves memory of a sequence of ``max_model_len`` tokens; one group where it does not,
    or where a part of the machine knows one table alone."""
    specs = model.kv_specs
    windows = [spec.window for spec in specs if spec.window > 0]
    full = len(specs) - len(windows)
    if not config.window_groups or not windows or full == 0 or min(windows) >= max_model_len:
        return Groups()
    count, window = -(-len(windows) // full), max(windows)
    window_blocks = -(-(window + 2 * config.max_num_batched_tokens) // config.block_size) + 1
    of_layers, places = _divide([spec.window > 0 for spec in specs], count)
    groups = Groups(count, window, of_layers, places, window_blocks)
    entries = -(-max_model_len // config.block_size)
    if groups.layers * groups.blocks_for(entries) >= len(specs) * entries or groups.count > _MOST_GROUPS:
        return Groups()
    if obstacle := _obstacle(config, model):
        logger.info("layers with a window keep all tokens: %s has one block table for all layers", obstacle)
        return Groups()
    return groups


def _divide(slides: Sequence[bool], count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Deal the layers that slide out to ``count`` groups behind the first. Returns groups and places in them."""
    sizes, sliding, groups, places = [0] * (1 + count), 0, [], []
    for layer_slides in slides:
        group = 1 + sliding % count if layer_slides else 0
        sliding += layer_slides
        groups.append(group)
        places.append(sizes[group])
        sizes[group] += 1
    return tuple(groups), tuple(places)


def _obstacle(config: EngineConfig, model: ModelConfig) -> str:
    """The part of the machine that knows one table alone; empty if there is none."""
    if config.host_kv_memory_bytes is not None:
        return "a host tier"
    if config.tensor_parallel_size > 1:
        return f"tensor_parallel_size={config.tensor_parallel_size}"
    if not all(isinstance(spec, KVSpec | SharedSpec) for spec in model.layer_caches):
        return "a model with other layers than attention"
    return "a model with layers of different sizes" if len({spec.width for spec in model.kv_specs}) > 1 else ""
