"""Gain of hybrid attention on cards that were not measured: a simulation from their published rates.

    python bench/hybrid_simulated.py [--model llama-3.1-8b] [--contexts 2048,8192] [--steps 4000] [--host-gbs 60,80]

Every figure is SIMULATED. A step takes the bytes of the weights, and those of the keys and values of all rows on the
device, at the card's bandwidth, and a fixed time for launches; with lanes also what their crossing takes over the link.
A row on the host passes a stage of the model in a step if a lane of that stage is free (csrc/core/hybrid/host_rows.h);
between two stages one of the workers reads its keys and values at that worker's share of the host's bandwidth.
Prompts, moves, multiplications and the growth of contexts are left out. There are as many rows on
the host as add most, within its memory.
"""

from __future__ import annotations

import argparse
import heapq
from typing import NamedTuple

from gpu_common import kv_bytes_per_token, read_model, weight_bytes

from asyncengine.models.config import ModelConfig


class Card(NamedTuple):
    name: str
    memory_gb: float
    bandwidth_gbs: float
    """bandwidth of the card's memory, as published"""
    quantization: str
    """quantization of weights: in bfloat16 those of 8B models take all of 16 GB"""


CARDS = (
    Card("RTX 4080, 16 GB", 16, 717, "fp8"),
    Card("RTX 4090, 24 GB", 24, 1008, "none"),
    Card("RTX 4090, 24 GB", 24, 1008, "fp8"),
    Card("L4, 24 GB", 24, 300, "none"),
    Card("L4, 24 GB", 24, 300, "fp8"),
)
LINK_GBS = 25.0  # PCIe 4.0 with 16 lanes, as measured copies reach
UTILIZATION, RESERVED_GB = 0.9, 1.0  # of the card's memory; activations and graphs
REACHED = 0.9  # of the published bandwidth
OVERHEAD_S = 100e-6  # of a step
WORKERS, LANES, HOST_MEMORY_GB = 14, 8, 64.0


class Shape(NamedTuple):
    """A load on a card."""

    stages: int
    """stages of attention: layers"""
    base_s: float
    """seconds of a step without attention"""
    row_s: float
    """seconds of attention of a row on the device"""
    rows: int
    attend_s: float
    """seconds of one worker for a row in one layer, while all work"""
    lane_s: float
    """seconds of the link for a row that passes a stage"""


def shape_of(c: ModelConfig, card: Card, context: int, host_gbs: float) -> Shape | None:
    """Return the shape on a card; None if the weights leave no room for one row."""
    row_bytes, weights = context * kv_bytes_per_token(c), weight_bytes(c, card.quantization)
    pool = 1e9 * (card.memory_gb * UTILIZATION - RESERVED_GB) - weights
    rate, heads = 1e9 * card.bandwidth_gbs * REACHED, c.num_heads + 2 * c.num_kv_heads
    crossing = (heads * c.head_dim * 4 + c.num_heads * c.head_dim * 2) / (1e9 * LINK_GBS)  # half of a mailbox is tags
    attend = row_bytes / c.num_layers / (1e9 * host_gbs / WORKERS)
    if pool < row_bytes:
        return None
    base = weights / rate + OVERHEAD_S
    return Shape(c.num_layers, base, row_bytes / rate, int(pool // row_bytes), attend, crossing)


def simulate(shape: Shape, host_rows: int, steps: int) -> tuple[float, float]:
    """(Tokens per second of all rows, seconds of a token of a row on the host) in the second half of ``steps``.

    Rows that are ready when a step begins are in it. Rows wait for a worker in the order of their jobs.
    """
    now, made, half_s, half_made = 0.0, 0, 0.0, 0
    workers = [0.0] * WORKERS  # when each is free
    ready = [(0.0, row, row % (shape.stages + 1)) for row in range(host_rows)]  # when, row, stage that it enters next
    heapq.heapify(ready)
    for step in range(steps):
        if step == steps // 2:
            half_s, half_made = now, made
        used, entered, late = [0] * (shape.stages + 1), list[tuple[int, int]](), list[tuple[float, int, int]]()
        while ready and ready[0][0] <= now:
            at, row, stage = heapq.heappop(ready)
            if used[stage] == LANES:
                late.append((at, row, stage))
                continue
            used[stage] += 1
            entered.append((stage, row))
        for waiting in late:
            heapq.heappush(ready, waiting)
        begun, now = now, now + shape.base_s + shape.rows * shape.row_s + len(entered) * shape.lane_s
        for stage, row in sorted(entered):
            if stage == shape.stages:  # its token is sampled: the next one begins with a later step
                made += 1
                heapq.heappush(ready, (now, row, 0))
                continue
            leaves = begun + (now - begun) * (stage + 1) / (shape.stages + 1)
            done = max(heapq.heappop(workers), leaves) + shape.attend_s
            heapq.heappush(workers, done)
            heapq.heappush(ready, (done, row, stage + 1))
    tokens, seconds = made - half_made, now - half_s
    of_device = shape.rows * (steps - steps // 2)
    return (of_device + tokens) / seconds, host_rows * seconds / tokens if tokens else float("inf")


def best(shape: Shape, row_bytes: float, steps: int) -> tuple[int, float, float]:
    """(Rows on the host, tokens per second, seconds of a token of theirs) where the most tokens are made."""
    most = int(HOST_MEMORY_GB * 1e9 / row_bytes)
    tried = {n: simulate(shape, n, steps) for n in sorted({0, *(most * i // 8 for i in range(1, 9))})}
    rows = max(tried, key=lambda n: (tried[n][0], -n))
    return rows, *tried[rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--contexts", type=lambda t: [int(w) for w in t.split(",")], default=[2048, 8192])
    parser.add_argument("--host-gbs", type=lambda t: [float(w) for w in t.split(",")], default=[60.0, 80.0])
    parser.add_argument("--steps", type=int, default=4000)
    args = parser.parse_args()
    c = read_model(args.model)
    print(f"SIMULATED from published rates, not measured: {args.model}, {WORKERS} workers, {LANES} lanes")
    names = "card", "weights", "host GB/s", "context", "rows", "on host", "tok/s", "gain"
    print("{:<18}{:>9}{:>11}{:>9}{:>6}{:>9}{:>8}{:>8}  ms a token".format(*names))
    for card in CARDS:
        for context in args.contexts:
            for host_gbs in args.host_gbs:
                weights = "bf16" if card.quantization == "none" else "fp8"
                label = f"{card.name:<18}{weights:>9}{host_gbs:>11g}{context:>9,}"
                shape = shape_of(c, card, context, host_gbs)
                if shape is None:
                    print(f"{label}  no room for one row beside the weights")
                    continue
                alone = simulate(shape, 0, args.steps)[0]
                rows, rate, token_s = best(shape, context * kv_bytes_per_token(c), args.steps)
                of_host = f"{1e3 * token_s:.0f} on the host" if rows else "no row on the host pays"
                print(f"{label}{shape.rows:>6}{rows:>9}{rate:>8.0f}{rate / alone - 1:>+8.1%}  {of_host}")


if __name__ == "__main__":
    main()
