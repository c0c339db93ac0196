"""The kernels that plans name for a card compile for it, on a machine without a GPU."""

from __future__ import annotations

import pytest

from asyncengine.kernels.cuda.gpu import A100, H200, KNOWN, L40S, Gpu
from tests.kernels.test_compile import run

LAYER = """
import sys
from tests.kernels.compile_for import install
name, quantization = sys.argv[1:]
import torch
from asyncengine.kernels.cuda.gpu import KNOWN
[gpu] = [gpu for gpu in KNOWN if gpu.name == name]
compiled = install(10 * gpu.capability[0] + gpu.capability[1])
from asyncengine.kernels.cuda.linear.residual import Residual
from asyncengine.kernels.cuda.linear.tables import PlanTable
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps, CudaOptions
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.ops import Norm
from asyncengine.kernels.weight import dense
from asyncengine.kernels.float8 import pack_float8

def random(*shape): return torch.empty(shape, dtype=torch.bfloat16)

pack = dense if quantization == "none" else pack_float8

options = CudaOptions(PlanTable.load(name), gpu.dependent_launch, gpu=gpu)
ops = CudaOps(torch.device("cpu"), options)
for hidden, width, heads, up, layer, activation in (
    (768, 768, 2304, 3072, True, "gelu_tanh"), (1024, 2048, 4096, 6144, False, "silu_mul")
)[quantization == "fp8" :]:
    def linear(n, k): return ops.make_linear([pack(random(n, k))], [random(n) if layer else None])

    norm = Norm(random(hidden), random(hidden) if layer else None, 1e-5)
    qkv, o, wide, down = linear(heads, hidden), linear(hidden, width), linear(up, hidden), linear(hidden, 3072)
    table = dense(random(1024, hidden))
    embedding, head = ops.make_embedding(table, tied=False), ops.make_head(table)
    for rows in (1, 8, 64) if quantization == "fp8" else (1, 8, 64, 320):
        batch = CudaBatch(allocate_step(1, 1, min(rows, 8), rows, ops.device))
        residual = ops.embed(batch, embedding, random(8, hidden) if layer else None)
        ops.norm_linear(residual, norm, qkv, batch)
        ops.linear_add_(random(rows, width), o, residual, batch)
        y = ops.norm_linear(residual, norm, wide, batch, activation)
        ops.linear_add_(y, down, residual, batch)
        ops.logits(residual, norm, head, batch, softcap=30.0)
for name, kernel in compiled.items():
    assert kernel.metadata.shared <= gpu.shared_bytes, name
    print(name.split()[0])
"""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("gpu", "quantization"), [(A100, "none"), (L40S, "fp8"), (H200, "none"), (H200, "fp8")], ids=str
)
def test_a_layer_compiles(tmp_path, gpu: Gpu, quantization: str) -> None:
    compiled = set(run(tmp_path, "-c", LAYER, gpu.name, quantization))
    rows = {"_embed_kernel", "_norm_kernel", "_soft_cap_kernel"}
    products = {"vector_kernel", "skinny_kernel", "_tiled_kernel"}
    assert rows <= compiled
    if quantization == "fp8":
        assert products | {"_quantize_kernel"} <= compiled
    elif gpu.tma:
        assert {"vector_kernel", "skinny_kernel", "_tma_kernel"} <= compiled
    else:
        assert "_activation_kernel" in compiled
        assert not compiled & {*products, "_tma_kernel"}, "cuBLAS multiplies, until plans are measured"


LINK = """
import sys
from tests.kernels.compile_for import install
from asyncengine.kernels.cuda.gpu import A100, H200, L40S
[card] = [card for card in (A100, L40S, H200) if card.capability == tuple(map(int, sys.argv[1]))]
compiled = install(int(sys.argv[1]))
import torch
from asyncengine.kernels.cuda.attention.link import LinkRows, attend
for heads, kv_heads, dim, dtype in ((32, 8, 128, torch.bfloat16), (8, 4, 256, torch.float32)):
    for float8 in (False, True)[: 1 + card.has_float8]:
        rows = LinkRows(
            torch.zeros(64, dtype=torch.int32),
            torch.empty(2, 2, 2, kv_heads, 16, dim, dtype=torch.float8_e4m3fn if float8 else dtype),
            torch.zeros(4, heads + 2 * kv_heads, dim * dtype.itemsize // 4, dtype=torch.int64),
            torch.empty(4, heads * dim, dtype=dtype), torch.ones(2, 2), torch.zeros(2, dtype=torch.int32),
            torch.ones(2, 2, 2, kv_heads) if float8 else None, 8,
        )
        attend(rows, gpu=card)
for name, kernel in compiled.items():
    assert kernel.metadata.shared <= card.shared_bytes, (name, kernel.metadata.shared, card)
    print(kernel.metadata.shared)
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", [89, 80, 90])
def test_attention_over_the_link_compiles(tmp_path, target):
    """Keys and values under way have room in shared memory, of wide heads as of narrow ones."""
    shared = [int(line) for line in run(tmp_path, "-c", LINK, str(target))]
    assert len(shared) == (2 if target == 80 else 4)
    assert min(shared) > 20_000, "several stages"


def test_known_cards_have_the_names_of_their_drivers() -> None:
    assert len({gpu.name for gpu in KNOWN}) == len(KNOWN)
    assert [gpu.name for gpu in KNOWN if gpu.has_float8] == [gpu.name for gpu in KNOWN if gpu is not A100]
    assert {gpu.name for gpu in KNOWN if gpu.tma} <= {gpu.name for gpu in KNOWN if gpu.may_use_tma}
    assert {gpu.name for gpu in KNOWN if gpu.dependent_launch} <= {g.name for g in KNOWN if g.may_launch_dependently}
    assert H200.tile_bytes == 220_000
    assert H200.tile_bytes_of_two == 110_000
    assert H200.most_tile_bytes == 228_000
