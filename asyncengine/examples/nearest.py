"""Nearest neighbours by embeddings: texts in the order of their likeness.

Vectors have length 1, so that their product is the cosine of the angle between them. The bundled model's vectors know
next to nothing but words; a model that was trained for embeddings knows what they mean.
"""

import argparse
import asyncio

import numpy as np

from asyncengine import AsyncEngine, bundled_model

TEXTS = (
    "The bear baked a big cake.",
    "The fox lost her red kite.",
    "The penguin lived in a quiet cave.",
    "It rained all day long.",
)


async def main(model: str, question: str) -> None:
    async with AsyncEngine.from_pretrained(model) as engine:
        texts = (await engine.embed(list(TEXTS), pooling="mean")).vectors
        [asked] = (await engine.embed([question], pooling="mean")).vectors
    cosines = texts @ asked
    for i in np.argsort(-cosines):
        print(f"{cosines[i]:.3f} {TEXTS[i]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=bundled_model(), help="directory or hub id (default: bundled)")
    parser.add_argument("--question", default="A fox looked for a red kite.", help="text to compare with")
    args = parser.parse_args()
    asyncio.run(main(args.model, args.question))
