"""Every family against transformers: the same tokens in float32, close logits in bfloat16."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest
import torch

from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.models.registry import FAMILIES
from asyncengine.runner.describe import describe_model
from asyncengine.runner.state.memory import allocate
from asyncengine.runner.steps.model_runner import CpuModelRunner, load_model
from tests.amounts import sample_of
from tests.models import tiny

COUNT = 20
# The native kernels are tested wherever they are built; the reference then shows which side is wrong.
NATIVE = importlib.util.find_spec("asyncengine._core") is not None
KERNELS = [pytest.param("reference", marks=pytest.mark.exhaustive), "native"] if NATIVE else ["reference"]


def load(path: Path, kernels: str, **config: object) -> CpuModelRunner:
    settings = {"num_kv_blocks": 64, "cpu_threads": 2, **config}
    ops = ReferenceOps(settings.get("prefill_attention", "native")) if kernels == "reference" else None
    return CpuModelRunner.load(EngineConfig.from_kwargs(str(path), settings), ops=ops)


@pytest.fixture(scope="module", params=tiny.VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A saved variant with its model of transformers, and prompts."""
    path = tmp_path_factory.mktemp(request.param)
    model = tiny.build_model(request.param)
    model.save_pretrained(path)
    draw = random.Random(1)
    return path, model, [[draw.randrange(tiny.VOCAB_SIZE) for _ in range(n)] for n in (1, 13, 37)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_tokens_equal_transformers(checkpoint, kernels):
    """The reference attends by torch; its plain attention is compared in bfloat16."""
    path, model, prompts = checkpoint
    native = kernels == "native"
    runner = load(path, kernels, dtype="float32", prefill_attention="native" if native else "sdpa")
    continuations = []
    for prompt in prompts:
        alone = tiny.Driver(runner, native=native)
        sequence = alone.add(prompt, len(prompt) + COUNT)
        alone.run([sequence], COUNT, 64)
        assert len(sequence.generated) == COUNT
        assert sequence.generated == tiny.followers(model, prompt, sequence.generated)
        continuations.append(sequence.generated)
    assert len({tuple(tokens) for tokens in continuations}) > 1, "the continuations must depend on the prompt"
    # Together: in chunks of random sizes with some sequences left out of each step. Native kernels compute several rows
    # at once, the reference row by row: only theirs need chunks of 1 and of 7 as well.
    for chunk in sample_of((1, 7, None), (7, None)) if native else (None,):
        driver = tiny.Driver(runner, native=native)
        sequences = [driver.add(prompt, len(prompt) + COUNT) for prompt in prompts]
        driver.run(sequences, COUNT, chunk)
        assert [s.generated for s in sequences] == continuations


def test_yarn_reaches_beyond_max_position_embeddings(tmp_path):
    """YaRN stands in config.json as in Yarn-Mistral-7b-128k, or as somebody adds it after Qwen's model cards."""
    model = tiny.build_model("llama-rope-yarn", max_position_embeddings=32)
    model.save_pretrained(tmp_path)
    prompt = [i * 7 % tiny.VOCAB_SIZE for i in range(90)]
    driver = tiny.Driver(load(tmp_path, "reference"))
    assert driver.runner.info.max_model_len == 128  # four times the original 32
    sequence = driver.add(prompt, 128)
    driver.run([sequence], COUNT, 64)
    assert sequence.generated == tiny.generate(model, prompt, COUNT)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_are_close_in_bfloat16(checkpoint, kernels):
    """Logits equal those in float32 on the same rounded weights to within a tenth of the spread of the logits.

    The models' weights are large, which spreads rounding errors; transformers in bfloat16 is as far off.
    """
    path, model, drawn = checkpoint
    rounded = type(model)(model.config).eval()
    rounded.load_state_dict({name: t.bfloat16().float() for name, t in model.state_dict().items()})
    prompts = [torch.tensor([prompt]) for prompt in drawn]
    with torch.inference_mode():
        exact = torch.stack([rounded(p).logits[0, -1] for p in prompts])
        rounded.bfloat16()
        theirs = torch.stack([rounded(p).logits[0, -1].float() for p in prompts])

    driver = tiny.Driver(load(path, kernels, dtype="bfloat16"), native=kernels == "native")
    for p in prompts:
        driver.run([driver.add(p[0].tolist(), p.shape[1] + 1)], 1, 9)
    ours = torch.stack(driver.logits)
    error = (ours - exact).std() / exact.std()
    assert error < 0.1
    assert error < 1.3 * (theirs - exact).std() / exact.std()


def with_float8_weights(path: Path) -> CpuModelRunner:
    """The model with the weights of a GPU's quantization=fp8, in the reference."""
    config, ops = EngineConfig(model=str(path), dtype="bfloat16", quantization="fp8", num_kv_blocks=16), ReferenceOps()
    loaded = load_model(config, ops)
    cache = allocate(config, loaded.config, 16, loaded.dtype, ops)
    return CpuModelRunner(loaded.info(config, 16), loaded.config, loaded.model, cache)


@pytest.mark.sampled(3)
def test_float8_weights_move_logits_no_more_than_their_rounding(checkpoint):
    """Float8 has 4 bits where bfloat16 has 8: a 16th of a weight and of an input, through three layers or four."""
    path, model, prompts = checkpoint
    if not FAMILIES[type(model).__name__].quantizable:
        with pytest.raises(ConfigError, match="quantization=fp8 is not implemented for"):
            with_float8_weights(path)
        return
    logits = []
    for runner in (load(path, "reference", dtype="bfloat16"), with_float8_weights(path)):
        driver = tiny.Driver(runner)
        for prompt in prompts:
            driver.run([driver.add(prompt, len(prompt) + 1)], 1, 64)
        logits.append(torch.stack(driver.logits))
    assert (logits[1] - logits[0]).norm() < 0.5 * logits[0].norm()


@pytest.mark.sampled(3)
def test_headers_say_what_a_loaded_model_takes(checkpoint):
    path, _, _ = checkpoint
    said = describe_model(EngineConfig(model=str(path)), "cpu")
    info = load(path, "reference").info
    assert (said.way, said.architecture, said.dtype) == ("native", info.architecture, info.dtype)
    assert (said.num_parameters, said.weight_bytes) == (info.num_parameters, info.weight_bytes)
    assert said.context == info.max_model_len
    assert said.kv_bytes_per_sequence == info.kv_bytes_per_sequence
    assert said.kv_bytes_per_token == info.kv_layer_token_bytes * max(1, info.num_kv_layers)
    assert said.window == info.window
