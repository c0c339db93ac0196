"""Requests whose right answers are known, for a simulated engine."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from asyncengine import RequestDelta, RequestOutput, SamplingParams
from asyncengine.api.outputs import FinishReason
from asyncengine.testing import EOS_TOKEN_ID, SimulatedEngine

BOTH_LOOPS = ["asyncio", "uvloop"]
CANARY = list(range(300, 340))
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    params: SamplingParams


def random_jobs(count: int, seed: int, longest_prompt: int = 70, longest_output: int = 40) -> list[Job]:
    """Families of prompts that share prefixes; greedy and seeded; several sequences; stop tokens."""
    rng = random.Random(seed)
    jobs = []
    for _ in range(count):
        family, length = rng.randrange(3), rng.randint(1, longest_prompt)
        prompt = [300 + family * 7 + i for i in range(length)]
        if rng.random() < 0.5:
            prompt[-1] = rng.randrange(1024)
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 3]),
            max_tokens=rng.randint(1, longest_output),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(2**40),
            stop_token_ids=rng.sample(range(257, 1024), 20) if rng.random() < 0.5 else (),
            ignore_eos=rng.random() < 0.5,
        )
        jobs.append(Job(prompt, params))
    return jobs


def check_output(engine: SimulatedEngine, job: Job, output: RequestOutput) -> None:
    """Tokens, text, reasons and counts of a job without stop strings."""
    stops = {*job.params.stop_token_ids, *(() if job.params.ignore_eos else (EOS_TOKEN_ID,))}
    assert len(output.outputs) == job.params.n
    for i, sequence in enumerate(output.outputs):
        assert sequence.index == i
        expected = engine.expected_token_ids(job.prompt, job.params, i)
        assert list(sequence.token_ids) == expected
        stopped = expected[-1] in stops
        assert sequence.text == engine.tokenizer.decode(expected[:-1] if stopped else expected)
        assert sequence.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
        by_request = stopped and expected[-1] in job.params.stop_token_ids
        assert sequence.stop_reason == (expected[-1] if by_request else None)
    assert output.usage.prompt_tokens == len(job.prompt)
    assert output.usage.completion_tokens == sum(len(s.token_ids) for s in output.outputs)
    assert 0 <= output.usage.cached_tokens < len(job.prompt)
    timing = output.timing
    assert timing.arrived <= timing.scheduled <= timing.first_token <= timing.finished


async def check_jobs(engine: SimulatedEngine, jobs: list[Job]) -> None:
    """Run all jobs at once, and check each output."""
    outputs = await asyncio.gather(*(engine.generate(job.prompt, job.params) for job in jobs))
    for job, output in zip(jobs, outputs, strict=True):
        check_output(engine, job, output)


async def check_canary(engine: SimulatedEngine) -> None:
    """A request that is right shows that the engine still works."""
    job = Job(CANARY, SamplingParams(max_tokens=20, temperature=0.0))
    async with asyncio.timeout(30):
        check_output(engine, job, await engine.generate(job.prompt, job.params))


def join(deltas: list[RequestDelta], index: int = 0) -> tuple[str, list[int]]:
    """Text and tokens of one sequence of a stream."""
    mine = [d for d in deltas if d.index == index]
    return "".join(d.text for d in mine), [t for d in mine for t in d.token_ids]


def run_script(code: str, *arguments: str) -> str:
    """Run a script and return its output. The script must end well, and without a word about errors."""
    done = subprocess.run(
        [sys.executable, *arguments, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert "Fatal" not in done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout
