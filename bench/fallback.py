"""Decode speed of one model by its native file and by its modules of transformers, in turn.

``python bench/fallback.py [--device cpu|cuda] [--rows 1 8] [--hidden 1024] [--layers 8] [--vocab 32000]
[--dtype bfloat16] [--json FILE]`` prints milliseconds of a step, the fastest of the repeats. Llama-3.1-8B is
``--hidden 4096 --layers 32 --vocab 128256``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure

LEAST_SHARE = {"cuda": 0.7, "cpu": 0.5}
"""Least speed of the modules over that of the native file, by device."""
PROMPT_TOKENS, TOKENS = 16, 48
WAYS: tuple[Literal["native"], Literal["transformers"]] = ("native", "transformers")


def write_config(directory: str, hidden: int, layers: int, vocab: int) -> None:
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 7 // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, hidden // 128),
        "num_key_value_heads": max(1, hidden // 512),
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
    }
    (Path(directory) / "config.json").write_text(json.dumps(values))


async def time_step(engine: AsyncEngine, rows: int) -> float:
    """Milliseconds of a decode step: the time between the first and the last token of requests that run together."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    marks: list[float] = []

    async def run(row: int) -> None:
        prompt = [row + 1, *range(2, PROMPT_TOKENS + 1)]
        marks.extend([time.perf_counter() async for _ in engine.stream(prompt, params)])

    await asyncio.gather(*(run(row) for row in range(rows)))
    began = sorted(marks)[2 * rows]  # two tokens each: prompts are computed by then
    return 1e3 * (max(marks) - began) / (TOKENS - 2)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", default="bench/results/fallback.json")
    args = parser.parse_args()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as directory:
        write_config(directory, args.hidden, args.layers, args.vocab)
        settings: Any = {
            "load_format": "dummy",
            "dtype": args.dtype,
            "num_kv_blocks": 16 * max(args.rows),
            "max_num_seqs": max(args.rows),
            "max_model_len": 128,
            "device": args.device,
            "tokenizer": "none",
            "progress": False,
        }
        native, modules = (AsyncEngine.from_pretrained(directory, model_impl=way, **settings) for way in WAYS)
        async with native, modules:
            for rows in args.rows:
                times: list[list[float]] = [[], []]
                for _ in range(args.repeats):
                    for engine, of_engine in zip((native, modules), times, strict=True):
                        of_engine.append(await time_step(engine, rows))
                one, other = map(min, times)
                share = one / other
                print(f"{rows:4} rows: native {one:.2f} ms, transformers {other:.2f} ms, {share:.2f} of its speed")
                figures += [
                    Figure(f"{rows} rows, native", one, "ms/step"),
                    Figure(f"{rows} rows, transformers", other, "ms/step"),
                    Figure(f"{rows} rows, share", share, "x", at_least=LEAST_SHARE.get(args.device)),
                ]
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    report.write(args.json, report.record("fallback", figures, repeats=args.repeats, settings=settings))


if __name__ == "__main__":
    asyncio.run(main())
