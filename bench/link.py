"""Attention over the link by its kernel's shape, and decode steps beside it: ``python bench/link.py [--json FILE]``.

Rows whose keys and values are in the host's memory are attended to by batches of jobs, launched back to back on a CUDA
stream of their own, while decode steps of the same model are replayed on another. Neither waits for the other.
For each shape of the kernel (programs x warps of each x stages of its loop), in turn:

- gigabytes per second over the link, alone and beside steps;
- time of a step with lanes for such rows beside it, over the same step without lanes by itself.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gpu_common import SHAPES, add_engine_options, opened
from memory_hybrid import numbers
from replay import Row, choose_bucket, fill_cache, launch_us, staged

from asyncengine import AsyncEngine, testing
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median
from asyncengine.cli.embed import loop_factory

_BATCHES, _JOBS = 8, 4
"""Batches of a graph, and jobs of a batch: together more than a processor's cache holds."""
_REPLAYS = 6
_SURELY_LONGER = 3
"""Times as many replays of what is not timed: it is under way until the clock stops."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b", help=f"of {', '.join(SHAPES)}, or a directory")
    shapes = "of the kernel: programs x warps x stages"
    parser.add_argument("--shapes", default="4x4x12,4x4x8,4x8x6,3x8x6,6x4x8,16x4x3", help=shapes)
    parser.add_argument("--rows", type=numbers, default=[3, 7], help="of the steps")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each row, on the device and on the host")
    parser.add_argument("--lanes", type=numbers, default=[4, 8])
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", default="bench/results/link.json")
    add_engine_options(parser)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        figures = [figure for lanes in args.lanes for figure in runner.run(measure(args, lanes))]
    report.print_figures(f"Attention over the link, {args.model}, contexts of {args.context:,}", figures)
    report.write(args.json, report.record("link", figures, repeats=args.repeats, settings=vars(args), results={}))


async def measure(args: argparse.Namespace, lanes: int) -> list[Figure]:
    blocks = -(-args.context // 16)
    config: dict[str, Any] = {
        "max_model_len": args.context + 16, "num_kv_blocks": 2 * max(args.rows) * blocks,
        "max_num_seqs": 16, "max_num_batched_tokens": 64,
        "hybrid_attention": "always", "hybrid_form": "link", "hybrid_lanes": lanes,
        "host_kv_memory_bytes": 5 << 30, "kv_cache_dtype": args.kv_cache_dtype,
    }  # fmt: skip
    async with opened(args.model, args, **config) as engine:
        await testing.settle(engine)
        return Link(engine, args.context).figures(args, lanes)


@dataclass
class Link:
    """The link of an idle engine, beside its steps."""

    engine: AsyncEngine
    context: int

    def __post_init__(self) -> None:
        import torch

        runner: Any = self.engine._life.loaded().keep_alive
        self.runner: Any = runner
        fill_cache(runner.steps.cache.groups)
        rows = runner._host_rows._link_rows
        self.blocks = -(-self.context // rows.pool.shape[4])
        self.num_bytes = _BATCHES * _JOBS * self.context * self.engine.model_info.kv_layer_token_bytes
        self.cuda_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.rows = [replace(rows, jobs=self._jobs(rows, batch)) for batch in range(_BATCHES)]

    def _jobs(self, rows: Any, batch: int) -> Any:
        """Make the jobs of a batch. Each batch has other layers, and each job other blocks, which lie apart."""
        import torch

        words = []
        for job in range(_JOBS):
            of_job = [(block * _JOBS + job) % len(rows.pool) for block in range(self.blocks)]
            layer = (batch * _JOBS + job) % rows.pool.shape[1]
            words += [job, layer, self.context - 1, *of_job, *([0] * (rows.max_blocks - self.blocks))]
        return torch.tensor([_JOBS, *words], dtype=torch.int32).pin_memory()

    def figures(self, args: argparse.Namespace, lanes: int) -> list[Figure]:
        shapes = {name: self.captured(*map(int, name.split("x"))) for name in args.shapes.split(",")}
        rates: dict[str, list[float]] = {}
        for _ in range(args.repeats):
            for name, attend in shapes.items():
                took = launch_us(attend, _REPLAYS, self.cuda_stream, warm_up=1)
                self.add(rates, f"{name}: alone", self.num_bytes / 1e3 / took)
        figures = [Figure(name, median(samples), "GB/s") for name, samples in rates.items()]
        for rows in args.rows:
            figures += self.beside_steps(rows, lanes, shapes, args.repeats)
        return figures

    def captured(self, programs: int, warps: int, stages: int) -> Callable[[int], None]:
        """Enqueues all batches so many times."""
        import torch

        from asyncengine.kernels.cuda.attention.link import attend

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.cuda_stream):
            attend(self.rows[0], programs, warps, stages)
            self.cuda_stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            for rows in self.rows:
                attend(rows, programs, warps, stages)
            graph.capture_end()

        def launch(count: int) -> None:
            with torch.cuda.stream(self.cuda_stream):
                for _ in range(count):
                    graph.replay()

        return launch

    def beside_steps(
        self, rows: int, lanes: int, shapes: dict[str, Callable[[int], None]], repeats: int
    ) -> list[Figure]:
        import torch

        steps, cuda_stream = self.runner.steps, self.runner.cuda_stream
        planned = [Row(1, self.context - 1)] * rows
        alone, together = self.step(planned, 0), self.step(planned, lanes)
        us: dict[str, list[float]] = {}
        rates: dict[str, list[float]] = {}
        next_step = self.engine.stats().num_steps + 1
        with staged(steps, planned, next_step, torch.cuda.synchronize, own_tables=True):
            for _ in range(repeats):
                self.add(us, "", launch_us(alone, 2 * _REPLAYS, cuda_stream, warm_up=2))
                self.add(us, f"{lanes} lanes", launch_us(together, 2 * _REPLAYS, cuda_stream, warm_up=2))
                for name, attend in shapes.items():
                    attend(_SURELY_LONGER * _REPLAYS)
                    self.add(us, f"{lanes} lanes, {name}", launch_us(together, _REPLAYS, cuda_stream, warm_up=2))
                    torch.cuda.synchronize()
                    together(_SURELY_LONGER * _REPLAYS)
                    took = launch_us(attend, _REPLAYS // 2, self.cuda_stream, warm_up=1)
                    self.add(rates, name, self.num_bytes / 1e3 / took)
                    torch.cuda.synchronize()
        label, bare = f"{rows} rows", median(us.pop(""))
        figures = [Figure(f"{label}: a step", bare, "µs")]
        figures += [Figure(f"{label}, {name}", median(samples) / bare, "x") for name, samples in us.items()]
        beside = f"{label}, {lanes} lanes"
        return figures + [Figure(f"{beside}, {name}: link", median(r), "GB/s") for name, r in rates.items()]

    def step(self, planned: list[Row], lanes: int) -> Callable[[int], None]:
        """Enqueues the smallest step of decode rows that fits."""
        from asyncengine.runner.steps.device_steps import ARGMAX

        bucket = choose_bucket(self.runner.buckets, planned, lanes)

        def launch(count: int) -> None:
            for _ in range(count):
                self.runner.graphs.native.launch(bucket, ARGMAX, self.runner.cuda_stream.cuda_stream)

        return launch

    @staticmethod
    def add(samples: dict[str, list[float]], name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)


if __name__ == "__main__":
    main()
