"""bench/hybrid_simulated.py: the circuit of rows on the host, by hand."""

from __future__ import annotations

import hybrid_simulated
import pytest
from gpu_common import read_model
from hybrid_simulated import Card, Shape, best, shape_of, simulate

ALONE = Shape(stages=3, base_s=0.004, row_s=0.001, rows=2, attend_s=0.0, lane_s=0.0)
"""Steps of 6 ms."""


def test_without_rows_on_the_host_every_step_gives_a_token_of_each_row() -> None:
    assert simulate(ALONE, 0, 100) == (pytest.approx(2 / 0.006), float("inf"))


def test_a_row_passes_a_stage_a_step() -> None:
    """Attention is over before the next step begins: a token takes the three layers and the step that samples it."""
    rate, token_s = simulate(ALONE, 1, 400)
    assert rate == pytest.approx((2 + 1 / 4) / 0.006)
    assert token_s == pytest.approx(4 * 0.006)
    # Attention of a step's length begins within a step and ends within the next one: it misses that at each layer.
    assert simulate(ALONE._replace(attend_s=0.006), 1, 700)[1] == pytest.approx(7 * 0.006)


def test_what_limits_is_lanes_or_workers_or_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_simulated, "LANES", 2)
    assert simulate(ALONE, 64, 400)[0] == pytest.approx((2 + 2) / 0.006, rel=0.01)
    monkeypatch.setattr(hybrid_simulated, "WORKERS", 1)
    # A worker attends once in 6 ms, and a token needs three of these.
    assert simulate(ALONE._replace(attend_s=0.006), 64, 900)[0] == pytest.approx((2 + 1 / 3) / 0.006, rel=0.02)
    assert simulate(ALONE._replace(lane_s=0.001), 64, 400)[0] == pytest.approx((2 + 2) / 0.014, rel=0.01)


def test_the_most_tokens_are_the_best() -> None:
    rows, rate, token_s = best(ALONE, 1e9, 200)
    assert 0 < rows <= hybrid_simulated.HOST_MEMORY_GB
    assert rate > simulate(ALONE, 0, 200)[0]
    assert token_s > 4 * 0.006
    assert best(ALONE._replace(lane_s=1.0), 1e9, 200)[0] == 0


def test_shapes_are_bytes_over_bandwidth() -> None:
    c = read_model("llama-3.1-8b")
    card = Card("x", 24, 1000, "none")
    shape = shape_of(c, card, 2048, 70.0)
    assert shape is not None
    assert shape.stages == 32
    assert shape.rows == 20  # 24 * 0.9 - 1 - 15 GB, of 0.268 each
    assert shape.row_s == pytest.approx(2048 * 131072 / 900e9)
    assert shape.base_s == pytest.approx(15e9 / 900e9 + 1e-4, rel=0.01)
    assert shape.attend_s == pytest.approx(2048 * 131072 / 32 / 5e9)
    assert shape_of(c, card._replace(memory_gb=16), 2048, 70.0) is None


def test_the_table_is_marked_and_the_same_each_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench/hybrid_simulated.py", "--contexts", "8192", "--steps", "200"])
    printed = []
    for _ in range(2):
        hybrid_simulated.main()
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0].startswith("SIMULATED")
    assert len(printed[0].splitlines()) == 2 + 2 * len(hybrid_simulated.CARDS)
