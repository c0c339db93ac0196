"""The kernels of experts in codes compile for Hopper, on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.test_compile import AMOUNT, OF_EXPERTS, run

CODED_EXPERTS = """
import sys
from tests.kernels.compile_for import install, spills
compiled = install()
import torch
from asyncengine.kernels.cuda.experts.codes import _in_words
from asyncengine.kernels.cuda.experts.mix import mix
from asyncengine.kernels.cuda.experts.route import choose_experts, route_rows
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.linear.grouped import CodedRows
from asyncengine.kernels.cuda.linear.handle import CudaLinear
from asyncengine.kernels.ops import Experts, Norm, RoutingRule

def random(*shape): return torch.zeros(shape, dtype=torch.bfloat16)

def coded(rows, inner, group, scales, fp4):
    codes = torch.zeros(rows, -(-inner // 128) * 64, dtype=torch.uint8)
    known = _in_words(torch.zeros(rows, inner // group, dtype=scales))
    return CudaLinear(CodedRows(codes, known, inner, fp4), random(rows), rows)

shapes = {
    "gpt-oss-20b": (2880, 2880, 32, 4, "clamped_silu_mul", (32, torch.uint8, True)),
    "qwen3-30b-a3b": (2048, 768, 128, 8, "silu_mul", (128, torch.float32, False)),
    "qwen3.6-35b-a3b": (2048, 512, 257, 8, "silu_mul", (128, torch.float32, False)),
}
for hidden, inner, count, top_k, activation, how in [shapes[sys.argv[1]]]:
    rule = RoutingRule(top_k, sums_to_one=True, shared="gated" if count == 257 else "none")
    experts = Experts((coded(16, hidden, *how),), (coded(16, inner, *how),), activation, count)
    for rows in (1, 64, 2048) if sys.argv[2] == "all" else (1, 64):
        routing = choose_experts(torch.zeros(rows, count), rule, pdl=True)
        if rows == 1:
            router, counters = CudaLinear(random(count, hidden), None, count), torch.zeros(1, dtype=torch.int32)
            route_rows(random(1, hidden), Norm(random(hidden), None, 1e-6), router, rule, counters, H200, pdl=True)
        mix(random(rows, hidden), routing, experts, out=random(rows, hidden), add=True, gpu=H200, pdl=True)
for name, kernel in compiled.items():
    assert kernel.metadata.shared <= H200.shared_bytes, (name, kernel.metadata.shared)
    ptx = kernel.asm["ptx"]
    words = [word for word in ("wgmma", "griddepcontrol.wait") if word in ptx]
    between = ptx.split("mma.sync")[1:-1]  # one part may store results: it ends one loop, and another one follows
    loop = "".join(part for part in between if "st.global" not in part)
    words += [word for word in ("bar.sync", "shared", "shfl") if word in loop]
    print(":".join([name.split()[0], *words, *spills(kernel)]))
"""

MODELS = ("gpt-oss-20b", "qwen3-30b-a3b", "qwen3.6-35b-a3b")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", MODELS)
def test_mixtures_of_experts_in_codes_compile(tmp_path: Path, model: str) -> None:
    """The shapes of gpt-oss-20b in MXFP4 and of Qwen3-30B-A3B and Qwen3.6-35B-A3B in int4, the last one with a shared
    expert among its experts: one row, many, and a prompt.

    No code moves between threads in the loops of the kernel for few rows of each expert.
    """
    compiled = run(tmp_path, "-c", CODED_EXPERTS, model, AMOUNT)
    wait = "griddepcontrol.wait"
    few, prompts = f"direct_experts_kernel:{wait}", f"_grouped_kernel:wgmma:{wait}"
    others = {f"{name}:{wait}" for name in ("_route_kernel", "_choose_kernel", "_sort_kernel", "_add_kernel")}
    assert set(compiled) == {few, *others} | ({prompts} if AMOUNT == "all" else set())
    assert compiled.count(few) == 4


CODED_ELSEWHERE = CODED_EXPERTS.replace("H200", "A100")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", MODELS)
def test_mixtures_of_experts_in_codes_compile_for_cards_without_gluon(tmp_path: Path, model: str) -> None:
    compiled = run(tmp_path, "-c", CODED_ELSEWHERE, model, AMOUNT)
    names = {name.partition(":")[0] for name in compiled}
    assert names == {*OF_EXPERTS, "_grouped_kernel"}
