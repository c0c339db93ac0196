"""Structured output: a text that becomes an object of a pydantic class.

The engine masks each token that the class's JSON Schema excludes, so the text can be parsed whatever the model is.
Bounds of strings and arrays, and no further properties, let the text end within max_tokens.
"""

import argparse
import asyncio
import sys
from typing import Literal

from asyncengine import AsyncEngine, SamplingParams, bundled_model

try:
    from pydantic import BaseModel, ConfigDict, Field
except ImportError:
    sys.exit("this example needs pydantic: pip install pydantic")


class Animal(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["fox", "bear", "hen"]
    name: str = Field(pattern="^[A-Z][a-z]{1,7}$")
    age: int = Field(ge=1, le=20)
    friends: list[Literal["owl", "cat", "dog"]] = Field(max_length=2)


async def main(model: str) -> None:
    chat = [{"role": "user", "content": "Tell me of an animal."}]
    params = SamplingParams(max_tokens=96, temperature=0.8, seed=1, structured_outputs={"json": Animal})
    async with AsyncEngine.from_pretrained(model) as engine:
        output = await engine.generate(chat, params)
    animal = Animal.model_validate_json(output.text)
    print(f"{animal.name} is a {animal.kind}, {animal.age} years old; friends: {', '.join(animal.friends) or 'none'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=bundled_model(), help="directory or hub id (default: bundled)")
    asyncio.run(main(parser.parse_args().model))
