"""The command line's parser, which names what a mistyped word may have meant."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from asyncengine import __version__
from asyncengine.cli import flags

#: Name, module and help of each subcommand. A module has ``add_arguments(parser)`` and
#: ``run(args) -> int``, and imports nothing heavy at its top level.
COMMANDS = (
    ("serve", "asyncengine.cli.serve", "run the OpenAI-compatible server"),
    ("generate", "asyncengine.cli.generate", "continue a prompt on the terminal, or every prompt of a file"),
    ("chat", "asyncengine.cli.chat", "talk to a model on the terminal"),
    ("run-batch", "asyncengine.cli.run_batch", "answer a file of requests in the format of OpenAI's batches"),
    ("bench", "asyncengine.cli.bench", "measure the core, a model or a server"),
    ("costs", "asyncengine.cli.costs", "measure what a model's steps take, and how well that is foreseen"),
    ("plan", "asyncengine.cli.plan", "print which kernels a model's steps take on a GPU"),
    ("collect-env", "asyncengine.cli.collect_env", "print what a bug report needs"),
    ("completion", "asyncengine.cli.completion", "print a script that completes commands in a shell"),
)


class Parser(argparse.ArgumentParser):
    """Its subcommands get parsers of the same kind."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as exc:
            exc.message += flags.did_you_mean(str(value), map(str, action.choices or ()))
            raise

    def refuse(self, unknown: Sequence[str]) -> None:
        """Exit with a usage error for arguments that this command does not have."""
        known = [option for action in flags.actions_of(self) for option in action.option_strings]
        word = next((word for word in unknown if word.startswith("-")), unknown[0])
        self.error(f"unrecognized arguments: {' '.join(unknown)}{flags.did_you_mean(word.partition('=')[0], known)}")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Callable[[argparse.Namespace], int]]:
    """The arguments, with those of the environment, and what runs their command. Exits with 2 on a wrong one."""
    args, unknown = command_line(argv).parse_known_args(argv)
    if unknown:
        args._command.refuse(unknown)
    flags.read_environment(args._command, args)
    return args, args._run


def command_line(argv: Sequence[str] | None = None) -> Parser:
    """The parser of all commands.

    With ``argv``, only the commands that it names are complete: describing all of their options takes 0.1 s.
    """
    parser = Parser(prog="asyncengine", description="LLM inference in one asyncio process.")
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
        if argv is not None and name not in argv:
            continue
        import_module(module).add_arguments(command)
        command.set_defaults(_command=command, _run=import_module(module).run)
    return parser
