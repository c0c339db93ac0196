"""Random mixes of features under pressure: each answer is the one that the same request gets alone.

    python -m tests.soak.features --minutes 10 --seed 1

A plain engine with room answers requests one by one. Engines with too few KV blocks answer them all at once, with
preemptions, the host tier, rows that decode on the host, the disk tier, one or two steps in flight, and with the prefix
cache on and off. Some requests are cancelled at random moments. On the CPU in float32 the answers are equal to the bit.
An engine holds nothing at the end. Exits with 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncengine import AsyncEngine, SamplingParams, bundled_model, testing
from asyncengine.api.outputs import RequestOutput
from asyncengine.api.structured_outputs import StructuredOutputs

ROOM: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 192, "num_kv_blocks": 400, "dtype": "float32"}
TIGHT: dict[str, Any] = ROOM | {"num_kv_blocks": 16, "max_num_batched_tokens": 64}
HOST: dict[str, Any] = TIGHT | {"host_kv_memory_bytes": 16 << 20}
HYBRID: dict[str, Any] = HOST | {"hybrid_attention": "always", "hybrid_workers": 2, "hybrid_lanes": 2}
ENGINES: dict[str, dict[str, Any]] = {
    "tight": TIGHT,
    "tight, one step": TIGHT | {"steps_in_flight": 1},
    "tight, no prefix cache": TIGHT | {"enable_prefix_caching": False},
    "host": HOST | {"steps_in_flight": 2},
    "hybrid": HYBRID,
    "hybrid, one step": HYBRID | {"steps_in_flight": 1},
    "disk": HOST | {"host_kv_memory_bytes": 1 << 20, "disk_kv_path": "", "disk_kv_bytes": 64 << 20},
    "hybrid, disk": HYBRID | {"disk_kv_path": "", "disk_kv_bytes": 64 << 20},
}
"""An empty ``disk_kv_path`` stands for a new directory."""
OPENINGS = ("Once upon a time there was a fox", "One day Tom and Mia went to the river", "The king had a small bird")
WORDS = ("and", "then", "she", "said", "the", "bear", "was", "very", "happy", "but", "cold", "water")
FORMS: list[dict[str, Any]] = [
    {"regex": "[a-f]{3,9} [0-9]{2,5}"},
    {"choice": ["yes", "no", "perhaps not"]},
    {"json": {"type": "object", "properties": {"b": {"enum": ["x", "y"]}, "a": {"type": "integer"}}}},
]


def shifted(history: Sequence[int], logits: Any) -> Any:
    """A callable that prefers other tokens from time to time."""
    if len(history) % 3 == 0:
        logits[history[-1]] = -100.0
    return logits


@dataclass(frozen=True)
class Asked:
    """A request, and what is done with it."""

    prompt: str
    params: SamplingParams
    features: tuple[str, ...]
    terms: dict[str, Any]
    cancelled_after_s: float | None


def requests(draw: random.Random) -> Iterator[Asked]:
    """Give requests without end."""
    while True:
        words = [draw.choice(WORDS) for _ in range(draw.choice((0, 2, 10, 40)))]
        prompt = " ".join([draw.choice(OPENINGS), *words])
        features = _features(draw)
        asked = dict(itertools.chain.from_iterable(given.items() for given in features.values()))
        params = SamplingParams(max_tokens=draw.choice((1, 8, 30, 60)), **asked)
        terms: dict[str, Any] = {"priority": draw.choice((-1, 0, 0, 2))}
        if draw.random() < 0.3:
            terms["cache_salt"] = draw.choice(("a", "b"))
        leaves = draw.random() ** 2 * 0.5 if draw.random() < 0.2 else None
        yield Asked(prompt, params, tuple(sorted(features)), terms, leaves)


def _features(draw: random.Random) -> dict[str, dict[str, Any]]:
    """Draw features by name, each with the fields that it takes."""
    sampled: dict[str, Any] = {"temperature": 0.0}
    if draw.random() < 0.6:
        sampled = {"temperature": draw.choice((0.7, 1.0, 1.4)), "seed": draw.randrange(1000)}
        sampled |= {"top_k": draw.choice((0, 20)), "top_p": draw.choice((1.0, 0.9)), "min_p": draw.choice((0.0, 0.05))}
    offered: dict[str, dict[str, Any]] = {
        "penalties": {"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.2},
        "biases": {"logit_bias": {draw.randrange(10, 900): draw.choice((-100.0, 2.0, 5.0)) for _ in range(5)}},
        "words": {"bad_words": [draw.choice(WORDS)]},
        "ngrams": {"no_repeat_ngram_size": 3},
        "logprobs": {"logprobs": draw.choice((0, 3))},
        "stops": {"stop": [draw.choice((" the", "ing", "."))]},
        "ends": {"ignore_eos": True},
    }
    chosen = {name: fields for name, fields in offered.items() if draw.random() < 0.25}
    if draw.random() < 0.25:
        chosen["n"] = {"n": draw.choice((2, 3))}
    kind = draw.random()
    if kind < 0.2:
        chosen = {name: chosen[name] for name in ("penalties", "logprobs", "n") if name in chosen}
        chosen["structure"] = {"structured_outputs": StructuredOutputs(**draw.choice(FORMS))}
    elif kind < 0.35:
        chosen["processor"] = {"logits_processor": shifted}
    chosen["sampling" if sampled["temperature"] else "greedy"] = sampled
    return chosen


@dataclass
class Mix:
    """One engine's share of the run."""

    compared: int = 0
    left: int = 0
    features: Counter[str] = field(default_factory=Counter)
    stats: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def answer(output: RequestOutput) -> list[Any]:
    return [(s.token_ids, s.text, s.logprobs, s.finish_reason, s.stop_reason) for s in output.outputs]


async def compare(name: str, plain: AsyncEngine, asked: Sequence[Asked], at_once: int, mix: Mix) -> None:
    """The answers of engine ``name`` to all, beside those of ``plain`` to each alone."""
    places = asyncio.Semaphore(at_once)
    with tempfile.TemporaryDirectory() as folder:
        settings = ENGINES[name] | ({"disk_kv_path": folder} if "disk_kv_path" in ENGINES[name] else {})
        async with (
            testing.no_leaks(),
            AsyncEngine.from_pretrained(bundled_model(), device="cpu", progress=False, **settings) as engine,
        ):

            async def ask(one: Asked) -> RequestOutput | None:
                try:
                    async with places, asyncio.timeout(one.cancelled_after_s):
                        return await engine.generate(one.prompt, one.params, **one.terms)
                except TimeoutError:
                    return None

            outputs = await asyncio.gather(*map(ask, asked))
            await testing.settle(engine)
            stats = engine.stats()
    for figure in ("num_preemptions", "blocks_from_host", "moved_to_host", "blocks_to_disk", "failed_host_rows"):
        mix.stats[figure] += getattr(stats, figure)
    for one, output in zip(asked, outputs, strict=True):
        if output is None:
            mix.left += 1
            continue
        mix.compared += 1
        mix.features.update(one.features)
        wanted, got = answer(await plain.generate(one.prompt, one.params)), answer(output)
        if got != wanted:
            mix.failures.append(f"{name}: {one}: {got}, and alone {wanted}"[:2000])


async def soak(seed: int, *, rounds: int | None, seconds: float, size: int, at_once: int = 24) -> dict[str, Mix]:
    """Each round gives every engine ``size`` new requests; it ends after ``rounds`` of them, or after ``seconds``."""
    until = time.monotonic() + seconds
    drawn = requests(random.Random(seed))
    mixes = {name: Mix() for name in ENGINES}
    async with AsyncEngine.from_pretrained(bundled_model(), device="cpu", progress=False, **ROOM) as plain:
        for _ in itertools.count() if rounds is None else range(rounds):
            for name, mix in mixes.items():
                if time.monotonic() > until:
                    return mixes
                await compare(name, plain, list(itertools.islice(drawn, size)), at_once, mix)
    return mixes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", type=int, default=120, help="requests of an engine before the next engine's turn")
    args = parser.parse_args()
    mixes = asyncio.run(soak(args.seed, rounds=None, seconds=60 * args.minutes, size=args.size))
    for name, mix in mixes.items():
        print(f"{name}: {mix.compared} compared, {mix.left} cancelled, {dict(mix.stats)}")
        for failure in mix.failures[:5]:
            print(f"  {failure}")
    return 1 if any(mix.failures for mix in mixes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
