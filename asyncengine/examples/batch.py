"""Any number of prompts from a generator, with a count of the results.

A prompt is taken from the generator when there is room for it, so the generator may read a large file. A prompt that
fails gives its error in place of its output, and the others go on.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator

from asyncengine import AsyncEngine, ChatMessage, SamplingParams, bundled_model

ANIMALS = ("fox", "bear", "penguin", "cat", "dog", "owl")


def prompts() -> Iterator[list[ChatMessage]]:
    for animal in ANIMALS:
        yield [{"role": "user", "content": f"Tell me a story about a {animal}."}]
    yield [{"role": "user", "content": "again and " * 1000}]  # longer than the bundled model's context


async def main(model: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=0)
    async with AsyncEngine.from_pretrained(model) as engine:
        results = engine.generate_many(
            prompts(), params, errors="return", progress=lambda done: print(f"{done} results", file=sys.stderr)
        )
        async for position, output, error in results:
            print(f"{position}: {error if output is None else output.text.strip()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=bundled_model(), help="directory or hub id (default: bundled)")
    asyncio.run(main(parser.parse_args().model))
