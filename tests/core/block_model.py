"""BlockManager in plain Python: sets, dictionaries and one ordered list, slow and obviously right."""

from __future__ import annotations

from collections import Counter

from asyncengine import _core

BLOCK_SIZE = 16

Tokens = tuple[int, ...]


class CheckedBlocks:
    """A native BlockManager and its model, side by side; every operation is compared.

    The model says which blocks are held and how often, which are worthless, in which order cached ones are evicted,
    and what the prefix index knows: (chain before, tokens) → (block, chain after). With window groups the model also
    knows which block accompanies which block of the index.
    """

    def __init__(self, num_blocks: int, prefix_caching: bool = True, window_groups: int = 0) -> None:
        self.native = _core.BlockManager(num_blocks, BLOCK_SIZE, prefix_caching, window_groups=window_groups)
        self.window_groups = window_groups
        self.num_blocks = num_blocks
        self.prefix_caching = prefix_caching
        self.held: dict[int, int] = {}
        self.worthless = set(range(num_blocks))
        self.cached: list[int] = []  # least recently used first
        self.index: dict[tuple[int, Tokens], tuple[int, int]] = {}
        self.key_of: dict[int, tuple[int, Tokens]] = {}  # by block
        self.companions: dict[tuple[int, int], int] = {}  # by (block of the index, group)
        self.chains: set[int] = set()  # all that were ever handed out
        self.operations = 0
        self.saw: Counter[str] = Counter()

    def allocate(self) -> int:
        self.operations += 1
        block = self.native.allocate()
        assert block not in self.held, f"block {block} was handed out twice"
        if self.worthless:
            assert block in self.worthless, f"block {block} evicted while worthless ones were left"
            self.worthless.remove(block)
        else:
            assert block == self.cached[0], f"{block} evicted, least recently used is {self.cached[0]}"
            self.cached.pop(0)
            self._forget(block)
        self.held[block] = 1
        return block

    def retain(self, block: int) -> None:
        self.operations += 1
        self.native.retain(block)
        if block not in self.held:
            self.cached.remove(block)
        self.held[block] = self.held.get(block, 0) + 1

    def release(self, block: int) -> None:
        self.operations += 1
        self.native.release(block)
        self.held[block] -= 1
        if self.held[block] == 0:
            del self.held[block]
            if self._is_known(block):
                self.cached.append(block)
            else:
                self.worthless.add(block)

    def publish(self, block: int, parent: int, tokens: Tokens) -> int:
        self.operations += 1
        chain = self.native.publish(block, parent, tokens)
        known = self.index.get((parent, tokens))
        if known is not None:
            assert chain == known[1], "an equal block is cached already: its chain is the answer"
            return chain
        assert chain not in self.chains, f"chain {chain} was used before"
        self.chains.add(chain)
        self._unindex(block)
        self.index[parent, tokens] = block, chain
        self.key_of[block] = parent, tokens
        return chain

    def accompany(self, entry: int, group: int, block: int) -> None:
        """Make a held block of a window group known through a block of the index."""
        self.operations += 1
        assert entry in self.key_of
        assert block in self.held
        self.native.accompany(entry, group, block)
        if (entry, group) not in self.companions and block not in self.companions.values():
            self.companions[entry, group] = block
            self.saw["companion"] += 1

    def match_windows(self, chain: list[int], window: int) -> int:
        """Count the blocks of a found prefix whose next token sees ``window`` tokens, in all groups."""
        self.operations += 1
        matched = self.native.match_windows(chain, window)
        expected = 0
        for length in range(1, len(chain) + 1):
            first_seen = max(0, length * BLOCK_SIZE - window + 1) // BLOCK_SIZE
            seen = [(entry, group) for entry in chain[first_seen:length] for group in range(self.window_groups)]
            if all(pair in self.companions for pair in seen):
                expected = length
        assert matched == expected
        self.saw["prefix of windows"] += expected > 0
        self.saw["shorter prefix"] += expected < len(chain)
        return matched

    def match(self, tokens: Tokens, salt: int) -> list[int]:
        self.operations += 1
        matched = self.native.match_prefix(tokens, salt)
        chain = _core.BlockManager.root_chain(salt)
        expected = []
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            found = self.index.get((chain, tokens[start : start + BLOCK_SIZE])) if self.prefix_caching else None
            if found is None:
                break
            block, chain = found
            expected.append(block)
        assert matched == expected
        return matched

    def _is_known(self, block: int) -> bool:
        return block in self.key_of or block in self.companions.values()

    def _unindex(self, block: int) -> None:
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.index[key]

    def _forget(self, block: int) -> None:
        """Nothing is found in the block, nor in its companions: those that nobody holds are worthless."""
        self._unindex(block)
        self.companions = {place: other for place, other in self.companions.items() if other != block}
        for group in range(self.window_groups):
            companion = self.companions.pop((block, group), None)
            if companion in self.cached:
                self.cached.remove(companion)
                self.worthless.add(companion)
                self.saw["dropped"] += 1

    def check(self) -> None:
        """Counts add up, and native and model agree about every block."""
        assert self.native.consistent()
        assert self.native.num_free == len(self.worthless) + len(self.cached) == self.num_blocks - len(self.held)
        for block in range(self.num_blocks):
            assert self.native.ref_count(block) == self.held.get(block, 0)
            assert self.native.writable(block) == (self.held.get(block) == 1 and not self._is_known(block))
        for entry in self.key_of:
            for group in range(self.window_groups):
                assert self.native.companion(entry, group) == self.companions.get((entry, group), -1)
