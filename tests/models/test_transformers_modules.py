"""Models that run modules of transformers: the same tokens in float32, and refusals by name."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine import AsyncEngine, ConfigError, ModelError, SamplingParams, UnsupportedModelError, testing
from asyncengine.config import EngineConfig
from asyncengine.errors import MissingWeightError, WeightMismatchError
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.models.transformers.waits import first_wait
from asyncengine.runner.cuda_runner import without_graphs
from asyncengine.runner.steps.model_runner import CpuModelRunner, load_model
from tests.kernels.simulated_cuda import make_engine
from tests.models import sweep, tiny
from tests.models.own_code import save_with_code

FEATURES = {
    "qwen2_moe": "experts beside a shared one",
    "gpt_neox": "queries, keys and values in one product, partial rotation, blocks side by side",
    "deepseek_v2": "values of another size than keys",
    "vaultgemma": "a window, soft caps, norms with 1 + weight",
    "gemma3n_text": "layers that take the keys of others",
    "hunyuan_v1_dense": "norms of heads behind the rotation",
    "longcat_flash": "a pass that reads its tensors, several calls a layer",
    "flint": "sinks, and windows in some layers",
    "opt": "positions that are learned",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", FEATURES)
def test_tokens_equal_transformers(kind, tmp_path):
    assert sweep.check(kind, tmp_path) == "same"


def run(path: Path, **config: Any) -> tuple[list[Any], Any]:
    """The tokens of requests that share prefixes, run together, and statistics."""
    rng = random.Random(2)
    settings = {"device": "cpu", "cpu_threads": 1, "max_model_len": 128, "tokenizer": "none", "progress": False}

    async def main() -> tuple[list[Any], Any]:
        start = [rng.randrange(tiny.VOCAB_SIZE) for _ in range(34)]
        prompts = [[*start[: 17 * (i % 3)], i, i + 1] for i in range(6)]
        many = SamplingParams(max_tokens=12, temperature=1.0, seed=7, n=2, ignore_eos=True)
        greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        async with AsyncEngine.from_pretrained(str(path), **settings | config) as engine:
            async with testing.no_leaks(engine):
                jobs = [engine.generate(prompt, many if i % 2 else greedy) for i, prompt in enumerate(prompts)]
                outputs = await asyncio.gather(*jobs)
            return [[c.token_ids for c in output.outputs] for output in outputs], engine.stats()

    return asyncio.run(main())


def test_preemption_chunks_prefixes_and_many_sequences_change_nothing(tmp_path):
    sweep.tiny_model("qwen2_moe").save_pretrained(tmp_path)
    native, _ = run(tmp_path, model_impl="transformers", num_kv_blocks=64, enable_prefix_caching=False)
    tight, stats = run(
        tmp_path, model_impl="transformers", num_kv_blocks=8, prefill_chunk_size=5, max_num_batched_tokens=16,
        max_num_seqs=8,
    )  # fmt: skip
    assert tight == native
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0


def test_a_native_family_gives_the_same_by_both_ways(tmp_path):
    tiny.build_model("gemma2").save_pretrained(tmp_path)
    assert run(tmp_path, model_impl="transformers")[0] == run(tmp_path, model_impl="native")[0]


def test_keys_in_float8_are_calibrated(tmp_path):
    sweep.tiny_model("gpt_neox").save_pretrained(tmp_path)
    assert run(tmp_path, kv_cache_dtype="fp8")[0]


def test_random_weights_need_no_checkpoint(tmp_path):
    sweep.tiny_config("gpt_neox").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["GPTNeoXForCausalLM"]}))
    first, second = (run(tmp_path, load_format="dummy")[0] for _ in range(2))
    assert first == second


def test_code_of_a_model_runs_only_if_it_is_trusted(tmp_path):
    model = save_with_code(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"OwnForCausalLM.*--trust-remote-code"):
        load(tmp_path)
    driver = tiny.Driver(load(tmp_path, trust_remote_code=True), native=True)
    sequence = driver.add([3, 5, 8], 20)
    driver.run([sequence], 10, 64)
    assert sequence.generated == tiny.generate(model, [3, 5, 8], 10)


def load(path: Path, **config: Any) -> CpuModelRunner:
    settings = {"num_kv_blocks": 16, "cpu_threads": 1, "device": "cpu", "max_model_len": 128}
    return CpuModelRunner.load(EngineConfig.from_kwargs(str(path), settings | config))


@pytest.mark.parametrize(("kind", "place"), [("longcat_flash", "modeling_longcat_flash.py"), ("qwen2_moe", "")])
def test_a_model_that_waits_for_the_device_is_not_captured(kind, place, tmp_path, caplog):
    sweep.tiny_model(kind).save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="float32")
    loaded = load_model(config, ReferenceOps())
    assert loaded.waits_at.startswith(place)
    assert without_graphs(config, loaded).enforce_eager == bool(place)
    assert ("its steps are not captured" in caplog.text) == bool(place)
    assert place in caplog.text


def test_a_copy_between_host_and_device_is_a_wait():
    there = torch.ones(2, device="meta")
    assert first_wait(lambda: torch.ones(2).to("meta")).startswith("test_transformers_modules.py")
    assert first_wait(lambda: there.copy_(torch.ones(2))).startswith("test_transformers_modules.py")
    assert first_wait(lambda: (there.copy_(there.double()), torch.ones(2).half())) == ""


def test_steps_of_the_device_compute_the_same(tmp_path):
    model = sweep.tiny_model("gpt_neox")
    model.save_pretrained(tmp_path)

    config = {"num_kv_blocks": 16, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 96}
    prompts = [[3], [5, 9, 4, 7, 20, 11, 3]]

    async def main() -> list[Any]:
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        async with make_engine(str(tmp_path), dtype="float32", tokenizer="none", **config) as engine:
            outputs = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
            return [list(output.outputs[0].token_ids) for output in outputs]

    assert asyncio.run(main()) == [tiny.generate(model, prompt, 6) for prompt in prompts]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("zaya", r"layer 0 \(ZayaDecoderLayer\) keeps a state of its own"),
        ("lfm3", r"layer 0 \(Lfm3DecoderLayer\) makes no call of the attention interface"),
        ("doge", r"layers.0.self_attn \(DogeAttention\) has a mask of its own"),
    ],
)
def test_a_layer_that_cannot_be_served_is_named(kind, words, tmp_path):
    sweep.tiny_model(kind).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=words):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "T5ForConditionalGeneration"),
        ({"architectures": ["GPTJForCausalLM"], "model_type": "gptj"}, "does not let another attention"),
        ({"architectures": ["NoSuchModel"], "model_type": "nothing"}, "NoSuchModel"),
        ({"architectures": ["PhiForSequenceClassification"], "model_type": "phi"}, "which generates no text"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ],
)
def test_an_architecture_that_cannot_be_served_is_named(changes, words, tmp_path):
    values = {"architectures": ["PhiForCausalLM"], "model_type": "phi"} | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=words):
        load(tmp_path)


def test_wrong_tensors_name_themselves(tmp_path, caplog):
    from safetensors.torch import load_file, save_file

    sweep.tiny_model("gpt_neox").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "gpt_neox.layers.1.mlp.dense_4h_to_h.weight"
    given = tensors.pop(name)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(MissingWeightError, match=name):
        load(tmp_path)
    save_file(tensors | {name: given[:-1].contiguous()}, path, {"format": "pt"})
    with pytest.raises(WeightMismatchError, match=name):
        load(tmp_path)
    save_file(tensors | {name: given, "gpt_neox.layers.9.more": given.clone()}, path, {"format": "pt"})
    load(tmp_path)
    assert "gpt_neox.layers.9.more" in caplog.text


def test_settings_that_are_native_models_alone_are_refused(tmp_path):
    sweep.tiny_model("gpt_neox").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="GPTNeoXForCausalLM"):
        load(tmp_path, model_impl="native")
    with pytest.raises(ConfigError, match="quantization"):
        load(tmp_path, quantization="fp8", device="auto", dtype="bfloat16")
