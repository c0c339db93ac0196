"""bench/plot.py: what it takes from the records. Drawing needs matplotlib."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plot
import pytest

DECODE: dict[str, Any] = {
    "commit": "abc", "date": "2026-11-21T09:48:56",
    "results": {
        "gpt2": {
            "step_ms": {"64": 0.7, "1": 0.2}, "floor_ms": {"1": 0.06, "64": 0.2},
            "batch-invariant": {"step_ms": {"1": 0.3}},
            "contexts": [
                {"batch": 64, "context": 256, "ms": 1.0, "share": 0.5},
                {"batch": 1, "context": 256, "ms": 1.0, "share": 0.25},
                {"batch": 48, "context": 256, "ms": 1.0, "share": 0.4},
                {"batch": 64, "context": 2048, "skipped": "no room"},
            ],
        }
    },
}  # fmt: skip
KERNELS: dict[str, Any] = {
    "commit": "abc", "date": "2026-11-21",
    "lines": [
        {"part": "attention", "kernel": kernel, "shape": "x", "size": size, "share": share, "at_least": target}
        for kernel, size, share, target in (
            ("decode, paged", "1 x 32768", 0.4, None),
            ("decode, few keys", "1 x 32768", 0.6, 0.55),
            ("decode, paged", "64 x 2048", 0.7, 0.75),
            ("decode, paged", "1 x 256, 1 x 32768", 0.1, None),
            ("prefill", "1 x 2048 after 0", 0.5, None),
        )
    ],
}  # fmt: skip
CORE: dict[str, Any] = {
    "commit": "abc", "date": "2026-11-21",
    "figures": [
        {"name": "decode step, 256 sequences", "value": 10.24, "at_most": 20},
        {"name": "decode step, 64 sequences", "value": 3.2},
        {"name": "prefix match", "value": 50.0},
    ],
}  # fmt: skip


def curves(panel: plot.Panel) -> dict[str, plot.Points]:
    return {curve.label: curve.points for curve in panel.curves}


def test_decode_panels() -> None:
    (panel,) = plot.decode_steps(DECODE)
    found = curves(panel)
    assert found["asyncengine"] == [(1, 0.2), (64, 0.7)]
    assert found["asyncengine, batch-invariant"] == [(1, 0.3)]
    assert found["memory floor"] == [(1, 0.06), (64, 0.2)]
    assert dict(found["target"])[256] == 0.95
    assert dict(found["vLLM 0.26.0"])[64] == 2.20
    (panel,) = plot.decode_bandwidth(DECODE)
    assert curves(panel) == {"batch 1": [(256, 25)], "batch 64": [(256, 50)]}
    assert plot.decode_bandwidth({"results": {"x": {}}}) == []


def test_attention_panel_takes_the_kernel_of_few_rows() -> None:
    (panel,) = plot.attention_bandwidth(KERNELS)
    assert curves(panel) == {
        "rows 1": [(32768, pytest.approx(60))],
        "rows 64": [(2048, pytest.approx(70))],
        "target of 1 x 32k": [(32768, pytest.approx(55))],
        "target of 64 x 2k": [(2048, pytest.approx(75))],
    }


def test_core_panel() -> None:
    (panel,) = plot.core_cost(CORE)
    assert curves(panel) == {
        "asyncengine": [(64, pytest.approx(50)), (256, pytest.approx(40))],
        "target": [(256, pytest.approx(78.125))],
    }


def test_pictures_of_the_records_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "decode.json").write_text(json.dumps(DECODE))
    (tmp_path / "core.json").write_text(json.dumps(CORE))
    monkeypatch.setattr("sys.argv", ["bench/plot.py", "--results", str(tmp_path)])
    plot.main()
    assert "attention_bandwidth: there is no" in capsys.readouterr().out
    pictures = {path.stem: path.read_text() for path in tmp_path.glob("*.svg")}
    assert pictures.keys() == {"decode_steps", "decode_bandwidth", "core_cost"}
    plot.main()
    assert {path.stem: path.read_text() for path in tmp_path.glob("*.svg")} == pictures
