"""Every kernel of a GPU step beside its floor and torch's way.

    python bench/kernels.py [attention rows sampler linear layer experts] [--shape gpt2 ...] [--quick] [--json FILE]

- rows: norm, embedding, activation, rotation with the KV store, ingest
- linear: projections and logits by the table of plans
- attention: decode of many keys, of few and of ragged batches, prefill, building the work list
- sampler: greedy, temperature, top-k, top-p, all filters
- layer, on request only: decode attention behind a projection, with and without programmatic launch
- experts, on request only: mixtures of experts of 1 to 256 rows, in bfloat16 and float8

A figure is the time of a call inside a captured graph, its part of the gap to the next one included, in which each call
works on memory that is not in the L2 cache. The floor is the time that its bytes take at the bandwidth of the card, or
its operations at the rate of torch's product of large matrices, which is measured first; the larger of the two.
``--device cpu`` with TRITON_INTERPRET=1 and tiny sizes only tries the script out.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from types import ModuleType

import kernel_attention
import kernel_experts
import kernel_layer
import kernel_linear
import kernel_rows
import kernel_sampler
import torch
from gpu_common import BANDWIDTH, SHAPES
from kernel_timing import Line, Timer, header, matrix_rate, row

from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure
from asyncengine.kernels.cuda.trials import examine

PARTS: dict[str, ModuleType] = {
    "rows": kernel_rows,
    "linear": kernel_linear,
    "attention": kernel_attention,
    "sampler": kernel_sampler,
    "layer": kernel_layer,
    "experts": kernel_experts,
}
ON_REQUEST = ("layer", "experts")


def integers(text: str) -> list[int]:
    return [int(number) for number in filter(None, text.split(","))]


def setting(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    return name, int(value)


DEFAULTS = {
    "shape": list(SHAPES),
    "rows": [1, 64, 256, 2048],
    "contexts": integers(kernel_attention.DECODES),
    "decode_rows": integers(kernel_attention.DECODE_ROWS),
    "ragged": integers(kernel_attention.RAGGED),
    "prefill": kernel_attention.parse_prefills(kernel_attention.PREFILLS),
    "layer": kernel_layer.parse_sizes(kernel_layer.LAYERS),
    "logits": ["peaked", "normal"],
}
QUICK = {
    "shape": ["llama-3.1-8b"],
    "rows": [1, 64],
    "contexts": [2048],
    "decode_rows": [1, 64],
    "ragged": [8],
    "prefill": kernel_attention.parse_prefills("1x2048+0"),
    "logits": ["peaked"],
}
"""Values that --quick takes where no option says otherwise."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    default = f"all but {' and '.join(ON_REQUEST)}"
    add("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: {default})")
    add("--shape", nargs="+", help=f"names of bench/shapes, or directories (default: {' '.join(SHAPES)})")
    add("--quick", action="store_true", help="one shape and few sizes")
    add("--rows", type=integers, help="of rows, linear and sampler (default: 1,64,256,2048)")
    add("--no-pdl", action="store_true", help="launches as ever, in which each waits for the last")
    add("--repeats", type=int, default=11)
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--json", help="(default: bench/results/kernels.json of a whole run, else none)")
    add = parser.add_argument_group("attention").add_argument
    add("--contexts", type=integers, help=f"of decode (default: {kernel_attention.DECODES})")
    add("--decode-rows", type=integers, help=f"(default: {kernel_attention.DECODE_ROWS})")
    add("--ragged", type=integers, help=f"rows (default: {kernel_attention.RAGGED})")
    prefills = kernel_attention.parse_prefills
    add("--prefill", type=prefills, help=f"ROWSxTOKENS+CONTEXT,... (default: {kernel_attention.PREFILLS})")
    add("--no-targets", dest="targets", action="store_false", help="leave out the sizes that have targets")
    caches = "of keys and values, one after the other (default: auto)"
    add("--kv-cache-dtype", nargs="+", choices=("auto", "fp8"), default=["auto"], help=caches)
    parser.set_defaults(float8=False)
    add("--decode-tile", nargs="+", metavar="TILE", help=kernel_attention.TILE_FIELDS)
    add("--prefill-tile", nargs="+", metavar="TILE")
    add("--work", nargs="+", type=setting, default=[], metavar="NAME=N", help="keywords of WorkList.allocate")
    add("--layer", type=kernel_layer.parse_sizes, help=f"ROWSxCONTEXT,... (default: {kernel_layer.LAYERS})")
    add = parser.add_argument_group("sampler").add_argument
    add("--logits", nargs="+", choices=kernel_sampler.KINDS, help="(default: peaked normal)")
    add("--set", nargs="+", default=[], metavar="_NAME=N,...", help="variants beside the usual one")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    if args.json is None and not args.parts and not args.quick:
        args.json = "bench/results/kernels.json"
    args.parts = args.parts or [part for part in PARTS if part not in ON_REQUEST]
    args.work = dict(args.work)
    for name, value in (DEFAULTS | (QUICK if args.quick else {})).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> None:
    args = parse()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    torch.manual_seed(0)
    args.pdl = not args.no_pdl and examine(device).dependent_launch
    timer = Timer(device, args.repeats)
    rate = matrix_rate(timer, 8192 if device.type == "cuda" else 256)
    print(f"{device_name(device)}, medians of {args.repeats}, programmatic launch {'on' if args.pdl else 'off'}")
    print(f"floors: {BANDWIDTH / 1e12:.1f} TB/s, {rate / 1e12:.3g} TFLOP/s in bfloat16 (measured)\n{header()}")
    done: list[Line] = []
    seconds: dict[str, float] = {}
    try:
        for part in args.parts:
            started = time.monotonic()
            for line in PARTS[part].lines(args, timer):
                print(row(line, rate), flush=True)
                done.append(line)
            seconds[part] = time.monotonic() - started
    finally:  # what was measured is kept
        print(", ".join(f"{part} {s:.0f} s" for part, s in seconds.items()))
        if args.json and done:
            save(done, rate, args)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU with {os.cpu_count()} cores"


def save(lines: Sequence[Line], rate: float, args: argparse.Namespace) -> None:
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    settings |= {"bandwidth, bytes/s": BANDWIDTH, "measured matrix rate, FLOP/s": rate}
    details = [
        {"part": one.part, "kernel": one.kernel, "shape": one.shape, "size": one.size, "us": one.us}
        | {"floor_us": one.floor_us(rate), "share": one.share(rate), "bytes": one.bytes, "flops": one.flops}
        | {"at_least": one.at_least, "torch_us": one.torch_us, "torch": one.torch_way}
        for one in lines
    ]
    record = report.record("kernels", figures(lines, rate), repeats=args.repeats, settings=settings, lines=details)
    report.write(args.json, record)


def figures(lines: Sequence[Line], rate: float) -> list[Figure]:
    """Times, and the share of the floor where one is asked for."""
    result = []
    for line in lines:
        result.append(Figure(line.name, line.us, "µs"))
        if line.at_least is not None:
            share = 100 * line.share(rate)
            result.append(Figure(f"{line.name}: of the floor", share, "%", at_least=100 * line.at_least))
    return result


if __name__ == "__main__":
    main()
