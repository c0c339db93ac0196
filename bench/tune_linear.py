"""Measures plans of projections on the card, for models that the package's own table does not know.

    python bench/tune_linear.py [--model DIRECTORY ...] [--rows 1,8] [--quantization int8] [--likely COUNT] [--out FILE]

Every site of the models' shapes (a projection with what is fused, and a count of rows) is timed by each candidate
plan, cuBLAS among them; the fastest enters the table at --out, whose other entries stay. Kernels are compiled
beforehand, side by side.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_common import BANDWIDTH, SHAPES, projection_biases, projections, read_model

from asyncengine.kernels.cuda.linear.candidates import candidates
from asyncengine.kernels.cuda.linear.choose import fallback
from asyncengine.kernels.cuda.linear.formats.grouped import DIRECT_TILES
from asyncengine.kernels.cuda.linear.formats.registry import weight_bytes
from asyncengine.kernels.cuda.linear.plan import NormKind, Plan, Site, WeightKind, fused_activation
from asyncengine.kernels.cuda.linear.tables import PlanTable, cache_path
from asyncengine.kernels.cuda.trials import examine
from asyncengine.runner.start.prepare import allowed, worth_trying
from asyncengine.runner.start.tuning import Tuner

ROWS = "1,8,16,32,64,128,256"
THREADS = min(16, os.cpu_count() or 1)
"""Threads that compile."""


def sites(model: str, rows: int, weight: WeightKind = "bf16") -> Iterator[tuple[str, Site]]:
    """The projections of a layer, and the head, which is never quantised: with all logits, and sampled greedily."""
    c = read_model(model)
    gpt2 = not c.ropes
    if gpt2 and weight == "fp8":
        return  # its norms and its activation are not for float8
    norm: NormKind = "layer" if gpt2 else "rms"
    head = c.vocab_size if c.vocab_size % 8 == 0 else -(-c.vocab_size // 64) * 64  # as CudaOps.make_linear pads it
    biases = projection_biases(c)
    for name, (columns, inner) in projections(c).items():
        add = name in ("o", "down")
        activation = fused_activation(c.activation if name == "up" else None)
        columns //= 2 if activation == "silu_mul" else 1
        yield name, Site(columns, inner, rows, "none" if add else norm, activation, biases[name], add, weight)
    if weight == "bf16":
        site = Site(head, c.hidden_size, rows, norm, None, False, False)
        yield "head", site
        if rows > 1:
            yield "greedy-head", site._replace(activation="argmax")


def plans_for(site: Site, kinds: list[str], count: int | None) -> Iterator[Plan]:
    known, gpu = PlanTable.shipped(), examine(torch.device("cuda", 0))
    found = worth_trying(site, known, gpu, count) if count else candidates(site, gpu)
    for plan in found:
        if plan.kind in kinds or plan in (fallback(site), known.find(site)):
            yield plan


def read_table(path: Path) -> PlanTable:
    """An empty one if there is no file yet. Raises ValueError if it holds something else."""
    return PlanTable.from_json(path.read_text()) if path.exists() else PlanTable()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", nargs="+", default=list(SHAPES), help="shapes of bench/shapes, or directories")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--kinds", nargs="+", help="only plans of these kinds, beside cuBLAS and the one that is known")
    parser.add_argument("--likely", type=int, metavar="COUNT", help="of each site only so many plans, the likely ones")
    parser.add_argument("--sites", nargs="+", default=["qkv", "o", "up", "down", "head", "greedy-head"])
    parser.add_argument("--quantization", choices=("none", "fp8", *DIRECT_TILES), default="none")
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--out", help="table (default: the one in the user's cache directory, which engines read)")
    parser.add_argument("--json", help="all timings")
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop after so many seconds")
    args = parser.parse_args()
    named = [
        (f"{model} {name}", site)
        for rows in args.rows.split(",")
        for model in args.model
        for name, site in sorted(
            sites(model, int(rows), "bf16" if args.quantization == "none" else args.quantization),
            key=lambda named: named[1].add,
        )
        if name in args.sites
    ]
    kinds = args.kinds or ["vector", "skinny", "tiled", "tma", "coded", "direct"]
    plans = {site: [*plans_for(site, kinds, args.likely)] for _, site in named}
    started = time.monotonic()
    print(f"{sum(map(len, plans.values()))} plans of {len(plans)} sites", flush=True)
    device = torch.device("cuda", 0)
    tuner = Tuner(device, examine(device), pdl=not args.no_pdl)
    tuner.compile(plans, THREADS)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    out = Path(args.out or cache_path(torch.cuda.get_device_name()))
    table = read_table(out)
    record = []
    for label, site in named:
        if time.monotonic() - started > args.limit_s:
            print("out of time")
            break
        timed = tuner.fastest(site, allowed(site, plans[site], table))
        us, plan = timed[0]
        cublas = next((t for t, p in timed if p == fallback(site)), math.inf)
        floor = 1e6 * weight_bytes(site) / BANDWIDTH
        table.add(site, plan)
        by_kind = {p.kind: t for t, p in reversed(timed)}
        others = " ".join(f"{kind} {by_kind[kind]:.2f}" for kind in kinds if kind in by_kind)
        print(
            f"{label:18} rows {site.rows:3} floor {floor:6.2f} best {us:6.2f} cuBLAS {cublas:6.2f} {others} {plan}",
            flush=True,
        )
        record.append({"label": label, "site": site, "floor_us": floor, "plans": [(t, repr(p)) for t, p in timed]})
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(table.to_json())
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
