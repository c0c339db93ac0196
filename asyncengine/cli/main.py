"""Entry point: one subcommand per module, imported light; torch comes when a command runs."""

from __future__ import annotations

import argparse
import io
import os
import sys
from importlib import import_module

from asyncengine import __version__
from asyncengine.cli import flags
from asyncengine.errors import AsyncEngineError, ConfigError, InvalidRequestError

#: Name, module and help of each subcommand. A module has ``add_arguments(parser)`` and
#: ``run(args) -> int``, and imports nothing heavy at its top level.
COMMANDS = (
    ("serve", "asyncengine.cli.serve", "run the OpenAI-compatible server"),
    ("generate", "asyncengine.cli.generate", "continue a prompt on the terminal"),
    ("chat", "asyncengine.cli.chat", "talk to a model on the terminal"),
    ("bench", "asyncengine.cli.bench", "measure the core, a model or a server"),
    ("plan", "asyncengine.cli.plan", "print which kernels a model's steps take on a GPU"),
    ("collect-env", "asyncengine.cli.collect_env", "print what a bug report needs"),
)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the return value is the exit code."""
    _prepare_streams()
    parser = argparse.ArgumentParser(prog="asyncengine", description="LLM inference in one asyncio process.")
    parser.add_argument("--version", action="version", version=f"asyncengine {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module, text in COMMANDS:
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog="Every option can also be set by an environment variable, --max-model-len for instance "
            f"by {flags.environment_name('max_model_len')}.",
        )
        import_module(module).add_arguments(command)
        command.set_defaults(_command=command, _run=import_module(module).run)
    args = parser.parse_args(argv)
    flags.read_environment(args._command, args)
    try:
        return int(args._run(args))
    except (ConfigError, InvalidRequestError) as exc:
        return _complain(exc, 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing to flush at exit
        return 1
    except (AsyncEngineError, OSError) as exc:
        return _complain(exc, 1)
    except KeyboardInterrupt:
        return 130


def _prepare_streams() -> None:
    """What is closed is opened, what cannot be decoded is left to the engine to refuse, or to encode replaced."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # uvloop aborts when it is given a descriptor of these
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for good
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)


def _complain(exc: Exception, code: int) -> int:
    print(f"asyncengine: error: {exc}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
