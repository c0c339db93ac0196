"""Measures plans of projections where they run: in decode steps, with attention between them.

    python bench/tune_steps.py [--model SHAPE ...] [--rows 8,64] [--most COUNT] [--out FILE] [--json FILE]

A plan that is fastest among projections alone (bench/tune_linear.py) may not be in a step: what it leaves of shared
memory and registers decides when the kernel behind it starts, and whether a norm needs a kernel of its own depends on
two plans. So whole steps are captured and replayed in turn, of a model with a few layers, each with another plan of
one site; the fastest stays if it is faster than what was there, and the next site has its turn. Then the best that
could do without a norm between them are tried two at a time. The plans that were found and those before are then timed
in the whole model, and enter the table at --out if they are faster there.

Several of these at once compile side by side and measure one after another.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_common import SHAPES, add_engine_options, model_directory, opened
from replay import choose_bucket, decode_rows, launch_us, staged
from tune_linear import read_table, sites

from asyncengine import AsyncEngine
from asyncengine.cli.embed import loop_factory
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.launch.compiling import compile_launches
from asyncengine.kernels.cuda.linear.candidates import candidates
from asyncengine.kernels.cuda.linear.choose import Choices
from asyncengine.kernels.cuda.linear.formats.registry import weight_bytes
from asyncengine.kernels.cuda.linear.plan import Plan, Site
from asyncengine.kernels.cuda.linear.tables import PlanTable
from asyncengine.runner.start.tuning import FAILURES
from asyncengine.runner.steps.device_steps import ARGMAX

GAIN = 0.997
"""A plan replaces another if a step takes at most so much of its time: less is noise."""
AT_ONCE = 12
"""Graphs that are timed in turn."""
BEST = 4
"""Plans of a site that are tried together with as many of another."""

L2_BYTES_US, STEP_US, NORM_US = 110e3, 0.1, 2.5
"""Bytes that a multiprocessor of the H200 takes from L2 in a microsecond; microseconds of a step of K; microseconds of
a norm's kernel, which parts of a sum need."""
EARLY_PROGRAMS = 100
"""Most programs that find room while the kernel before them runs."""

Plans = dict[Site, Plan]


class Found(NamedTuple):
    model: str
    rows: int
    before_us: float
    after_us: float
    """microseconds of whole steps before and after, timed in turn"""
    plans: Plans
    """plans that differ from those before"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", nargs="+", default=list(SHAPES), help="shapes of bench/shapes, or directories")
    parser.add_argument("--rows", default="8,16,32,64,128,256")
    parser.add_argument("--context", type=int, default=288, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="of the model that plans are tried in")
    parser.add_argument(
        "--most", type=int, default=40, help="plans tried of a site: half of them likely ones, the others at random"
    )
    parser.add_argument("--turns", type=int, default=2, help="of all sites")
    parser.add_argument("--threads", type=int, default=8, help="that compile")
    parser.add_argument("--out", help="table that takes the plans found")
    parser.add_argument("--json", help="what was found")
    add_engine_options(parser)
    args = parser.parse_args()
    args.rows = [int(rows) for rows in args.rows.split(",")]
    found: list[Found] = []
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            for model in args.model:
                runner.run(tune(model, args, found))
    finally:  # what was found is kept
        if args.json:
            plans = [[[site, repr(plan)] for site, plan in one.plans.items()] for one in found]
            records = [one._asdict() | {"plans": some} for one, some in zip(found, plans, strict=True)]
            Path(args.json).write_text(json.dumps(records, indent=1))


@contextmanager
def measuring() -> Iterator[None]:
    """Nobody else's measurement runs meanwhile."""
    with open(Path(tempfile.gettempdir()) / "asyncengine_tune_steps.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


async def tune(model: str, args: argparse.Namespace, found: list[Found]) -> None:
    tried = {rows: candidate_plans(model, rows, args.most) for rows in args.rows}
    with tempfile.TemporaryDirectory() as directory:
        shorten(model, args.layers, Path(directory))
        async with opened(directory, args, **settings(args)) as short, opened(model, args, **settings(args)) as whole:
            steps, whole_steps = Steps(model, short, args.context), Steps(model, whole, args.context)
            cases = [(n, site, plan) for n in args.rows for site, plans in tried[n].items() for plan in plans]
            steps.compile(cases, args.threads)
            for rows in args.rows:
                with measuring():  # others may measure, or write the same table
                    chosen = search(steps, rows, tried[rows], args.turns, norm_between(model, rows))
                    changed = {site: plan for site, plan in chosen.items() if plan != whole_steps.plans.find(site)}
                    was, now = whole_steps.time(rows, [{}, changed], repeats=9)
                    print(f"{model} {rows} rows: whole steps {was:.1f}, with the plans found {now:.1f} us", flush=True)
                    found.append(Found(model, rows, was, now, changed if now < was else {}))
                    if args.out:
                        keep(found[-1].plans, Path(args.out))


def keep(plans: Plans, out: Path) -> None:
    table = read_table(out)
    for site, plan in plans.items():
        table.add(site, plan)
    out.write_text(table.to_json())


def settings(args: argparse.Namespace) -> dict[str, Any]:
    rows = max(args.rows)
    blocks = rows * (args.context // 16 + 2)
    return {"max_num_seqs": rows, "enforce_eager": True, "num_kv_blocks": blocks, "enable_prefix_caching": False}


def shorten(model: str, layers: int, to: Path) -> None:
    """A model of the same shape with so many layers."""
    for file in model_directory(model).iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text())
    name = "n_layer" if "n_layer" in config else "num_hidden_layers"
    config[name] = min(layers, config[name])
    (to / "config.json").write_text(json.dumps(config))


def candidate_plans(model: str, rows: int, most: int) -> dict[Site, list[Plan]]:
    """Return the candidates for each site of a greedy step, the largest matrix first."""
    chosen = {}
    for name, site in sites(model, rows):
        if name != "head" or rows == 1:
            plans = [plan for plan in candidates(site, H200) if plan.kind != "tiled" and plan.warps in (4, 8)]
            random.Random(0).shuffle(plans)
            by_tma = [plan for plan in plans if plan.kind == "tma"]
            likely = sorted(by_tma, key=partial(expected_us, site))[: most // 2]
            chosen[site] = list(dict.fromkeys((*likely, *plans)))[:most]
    return dict(sorted(chosen.items(), key=lambda entry: -weight_bytes(entry[0])))


def expected_us(site: Site, plan: Plan) -> float:
    """Estimate the time of a tma plan once it may read x, very roughly: good for an order, not for a figure.

    Its programs have as many weights by then as their shared memory holds, or half as many if there is hardly a
    multiprocessor to start on early; the rest, and x, come from L2.
    """
    span = site.inner // plan.split
    weights, x = 2 * plan.columns * span, 2 * plan.rows * span
    programs = -(-site.weight_rows // plan.columns) * -(-site.rows // plan.rows) * plan.split
    ahead = min(weights, 2 * plan.columns * plan.inner * plan.stages) * (1 if programs <= EARLY_PROGRAMS else 0.5)
    turns = -(-programs // H200.multiprocessors)
    copied = weights - ahead + x + (turns - 1) * (weights + x)
    return copied / L2_BYTES_US + STEP_US * (span // plan.inner) + (NORM_US if plan.split > 1 else 0)


def norm_between(model: str, rows: int) -> list[tuple[Site, Site]]:
    """Return pairs of projections: the second reads, through a norm, the sum to which the first has added."""
    named = dict(sites(model, rows))
    return [(named["o"], named["up"]), (named["down"], named["qkv"])]


def search(
    steps: Steps, rows: int, tried: dict[Site, list[Plan]], turns: int, pairs: Sequence[tuple[Site, Site]] = ()
) -> Plans:
    """The plans that a step is fastest with, if one site is changed at a time, or two with a norm between them."""
    now: Plans = {site: plan for site in tried if (plan := steps.plans.find(site))}
    [best] = steps.time(rows, [now])
    print(f"{steps.name} {rows} rows: {best:.1f} us", flush=True)
    for turn in range(turns):
        ranked: dict[Site, list[Plan]] = {}
        for site, plans in tried.items():
            was = now.get(site)
            others = [plan for plan in plans if plan != was]
            shares = zip(improve(steps, rows, now, [{site: plan} for plan in others], turn), others, strict=True)
            ranked[site] = [plan for _, plan in sorted([(1.0, was), *shares], key=itemgetter(0)) if plan]
        for adder, reader in pairs:
            first = [plan for plan in ranked[adder] if plan.prepares_norm]
            second = [plan for plan in ranked[reader] if plan.kind == "tma"]
            both = [{adder: one, reader: other} for one in first[:BEST] for other in second[:BEST]]
            improve(steps, rows, now, both, turn)
    return now


def improve(steps: Steps, rows: int, now: Plans, changes: Sequence[Plans], turn: int) -> list[float]:
    """Make the best of these changes to ``now``, if a step is faster then. Returns the share of its time that each
    leaves."""
    shares: list[float] = []
    for i in range(0, len(changes), AT_ONCE):
        base, *timed = steps.time(rows, [now, *(now | change for change in changes[i : i + AT_ONCE])])
        shares += [time / base for time in timed]
    if shares and min(shares) < GAIN:
        # Against what is there once more: of many the fastest is also the luckiest.
        change = changes[shares.index(min(shares))]
        was, got = steps.time(rows, [now, now | change], repeats=7)
        if got < GAIN * was:
            now |= change
            for site, plan in change.items():
                matrix = f"{site.weight_rows}x{site.inner}"
                print(f"  {matrix}, turn {turn}: {was:.1f} to {got:.1f} by {plan}", flush=True)
    return shares


class Steps:
    """Decode steps of a model, captured with whatever plans."""

    def __init__(self, name: str, engine: AsyncEngine, context: int) -> None:
        self.name = name
        self._engine = engine
        runner: Any = engine._life.loaded().keep_alive
        self._steps, self._cuda_stream, self._buckets = runner.steps, runner.cuda_stream, runner.buckets
        self._context = context
        self._choices: Choices = runner.steps._model._ops.choices
        self.plans = self._choices.table

    def compile(self, cases: Sequence[tuple[int, Site, Plan]], threads: int) -> None:
        """Compile the kernels that steps of so many rows launch, with another plan of one site each."""
        started = time.monotonic()
        calls = [partial(self._run, rows, {site: plan}) for rows, site, plan in cases]
        with torch.cuda.stream(self._cuda_stream):
            compile_launches(calls, torch.device("cuda", torch.cuda.current_device()), threads)
        torch.cuda.synchronize()
        print(f"{self.name}: compiled {len(calls)} steps in {time.monotonic() - started:.0f} s", flush=True)

    def time(self, rows: int, some: Sequence[Plans], repeats: int = 3, replays: int = 10) -> list[float]:
        """Microseconds of a step with each of these sets of plans, replayed in turn; infinite if it cannot run."""
        samples: list[list[float]] = [[] for _ in some]
        with staged(
            self._steps, decode_rows([self._context] * rows), self._engine.stats().num_steps + 1,
            torch.cuda.synchronize, own_tables=True,
        ), torch.cuda.stream(self._cuda_stream):  # fmt: skip
            graphs = [self._capture(rows, plans) for plans in some]
            for _ in range(repeats):
                for graph, times in zip(graphs, samples, strict=True):
                    times.append(float("inf") if graph is None else self._replay(graph, replays))
        return [statistics.median(times) for times in samples]

    def _replay(self, graph: torch.cuda.CUDAGraph, replays: int) -> float:
        def launch(count: int) -> None:
            for _ in range(count):
                graph.replay()

        return launch_us(launch, replays, self._cuda_stream, warm_up=2)

    def _capture(self, rows: int, plans: Plans) -> torch.cuda.CUDAGraph | None:
        try:
            self._run(rows, plans)  # compiles and loads what is not there yet
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._cuda_stream, capture_error_mode="thread_local"):
                self._run(rows, plans)
        except FAILURES as e:
            print(f"  {plans}: {e}", flush=True)
            return None
        return graph

    def _run(self, rows: int, plans: Plans) -> None:
        bucket = self._buckets[choose_bucket(self._buckets, decode_rows([self._context] * rows))]
        before = {site: self._choices.plan(site) for site in plans}
        self._choices.learn(PlanTable(plans))
        try:
            self._steps.run(bucket, ARGMAX)
        finally:
            self._choices.learn(PlanTable(before))


if __name__ == "__main__":
    main()
