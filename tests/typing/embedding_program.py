"""A program as users write it. The type checker reads it with the package; nothing runs it."""

from __future__ import annotations

from typing import Any

from asyncengine import AsyncEngine, ChatMessage, SamplingParams, StructuredOutputs
from asyncengine.testing import SimulatedEngine


class Fox:
    """Has what the type checker asks of a pydantic class."""

    @classmethod
    def model_json_schema(cls, by_alias: bool = True) -> dict[str, Any]:
        return {"type": "object"}


async def generates(engine: AsyncEngine) -> str:
    await engine.generate([{"role": "user", "content": "Hello"}])
    await engine.generate([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}])
    history = [{"role": "user", "content": "Hello"}]
    await engine.generate(history)
    typed: list[ChatMessage] = [{"role": "user", "content": "Hello"}]
    await engine.generate(typed)
    await engine.generate([1, 2, 3])
    async for position, output, error in engine.generate_many(["a", "b"]):
        print(position, output, error)
    return (await engine.generate("Once")).text


def constrained() -> list[SamplingParams]:
    return [
        SamplingParams(structured_outputs={"regex": "[a-z]+"}),
        SamplingParams(structured_outputs=StructuredOutputs(choice=["yes", "no"])),
        SamplingParams(structured_outputs=Fox),
        SamplingParams(structured_outputs={"json": Fox}),
        SamplingParams(structured_outputs=StructuredOutputs(json=Fox)),
    ]


def engines() -> list[AsyncEngine]:
    return [
        AsyncEngine.from_pretrained("stories", max_num_seqs=8, dtype="float32", device="cpu"),
        SimulatedEngine(step_latency_us=10, max_model_len=256),
        AsyncEngine.from_pretrained("stories", max_num_seq=8),  # type: ignore[call-arg]  # no such keyword
        AsyncEngine.from_pretrained("stories", dtype="float33"),  # type: ignore[arg-type]  # no such type
    ]
