"""``asyncengine completion``: scripts that complete commands, options and their values in a shell.

A script holds all words: a key press starts no Python. It is of the version of asyncengine that printed it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from asyncengine.cli import flags

_LONGEST_TEXT = 70
_FILES = ("FILE", "MODEL")
_FILE_FIELDS = ("file", "template", "path", "dir", "uds")


@dataclass(frozen=True)
class Option:
    names: Sequence[str]
    text: str
    takes_value: bool
    choices: Sequence[str]
    is_file: bool
    """The option's value, or the positional argument that it stands for, names a file."""


@dataclass(frozen=True)
class Command:
    path: str
    """Words of the command after ``asyncengine``."""
    options: Sequence[Option]
    words: Sequence[tuple[str, str]]
    """Subcommands, or the values of its argument, each with a text."""
    takes_file: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s SHELL"
    parser.add_argument("shell", metavar="SHELL", choices=tuple(_SCRIPTS), help=", ".join(_SCRIPTS))
    parser.epilog = (
        "bash: put 'eval \"$(asyncengine completion bash)\"' into ~/.bashrc. "
        "zsh: write the script to a file _asyncengine in a folder of $fpath. "
        "fish: write it to ~/.config/fish/completions/asyncengine.fish."
    )


def run(args: argparse.Namespace) -> int:
    from asyncengine.cli.parser import command_line

    print(_SCRIPTS[args.shell](list(_commands(command_line(), ""))), end="")
    return 0


def _commands(parser: argparse.ArgumentParser, path: str) -> Iterator[Command]:
    options, words, takes_file = [], [], False
    for action in flags.actions_of(parser):
        if action.option_strings:
            options.append(_option(action))
        elif isinstance(action.choices, dict):
            for name, child in action.choices.items():
                words.append((name, _short(child.description)))
                yield from _commands(child, f"{path} {name}".strip())
        else:
            words += [(str(choice), "") for choice in action.choices or ()]
            takes_file = takes_file or action.metavar in _FILES
    yield Command(path, options, words, takes_file)


def _option(action: argparse.Action) -> Option:
    is_file = action.metavar in _FILES or action.dest.endswith(_FILE_FIELDS)
    choices = [str(choice) for choice in action.choices or ()]
    return Option(action.option_strings, _short(action.help), action.nargs != 0, choices, is_file)


def _short(text: Any) -> str:
    """The first sentence, without what a shell could take for its own."""
    first = re.split(r"(?<=[\w)])[.:;] ", str(text or ""))[0].replace("%%", "%").rstrip(".")
    plain = re.sub(r"[^\w ,./()+=%-]", "", first)
    return plain if len(plain) <= _LONGEST_TEXT else plain[: _LONGEST_TEXT - 2] + ".."


def _groups(command: Command) -> Iterator[tuple[str, str]]:
    """Options that take a value, joined by bars, and their values; \"files\" for names of files, \"\" for any text."""
    for option in command.options:
        if option.choices:
            yield "|".join(option.names), " ".join(option.choices)
    for wanted, values in ((True, "files"), (False, "")):
        some = [o for o in command.options if o.takes_value and not o.choices and o.is_file is wanted]
        if some:
            yield "|".join(name for option in some for name in option.names), values


_BASH = """_asyncengine() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command= words= files= word
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case "$command $word" in
%(paths)s
        esac
    done
    case "$command" in
%(cases)s
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    if [[ -n $files && $cur != -* ]]; then
        local IFS=$'\\n'
        compopt -o filenames 2>/dev/null
        COMPREPLY+=($(compgen -f -- "$cur"))
    fi
}
complete -F _asyncengine asyncengine
"""


def _bash(commands: list[Command]) -> str:
    cases = []
    for command in commands:
        values = [f"            {names}) {_bash_values(values)} ;;" for names, values in _groups(command)]
        names = [name for option in command.options for name in option.names]
        words = " ".join([*(word for word, _ in command.words), *names])
        files = " files=1" if command.takes_file else ""
        values.append(f'            *) words="{words}"{files} ;;')
        cases += [f'    "{command.path}")', '        case "$prev" in', *values, "        esac ;;"]
    return _BASH % {"paths": _paths(commands, "            {}) command={} ;;"), "cases": "\n".join(cases)}


def _bash_values(values: str) -> str:
    return "files=1" if values == "files" else f'words="{values}"'


def _paths(commands: list[Command], line: str) -> str:
    """A case for each command that has been typed so far, followed by one more word."""
    lines = []
    for command in commands:
        parent, _, name = command.path.rpartition(" ")
        if name:
            lines.append(line.format(f'"{parent} {name}"', f'"{command.path}"'))
    return "\n".join(lines)


_ZSH = """#compdef asyncengine
_asyncengine() {
    local command= word
    local -a options
    for word in "${(@)words[2,CURRENT-1]}"; do
        case "$command $word" in
%(paths)s
        esac
    done
    case "$command" in
%(cases)s
    esac
}
if [[ $funcstack[1] == _asyncengine ]]; then
    _asyncengine "$@"
else
    compdef _asyncengine asyncengine
fi
"""


def _zsh(commands: list[Command]) -> str:
    cases = []
    for command in commands:
        values = [f"            ({names}) {_zsh_values(values)}; return ;;" for names, values in _groups(command)]
        described = [f"'{name}:{text}'" for option in command.options for name, text in _named(option)]
        described += [f"'{word}:{text}'" for word, text in command.words]
        cases += [f'    ("{command.path}")']
        if values:
            cases += ['        case "$words[CURRENT-1]" in', *values, "        esac"]
        if command.takes_file:
            cases.append('        [[ "$words[CURRENT]" == -* ]] || _files')
        cases += ["        options=(", *(f"            {each}" for each in described), "        )"]
        cases.append("        _describe -o asyncengine options ;;")
    return _ZSH % {"paths": _paths(commands, "            ({}) command={} ;;"), "cases": "\n".join(cases)}


def _zsh_values(values: str) -> str:
    return "_files" if values == "files" else f"compadd -- {values}" if values else "_message value"


def _named(option: Option) -> Iterator[tuple[str, str]]:
    for name in option.names:
        yield name, option.text


_FISH = """function __asyncengine_at
    set -l found ''
    for word in (commandline -opc)[2..]
        switch "$found $word"
%(paths)s
        end
    end
    test "$found" = "$argv[1]"
end
complete -c asyncengine -f
%(lines)s
"""


def _fish(commands: list[Command]) -> str:
    lines = []
    for command in commands:
        head = f"complete -c asyncengine -n '__asyncengine_at \"{command.path}\"'"
        lines += [f"{head} -a '{word}' -d '{text}'" for word, text in command.words]
        if command.takes_file:
            lines.append(f"{head} -F")
        for option in command.options:
            names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names)
            values = f" -x -a '{' '.join(option.choices)}'" if option.choices else ""
            if option.takes_value and not option.choices:
                values = " -r -F" if option.is_file else " -x"
            lines.append(f"{head} {names}{values} -d '{option.text}'")
    return _FISH % {
        "paths": _paths(commands, "            case {}\n                set found {}"),
        "lines": "\n".join(lines),
    }


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
