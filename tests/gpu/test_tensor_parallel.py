"""Two GPUs hold a model together: sums and outputs are those of one."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine import (
    AsyncEngine,
    ConfigError,
    EngineConfig,
    EngineDeadError,
    SamplingParams,
    testing,
)
from asyncengine.kernels.cuda.comm.exchange import allocate, begin_together, connect, reach_peers
from asyncengine.kernels.cuda.rows.norms import norm_rows
from asyncengine.kernels.ops import Norm
from asyncengine.runner.backend import load_backend
from tests.models import tiny

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SMALL: dict[str, Any] = {
    "load_format": "dummy", "max_num_seqs": 8, "max_num_batched_tokens": 64, "prefill_chunk_size": 24,
    "num_kv_blocks": 48, "max_model_len": 256, "dtype": "float32", "progress": False,
}  # fmt: skip
MODEL = {
    "architectures": ["LlamaForCausalLM"], **tiny.DECODER, "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256,
    "initializer_range": 0.1, "eos_token_id": None, "vocab_size": 192,
}  # fmt: skip


LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "head_dim": None, "num_key_value_heads": 4, "kv_lora_rank": 64,
    "q_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1,
}  # fmt: skip
"""A small model with latent attention and experts, beside ``MODEL``."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made(tmp_path_factory.mktemp("model"))


def made(path: Path, **config: Any) -> str:
    (path / "config.json").write_text(json.dumps(MODEL | config))
    return str(path)


def opened(model: str, ranks: int, **config: Any) -> AsyncEngine:
    return AsyncEngine.from_pretrained(model, **(SMALL | {"tensor_parallel_size": ranks} | config))


def test_sums_are_those_of_torch_on_both_gpus() -> None:
    """Calls of different sizes follow each other without a wait of the host; both GPUs get the same bits."""
    devices = [torch.device("cuda", i) for i in range(2)]
    reach_peers(devices)
    exchanges = [allocate(i, 2, 1200, 4096, torch.bfloat16, d, pdl=True) for i, d in enumerate(devices)]
    connect(exchanges)
    begin_together(exchanges)
    norms = [Norm(torch.linspace(0.5, 2, 4096, device=device), None, 1e-5) for device in devices]
    calls, normed = [], []
    for rows in (1, 64, 7, 512, 256, 2, 1200, 129, 513, 1, 1, 1):
        products = [torch.randn(rows, 4096, device=device).bfloat16() for device in devices]
        onto = [torch.ones(rows, 4096, device=device).bfloat16() for device in devices]
        calls.append((products, onto, (products[0].float().cpu() + products[1].float().cpu() + 1).bfloat16()))
    for device in devices:
        torch.cuda.synchronize(device)
    for warm in (True, False):  # kernels are loaded while nobody waits
        for exchange in exchanges:
            exchange.together.fill_(0 if warm else 1)
        if not warm:
            begin_together(exchanges)
            for device in devices:
                torch.cuda.synchronize(device)
        for products, onto, _ in calls:
            for exchange, product, to in zip(exchanges, products, onto, strict=True):
                with torch.cuda.device(product.device):
                    normed.append(exchange.reduce(product, onto=to.clone() if warm else to, norm=norms[exchange.rank]))
        for device in devices:
            torch.cuda.synchronize(device)
    for call, (_, onto, wanted) in enumerate(calls):
        for rank, found in enumerate(onto):
            assert torch.equal(found.cpu(), wanted)
            with torch.cuda.device(devices[rank]):
                own = normed[len(normed) - 2 * len(calls) + 2 * call + rank]
                assert torch.equal(own, norm_rows(found, norms[rank]))


async def outputs(engine: AsyncEngine, *, features: bool) -> list[Any]:
    prompts = [[3 + (i * 7 + j * 5) % 150 for j in range(n)] for i, n in enumerate((1, 90, 33, 150, 7, 64, 20, 5, 40))]
    params = [SamplingParams(max_tokens=24, temperature=i % 2, seed=i, ignore_eos=True) for i in range(len(prompts))]
    jobs = [engine.generate(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    found: list[Any] = [output.token_ids for output in await asyncio.gather(*jobs)]
    assert (await engine.generate(prompts[3], params[3])).token_ids == found[3], "a warm prefix changes nothing"
    if features:
        scored = await engine.generate(prompts[2], SamplingParams(max_tokens=4, temperature=0, logprobs=3))
        found.append([entry.token_id for record in scored.outputs[0].logprobs or () for entry in record.top])
        penalised = SamplingParams(max_tokens=12, temperature=0, presence_penalty=1.5, ignore_eos=True)
        found.append((await engine.generate(prompts[2], penalised)).token_ids)
        vectors = (await engine.embed(prompts[:2])).vectors
        found.append([round(float(x), 3) for vector in vectors for x in vector[:8]])
    return found


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"kv_cache_dtype": "fp8"},
        {"enable_prefix_caching": False, "steps_in_flight": 1},
        {"staging": "mapped"},
        {"staging": "pinned", "num_kv_blocks": 20},
        {"batch_invariant": True, "programmatic_launch": False},
    ],
    ids=lambda config: ",".join(map(str, config)) or "plain",
)
def test_tokens_are_those_of_one_gpu(model: str, config: dict[str, Any]) -> None:
    async def run(ranks: int) -> list[Any]:
        async with opened(model, ranks, **config) as engine:
            found = await outputs(engine, features=not config)
            await testing.settle(engine)
            return found

    assert asyncio.run(run(2)) == asyncio.run(run(1))
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("config", [{"steps_in_flight": 2}, {"kv_cache_dtype": "fp8"}], ids=["", "float8"])
def test_both_gpus_keep_all_latents(tmp_path: Path, config: dict[str, Any]) -> None:
    test_tokens_are_those_of_one_gpu(made(tmp_path, **LATENT), config)


def test_the_first_gpu_has_all_of_a_head_that_ranks_do_not_divide(tmp_path: Path) -> None:
    model = made(tmp_path, vocab_size=199, tie_word_embeddings=True)
    test_tokens_are_those_of_one_gpu(model, {"steps_in_flight": 1})


def test_a_tied_head_is_a_part_of_the_table(tmp_path: Path) -> None:
    test_tokens_are_those_of_one_gpu(made(tmp_path, tie_word_embeddings=True), {"steps_in_flight": 2})


@pytest.mark.parametrize("config", [{}, {"quantization": "int4"}, {"quantization": "int8"}, {"kv_cache_dtype": "fp8"}])
def test_logits_in_bfloat16_are_near_those_of_one_gpu(model: str, config: dict[str, Any]) -> None:
    async def run(ranks: int) -> dict[int, float]:
        async with opened(model, ranks, dtype="bfloat16", **config) as engine:
            params = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
            output = await engine.generate([3 + i % 150 for i in range(200)], params)
            [record] = output.outputs[0].logprobs or ()
            return {entry.token_id: entry.logprob for entry in record.top}

    one, two = asyncio.run(run(1)), asyncio.run(run(2))
    assert len(one.keys() & two.keys()) >= 15
    for token in one.keys() & two.keys():
        assert one[token] == pytest.approx(two[token], abs=0.25)


def allocated() -> list[int]:
    """Bytes on both GPUs, without those that cuBLAS keeps for each stream that has used it."""
    torch._C._cuda_clearCublasWorkspaces()
    return [torch.cuda.memory_allocated(i) for i in range(2)]


def test_a_rank_that_waits_in_vain_ends_the_engine_and_leaves_no_memory(model: str) -> None:
    before = allocated()

    async def main() -> None:
        async with opened(model, 2, step_timeout_s=1.0) as engine:
            params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            await engine.generate([3, 4, 5], params)
            runner: Any = engine._life.loaded().keep_alive
            runner._first.exchange.calls.add_(9)  # it waits for calls that do not come
            torch.cuda.synchronize(0)
            with pytest.raises(EngineDeadError, match="did not finish within"):
                await engine.generate([3, 4, 5], params)

    asyncio.run(asyncio.wait_for(main(), 60))
    gc.collect()
    assert allocated() == before


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"enforce_eager": True}, "enforce_eager needs tensor_parallel_size=1"),
        ({"host_kv_memory_bytes": 1 << 24}, "host_kv_memory_bytes needs tensor_parallel_size=1"),
        ({"target_itl_ms": 20.0}, "target_itl_ms needs tensor_parallel_size=1"),
        ({"staging": "pageable"}, "staging=pageable needs tensor_parallel_size=1"),
        ({"device": f"cuda:{torch.cuda.device_count() - 1}"}, "takes cuda:"),
    ],
)
def test_what_gpus_together_do_not_have_is_refused_by_name(model: str, config: dict[str, Any], why: str) -> None:
    settings = {k: v for k, v in SMALL.items() if k != "progress"} | {"tensor_parallel_size": 2} | config
    with pytest.raises(ConfigError, match=why):
        load_backend(EngineConfig(model=model, **settings), progress=False)
