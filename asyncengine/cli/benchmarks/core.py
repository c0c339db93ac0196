"""Benchmark of the C++ core's cost per step, without a model: scheduler, packer, commit and prefix index."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncengine.cli import flags
from asyncengine.cli.benchmarks.lengths import check_counts
from asyncengine.cli.benchmarks.report import Figure, median, print_figures, record

HELP = "microseconds of scheduling, packing and committing a decode step, and of a prefix match"

_BLOCK_SIZE = 16
_PROMPT_LEN = 128
_MATCH_TOKENS = 8192
_MATCH_PROMPTS = 32
_PLAIN, _LOGPROBS = "", " with log probabilities"
_RECORD_WORDS = 4  # a header, the rank, the token and its log probability


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of ``asyncengine bench core``. Wrong values raise ConfigError."""

    num_seqs: Sequence[int] = (64, 256, 1024, 2048, 4096)
    """Sequences that decode at the same time."""
    steps: int = 16
    """Decode steps per repeat; 16 fill one block of every sequence."""
    repeats: int = 100

    def __post_init__(self) -> None:
        for num_seqs in self.num_seqs:
            check_counts(num_seqs=num_seqs)
        check_counts(steps=self.steps, repeats=self.repeats)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    flags.add_dataclass(parser, Options, "measurement")


def run(args: argparse.Namespace) -> dict[str, Any]:
    options = Options(**flags.values(args, Options))
    # Rounds over all sizes, so that a busy spell of the machine does not fall on one of them alone.
    steps = 2 * options.steps * (options.repeats + 1)
    sizes = sorted(options.num_seqs)
    harnesses = {(n, wants): _decoding(n, steps, wants) for n in sizes for wants in (_PLAIN, _LOGPROBS)}
    times: dict[tuple[int, str], list[float]] = {key: [] for key in harnesses}
    matches: list[float] = []
    matcher = _PrefixMatch()
    for _ in range(options.repeats):
        for key, harness in harnesses.items():
            harness.time_steps(options.steps)  # a steady decode: the other sizes have emptied the caches
            times[key].append(harness.time_steps(options.steps) / 1000)
        matches.append(matcher.time())

    figures = [
        Figure(f"decode step, {n} sequences{wants}", median(values), "µs") for (n, wants), values in times.items()
    ]
    # Fastest of the repeats: what the working set costs, rather than what the neighbours take of the shared cache.
    if growth := _growth({n: min(times[n, _PLAIN]) for n in sizes}):
        figures.append(growth)
    figures.append(Figure(f"prefix match, {_MATCH_TOKENS} tokens", median(matches), "µs"))
    print_figures("Core (schedule + pack + commit; medians)", figures)
    return record(
        "core",
        figures,
        repeats=options.repeats,
        settings={"steps per repeat": options.steps, "prompt tokens": _PROMPT_LEN, "block_size": _BLOCK_SIZE},
        samples={
            "decode step µs": {f"{n}{wants}": values for (n, wants), values in times.items()},
            "prefix match µs": matches,
        },
    )


def _growth(steps: dict[int, float]) -> Figure | None:
    """Cost per sequence at the largest size over that at 256: above 1, cost grows faster than linearly."""
    base, top = 256, max(steps)
    if base not in steps or top <= base:
        return None
    ratio = (steps[top] / top) / (steps[base] / base)
    return Figure(f"cost per sequence, {top} over {base}", ratio, "x")


def _decoding(num_seqs: int, steps: int, wants: str) -> Any:
    """A scheduler with ``num_seqs`` sequences that decode for ``steps`` steps and more.

    ``wants`` is _PLAIN, or _LOGPROBS for sequences whose every token comes with a record of its log probability.
    """
    from asyncengine._core import Need, RequestExtras, RequestSpec, SchedulerConfig, SchedulerHarness

    prefill_steps = (_PROMPT_LEN + _BLOCK_SIZE) * num_seqs // max(2048, num_seqs) + 2
    # Decode rows go first, so all the time that the others prefill, the first sequences decode.
    max_tokens = steps + 2 * prefill_steps
    max_len = _PROMPT_LEN + _BLOCK_SIZE + max_tokens
    extras = RequestExtras()
    if wants == _LOGPROBS:
        extras = RequestExtras(needs=Need.logprobs, result_words=_RECORD_WORDS)
    harness = SchedulerHarness(
        SchedulerConfig(
            num_blocks=num_seqs * (-(-max_len // _BLOCK_SIZE) + 1),
            block_size=_BLOCK_SIZE,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=2 * max(2048, num_seqs),
            prefill_chunk_size=512,
            max_model_len=max_len,
            prefix_caching=True,
        ),
        steps_in_flight=1,
    )
    for i in range(num_seqs):
        # Lengths differ, so that each step some sequence fills a block: one in sixteen does.
        prompt = [1000 + i, *range(_PROMPT_LEN - 1 + i % _BLOCK_SIZE)]
        harness.add(RequestSpec(id=i, prompt=prompt, max_tokens=max_tokens, stop_tokens=[0], extras=extras), order=i)
    harness.time_steps(2 * prefill_steps)
    return harness


class _PrefixMatch:
    """An index full of long prompts, looked up in turn: none is in the processor's nearest cache."""

    def __init__(self) -> None:
        from asyncengine._core import BlockManager

        blocks = _MATCH_TOKENS // _BLOCK_SIZE
        self._manager = BlockManager(_MATCH_PROMPTS * blocks, _BLOCK_SIZE, True)
        self._prompts = [[p, *range(_MATCH_TOKENS - 1)] for p in range(_MATCH_PROMPTS)]
        for prompt in self._prompts:
            chain = self._manager.root_chain(0)
            for start in range(0, _MATCH_TOKENS, _BLOCK_SIZE):
                chain = self._manager.publish(self._manager.allocate(), chain, prompt[start : start + _BLOCK_SIZE])
            assert len(self._manager.match_prefix(prompt, 0)) == blocks

    def time(self) -> float:
        """Median microseconds per match."""
        return median([self._time_one(prompt) for prompt in self._prompts])

    def _time_one(self, prompt: Sequence[int]) -> float:
        return float(self._manager.time_match_prefix(prompt, 1)) / 1000
