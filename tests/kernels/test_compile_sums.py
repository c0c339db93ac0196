"""Sums over GPUs and attention over latents compile for Hopper, on a machine without a GPU."""

from __future__ import annotations

import pytest

from tests.kernels.test_compile import run

SUMS = """
from tests.kernels.compile_for import install
compiled = install()
import torch
from asyncengine.kernels.cuda.comm.exchange import allocate
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.ops import Norm

device = torch.device("cpu")
for dtype in (torch.bfloat16, torch.float32):
    own = allocate(1, 2, 512, 4096, dtype, device, logits=2 * 2 * 64128, pdl=True)
    norm = Norm(torch.empty(4096, dtype=dtype), None, 1e-5)
    for rows in (1, 512):
        product = torch.empty(rows, 4096, dtype=dtype)
        own.reduce(product, onto=product.clone(), norm=norm)
own.gather(torch.empty(2, 64128), 64128)
own.share(allocate_step(4, 1, 4, 4, device).slots)
for name, kernel in compiled.items():
    words = ("ld.volatile.global.v2.b64", "st.global.v2.b64", "sys.release", "sys.acquire", "griddepcontrol.wait")
    print(name.split()[0], *(word for word in words if word in kernel.asm["ptx"]))
"""


def test_sums_over_gpus_compile(tmp_path):
    """Packets of 64 bits are loaded and stored two at once, and by no instruction that may cut them."""
    compiled = sorted(run(tmp_path, "-c", SUMS))
    assert compiled == [
        "gather_kernel sys.release griddepcontrol.wait",
        "share_kernel sys.acquire griddepcontrol.wait",
        *["sum_few_kernel ld.volatile.global.v2.b64 st.global.v2.b64 griddepcontrol.wait"] * 2,
        *["sum_many_kernel sys.release sys.acquire griddepcontrol.wait"] * 2,
    ]


LATENT = """
import sys
from tests.kernels.compile_for import install, spills
compiled = install()
import torch
from asyncengine.kernels.cuda.attention.latent import choose_plan, latent_attention
from asyncengine.kernels.cuda.attention.latent_decode import fits_decode
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.float8 import FLOAT8
from asyncengine.kernels.latent import LatentLayer
from asyncengine.kernels.ops import LayerLatentCache

def random(*shape): return torch.zeros(shape, dtype=torch.bfloat16)

for heads in [int(sys.argv[1])]:
    layer = LatentLayer(heads, 512, 64, random(512), 1e-6, torch.zeros(8, 64), 0.1, None)
    for float8, rows, tokens in ((form, *sizes) for form in (False, True) for sizes in ((1, 1), (256, 256), (4, 64))):
        step, cache = allocate_step(rows, 8, rows, tokens, torch.device("cpu")), LayerLatentCache(random(1, 16, 576))
        if float8:
            cache = LayerLatentCache(cache.latents.to(FLOAT8), torch.ones(2, 2, 1))
        q, q_rope, new = random(tokens, heads, 512), random(tokens, heads, 256)[..., 192:], random(tokens, 1344)
        for transposed in (False, fits_decode(layer, torch.bfloat16, H200) and tokens == rows and not float8):
            plan = choose_plan(rows, tokens, heads, torch.bfloat16, 132, float8=float8, transposed=transposed)
            latent_attention(q, q_rope, new[:, 768:], layer, cache, step, plan, pdl=True)
for name, kernel in compiled.items():
    words = ("wgmma", "mma.sync", "griddepcontrol.wait", "cvt.rn.f16x2.e4m3x2", "cvt.rn.satfinite.e4m3x2")
    words = [word for word in words if word in kernel.asm["ptx"]]
    print(":".join([name.split()[0], *words, *spills(kernel)]))
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("heads", [20, 128])
def test_attention_over_latents_compiles(tmp_path, heads):
    """The heads of GLM-4.7-Flash and DeepSeek-V3: one row, many, and a prompt; registers suffice. Kernels that read
    float8 make float16 of it by the hardware's own instruction."""
    wait, narrows, widens = "griddepcontrol.wait", "cvt.rn.satfinite.e4m3x2", "cvt.rn.f16x2.e4m3x2"
    assert set(run(tmp_path, "-c", LATENT, str(heads))) == {
        *(f"{name}:{wait}" for name in ("_latent_store_kernel", "_latent_sum_kernel")),
        f"_latent_store_kernel:{wait}:{narrows}",
        *(f"_latent_kernel:{words}:{wait}" for words in (("mma.sync", "wgmma") if heads == 20 else ("wgmma",))),
        f"_latent_kernel:mma.sync:{wait}:{widens}",
        *((f"latent_decode_kernel:wgmma:{wait}",) if heads == 20 else ()),
    }


EXPANDED = """
import sys
from tests.kernels.compile_for import install, spills
compiled = install()
import torch
from asyncengine.kernels.cuda.attention.context import find_expanded_rows
from asyncengine.kernels.cuda.attention.expanded import choose_expanded, expanded_attention
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.float8 import FLOAT8
from asyncengine.kernels.latent import LatentLayer
from asyncengine.kernels.ops import LayerLatentCache

torch.mm = lambda a, b: a.new_empty(len(a), b.shape[1])  # nothing is to be computed
def random(*shape): return torch.zeros(shape, dtype=torch.bfloat16)

for heads, key, value in [map(int, sys.argv[1:])]:
    layer = LatentLayer(heads, 512, 64, random(512), 1e-6, torch.zeros(8, 64), 0.1, random(heads, key + value, 512))
    step, q, rows = allocate_step(4, 8, 4, 512, torch.device("cpu")), random(512, heads, key + 64), random(512, 1344)
    cache, scales = LayerLatentCache(random(1, 16, 576)), torch.ones(2, 2, 1)
    for tokens in (1024, 2048):  # contexts of one part, and of several
        plan = choose_expanded(tokens, key, layer, value, torch.bfloat16, H200)
        float8 = LayerLatentCache(cache.latents.to(FLOAT8), scales)
        for context, own in ((None, cache), (plan.context, cache), (plan.context, float8)):
            found = find_expanded_rows(step, context, pdl=True)
            out, plan = random(512, heads, value), plan._replace(context=context)
            expanded_attention(q, rows[:, 768:], layer, own, step, found, out, plan, pdl=True)
for name, kernel in compiled.items():
    words = [word for word in ("wgmma", "mma.sync", "griddepcontrol.wait") if word in kernel.asm["ptx"]]
    print(":".join([name.split()[0], *words, *spills(kernel)]))
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("heads", [(20, 192, 256), (16, 128, 128), (128, 128, 128)], ids=str)
def test_attention_over_keys_made_of_latents_compiles(tmp_path, heads):
    """The heads of GLM-4.7-Flash, DeepSeek-V2-Lite and DeepSeek-V3, by Hopper's products; registers suffice."""
    wait = "griddepcontrol.wait"
    assert set(run(tmp_path, "-c", EXPANDED, *map(str, heads))) == {
        f"_expanded_kernel:wgmma:{wait}", f"_context_kernel:wgmma:{wait}", f"_expanded_rows_kernel:{wait}",
        f"_merge_kernel:{wait}",
    }  # fmt: skip
