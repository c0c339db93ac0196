"""CPU generation against transformers, with the same random weights on both sides.

    python bench/cpu_generation.py [--dtype float32] [--dtype bfloat16] [--json FILE]

A checkpoint of a real model's shape is written to a temporary directory and loaded by two worker processes, so that
neither side's threads disturb the other's. Rounds go through all measurements in turn, each mixed one after a short
run of the same prompts; a ratio is the median over the rounds, each of which compares neighbours in time. Transformers
gets what suits it: no end-of-sequence checks, its default attention (sdpa), continuous batching with a cache of the
needed size that is set up before the clock starts.

- batch 1: time per token after the prefill, from the difference between a long and a short generation.
- mixed: requests of different prompt and output lengths, all there at once. Useful tokens are those asked for. The
  static batch is padded on the left and runs to the longest output; continuous batching is the machinery behind
  generate_batch, given each request's own output length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quiet import wait_for_quiet

from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median

#: Prompts and, for each, the count of tokens to generate.
Work = list[tuple[list[int], int]]
Answer = Callable[[str, Work], list[list[int]]]

SHAPE = Path(__file__).parent / "shapes" / "gpt2"
SHORT, LONG = 8, 72
WARM_UP = 4  # tokens of each request: a side that was idle while the other ran finds its memory cold, or reclaimed
PAIRS = 3  # per round: short measurements, which slip between the disturbances of a shared machine


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16"), help="(default: both)")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, nargs=2, default=(16, 256), metavar=("MIN", "MAX"))
    parser.add_argument("--output-len", type=int, nargs=2, default=(16, 128), metavar=("MIN", "MAX"))
    parser.add_argument("--shape", type=Path, default=SHAPE, help="directory with a config.json")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--wait", type=float, default=30, metavar="S", help="for a quiet machine, per measurement")
    parser.add_argument("--json", default="bench/results/cpu_generation.json")
    parser.add_argument("--worker", choices=sorted(WORKERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.shape)
        return
    figures: list[Figure] = []
    samples = {}
    for dtype in args.dtype or ["float32", "bfloat16"]:
        with tempfile.TemporaryDirectory() as directory:
            save_checkpoint(args.shape, Path(directory), dtype)
            rounds = compare(Path(directory), mixed_work(args), args.repeats, args.wait)
        samples[dtype] = rounds
        figures += summarize(dtype, rounds)
    report.print_figures(f"CPU generation, {args.shape.name} shape (medians of {args.repeats} rounds)", figures)
    settings = {"shape": args.shape.name, "requests": args.requests, "batch 1": f"tokens {SHORT} to {LONG}, prompt 64"}
    settings |= {"prompt_len": args.prompt_len, "output_len": args.output_len}
    report.write(
        args.json,
        report.record("cpu_generation", figures, repeats=args.repeats, settings=settings, rounds=samples),
    )


def compare(directory: Path, mixed: Work, repeats: int, wait_s: float) -> list[dict[str, Any]]:
    """Return the figures of each round; ``began quiet`` is the share of its two halves that found the machine idle."""
    alone = random.Random(1).choices(range(50000), k=64)
    ours, theirs = Worker("asyncengine", directory), Worker("transformers", directory)
    try:
        for worker, modes in ((ours, ["together"]), (theirs, ["static", "continuous"])):
            for mode in modes:
                worker.time(mode, [(alone, 4), (alone[:16], 4)])
        rounds = []
        for _ in range(repeats):
            quiet = int(wait_for_quiet(wait_s))
            pairs = [pair(ours, theirs, alone) for _ in range(PAIRS)]
            quiet += wait_for_quiet(wait_s)
            seconds = {"useful tokens": float(sum(n for _, n in mixed)), "began quiet": quiet / 2}
            for name, worker, mode in (
                ("asyncengine mixed", ours, "together"),
                ("transformers static", theirs, "static"),
                ("transformers continuous", theirs, "continuous"),
            ):
                worker.time(mode, [(prompt, WARM_UP) for prompt, _ in mixed])
                seconds[name], _ = worker.time(mode, mixed)
            rounds.append({"alone": pairs, **seconds})
            print(rounds[-1], file=sys.stderr)
        return rounds
    finally:
        ours.close()
        theirs.close()


def pair(ours: Worker, theirs: Worker, prompt: list[int]) -> dict[str, float]:
    """Milliseconds per token of one sequence on both sides, and the share of tokens that are the same."""
    result, outputs = {}, {}
    for name, worker, mode in (("asyncengine", ours, "together"), ("transformers", theirs, "static")):
        short, _ = worker.time(mode, [(prompt, SHORT)])
        long, (outputs[name],) = worker.time(mode, [(prompt, LONG)])
        result[name] = 1000 * (long - short) / (LONG - SHORT)
    return result | {"same": sum(map(int.__eq__, *outputs.values())) / LONG}


def summarize(dtype: str, rounds: list[dict[str, Any]]) -> list[Figure]:
    pairs = [p for r in rounds for p in r["alone"]]

    def useful(name: str) -> Figure:
        return Figure(f"{dtype}: {name}", median([r["useful tokens"] / r[name] for r in rounds]), "useful tokens/s")

    def times(name: str) -> Figure:
        ratio = median([r[f"transformers {name}"] / r["asyncengine mixed"] for r in rounds])
        return Figure(f"{dtype}: mixed, over {name}", ratio, "x", at_least=3.0)

    ratio = median([p["asyncengine"] / p["transformers"] for p in pairs])
    return [
        *(
            Figure(f"{dtype}: {side} alone", median([p[side] for p in pairs]), "ms/token")
            for side in ("asyncengine", "transformers")
        ),
        Figure(f"{dtype}: alone, of generate's time", ratio, "x", at_most=0.7),
        Figure(f"{dtype}: same tokens alone", 100 * min(p["same"] for p in pairs), "%"),
        *(useful(name) for name in ("asyncengine mixed", "transformers static", "transformers continuous")),
        times("static"),
        times("continuous"),
    ]


def mixed_work(args: argparse.Namespace) -> Work:
    rng = random.Random(2)
    return [
        (rng.choices(range(50000), k=rng.randint(*args.prompt_len)), rng.randint(*args.output_len))
        for _ in range(args.requests)
    ]


def save_checkpoint(shape: Path, directory: Path, dtype: str) -> None:
    """Random weights from transformers' own initialisation, and a tokenizer that nobody looks at."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from asyncengine.text.tokenizer import placeholder_tokenizer

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(shape)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(directory)
    placeholder_tokenizer(config.vocab_size).backend.save(str(directory / "tokenizer.json"))


# ---- the two sides, each in a process of its own ----


class Worker:
    """A side that has loaded the checkpoint and waits for work."""

    def __init__(self, side: str, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", side, "--shape", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def time(self, mode: str, work: Work) -> tuple[float, list[list[int]]]:
        """Seconds, measured by the worker, and the generated tokens."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([mode, work]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with exit code {self._process.wait()}")
        seconds, outputs = json.loads(line)
        if [len(tokens) for tokens in outputs] != [n for _, n in work]:
            raise SystemExit(f"{mode}: not every request got its count of tokens")
        return seconds, outputs

    def close(self) -> None:
        self._process.communicate()  # the end of its input ends it


def work(side: str, directory: Path) -> None:
    answer = WORKERS[side](directory)
    for line in sys.stdin:
        mode, requests = json.loads(line)
        start = time.perf_counter()
        outputs = answer(mode, requests)
        print(json.dumps([time.perf_counter() - start, outputs]), flush=True)
    os._exit(0)  # the thread of transformers' continuous batching would keep the process


def asyncengine_side(directory: Path) -> Answer:
    from asyncengine import AsyncEngine, SamplingParams

    engine = AsyncEngine.from_pretrained(str(directory), enable_prefix_caching=False)
    runner = asyncio.Runner()
    runner.run(engine.start())

    async def generate(work: Work) -> list[list[int]]:
        outputs = await asyncio.gather(
            *(
                engine.generate(prompt, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))
                for prompt, n in work
            )
        )
        return [list(output.token_ids) for output in outputs]

    def answer(mode: str, work: Work) -> list[list[int]]:
        return runner.run(generate(work))

    return answer


def transformers_side(directory: Path) -> Answer:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    model.config.eos_token_id = None

    def static(work: Work) -> list[list[int]]:
        width = max(len(prompt) for prompt, _ in work)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in work])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in work])
        longest = max(n for _, n in work)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest)
        return [row[width : width + n].tolist() for row, (_, n) in zip(out, work, strict=True)]

    cache = ContinuousBatchingConfig(page_size=32, num_blocks=512, max_batch_tokens=2048, allow_block_sharing=False)
    manager = model.init_continuous_batching(continuous_batching_config=cache)
    manager.start()

    def continuous(work: Work) -> list[list[int]]:
        ids = [manager.add_request(prompt, max_new_tokens=n, eos_token_id=-1) for prompt, n in work]
        outputs: dict[str, list[int]] = {}
        while len(outputs) < len(ids):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                outputs[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise SystemExit("transformers' continuous batching has stopped")
        return [outputs[i] for i in ids]

    return lambda mode, work: static(work) if mode == "static" else continuous(work)


WORKERS: dict[str, Callable[[Path], Answer]] = {"asyncengine": asyncengine_side, "transformers": transformers_side}


if __name__ == "__main__":
    main()
