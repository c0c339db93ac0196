"""Milliseconds per decode step of every shape beside the time to read its bytes once, on this machine.

    python bench/models.py [--model gemma-3-12b] [--batches 1,8,64,256] [--context 256] [--no-window-groups]
        [--device cpu] [--json FILE]

The floor of a step is its bytes (weights that its rows touch, keys and values once) over the bandwidth that the card
reaches in a copy of device memory, measured first. Of a mixture as many experts count as evenly random rows hit. On a
GPU a step is a bare replay of its graph, greedy sampling included; on the CPU it is the difference of two generations
over their tokens, as in bench/decode.py. Weights are random, in bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import decode
from gpu_common import PROMPT_LEN, SHAPES_DIR, add_engine_options, decode_bytes, measured_bandwidth, opened, read_model

from asyncengine import AsyncEngine, ConfigError
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure
from asyncengine.cli.embed import loop_factory
from asyncengine.models.config import ModelConfig
from asyncengine.models.state_space import with_half_states


def main() -> None:
    shapes = sorted(path.parent.name for path in SHAPES_DIR.glob("*/config.json"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", help=f"a shape or a directory (default: {', '.join(shapes)})")
    parser.add_argument("--batches", default="1,8,64,256", help="rows of the steps (default: %(default)s)")
    parser.add_argument("--context", type=int, default=256, help="tokens that a row of a replay sees")
    parser.add_argument("--no-window-groups", action="store_true", help="one block table for all layers")
    parser.add_argument("--replays", type=int, default=20, help="of a graph (default: %(default)s)")
    parser.add_argument("--tokens", default="8,32", help="of the two generations on the CPU (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of a measurement, of which the median counts")
    parser.add_argument("--json", default="bench/results/models.json")
    add_engine_options(parser)
    args = parser.parse_args()
    args.batches, args.tokens = map(decode.parse_counts, (args.batches, args.tokens))
    bandwidth = measured_bandwidth(args.device)
    results: dict[str, Any] = {}
    try:
        for shape in args.model or shapes:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                try:
                    results[shape] = runner.run(measure(shape, args, window_groups=not args.no_window_groups))
                except ConfigError as e:  # too large for this card
                    print(f"{shape} is left out: {e}")
    finally:  # what was measured is kept
        if results:
            save(results, bandwidth, args)


async def measure(shape: str, args: argparse.Namespace, **config: Any) -> dict[str, Any]:
    """Milliseconds by batch, and the bytes of each step. ``config`` has further settings of the engine."""
    c = read_model(shape)
    if config.get("state_dtype") == "bfloat16":
        c = with_half_states(c)
    args.max_model_len = min(c.max_positions, max(args.max_model_len, args.context))
    async with opened(shape, args, max_num_seqs=max(args.batches), **config) as engine:
        runs = [await steps(engine, c, args) for _ in range(args.repeats)]
    ms = {batch: report.median([run[batch] for run in runs if batch in run]) for batch in runs[0]}
    # Generations go on from a prompt.
    context = args.context if args.device == "cuda" else PROMPT_LEN + sum(args.tokens) / 2
    return {"ms": ms, "bytes": {batch: decode_bytes(c, batch, context) for batch in ms}}


async def steps(engine: AsyncEngine, c: ModelConfig, args: argparse.Namespace) -> dict[int, float]:
    """Milliseconds of a step by batch; without batches whose keys and values do not fit."""
    wanted = argparse.Namespace(
        contexts=[args.context], batches=args.batches, between=[], replays=args.replays, quantization="none",
        kv_cache_dtype="auto",
    )  # fmt: skip
    points = await decode.sweep(engine, c, wanted)
    if points:
        return {point["batch"]: point["ms"] for point in points if "ms" in point}
    rng = random.Random(0)
    return {
        batch: decode.step_ms({count: [await decode.generate(engine, rng, batch, count)] for count in args.tokens})
        for batch in args.batches
    }


def save(results: Mapping[str, Any], bandwidth: float, args: argparse.Namespace) -> None:
    print("\n".join(table(results, bandwidth)))
    figures = [Figure("bandwidth of a copy", bandwidth / 1e9, "GB/s")]
    for shape, result in results.items():
        for batch, ms in result["ms"].items():
            floor = 1e3 * result["bytes"][batch] / bandwidth
            figures += [Figure(f"{shape}, batch {batch}", ms, "ms/step")]
            figures += [Figure(f"{shape}, batch {batch}, over the floor", ms / floor, "x")]
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    report.write(
        args.json, report.record("models", figures, repeats=args.repeats, settings=settings, results=dict(results))
    )


def table(results: Mapping[str, Any], bandwidth: float) -> Sequence[str]:
    """Lines with the step of each shape and batch, its floor, and their ratio."""
    batches = sorted({batch for result in results.values() for batch in result["ms"]})
    lines = [f"floor: bytes over {bandwidth / 1e9:,.0f} GB/s; ms per step / floor / ratio"]
    lines.append(f"{'':<24}" + "".join(f"{f'{batch} rows':>26}" for batch in batches))
    for shape, result in results.items():
        cells = []
        for batch in batches:
            if (ms := result["ms"].get(batch)) is None:
                cells.append("-")
                continue
            floor = 1e3 * result["bytes"][batch] / bandwidth
            cells.append(f"{ms:.3f} / {floor:.3f} / {ms / floor:.2f}")
        lines.append(f"{shape:<24}" + "".join(f"{cell:>26}" for cell in cells))
    return lines


if __name__ == "__main__":
    main()
