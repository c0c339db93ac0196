"""Attention of a few rows with heads of 256 compiles for Hopper's accelerator, on a machine without a GPU."""

from __future__ import annotations

import pytest

from tests.kernels.test_compile import ATTENTION, run

MODELS = "((16, 4, 256, True, True), (8, 4, 256, True, True), (16, 2, 256, True, True), (4, 1, 256, True, False))"
"""Heads like those of Qwen3.5 and of Gemma 3, in groups of 2, 4 and 8."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["plain", "sinks", "prepared"])
def test_few_rows_of_wide_heads_compile(tmp_path, kind):
    """Registers do for each, with sinks and after a kernel that prepares heads. Other steps take other kernels."""
    compiled = run(tmp_path, "-c", ATTENTION, "90", MODELS, kind, ptxas=True)
    accelerated = [line for line in compiled if line.startswith("_tma")]
    assert accelerated == ["_tma_decode_kernel:griddepcontrol.wait:cp.async.bulk.tensor:evict_first"] * 4
    assert any(line.startswith("_attention_kernel") for line in compiled)
