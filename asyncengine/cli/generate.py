"""``asyncengine generate``: continue one prompt, streaming to stdout, or all prompts of a file."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncengine.api.request import SamplingParams
from asyncengine.cli import batch, flags
from asyncengine.cli.embed import add_engine, add_model, add_sampling, engine_from, loop_factory, running, set_model
from asyncengine.cli.jsonl import Request
from asyncengine.errors import ConfigError

if TYPE_CHECKING:
    from asyncengine.cli.remote import Reply

_DEFAULTS = {"max_tokens": None}  # until the model ends it, or the reader does with Ctrl-C
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_PLAIN = {"index", "text", "message", "finish_reason"}
"""Members of a choice that a short result has, or that say nothing where there is one choice."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] PROMPT [options]\n       %(prog)s [MODEL] -i FILE -o FILE [options]"
    parser.add_argument(
        "words",
        metavar="[MODEL] PROMPT",
        nargs="*",
        default=argparse.SUPPRESS,
        help="text to continue; - reads standard input",
    )
    parser.set_defaults(take_words=_take_words)
    add_model(parser, positional=False)
    batch.add_arguments(
        parser,
        "Prompts, one a line: text or JSON. JSON has prompt or messages, other fields of the HTTP API with its "
        "defaults, and a custom_id (default: the number of the line).",
    )
    exclude = ("n", "logprob_start_len")
    add_sampling(parser, exclude, _DEFAULTS)
    # --seed is the sampling seed here, the one that a single request is about.
    add_engine(parser, exclude=("seed",))


def _take_words(parser: argparse.ArgumentParser, args: argparse.Namespace, unknown: Sequence[str]) -> Sequence[str]:
    """Tell MODEL and PROMPT apart, of which each may be left out. Returns the unknown arguments that are neither.

    argparse gives a command the words in front of one option; words behind it are unknown to it.
    """
    if any(word.startswith("-") and word != "-" for word in unknown):
        return unknown
    words = [*vars(args).pop("words", ()), *unknown]
    has_model = len(words) > 1 or "input" in args
    if len(words) > 2:
        parser.error(f"more than a MODEL and a PROMPT: a prompt of several words needs quotes, got {words[:3]}...")
    if words and has_model:
        set_model(parser, args, words.pop(0))
    if words:
        args.prompt = words[0]
    return []


def run(args: argparse.Namespace) -> int:
    sampling = flags.values(args, SamplingParams)
    params = SamplingParams(**_DEFAULTS | sampling)
    if "input" in args:
        if "prompt" in args:
            raise ConfigError("PROMPT and --input exclude each other")
        return batch.run(args, PromptLines(sampling), {"default_max_tokens": None})
    for name in ("output", "url"):
        if name in args:
            raise ConfigError(f"--{name} goes with --input FILE")
    if "prompt" not in args:
        raise ConfigError("a PROMPT, or --input FILE, is needed")
    if "model" not in args and _is_model(args.prompt):
        raise ConfigError(f"{args.prompt} is a model: a PROMPT is needed behind it, or --input FILE")
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_generate(args, prompt, params))
    return 0


def _is_model(prompt: str) -> bool:
    """Return whether a prompt is the path of a model: then the prompt itself was forgotten."""
    try:
        return (Path(prompt) / "config.json").is_file()
    except (OSError, ValueError):  # too long for a path
        return False


async def _generate(args: argparse.Namespace, prompt: str, params: SamplingParams) -> None:
    async with running(engine_from(args)) as engine:
        stream = await engine.submit(prompt, params)
        print(prompt, end="", flush=True)
        async for delta in stream:
            print(delta.text, end="", flush=True)
        print()


class PromptLines(batch.Format):
    """Prompts as text or JSON; results are the text, why it ended, and the count of tokens."""

    def __init__(self, sampling: dict[str, Any]) -> None:
        """``sampling`` holds for lines that say nothing else."""
        self._sampling = sampling

    def request(self, number: int, line: bytes) -> Request:
        try:
            text = line.decode()
            fields = json.loads(text) if text.lstrip().startswith("{") else {"prompt": text}
        except (ValueError, RecursionError) as exc:
            return Request(number, problem=f"line {number} is not valid: {exc}; a prompt that begins with {{ is JSON")
        key = fields.pop("custom_id", number)
        if isinstance(key, bool) or not isinstance(key, str | int):
            return Request(number, problem=f"line {number}: custom_id must be a string or an integer")
        if ("prompt" in fields) == ("messages" in fields):
            return Request(key, problem="either prompt or messages is needed")
        if fields.get("stream"):
            return Request(key, problem="stream is not possible in a file")
        chat = "messages" in fields
        defaults = _as_chat(self._sampling) if chat else self._sampling
        return Request(key, _CHAT if chat else _COMPLETIONS, defaults | fields)

    def result(self, request: Request, reply: Reply | None) -> dict[str, Any]:
        head: dict[str, Any] = {"custom_id": request.key}
        if reply is None:
            return head | {"error": {"message": request.problem, "code": "invalid_line"}}
        body = reply.body
        choices = body.get("choices") if isinstance(body, dict) else None
        if reply.status != 200 or not choices:
            error = body.get("error", body) if isinstance(body, dict) else {"message": body}
            return head | {"error": error or {"message": f"HTTP status {reply.status}"}}
        first = choices[0]
        text = first["text"] if "text" in first else first["message"]["content"]
        head |= {"text": text, "finish_reason": first["finish_reason"], "usage": body.get("usage")}
        return head if len(choices) == 1 and _is_plain(first) else head | {"choices": choices}


def _as_chat(sampling: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in the words of chat completions, which ask for log probabilities and for their count
    apart."""
    if sampling.get("logprobs") is None:
        return sampling
    return sampling | {"logprobs": True, "top_logprobs": sampling["logprobs"]}


def _is_plain(choice: dict[str, Any]) -> bool:
    """Return whether a choice has nothing but the text and the finish reason."""
    message = choice.get("message") or {}
    more = {name for name, value in choice.items() if value is not None} - _PLAIN
    return not more and not any(message[name] for name in message if name not in ("role", "content"))
