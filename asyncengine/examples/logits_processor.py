"""A logits processor: a story without the letter e.

The engine calls it with the tokens so far, prompt included, and with the logits of the next one, a NumPy array of
float32 that it may change. Only the requests that have a processor wait for it.
"""

import argparse
import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from asyncengine import AsyncEngine, SamplingParams, bundled_model


class Without:
    """Bans every token whose text has one of the letters."""

    def __init__(self, engine: AsyncEngine, letters: str) -> None:
        texts = (engine.tokenizer.decode([token]) for token in range(engine.model_info.vocab_size))
        self.banned = np.array([any(letter in text.lower() for letter in letters) for text in texts])

    def __call__(self, tokens: Sequence[int], logits: npt.NDArray[np.float32]) -> None:
        logits[self.banned] = -np.inf


async def main(model: str, letters: str) -> None:
    async with AsyncEngine.from_pretrained(model) as engine:
        params = SamplingParams(max_tokens=48, temperature=0, logits_processor=Without(engine, letters))
        output = await engine.generate("A fox sat on a rock.", params)
        print(output.text.strip())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=bundled_model(), help="directory or hub id (default: bundled)")
    parser.add_argument("--letters", default="e", help="letters that the story must not have (default: e)")
    args = parser.parse_args()
    asyncio.run(main(args.model, args.letters))
