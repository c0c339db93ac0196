"""What the GPU benchmarks share: engines with random weights, their prompts and consumers."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from asyncengine import AsyncEngine, SamplingParams

SHAPES_DIR = Path(__file__).parent / "shapes"
SHAPES = ("gpt2", "qwen3-0.6b", "llama-3.1-8b")
PROMPT_LEN = 128


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu only to try the script out")
    parser.add_argument("--max-model-len", type=int, default=1024)


@asynccontextmanager
async def opened(shape: str, args: argparse.Namespace, **config: Any) -> AsyncIterator[AsyncEngine]:
    """A started engine of a shape (a name of bench/shapes, or a directory), settled as ``asyncengine serve`` does it.

    Afterwards its memory is free for the next one.
    """
    directory = SHAPES_DIR / shape if shape in SHAPES else Path(shape)
    config = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": args.max_model_len} | config
    async with AsyncEngine.from_pretrained(directory, progress=False, device=args.device, **config) as engine:
        gc.collect()
        gc.freeze()
        try:
            yield engine
        finally:
            gc.unfreeze()
    gc.collect()
    if args.device == "cuda":
        import torch

        torch.cuda.empty_cache()


def random_prompts(rng: random.Random, engine: AsyncEngine, count: int, length: int = PROMPT_LEN) -> list[list[int]]:
    """Different ones, so that the prefix cache finds nothing."""
    return [rng.choices(range(engine.model_info.vocab_size), k=length) for _ in range(count)]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


async def consume(engine: AsyncEngine, prompt: Sequence[int], tokens: int) -> int:
    """Stream one request as a server would, without the network; how many deltas it took."""
    received = deltas = 0
    async for delta in engine.stream(prompt, greedy(tokens)):
        received += len(delta.token_ids)
        deltas += 1
        _ = f'data: {{"choices":[{{"index":{delta.index},"text":"{delta.text}"}}]}}\n\n'.encode()
    if received != tokens:
        raise SystemExit(f"a request got {received} of {tokens} tokens")
    return deltas


async def consume_all(engine: AsyncEngine, prompts: Sequence[Sequence[int]], tokens: int) -> int:
    """All at once, a task each; the sum of deltas."""
    return sum(await asyncio.gather(*(consume(engine, prompt, tokens) for prompt in prompts)))


def child_environment() -> dict[str, str]:
    """For a Python process that is to import what this one imports."""
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
