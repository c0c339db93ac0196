"""Cost of a token to the event loop: processor time of its thread, without and with log probabilities.

    python bench/loop.py [--rows 256] [--tokens 160] [--repeats 5] [--json FILE]

Engine, step thread and streams are the real ones. The device is simulated, and numpy makes up tokens and records, so no
GPU is needed. A step takes so long that each token has a delta of its own. Kinds of request alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import time
from pathlib import Path
from typing import Any

import numpy as np

from asyncengine import AsyncEngine, SamplingParams, _core
from asyncengine.api.model_info import ModelInfo
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure
from asyncengine.cli.embed import loop_factory
from asyncengine.config import EngineConfig
from asyncengine.runner.backend import Backend
from asyncengine.runner.loop_config import step_loop_config
from asyncengine.text.tokenizer import placeholder_tokenizer

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chosen log probability": {"logprobs": 0},
    "top-20 log probabilities": {"logprobs": 20},
}
VOCAB, FIRST_WORD, PROMPT = 1024, 300, 8
LAYOUT = _core.STEP_INPUT_LAYOUT


class MadeUp:
    """A device whose step reads its StepInput and makes up what a model would answer."""

    def __init__(self, staging: _core.Staging, step_s: float) -> None:
        self._inputs = self._ring(staging, staging.input, staging.input_stride, np.int32)
        self._outputs = self._ring(staging, staging.output, staging.output_stride, np.int64)
        self._records_begin = staging.records_begin
        self._step_s = step_s
        self._step = 0

    @staticmethod
    def _ring(staging: _core.Staging, address: int, stride: int, dtype: Any) -> Any:
        memory = (ctypes.c_char * (staging.num_steps * stride)).from_address(address)
        return np.frombuffer(memoryview(memory), dtype).reshape(staging.num_steps, -1)

    def run(self) -> None:
        self._step += 1
        place = self._step % len(self._inputs)
        words, out, number = self._inputs[place], self._outputs[place], self._step << 32
        begin, width = LAYOUT["header_words"], LAYOUT["row_words"]
        rows = words[begin : begin + words[LAYOUT["header.num_rows"]] * width].reshape(-1, width).astype(np.int64)
        rows = rows[rows[:, LAYOUT["row.sample_row"]] >= 0]
        samples, room = rows[:, LAYOUT["row.sample_row"]], int(rows[:, LAYOUT["row.result_words"]].max(initial=0))
        out[samples] = number | (FIRST_WORD + (samples + 7 * self._step) % (VOCAB - FIRST_WORD))
        if room:
            record = np.full(room, int(np.float32(-1.5).view(np.uint32)), np.int64)
            record[0], record[1] = int(_core.RecordKind.logprobs) << 24 | (room - 1), 1
            record[2::2] = FIRST_WORD + np.arange(len(record[2::2]))
            places = self._records_begin + rows[:, LAYOUT["row.result_offset"]][:, None] + np.arange(room)
            out[places] = number | record
        time.sleep(self._step_s)


def load(config: EngineConfig, step_s: float) -> Backend:
    assert config.max_model_len is not None
    assert config.num_kv_blocks is not None
    info = ModelInfo(
        name=config.model, path=Path(), architecture="MadeUpForCausalLM", dtype="int32", device="simulated device",
        vocab_size=VOCAB, max_model_len=config.max_model_len, eos_token_ids=(), num_parameters=0, weight_bytes=0,
        num_kv_blocks=config.num_kv_blocks, block_size=config.block_size, kv_bytes_per_block=4,
    )  # fmt: skip
    device = _core.SimulatedDevice(vocab_size=2)
    native, settings = _core.CudaDevice.simulated(device), step_loop_config(config, info)
    staging = _core.Staging(native, settings, "mapped")
    graphs = _core.CudaGraphs(native)
    variants = [(int(_core.Need.logprobs), device.add_graph(MadeUp(staging, step_s).run))]
    graphs.add_bucket(config.max_num_seqs, config.max_num_batched_tokens, False, 2**31 - 1, variants)
    graphs.set_copy_blocks(device.add_graph(lambda: None))
    loop = _core.StepLoop.on_cuda(settings, native, staging, graphs, None, 0, 20.0)
    return Backend(info, placeholder_tokenizer(VOCAB), loop, (device, native, staging, graphs))


async def token_us(engine: AsyncEngine, args: argparse.Namespace, kind: dict[str, Any]) -> float:
    """Microseconds of the loop's thread a token. SystemExit where tokens came together: the loop could not follow."""
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True, **kind)

    async def one(row: int) -> int:
        deltas = 0
        async for _ in engine.stream([FIRST_WORD + row] * PROMPT, params):
            deltas += 1
        return deltas

    before = time.thread_time()
    deltas = sum(await asyncio.gather(*map(one, range(args.rows))))
    taken = time.thread_time() - before
    if deltas < 0.95 * args.rows * args.tokens:
        raise SystemExit("tokens came together: raise --step-ms")
    return float(1e6 * taken / (args.rows * args.tokens))


async def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    config = EngineConfig(
        model="made up", max_num_seqs=args.rows, max_num_batched_tokens=PROMPT * args.rows, max_model_len=1024,
        num_kv_blocks=64 * args.rows, late_launch=False, enable_prefix_caching=False,
    )  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in KINDS}
    async with AsyncEngine(config, lambda c: load(c, args.step_ms / 1e3)) as engine:
        for i in range(args.repeats + 1):
            for name, kind in KINDS.items():
                us = await token_us(engine, args, kind)
                taken[name] += [us] if i else []  # the first run warms up
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=160, help="of a row in a run")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", default="bench/results/loop.json")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        taken = runner.run(measure(args))
    figures = [Figure(name, min(values), "us a token") for name, values in taken.items()]
    report.print_figures(f"Event loop's thread, {args.rows} rows (fastest of {args.repeats})", figures)
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    report.write(args.json, report.record("loop", figures, repeats=args.repeats, settings=settings, results=taken))


if __name__ == "__main__":
    main()
