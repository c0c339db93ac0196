"""Keys and values in float8: the native kernels against torch, their scales, and the cache's size."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncengine import _core, bundled_model
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError, MissingWeightError, WeightMismatchError
from asyncengine.kernels.cpu.base import BaseOps
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.kernels.float8 import FLOAT8, FLOAT8_MAX
from asyncengine.kernels.float8_cache import fixed_scales, quantize_heads, with_inverses
from asyncengine.kernels.ops import AttentionLayer, LayerKVCache
from asyncengine.runner.state import kv_scales
from asyncengine.runner.steps.model_runner import CpuModelRunner, load_model
from tests.kernels.test_cpu_kernels import DTYPES, ISAS, Paged, assert_near, assert_same, make_ops, random


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return make_ops(request.param)


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def scales_for(kv_heads: int) -> Tensor:
    """Powers of two and others, another one for each head, such that some numbers of a normal distribution saturate."""
    scales = torch.tensor([2.0**-7, 0.007, 0.0041, 2.0**-8]).repeat(kv_heads)[: 2 * kv_heads]
    return with_inverses(scales.view(2, kv_heads))


class Float8Paged(Paged):
    """Paged attention with a cache in float8, whose unused lines are NaN, and the twin over the stored numbers."""

    def __init__(self, lengths: list[int], heads: tuple[int, int], dim: int, dtype: torch.dtype, **more: float) -> None:
        super().__init__(lengths, heads, dim, dtype, **more)  # type: ignore[arg-type]
        self.scales = scales_for(heads[1])
        self.k_cache, self.v_cache = (cache.to(FLOAT8) for cache in (self.k_cache, self.v_cache))

    def twin(self, sequence: int, window: int) -> Tensor:
        exact = self.k, self.v
        try:
            self.k, self.v = (
                [quantize_heads(x, scale).double() * scale[0].double()[:, None] for x in all_x]
                for all_x, scale in zip(exact, self.scales, strict=True)
            )
            return super().twin(sequence, window)
        finally:
            self.k, self.v = exact


# ---- kernels ----


def test_numbers_are_stored_as_torch_rounds_them(ops: CpuOps, dtype: torch.dtype) -> None:
    """All numbers of float8, what lies between two of them, and what lies beyond: rounded to even, saturating."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
    numbers = numbers[numbers.isfinite()].sort().values
    between = (numbers[1:] + numbers[:-1]) / 2
    beside = [between.nextafter(torch.tensor(x)) for x in (math.inf, -math.inf)]
    beyond = torch.tensor([449.0, 464.0, 465.0, -1e9, math.inf, -math.inf, math.nan, 1e-10, -1e-40, 0.0, -0.0])
    x = torch.cat((numbers, between, *beside, beyond)).to(dtype).view(1, 1, -1)
    for scale in (1.0, 0.3):
        scales = with_inverses(torch.full((2, 1), scale))
        k_cache = torch.zeros(1, 1, x.shape[2], 16).to(FLOAT8)
        v_cache = torch.zeros(1, 1, 16, x.shape[2]).to(FLOAT8)
        batch = _core.StepBatch([0], [0], [3], [0, 1], [0], [[0]], [0])
        ops.store_kv(x, x, LayerKVCache(k_cache, v_cache, scales), batch)
        expected = quantize_heads(x, scales[0])[0, 0]
        there = ~expected.float().isnan()
        for stored in (k_cache[0, 0, :, 3].clone(), v_cache[0, 0, 3]):
            assert_same(stored[there], expected[there])
            assert stored.float()[~there].isnan().all()
        assert int((~there).sum()) == 1
        assert expected.float()[there].abs().max() == FLOAT8_MAX
        assert not k_cache[0, 0, :, :3].float().any(), "its neighbours are left alone"


SHAPES = [((1, 1), 64), ((3, 3), 40), ((7, 1), 80), ((6, 2), 128), ((3, 1), 7), ((35, 1), 16)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_attention(
    ops: CpuOps, dtype: torch.dtype, heads: tuple[int, int], dim: int, window: int, softcap: float
) -> None:  # fmt: skip
    paged = Float8Paged([1, 15, 16, 17, 190], heads, dim, dtype, softcap=softcap)
    got = paged.step(ops, [(s, 0, n) for s, n in enumerate(paged.lengths)], window)
    for s, out in enumerate(got):
        assert out.dtype == dtype
        assert_near(out, paged.twin(s, window), 1.0)


@pytest.mark.parametrize("window", [0, 600])
def test_attention_over_partitions(ops: CpuOps, window: int) -> None:
    paged = Float8Paged([1300], (3, 1), 32, torch.float32, block_size=48)
    assert_near(paged.step(ops, [(0, 0, 1300)], window)[0], paged.twin(0, window), 1.0)


def test_attention_does_not_depend_on_chunking_batch_or_threads(ops: CpuOps, dtype: torch.dtype) -> None:
    length, other = 1100, 40
    paged = Float8Paged([length, other], (4, 2), 48, dtype)
    whole = paged.step(make_ops(ops.isa, 1), [(0, 0, length), (1, 0, other)], 0)
    for threads in (1, 3):
        for chunk in (1, 3, 64):
            for start in range(length - 2 * chunk, length, chunk):
                rows = [(1, other - 1, other), (0, start, start + chunk), (1, 3, 30)]
                decoded, chunked, prefilled = paged.step(make_ops(ops.isa, threads), rows, 0)
                assert_same(decoded, whole[1][-1:])
                assert_same(chunked, whole[0][start : start + chunk])
                assert_same(prefilled, whole[1][3:30])


def test_a_nan_in_sight_is_not_hidden(ops: CpuOps) -> None:
    paged = Float8Paged([20], (1, 1), 16, torch.float32)
    paged.v[0][4, 0, 3] = math.nan
    (out,) = paged.step(ops, [(0, 0, 20)], 0)
    assert not out[:4].isnan().any()
    assert out[4:, 3].isnan().all()


@pytest.mark.parametrize("twin", [ReferenceOps(), CpuOps(2, prefill_attention="sdpa")], ids=["reference", "sdpa"])
def test_twins_read_the_same_cache(twin: BaseOps) -> None:
    """The reference, and torch's attention of prompts, over what they stored themselves."""
    paged = Float8Paged([40], (4, 2), 16, torch.float32)
    heads = torch.cat((paged.q[0], paged.k[0], paged.v[0]), 1).flatten(1)
    slots = [paged.tables[0][p // 16] * 16 + p % 16 for p in range(40)]
    batch = _core.StepBatch([0] * 40, list(range(40)), slots, [0, 40], [0], paged.tables, [])
    layer = AttentionLayer(4, None, None, 0.25, 0)
    out = twin.attention(heads, layer, LayerKVCache(paged.k_cache, paged.v_cache, paged.scales), batch)
    assert_near(out, paged.twin(0, 0), 3.0)


def test_wrong_arguments_raise(ops: CpuOps) -> None:
    k, v = torch.zeros(2, 2, 8, 16).to(FLOAT8), torch.zeros(2, 2, 16, 8).to(FLOAT8)
    batch = _core.StepBatch([0], [0], [0], [0, 1], [0], [[0]], [0])
    layer = AttentionLayer(2, None, None, 1.0, 0)
    with pytest.raises(ValueError, match="float32 and bfloat16"):
        ops.attention(random(1, 48), layer, LayerKVCache(k, v), batch)
    with pytest.raises(ValueError, match="scales must be"):
        ops.attention(random(1, 48), layer, LayerKVCache(k, v, torch.ones(2, 2, 3)), batch)
    with pytest.raises(ValueError, match="k_cache must be"):
        ops.attention(random(1, 48), layer, LayerKVCache(k.float(), v.float(), scales_for(2)), batch)


# ---- scales ----


def test_fixed_scales_leave_room_and_round_nothing() -> None:
    tops = torch.tensor([448.0, 1.0, 224.0, 223.9, 1e-3, 0.0, math.nan, math.inf])
    scales = fixed_scales(tops)
    assert scales[5:].tolist() == [1.0, 1.0, 1.0]
    reach = FLOAT8_MAX * scales[:5] / tops[:5]
    assert ((reach >= 2) & (reach <= 4)).all()
    assert (torch.frexp(scales).mantissa == 0.5).all()
    assert torch.equal(with_inverses(scales)[1] * scales, torch.ones(8))


@pytest.mark.parametrize("chosen", ["float32", "bfloat16"])
def test_a_start_makes_the_same_scales_as_the_one_before(chosen: str) -> None:
    """The scales suit the model's numbers: no key or value of the prompt saturates, and none is small."""
    made = []
    config = EngineConfig(model=str(bundled_model()), device="cpu", dtype=chosen)
    twins: list[BaseOps] = [make_ops("auto", 2), make_ops("portable", 1), ReferenceOps()]
    for twin in twins:
        loaded = load_model(config, twin)
        made.append(kv_scales.calibrate_host(loaded.model, loaded.config, loaded.dtype, loaded.max_model_len, twin))
    assert made[0].shape == (loaded.config.num_layers, 2, loaded.config.num_kv_heads)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])
    assert len(made[0].unique()) > 1


def scaled_model(directory: Path, scales: dict[str, Tensor]) -> Path:
    for file in bundled_model().iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    save_file(load_file(bundled_model() / "model.safetensors") | scales, directory / "model.safetensors")
    return directory


def test_scales_of_a_checkpoint_are_used(tmp_path: Path) -> None:
    config = load_model(EngineConfig(model=str(bundled_model()), device="cpu"), make_ops("auto")).config
    names = [f"model.layers.{i}.self_attn.{kind}_scale" for i in range(config.num_layers) for kind in "kv"]
    values = {name: torch.tensor(0.01 + i / 100) for i, name in enumerate(names)}
    values[names[1]] = values[names[1]][None].bfloat16()
    values[names[2]] = torch.arange(1, config.num_kv_heads + 1) / 100
    path = str(scaled_model(tmp_path, values))
    loaded = load_model(EngineConfig(model=path, device="cpu", kv_cache_dtype="fp8"), make_ops("auto"))
    assert loaded.kv_scales is not None
    for i, name in enumerate(names):
        assert torch.equal(loaded.kv_scales[i // 2, i % 2, 0], values[name].float().expand(config.num_kv_heads))
    assert torch.equal(loaded.kv_scales[:, :, 1], torch.ones(()) / loaded.kv_scales[:, :, 0])
    assert load_model(EngineConfig(model=path, device="cpu"), make_ops("auto")).kv_scales is None


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (torch.tensor(1.0), MissingWeightError, r"layers\.0\.self_attn\.v_scale"),
        (torch.tensor(0.0), WeightMismatchError, "positive"),
        (torch.tensor(math.nan), WeightMismatchError, "positive"),
        (torch.ones(2, 2), WeightMismatchError, "shape"),
    ],
)
def test_wrong_scales_of_a_checkpoint_are_refused(
    tmp_path: Path, scale: Tensor, error: type[Exception], message: str
) -> None:
    path = str(scaled_model(tmp_path, {"model.layers.0.self_attn.k_scale": scale}))
    with pytest.raises(error, match=message):
        load_model(EngineConfig(model=path, device="cpu", kv_cache_dtype="fp8"), make_ops("auto"))


# ---- size ----


@pytest.mark.parametrize(("chosen", "times"), [("float32", 4), ("bfloat16", 2)])
def test_the_same_memory_holds_more_blocks(chosen: str, times: int) -> None:
    blocks, bytes_per_block = [], []
    for kind in ("auto", "fp8"):
        config = EngineConfig.from_kwargs(
            str(bundled_model()),
            {
                "device": "cpu", "dtype": chosen, "kv_cache_dtype": kind, "kv_cache_memory_bytes": 1 << 23,
                "cpu_threads": 1, "max_model_len": 64,
            },
        )  # fmt: skip
        runner = CpuModelRunner.load(config)
        blocks.append(runner.info.num_kv_blocks)
        bytes_per_block.append(runner.info.kv_bytes_per_block)
        regions = runner.kv_block_regions()
        assert sum(size for _, size in regions) == bytes_per_block[-1]
    assert bytes_per_block[0] == times * bytes_per_block[1]
    assert blocks[1] // times == blocks[0]


def test_other_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, fp8"):
        EngineConfig.from_kwargs("unused", {"kv_cache_dtype": "int4"})
