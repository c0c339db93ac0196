"""``asyncengine serve`` with scripted replies in place of a model: what an agent does with calls of tools, over HTTP.

A file has a JSON list of [seen, text]: each request is answered by the next text, if its prompt has ``seen`` in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from asyncengine.cli.serve import run_server
from asyncengine.server.config import ServerConfig
from tests.server.fake_engine import END, FakeEngine, FakeStream


class ScriptedEngine(FakeEngine):
    """Engine with scripted replies. Its template knows tools, and calls as Hermes and Qwen write them."""

    def __init__(self, replies: list[list[str]]) -> None:
        super().__init__(ends=True, max_model_len=1 << 20, chat_template="{{ tools }}<tool_call>")
        self._replies = iter(replies)

    async def submit(self, prompt: Any, params: Any, **terms: Any) -> FakeStream:
        seen, text = next(self._replies, ["", "The script has ended."])
        if seen not in "".join(map(chr, self._tokenize(prompt))):
            text = f"I see no {seen!r}."
        self.answer = [*map(ord, text), END]
        return await super().submit(prompt, params, **terms)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("replies", type=Path)
    parser.add_argument("--key", required=True)
    args = parser.parse_args()

    async def load() -> ScriptedEngine:
        return ScriptedEngine(json.loads(args.replies.read_text()))

    return run_server(ServerConfig(port=0, api_key=args.key, served_model_name=["stories", "gpt-5.5"]), load, "info")


if __name__ == "__main__":
    sys.exit(main())
