"""The command line's parser, which names what a mistyped word may have meant."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from asyncengine.cli import flags
from asyncengine.version import VERSION

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
    ("models", "asyncengine.cli.models", "list the families of models, or say how a model will run and what it takes"),
    ("convert", "asyncengine.cli.convert", "write a checkpoint anew with its layers in fewer bits"),
    ("collect-env", "asyncengine.cli.collect_env", "print what a bug report needs"),
    ("completion", "asyncengine.cli.completion", "print a script that completes commands in a shell"),
)

_WITH_OPTIONS = ("serve", "generate", "chat", "run-batch", "costs", "plan", "models")
"""Commands that take a configuration file; those of bench take one each."""
_FIRST_SENTENCE = re.compile(r"(.*?)[.](?: .*?)??(?P<default> \(default: [^()]*\))?", re.DOTALL)


class _Help(argparse.Action):
    """Prints the help and exits: the first sentence of each option that people commonly need, all of every option, or
    the options that a word names."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: Any, option: object = None) -> None:
        options = flags.actions_of(parser)
        if values is None:
            shown = [action for action in options if not getattr(action, "is_rare", False)]
            for action in shown:
                if action.help and (match := _FIRST_SENTENCE.fullmatch(action.help)):
                    action.help = match[1] + (match["default"] or "")
        elif values == "all":
            shown = [*options]
        else:
            shown = _named(parser, values)
        for action in options:
            if action not in shown:
                action.help = argparse.SUPPRESS
        parser.print_help()
        if values is None and (hidden := len(options) - len(shown)):
            print(f"{hidden} more option{'s' * (hidden > 1)}: {parser.prog} --help=all, or --help=kv")
        parser.exit()


def _named(parser: argparse.ArgumentParser, word: str) -> list[argparse.Action]:
    """Options whose name has the word in it, and those of a group of that title. Exits with 2 if there are none."""
    part = word.lower().replace("_", "-")
    named = [
        action
        for action in flags.actions_of(parser)
        if getattr(action, "group", "") == part or any(part in option for option in action.option_strings)
    ]
    if not named:
        parser.error(f"no option has {word!r} in its name")
    return named


class _Lines(argparse.HelpFormatter):
    """One line for an option and a short text, where a terminal has 80 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=31)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        if isinstance(action, argparse.BooleanOptionalAction):
            return "--[no-]" + action.option_strings[0].removeprefix("--")
        names = ", ".join(action.option_strings)
        if action.nargs == 0:
            return names
        values = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{names} {values}"


class Parser(argparse.ArgumentParser):
    """Parser of a command. Its subcommands get parsers of the same class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(add_help=False, formatter_class=_Lines, **options)
        self.add_argument(
            "-h",
            "--help",
            action=_Help,
            nargs="?",
            metavar="all",
            default=argparse.SUPPRESS,
            help="all: every option; a word: options that have it",
        )

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
    parser = command_line(argv)
    if not argv:
        parser.print_help()
        parser.exit()
    args, unknown = parser.parse_known_args(argv)
    command = args._command
    if "take_words" in args:
        unknown = args.take_words(command, args, unknown)
    if unknown:
        command.refuse(unknown)
    flags.read_environment(command, args)
    if hasattr(args, "config"):
        flags.read_config(command, args, args.config)
    for problem in _unknown_variables(command):
        print(f"asyncengine: warning: {problem}", file=sys.stderr)
    return args, args._run


def _unknown_variables(command: argparse.ArgumentParser) -> list[str]:
    """Sentences about environment variables of ours that stand for no option of any command."""
    known = {action.dest for action in flags.actions_of(command)}
    if not flags.unknown_variables(known):
        return []
    return flags.unknown_variables(known | _dests(command_line()))


def _dests(parser: argparse.ArgumentParser) -> set[str]:
    dests = set()
    for action in flags.actions_of(parser):
        dests.add(action.dest)
        if isinstance(action.choices, dict):
            for child in action.choices.values():
                dests |= _dests(child)
    return dests


def command_line(argv: Sequence[str] | None = None) -> Parser:
    """The parser of all commands.

    With ``argv``, only the commands that it names are complete: describing all of their options takes 0.1 s.
    """
    parser = Parser(prog="asyncengine", description="LLM inference in one asyncio process.")
    parser.add_argument("--version", action="version", version=f"asyncengine {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module, text in COMMANDS:
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
        )
        if argv is not None and name not in argv:
            continue
        if name in _WITH_OPTIONS:
            flags.add_config(command)
        import_module(module).add_arguments(command)
        command.set_defaults(_command=command, _run=import_module(module).run)
    return parser
