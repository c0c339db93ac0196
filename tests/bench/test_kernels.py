"""bench/kernels.py on a model of a few heads: every kernel runs, those of attention give what torch gives."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kernel_attention
import kernels
import numpy as np
import pytest
import torch
from gpu_common import read_model
from kernel_timing import Line
from replay import Row, choose_bucket, decode_rows

from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.attention.run import StepAttention
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.ops import CudaOps, CudaOptions
from asyncengine.kernels.ops import AttentionLayer
from asyncengine.runner.steps import device_steps

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 128,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 64, "vocab_size": 512, "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 128, "n_head": 8, "n_layer": 1,
    "n_positions": 64, "vocab_size": 509, "activation_function": "gelu_new",
}  # fmt: skip
SIZES = [
    "--rows=2", "--decode-rows=1,5", "--contexts=40", "--ragged=2", "--prefill=1x20+0,2x5+30", "--layer=2x33",
    "--no-targets", "--no-pdl", "--repeats=1",
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("config", [QWEN3, GPT2], ids=["qwen3", "gpt2"])
def test_all_parts(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(kernel_attention, "SHORT", 16)
    record = tmp_path / "record.json"
    where = ["--device", device.type, "--shape", str(tmp_path), "--json", str(record)]
    gated = config is QWEN3
    where += ["--kv-cache-dtype", "auto", "fp8"] if gated else []
    parts = [part for part in kernels.PARTS if gated or part != "experts"]  # whose shapes are their own
    monkeypatch.setattr("sys.argv", ["bench/kernels.py", *parts, *SIZES, "--logits", "peaked", *where])
    with np.errstate(all="ignore"):
        kernels.main()
    lines = json.loads(record.read_text())["lines"]
    found = {(line["part"], line["kernel"]) for line in lines}
    norm = "RMS norm" if gated else "layer norm"
    activation = "silu_mul" if gated else "gelu_tanh"
    expected = {
        "rows": [norm, "embedding", activation, "QK norm, rotary, KV store" if gated else "KV store", "ingest"],
        "linear": [
            f"{norm} + qkv",
            "o + add + norm",
            f"{norm} + up + {activation}",
            "down + add + norm",
            f"{norm} + head",
            "head + greedy",
            "head + greedy by logits",
        ],
        "attention": ["decode, paged", "decode, few keys", "prefill", "work list"],
        "sampler": ["greedy", "temperature", "top-k 50", "top-p 0.95", "k 50, p 0.95, min-p 0.05"],
        "layer": ["few keys", "paged", "separate"],
        "experts": [name + form for name in ("norm + router + experts", "router", "experts") for form in ("", ", fp8")],
    }
    assert found == {(part, kernel) for part in parts for kernel in expected[part]}
    assert any("fp8 cache" in line["shape"] for line in lines) == gated
    for line in lines:
        assert line["us"] > 0 or line["part"] == "layer"  # that is a difference
        assert line["share"] == pytest.approx(line["floor_us"] / line["us"])
        alone = (
            line["part"] == "experts"
            or line["kernel"] == "work list"
            or "1 x 64" in line["size"]
            or "fp8" in line["shape"]
        )
        assert (line["torch_us"] is None) == alone


def test_a_wrong_result_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    monkeypatch.setattr(kernel_attention, "launch_all", lambda _, call: call.out.zero_())
    where = ["--device", device.type, "--shape", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["bench/kernels.py", "attention", *SIZES, *where])
    with pytest.raises(SystemExit, match="wrong result"):
        kernels.main()


def test_lines_by_hand() -> None:
    line = Line("attention", "decode", "x", "1 x 2", us=2.0, bytes=4.4e6, flops=1e9, at_least=0.75)
    assert line.floor_us(rate=1e16) == pytest.approx(1.0)  # the bytes take longer
    assert line.floor_us(rate=1e15) == pytest.approx(1.0)
    assert line.floor_us(rate=5e14) == pytest.approx(2.0)
    time, share = kernels.figures([line], 1e16)
    assert (time.value, time.met) == (2.0, None)
    assert (share.value, share.at_least, share.met) == (pytest.approx(50), 75, False)


def test_options() -> None:
    args = kernels.parse([])
    assert args.json == "bench/results/kernels.json"
    assert args.parts == ["rows", "linear", "attention", "sampler"]
    assert args.prefill[1] == [Row(2048, 14336)]
    assert args.prefill[4] == [Row(128, 0)] * 16
    quick = kernels.parse(["attention", "--quick", "--contexts", "128", "--work", "split_tokens=1024"])
    assert (args.kv_cache_dtype, args.float8) == (["auto"], False)
    assert kernels.parse(["attention", "--kv-cache-dtype", "auto", "fp8"]).kv_cache_dtype == ["auto", "fp8"]
    assert (quick.json, quick.contexts, quick.shape) == (None, [128], ["llama-3.1-8b"])
    assert quick.work == {"split_tokens": 1024}
    with pytest.raises(SystemExit):
        kernels.parse(["nothing"])


def test_targets_are_measured_whatever_the_contexts() -> None:
    args = kernels.parse(["attention", "--contexts", "128"])
    cases = {size: target for size, _, target in kernel_attention.decode_cases(read_model("gpt2"), args)}
    assert set(cases.values()) == {None}
    assert "15 x 256, 1 x 1024" in cases
    cases = {size: target for size, _, target in kernel_attention.decode_cases(read_model("llama-3.1-8b"), args)}
    assert cases["64 x 2048"] == 0.75
    assert cases["1 x 32768"] == 0.55


@pytest.mark.parametrize("shape", ["gpt2", "qwen3-0.6b"])
def test_work_lists_are_the_engine_s(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work that is measured by itself is that of a step, for a row, a few, many, and many with late teams."""
    monkeypatch.setattr(kernel_attention, "examine", lambda device: H200)
    device, args = torch.device("cpu"), kernels.parse(["attention"])
    ops = CudaOps(device, CudaOptions(gpu=H200))
    config = EngineConfig(model="", dtype="bfloat16", max_num_seqs=256, max_num_batched_tokens=256)
    loaded = SimpleNamespace(config=(c := read_model(shape)), dtype=torch.bfloat16, max_model_len=1024)
    buckets = device_steps.step_buckets(config, loaded, ops)
    [kind], limits = device_steps.attention_kinds(c, loaded.dtype), device_steps.attention_limits(config, 1024)
    attention = StepAttention([kind], limits, H200, device)
    late = []
    for rows in (1, 8, 24, 64, 128, 160, 256):
        for context in (100, 192, 193, 900):
            bucket = buckets[choose_bucket(buckets, decode_rows([context] * rows))]
            layer = AttentionLayer(c.num_heads, None, None, 1.0, 0)
            planned = attention.of(bucket).of(layer, c.num_kv_heads, c.head_dim)
            listed = kernel_attention.allocate_decode_work(c, None, device, args, rows, context)
            if planned.plan.cut is None:
                continue
            assert listed.launches == planned.plan.launches
            [section], [ours] = planned.work.sections, listed.work.sections
            names = ("tile", "teams", "late_teams", "whole_tiles", "min_split_tiles", "split_tiles", "item_step")
            assert [getattr(ours, name) for name in names] == [getattr(section, name) for name in names]
            late.append(ours.late_teams > 0)
    assert True in late
    assert False in late
