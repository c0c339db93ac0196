"""Common parts of the GPU benchmarks: engines with random weights, their prompts and consumers, and a step's least
cost.

Bytes are those that a step cannot do without: its matrices once, keys and values of its tokens once, and the states of
its rows, which it reads and writes. Norms, biases and activations are left out, less than a hundredth of that.
Operations are those of the matrices and of visible pairs of a query and a key; a multiplication with its addition
counts as two.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.kernels.ops import JointSpec, KVSpec, LatentSpec, PagedSpec, SharedSpec, StateSpec, is_gated
from asyncengine.models.config import ModelConfig, RawConfig
from asyncengine.models.mixer_shapes import Delta
from asyncengine.models.registry import find_family
from asyncengine.runner.state.memory import state_bytes

SHAPES_DIR = Path(__file__).parent / "shapes"
SHAPES = ("gpt2", "qwen3-0.6b", "llama-3.1-8b")
PROMPT_LEN = 128
BANDWIDTH = 4.4e12
"""Bytes per second: reads of device memory, measured on the H200."""
ELEMENT_BYTES = 2
"""bfloat16, of weights and KV"""
CODE_BYTES = {"fp8": 1.0, "int8": 1 + 4 / 128, "int4": 0.5 + 4 / 128}
"""Bytes of a weight by ``quantization``. int8 and int4 have a float32 scale for 128 weights, fp8 one for a row."""
MXFP4_BYTES = 0.5 + 1 / 32
"""Bytes of a weight of an expert in MXFP4."""
COPIED_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
COPIES = 10


def measured_bandwidth(device: str, size: int | None = None) -> float:
    """Bytes per second of device memory, read and written, in the fastest of some copies."""
    import torch

    source = torch.ones(size or COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(COPIES):
        start = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * len(source) / min(seconds)


# ---- models ----


def model_directory(shape: str) -> Path:
    """Return the directory of a shape: a name of bench/shapes, or a directory itself."""
    return SHAPES_DIR / shape if (SHAPES_DIR / shape / "config.json").is_file() else Path(shape)


def read_model(shape: str) -> ModelConfig:
    raw = RawConfig.load(model_directory(shape))
    return find_family(raw)[1].read_config(raw)


def projections(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """[N, K] of a layer's matrices."""
    width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    queries = 2 * width if c.gated_queries else width
    up = c.intermediate_size * (2 if is_gated(c.activation) else 1)
    if (latent := c.latent) is not None:
        of_heads, rank = c.num_heads * latent.query_dim, latent.query_rank
        return {
            "qkv": ((rank or of_heads) + latent.spec.width, c.hidden_size),
            **({"queries": (of_heads, rank)} if rank else {}),
            "o": (c.hidden_size, c.num_heads * latent.value_dim),
            "up": (up, c.hidden_size),
            "down": (c.hidden_size, c.intermediate_size),
        }
    return {
        "qkv": (queries + 2 * kv_width, c.hidden_size),
        "o": (c.hidden_size, width),
        "up": (up, c.hidden_size),
        "down": (c.hidden_size, c.intermediate_size),
    }


def projection_biases(c: ModelConfig) -> dict[str, bool]:
    """Return for each of a layer's matrices whether it has a bias; all of GPT-2's do."""
    gpt2 = not c.ropes
    biases = {"qkv": c.qkv_bias, "queries": False, "o": c.output_bias, "up": c.mlp_bias, "down": c.mlp_bias}
    return {name: gpt2 or has for name, has in biases.items()}


def mixer_parameters(c: ModelConfig) -> int:
    """Count the parameters of the matrices of a layer's mixer with a state, its convolution included."""
    mixer = c.delta or c.state_space
    if mixer is None:  # a short convolution
        return (3 + 1) * c.hidden_size**2 + c.hidden_size * c.conv_size
    rates = 2 * mixer.value_heads if isinstance(mixer, Delta) else mixer.num_heads
    inputs = mixer.channels + mixer.inner + rates
    return c.hidden_size * (inputs + mixer.inner) + mixer.channels * mixer.conv_size


def routed_parameters(c: ModelConfig, rows: int) -> float:
    """Count the parameters of the experts of one layer that so many rows hit, if they are routed evenly."""
    mixture = c.mixture
    if mixture is None:
        return 0.0
    hit = mixture.num_experts * (1 - (1 - mixture.top_k / mixture.num_experts) ** rows)
    return (3 if is_gated(c.activation) else 2) * c.hidden_size * mixture.intermediate_size * hit


def attention_parameters(c: ModelConfig, index: int) -> int:
    """Count the parameters of the matrices of a layer's attention. A layer that shares keys and values has none for
    them, and keys that are values too have one matrix."""
    spec = c.kv_spec(index)
    if spec is None:
        size = {name: columns * inner for name, (columns, inner) in projections(c).items()}
        latent = c.latent
        of_latents = 0 if latent is None else c.num_heads * (latent.key_dim + latent.value_dim) * latent.rank
        return size["qkv"] + size.get("queries", 0) + size["o"] + of_latents
    width = c.num_heads * spec.head_dim
    planes = 1 if c.keys_are_values and not spec.window else 2
    own = 0 if isinstance(c.layer_caches[index], SharedSpec) else planes * spec.width
    return c.hidden_size * ((3 if c.gated_queries else 2) * width + own)


def input_parameters(c: ModelConfig) -> int:
    """Count the parameters of the matrices for the layers' own embeddings, all layers together; no step reads more
    than a few rows of the embeddings themselves."""
    return 3 * c.num_layers * c.layer_inputs.size * c.hidden_size if c.layer_inputs is not None else 0


def layer_parameters(c: ModelConfig, rows: int = 1) -> int:
    """Count the parameters of the matrices of all layers, without embedding and head; of experts those that so many
    rows hit, if they are routed evenly."""
    size = {name: columns * inner for name, (columns, inner) in projections(c).items()}
    # Families without a feed-forward block have an inner size of 1.
    dense = size["up"] + size["down"] if c.intermediate_size > 1 else 0
    experts, mixture = 0.0, c.mixture
    if mixture is not None:
        shared = (3 if is_gated(c.activation) else 2) * mixture.shared_size + mixture.gated_share
        experts = routed_parameters(c, rows) + c.hidden_size * (mixture.num_experts + shared)
    total = float(input_parameters(c))
    for index, spec in enumerate(c.layer_caches):
        total += 0 if isinstance(spec, StateSpec) else attention_parameters(c, index)
        total += mixer_parameters(c) if isinstance(spec, StateSpec | JointSpec) else 0
        if c.blocks:
            total += c.blocks[index].count("mlp") * dense + c.blocks[index].count("moe") * experts
        else:
            wide = c.wide_sharing_mlp and index >= c.first_sharing_layer
            total += experts if mixture is not None and mixture.layers[index] else dense * (2 if wide else 1)
    return round(total)


def weight_bytes(c: ModelConfig, quantization: str = "none", rows: int = 1) -> int:
    """Count the bytes of weights that a step of so many rows reads. It reads a few rows of the input embedding; it
    reads all of that only as the output's matrix. Experts in MXFP4 are read as they are."""
    of_layers = CODE_BYTES.get(quantization, ELEMENT_BYTES)
    total = of_layers * layer_parameters(c, rows) + ELEMENT_BYTES * c.vocab_size * c.hidden_size
    if c.mixture is not None and c.mixture.mxfp4:
        total -= (of_layers - MXFP4_BYTES) * sum(c.mixture.layers) * routed_parameters(c, rows)
    return round(total)


def kv_bytes_per_token(c: ModelConfig, kv_cache_dtype: str = "auto") -> int:
    """Keys and values, or latents, of all layers that keep some."""
    paged = [spec for spec in c.cache_parts if isinstance(spec, KVSpec | LatentSpec)]
    return sum(spec.planes * spec.width for spec in paged) * (1 if kv_cache_dtype == "fp8" else ELEMENT_BYTES)


def _seen_layers(c: ModelConfig) -> list[PagedSpec]:
    """The caches that the attention of a step reads, by layer."""
    specs = (c.kv_spec(index) or spec for index, spec in enumerate(c.layer_caches))
    return [spec for spec in specs if isinstance(spec, KVSpec | LatentSpec)]


def _window(spec: PagedSpec) -> int:
    return spec.window if isinstance(spec, KVSpec) else 0


def decode_bytes(
    c: ModelConfig, batch: int, context: float, quantization: str = "none", kv_cache_dtype: str = "auto"
) -> float:
    """Count the bytes of a decode step of ``batch`` rows that see ``context`` tokens each."""
    element = 1 if kv_cache_dtype == "fp8" else ELEMENT_BYTES
    seen = sum(spec.planes * spec.width * min(context, _window(spec) or context) for spec in _seen_layers(c))
    return weight_bytes(c, quantization, batch) + batch * (element * seen + 2 * state_bytes(c))


def floor_ms(
    c: ModelConfig, batch: int, context: float, quantization: str = "none", kv_cache_dtype: str = "auto"
) -> float:
    """Milliseconds to read the bytes of a decode step once, at the bandwidth that the card was seen to reach."""
    return 1e3 * decode_bytes(c, batch, context, quantization, kv_cache_dtype) / BANDWIDTH


def pairs(query: int, context: int, window: int = 0) -> int:
    """Count the pairs of a query and a key that it sees, for ``query`` tokens after ``context`` others."""
    if not window:
        return query * context + query * (query + 1) // 2
    return sum(min(window, context + i + 1) for i in range(query))


def prefill_flops(c: ModelConfig, query: int, context: int) -> float:
    """Count the operations of a chunk of ``query`` tokens after ``context`` others, with one row of logits."""
    matrices = 2 * (query * layer_parameters(c) + c.vocab_size * c.hidden_size)
    of_latents = 0 if c.latent is None else c.latent.rank + c.latent.rope_dim / 2
    seen = sum(
        pairs(query, context, _window(spec)) * (spec.head_dim if isinstance(spec, KVSpec) else of_latents)
        for spec in _seen_layers(c)
    )
    return matrices + 4 * c.num_heads * seen


# ---- engines ----


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu only to try the script out")
    parser.add_argument("--max-model-len", type=int, default=1024)


@asynccontextmanager
async def opened(shape: str, args: argparse.Namespace, **config: Any) -> AsyncIterator[AsyncEngine]:
    """A started engine of a shape (a name of bench/shapes, or a directory), settled as ``asyncengine serve`` does it.

    Afterwards its memory is free for the next one.
    """
    config = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": args.max_model_len} | config
    directory = model_directory(shape)
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
    """Return the environment of a Python process that is to import the same modules as this one."""
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
