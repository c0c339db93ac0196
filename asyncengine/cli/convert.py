"""``asyncengine convert``: a checkpoint written anew with its layers in fewer bits, for this and other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean, median


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s MODEL OUT --quantization {fp8,int8,int4}"
    parser.add_argument("model", metavar="MODEL", help="a model directory or a repository on the Hugging Face hub")
    parser.add_argument("out", metavar="OUT", type=Path, help="a directory that is not there yet, or empty")
    parser.add_argument(
        "--quantization",
        choices=("fp8", "int8", "int4"),
        required=True,
        help="bits of the projections: fp8 with a scale for each output, int8 and int4 in groups of 128 columns",
    )
    parser.add_argument("--revision", metavar="NAME", default=None, help="branch, tag or commit on the hub")


def run(args: argparse.Namespace) -> int:
    from asyncengine.runner.convert import convert

    weights: list[float] = []
    results: list[tuple[float, str]] = []
    for module, group, error, result_error in convert(args.model, args.out, args.quantization, revision=args.revision):
        if not weights:
            print(f"{'projection':<60} {'group':>5} {'of weights':>11} {'of results':>11}   relative errors")
        shown = "no input" if result_error is None else f"{100 * result_error:.3f}%"
        print(f"{module:<60} {group:>5} {100 * error:>10.3f}% {shown:>11}", flush=True)
        weights.append(error)
        results += [] if result_error is None else [(result_error, module)]
    print(f"{len(weights)} projections in {args.quantization} in {args.out}")
    print(f"relative errors of weights: mean {100 * mean(weights):.3f}%")
    if results:
        middle, (worst, module) = median(error for error, _ in results), max(results)
        print(f"relative errors of results: median {100 * middle:.3f}%, largest {100 * worst:.3f}%, in {module}")
    return 0
