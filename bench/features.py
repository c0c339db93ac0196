"""Cost of each sampling feature: milliseconds per decode step beside plain steps of the same engine.

    python bench/features.py [--model gpt2] [--rows 256] [--tokens 160] [--repeats 5] [--json FILE]

All rows of a step use the feature. A step is the median time between two tokens of a row: the prompts of 128 random
ids run at once, and the first 32 tokens do not count. Plain runs and runs with the feature alternate, and a ratio is
the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gpu_common import SHAPES, add_engine_options, opened, random_prompts

from asyncengine import AsyncEngine, SamplingParams, StructuredOutputs
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure
from asyncengine.cli.embed import loop_factory
from asyncengine.engine.constraints.grammars import Grammars

WARM_UP = 32
"""Tokens of a run that do not count."""
BIASES = 16
JSON_SCHEMA = "JSON schema"
PEOPLE: dict[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
            "address": {"type": "object", "properties": {"street": {"type": "string"}, "no": {"type": "integer"}}},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
"""A schema that no run comes to the end of."""

#: Highest ratio to the plain step, at 256 rows; with a schema at 64.
TARGETS: dict[tuple[str, str], float] = {
    ("llama-3.1-8b", "penalties, 16 biases"): 1.03,
    ("gpt2", "penalties, 16 biases"): 1.15,
    ("llama-3.1-8b", "top-20 log probabilities"): 1.05,
    ("gpt2", "top-20 log probabilities"): 1.25,
    ("llama-3.1-8b", JSON_SCHEMA): 1.05,
}


def features(vocab_size: int) -> dict[str, Callable[[random.Random], dict[str, Any]]]:
    """Parameters of a request by the feature's name."""

    def edits(rng: random.Random) -> dict[str, Any]:
        return {
            "presence_penalty": 0.3,
            "frequency_penalty": 0.2,
            "repetition_penalty": 1.1,
            "logit_bias": {token: rng.uniform(-5, 5) for token in rng.sample(range(vocab_size), BIASES)},
        }

    return {
        "a temperature": lambda rng: {"temperature": 0.8, "seed": rng.getrandbits(32)},
        "penalties, 16 biases": edits,
        "top-20 log probabilities": lambda rng: {"logprobs": 20},
        "chosen log probability": lambda rng: {"logprobs": 0},
        "no repeated 4-grams": lambda rng: {"no_repeat_ngram_size": 4},
        JSON_SCHEMA: lambda rng: {"structured_outputs": {"json": PEOPLE}, "ignore_eos": False},
    }


def mask_us(engine: AsyncEngine, tokens: int = 400) -> list[float]:
    """Microseconds of each mask of a text of the schema, drawn at random, on one thread."""
    grammars = Grammars(engine.tokenizer, engine.model_info.vocab_size, [0])
    rng, taken = random.Random(0), []
    with asyncio.Runner() as runner:
        matcher = runner.run(grammars.compile(StructuredOutputs(json=PEOPLE))).deep_copy()
    words = np.zeros(-(-engine.model_info.vocab_size // 32), np.uint32)
    for _ in range(tokens):
        start = time.perf_counter()
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        taken.append((time.perf_counter() - start) * 1e6)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if not matcher.consume_token(int(rng.choice(allowed))):
            break
    grammars.close()
    return sorted(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", help=f"a shape or a directory (default: {', '.join(SHAPES)})")
    parser.add_argument("--feature", action="append", help="only these, by their names in the table")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=160, help="of a row in a run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", default="bench/results/features.json")
    add_engine_options(parser)
    args = parser.parse_args()
    results, figures = {}, []
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        for model in args.model or SHAPES:
            results[model] = runner.run(measure(model, args))
            for name, result in results[model].items():
                if name == "masks":
                    for percent in (50, 99):
                        value = report.percentile(result["us"], percent)
                        figures.append(Figure(f"{model}, masks on one thread: p{percent}", value, "µs"))
                    continue
                rows = 64 if name == JSON_SCHEMA else 256
                target = TARGETS.get((model, name)) if args.rows == rows else None
                figures.append(Figure(f"{model}, {name}", report.median(result["ratios"]), "of a plain step", target))
    report.print_figures(f"Steps of {args.rows} rows with a feature (medians of {args.repeats})", figures)
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    record = report.record("features", figures, repeats=args.repeats, settings=settings, results=results)
    report.write(args.json, record)


async def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    rng, results = random.Random(0), {}
    async with opened(model, args, max_num_seqs=args.rows) as engine:
        kinds = features(engine.model_info.vocab_size)
        await step_ms(engine, rng, args, lambda rng: {})
        asked = args.feature or list(kinds)
        for name in asked:
            kind = kinds[name]
            await step_ms(engine, rng, args, kind)
            plain, with_it = [], []
            for _ in range(args.repeats):
                plain.append(await step_ms(engine, rng, args, lambda rng: {}))
                with_it.append(await step_ms(engine, rng, args, kind))
            ratios = [b / a for a, b in zip(plain, with_it, strict=True)]
            results[name] = {"plain_ms": plain, "ms": with_it, "ratios": ratios}
        if JSON_SCHEMA in asked:
            results["masks"] = {"us": await asyncio.to_thread(mask_us, engine)}
    return results


async def step_ms(
    engine: AsyncEngine, rng: random.Random, args: argparse.Namespace, kind: Callable[[random.Random], dict[str, Any]]
) -> float:
    """Milliseconds between tokens of a row, the median over all rows' whole runs. SystemExit if one is short."""

    async def one(prompt: list[int], params: SamplingParams) -> float:
        seen, start, begin, last = 0, 0, 0.0, 0.0
        async for delta in engine.stream(prompt, params):
            if seen < WARM_UP <= seen + len(delta.token_ids):
                begin, start = time.perf_counter(), seen + len(delta.token_ids)
            seen += len(delta.token_ids)
            last = time.perf_counter()
        if seen != args.tokens or seen == start:
            raise SystemExit("a request came back short, or at once: the event loop cannot follow")
        return (last - begin) * 1e3 / (seen - start)

    prompts = random_prompts(rng, engine, args.rows)
    requests = [
        one(prompt, SamplingParams(max_tokens=args.tokens, **{"temperature": 0.0, "ignore_eos": True} | kind(rng)))
        for prompt in prompts
    ]
    return report.median(await asyncio.gather(*requests))


if __name__ == "__main__":
    main()
