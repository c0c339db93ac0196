"""Measures plans of projections and writes the table that the package ships for the card.

    python bench/tune_linear.py [--model gpt2 ...] [--rows 1,8,64] [--out FILE] [--json FILE]

Every site of the models' shapes (a projection with what is fused, and a count of rows) is timed by each candidate
plan, cuBLAS among them; the fastest enters the table at --out, whose other entries stay. Kernels are compiled
beforehand, by as many processes as there are cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_common import SHAPES, SHAPES_DIR

from asyncengine.kernels.linear_plans import CUBLAS, Plan, PlanTable, Site, candidates, table_name
from asyncengine.runner.tuning import Tuner

ROWS = "1,8,16,32,64,128,256"
BANDWIDTH = 4.4e12


def sites(model: str, rows: int) -> Iterator[tuple[str, Site]]:
    """The projections of a layer, and the head."""
    c: dict[str, Any] = json.loads((SHAPES_DIR / model / "config.json").read_text())
    if "n_embd" in c:
        hidden = c["n_embd"]
        yield "qkv", Site(3 * hidden, hidden, rows, "layer", None, True, False)
        yield "o", Site(hidden, hidden, rows, "none", None, True, True)
        yield "up", Site(4 * hidden, hidden, rows, "layer", "gelu_tanh", True, False)
        yield "down", Site(hidden, 4 * hidden, rows, "none", None, True, True)
        yield "head", Site(-(-c["vocab_size"] // 64) * 64, hidden, rows, "layer", None, False, False)
        return
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    dim = c.get("head_dim") or hidden // heads
    yield "qkv", Site((heads + 2 * kv) * dim, hidden, rows, "rms", None, False, False)
    yield "o", Site(hidden, heads * dim, rows, "none", None, False, True)
    yield "up", Site(inner, hidden, rows, "rms", "silu_mul", False, False)
    yield "down", Site(hidden, inner, rows, "none", None, False, True)
    yield "head", Site(c["vocab_size"], hidden, rows, "rms", None, False, False)


def compile_plans(job: tuple[Site, list[Plan], bool]) -> None:
    site, plans, pdl = job
    Tuner(torch.device("cuda"), pdl=pdl).load(site, plans)


def compile_all(plans: dict[Site, list[Plan]], pdl: bool) -> None:
    jobs = [(site, some[i::8], pdl) for site, some in plans.items() for i in range(8)]
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        for _ in pool.imap_unordered(compile_plans, sorted(jobs, key=lambda job: -len(job[1]))):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--kinds", nargs="+", help="only plans of these kinds, beside cuBLAS")
    parser.add_argument("--sites", nargs="+", default=["qkv", "o", "up", "down", "head"])
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--out", help="table (default: that of the package)")
    parser.add_argument("--json", help="all timings")
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop after so many seconds")
    args = parser.parse_args()
    named = [
        (f"{model} {name}", site)
        for rows in args.rows.split(",")
        for model in args.model
        for name, site in sites(model, int(rows))
        if name in args.sites
    ]
    kinds = args.kinds or ["vector", "skinny", "tiled"]
    plans = {site: [plan for plan in candidates(site) if plan.kind in ("cublas", *kinds)] for _, site in named}
    started = time.monotonic()
    print(f"{sum(map(len, plans.values()))} plans of {len(plans)} sites", flush=True)
    compile_all(plans, not args.no_pdl)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    name = table_name(torch.cuda.get_device_name())
    out = Path(args.out or f"asyncengine/kernels/plans/{name}")
    table = PlanTable.from_json(out.read_text()) if out.exists() else PlanTable()
    tuner = Tuner(torch.device("cuda"), pdl=not args.no_pdl)
    record = []
    for label, site in named:
        if time.monotonic() - started > args.limit_s:
            print("out of time")
            break
        timed = tuner.fastest(site, plans[site])
        us, plan = timed[0]
        cublas = next(t for t, p in timed if p == CUBLAS)
        floor = 2e6 * site.weight_rows * site.inner / BANDWIDTH
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
