"""Whole engines on the CUDA path: tokens as transformers gives them, whatever the machinery does.

Without a GPU the kernels are interpreted, which takes a second a step: there, models of one layer and few of the cases.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncengine import AsyncEngine, ConfigError, EngineDeadError, SamplingParams, testing
from asyncengine.config import EngineConfig
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.cuda.attention import choose
from asyncengine.kernels.cuda.attention.choose import describe
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.ops import CudaOps, CudaOptions
from asyncengine.kernels.grouped import round_to_groups, unpack
from asyncengine.kernels.ops import KVSpec
from asyncengine.kernels.weight import INT4
from asyncengine.runner.start.calibration import calibrate_device
from asyncengine.runner.state.kv_scales import calibrate_host
from asyncengine.runner.steps import device_steps
from asyncengine.runner.steps.buckets import ANY_CONTEXT, Bucket
from asyncengine.runner.steps.device_steps import DeviceSteps
from asyncengine.runner.steps.model_runner import load_model
from asyncengine.text.tokenizer import placeholder_tokenizer
from tests.amounts import sample_of
from tests.engine.constraints.test_logits_processor import no_neighbours
from tests.engine.test_embeddings import build_classifier
from tests.kernels.simulated_cuda import make_engine
from tests.models import tiny

GPU = torch.cuda.is_available()
SMALL: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_blocks": 24, "max_model_len": 64, "dtype": "float32",
    "step_timeout_s": 600.0,
}  # fmt: skip
PROMPTS = [[5, 9, 2, 7, 7, 1, 30, 2, 17, 40, 41, 42, 3, 3, 8, 11, 12, 19], [5], [100, 3, 77]]
COUNT = 20 if GPU else 3

Jobs = list[tuple[list[int], SamplingParams]]
on_gpu = pytest.mark.skipif(not GPU, reason="takes too many steps without a GPU")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, tuple[Path, Any]] = {}

    def get(variant: str) -> tuple[Path, Any]:
        if variant not in made:
            path = tmp_path_factory.mktemp(variant)
            layer_count = "n_layer" if variant.startswith(("gpt2", "bloom")) else "num_hidden_layers"
            layers: dict[str, Any] = {} if GPU else {layer_count: 1}
            if "layer_types" in tiny.VARIANTS[variant][1] and not GPU:
                layers["layer_types"] = ["sliding_attention"]
            model = tiny.build_model(variant, **layers)
            model.save_pretrained(path)
            placeholder_tokenizer(tiny.VOCAB_SIZE).backend.save(str(path / "tokenizer.json"))
            made[variant] = path, model
        return made[variant]

    return get


def generate(path: Path, jobs: Jobs, *, rounds: int = 1, alone: bool = False, **config: Any) -> tuple[list[Any], Any]:
    """Token ids of every sequence of every job, in the last round, and statistics; checks that nothing leaks."""

    async def main() -> tuple[list[Any], Any]:
        async with make_engine(str(path), **{**SMALL, **config}) as engine:
            async with testing.no_leaks(engine):
                for _ in range(rounds):
                    if alone:
                        outputs = [await engine.generate(prompt, params) for prompt, params in jobs]
                    else:
                        outputs = await asyncio.gather(*(engine.generate(prompt, params) for prompt, params in jobs))
            return [[sequence.token_ids for sequence in output.outputs] for output in outputs], engine.stats()

    return asyncio.run(main())


def greedy(count: int = COUNT) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


def check_tokens(model: Any, prompts: list[list[int]], outputs: list[Any], count: int = COUNT) -> None:
    """Each output is one sequence of ``count`` tokens, those of transformers."""
    assert [len(tokens) for (tokens,) in outputs] == [count] * len(prompts)
    for prompt, (tokens,) in zip(prompts, outputs, strict=True):
        assert list(tokens) == tiny.followers(model, prompt, tokens)


def mixed_jobs() -> Jobs:
    """Prompts that share beginnings, greedy and sampled in every way, several sequences."""
    draw = random.Random(3)
    common = [draw.randrange(tiny.VOCAB_SIZE) for _ in range(33)]
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.7, "top_k": 5, "seed": 8, "n": 2},
        {"temperature": 1.3, "top_p": 0.8, "seed": 9},
        {"temperature": 1.0, "min_p": 0.1, "seed": 10},
    ]
    jobs = []
    for i in range(10 if GPU else 3):
        own = [draw.randrange(tiny.VOCAB_SIZE) for _ in range(draw.randrange(1, 9))]
        prompt = common[: draw.choice((0, 16, 33))] + own
        jobs.append((prompt, SamplingParams(max_tokens=COUNT, ignore_eos=True, **ways[i % len(ways)])))
    return jobs


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "variant",
    tiny.VARIANTS if GPU else ["gpt2", "qwen3-window-biased", "ministral3", "olmo2", "cohere2", "qwen3-moe", "bloom"],
)
def test_tokens_equal_transformers(checkpoint, variant):
    path, model = checkpoint(variant)
    outputs, _ = generate(path, [(prompt, greedy()) for prompt in PROMPTS])
    check_tokens(model, PROMPTS, outputs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", tiny.VARIANTS if GPU else ["gpt2", "llama-odd-heads-biased", "qwen3-window-biased"])
def test_tokens_equal_transformers_with_work_lists(checkpoint, variant, monkeypatch):
    """Decode steps have work lists too, as those of many rows or long ones do."""
    monkeypatch.setattr(choose, "few_keys_context", lambda rows, shape, gpu: 0)
    path, model = checkpoint(variant)
    outputs, _ = generate(path, [(prompt, greedy()) for prompt in PROMPTS])
    check_tokens(model, PROMPTS, outputs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("variant", "config"),
    [
        *itertools.product(["gpt2", "qwen3"], [{}, {"batch_invariant": True}, {"dtype": "bfloat16"}]),
        *itertools.product(["ministral3", "olmo2"], [{}]),
    ]
    if GPU
    else [("gpt2", {}), ("qwen3", {"dtype": "bfloat16"}), ("olmo2", {"batch_invariant": True})],
    ids=str,
)
def test_keys_and_values_in_float8_give_the_cpus_tokens(checkpoint, variant, config):
    """Greedy and sampled, whose blocks are copied. The scales are the same, too, of a step without a cache."""
    path, _ = checkpoint(variant)
    sampled = SamplingParams(max_tokens=COUNT, temperature=0.8, seed=3, n=2, ignore_eos=True)
    jobs: Jobs = [(prompt, greedy() if i else sampled) for i, prompt in enumerate(PROMPTS)]
    config = {**SMALL, "kv_cache_dtype": "fp8", **config}
    outputs, _ = generate(path, jobs, **config)

    async def on_cpu() -> list[Any]:
        async with AsyncEngine.from_pretrained(str(path), device="cpu", **config) as engine:
            done = await asyncio.gather(*(engine.generate(prompt, params) for prompt, params in jobs))
            return [[sequence.token_ids for sequence in output.outputs] for output in done]

    if not GPU or config["dtype"] == "float32":  # whose products are no bfloat16 of the CPU's
        assert outputs == asyncio.run(on_cpu())
    engine_config = EngineConfig(model=str(path), **config)
    device, host = CudaOps(torch.device("cuda" if GPU else "cpu")), CpuOps(1)
    on_device, on_host = load_model(engine_config, device), load_model(engine_config, host)
    scales = calibrate_host(on_host.model, on_host.config, on_host.dtype, on_host.max_model_len, host)
    assert torch.equal(calibrate_device(on_device, device).cpu(), scales)


@pytest.fixture(scope="module")
def as_configured_by_default(checkpoint):
    return generate(checkpoint("qwen3")[0], mixed_jobs(), alone=GPU)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", [{"staging": "pageable"}, {"staging": "mapped", "steps_in_flight": 1}], ids=str)
def test_staging_and_depth_change_nothing(checkpoint, as_configured_by_default, config):
    """Bit for bit: the same kernels run on the same numbers in the same order of rows."""
    path, _ = checkpoint("qwen3")
    assert generate(path, mixed_jobs(), alone=GPU, **config)[0] == as_configured_by_default


@on_gpu
@pytest.mark.parametrize(
    "config",
    [
        {"enforce_eager": True},
        {"enforce_eager": True, "steps_in_flight": 1},
        {"steps_in_flight": 3, "staging": "mapped"},
        {"step_driver": "loop"},
        {"batch_invariant": True},
        {"enable_prefix_caching": False},
        {"prefill_chunk_size": 3},
        {"max_num_seqs": 2, "max_num_batched_tokens": 8},
    ],
    ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()),
)
def test_outputs_do_not_depend_on_the_machinery(checkpoint, config):
    path, _ = checkpoint("qwen3")
    assert generate(path, mixed_jobs(), **config)[0] == generate(path, mixed_jobs(), alone=True)[0]


FEATURES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "logprobs": 3},
    {"logit_bias": {5: 4.0, 9: 4.0}, "no_repeat_ngram_size": 1, "temperature": 1.0, "seed": 4},
    {"allowed_token_ids": [4, 9, 31, 60], "logprobs": 2, "logprobs_mode": "processed_logprobs"},
    {"logits_processor": no_neighbours, "repetition_penalty": 1.5, "logprobs": 3},
    {},
]


def test_features_give_the_cpus_tokens(checkpoint):
    """Features give the CPU's tokens and log probabilities, beside a row that asks for nothing."""
    path, _ = checkpoint("qwen3")
    base = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True}
    jobs = [(PROMPTS[i % 3], SamplingParams(**base | feature)) for i, feature in enumerate(FEATURES)]

    async def run(engine: AsyncEngine) -> list[Any]:
        async with engine:
            return await asyncio.gather(*(engine.generate(prompt, params) for prompt, params in jobs))

    ours = asyncio.run(run(make_engine(str(path), **SMALL)))
    theirs = asyncio.run(run(AsyncEngine.from_pretrained(str(path), device="cpu", progress=False, **SMALL)))
    assert [output.token_ids for output in ours] == [output.token_ids for output in theirs]
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip(one.outputs[0].logprobs or (), other.outputs[0].logprobs or (), strict=True):
            assert a.rank == b.rank
            assert [v.token_id for v in a.top] == [v.token_id for v in b.top]
            assert [v.logprob for v in a.top] == pytest.approx([v.logprob for v in b.top], abs=1e-4)
    assert [output.outputs[0].logprobs is not None for output in ours] == ["logprobs" in f for f in FEATURES]


@on_gpu
def test_prefix_hits_change_nothing(checkpoint):
    path, _ = checkpoint("llama")
    once, _ = generate(path, mixed_jobs())
    twice, stats = generate(path, mixed_jobs(), rounds=2)
    assert stats.prefix_cache_hits > 0
    assert once == twice


def test_float8_weights(checkpoint):
    """The same tokens again, in other company: a row is quantised by itself."""
    path, _ = checkpoint("qwen3")
    config = {"quantization": "fp8", "dtype": "bfloat16", "batch_invariant": GPU}
    count = sample_of(COUNT, 2)
    jobs = [(prompt, greedy(count)) for prompt in (PROMPTS if GPU else PROMPTS[1:])]
    outputs, _ = generate(path, jobs, **config)
    assert [len(tokens) for (tokens,) in outputs] == [count] * len(jobs)
    assert generate(path, jobs, alone=True, **config)[0] == outputs


def test_weights_in_codes(checkpoint):
    """The tokens of transformers with the rounded weights."""
    path, model = checkpoint("qwen3")
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                weight.copy_(unpack(round_to_groups(INT4, weight)))
    prompts = PROMPTS if GPU else PROMPTS[1:]
    outputs, _ = generate(path, [(prompt, greedy()) for prompt in prompts], quantization="int4")
    check_tokens(model, prompts, outputs)


@pytest.mark.parametrize(
    ("variant", "dtype", "message"),
    [("gpt2", "bfloat16", "not implemented for GPT2LMHeadModel"), ("qwen3", "auto", "needs dtype=bfloat16, and not")],
)
def test_what_cannot_have_float8_weights(checkpoint, variant, dtype, message):
    path, _ = checkpoint(variant)
    with pytest.raises(ConfigError, match=message):
        generate(path, [(PROMPTS[1], greedy())], quantization="fp8", dtype=dtype)


def test_preemption_changes_nothing(checkpoint):
    """The blocks do not do for all: sequences give theirs back and are computed again."""
    path, model = checkpoint("llama-odd-heads-biased")
    prompts, count = [[5] * 29, [6] * 10], 5
    outputs, stats = generate(path, [(prompt, greedy(count)) for prompt in prompts], num_kv_blocks=3, max_model_len=40)
    assert stats.num_preemptions > 0
    check_tokens(model, prompts, outputs, count)


def test_stop_tokens_end_a_sequence_on_the_device_too(checkpoint):
    """The row of a step under way is inert by then; what shares the batch goes on undisturbed."""
    path, model = checkpoint("gpt2")
    expected = [tiny.generate(model, prompt, COUNT) for prompt in PROMPTS]
    stop = expected[0][1]
    jobs = [(PROMPTS[0], SamplingParams(max_tokens=COUNT, temperature=0, stop_token_ids=[stop]))]
    jobs += [(prompt, greedy()) for prompt in PROMPTS[1:]]
    outputs, _ = generate(path, jobs, rounds=1 if not GPU else 3)
    first = expected[0].index(stop)
    assert outputs == [[tuple(expected[0][: first + 1])], *([tuple(e)] for e in expected[1:])]


@pytest.mark.skipif(GPU, reason="a GPU has faults of its own")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_step_that_fails_is_an_error_and_the_last_step(checkpoint, monkeypatch):
    """The step fails as by a kernel that faults: no step behind it reads memory that it did not write."""
    runs = []

    def fail(steps: DeviceSteps, bucket: Bucket, needs: int) -> None:
        runs.append(bucket)
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(DeviceSteps, "run", fail)
    path, _ = checkpoint("gpt2")

    async def main() -> None:
        async with make_engine(str(path), **SMALL) as engine:
            jobs = (engine.generate(prompt, greedy()) for prompt in PROMPTS)
            outputs = await asyncio.gather(*jobs, return_exceptions=True)
        assert [type(output) for output in outputs] == [EngineDeadError] * len(PROMPTS)
        assert "illegal memory access" in str(outputs[0])

    asyncio.run(main())
    assert len(runs) == 1


@pytest.mark.parametrize("tma", [True, False])
def test_which_steps_have_no_work_list(tma):
    """Steps of few keys have no work list; with kernels that use the accelerator only those of a lone row whose heads
    share no keys."""
    ops = CudaOps(torch.device("cpu"), CudaOptions(gpu=replace(H200, tma=tma)))
    config = EngineConfig(model="", dtype="bfloat16", max_num_seqs=40, max_num_batched_tokens=64)
    for shape, expected in (
        ((16, 8, 128), [] if tma else [1, 2, 4, 8, 16, 24, 32]),
        ((12, 12, 64), [1] if tma else [1, 2, 4, 8, 16, 24, 32, 40]),
    ):
        model = SimpleNamespace(
            num_heads=shape[0],
            kv_specs=[KVSpec(*shape[1:])],
            score_softcap=0.0,
            attention_sinks=False,
            norms_values=False,
            layer_caches=(),
        )
        loaded = SimpleNamespace(config=model, dtype=torch.bfloat16, max_model_len=1 << 20)
        buckets = [b for b in device_steps.step_buckets(config, loaded, ops) if b.single_token_rows]
        assert [b.max_rows for b in buckets if b.max_context < ANY_CONTEXT] == expected
        assert [b.max_rows for b in buckets if b.max_context == ANY_CONTEXT] == [1, 2, 4, 8, 16, 24, 32, 40]


def test_short_contexts_of_many_rows_have_buckets_without_late_teams():
    ops = CudaOps(torch.device("cpu"), CudaOptions(gpu=H200))
    config = EngineConfig(model="", dtype="bfloat16", max_num_seqs=256, max_num_batched_tokens=256)
    plain = {"score_softcap": 0.0, "attention_sinks": False, "norms_values": False, "layer_caches": ()}
    model = SimpleNamespace(num_heads=12, kv_specs=[KVSpec(12, 64)], **plain)
    loaded = SimpleNamespace(config=model, dtype=torch.bfloat16, max_model_len=1024)
    buckets = [b for b in device_steps.step_buckets(config, loaded, ops) if b.single_token_rows and b.max_rows > 1]
    [kind] = device_steps.attention_kinds(model, torch.bfloat16)
    limits = device_steps.attention_limits(config, 1024)
    cuts = {b: describe(b, kind, H200, limits).cut for b in buckets}
    late = [(b.max_rows, b.max_context) for b, cut in cuts.items() if cut.kind == "late"]
    short = [(b.max_rows, b.max_context) for b in buckets if b.max_context < ANY_CONTEXT]
    assert late == [(rows, ANY_CONTEXT) for rows in (160, 192, 224, 256)]
    assert short == [(160, 192), (192, 192), (224, 128), (256, 128)]


def test_vectors_are_the_cpus(checkpoint):
    """Vectors equal the CPU's for prompts that come in chunks, beside a row that generates."""
    path, _ = checkpoint("qwen3")

    async def run(engine: AsyncEngine) -> list[Any]:
        async with engine:
            generated = asyncio.ensure_future(engine.generate(PROMPTS[1], greedy(2)))
            vectors = [(await engine.embed(PROMPTS, pooling=pooling)).vectors for pooling in ("mean", "last")]
            return [*vectors, (await generated).token_ids]

    small = SMALL | {"prefill_chunk_size": 7}
    ours = asyncio.run(run(make_engine(str(path), **small)))
    theirs = asyncio.run(run(AsyncEngine.from_pretrained(str(path), device="cpu", progress=False, **small)))
    assert ours[2] == theirs[2]
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


def test_classes_are_the_cpus(tmp_path):
    build_classifier("qwen3", num_hidden_layers=1, num_labels=3).save_pretrained(tmp_path)
    small = SMALL | {"skip_tokenizer_init": True}

    async def run(engine: AsyncEngine) -> Any:
        async with engine:
            return (await engine.classify(PROMPTS)).logits

    ours = asyncio.run(run(make_engine(str(tmp_path), **small)))
    theirs = asyncio.run(run(AsyncEngine.from_pretrained(str(tmp_path), device="cpu", progress=False, **small)))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chunk", [1, 3])
def test_scores_of_prompts_are_the_cpus(checkpoint, chunk):
    """Scores are the same in steps of as many rows as tokens, where a row may have several samples all the same."""
    path, _ = checkpoint("qwen3")
    given = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=2)
    small = SMALL | {"prefill_chunk_size": chunk}

    async def run(engine: AsyncEngine) -> list[Any]:
        async with engine:
            jobs = [(prompt, given) for prompt in ([5, 9, 2, 7], [100, 3, 77])] + [(PROMPTS[1], greedy(2))]
            return await asyncio.gather(*(engine.generate(prompt, params) for prompt, params in jobs))

    ours = asyncio.run(run(make_engine(str(path), **small)))
    theirs = asyncio.run(run(AsyncEngine.from_pretrained(str(path), device="cpu", progress=False, **small)))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.token_ids == other.token_ids
        for a, b in zip(mine.prompt_logprobs or (), other.prompt_logprobs or (), strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert (a.token_id, a.rank) == (b.token_id, b.rank)
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_blocks_that_come_back_from_the_host_are_the_same(checkpoint):
    """Blocks are gathered, copied out, evicted, copied in and scattered: each prompt comes again after the others."""
    path, _ = checkpoint("llama")
    jobs = [([5 + i, *range(3, 36)], greedy(2)) for i in range(3)]
    few = {"num_kv_blocks": 6, "host_kv_memory_bytes": 1 << 20, "max_model_len": 64}
    roomy, _ = generate(path, jobs, alone=True)
    outputs, stats = generate(path, jobs, rounds=2, alone=True, **few)
    assert outputs == roomy
    assert stats.blocks_to_host > 0
    assert stats.blocks_from_host > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("variant", "config"),
    [
        ("llama", {"hybrid_form": "workers"}),
        ("qwen3-window-biased", {"batch_invariant": True, "hybrid_form": "link"}),
        ("llama", {"kv_cache_dtype": "fp8"}),
    ],
    ids=str,
)
def test_rows_that_decode_on_the_host_get_the_same_tokens(checkpoint, variant, config):
    """There is no room for all, so that some go on with their keys and values on the host, whoever attends there."""
    path, model = checkpoint(variant)
    prompts, count = [[5 + i, *range(3, 18 + i)] for i in range(3)], 14 if GPU else 10
    pressed = SMALL | {"num_kv_blocks": 4, "hybrid_attention": "always", "hybrid_workers": 1, "hybrid_lanes": 2}

    async def main() -> tuple[list[Any], Any]:
        async with make_engine(str(path), **pressed, host_kv_memory_bytes=1 << 20, **config) as engine:
            async with testing.no_leaks(engine):
                outputs = await asyncio.gather(*(engine.generate(prompt, greedy(count)) for prompt in prompts))
            assert engine._life.backend is not None
            return [output.token_ids for output in outputs], engine._life.backend.step_loop.stats()

    outputs, stats = asyncio.run(main())
    assert stats["moved_to_host"] > 0
    assert stats["failed_host_rows"] == 0
    if "kv_cache_dtype" in config:
        roomy, _ = generate(path, [(prompt, greedy(count)) for prompt in prompts], **config)
        assert [(tokens,) for tokens in outputs] == [tuple(tokens) for tokens in roomy]
    else:
        check_tokens(model, prompts, [[tokens] for tokens in outputs], count)
