"""A conversation, and the commands that change it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from asyncengine.api.request import ChatMessage, SamplingParams
from asyncengine.cli import flags
from asyncengine.errors import AsyncEngineError, ConfigError

_HELP = {
    "/help": "show this",
    "/system [TEXT]": "set the system message; without TEXT there is none",
    "/reset": "forget the conversation, but for the system message (also /clear)",
    "/undo": "take back the last message and its answer",
    "/regen": "answer the last message anew",
    "/set [NAME [VALUE]]": "set a sampling parameter such as temperature; without VALUE its default; alone: show them",
    "/save FILE": "write system message, messages and parameters as JSON",
    "/load FILE": "go on with a saved conversation",
    "/quit": "end (also /exit, Ctrl-D)",
}
NOT_FOR_CHATS = ("n", "logprobs", "prompt_logprobs", "logprob_start_len", "logprob_token_ids", "logprobs_mode")
"""Fields of SamplingParams that one answer on a terminal has no use for."""
_ROLES = ("user", "assistant")


@dataclass
class Conversation:
    """Turns of user and assistant in alternation. It waits if the last one is the user's."""

    system: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that somebody gave."""
    turns: list[ChatMessage] = field(default_factory=list)

    @property
    def messages(self) -> list[ChatMessage]:
        opening: list[ChatMessage] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return opening + self.turns

    @property
    def waits(self) -> bool:
        return bool(self.turns) and self.turns[-1]["role"] == "user"

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        """End the turn. A message that got nothing for an answer is taken back."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()


def is_command(text: str) -> bool:
    """Return whether a typed text is a command: it begins with one slash. Two slashes begin a message that has one."""
    return text.startswith("/") and not text.startswith("//")


def command(conversation: Conversation, text: str) -> bool:
    """Do what a line beginning with a slash asks for; False ends the chat. Its errors go to stderr."""
    name, _, rest = text.partition(" ")
    try:
        return _do(conversation, name, rest.strip())
    except (AsyncEngineError, OSError, ValueError) as exc:
        print(f"[{exc}]", file=sys.stderr)
    return True


def _do(conversation: Conversation, name: str, rest: str) -> bool:
    match name:
        case "/help":
            print("\n".join(f"{usage:<20} {text}" for usage, text in _HELP.items()), file=sys.stderr)
            print('A line that ends with \\ goes on, so does text in """; // stands for a first /.', file=sys.stderr)
        case "/system":
            conversation.system = rest or None
        case "/reset" | "/clear":
            conversation.turns.clear()
        case "/undo":
            _undo(conversation)
        case "/regen":
            if not conversation.turns:
                raise ConfigError("there is nothing to answer yet")
            conversation.turns.pop()
        case "/set":
            _set(conversation, *rest.split(maxsplit=1))
        case "/save":
            _save(conversation, _path(rest))
        case "/load":
            _load(conversation, _path(rest))
        case "/quit" | "/exit":
            return False
        case _:
            known = [usage.split()[0] for usage in _HELP]
            raise ConfigError(f"there is no command {name}{flags.did_you_mean(name, known)}")
    return True


def _undo(conversation: Conversation) -> None:
    if not conversation.turns:
        raise ConfigError("there is nothing to take back")
    del conversation.turns[-2:]


def _set(conversation: Conversation, name: str = "", value: str = "") -> None:
    name = name.replace("-", "_")
    if not name:
        print(json.dumps(conversation.sampling), file=sys.stderr)
        return
    known = [each for each in SamplingParams.__dataclass_fields__ if each not in NOT_FOR_CHATS]
    if name not in known:
        raise ConfigError(f"there is no parameter {name}{flags.did_you_mean(name, known)}")
    sampling = {key: each for key, each in conversation.sampling.items() if key != name}
    if value:
        sampling[name] = flags.value_of(SamplingParams, name, value)
    SamplingParams(**sampling)
    conversation.sampling = sampling


def _path(text: str) -> str:
    if not text:
        raise ConfigError("a file is needed")
    return os.path.expanduser(text)


def _save(conversation: Conversation, path: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"messages": conversation.messages, "sampling": conversation.sampling}, file, indent=1)
        file.write("\n")


def _load(conversation: Conversation, path: str) -> None:
    with open(path, encoding="utf-8") as file:
        saved = json.load(file)
    wrong = ConfigError(f"{path} is no saved conversation")
    if not isinstance(saved, dict) or not isinstance(saved.get("messages"), list):
        raise wrong
    turns: list[ChatMessage] = []
    system = None
    for message in saved["messages"]:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(content, str):
            raise wrong
        if role == "system" and not turns and system is None:
            system = content
        elif role == _ROLES[len(turns) % 2]:
            turns.append({"role": role, "content": content})
        else:
            raise wrong
    sampling = _checked(saved.get("sampling", {}), wrong)
    if len(turns) % 2:
        turns.pop()  # it has no answer, and is not asked again without being asked to
    conversation.system, conversation.turns, conversation.sampling = system, turns, sampling


def _checked(sampling: Any, wrong: ConfigError) -> dict[str, Any]:
    """Raises ``wrong`` for what is none, InvalidRequestError for values."""
    if not isinstance(sampling, dict) or sampling.keys() - SamplingParams.__dataclass_fields__.keys():
        raise wrong
    if isinstance(bias := sampling.get("logit_bias"), dict):  # JSON has no integers as keys
        sampling["logit_bias"] = {int(token): value for token, value in bias.items()}
    SamplingParams(**sampling)
    return sampling
