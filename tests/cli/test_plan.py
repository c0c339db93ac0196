"""asyncengine plan: what it prints is what an engine on that card would launch, without a GPU and without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncengine.cli.main import main
from asyncengine.kernels.cuda.gpu import A100, B200, H200, L40S, Gpu
from asyncengine.kernels.cuda.linear.choose import Choice, choose
from asyncengine.kernels.cuda.linear.formats.registry import runs_on, shared_bytes
from asyncengine.kernels.cuda.linear.plan import CUBLAS, INVARIANT, Plan, Site
from asyncengine.kernels.cuda.linear.tables import PlanTable, keep

SHAPES = Path(__file__).resolve().parents[2] / "bench/shapes"
SMALL = ("--max-num-seqs", "8", "--max-num-batched-tokens", "512")


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASYNCENGINE_CACHE", str(tmp_path))


def steps_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["plan", *arguments, *SMALL, "--json"]) == 0
    steps: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["steps"]
    return steps


def choices_of(steps: list[dict[str, Any]]) -> dict[Site, Choice]:
    found = {}
    for step in steps:
        for projection in step["projections"]:
            site = Site(**{name: projection[name] for name in Site._fields})
            found[site] = Choice(Plan(**projection["plan"]), projection["source"])
    return found


def test_every_bucket_and_every_site(capsys: pytest.CaptureFixture[str]) -> None:
    steps = steps_of(capsys, str(SHAPES / "qwen3-0.6b"), "--gpu", "h200")
    sizes = [(step["max_rows"], step["max_tokens"]) for step in steps]
    assert sizes == sorted(sizes, key=lambda size: size[1])
    assert sizes[0] == (1, 1)
    assert sizes[-1] == (8, 512)
    table = PlanTable.load(H200.name)
    for step in steps:
        names = [projection["name"] for projection in step["projections"]]
        assert names[:5] == ["qkv", "o", "up", "down", "head"]
        assert names[5:] == (["greedy head"] if step["max_rows"] > 1 else [])
        assert len(step["attention"]) == 1
        assert [p["rows"] for p in step["projections"][:4]] == [step["max_tokens"]] * 4
    choices = choices_of(steps)
    assert {choice.source for choice in choices.values()} == {"table", "formula"}
    for site, choice in choices.items():
        assert choice == choose(site, H200, table)
        assert (choice.source == "formula") == (site.rows > 256)


def test_text_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    """No table knows the sites of the bundled model."""
    assert main(["plan", "--gpu", "H200", "--dtype", "bfloat16", "--max-num-seqs", "2"]) == 0
    first, _, title, header, qkv, *rest = capsys.readouterr().out.splitlines()
    assert first.endswith(" on NVIDIA H200")
    assert title.startswith("1 row of one token")
    column = header.index("kernel")
    assert header.split() == ["projection", "weight", "fused", "kernel", "tile", "source"]
    assert qkv.split()[0] == "qkv"
    assert qkv[column:].split() == ["cublas", "-", "default"]
    assert rest[3].split()[0] == "head"
    assert rest[4].startswith("  attention   ")


def test_measured_plans_are_named_so(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(SHAPES / "gpt2")
    [site, *_] = [site for site in choices_of(steps_of(capsys, model)) if site.rows == 1]
    keep(H200.name, PlanTable({site: CUBLAS}))
    assert choices_of(steps_of(capsys, model))[site] == Choice(CUBLAS, "measured")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shape", ["gpt2", "qwen3-0.6b", "llama-3.1-8b"])
@pytest.mark.parametrize("gpu", [A100, L40S, H200, B200], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_plans_of_every_card_can_run(
    capsys: pytest.CaptureFixture[str], shape: str, gpu: Gpu, quantization: str
) -> None:
    arguments = ["plan", str(SHAPES / shape), "--gpu", gpu.name, "--quantization", quantization, *SMALL]
    if quantization == "fp8" and (shape == "gpt2" or not gpu.has_float8):
        assert main(arguments) == 2
        assert "quantization=fp8" in capsys.readouterr().err
        return
    choices = choices_of(steps_of(capsys, *arguments[1:]))
    assert {site.weight for site in choices} == {"bf16", *(["fp8"] if quantization == "fp8" else [])}
    for site, (plan, source) in choices.items():
        assert plan.fits(site.columns, site.inner, site.activation == "silu_mul")
        assert runs_on(plan, gpu, site.weight)
        assert shared_bytes(plan, site.weight) <= gpu.shared_bytes
        assert gpu.tma or (plan.kind != "tma" and source in ("default", "formula"))


def test_batch_invariant_engines_have_one_plan(capsys: pytest.CaptureFixture[str]) -> None:
    choices = choices_of(steps_of(capsys, str(SHAPES / "gpt2"), "--batch-invariant"))
    assert set(choices.values()) == {Choice(INVARIANT, "setting")}


def test_an_unknown_card_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(SHAPES / "gpt2"), "--gpu", "abacus"]) == 2
    assert "NVIDIA H200" in capsys.readouterr().err


def test_keys_and_values_in_float8_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels in Triton read float8, and the command refuses where the card has no float8."""
    arguments = (str(SHAPES / "llama-3.1-8b"), "--kv-cache-dtype", "fp8", "--gpu")
    attention = [line for step in steps_of(capsys, *arguments, "H200") for line in step["attention"]]
    assert all("keys and values in float8" in line and "tma_" not in line for line in attention)
    assert any("paged_decode [16 x 64" in line for line in attention)
    assert main(["plan", *arguments, "A100"]) == 2
    assert "kv_cache_dtype=fp8 needs a GPU of compute capability 8.9" in capsys.readouterr().err


def test_a_sequence_has_the_bytes_of_its_groups_of_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """8 of 48 layers see all, and 40 see 1,024 tokens: five groups of 8, which keep the window and two steps."""
    assert main(["plan", str(SHAPES / "gemma-3-12b"), "--gpu", "h200", *SMALL, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    of_block, window_blocks = 8 * 2 * 8 * 256 * 16 * 2, (1024 + 2 * 512) // 16 + 1
    assert plan["kv_bytes_per_sequence"] == (plan["context"] // 16 + 5 * window_blocks) * of_block


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("shape", "num_bytes", "every"),
    [
        ("qwen3.5-9b", 52_690_944, 16384),
        ("granite-4-h-small", 154_644_480, 131072),
        ("nemotron-3-nano-30b", 49_930_240, 65536),
    ],
)
def test_a_plan_says_how_far_apart_snapshots_of_states_are(
    capsys: pytest.CaptureFixture[str], shape: str, num_bytes: int, every: int
) -> None:
    """Layers with a state are planned as others are, and a plan without them says nothing of states."""
    model = str(SHAPES / shape)
    assert main(["plan", model, *SMALL, "--dtype", "bfloat16", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {p["name"] for p in plan["steps"][0]["projections"]} >= {"qkv", "head"}
    assert plan["states"] == {"num_bytes": num_bytes, "snapshot_tokens": every}
    assert main(["plan", model, *SMALL, "--dtype", "bfloat16"]) == 0
    assert f"at the end of each prompt and every {every:,} tokens within it" in capsys.readouterr().out
