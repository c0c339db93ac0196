"""Decode, prompts and conversations of models whose layers keep a state or a latent, beside floors and a dense model.

    python bench/states.py [--part decode|context|prompt|conversation|latent] [--model qwen3.5-9b] [--layers N]
        [--state-dtype bfloat16] [--device cpu] [--json FILE]

- decode: milliseconds of a step at 1, 8 and 64 rows beside the floor of bench/models.py (weights that its rows touch,
  states read and written, keys and values read), and beside a dense model: its step as it is, and as it would be for
  the bytes that the step of the model reads (weights, keys and values, states), at as many bytes a second.
- context: a step of the layers with a state alone, after 64k tokens and after 1k.
- prompt: seconds of a prompt of 16k tokens beside the dense model.
- conversation: time to the first token of the last of 20 turns, whose tokens are 16k together, beside that of a new
  prompt of as many tokens; and the tokens that the prefix cache did not have.
- latent: a step of glm-4.7-flash at 64 rows of 16k tokens beside its floor.

The dense model is a Qwen3 of the same hidden size and vocabulary, with as many layers as come nearest in bytes; a
mixture has none. A shape that does not fit into ``MEMORY_SHARE`` of the memory loses its last layers, by whole periods
of its kinds; the record has how many are left, and the floor is that of the cut shape. Weights are random, in bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import decode
import models
import prefill
from gpu_common import (
    ELEMENT_BYTES,
    add_engine_options,
    decode_bytes,
    greedy,
    kv_bytes_per_token,
    layer_parameters,
    measured_bandwidth,
    model_directory,
    opened,
    random_prompts,
    read_model,
)

from asyncengine import AsyncEngine
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median
from asyncengine.cli.embed import loop_factory
from asyncengine.kernels.ops import StateSpec
from asyncengine.machine import available_memory
from asyncengine.models.config import ModelConfig
from asyncengine.models.state_space import with_half_states
from asyncengine.runner.state.memory import state_bytes

SHAPES = ("qwen3.5-9b", "qwen3.6-35b-a3b", "granite-4-h-small", "nemotron-3-nano-30b")
LATENT_SHAPE = "glm-4.7-flash"
MEMORY_SHARE = 0.75
"""Share of the device's memory for weights, states, keys and values; steps take more beside them."""
OVER_FLOOR = {"qwen3.6-35b-a3b": {1: 1.50, 8: 1.38, 64: 1.34}}
"""Most times the floor, by batch."""
OVER_DENSE = {1: 1.10, 8: 1.10, 64: 1.25}
"""Most times the step of a dense model that reads as many bytes, by batch."""
MOST_OF_LONG_CONTEXT, MOST_OF_DENSE_PROMPT, MOST_OF_LATENT, MOST_OF_TURN = 1.05, 1.2, 1.3, 0.15
PERIOD_KEYS = ("layer_types", "mlp_layer_types", "layers_block_type")
PATTERN = "hybrid_override_pattern"


@dataclass(frozen=True)
class Bench:
    """The settings of all parts, and their findings."""

    args: argparse.Namespace
    bandwidth: float
    folder: Path
    figures: list[Figure] = field(default_factory=list)
    cuts: dict[str, str] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)


# ---- shapes ----


def cut(raw: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return a config.json with its first ``layers`` layers; of Nemotron-H these are blocks."""
    made = raw | {"num_hidden_layers": layers}
    for key in PERIOD_KEYS:
        if isinstance(raw.get(key), list):
            made[key] = raw[key][:layers]
    if PATTERN in raw:
        made[PATTERN] = raw[PATTERN][:layers]
    return made


def period(raw: dict[str, Any]) -> int:
    """Return the layers after which their kinds begin again, as far as config.json says."""
    kinds = next((raw[key] for key in (*PERIOD_KEYS, PATTERN) if key in raw), [0])
    lengths = range(1, len(kinds))
    return next((n for n in lengths if all(a == b for a, b in zip(kinds, kinds[n:], strict=False))), 1)


def bytes_of(c: ModelConfig, rows: int, context: int) -> float:
    """Count the bytes of weights, of keys and values and of states with as many snapshots."""
    weights = layer_parameters(c, 1 << 20) + (1 if c.tie_word_embeddings else 2) * c.vocab_size * c.hidden_size
    return ELEMENT_BYTES * weights + rows * (2 * state_bytes(c) + context * kv_bytes_per_token(c))


def fitted(bench: Bench, shape: str, rows: int, context: int) -> str:
    """Return the shape, or the directory of one with fewer layers that fits the memory with so many rows."""
    raw = json.loads((model_directory(shape) / "config.json").read_text())
    every, whole = period(raw), raw["num_hidden_layers"]
    room = MEMORY_SHARE * device_memory(bench.args.device)
    layers = min(whole, bench.args.layers or whole)
    while True:
        directory = write(bench, f"{Path(shape).name}-{layers}", cut(raw, layers))
        if layers <= every or bytes_of(read_model(directory), rows, context) <= room:
            break
        layers -= every
    bench.cuts[f"{Path(shape).name}, {rows} x {context}"] = f"{layers} of {whole} layers"
    return directory


def device_memory(device: str) -> int:
    if device == "cpu":
        return available_memory()
    import torch

    return int(torch.cuda.mem_get_info()[1])


def write(bench: Bench, name: str, config: dict[str, Any]) -> str:
    directory = bench.folder / name
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def dense_twin(bench: Bench, shape: str) -> str | None:
    """Return the directory of a dense Qwen3 with about as many bytes of weights; None for a mixture."""
    c = read_model(shape)
    if c.mixture is not None:
        return None
    dim = 128 if c.hidden_size % 128 == 0 else 16
    heads = max(1, c.hidden_size // dim)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4), "head_dim": dim,
        "max_position_embeddings": c.max_positions, "tie_word_embeddings": c.tie_word_embeddings,
    }  # fmt: skip
    name = f"{Path(shape).name}-dense"
    of_layer = layer_parameters(read_model(write(bench, name, config)))
    return write(bench, name, config | {"num_hidden_layers": max(1, round(layer_parameters(c) / of_layer))})


def with_states_alone(bench: Bench, shape: str) -> str | None:
    """Return the directory of a model of those layers that keep a state and nothing else; None if no key says which."""
    raw = json.loads((model_directory(shape) / "config.json").read_text())
    key = next((key for key in PERIOD_KEYS if isinstance(raw.get(key), list)), None)
    specs = read_model(shape).layer_caches
    if key is None or len(raw[key]) != len(specs):
        return None
    kinds = [kind for kind, spec in zip(raw[key], specs, strict=True) if isinstance(spec, StateSpec)]
    return write(bench, f"{Path(shape).name}-states", cut(raw, len(kinds)) | {key: kinds}) if kinds else None


# ---- parts ----


async def decode_part(bench: Bench) -> None:
    batches = bench.args.batches
    for shape in bench.args.model or SHAPES:
        name, made = Path(shape).name, fitted(bench, shape, max(batches), bench.args.context)
        result = await models.measure(made, options(bench, bench.args.context), state_dtype=bench.args.state_dtype)
        twin = dense_twin(bench, made)
        dense = await models.measure(twin, options(bench, bench.args.context)) if twin else None
        bench.results[f"decode, {name}"] = {"model": result, "dense": dense}
        c = read_model(made)
        written = state_bytes(with_half_states(c) if bench.args.state_dtype == "bfloat16" else c)
        for batch, ms in result["ms"].items():
            label, floor = f"{name}, batch {batch}", 1e3 * result["bytes"][batch] / bench.bandwidth
            limit = OVER_FLOOR.get(name, {}).get(batch)
            bench.figures.append(Figure(label, ms, "ms/step"))
            bench.figures.append(Figure(f"{label}, over the floor", ms / floor, "x", at_most=limit))
            if dense is not None:
                ratio = ms / dense["ms"][batch]
                bench.figures.append(Figure(f"{label}, over dense", ratio, "x"))
                read = result["bytes"][batch] - batch * written
                ratio *= dense["bytes"][batch] / read
                limit = OVER_DENSE.get(batch)
                bench.figures.append(Figure(f"{label}, over dense of the bytes read", ratio, "x", at_most=limit))


async def context_part(bench: Bench) -> None:
    """Bare replays, on a GPU alone."""
    args = bench.args
    for shape in args.model or SHAPES:
        made = with_states_alone(bench, fitted(bench, shape, 8, args.long))
        if made is None:
            print(f"{shape} is left out: its layers are not named one by one")
            continue
        c, ms = read_model(made), {}
        async with opened(made, options(bench, args.long), max_num_seqs=8) as engine:
            for context in (args.short, args.long):
                ms[context] = await replayed(engine, c, 8, context, args)
        if None in ms.values():
            print(f"{shape} is left out: there are no graphs to replay")
            continue
        label = f"{Path(shape).name}, layers with a state, batch 8"
        bench.figures.extend([Figure(f"{label} after {n}", step, "ms/step") for n, step in ms.items()])
        ratio = ms[args.long] / ms[args.short]
        bench.figures.append(Figure(f"{label}, long over short", ratio, "x", at_most=MOST_OF_LONG_CONTEXT))


async def prompt_part(bench: Bench) -> None:
    args = bench.args
    for shape in args.model or SHAPES:
        name, made = Path(shape).name, fitted(bench, shape, 2, args.prompt)
        twin, seconds = dense_twin(bench, made), {}
        for kind, directory in {"": made, ", dense": twin}.items():
            if directory is None:
                continue
            config = {"max_num_seqs": 2, "enable_prefix_caching": False, "prefill_chunk_size": None}
            async with opened(directory, options(bench, args.prompt), **config) as engine:
                runs = [
                    await prefill.generate(engine, random.Random(i), 1, args.prompt) for i in range(args.repeats + 1)
                ]
            seconds[kind] = median(runs[1:])  # everything ran once before
            bench.figures.append(Figure(f"{name}{kind}, prompt of {args.prompt}", 1e3 * seconds[kind], "ms"))
        if ", dense" in seconds:
            ratio = seconds[""] / seconds[", dense"]
            bench.figures.append(Figure(f"{name}, prompt over dense", ratio, "x", at_most=MOST_OF_DENSE_PROMPT))


async def conversation_part(bench: Bench) -> None:
    args = bench.args
    for shape in args.model or SHAPES:
        name, made = Path(shape).name, fitted(bench, shape, 8, args.prompt)
        async with opened(made, options(bench, args.prompt), max_num_seqs=8) as engine:
            await converse(engine, random.Random(0), args)  # everything runs once
            turns = [await converse(engine, random.Random(1 + i), args) for i in range(args.repeats)]
            length, new = turns[0][2], []
            for i in range(args.repeats):
                (prompt,) = random_prompts(random.Random(-1 - i), engine, 1, length)
                new.append((await first_token(engine, prompt, 1))[0])
        last, whole = median([turn[0] for turn in turns]), median(new)
        bench.figures.extend(
            [
                Figure(f"{name}, turn {args.turns} of {length} tokens", 1e3 * last, "ms"),
                Figure(f"{name}, its prompt computed whole", 1e3 * whole, "ms"),
                Figure(f"{name}, turn over whole", last / whole, "x", at_most=MOST_OF_TURN),
                Figure(f"{name}, tokens of it computed", max(turn[1] for turn in turns), "tokens"),
            ]
        )


async def converse(engine: AsyncEngine, rng: random.Random, args: argparse.Namespace) -> tuple[float, int, int]:
    """Seconds to the first token of the last turn, its tokens that were computed, and all tokens of its prompt."""
    of_turn, seconds, computed, length = args.prompt // args.turns, 0.0, 0, 0
    history: list[int] = []
    answer = max(1, of_turn // 8)
    for _ in range(args.turns):
        history = history + random_prompts(rng, engine, 1, of_turn - answer)[0]
        seconds, tokens, cached = await first_token(engine, history, answer)
        computed, length = len(history) - cached, len(history)
        history = history + tokens
    return seconds, computed, length


async def first_token(engine: AsyncEngine, prompt: Sequence[int], tokens: int) -> tuple[float, list[int], int]:
    """Seconds to the first of so many tokens, all of them, and the tokens of the prompt that were cached."""
    output = await engine.generate(list(prompt), greedy(tokens))
    if len(output.token_ids) != tokens:
        raise SystemExit(f"a request got {len(output.token_ids)} of {tokens} tokens")
    return output.timing.ttft, list(output.token_ids), output.usage.cached_tokens


async def latent_part(bench: Bench) -> None:
    """Bare replays, on a GPU alone."""
    args = bench.args
    rows, context = max(args.batches), args.prompt
    for shape in args.model or (LATENT_SHAPE,):
        made = fitted(bench, shape, rows, context)
        c = read_model(made)
        async with opened(made, options(bench, context), max_num_seqs=rows) as engine:
            ms = await replayed(engine, c, rows, context, args)
        if ms is None:
            print(f"{shape} is left out: there are no graphs to replay, or no room")
            continue
        floor = 1e3 * decode_bytes(c, rows, context) / bench.bandwidth
        label = f"{Path(shape).name}, {rows} x {context}"
        bench.figures.append(Figure(label, ms, "ms/step"))
        bench.figures.append(Figure(f"{label}, over the floor", ms / floor, "x", at_most=MOST_OF_LATENT))


async def replayed(engine: AsyncEngine, c: ModelConfig, rows: int, context: int, args: argparse.Namespace) -> Any:
    """Milliseconds of a step; None without graphs, or without room for its keys and values."""
    wanted = argparse.Namespace(
        contexts=[context], batches=[rows], between=[], replays=args.replays, quantization="none", kv_cache_dtype="auto"
    )
    runs = [await decode.sweep(engine, c, wanted) for _ in range(args.repeats)]
    ms = [point["ms"] for points in runs for point in points if "ms" in point]
    return median(ms) if ms else None


def options(bench: Bench, tokens: int) -> argparse.Namespace:
    """Return the options of an engine that holds sequences of ``tokens``."""
    return argparse.Namespace(**vars(bench.args) | {"max_model_len": max(tokens + 64, bench.args.max_model_len)})


PARTS: dict[str, Callable[[Bench], Any]] = {
    "decode": decode_part,
    "context": context_part,
    "prompt": prompt_part,
    "conversation": conversation_part,
    "latent": latent_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="(default: all)")
    parser.add_argument("--model", action="append", help="a shape or a directory (default: those of the part)")
    parser.add_argument("--layers", type=int, help="of every shape at most")
    parser.add_argument("--state-dtype", choices=("float32", "bfloat16"), default="float32", help="in the decode part")
    parser.add_argument("--batches", default="1,8,64", help="rows of the steps (default: %(default)s)")
    parser.add_argument("--context", type=int, default=256, help="tokens that a row sees in the decode part")
    parser.add_argument("--short", type=int, default=1024, help="context of the context part (default: %(default)s)")
    parser.add_argument("--long", type=int, default=65536, help="its other context (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=16384, help="tokens of prompts, conversations and latents")
    parser.add_argument("--turns", type=int, default=20, help="of a conversation (default: %(default)s)")
    parser.add_argument("--tokens", default="8,32", help="of the two generations on the CPU (default: %(default)s)")
    parser.add_argument("--replays", type=int, default=20, help="of a graph (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of a measurement, of which the median counts")
    parser.add_argument("--json", default="bench/results/states.json")
    add_engine_options(parser)
    args = parser.parse_args()
    args.batches, args.tokens = map(decode.parse_counts, (args.batches, args.tokens))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, measured_bandwidth(args.device), Path(folder))
        bench.figures.append(Figure("bandwidth of a copy", bench.bandwidth / 1e9, "GB/s"))
        try:
            for part in args.part or PARTS:
                with asyncio.Runner(loop_factory=loop_factory()) as runner:
                    runner.run(PARTS[part](bench))
        finally:  # what was measured is kept
            save(bench)


def save(bench: Bench) -> None:
    report.print_figures(f"Layers with a state (medians of {bench.args.repeats})", bench.figures)
    print("\n".join(f"{shape}: {left}" for shape, left in bench.cuts.items()))
    settings = {key: value for key, value in vars(bench.args).items() if key != "json"}
    results = {"cuts": bench.cuts, **bench.results}
    record = report.record("states", bench.figures, repeats=bench.args.repeats, settings=settings, results=results)
    report.write(bench.args.json, record)


if __name__ == "__main__":
    main()
