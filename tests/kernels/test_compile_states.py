"""Kernels of layers with a state compile for Hopper, and registers do for the shapes of real models."""

from __future__ import annotations

from tests.kernels.test_compile import AMOUNT, run

LAYERS = """
import math
import sys
from tests.kernels.compile_for import card_for, install, spills
compiled = install(target := int(sys.argv[1]))
import torch
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps, CudaOptions
from asyncengine.kernels.cuda.step.ingest import make_source
from asyncengine.kernels.cuda.step.states import copy_states
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.ops import LayerStates
from asyncengine.kernels.states import DeltaNet, Mamba2, ShortConv

card, cpu, some = card_for(target), torch.device("cpu"), torch.empty
ops = CudaOps(cpu, CudaOptions(gpu=card, pdl=card.dependent_launch))

def mamba(heads, dim, size, groups, half, norm):
    conv = ShortConv(some(4, heads * dim + 2 * groups * size), some(heads * dim + 2 * groups * size), silu=True)
    weight = some(heads * dim) if norm else None
    dtype = torch.bfloat16 if half else torch.float32
    numbers = some(heads), some(heads), some(heads)
    return Mamba2(conv, *numbers, dim, size, groups, (0.0, math.inf), weight, 1e-5, state_dtype=dtype)

def delta(heads, groups, half):
    conv = ShortConv(some(4, 128 * (heads + 2 * groups)), silu=True)
    dtype = torch.bfloat16 if half else torch.float32
    return DeltaNet(conv, some(heads), some(heads), groups, 128, 128, some(128), 1e-6, dtype)

layers = (
    ShortConv(some(3, 2048)), delta(32, 16, False), delta(32, 16, True), mamba(128, 64, 128, 8, False, True),
    mamba(24, 128, 256, 1, True, False),
)
one_of_each_kind = layers[0], layers[1], layers[3]
of_bfloat16 = one_of_each_kind if sys.argv[2] == "sample" else layers
for dtype, some_layers in ((torch.bfloat16, of_bfloat16), (torch.float32, layers[:2]))[: 1 + (sys.argv[2] == "all")]:
    for layer in some_layers:
        if isinstance(layer, ShortConv):
            width, num_bytes, run = layer.weight.shape[1], ShortConv.state_bytes(*layer.weight.shape), ops.short_conv
        else:
            size = layer.key_dim if isinstance(layer, DeltaNet) else layer.state_size
            num_bytes = ShortConv.state_bytes(*layer.conv.weight.shape)
            num_bytes += layer.inner * size * layer.state_dtype.itemsize
            width, run = layer.width, ops.delta_net if isinstance(layer, DeltaNet) else ops.mamba2
        states = LayerStates(some(16, num_bytes, dtype=torch.uint8))
        for rows, tokens, single in ((4, 4, True), (8, 8, True), (16, 16, True), (4, 256, False)):
            step = allocate_step(rows, 1, rows, tokens, cpu)
            run(some(tokens, width, dtype=dtype), layer, states, CudaBatch(step, single_token_rows=single))
source = make_source(torch.zeros(2, 64, dtype=torch.int32), torch.zeros(2, 8, dtype=torch.int64), cpu, fetch=False)
copy_states(source, some(2, 4, 4096, dtype=torch.uint8))
for name, kernel in compiled.items():
    assert kernel.metadata.shared <= card.shared_bytes, (name, kernel.metadata.shared, card)
    words = [word for word in ("griddepcontrol.wait",) if word in kernel.asm["ptx"]]
    spilled = [] if "chunks" in name else spills(kernel)  # chunks fill all registers, and may spill a few
    print(":".join([name.split()[0], *words, *spilled]))
"""


def test_layers_with_a_state_compile(tmp_path):
    compiled = run(tmp_path, "-c", LAYERS, "90", AMOUNT)
    wait = ":griddepcontrol.wait"
    names = (
        "_conv_kernel", "_shift_kernel", "_delta_kernel", "_delta_step_kernel", "_mamba_kernel", "_gate_kernel",
        "_inverse_kernel", "_delta_chunks_kernel", "_mamba_chunks_kernel",
    )  # fmt: skip
    assert set(compiled) == {*(name + wait for name in names), "_copy_states"}, "a kernel that spills says so"
