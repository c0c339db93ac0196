"""The process that run.py starts: one target under atheris. Arguments: the target, then those of libFuzzer."""

from __future__ import annotations

import importlib
import sys

import atheris


def main() -> None:
    name = sys.argv[1]
    with atheris.instrument_imports(include=["asyncengine"]):
        target = importlib.import_module(f"tests.fuzz.targets.{name}")
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target.one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
