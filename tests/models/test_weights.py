"""Weights as a model asks for them: their formats, and the parts that ranks take."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncengine._core import StepBatch
from asyncengine.errors import UnsupportedModelError
from asyncengine.kernels.cpu.base import Residual as HostResidual
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.kernels.cuda.linear.residual import Residual as DeviceResidual
from asyncengine.kernels.cuda.ops import CudaOps
from asyncengine.kernels.float8 import pack_float8, quantize
from asyncengine.kernels.ops import Norm
from asyncengine.kernels.weight import DENSE, FLOAT8, PackedWeight, common_format, dense
from asyncengine.models.config import RawConfig
from asyncengine.models.llama import LayerWeights, mlp_block
from asyncengine.models.registry import find_family
from asyncengine.models.weights.checkpoint import Checkpoint
from asyncengine.models.weights.dummy import DummyWeights
from asyncengine.models.weights.formats.at_load import Float8AtLoad, at_load
from asyncengine.models.weights.formats.base import Dense
from asyncengine.models.weights.shard import WHOLE, Part, Shard
from asyncengine.models.weights.source import WeightSource
from tests.kernels.interpreter import repair_interpreter
from tests.kernels.twins import NO_STEP
from tests.models import tiny


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    tiny.build_model(request.param).save_pretrained(path)
    return path


class Asked(ReferenceOps):
    """Keeps what a model hands to ``make_linear``."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []
        self.biases: list[Tensor | None] = []

    def make_linear(self, weights, biases):
        self.weights += [weight.tensors["weight"] for weight in weights]
        self.biases += biases
        return super().make_linear(weights, biases)


def asked(path: Path, dtype: torch.dtype, shard: Shard) -> Asked:
    ops, raw = Asked(), RawConfig.load(path)
    family = find_family(raw)[1]
    config = family.read_config(raw)
    tensors = Checkpoint(path, dtype)
    family.build(config, WeightSource(tensors, Dense(), shard), ops, 16)
    return ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_parts_of_two_ranks_are_the_whole_model(checkpoint: Path, dtype: torch.dtype) -> None:
    whole = asked(checkpoint, dtype, Shard())
    parts = [asked(checkpoint, dtype, Shard(rank, 2)) for rank in range(2)]
    seen = set()
    for weight, bias, *own in zip(
        whole.weights, whole.biases, *(p.weights for p in parts), *(p.biases for p in parts), strict=True
    ):
        weights, biases = own[:2], own[2:]
        assert weights[0].is_contiguous() == weight.is_contiguous()
        if weights[0].shape == weight.shape:
            seen.add("whole")
            assert all(torch.equal(part, weight) for part in weights)
        elif weights[0].shape[0] == weight.shape[0]:
            seen.add("columns")
            assert torch.equal(torch.cat(weights, 1), weight)
            assert bias is None or torch.equal(biases[0] + biases[1], bias)
        else:
            seen.add("rows")
            blocks = 3 if weight.shape[0] == 3 * weight.shape[1] else 1  # queries, keys and values of GPT-2
            assert torch.equal(together(weights, blocks), weight)
            assert bias is None or torch.equal(together(biases, blocks), bias)
    assert seen == {"whole", "columns", "rows"}


def together(parts: list[Tensor], blocks: int) -> Tensor:
    """Each block is the ranks' rows of it, in the order of the ranks."""
    return torch.cat([block for pair in zip(*(p.chunk(blocks) for p in parts), strict=True) for block in pair])


def test_whole_tensors_and_rows_are_read_where_they_lie_in_the_file(checkpoint: Path) -> None:
    tensors = Checkpoint(checkpoint, torch.float32)
    every = load_file(checkpoint / "model.safetensors")
    stored = {name: tensor for name, tensor in every.items() if tensor.dim() == 2 and len(tensor) % 2 == 0}
    for part in (WHOLE, Part(0, 1, 2)):
        taken = [tensors.get(name, *tensor.shape, part=part) for name, tensor in stored.items()]
        assert tensors.mapped_bytes == sum(tensor.nbytes for tensor in taken)
        assert tensors.owned_bytes == 0
        tensors.mapped_bytes = 0
    columns = [tensors.get(name, *tensor.shape, part=Part(1, 1, 2)) for name, tensor in stored.items()]
    assert tensors.owned_bytes == sum(tensor.nbytes for tensor in columns)


PACKAGES: list[tuple[Any, Any]] = [
    (partial(CpuOps, 1), HostResidual),
    (ReferenceOps, HostResidual),
    (partial(CudaOps, torch.device("cpu")), DeviceResidual),
]


@pytest.mark.parametrize(("make_ops", "residual_type"), PACKAGES, ids=["cpu", "reference", "cuda"])
def test_products_of_two_ranks_add_up_to_one_residual(
    make_ops: Any, residual_type: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    repair_interpreter()
    path = tmp_path_factory.mktemp("ranks")
    tiny.build_model("llama").save_pretrained(path)
    raw = RawConfig.load(path)
    config = find_family(raw)[1].read_config(raw)
    x = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(0))

    def run(shard: Shard, reduction: Any) -> Tensor:
        ops, residual = make_ops(), residual_type(x.clone())
        ops.reduction = reduction
        source = WeightSource(Checkpoint(path, torch.float32), Dense(), shard)
        mlp_block(LayerWeights(config, 0, source, ops)).forward(ops, residual, NO_STEP)
        return residual.settle() if hasattr(residual, "settle") else residual.x + residual.pending

    products: list[Tensor] = []

    def note(product: Tensor, batch: Any, onto: Tensor | None = None, norm: None = None) -> None:
        products.append(product.clone())

    def add(product: Tensor, batch: Any, onto: Tensor | None = None, norm: None = None) -> None:
        product += products[0]
        if onto is not None:
            onto += product

    run(Shard(1, 2), note)
    got = run(Shard(0, 2), add)
    torch.testing.assert_close(got, run(Shard(), None), rtol=1e-5, atol=1e-5)
    assert float((got - x).abs().max()) > 1e-3


def test_dummy_weights_have_parts_too() -> None:
    whole = DummyWeights(torch.float32, 1, 0).get_transposed("x.weight", 6, 4)
    for axis in (0, 1):
        parts = [
            DummyWeights(torch.float32, 1, 0).get_transposed("x.weight", 6, 4, part=Part(axis, rank, 2))
            for rank in range(2)
        ]
        assert torch.equal(torch.cat(parts, axis), whole)


def test_a_part_of_several_projections_in_the_order_of_our_heads() -> None:
    """Rows 4 to 12 hold two heads of four rows, one for each of two ranks; neighbours become halves."""
    tensor, order = torch.arange(20.0), torch.tensor([0, 2, 1, 3])
    parts = [Part(0, rank, 2, rows=(4, 12), order=order).of(tensor) for rank in range(2)]
    assert [part.tolist() for part in parts] == [[4, 6, 5, 7], [8, 10, 9, 11]]
    assert torch.cat(parts).equal(Part(rows=(4, 12), order=order).of(tensor))
    assert Part(rows=(4, 12)).of(tensor).data_ptr() == tensor[4:].data_ptr(), "no copy without an order"


def test_what_cannot_be_cut_raises() -> None:
    assert WHOLE.of(torch.ones(3)).shape == (3,)
    with pytest.raises(UnsupportedModelError, match=r"\[6, 4\] cannot be cut for 4 ranks along its axis 0"):
        Shard(0, 4).part("rows").of(torch.ones(6, 4))
    with pytest.raises(UnsupportedModelError, match="2 ranks"):
        Shard(0, 2).part("rows", blocks=3).of(torch.ones(9))


def test_float8_is_made_of_projections_and_of_nothing_else(checkpoint: Path) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    llama = "model.embed_tokens.weight" in stored
    embedding = "model.embed_tokens" if llama else "transformer.wte"
    projection = "model.layers.0.mlp.up_proj" if llama else "transformer.h.0.mlp.c_fc"
    tensors = Checkpoint(checkpoint, torch.bfloat16)
    source = WeightSource(tensors, at_load("fp8"))
    table = source.table(embedding, *stored[f"{embedding}.weight"].shape)
    assert table.format == DENSE
    before = tensors.owned_bytes
    assert before == table.nbytes
    matrix = stored[f"{projection}.weight"].bfloat16()
    matrix = matrix if llama else matrix.T
    weight = source.weight(projection, *matrix.shape, transposed=not llama)
    twin = quantize(matrix)
    assert (weight.format, weight.out_features, weight.in_features) == (FLOAT8, *matrix.shape)
    assert torch.equal(weight.tensors["values"].float(), twin.values.float())
    assert torch.equal(weight.tensors["scale"], twin.scale)
    assert tensors.owned_bytes - before == weight.nbytes
    assert isinstance(at_load("none"), Dense)
    assert not isinstance(at_load("none"), Float8AtLoad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_format_without_native_kernels_is_unpacked_for_each_product(dtype: torch.dtype) -> None:
    """The CPU multiplies float8 as the twin does, and a row by itself as among others."""

    def random(*shape: int, seed: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    up = [pack_float8(random(n, 32, seed=n)) for n in (40, 24)]
    down, head = pack_float8(random(32, 64, seed=1)), pack_float8(random(57, 32, seed=2))
    biases = [random(40, seed=3), None]
    norm, x = Norm(random(32, seed=4), None, 1e-6), random(5, 32, seed=5)

    def run(ops: Any, rows: slice) -> tuple[Tensor, ...]:
        residual, count = HostResidual(x[rows].clone()), len(x[rows])
        places = list(range(count))
        batch = StepBatch([0] * count, places, places, [0, count], [0], [[0]], places)
        inner = ops.norm_linear(residual, norm, ops.make_linear(up, biases), batch, "gelu_tanh").clone()
        ops.linear_add_(inner, ops.make_linear([down], [None]), residual, batch)
        return inner, residual.pending.clone(), ops.logits(residual, norm, ops.make_head(head), batch).clone()

    cpu, whole = CpuOps(2), slice(0, 5)
    got = run(cpu, whole)
    assert [part.dtype for part in got] == [dtype, dtype, torch.float32]
    for part, twin in zip(got, run(ReferenceOps(), whole), strict=True):
        spread = 2e-6 if dtype == torch.float32 else 2.0**-4  # an eighth of float8 where rounding falls the other way
        assert (part - twin).abs().max() <= spread * twin.abs().max()
    for row in range(5):
        alone = run(cpu, slice(row, row + 1))
        assert all(torch.equal(one, part[row : row + 1]) for one, part in zip(alone, got, strict=True))


def test_formats_that_a_package_lacks_raise() -> None:
    plain = dense(torch.ones(4, 8))
    packed = PackedWeight("ternary", {"weight": torch.ones(4, 8)}, 4, 8)
    cpu = CpuOps(1)
    with pytest.raises(ValueError, match="'ternary' are not implemented here, but dense"):
        cpu.make_linear([packed], [None])
    with pytest.raises(ValueError, match="'float8' are not implemented here, but dense"):
        cpu.make_embedding(pack_float8(torch.ones(4, 8)), tied=False)
    with pytest.raises(ValueError, match="one format, got dense, ternary"):
        cpu.make_linear([plain, packed], [None, None])
    with pytest.raises(ValueError, match="got none"):
        common_format([])
