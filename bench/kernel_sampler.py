"""bench/kernels.py sampler: sampling beside torch's operations and the time that reading the logits once takes.

Logits come from memory, as those of a large step do. --set measures with constants of sampler changed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from gpu_common import read_model
from kernel_timing import Call, Line, Lines, Timer, copies_for
from torch import Tensor

from asyncengine.kernels.cuda.sampling import sample as sampler
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.runner.steps import device_steps

KINDS = ("peaked", "normal", "flat")
MAX_COPIES_OF_TORCH = 3
"""A sort takes the memory of its logits several times over."""


@dataclass(frozen=True)
class Sampling:
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


SAMPLING = {
    "greedy": (Sampling(0.0), "argmax"),
    "temperature": (Sampling(0.8), "softmax, multinomial"),
    "top-k 50": (Sampling(0.8, top_k=50), "topk, softmax, multinomial"),
    "top-p 0.95": (Sampling(0.8, top_p=0.95), "sort, softmax, cumsum, multinomial"),
    "k 50, p 0.95, min-p 0.05": (Sampling(0.8, 50, 0.95, 0.05), "sort, softmax, cumsum, multinomial"),
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
    greedy = one.temperature == 0
    needs = device_steps.ARGMAX if greedy else device_steps.SAMPLING
    return lambda: sampler.sample(logits, step, header, words, needs=needs, pdl=pdl)


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
    """``_NAME=number,...`` of sampler, for as long."""
    before = dict(vars(sampler))
    changes = {name: int(value) for name, _, value in (pair.partition("=") for pair in variant.split(",") if pair)}
    if unknown := changes.keys() - before.keys():
        raise SystemExit(f"sampler has no {', '.join(sorted(unknown))}")
    vars(sampler).update(changes)
    try:
        yield
    finally:
        vars(sampler).update({name: before[name] for name in changes})


def lines(args: argparse.Namespace, timer: Timer) -> Lines:
    for shape in args.shape:
        vocab = read_model(shape).vocab_size
        for kind in args.logits:
            for rows in (rows for rows in args.rows if rows <= 256):
                yield from at_size(shape, vocab, kind, rows, args, timer)


def at_size(shape: str, vocab: int, kind: str, rows: int, args: argparse.Namespace, timer: Timer) -> Lines:
    read = 4 * rows * vocab
    copies = [make_logits(kind, rows, vocab, timer.device) for _ in range(copies_for(read))]
    for name, (one, way) in SAMPLING.items():
        calls = [lambda logits=logits, one=one: torch_sample(logits, one) for logits in copies[:MAX_COPIES_OF_TORCH]]
        torch_us = timer.us_if_possible(calls)
        for variant in ("", *args.set):
            with constants(variant):
                us = timer.us([our_call(logits, one, args.pdl) for logits in copies])
            label = f"{name} {variant}".rstrip()
            size = f"{rows} x {vocab} {kind}"
            yield Line("sampler", label, shape, size, us, read, torch_us=torch_us, torch_way=way)
