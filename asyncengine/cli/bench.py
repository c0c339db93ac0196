"""``asyncengine bench NAME``: the benchmarks that a user wants."""

from __future__ import annotations

import argparse
from importlib import import_module

from asyncengine.cli.flags import add_config

_NAMES = ("core", "latency", "throughput", "serve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(metavar="NAME", required=True)
    for name in _NAMES:
        module = import_module(f"asyncengine.cli.benchmarks.{name}")
        text: str = module.HELP
        benchmark = benchmarks.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
        )
        add_config(benchmark)
        benchmark.add_argument(
            "--json", metavar="FILE", default=argparse.SUPPRESS, help="save the result, with its circumstances"
        )
        module.add_arguments(benchmark)
        benchmark.set_defaults(_command=benchmark, _benchmark=module.run)


def run(args: argparse.Namespace) -> int:
    from asyncengine.cli.benchmarks.report import write

    result = args._benchmark(args)
    if "json" in args:
        write(args.json, result)
    return 0
