"""Streams against a server, from a process of their own, for bench/overlap.py.

    python bench/sse_load.py URL --requests N --prompt-len P --tokens T --vocab V --seed S

Prints a line when it is ready, starts at a line on its standard input, and ends with a line of JSON: events, and
what is wrong with each stream that did not bring all of its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys

from asyncengine.cli.benchmarks.sse_client import SseResult, Target, read_sse
from asyncengine.cli.embed import loop_factory

_TIMEOUT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    for name in ("requests", "prompt-len", "tokens", "vocab", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    target = Target.parse(args.url, "/v1/completions")
    rng = random.Random(args.seed)
    requests = [
        target.request(
            {
                "prompt": rng.choices(range(args.vocab), k=args.prompt_len),
                "max_tokens": args.tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        for _ in range(args.requests)
    ]
    print("ready", flush=True)
    sys.stdin.readline()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        results = runner.run(_all(target, requests))
    failures = [failure for result in results if (failure := _failure(result, args.tokens)) is not None]
    print(json.dumps({"events": sum(len(r.text_times) for r in results), "failures": failures}))


async def _all(target: Target, requests: list[bytes]) -> list[SseResult]:
    return await asyncio.gather(*(read_sse(target, request, _TIMEOUT_S) for request in requests))


def _failure(result: SseResult, tokens: int) -> str | None:
    if result.failure is None and result.completion_tokens != tokens:
        return f"{result.completion_tokens} of {tokens} tokens"
    return result.failure


if __name__ == "__main__":
    main()
