"""A GGUF file on the CPU, beside llama.cpp on the same file and cores.

    make peers  # once: llama-cpp-python in an environment of its own
    python bench/peers_cpu.py [--type Q8_0] [--type Q4_K] [--isa avx512] [--repeats 3] [--json FILE]

The file has half the layers of Llama 3.2 1B and random weights. Each side is a process that has loaded it, with as many
threads; they are measured in turn. One sequence alone and 16 at once: milliseconds of a step, from the difference
between a long and a short generation. Prefill: a prompt of 512 tokens. Log probabilities: the largest difference from
float32 among the 20 most probable tokens behind a prompt of 64 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from quiet import wait_for_quiet

PEER = Path(__file__).resolve().parents[1] / ".venv-peers/bin/python"
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 8, 2048, 8192, 32, 8, 128256
SHORT, LONG = 4, 28
SEQUENCES = 16
PREFILL = 512
TOP = 20  # tokens whose log probabilities are compared
DISTANCES = ("asyncengine from float32", "llama.cpp from float32", "llama.cpp by tokens from float32")

Prompts = list[list[int]]
#: Tokens and their log probabilities.
Pairs = list[tuple[int, float]]
#: Prompts and tokens to generate for each -> seconds; and what follows a prompt that is computed at once or by tokens.
Side = tuple[Callable[[Prompts, int], float], Callable[[list[int], bool], Pairs]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--type", action="append", choices=("Q8_0", "Q4_K"), help="(default: both)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peer", default=str(PEER), help="python with llama-cpp-python (default: that of make peers)")
    parser.add_argument(
        "--no-repack", action="store_true", help="llama.cpp without its copies of weights (AMX and others)"
    )
    parser.add_argument(
        "--isa", default="auto", help="asyncengine's instruction set: amx, avx512, avx2 (default: best)"
    )
    parser.add_argument("--wait", type=float, default=30, metavar="S", help="for a quiet machine, per round")
    parser.add_argument("--json", default="bench/results/peers_cpu.json")
    parser.add_argument("--worker", choices=sorted(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(*SIDES[args.worker](args))
        return
    from asyncengine.cli.benchmarks import report

    figures: list[report.Figure] = []
    samples = {}
    for kind in args.type or ["Q8_0", "Q4_K"]:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model.gguf"
            write_file(path, kind)
            samples[kind] = compare(path, args)
        figures += summarize(kind, samples[kind])
    report.print_figures(f"GGUF on the CPU, {args.threads} threads (medians of {args.repeats} rounds)", figures)
    settings = {
        "threads": args.threads,
        "isa": args.isa,
        "layers": LAYERS,
        "hidden": HIDDEN,
        "inner": INNER,
        "vocabulary": VOCAB,
    }
    report.write(
        args.json, report.record("peers_cpu", figures, repeats=args.repeats, settings=settings, rounds=samples)
    )


def compare(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(1)
    many = [rng.choices(range(VOCAB), k=16) for _ in range(SEQUENCES)]
    long, probe = rng.choices(range(VOCAB), k=PREFILL), rng.choices(range(VOCAB), k=64)
    exact = Worker(sys.executable, "exact", path, args)
    truth = dict(exact.logits(probe)[:TOP])
    exact.close()
    begun = time.perf_counter()
    ours = Worker(sys.executable, "asyncengine", path, args)
    found: dict[str, Any] = {"ready": time.perf_counter() - begun, "rounds": []}
    theirs = Worker(args.peer, "llama.cpp", path, args)
    try:
        others = (ours.logits(probe), theirs.logits(probe), theirs.logits(probe, at_once=False))
        for name, pairs in zip(DISTANCES, map(dict, others), strict=True):
            found[name] = max(abs(value - pairs[token]) for token, value in truth.items())
        for _ in range(args.repeats):
            values: dict[str, float] = {"began quiet": float(wait_for_quiet(args.wait))}
            for name, prompts in (("alone", many[:1]), ("at 16", many)):
                for side, worker in (("ours", ours), ("theirs", theirs)):
                    short, all_of_it = worker.seconds(prompts, SHORT), worker.seconds(prompts, LONG)
                    values[f"{name}, {side}"] = 1000 * (all_of_it - short) / (LONG - SHORT)
            for side, worker in (("ours", ours), ("theirs", theirs)):
                values[f"prefill, {side}"] = 1000 * worker.seconds([long], 1)
            found["rounds"].append(values)
            print(values, file=sys.stderr)
        return found
    finally:
        ours.close()
        theirs.close()


def summarize(kind: str, samples: dict[str, Any]) -> list[Any]:
    from asyncengine.cli.benchmarks.report import Figure, median

    figures = [Figure(f"{kind}: asyncengine ready", samples["ready"], "s", at_most=5)]
    for name, target in (("alone", 1.2), ("at 16", 1.2), ("prefill", 2.0)):
        for side, own in (("asyncengine", "ours"), ("llama.cpp", "theirs")):
            value = median([r[f"{name}, {own}"] for r in samples["rounds"]])
            figures.append(Figure(f"{kind}: {name}, {side}", value, "ms"))
        ratio = median([r[f"{name}, theirs"] / r[f"{name}, ours"] for r in samples["rounds"]])
        figures.append(Figure(f"{kind}: {name}, speed over llama.cpp", ratio, "x", at_least=target))
    return figures + [Figure(f"{kind}: log probabilities, {name}", samples[name], "") for name in DISTANCES]


def write_file(path: Path, kind: str) -> None:
    """Random blocks whose numbers have a deviation of about 0.02, without a tokenizer."""
    import gguf
    import numpy as np

    draw = np.random.default_rng(0)
    stored = gguf.GGMLQuantizationType[kind]
    numbers, size = gguf.GGML_QUANT_SIZES[stored]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")

    def matrix(name: str, rows: int, columns: int) -> None:
        blocks = draw.integers(0, 256, (rows * columns // numbers, size), dtype=np.uint8)
        # A code of Q8_0 deviates by 74; one of Q4_K by 4.6 times a scale of 31, with offsets of 7.5 times as much.
        scales = (0.02 / 74,) if kind == "Q8_0" else (0.02 / 150, 7.5 * 0.02 / 150)
        for i, scale in enumerate(scales):
            blocks[:, 2 * i : 2 * i + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=stored)

    def ones(name: str) -> None:
        writer.add_tensor(name, np.ones(HIDDEN, np.float32))

    matrix("token_embd.weight", VOCAB, HIDDEN)
    ones("output_norm.weight")
    for i in range(LAYERS):
        ones(f"blk.{i}.attn_norm.weight")
        ones(f"blk.{i}.ffn_norm.weight")
        width = HIDDEN // HEADS * KV_HEADS
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN), ("attn_k", width, HIDDEN), ("attn_v", width, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN), ("ffn_gate", INNER, HIDDEN), ("ffn_up", INNER, HIDDEN),
            ("ffn_down", HIDDEN, INNER),
        ):  # fmt: skip
            matrix(f"blk.{i}.{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- the two sides, each in a process of its own ----


class Worker:
    """A side that has loaded the file and waits for work."""

    def __init__(self, python: str, side: str, path: Path, args: argparse.Namespace) -> None:
        command = [python, __file__, "--worker", side, "--file", str(path), "--threads", str(args.threads)]
        command += ["--isa", args.isa, *(["--no-repack"] if args.no_repack else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def seconds(self, prompts: Prompts, count: int) -> float:
        return float(self._ask(["seconds", prompts, count]))

    def logits(self, prompt: list[int], *, at_once: bool = True) -> Pairs:
        return [(token, value) for token, value in self._ask(["logits", prompt, at_once])]

    def close(self) -> None:
        self._process.communicate()  # the end of its input ends it

    def _ask(self, words: list[Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"a worker ended with exit code {self._process.wait()}")
        return json.loads(line)


def work(seconds: Callable[[Prompts, int], float], logits: Callable[[list[int], bool], Pairs]) -> None:
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        kind, given, how = json.loads(line)
        print(json.dumps(seconds(given, how) if kind == "seconds" else logits(given, how)), flush=True)
    os._exit(0)


def asyncengine_side(args: argparse.Namespace, dtype: Literal["bfloat16", "float32"] = "bfloat16") -> Side:
    from asyncengine import AsyncEngine, SamplingParams
    from asyncengine.kernels.cpu.ops import CpuOps
    from asyncengine.runner.steps import model_runner

    class Ops(CpuOps):
        """The engine takes the best instruction set of the machine; a comparison names one."""

        def __init__(self, num_threads: int, **settings: Any) -> None:
            super().__init__(num_threads, args.isa, **settings)

    model_runner.__dict__["CpuOps"] = Ops
    engine = AsyncEngine.from_pretrained(
        args.file, skip_tokenizer_init=True, enable_prefix_caching=False, cpu_threads=args.threads, max_model_len=1024,
        dtype=dtype, max_logprobs=128,
    )  # fmt: skip
    runner = asyncio.Runner()
    runner.run(engine.start())

    async def generate(prompts: Prompts, params: SamplingParams) -> list[Any]:
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))

    def seconds(prompts: Prompts, count: int) -> float:
        begun = time.perf_counter()
        outputs = runner.run(generate(prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)))
        assert all(len(output.outputs[0].token_ids) == count for output in outputs)
        return time.perf_counter() - begun

    def logits(prompt: list[int], at_once: bool) -> Pairs:
        (output,) = runner.run(generate([prompt], SamplingParams(max_tokens=1, logprobs=128, ignore_eos=True)))
        return [tuple(pair) for pair in output.outputs[0].logprobs[0].top]

    return seconds, logits


def llama_side(args: argparse.Namespace) -> Side:
    import llama_cpp  # type: ignore[import-not-found]  # in an environment of its own
    import numpy as np

    silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silence, None)
    llama_cpp.llama_backend_init()
    choice = llama_cpp.llama_model_default_params()
    choice.use_extra_bufts = not args.no_repack
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = 2048, 512, 512, SEQUENCES
    settings.n_threads = settings.n_threads_batch = args.threads
    settings.kv_unified = True
    model = llama_cpp.llama_model_load_from_file(args.file.encode(), choice)
    context = llama_cpp.llama_init_from_model(model, settings)
    batch = llama_cpp.llama_batch_init(512, 0, 1)

    def step(tokens: list[tuple[int, int, int]], wanted: list[int]) -> Any:
        """Compute (token, position, sequence), and return the logits of some of them."""
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, sequence
            batch.logits[i] = i in wanted
        if llama_cpp.llama_decode(context, batch) != 0:
            raise SystemExit("llama_decode failed")
        rows = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (VOCAB,)) for i in wanted]
        return np.stack(rows)

    def fresh() -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)

    def seconds(prompts: Prompts, count: int) -> float:
        fresh()
        begun = time.perf_counter()
        tokens = [(t, p, s) for s, prompt in enumerate(prompts) for p, t in enumerate(prompt)]
        ends = [i for i, (_, p, s) in enumerate(tokens) if p == len(prompts[s]) - 1]
        chosen = step(tokens, ends).argmax(1)
        for n in range(1, count):
            tokens = [(int(t), len(prompts[s]) + n - 1, s) for s, t in enumerate(chosen)]
            chosen = step(tokens, list(range(len(tokens)))).argmax(1)
        return time.perf_counter() - begun

    def logits(prompt: list[int], at_once: bool) -> Pairs:
        fresh()
        tokens = [(token, position, 0) for position, token in enumerate(prompt)]
        steps = [tokens] if at_once else [[token] for token in tokens]
        for part in steps:
            row = step(part, [len(part) - 1])[0].astype(np.float64)
        return list(enumerate(row - row.max() - math.log(np.exp(row - row.max()).sum())))

    return seconds, logits


def exact_side(args: argparse.Namespace) -> Side:
    """Weights that are unpacked to float32 for each product."""
    return asyncengine_side(args, "float32")


SIDES: dict[str, Callable[[argparse.Namespace], Side]] = {
    "exact": exact_side,
    "asyncengine": asyncengine_side,
    "llama.cpp": llama_side,
}


if __name__ == "__main__":
    main()
