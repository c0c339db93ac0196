"""Cost of parsers of outputs: microseconds for a delta of one token, by format and kind of text.

python bench/parsers.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncengine.server.parsing import OutputParser
from asyncengine.server.parsing.formats import DeepSeek, Hermes, Json, Mistral
from asyncengine.server.parsing.harmony import Harmony
from asyncengine.server.parsing.pythonic import Pythonic
from asyncengine.text.markers import REASONING

SIZE = 4  # characters of a token
ROUNDS = 7
PROSE = "Once upon a time there was a fox, who < saw 3 dogs.\nIt [the fox] ran. "
ARGUMENTS = '{"text": "' + PROSE.replace("\n", "\\n") * 40 + '", "list": [' + "1, " * 200 + "1]}"
DEEP = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
HEAD = "<|channel|>commentary to=functions.f<|message|>"
CASES: dict[str, tuple[Callable[[], OutputParser], str]] = {
    "hermes, content": (lambda: Hermes(REASONING["think"]), PROSE * 60),
    "hermes, reasoning": (lambda: Hermes(REASONING["think"]), "<think>" + PROSE * 60),
    "hermes, call": (Hermes, '<tool_call>{"name": "f", "arguments": ' + ARGUMENTS),
    "json, call": (Json, '{"name": "f", "arguments": ' + ARGUMENTS),
    "json, arguments first": (Json, '{"arguments": ' + ARGUMENTS + ', "name": "f"}'),
    "mistral, content": (Mistral, PROSE * 60),
    "mistral, call": (Mistral, "[TOOL_CALLS]f[ARGS]" + ARGUMENTS),
    "deepseek, content": (DeepSeek, PROSE * 60),
    "deepseek, call": (DeepSeek, DEEP + ARGUMENTS),
    "harmony, call": (Harmony, HEAD + ARGUMENTS),
    "harmony, content": (Harmony, "<|channel|>final<|message|>" + PROSE * 60),
    "pythonic, call": (Pythonic, "[f(text='" + PROSE.replace("\n", " ") * 40 + "')]"),
    "hermes, many calls": (Hermes, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n' * 60),
}


def main() -> None:
    for name, (make, text) in CASES.items():
        deltas = [text[i : i + SIZE] for i in range(0, len(text), SIZE)]
        times = []
        for _ in range(ROUNDS):
            parser = make()
            start = time.perf_counter()
            for delta in deltas:
                parser.push(delta)
            parser.finish()
            times.append((time.perf_counter() - start) / len(deltas))
        parser = make()
        start = time.perf_counter()
        parser.push(text)
        parser.finish()
        whole = time.perf_counter() - start
        print(
            f"{name:24} {1e6 * min(times):6.2f} µs a delta, {1e6 * whole:8.1f} µs as a whole ({len(text)} characters)"
        )


if __name__ == "__main__":
    main()
