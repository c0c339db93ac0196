"""``asyncengine convert``: a checkpoint written anew with its layers in fewer bits, for this and other programs."""

from __future__ import annotations

import argparse
from pathlib import Path


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

    changed = 0.0
    count = 0
    for module, group, error in convert(args.model, args.out, args.quantization, revision=args.revision):
        print(f"{module:<60} groups of {group:>5}   relative error {100 * error:.3f}%", flush=True)
        changed, count = changed + error, count + 1
    print(f"{count} projections in {args.quantization} in {args.out}; mean relative error {100 * changed / count:.3f}%")
    return 0
