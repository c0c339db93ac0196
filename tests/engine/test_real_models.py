"""Real forward passes through the whole engine: right, and the same whatever the machinery does."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncengine import (
    AsyncEngine,
    AsyncEngineError,
    InvalidRequestError,
    KVCapacityError,
    ModelNotFoundError,
    RequestOutput,
    SamplingParams,
    testing,
)
from asyncengine.text.tokenizer import placeholder_tokenizer
from tests.models import tiny

from .support import run_script

COUNT = 24
LONGEST_PROMPT = 40

Job = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    """Directory of a variant's checkpoint, made when first asked for, and the transformers model of it."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(variant: str) -> tuple[Path, Any]:
        if variant not in made:
            path = tmp_path_factory.mktemp(variant)
            model = tiny.build_model(variant)
            model.save_pretrained(path)
            placeholder_tokenizer(tiny.VOCAB_SIZE).backend.save(str(path / "tokenizer.json"))
            made[variant] = path, model
        return made[variant]

    return get


def run(path: Path, jobs: Sequence[Job], *, alone: bool = False, rounds: int = 1, **config: Any) -> list[Any]:
    """Token ids of every sequence of every job, all at once or one after the other; checks that nothing leaks."""
    settings = {"cpu_threads": 2, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_kv_blocks": 96, **config}

    async def main() -> tuple[list[Any], Any]:
        async with AsyncEngine.from_pretrained(str(path), **settings) as engine:
            async with testing.no_leaks(engine):
                for _ in range(rounds):
                    if alone:
                        outputs = [await engine.generate(prompt, params) for prompt, params in jobs]
                    else:
                        outputs = await asyncio.gather(*(engine.generate(prompt, params) for prompt, params in jobs))
            return [tokens_of(output) for output in outputs], engine.stats()

    return list(asyncio.run(main()))


def tokens_of(output: RequestOutput) -> list[tuple[int, ...]]:
    return [sequence.token_ids for sequence in output.outputs]


def mixed_jobs(seed: int = 0) -> list[Job]:
    """Prompts that share beginnings, greedy and sampled in every way."""
    draw = random.Random(seed)
    common = [draw.randrange(tiny.VOCAB_SIZE) for _ in range(LONGEST_PROMPT)]
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.7, "top_k": 5, "seed": 8},
        {"temperature": 1.3, "top_p": 0.8, "seed": 9, "n": 3},
        {"temperature": 1.0, "min_p": 0.1, "seed": 10},
    ]
    jobs = []
    for i in range(12):
        shared = draw.choice((0, 16, 33))
        own = [draw.randrange(tiny.VOCAB_SIZE) for _ in range(draw.randrange(1, LONGEST_PROMPT - shared))]
        params = SamplingParams(max_tokens=draw.randrange(2, COUNT), ignore_eos=True, **ways[i % len(ways)])
        jobs.append((common[:shared] + own, params))
    return jobs


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_greedy_tokens_equal_transformers(checkpoints, variant):
    path, model = checkpoints(variant)
    draw = random.Random(3)
    prompts = [[draw.randrange(tiny.VOCAB_SIZE) for _ in range(n)] for n in (1, 15, 16, 17, 33, 60)]
    params = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
    outputs, _ = run(path, [(prompt, params) for prompt in prompts], prefill_chunk_size=11)
    for prompt, (tokens,) in zip(prompts, outputs, strict=True):
        assert len(tokens) == COUNT
        assert list(tokens) == tiny.followers(model, prompt, tokens)


VARIED = [
    "gpt2", "llama-odd-heads-biased", "mistral-window", "qwen3", "gemma2", "gemma3", "phi3-longrope", "smollm3",
    "seed-oss", "ministral3", "olmo2", "olmo3-yarn", "exaone4", "granite", "cohere2", "glm", "glm4",
    "qwen3-moe", "gemma4-shared", "gemma4-experts",
]  # fmt: skip
MACHINERY: dict[str, dict[str, Any]] = {
    "together": {},
    "one step in flight": {"steps_in_flight": 1},
    "three steps in flight": {"steps_in_flight": 3},
    "chunks of 1": {"prefill_chunk_size": 1},
    "chunks of 2": {"prefill_chunk_size": 2},
    "chunks of 3": {"prefill_chunk_size": 3},
    "chunks of 7": {"prefill_chunk_size": 7},
    "chunks of 16": {"prefill_chunk_size": 16},
    "whole prompts": {"prefill_chunk_size": None, "max_num_batched_tokens": 2048},
    "no prefix cache": {"enable_prefix_caching": False},
    "prefix hits": {"rounds": 2},
    "large blocks": {"block_size": 48},
    "one thread": {"cpu_threads": 1},
    "two sequences at a time": {"max_num_seqs": 2},
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIED)
def test_outputs_do_not_depend_on_the_machinery(checkpoints, variant, dtype):
    """Bit for bit, in both dtypes: the kernels compute every element in one order whatever surrounds it."""
    path, _ = checkpoints(variant)
    jobs = mixed_jobs()
    expected, _ = run(path, jobs, alone=True, dtype=dtype)
    assert len({tokens for job in expected for tokens in job}) > len(jobs), "the jobs must differ"
    for name, config in MACHINERY.items():
        outputs, _ = run(path, jobs, dtype=dtype, **config)
        assert outputs == expected, name
    shuffled = list(range(len(jobs)))
    random.Random(1).shuffle(shuffled)
    outputs, _ = run(path, [jobs[i] for i in shuffled], dtype=dtype)
    assert outputs == [expected[i] for i in shuffled]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("variant", VARIED)
def test_preemption_with_a_tenth_of_the_kv_changes_nothing(checkpoints, variant, steps_in_flight):
    path, _ = checkpoints(variant)
    jobs = mixed_jobs(5)
    needed = sum(params.n * -(-(len(prompt) + (params.max_tokens or 0)) // 16) for prompt, params in jobs)
    expected, _ = run(path, jobs, alone=True)
    outputs, stats = run(path, jobs, num_kv_blocks=max(needed // 10, 5), steps_in_flight=steps_in_flight)
    assert outputs == expected
    assert stats.num_preemptions > 0


def test_a_prefix_hit_is_counted_and_changes_nothing(checkpoints):
    path, _ = checkpoints("llama")
    prompt = [i % tiny.VOCAB_SIZE for i in range(50)]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)

    async def main() -> list[RequestOutput]:
        async with AsyncEngine.from_pretrained(str(path), cpu_threads=1, num_kv_blocks=64) as engine:
            salts = (None, None, "tenant", "tenant")
            return [await engine.generate(prompt, params, cache_salt=salt) for salt in salts]

    outputs = asyncio.run(main())
    assert len({output.token_ids for output in outputs}) == 1
    assert [output.usage.cached_tokens for output in outputs] == [0, 48, 0, 48]


def test_what_the_cache_can_never_hold_is_refused_and_costs_nothing(checkpoints):
    path, _ = checkpoints("llama")

    async def main() -> None:
        engine = AsyncEngine.from_pretrained(str(path), cpu_threads=1, num_kv_blocks=4)
        async with engine, testing.no_leaks(engine):
            with pytest.raises(KVCapacityError, match=r"70 tokens.* 64"):
                await engine.generate([1] * 60, SamplingParams(max_tokens=10))
            output = await engine.generate([1] * 60, SamplingParams(max_tokens=4, ignore_eos=True))
            assert len(output.token_ids) == 4

    asyncio.run(main())


@pytest.mark.parametrize("prompt", ["a [PAD]", [{"role": "user", "content": "a [PAD]"}]])
def test_tokens_that_the_model_lacks_are_refused(checkpoints, tmp_path, prompt):
    path, _ = checkpoints("llama")
    tokenizer = placeholder_tokenizer(tiny.VOCAB_SIZE).backend
    tokenizer.add_special_tokens(["[PAD]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")

    async def main() -> None:
        engine = AsyncEngine.from_pretrained(str(path), tokenizer=str(tmp_path), cpu_threads=1, num_kv_blocks=4)
        async with engine, testing.no_leaks(engine):
            with pytest.raises(InvalidRequestError, match=r"token id \d+ is outside .* of 199"):
                await engine.generate(prompt, SamplingParams(max_tokens=4))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("broken", "message"), [("config.json", r"config\.json"), ("tokenizer.json", "tokenizer"), (None, "no.jinja")]
)
def test_small_files_are_read_before_weights(checkpoints, tmp_path, broken, message):
    """Weights take long to read, so a mistaken name of a template is reported before. Here weights would fail, too."""
    path, _ = checkpoints("llama")
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for name in filter(None, ("model.safetensors", broken)):
        (tmp_path / name).write_text("{")
    with pytest.raises(AsyncEngineError, match=message):
        asyncio.run(AsyncEngine.from_pretrained(str(tmp_path), chat_template="no.jinja").start())


@pytest.mark.parametrize("without", [{"skip_tokenizer_init": True}, {"tokenizer": "none"}])
def test_a_directory_without_a_tokenizer(checkpoints, tmp_path, without):
    path, _ = checkpoints("llama")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(path / name)
    greedy = SamplingParams(max_tokens=8, temperature=0)

    async def ids(directory: Path, **config: Any) -> tuple[int, ...]:
        async with AsyncEngine.from_pretrained(str(directory), cpu_threads=1, num_kv_blocks=4, **config) as engine:
            return (await engine.generate([1, 2, 3], greedy)).token_ids

    with pytest.raises(ModelNotFoundError, match="skip_tokenizer_init"):
        asyncio.run(ids(tmp_path))
    assert asyncio.run(ids(tmp_path, **without)) == asyncio.run(ids(path))


def test_the_end_that_only_the_tokenizer_names_ends_a_sequence(checkpoints, tmp_path):
    path, _ = checkpoints("llama")
    greedy = SamplingParams(max_tokens=8, temperature=0)
    tokenizer = placeholder_tokenizer(tiny.VOCAB_SIZE)
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))

    async def tokens(**config: Any) -> tuple[int, ...]:
        async with AsyncEngine.from_pretrained(str(path), cpu_threads=1, num_kv_blocks=4, **config) as engine:
            return (await engine.generate([1, 2, 3], greedy)).token_ids

    expected = asyncio.run(tokens())
    end = next(token for token in expected[2:] if token not in expected[:2])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer.backend.id_to_token(end)}))
    assert asyncio.run(tokens(tokenizer=str(tmp_path))) == expected[: expected.index(end) + 1]


def test_sdpa_prefill_gives_the_same_tokens(checkpoints):
    path, _ = checkpoints("mistral-window")
    jobs = [(prompt, params) for prompt, params in mixed_jobs(2) if params.temperature == 0]
    expected, _ = run(path, jobs)
    outputs, _ = run(path, jobs, prefill_attention="sdpa")
    assert outputs == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["return", "keep = engine", "await engine.aclose(drain=False)"])
def test_a_process_may_end_during_a_long_step(how):
    code = f"""
        import asyncio, time
        from asyncengine import AsyncEngine, SamplingParams, bundled_model
        from asyncengine.models.decoder import DecoderLayer
        forward = DecoderLayer.forward
        def slow_forward(*arguments):
            print("layer", flush=True)
            for _ in range(30):
                time.sleep(0.05)
            forward(*arguments)
        DecoderLayer.forward = slow_forward
        async def main():
            global keep
            engine = AsyncEngine.from_pretrained(bundled_model(), device="cpu", cpu_threads=1, num_kv_blocks=64)
            await engine.start()
            stream = await engine.submit([300, 301], SamplingParams(max_tokens=10))
            while not engine.stats().num_steps_in_flight:
                await asyncio.sleep(0.01)
            {how}
        asyncio.run(main())
    """
    assert run_script(code, "-W", "ignore").split() in ([], ["layer"], ["layer"] * 2)
