"""The kernels of a step compile for Hopper, on a machine without a GPU.

In ``make test`` most tests stop at PTX, before ptxas. Registers are counted by those that do not, and by all of them
in ``make exhaustive``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.amounts import has_all_cases, sample_of
from tests.kernels.forked import WITHOUT_PTXAS, run_forked

ROOT = Path(__file__).resolve().parents[2]
AMOUNT = sample_of("all", "sample")
"""Argument of programs that compile fewer variants of a kernel in ``make test``."""


def compiled_for(directory: Path, quantization: str = "none", target: int = 90) -> list[str]:
    """The kernels of Qwen3, which has the most of them. Its real heads and widths, one layer, few words."""
    config = json.loads((ROOT / "bench/shapes/qwen3-0.6b/config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("layer_types", "max_window_layers")}
    config |= {"num_hidden_layers": 1, "vocab_size": 32000, "eos_token_id": None}
    (directory / "config.json").write_text(json.dumps(config))
    return run(
        directory, "-m", "tests.kernels.compile_for", str(target), str(directory), "bfloat16", quantization, AMOUNT
    )


def run(directory: Path, *arguments: str, ptxas: bool | None = None) -> list[str]:
    """The lines that Python prints, run without the interpreter of kernels.

    ``ptxas``: whether kernels are assembled; by default only where all cases of all tests run.
    """
    if ptxas is None:
        ptxas = has_all_cases()
    environment = {} if ptxas else {WITHOUT_PTXAS: "1"}
    cache = directory.parent / ("triton-cache" if ptxas else "ptx-cache")  # several tests compile some kernels once
    return run_forked(arguments, TRITON_CACHE_DIR=str(cache), **environment)


def test_every_kernel_of_a_step_compiles(tmp_path):
    lines = compiled_for(tmp_path)
    compiled = [line.split()[0] for line in lines]
    assert compiled.count("_attention_kernel") == 2  # decode and prefill
    assert compiled.count("_tma_prefill_kernel") == sample_of(1, 0)  # which has a test of its own
    assert compiled.count("_tiles_kernel") == 2  # greedy and full sampling
    for name in (
        "_fetch", "_ingest", "build_decode_kernel", "build_apart_kernel", "build_prefill_kernel", "_decode_kernel",
        "_paged_decode_kernel", "_tma_decode_kernel", "_norm_kernel", "_rotary_store_kernel", "_copy_blocks",
        "_collect_kernel", "finish_kernel", "_tma_kernel", "_head_kernel", "_first_kernel", "_vectors_kernel",
        "_sums_kernel", "_follow_kernel", "_keep_raw_kernel", "_edit_kernel", "_mask_kernel", "_logprobs_kernel",
        "_gather_kernel", "_exchange_kernel",
    ):  # fmt: skip
        assert name in compiled
    hinted = [line.split()[0] for line in lines if "copies evict_" in line]
    assert set(hinted) == {"_tma_kernel", "_head_kernel", "_tma_decode_kernel"}
    without_hints = [line.split()[0] for line in lines if line.endswith("copies as usual")]
    if "_tma_prefill_kernel" in without_hints:  # which never has any
        without_hints.remove("_tma_prefill_kernel")
    assert sorted(without_hints) == sorted(hinted), "each is there once more, and none of its copies has a policy"


def test_every_kernel_of_a_step_with_float8_weights_compiles(tmp_path):
    compiled = [line.split()[0] for line in compiled_for(tmp_path, "fp8")]
    assert compiled.count("_quantize_kernel") == 3  # after a norm, and of the widths of attention and of the MLP
    assert compiled.count("vector_kernel") == 4
    assert compiled.count("skinny_kernel") == 4
    assert compiled.count("_tiled_kernel") == 4
    assert "_norm_kernel" in compiled, "the head's"


FLOAT8_PLANS = """
from tests.kernels.compile_for import install
compiled = install()
import torch
from asyncengine.kernels.cuda.linear.plan import Plan
from asyncengine.kernels.float8 import FLOAT8, Quantized
from asyncengine.kernels.cuda.linear.tiled import linear

def float8(rows): return Quantized(torch.empty(rows, 80, dtype=FLOAT8), torch.empty(rows))

for plan in (
    Plan("vector", 8, 32, 1), Plan("skinny", 16, 16, 2), Plan("skinny", 16, 16, 2, ahead=2), Plan("skinny", 16, 32, 2),
    Plan("tiled", 16, 32, 4, 16, stages=2), Plan("tiled", 64, 128, 4, 32, stages=3), Plan("tiled", 64, 64, 4, 64),
):
    out = torch.empty(2, 48, dtype=torch.bfloat16)
    linear(float8(2), float8(96), plan, out=out, activation="silu_mul", pdl=True)
    linear(float8(2), float8(48), plan, out=out, bias=out[0], add=True, pdl=True)
for name, kernel in compiled.items():
    multiply = [word for word in ("wgmma", "mma.sync") if word in kernel.asm["ptx"]]
    print(name.split()[0] + "".join(":" + word for word in multiply))
"""


@pytest.mark.exhaustive  # a step with float8 weights has each of these kernels
def test_plans_for_float8_rows_compile(tmp_path):
    """Every kernel with rows that are quantised already, in lengths that no tile divides."""
    compiled = run(tmp_path, "-c", FLOAT8_PLANS)
    assert len(compiled) == 14
    assert compiled.count("vector_kernel") == 2
    assert compiled.count("skinny_kernel:mma.sync") == 6
    assert compiled.count("_tiled_kernel:wgmma") == 4, "64 channels are Hopper's own"


GROUPED_PRODUCTS = """
from tests.kernels.compile_for import install
compiled = install()
import torch
from asyncengine.kernels.cuda.gpu import H200, L40S
from asyncengine.kernels.cuda.linear.coded import coded_linear
from asyncengine.kernels.cuda.linear.direct import direct_linear, direct_sum
from asyncengine.kernels.cuda.linear.formats.registry import FORMATS
from asyncengine.kernels.cuda.linear.grouped import GroupedMatrix, multiply
from asyncengine.kernels.cuda.linear.plan import Plan, Site
from asyncengine.kernels.cuda.linear.residual import Unnormed
from asyncengine.kernels.ops import Norm
from asyncengine.kernels.weight import FLOAT8_GROUPS, INT4, INT8

def matrix(form, dtype, table=None, offsets=None):
    codes = torch.empty(96, 128 if form == INT4 else 256, dtype=dtype)
    scales = torch.empty(2 if table is None else 16, 96)
    return GroupedMatrix(form, codes, scales, scales if offsets else None, table, None)

for weight in (
    matrix(INT4, torch.uint8, offsets=True), matrix(INT4, torch.uint8, torch.empty(16)), matrix(INT8, torch.int8),
    matrix(FLOAT8_GROUPS, torch.float8_e4m3fn),
):
    for rows in (1, 20, 300):
        x = torch.empty(rows, 256, dtype=torch.bfloat16)
        multiply(x, weight, x[0, :96] if rows == 20 else None, torch.bfloat16)
        if weight.scales_sums and rows < 300:
            for dtype in (torch.bfloat16, torch.float16)[:rows]:
                site = Site(48, 256, rows, "none", "silu_mul", False, False, weight.form)
                plan = FORMATS[weight.form].pattern(site, H200)
                out, x = torch.empty(rows, 48, dtype=dtype), x.to(dtype)
                if plan.kind == "direct":
                    direct_linear(x, weight, plan, out=out, activation="silu_mul", pdl=True)
                plan, arrivals = FORMATS[weight.form].pattern(site, L40S), torch.empty(9, dtype=torch.int32)
                coded_linear(x, weight, plan, out=out, activation="silu_mul", arrivals=arrivals, pdl=True)

x, norm = torch.empty(1, 256, dtype=torch.bfloat16), Norm(torch.empty(96, dtype=torch.bfloat16), None, 1e-5)
for weight, tile in (matrix(INT4, torch.uint8), 128), (matrix(INT8, torch.int8, offsets=True), 64):
    plan = Plan("direct", 32, tile, 4, 16, stages=1)
    prepared = direct_sum(x, weight, plan, out=x[:, :96].contiguous(), norm=norm)
    direct_linear(Unnormed(x, prepared.sums, 1e-5), weight, plan, out=torch.empty(1, 96))
for name, kernel in compiled.items():
    multiply = [word for word in ("wgmma", "mma.sync") if word in kernel.asm["ptx"]]
    print(name.split()[0] + "".join(":" + word for word in multiply))
"""


def test_products_of_weights_in_codes_compile(tmp_path):
    """``multiply`` has a kernel of one row without tensor cores, one of few rows with them, and one that unpacks
    weights for many. ``coded_linear`` has one kernel, which converts pairs of codes by instructions of its own, and
    ``direct_linear`` one for int4 and int8 and few rows."""
    compiled = run(tmp_path, "-c", GROUPED_PRODUCTS)
    others = ["_product_kernel"] * 4 + ["_product_kernel:mma.sync"] * 4 + ["_unpack_kernel"] * 4
    assert sorted(compiled) == [*others, *["coded_kernel:mma.sync"] * 9, *["direct_kernel:mma.sync"] * 10]


TMA_PLANS = """
import sys
from tests.kernels.compile_for import install
compiled = install()
import torch
from asyncengine.kernels.cuda.linear.tma import tma_linear, tma_parts, tma_sum
from asyncengine.kernels.cuda.linear.plan import Plan
from asyncengine.kernels.ops import Norm
from asyncengine.kernels.cuda.linear.tiled import linear
from asyncengine.kernels.cuda.linear.residual import fold_norm

def random(*shape): return torch.empty(shape, dtype=torch.bfloat16)

for plan in (  # a wide and a narrow one with all, or the wide one alone, and of the others an addition
    Plan("tma", 256, 64, 8, 128, stages=4), Plan("tma", 16, 64, 4, 8, stages=2),
    Plan("tma", 64, 128, 4, 8, stages=4), Plan("tma", 128, 64, 4, 64, stages=4),
    Plan("tma", 128, 64, 8, 256, stages=3), Plan("tma", 32, 128, 8, 64, stages=4),
):
    x, out = random(5, 200), random(5, 48)
    if len(compiled) >= (14 if sys.argv[1] == "all" else 7):
        tma_linear(x, random(48, 200), plan, out=out, add=True, pdl=True)
        continue
    tma_linear(x, random(96, 200), plan, out=out, activation="silu_mul", bias=random(96), pdl=True)
    tma_linear(x, random(48, 200), plan, out=out, activation="gelu_tanh", pdl=True)
    tma_linear(x, random(48, 200), plan, out=out, add=True, pdl=True)
    for norm in (Norm(random(48), None, 1e-5), Norm(random(48), random(48), 1e-5)):
        unnormed = tma_sum(x, random(48, 200), plan, out=out, norm=norm, pdl=True)
        bias, shift = (None, None) if norm.bias is None else fold_norm(norm, random(96, 48), None)
        tma_linear(
            unnormed, random(96, 48), plan, out=random(5, 48), bias=bias, shift=shift, activation="silu_mul", pdl=True
        )
tma_parts(random(5, 256), random(48, 256), Plan("tma", 64, 64, 4, 16, 2, 2), bias=random(48), pdl=True)
for norm in (Norm(random(48), None, 1e-5), Norm(random(48), random(48), 1e-5)):
    linear(random(5, 200), random(48, 200), Plan("skinny", 16, 32, 2), out=out, add=True, reader=norm, pdl=True)
words = ("wgmma", "mma.sync", "griddepcontrol.wait", "cp.async.bulk.tensor")
for name, kernel in compiled.items():
    print(":".join([name.split()[0], *(word for word in words if word in kernel.asm["ptx"])]))
"""


def test_tma_plans_compile(tmp_path):
    """Lengths are such that no tile divides them, with every fused part; and additions of few rows that tma plans
    read."""
    compiled = run(tmp_path, "-c", TMA_PLANS, AMOUNT)
    kernel = "_tma_kernel:{}:griddepcontrol.wait:cp.async.bulk.tensor"
    wide, narrow = kernel.format("wgmma"), kernel.format("mma.sync")
    assert compiled[:-2] == [wide] * 7 + [narrow] * sample_of(7, 1) + [wide] * 3 + [narrow] + [wide]
    assert compiled[-2:] == ["skinny_kernel:mma.sync:griddepcontrol.wait"] * 2


MANY_ROWS = """
from tests.kernels.compile_for import install, spills
compiled = install()
import torch
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.linear.residual import Residual
from asyncengine.kernels.cuda.ops import CudaOps, CudaOptions
from asyncengine.kernels.ops import Norm
from asyncengine.kernels.weight import dense

def random(*shape): return torch.empty(shape, dtype=torch.bfloat16)

ops = CudaOps(torch.device("cpu"), CudaOptions(pdl=True, gpu=H200))
for rows, hidden, width, heads, layer, activation in (
    (512, 768, 768, 2304, True, "gelu_tanh"), (1024, 768, 768, 2304, True, "gelu_tanh"),
    (512, 1024, 2048, 4096, False, "silu_mul"), (2048, 1024, 2048, 4096, False, "silu_mul"),
):
    norm = Norm(random(hidden), random(hidden) if layer else None, 1e-5)
    up_rows = 3072 if layer else 6144

    def linear(n, k): return ops.make_linear([dense(random(n, k))], [random(n) if layer else None])

    stream = Residual(random(rows, hidden))
    ops.linear_add_(random(rows, width), linear(hidden, width), stream, None)
    y = ops.norm_linear(stream, norm, linear(up_rows, hidden), None, activation)
    ops.linear_add_(y, linear(hidden, 3072), stream, None)
    ops.norm_linear(stream, norm, linear(heads, hidden), None)
    stream.settle()
for name, kernel in compiled.items():
    print(":".join([name.split()[0], *spills(kernel)]))
"""


@pytest.mark.exhaustive
def test_plans_of_many_rows_compile(tmp_path):
    """The plans of a layer of GPT-2 and of Qwen3 compile, and registers suffice."""
    compiled = run(tmp_path, "-c", MANY_ROWS)
    assert len(compiled) > 10
    assert set(compiled) == {"_tma_kernel"}


EXPERTS = """
from tests.kernels.compile_for import install, spills
compiled = install()
import torch
from asyncengine.kernels.cuda.experts.mix import mix
from asyncengine.kernels.cuda.experts.route import choose_experts, route_rows
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.linear.handle import CudaLinear
from asyncengine.kernels.float8 import quantize
from asyncengine.kernels.ops import Experts, Norm, RoutingRule

def random(*shape): return torch.zeros(shape, dtype=torch.bfloat16)

for form in (lambda weight: weight, quantize):
    first, second = (CudaLinear(form(random(16, inner)), None, 16) for inner in (2048, 768))
    experts = Experts((first,), (second,), "silu_mul", 128)
    for rows in (1, 64, 2048):
        rule = RoutingRule(8, sums_to_one=True)
        routing = choose_experts(torch.zeros(rows, 128), rule, pdl=True)
        if rows == 1:
            router, counters = CudaLinear(random(128, 2048), None, 128), torch.zeros(1, dtype=torch.int32)
            route_rows(random(1, 2048), Norm(random(2048), None, 1e-6), router, rule, counters, H200, pdl=True)
        mix(random(rows, 2048), routing, experts, out=random(rows, 2048), add=True, gpu=H200, pdl=True)
for name, kernel in compiled.items():
    words = [word for word in ("wgmma", "griddepcontrol.wait") if word in kernel.asm["ptx"]]
    print(":".join([name.split()[0], *words, *spills(kernel)]))
"""


OF_EXPERTS = ("_route_kernel", "_choose_kernel", "_up_kernel", "_down_kernel", "_sort_kernel", "_add_kernel")


def test_mixtures_of_experts_compile(tmp_path):
    """The shape of Qwen3-30B-A3B, of which kernels see a few rows of the weights: one row, many, and a prompt."""
    compiled = run(tmp_path, "-c", EXPERTS)
    wait = "griddepcontrol.wait"
    assert set(compiled) == {
        f"_grouped_kernel:wgmma:{wait}",
        *(f"{name}:{wait}" for name in OF_EXPERTS),
    }
    assert compiled.count(f"_grouped_kernel:wgmma:{wait}") == 8


POLICIES = """
from tests.kernels.compile_for import install, policies
compiled = install()
import torch
from asyncengine.kernels.cuda.linear.tma import tma_linear
from asyncengine.kernels.cuda.linear.plan import Plan

def random(*shape): return torch.empty(shape, dtype=torch.bfloat16)

plan = Plan("tma", 64, 64, 4, 16, stages=2)
for rows, hints in ((16, True), (17, True), (17, False)):
    for activation, columns in ((None, 48), ("silu_mul", 96)):
        tma_linear(
            random(rows, 200), random(columns, 200), plan, out=random(rows, 48), activation=activation,
            l2_cache_hints=hints,
        )
for kernel in compiled.values():
    print(",".join(sorted(policies(kernel))).replace(" ", "-"))
"""


def test_weights_that_one_program_reads_leave_the_cache_first(tmp_path):
    whole, shared, unmarked = ([words] * 2 for words in ("evict_first,evict_last", "as-usual,evict_last", "as-usual"))
    assert run(tmp_path, "-c", POLICIES) == whole + shared + unmarked


TMA_RANKS = """
from tests.kernels.compile_for import install, spills
compiled = install()
import torch
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.linear.tma_ranks import tma_ranks
from asyncengine.kernels.cuda.linear.plan import Plan
from asyncengine.kernels.cuda.linear.tables import PlanTable

def random(*shape): return torch.empty(shape, dtype=torch.bfloat16)

plans = {plan: site for site, plan in PlanTable.shipped().items() if site.activation == "argmax"}
assert all(plan.kind in ("tma", "cublas") for plan in plans)
for plan in (*(plan for plan in plans if plan.kind == "tma"), Plan("tma", 256, 64, 8, 128, stages=4)):
    tma_ranks(random(plan.rows, 1024), random(300, 1024), plan, gpu=H200, pdl=True)
tma_ranks(random(5, 200), random(301, 200), Plan("tma", 64, 64, 4, 16, stages=2), bias=random(301), gpu=H200, pdl=True)
tma_ranks(random(5, 200), random(301, 200), Plan("tma", 64, 64, 4, 64, stages=2), bias=random(301), gpu=H200, pdl=True)
for name, kernel in compiled.items():
    print(":".join([name.split()[0], *(word for word in ("wgmma",) if word in kernel.asm["ptx"]), *spills(kernel)]))
"""


@pytest.mark.exhaustive
def test_tma_ranks_compile(tmp_path):
    """Kernels compile with weights as either operand, and by all plans that come with the package."""
    compiled = run(tmp_path, "-c", TMA_RANKS)
    assert len(compiled) > 6
    assert set(compiled) == {"_head_kernel:wgmma"}


ATTENTION = """
import sys
from dataclasses import replace
from tests.kernels.compile_for import card_for, install, policies, spills, stale_bounds
compiled = install(target := int(sys.argv[1]))
import torch
from asyncengine.kernels.cuda.attention.choose import Limits
from asyncengine.kernels.cuda.attention.plan import AttentionShape, LayerKind
from asyncengine.kernels.cuda.attention.run import StepAttention
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.ops import AttentionLayer, HeadNorms, LayerKVCache
from asyncengine.runner.steps.buckets import Bucket

card, cpu = card_for(target), torch.device("cpu")
def random(*shape): return torch.empty(shape, dtype=torch.bfloat16)

for heads, kv_heads, dim, rotary, norm in eval(sys.argv[2]):
    float8, sinks = "float8" in sys.argv, "sinks" in sys.argv
    shape = AttentionShape(heads, kv_heads, dim, torch.bfloat16, float8)
    scales, cached = (torch.ones(2, 2, kv_heads), torch.float8_e4m3fn) if float8 else (None, torch.bfloat16)
    # A cap changes what a kernel computes, and fixed splits which kernels there are: each with the other's default.
    for softcap, invariant in ((50.0, False), (0.0, True)) if "softcap" in sys.argv else ((0.0, False),):
        limits = Limits(64, 64, 512, 16, invariant)
        prepared = "prepared" in sys.argv
        attention = StepAttention([LayerKind(shape, 0, softcap, sinks, prepared)], limits, card, cpu)
        values = torch.ones(dim) if prepared else None
        layer = AttentionLayer(
            heads, HeadNorms(random(dim), random(dim), 1e-6, values) if norm else None,
            torch.empty(512, dim) if rotary else None, dim**-0.5, 0, softcap, None,
            torch.empty(heads) if sinks else None,
        )
        buckets = [Bucket(4, 64, False)]
        if "prompts" not in sys.argv:
            buckets += Bucket(4, 4, True, 64), Bucket(4, 8, False, 64), Bucket(4, 4, True)
        if not {"prompts", "softcap"} & set(sys.argv):
            buckets += Bucket(1, 1, True), Bucket(64, 64, True)
        for bucket in buckets:
            step = allocate_step(64, 32, 64, 64, cpu).bucket(bucket.max_rows, bucket.max_tokens)
            attend = attention.of(bucket).of(layer, kv_heads, dim)
            attend(
                random(bucket.max_tokens, (heads + 2 * kv_heads) * dim), layer,
                LayerKVCache(*(random(8, kv_heads, 16, dim).to(cached) for _ in "kv"), scales), step,
                pdl=card.dependent_launch,
            )
for name, kernel in compiled.items():
    assert kernel.metadata.shared <= card.shared_bytes, (name, kernel.metadata.shared, card)
    words = ["e4m3x2"] if float8 and "cvt.rn.f16x2.e4m3x2" in kernel.asm["ptx"] else []
    words += [word for word in ("wgmma", "griddepcontrol.wait", "cp.async.bulk.tensor") if word in kernel.asm["ptx"]]
    if "prepared" in sys.argv:
        words += spills(kernel)
    if name.startswith("_tma"):
        words += [*policies(kernel), *spills(kernel), *stale_bounds(kernel)]
    print(":".join([name.split()[0], *words]))
"""
MODELS = {
    "gpt2": "((12, 12, 64, False, False),)", "qwen3-0.6b": "((16, 8, 128, True, True),)",
    "llama-3.1-8b": "((32, 8, 128, True, False),)",
}  # fmt: skip


def test_attention_with_sinks_compiles(tmp_path):
    """The heads of gpt-oss-20b: rows of one token take the accelerator's kernel, those of prompts do not."""
    compiled = run(tmp_path, "-c", ATTENTION, "90", "((64, 8, 64, True, False),)", "sinks", ptxas=True)
    assert compiled.count("_tma_decode_kernel:griddepcontrol.wait:cp.async.bulk.tensor:evict_first") == 3
    assert "_attention_kernel:wgmma:griddepcontrol.wait" in compiled
    assert not any(line.startswith("_tma_prefill_kernel") for line in compiled)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", MODELS)
def test_attention_with_the_accelerator_compiles(tmp_path, model):
    """A lone row, few, many, some beside prompts. Registers do for it.

    Values for which registers have no room come back from memory when that is busiest, microseconds later.
    """
    compiled = run(tmp_path, "-c", ATTENTION, "90", MODELS[model], ptxas=True)
    words = "griddepcontrol.wait:cp.async.bulk.tensor"
    assert compiled.count(f"_tma_decode_kernel:{words}:evict_first") == 4
    assert compiled.count(f"_tma_prefill_kernel:wgmma:{words}:as usual") == 1
    assert {line.split(":")[0] for line in compiled} == {
        "_tma_decode_kernel", "_tma_prefill_kernel", "_decode_kernel",
        "_store_kernel" if model == "gpt2" else "_rotary_store_kernel",
    }  # fmt: skip


@pytest.mark.exhaustive
def test_prompts_of_other_groups_compile(tmp_path):
    models = "((64, 8, 64, False, False), (16, 1, 128, False, False))"
    compiled = run(tmp_path, "-c", ATTENTION, "90", models, "prompts")
    words = "wgmma:griddepcontrol.wait:cp.async.bulk.tensor:as usual"
    assert compiled.count(f"_tma_prefill_kernel:{words}") == 2


HEADS = "((16, 8, 128, True, True),)"
"""Heads of qwen3-0.6b."""
WIDE = "((8, 4, 256, True, False),)"
"""Wide heads, whose largest tiles have no room on Ada."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("target", "models"), [(89, WIDE), (80, WIDE), (90, HEADS)])
def test_attention_compiles_for_every_card(tmp_path, target, models):
    """All kernels in Triton, with soft caps, and with fixed splits; their tiles have room in shared memory.

    No kernel with the accelerator has either.
    """
    compiled = run(tmp_path, "-c", ATTENTION, str(target), models, "softcap")
    names = [line.split(":")[0] for line in compiled]
    assert {"_attention_kernel", "_paged_decode_kernel", "_decode_kernel"} <= set(names)
    assert not any(name.startswith("_tma") for name in names)


WIDEST = "((16, 2, 512, True, True),)", "((8, 1, 512, True, True),)"
"""Heads of the layers without a window of gemma-4-26b-a4b and of its smaller relatives."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("models", WIDEST)
@pytest.mark.parametrize("target", [89, 80, 90])
def test_attention_of_the_widest_heads_compiles_for_every_card(tmp_path, target, models):
    """Layers whose heads are prepared. Registers and shared memory do for tiles of 512 columns."""
    compiled = run(tmp_path, "-c", ATTENTION, str(target), models, "prepared", ptxas=True)
    names = {line.split(":")[0] for line in compiled}
    assert names == {"_attention_kernel", "_decode_kernel", "_rotary_store_kernel"}
    assert not [line for line in compiled if "spills" in line]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("target", "model", "store"),
    [
        (89, "((12, 12, 64, False, False),)", "_store_kernel"),
        (90, "((32, 8, 128, True, True),)", "_rotary_store_kernel"),
    ],
)
def test_attention_over_float8_compiles(tmp_path, target, model, store):
    """Kernels in Triton alone. Kernels that read make float16 of float8 by the hardware's own instruction."""
    compiled = run(tmp_path, "-c", ATTENTION, str(target), model, "float8")
    names = {name: "e4m3x2" in words for name, *words in (line.split(":") for line in compiled)}
    assert names == {"_attention_kernel": True, "_paged_decode_kernel": True, "_decode_kernel": True, store: False}
