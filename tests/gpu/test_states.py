"""Layers with a state on a GPU: the kernels at real sizes, and whole engines of small models of each family."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine import SamplingParams, testing
from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.ops import CudaOps, CudaOptions
from asyncengine.kernels.cuda.trials import examine
from asyncengine.kernels.states import ShortConv
from tests.gpu.test_no_hidden_sync import check_that_launches_never_wait, sync_is_an_error
from tests.kernels.simulated_cuda import make_engine
from tests.kernels.test_mixers import drawn, make_delta, make_mamba
from tests.kernels.test_recurrent import Rows, Run
from tests.models import tiny
from tests.models.state_spaces import STATE_SPACES
from tests.runner.stateful_engines import (
    HOST_STATES,
    SIZES,
    check_same,
    greedy,
    mixed_jobs,
    on_cpu,
    run,
    saving,
    visit_host,
)

FAMILIES = ["lfm2", "lfm2-biased", "lfm2-moe", "lfm2-moe-plain", *STATE_SPACES]
KINDS = ["lfm2", "mamba2", "falcon-h1", "qwen3-next"]
"""A model of each kind of state: a convolution, Mamba-2 alone, Mamba-2 beside attention, gated DeltaNet."""
JOBS = mixed_jobs(10, (3, 16, 17, 33, 80), 80)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    return saving(tmp_path_factory)


@pytest.fixture(scope="module")
def expected(saved):
    """Greedy tokens of the CPU, and sampled ones of the GPU alone: a number drawn may lie between two tokens."""
    made: dict[str, Any] = {}

    def get(variant: str) -> Any:
        if variant not in made:
            both = [run(make, saved(variant)[0], JOBS, alone=True)[0] for make in (on_cpu, make_engine)]
            made[variant] = [
                on_gpu if params.temperature else exact for exact, on_gpu, (_, params) in zip(*both, JOBS, strict=True)
            ]
        return made[variant]

    return get


def of_the_cpu(path: Path, prompt: list[int], count: int) -> list[int]:
    """The CPU's greedy tokens, which are those of transformers in the version that the project is tested with."""
    [[tokens]], _ = run(on_cpu, path, [(prompt, greedy(count))])
    return tokens


# ---- kernels ----

REAL_LAYERS = {
    "a convolution as of LFM2-1.2B": lambda: ShortConv(drawn(3, 2048)),
    "DeltaNet as of Qwen3-Next": lambda: make_delta(32, 128, 128, 16, False),
    "DeltaNet as of Qwen3-Next, states in bfloat16": lambda: make_delta(32, 128, 128, 16, True),
    "Mamba-2 as of Mamba-Codestral": lambda: make_mamba(128, 64, 128, 8, False),
    "Mamba-2 as of Falcon-H1": lambda: make_mamba(24, 64, 256, 1, False, norm=None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", REAL_LAYERS)
def test_layers_of_real_sizes_equal_the_plain_recurrence(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    run_, tolerance = Run(REAL_LAYERS[name](), torch.device("cuda")), 1e-3 if dtype == torch.float32 else 4e-2
    card = replace(examine(run_.device), multiprocessors=32)  # for which three rows are many
    run_.ops = CudaOps(run_.device, CudaOptions(pdl=True, gpu=card))
    if "bfloat16" in name:
        tolerance = max(tolerance, 2e-2)
    steps: list[tuple[Rows, bool]] = [
        ([(2, 1, 0), (0, 2, 0), (3, 150, 0)], False),
        ([(3, 1, 150), (2, 1, 1), (0, 67, 2)], False),
        ([(0, 1, 69), (2, 1, 2), (3, 1, 151)], True),
        ([(1, 1, 0), (3, 1, 152)], True),
    ]
    for i, (rows, single) in enumerate(steps):
        x = drawn(sum(length for _, length, _ in rows), run_.width).to(dtype)
        y, wanted = run_.step(x, rows, single=single)
        error = (y.float() - wanted.float()).abs() / (1 + wanted.float().abs())
        assert float(error.max()) <= tolerance, f"{name}, step {i}: error {float(error.max()):.3g}"
    run_.check_states([0, 1, 2, 3], 2e-3 if dtype == torch.float32 else 2e-2)  # of long rows in bfloat16 in tf32


# ---- engines ----


@pytest.mark.parametrize("variant", FAMILIES)
def test_tokens_equal_those_of_the_cpu(saved, variant):
    path, _ = saved(variant)
    prompts = [[5, 9, 2, 7, 7, 1, 30, 2, 17, 40, 41, 42, 3, 3, 8, 11, 12, 19], [5], [100, 3, 77], [9] * 90]
    outputs, _ = run(make_engine, path, [(prompt, greedy(20)) for prompt in prompts])
    for prompt, [tokens] in zip(prompts, outputs, strict=True):
        assert tokens == of_the_cpu(path, prompt, 20), f"{variant}, a prompt of {len(prompt)} tokens"


MACHINERY: dict[str, dict[str, Any]] = {
    "as a rule": {},
    "alone": {"alone": True},
    "without graphs": {"enforce_eager": True},
    "serial": {"steps_in_flight": 1},
    "chunks of one": {"prefill_chunk_size": 1},
    "chunks of seven": {"prefill_chunk_size": 7},
    "little room": {"num_kv_blocks": 12},
    "little room, a host tier": {"num_kv_blocks": 12, "host_kv_memory_bytes": 1 << 22},
    "a second round, with hits": {"rounds": 2},
    "snapshots within prompts": {"state_snapshot_tokens": 16, "rounds": 2},
    "no prefix cache": {"enable_prefix_caching": False},
    "batch invariant": {"batch_invariant": True},
    "mapped": {"staging": "mapped"},
    "pageable": {"staging": "pageable"},
}


@pytest.mark.parametrize("name", MACHINERY)
@pytest.mark.parametrize("variant", KINDS)
def test_outputs_equal_those_of_the_cpu(saved, expected, variant, name):
    """Greedy and sampled, one sequence and three, over slots that hold what others left."""
    outputs, stats = run(make_engine, saved(variant)[0], JOBS, **MACHINERY[name])
    check_same(outputs, expected(variant), JOBS, (variant, name))
    if name == "little room":
        assert stats["num_preemptions"] > 0, "the case must preempt"
    if name not in ("no prefix cache", "little room", "little room, a host tier"):
        assert stats["cached_snapshots"] > 0, "the case must take snapshots"


@pytest.mark.parametrize("variant", KINDS)
def test_a_prompt_goes_on_from_a_snapshot(saved, variant):
    path, _ = saved(variant)
    prompt = [7 * i % tiny.VOCAB_SIZE for i in range(75)]

    async def main() -> tuple[list[int], list[int]]:
        async with make_engine(str(path), **SIZES) as engine, testing.no_leaks(engine):
            first = await engine.generate(prompt, greedy(20, n=2))
            longer = [*prompt, *first.token_ids, 4]
            second = await engine.generate(longer, greedy(20))
            assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 64)
            return longer, list(second.token_ids)

    longer, tokens = asyncio.run(main())
    assert tokens == of_the_cpu(path, longer, 20)


@pytest.mark.parametrize("blocks", [64, 9], ids=["blocks stay", "blocks leave"])
@pytest.mark.parametrize("variant", KINDS)
def test_an_evicted_state_comes_back_from_the_host(saved, variant, blocks):
    """With its blocks, which of a model that has states alone hold nothing."""
    path, _ = saved(variant)

    async def main() -> tuple[list[int], list[int], list[int]]:
        sizes = {**SIZES, **HOST_STATES, "num_kv_blocks": blocks, "max_model_len": 128}
        async with make_engine(str(path), **sizes) as engine, testing.no_leaks(engine):
            assert engine.model_info.num_host_states >= 4, "no states are pinned on the host"
            found = await visit_host(engine, 75, 20)
            assert (engine.stats().blocks_from_host > 0) == (blocks == 9)
            return found

    prompt, first, again = asyncio.run(main())
    wanted = of_the_cpu(path, prompt, 20)
    assert first == wanted, f"{variant}: before anything moved"
    assert again == wanted, f"{variant}: behind the state that came back"


@pytest.mark.parametrize("variant", KINDS)
def test_a_preempted_sequence_goes_on_where_it_was(saved, variant):
    """The state and all blocks come back, the last one with what it has: no token is computed twice."""
    path, _ = saved(variant)
    jobs = [([(7 * i + j) % tiny.VOCAB_SIZE for i in range(40 + 3 * j)], greedy(70)) for j in range(4)]
    expected, _ = run(on_cpu, path, jobs, alone=True)
    outputs, stats = run(make_engine, path, jobs, num_kv_blocks=18, host_kv_memory_bytes=1 << 24)
    check_same(outputs, expected, jobs, variant)
    assert stats["num_preemptions"] > 0, "the case must preempt"
    assert stats["kept_states"] > 0, f"{variant}: no state was kept of {stats['num_preemptions']} that gave way"
    assert stats["resumed_states"] > 0, f"{variant}: none of {stats['kept_states']} states was gone on with"
    assert stats["failed_transfers"] == 0


@pytest.mark.parametrize("variant", KINDS)
def test_aborted_sequences_leave_nothing(saved, variant):
    path, _ = saved(variant)
    prompt = [2 * i % tiny.VOCAB_SIZE for i in range(100)]

    async def main() -> list[int]:
        async with make_engine(str(path), **SIZES) as engine, testing.no_leaks(engine):
            tasks = [asyncio.create_task(engine.generate([i, *prompt], greedy(60, n=2))) for i in range(8)]
            for task in tasks:
                await asyncio.sleep(0.005)
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await testing.settle(engine)
            return list((await engine.generate(prompt, greedy(10))).token_ids)

    assert asyncio.run(main()) == of_the_cpu(path, prompt, 10)


@pytest.mark.parametrize("half_states", [False, True], ids=["float32 states", "bfloat16 states"])
@pytest.mark.parametrize("variant", ["lfm2", "mamba2", "falcon-h1", "qwen3.5"])
def test_logits_in_bfloat16_are_near_those_in_float32(saved, variant, half_states):
    """The log probabilities of some tokens behind prompts, to within a sixth of their spread. No family of a mixture
    is among them: rounding may choose another expert."""
    if half_states and variant == "lfm2":
        pytest.skip("has no recurrence")
    path, _ = saved(variant)
    named = tuple(range(3, 190, 7))
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprob_token_ids=named)
    prompts = [[(5 + 3 * i) % tiny.VOCAB_SIZE for i in range(length)] for length in (1, 20, 77)]

    async def measure(make: Any, **config: Any) -> torch.Tensor:
        async with make(str(path), **{**SIZES, **config}) as engine:
            outputs = [await engine.generate(prompt, params) for prompt in prompts]
        return torch.tensor([_logprobs(output, named) for output in outputs])

    states = {"state_dtype": "bfloat16"} if half_states else {}
    exact, rounded = asyncio.run(measure(on_cpu)), asyncio.run(measure(make_engine, dtype="bfloat16", **states))
    error, spread = (rounded - exact).abs().max(1).values, exact.std(1)
    assert (error <= spread / 6).all(), f"{variant}: errors {error.tolist()}, spreads {spread.tolist()}"


def _logprobs(output: Any, named: tuple[int, ...]) -> list[float]:
    values = {one.token_id: one.logprob for one in output.outputs[0].logprobs[0].named}
    return [values[token] for token in named]


@pytest.mark.alone
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("variant", KINDS)
def test_launching_never_waits(saved, variant, eager):
    config = EngineConfig(
        model=str(saved(variant)[0]), dtype="float32", device="cuda", max_num_seqs=8, max_num_batched_tokens=48,
        num_kv_blocks=9, max_model_len=96, enforce_eager=eager,
    )  # fmt: skip
    check_that_launches_never_wait(config, "num_preemptions")


@pytest.mark.alone
@pytest.mark.parametrize("variant", KINDS)
def test_torch_sees_no_synchronization(saved, variant):
    async def main() -> None:
        async with make_engine(str(saved(variant)[0]), **SIZES, enforce_eager=True) as engine:
            with sync_is_an_error():
                done = await asyncio.gather(*(engine.generate(*job) for job in JOBS), return_exceptions=True)
        assert not [d for d in done if isinstance(d, Exception)]

    asyncio.run(main())


def test_kernels_leave_other_slots_alone():
    """Steps of one sequence change its state, and no byte of the others'."""
    layer = make_delta(4, 64, 64, 2, False)
    run_ = Run(layer, torch.device("cuda"))
    run_.step(drawn(40, run_.width), [(2, 40, 0)])
    run_.step(drawn(1, run_.width), [(2, 1, 40)], single=True)
    assert (run_.states.states[[0, 1, 3]] == 255).all()
    assert not torch.isnan(run_.states.states[2].view(torch.float32)).any()
