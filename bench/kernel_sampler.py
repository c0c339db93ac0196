"""The sampler on the GPU beside torch's operations and the time that reading the logits takes.

    python bench/kernel_sampler.py [--logits peaked normal flat] [--set _BINS=64 _BINS=128] [--json FILE]

Each figure is of a captured graph of calls on copies of the logits that together exceed the L2 cache, which is flushed
before a replay: logits come from memory, as those of a large step do. "reads" is the time over that of reading the
logits once at the bandwidth of the card (--bandwidth, of one H200). --set measures again with a constant of
triton_sampler changed; several constants that change together are joined by commas.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from kernel_rows import FLUSH_BYTES, Call, measure
from torch import Tensor

from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure
from asyncengine.kernels import triton_sampler
from asyncengine.kernels.device_step import allocate_step

COLD_BYTES = 256 << 20


@dataclass(frozen=True)
class Sampling:
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


SAMPLING = {
    "greedy": Sampling(0.0),
    "temperature": Sampling(0.8),
    "top-k 50": Sampling(0.8, top_k=50),
    "top-p 0.95": Sampling(0.8, top_p=0.95),
    "min-p 0.05": Sampling(0.8, min_p=0.05),
    "k 50, p 0.95, min-p 0.05": Sampling(0.8, 50, 0.95, 0.05),
}


def make_logits(kind: str, rows: int, vocab: int, device: torch.device) -> Tensor:
    """peaked: as trained models leave them, a few tokens far above the rest. normal, flat: of random weights."""
    padding = -vocab % 64 if vocab % 8 else 0  # as CudaOps.make_linear pads the matrix that they come from
    logits = torch.randn(rows, vocab + padding, device=device)[:, :vocab]
    if kind == "peaked":
        logits *= 2
        favoured = torch.randint(vocab, (rows, 64), device=device)
        logits.scatter_(1, favoured, 8 + 4 * torch.randn(rows, 64, device=device))
        return logits
    return logits * {"normal": 3.0, "flat": 0.3}[kind]


def our_call(logits: Tensor, one: Sampling, pdl: bool) -> Call:
    rows, device = len(logits), logits.device
    step = allocate_step(rows, 1, rows, 1, device)
    step = replace(step, sample_slot=torch.arange(rows, dtype=torch.int32, device=device))
    step.slots.temperature.fill_(one.temperature)
    step.slots.top_k.fill_(one.top_k)
    step.slots.top_p.fill_(one.top_p)
    step.slots.min_p.fill_(one.min_p)
    step.slots.seed.copy_(torch.arange(rows, device=device))
    header = torch.zeros(2, dtype=torch.int64, device=device)
    words = torch.zeros(1, rows, dtype=torch.int64, device=device)
    options = {"pdl": True} if pdl else {}  # so that a sampler without the option can be measured, too
    return lambda: triton_sampler.sample(
        logits, step, header, words, greedy_only=one.temperature == 0, **options
    )


def torch_sample(logits: Tensor, one: Sampling) -> Tensor:
    if one.temperature == 0:
        return logits.argmax(-1)
    if not one.top_k and one.top_p == 1 and not one.min_p:
        return torch.multinomial((logits / one.temperature).softmax(-1), 1)
    if one.top_p < 1:
        ranked, order = logits.sort(-1, descending=True)
    else:
        ranked, order = logits.topk(one.top_k or logits.shape[1], -1)
    mass = (ranked / one.temperature).softmax(-1)
    if one.top_k:
        mass[:, one.top_k :] = 0
        mass /= mass.sum(-1, keepdim=True)
    mass = mass.masked_fill((mass.cumsum(-1) - mass >= one.top_p) | (mass < one.min_p * mass[:, :1]), 0)
    return order.gather(1, torch.multinomial(mass, 1))


@contextmanager
def constants(variant: str) -> Iterator[None]:
    """``_NAME=number,...`` of triton_sampler, for as long."""
    before = dict(vars(triton_sampler))
    changes = {name: int(value) for name, _, value in (pair.partition("=") for pair in variant.split(",") if pair)}
    if unknown := changes.keys() - before.keys():
        raise SystemExit(f"triton_sampler has no {', '.join(sorted(unknown))}")
    vars(triton_sampler).update(changes)
    try:
        yield
    finally:
        vars(triton_sampler).update({name: before[name] for name in changes})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--logits", nargs="+", default=["peaked", "normal"], choices=("peaked", "normal", "flat"))
    parser.add_argument("--sampling", nargs="+", default=[""], help="only ways whose name begins with one of these")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--vocab", type=int, nargs="+", default=[50257, 128256, 151936])
    parser.add_argument("--set", nargs="+", default=[], metavar="_NAME=N,...", help="variants beside the usual one")
    parser.add_argument("--no-pdl", action="store_true", help="launches as ever, in which each waits for the last")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--bandwidth", type=float, default=4.4, metavar="TB/s")
    parser.add_argument("--json", metavar="FILE", help="where the record goes")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    device = torch.device("cuda")
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    variants = ["", *args.set]
    names = [variant or "ours" for variant in variants] + ([] if args.no_torch else ["torch"])
    print(f"{torch.cuda.get_device_name()}, medians of {args.repeats}, µs (reads at {args.bandwidth} TB/s)")
    print(f"{'logits':<8}{'vocab':>7}{'rows':>5}  {'sampling':<25}" + "".join(f"{name:>20}" for name in names))
    lines: list[dict[str, object]] = []
    figures: list[Figure] = []
    shapes = [(kind, vocab, rows) for kind in args.logits for vocab in args.vocab for rows in args.rows]
    for kind, vocab, rows in shapes:
        size = rows * vocab * 4
        copies = [make_logits(kind, rows, vocab, device) for _ in range(max(3, min(32, -(-COLD_BYTES // size))))]
        for name, one in SAMPLING.items():
            if not name.startswith(tuple(args.sampling)):
                continue
            times = []
            for variant in variants:
                with constants(variant):
                    calls = [our_call(logits, one, not args.no_pdl) for logits in copies]
                    times.append(measure(calls, flush, args.repeats))
            if not args.no_torch:
                some = [lambda logits=logits, one=one: torch_sample(logits, one) for logits in copies[:3]]
                times.append(measure(some, flush, args.repeats))
            read = size / (args.bandwidth * 1e6)
            shown = "".join(f"{f'{us:.1f} ({us / read:.1f})':>20}" for us in times)
            print(f"{kind:<8}{vocab:>7}{rows:>5}  {name:<25}{shown}", flush=True)
            line = {"logits": kind, "vocab": vocab, "rows": rows, "sampling": name, "one_read_us": read}
            lines.append(line | {"us": dict(zip(names, times, strict=True))})
            figures.append(Figure(f"{name}, {kind}, {rows} rows of {vocab}", times[0], "µs"))
        del copies
    if args.json:
        settings = {"device": torch.cuda.get_device_name(), "pdl": not args.no_pdl, "bandwidth TB/s": args.bandwidth}
        report.write(
            args.json, report.record("kernel_sampler", figures, repeats=args.repeats, settings=settings, lines=lines)
        )


if __name__ == "__main__":
    main()
