"""Random walks of block manager and scheduler beside their models, as long as one likes:

    python -m tests.core.long_run [--operations 1000000] [--seed 1]

Every operation is compared and every invariant checked; no request may take more steps than the model allows. The walks
that the tests take are run first, then others whose limits are drawn from the seed. Exits with a traceback at the first
difference; its last line before that names the walk and the seed that repeat it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from .block_model import BLOCK_SIZE, CheckedBlocks
from .scheduler_model import VOCAB, CheckedScheduler, Limits
from .state_model import walk_states

SALTS = 3
WINDOW = 20
"""Tokens that window groups of the walks over blocks see."""
OPERATIONS_OF_A_WALK = 20_000

WALKS = {
    "roomy": Limits(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64),
    "tiny pool": Limits(num_blocks=7, max_num_seqs=6, max_num_batched_tokens=40),
    "one sequence": Limits(num_blocks=6, max_num_seqs=1, max_num_batched_tokens=16),
    "serial": Limits(num_blocks=14, steps_in_flight=1),
    "three in flight": Limits(num_blocks=9, steps_in_flight=3, max_num_seqs=5),
    "chunks of one": Limits(num_blocks=20, prefill_chunk_size=1, max_num_seqs=6),
    "chunks of seven": Limits(num_blocks=10, prefill_chunk_size=7, max_num_batched_tokens=33),
    "no prefix cache": Limits(num_blocks=11, prefix_caching=False),
    "host tier": Limits(num_blocks=10, max_num_seqs=5, num_host_blocks=50),
    "tiny host tier": Limits(num_blocks=12, max_num_seqs=4, num_host_blocks=6, steps_in_flight=3),
    "host rows": Limits(num_blocks=10, max_num_seqs=6, num_host_blocks=60, lanes=2),
    "one lane": Limits(num_blocks=8, max_num_seqs=5, num_host_blocks=80, lanes=1, layers=3, steps_in_flight=3),
    "host rows in a tiny host tier": Limits(num_blocks=9, max_num_seqs=6, num_host_blocks=10, lanes=4, layers=1),
    "serial host rows": Limits(num_blocks=12, num_host_blocks=50, max_num_seqs=6, lanes=3, steps_in_flight=1),
    "paced": Limits(num_blocks=40, max_num_seqs=6, max_num_batched_tokens=64, target_itl_ns=4000),
    "tenants": Limits(num_blocks=42, max_num_seqs=6, max_num_batched_tokens=64, tenants=3),
    "more tenants than slots": Limits(num_blocks=24, max_num_seqs=3, tenants=5, steps_in_flight=3),
    "tenants in a tiny pool": Limits(num_blocks=9, max_num_seqs=6, max_num_batched_tokens=40, tenants=2),
    "serial tenants": Limits(num_blocks=12, max_num_seqs=8, steps_in_flight=1, tenants=3),
    "tenants and a host tier": Limits(num_blocks=10, max_num_seqs=5, num_host_blocks=50, tenants=3),
    "tenants and host rows": Limits(num_blocks=10, max_num_seqs=6, num_host_blocks=60, lanes=2, tenants=2),
    "window": Limits(num_blocks=14, max_num_seqs=6, max_model_len=150, window=20, max_num_batched_tokens=24),
    "window, no prefix cache": Limits(num_blocks=9, max_num_seqs=5, max_model_len=144, window=1, prefix_caching=False),
    "window and a host tier": Limits(num_blocks=11, num_host_blocks=40, max_model_len=150, window=33),
    "window and tenants": Limits(num_blocks=16, max_num_seqs=6, max_model_len=150, window=16, tenants=3),
    "window and host rows": Limits(num_blocks=10, max_num_seqs=6, num_host_blocks=60, lanes=2, window=17),
    "states": Limits(num_blocks=14, max_num_seqs=5, snapshots=6),
    "states without snapshots": Limits(num_blocks=9, max_num_seqs=4, snapshots=0, steps_in_flight=3),
    "states, no prefix cache": Limits(num_blocks=12, max_num_seqs=5, snapshots=2, prefix_caching=False),
    "states and a host tier": Limits(num_blocks=9, max_num_seqs=4, snapshots=9, num_host_blocks=40),
    "states on the host": Limits(num_blocks=14, snapshots=4, num_host_blocks=60, num_host_states=9),
    "few states on the host": Limits(
        num_blocks=9, snapshots=9, num_host_blocks=40, num_host_states=3, steps_in_flight=3
    ),
    "states and a window": Limits(num_blocks=14, max_model_len=150, window=20, snapshots=3, prefill_chunk_size=7),
    "paced in vain": Limits(num_blocks=14, max_num_batched_tokens=48, target_itl_ns=1),
}


def block_tokens(kind: int) -> tuple[int, ...]:
    """One block of few kinds, the last of which differs from the first in one token only."""
    return (0,) * (BLOCK_SIZE - 1) + (7,) if kind == 3 else (kind,) * BLOCK_SIZE


def prefix_tokens(kinds: list[int]) -> tuple[int, ...]:
    return tuple(token for kind in kinds for token in block_tokens(kind))


class CachedChain:
    """A sequence as the scheduler would run it: matched prefix, own blocks after it, published in order.

    Window groups see WINDOW tokens and let go of what is behind them.
    """

    def __init__(self, blocks: CheckedBlocks, kinds: list[int], salt: int) -> None:
        self.kinds = kinds
        self.windows_first = salt == 0  # are evicted before the block through which they are found
        self.held = blocks.match(prefix_tokens(kinds), salt)
        if blocks.window_groups:
            self.held = self.held[: blocks.match_windows(self.held, WINDOW)]
        self.let_go_of = self._unseen(len(self.held))
        groups, found = range(blocks.window_groups), self.held[self.let_go_of :]
        self.windows = [[-1] * self.let_go_of + [blocks.companions[block, g] for block in found] for g in groups]
        for block in self._all_held():
            blocks.retain(block)
        self.published = len(self.held)
        self.chain = blocks.native.root_chain(salt)
        for i in range(self.published):
            self.chain = blocks.index[self.chain, block_tokens(kinds[i])][1]

    @staticmethod
    def _unseen(length: int) -> int:
        """Blocks that the token behind so many blocks does not see in a window group."""
        return max(0, length * BLOCK_SIZE - WINDOW + 1) // BLOCK_SIZE

    def _all_held(self) -> list[int]:
        return self.held + [block for window in self.windows for block in window[self.let_go_of :]]

    def grow(self, blocks: CheckedBlocks) -> None:
        if len(self.held) < len(self.kinds) and blocks.native.num_free > blocks.window_groups:
            for table in (self.held, *self.windows):
                table.append(blocks.allocate())

    def let_go(self, blocks: CheckedBlocks) -> None:
        """Release the next block of each window group that is published and not seen."""
        if self.let_go_of < min(self._unseen(len(self.held)), self.published):
            for window in self.windows:
                blocks.release(window[self.let_go_of])
            self.let_go_of += 1

    def publish(self, blocks: CheckedBlocks) -> None:
        if self.published < len(self.held):
            place = self.chain, block_tokens(self.kinds[self.published])
            self.chain = blocks.publish(self.held[self.published], *place)
            for group, window in enumerate(self.windows):
                blocks.accompany(blocks.index[place][0], group, window[self.published])
            self.published += 1

    def release(self, blocks: CheckedBlocks) -> None:
        tables = [self.held, *(window[self.let_go_of :] for window in self.windows)]
        for table in reversed(tables) if self.windows_first else tables:
            for block in reversed(table):
                blocks.release(block)


def walk_blocks(num_blocks: int, rng: random.Random, operations: int, window_groups: int = 0) -> CheckedBlocks:
    """Sequences that come, share prefixes, grow, publish and go; at the end all is free."""
    blocks = CheckedBlocks(num_blocks, window_groups=window_groups)
    running: list[CachedChain] = []
    while blocks.operations < operations:
        match rng.randrange(10):
            case 0 | 1 if len(running) < 2 + num_blocks // 4:  # of more, most would find no room
                kinds = [rng.randrange(4) for _ in range(rng.randrange(7))]
                running.append(CachedChain(blocks, kinds, rng.randrange(SALTS)))
            case 2 if running:
                running.pop(rng.randrange(len(running))).release(blocks)
            case 3 if of_full_group := [block for chain in running for block in chain.held]:
                blocks.publish(rng.choice(of_full_group), rng.randrange(1, 50), block_tokens(rng.randrange(4)))
            case 4 | 5 | 6 if running:
                rng.choice(running).grow(blocks)
            case 7 if running:
                rng.choice(running).let_go(blocks)
            case 8 | 9 if running:
                rng.choice(running).publish(blocks)
        blocks.check()
    for chain in running:
        chain.release(blocks)
    blocks.check()
    assert blocks.native.num_free == num_blocks
    return blocks


def random_request(scheduler: CheckedScheduler, rng: random.Random, arrival: int) -> None:
    longest = scheduler.limits.longest
    family, length = rng.randrange(3), min(rng.choice([3, 17, 40, 90]) + rng.randrange(8), longest - 1)
    of_class = rng.randrange(-1, 2)
    prompt = [(family + i) % VOCAB for i in range(length)]
    if rng.random() < 0.5:
        prompt[rng.randrange(length)] = rng.randrange(VOCAB)
    scheduler.add(
        prompt,
        n=rng.choice([1, 1, 1, 2, 4]),
        max_tokens=rng.randint(1, min(60, longest - length)),
        stop_tokens=[rng.randrange(VOCAB)] if rng.random() < 0.3 else [],
        order=arrival + 20 * of_class,
        salt=rng.randrange(SALTS),
        fails_at=rng.randrange(6) if rng.random() < 0.05 else None,
        tenant=rng.randint(0 if rng.random() < 0.2 else 1, scheduler.limits.tenants) if scheduler.limits.tenants else 0,
        priority=of_class,
    )


def walk_scheduler(limits: Limits, rng: random.Random, operations: int) -> CheckedScheduler:
    """Requests and aborts at any moment, steps in any rhythm; now and then, and at the end, all is finished."""
    scheduler = CheckedScheduler(limits)
    arrival = 0
    while scheduler.operations < operations:
        crowded = len(scheduler.requests) > 2 * limits.max_num_seqs
        match rng.randrange(8):
            case 0 if not crowded:
                arrival += 1
                random_request(scheduler, rng, arrival)
            case 1 if scheduler.requests and rng.random() < 0.15:
                scheduler.abort(rng.choice(list(scheduler.requests)), rng.choice([None, 0, 1, 2]))
            case 2 | 3 | 4:
                scheduler.schedule()
            case 5 if limits.num_host_blocks:
                random_move(scheduler, rng)
            case 6 if limits.lanes:
                random_jobs(scheduler, rng)
            case _ if scheduler.flight and rng.random() < 0.01:
                scheduler.fail_step()
            case _ if scheduler.flight:
                scheduler.commit()
        if rng.random() < 0.002:
            scheduler.finish()
    scheduler.finish()
    return scheduler


def random_move(scheduler: CheckedScheduler, rng: random.Random) -> None:
    if scheduler.state_moves and rng.random() < 0.3:
        scheduler.end_state_move(rng.choice(list(scheduler.state_moves)), done=rng.random() < 0.97)
    elif scheduler.limits.num_host_states and rng.random() < 0.01:
        scheduler.refuse_state_moves(1)
    elif scheduler.moves and rng.random() < 0.7:
        scheduler.end_move(rng.choice(list(scheduler.moves)), done=rng.random() < 0.97)
    elif rng.random() < 0.02:
        scheduler.refuse_moves(1)
    else:
        scheduler.move()


def random_jobs(scheduler: CheckedScheduler, rng: random.Random) -> None:
    """Some workers end, in any order; rarely one fails, and more rarely one hangs."""
    pending = scheduler.pending_jobs()
    for s in rng.sample(pending, rng.randint(0, len(pending))):
        scheduler.end_job(s, done=rng.random() < 0.98)
    if rng.random() < 0.01:
        scheduler.wait_for_jobs_in_vain()


def random_limits(rng: random.Random) -> Limits:
    max_num_seqs = rng.randint(1, 8)
    prefix_caching = rng.random() < 0.8
    num_host_blocks = rng.choice([0, 2, 30, 100]) if prefix_caching else 0
    lanes = rng.choice([0, 1, 2, 5]) if num_host_blocks else 0
    snapshots = rng.choice([0, 1, 5]) if not lanes and rng.random() < 0.4 else None
    return Limits(
        num_blocks=rng.randint(2, 40),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + lanes + rng.randint(1, 56),
        prefill_chunk_size=rng.choice([0, 0, 1, 7, 16, 33]),
        target_itl_ns=rng.choice([0, 0, 1, 3000]),
        max_model_len=rng.choice([40, 96, 150]),
        prefix_caching=prefix_caching,
        steps_in_flight=rng.randint(1, 4),
        num_host_blocks=num_host_blocks,
        snapshots=snapshots,
        num_host_states=rng.choice([0, 3, 20]) if snapshots is not None and num_host_blocks else 0,
        lanes=lanes,
        layers=rng.randint(1, 4),
        tenants=rng.choice([0, 0, 2, 5]),
        window=rng.choice([0, 0, 1, 20, 50]),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000, help="in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    args = parser.parse_args()
    done, number, started = 0, 0, time.monotonic()
    saw: Counter[str] = Counter()
    share = 0.0
    while done < args.operations:
        rng = random.Random(f"{args.seed}, {number}")
        operations = min(OPERATIONS_OF_A_WALK, args.operations - done)
        if number % 8 == 7:
            slots, snapshots = rng.randint(1, 8), rng.randint(0, 40)
            print(f"walk {number} of seed {args.seed}: {operations} operations of {snapshots} snapshots", flush=True)
            done += walk_states(slots, snapshots, rng, operations).operations
        elif number % 4 == 3:
            num_blocks = rng.randint(1, 60)
            groups = rng.choice([0, 0, 1, 3])
            what = f"{num_blocks} blocks, {groups} window groups"
            print(f"walk {number} of seed {args.seed}: {operations} operations of {what}", flush=True)
            done += walk_blocks(num_blocks, rng, operations, groups).operations
        else:
            known = list(WALKS.values())
            scheduled = number - number // 4
            limits = known[scheduled] if scheduled < len(known) else random_limits(rng)
            print(f"walk {number} of seed {args.seed}: {operations} operations of {limits}", flush=True)
            scheduler = walk_scheduler(limits, rng, operations)
            done += scheduler.operations
            saw += scheduler.saw
            share = max(share, scheduler.longest_share)
        number += 1
    print(
        f"{done:,} operations in {time.monotonic() - started:.0f} s; {dict(saw)}; the slowest request took "
        f"{share:.0%} of the steps that it may take"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
