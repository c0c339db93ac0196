"""Tables of plans: what is written is what is read, and whatever they name can be run."""

from __future__ import annotations

import json
import os
import pwd
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import asyncengine.kernels.cuda.linear
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.launch.compile_processes import compile_processes
from asyncengine.kernels.cuda.linear.candidates import candidates
from asyncengine.kernels.cuda.linear.choose import default_plan, fallback, is_for_formula, plan_for_many_rows
from asyncengine.kernels.cuda.linear.plan import CUBLAS, INVARIANT, MAX_ROWS, SKINNY_ROWS, Plan, Site, round_rows
from asyncengine.kernels.cuda.linear.tables import PlanTable, cache_path, keep, table_name

SHIPPED = sorted((Path(asyncengine.kernels.cuda.linear.__file__).parent / "plans").glob("*.json"))
SITE = Site(1024, 2048, 1, "rms", "silu_mul", False, False)
PLAN = Plan("skinny", 16, 64, 8, ahead=2, fused_norm=False)

powers = st.integers(0, 8).map(lambda i: 1 << i)
sites = st.builds(
    Site,
    columns=st.integers(1, 1 << 18),
    inner=st.integers(1, 1 << 16),
    rows=powers,
    norm=st.sampled_from(["none", "rms", "layer"]),
    activation=st.sampled_from([None, "silu_mul", "gelu", "gelu_tanh", "argmax"]),
    bias=st.booleans(),
    add=st.booleans(),
    weight=st.sampled_from(["bf16", "fp8"]),
)
plans = st.builds(
    Plan,
    kind=st.sampled_from(["vector", "skinny", "tiled", "tma", "cublas"]),
    columns=powers,
    inner=powers,
    warps=powers,
    rows=powers,
    split=powers,
    stages=st.integers(1, 6),
    ahead=st.integers(0, 3),
    holds=st.booleans(),
    fused_norm=st.booleans(),
)


def assert_can_run(plan: Plan, site: Site) -> None:
    """Check that a plan fits its site, and is none that the kernels refuse."""
    assert plan.fits(site.columns, site.inner, site.activation == "silu_mul")
    if plan.kind == "cublas":
        return
    sizes = (plan.columns, plan.inner, plan.warps, plan.rows or 1)
    assert all(size > 0 and size & (size - 1) == 0 for size in sizes)
    assert plan.split == 1 or plan.kind in ("tiled", "coded") or (plan.leaves_parts and site.add)
    match plan.kind:
        case "vector":
            assert site.rows <= 2
            assert plan.ahead == 0
        case "skinny":
            assert site.rows <= SKINNY_ROWS
            assert plan.ahead * plan.warps * plan.inner < site.inner
            assert plan.ahead == 0 or site.norm != "layer" or not plan.fused_norm
        case "tiled":
            assert plan.rows >= 16
            assert not plan.fused_norm
        case "tma":
            assert site.weight == "bf16"
            assert site.inner % 8 == 0
            assert plan.rows >= 8
            assert plan.columns >= (16 if site.activation != "argmax" else 64)
            assert plan.columns * plan.rows <= 128 * 32 * plan.warps, "sums fit the registers"
            assert (plan.columns + plan.rows) * plan.inner * 2 * plan.stages < 227 << 10
            assert not plan.fused_norm


# ---- files ----


@given(entries=st.dictionaries(sites, plans, max_size=6))
def test_what_is_written_is_what_is_read(entries: dict[Site, Plan]) -> None:
    text = PlanTable(entries).to_json()
    again = PlanTable.from_json(text)
    assert len(again) == len(entries)
    assert {site: again.find(site) for site in entries} == entries
    assert again.to_json() == text
    assert PlanTable(dict(reversed(entries.items()))).to_json() == text, "the order of a file is that of its sites"


def test_sites_of_bfloat16_are_written_as_before_there_were_others() -> None:
    text = PlanTable({SITE: PLAN, SITE._replace(weight="fp8"): CUBLAS}).to_json()
    assert [entry[0] for entry in json.loads(text)] == [list(SITE[:-1]), [*SITE[:-1], "fp8"]]
    assert PlanTable.from_json(text).find(SITE) == PLAN


def test_the_word_of_earlier_versions_is_read() -> None:
    """Cache files of users have the old word; a table that is written has the new one."""
    old = json.dumps([[list(SITE), {"kind": "streamed", "columns": 64, "inner": 64, "rows": 8, "stages": 4}]])
    table = PlanTable.from_json(old)
    assert table.find(SITE) == Plan("tma", 64, 64, rows=8, stages=4)
    assert "streamed" not in table.to_json()


ENTRY: list[Any] = [list(SITE), {"kind": "vector"}]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "nonsense",
        "3",
        "[3]",
        json.dumps([ENTRY, []]),
        json.dumps([[*ENTRY, 1]]),
        json.dumps([[ENTRY[0][:-2], ENTRY[1]]]),
        json.dumps([[[*ENTRY[0], 1], ENTRY[1]]]),
        json.dumps([[[*ENTRY[0][:-1], 1], ENTRY[1]]]),
        json.dumps([[[*ENTRY[0][:-1], "int3"], ENTRY[1]]]),
        json.dumps([[[*ENTRY[0][:-1], [1]], ENTRY[1]]]),
        json.dumps([[ENTRY[0], 3]]),
        json.dumps([[ENTRY[0], {}]]),
        json.dumps([[ENTRY[0], {"kind": "vector", "colour": 3}]]),
        json.dumps([[ENTRY[0], {"kind": "matrix"}]]),
        json.dumps([[ENTRY[0], {"kind": ["vector"]}]]),
        json.dumps([[ENTRY[0], {"kind": "vector", "columns": "8"}]]),
        json.dumps([[["7", *ENTRY[0][1:]], ENTRY[1]]]),
        json.dumps([[[[7], *ENTRY[0][1:]], ENTRY[1]]]),
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
    ],
)
def test_what_is_no_table_is_refused(text: str) -> None:
    assert PlanTable.from_json(json.dumps([ENTRY])).find(SITE) == Plan("vector")
    with pytest.raises(ValueError):  # noqa: PT011 - of the parser or of the table
        PlanTable.from_json(text)


def test_a_name_of_a_card_is_a_name_of_a_file() -> None:
    assert table_name("NVIDIA H200") == "nvidia-h200.json"
    assert table_name("NVIDIA GeForce RTX 4090 (Laptop)/2 ") == "nvidia-geforce-rtx-4090-laptop-2.json"


def test_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("ASYNCENGINE_CACHE", str(tmp_path / "own"))
    assert cache_path("A B") == tmp_path / "own" / "plans" / "a-b.json"
    monkeypatch.delenv("ASYNCENGINE_CACHE")
    assert cache_path("A B") == tmp_path / "xdg" / "asyncengine" / "plans" / "a-b.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_path("A B") == tmp_path / ".cache" / "asyncengine" / "plans" / "a-b.json"


def test_a_user_without_a_home_has_no_cache_and_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "ASYNCENGINE_CACHE", "TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert len(PlanTable.load("a card that nobody measured")) == 0
    with compile_processes(2, kernels="asyncengine.runner.steps.device_steps") as processes:
        assert processes is not None


def test_measured_plans_override_shipped_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ASYNCENGINE_CACHE", str(tmp_path))
    assert len(PlanTable.load("a card that nobody measured")) == 0
    gpu = SHIPPED[0].stem
    shipped = PlanTable.load(gpu)
    known, kept = (Site(*site) for site, _ in islice(json.loads(SHIPPED[0].read_text()), 2))
    new = Site(7, 7, 1, "none", None, True, True)
    assert shipped.find(new) is None
    assert shipped.find(known) != PLAN

    path = cache_path(gpu)
    path.parent.mkdir()
    path.write_text(PlanTable({known: PLAN, new: CUBLAS}).to_json())
    table = PlanTable.load(gpu)
    assert (table.find(known), table.find(new)) == (PLAN, CUBLAS)
    assert table.find(kept) == shipped.find(kept)
    assert len(table) == len(shipped) + 1

    path.write_text("[")  # of no use, but no reason not to start
    assert len(PlanTable.load(gpu)) == len(shipped)
    assert str(path) in caplog.text


def test_cards_of_the_same_chip_share_their_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASYNCENGINE_CACHE", str(tmp_path))
    h200 = dict(PlanTable.load("NVIDIA H200").items())
    assert len(h200) > 100
    assert dict(PlanTable.load("NVIDIA H100 80GB HBM3").items()) == h200
    assert len(PlanTable.load("NVIDIA H100 PCIe")) == 0, "fewer multiprocessors"
    assert h200.items() <= dict(PlanTable.shipped().items()).items()

    new = Site(7, 7, 1, "none", None, True, True)
    assert keep("NVIDIA H100 80GB HBM3", PlanTable({new: PLAN})).name == "nvidia-h100-80gb-hbm3.json"
    assert PlanTable.load("NVIDIA H100 80GB HBM3").find(new) == PLAN
    assert PlanTable.load("NVIDIA H200").find(new) is None, "what was measured stays with the card"


def test_kept_plans_join_those_that_are_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASYNCENGINE_CACHE", str(tmp_path / "not there yet"))
    first, second = (Site(7, 7, rows, "none", None, True, True) for rows in (1, 8))
    keep("a card", PlanTable({first: PLAN, second: PLAN}))
    path = keep("a card", PlanTable({second: CUBLAS}))
    assert dict(PlanTable.load("a card").items()) == {first: PLAN, second: CUBLAS}
    path.write_text("[")
    keep("a card", PlanTable({second: CUBLAS}))
    assert dict(PlanTable.load("a card").items()) == {second: CUBLAS}


@pytest.mark.parametrize("damage", [b"\xff", b"[" * 100_000, b'[[[[7], 7, 1, "none", null, true, true], {}]]', None])
def test_a_damaged_cache_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: bytes | None) -> None:
    monkeypatch.setenv("ASYNCENGINE_CACHE", str(tmp_path))
    path = cache_path("a card")
    path.parent.mkdir()
    if damage is None:
        os.mkfifo(path)
    else:
        path.write_bytes(damage)
    assert len(PlanTable.load("a card")) == 0
    keep("a card", PlanTable({SITE: PLAN}))
    assert dict(PlanTable.load("a card").items()) == {SITE: PLAN}


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ASYNCENGINE_CACHE", str(tmp_path))
    path = keep("a card", PlanTable({SITE: PLAN}))
    before = path.read_text()

    def replace(self: Path, target: Path) -> None:
        assert path.read_text() == before, "until the new file is whole, the old one is there"
        assert PlanTable.from_json(self.read_text()).find(SITE) == CUBLAS
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="full"):
        keep("a card", PlanTable({SITE: CUBLAS}))
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_plans_can_run(path: Path) -> None:
    text = path.read_text()
    entries = [(Site(*site), Plan(**plan)) for site, plan in json.loads(text)]
    assert len(entries) == len(PlanTable.from_json(text)), "a site has one plan"
    assert PlanTable.from_json(text).to_json() == text
    assert entries
    for site, plan in entries:
        assert site.rows == round_rows(site.rows) <= MAX_ROWS
        assert_can_run(plan, site)


# ---- many rows ----

GPT2 = {
    "qkv": Site(2304, 768, 0, "layer", None, True, False),
    "o": Site(768, 768, 0, "none", None, True, True),
    "up": Site(3072, 768, 0, "layer", "gelu_tanh", True, False),
    "down": Site(768, 3072, 0, "none", None, True, True),
}


LLAMA_3B = {
    "qkv": Site(5120, 3072, 0, "rms", None, False, False),
    "o": Site(3072, 3072, 0, "none", None, False, True),
    "up": Site(8192, 3072, 0, "rms", "silu_mul", False, False),
    "down": Site(3072, 8192, 0, "none", None, False, True),
}


def tiles_of(model: dict[str, Site], rows: int) -> dict[str, tuple[int, int] | None]:
    plans = {name: plan_for_many_rows(site._replace(rows=rows), H200) for name, site in model.items()}
    return {name: None if plan == CUBLAS else (plan.columns, plan.rows) for name, plan in plans.items()}


def test_tiles_of_many_rows() -> None:
    """Measured to be the fastest of five and cuBLAS, or within 3% of it."""
    assert tiles_of(GPT2, 512) == {"qkv": (128, 128), "o": (64, 64), "up": (128, 128), "down": (64, 64)}
    assert tiles_of(GPT2, 1024) == {"qkv": (128, 256), "o": (128, 64), "up": (128, 256), "down": (128, 64)}
    assert tiles_of(GPT2, 2048) == {"qkv": None, "o": (128, 128), "up": (128, 128), "down": (128, 128)}
    assert tiles_of(LLAMA_3B, 320) == {"qkv": (128, 128), "o": (128, 64), "up": None, "down": None}
    assert tiles_of(LLAMA_3B, 768) == {"qkv": (128, 256), "o": None, "up": (128, 256), "down": None}


def test_rows_that_are_for_the_formula() -> None:
    """All beyond tables; of those in them what would multiply many rows that are not there."""
    down = LLAMA_3B["down"]
    for_formula = [rows for rows in range(1, 400) if is_for_formula(down._replace(rows=rows))]
    assert for_formula == [*range(129, 193), *range(257, 400)]
    for site in (LLAMA_3B["up"], down._replace(weight="fp8"), down._replace(activation="argmax")):
        assert [rows for rows in (129, 160, 192, 256, 257) if is_for_formula(site._replace(rows=rows))] == [257]
    assert plan_for_many_rows(down._replace(rows=160), H200) == CUBLAS


@given(sites, st.integers(MAX_ROWS + 1, 20_000))
@example(GPT2["up"]._replace(columns=3001), 700)
@example(GPT2["o"]._replace(inner=64), 700)
@example(Site(3004, 768, 0, "rms", "silu_mul", False, False), 700)
def test_plans_of_many_rows_can_run(site: Site, rows: int) -> None:
    site = site._replace(rows=rows)
    plan = plan_for_many_rows(site, H200)
    assert_can_run(plan, site)
    assert not plan.leaves_parts


@pytest.mark.parametrize("change", [{"inner": 4096}, {"weight": "fp8"}, {"activation": "argmax"}, {"inner": 100}])
def test_what_takes_no_tma_plan_for_many_rows(change: dict[str, Any]) -> None:
    assert plan_for_many_rows(GPT2["up"]._replace(rows=700), H200).kind == "tma"
    assert plan_for_many_rows(GPT2["up"]._replace(rows=700, **change), H200) == CUBLAS


# ---- plans ----


@pytest.mark.parametrize("rows", [1, 2, 4, 16, 32, 64, 256])
@pytest.mark.parametrize(
    ("columns", "inner", "norm", "activation", "add"),
    [
        (4096, 1024, "rms", None, False),
        (3072, 1024, "rms", "silu_mul", False),
        (1024, 3072, "none", None, True),
        (2304, 768, "layer", None, False),
        (3072, 768, "layer", "gelu_tanh", False),
        (768, 3072, "none", None, True),
        (50304, 768, "layer", None, False),
        (151936, 1024, "rms", None, False),
        (1000, 1600, "rms", "silu_mul", False),
        (51, 100, "none", None, False),
    ],
)
def test_candidates_can_run(columns: int, inner: int, rows: int, norm: Any, activation: Any, add: bool) -> None:
    site = Site(columns, inner, rows, norm, activation, add, add)
    found = list(candidates(site, H200))
    assert found[0] == CUBLAS
    assert len(set(found)) == len(found)
    assert [plan.kind for plan in found].count("cublas") == 1
    for plan in found:
        assert_can_run(plan, site)
    if columns > 1000 and rows <= 16:
        assert len(found) > 5, "there is something to choose from"


def test_narrow_tiles_are_for_multiprocessors_that_would_be_idle() -> None:
    """A matrix of 1,024 rows has 16 tiles of 64; one of 28,672 has plenty."""

    def narrow(columns: int, rows: int, activation: Any = None) -> set[int]:
        plans = candidates(Site(columns, 4096, rows, "none", activation, False, activation is None), H200)
        return {plan.columns for plan in plans if plan.kind == "tma" and plan.columns < 64}

    assert narrow(1024, 8) == narrow(1024, 64) == {16, 32}
    assert not narrow(14336, 8, "silu_mul")
    assert not narrow(1024, 1)


@pytest.mark.parametrize("rows", [1, 8, 32, 64, 256])
@pytest.mark.parametrize(
    ("columns", "inner", "norm", "activation", "add", "scalable"),
    [
        (6144, 4096, "rms", None, False, True),
        (14336, 4096, "rms", "silu_mul", False, True),
        (4096, 14336, "none", None, True, True),
        (1000, 1608, "rms", "silu_mul", False, False),
        (51, 112, "none", None, False, False),
    ],
)
def test_candidates_of_float8_can_run(
    columns: int, inner: int, rows: int, norm: Any, activation: Any, add: bool, scalable: bool
) -> None:
    site = Site(columns, inner, rows, norm, activation, False, add, "fp8")
    found = list(candidates(site, H200))
    assert found[0] == fallback(site) == (CUBLAS if scalable else INVARIANT)
    assert len(set(found)) == len(found)
    for plan in (*found, default_plan(site, H200)):
        assert_can_run(plan, site)
        assert plan.ahead == 0 or not plan.fused_norm, "who loads ahead knows no row's largest element"
    if columns > 4000:
        assert len(found) > 5, "there is something to choose from"
    if columns > 4000 and rows == 1:
        assert {plan.fused_norm for plan in found if plan.kind == "vector"} == {True, False}


def test_tma_candidates_are_left_out_where_they_do_not_run() -> None:
    site = Site(3072, 1024, 64, "rms", "silu_mul", False, False)
    some, all_of_them = list(candidates(site, replace(H200, tma=False))), list(candidates(site, H200))
    assert [plan for plan in all_of_them if plan.kind != "tma"] == some != all_of_them


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
@pytest.mark.parametrize(("columns", "inner", "norm"), [(151936, 1024, "rms"), (50304, 768, "layer")])
def test_heads_that_leave_ranks_are_tma_or_not_at_all(columns: int, inner: int, norm: Any, rows: int) -> None:
    site = Site(columns, inner, rows, norm, "argmax", False, False)
    assert default_plan(site, H200) == fallback(site) == CUBLAS
    first, *rest = candidates(site, H200)
    assert first == CUBLAS
    assert (len(rest) > 5) == (rows >= 8)
    assert {plan.kind for plan in rest} <= {"tma"}
    assert not any(plan.leaves_parts for plan in rest)
    for plan in rest:
        assert_can_run(plan, site)
    assert set(rest) >= {plan for plan in candidates(site._replace(activation=None), H200) if plan.kind == "tma"}
    assert list(candidates(site, replace(H200, tma=False))) == [CUBLAS]


def test_norms_are_apart_if_no_plan_that_reads_them_holds_them() -> None:
    down = Site(1024, 3072, 8, "none", None, False, True)
    qkv, up = Site(4096, 1024, 8, "rms", None, False, False), Site(3072, 1024, 8, "rms", "silu_mul", False, False)
    fused, apart = Plan("skinny", 16, 64), Plan("tma", 64, 64, rows=8, fused_norm=False)
    assert PlanTable({down: fused, qkv._replace(rows=16): fused, qkv._replace(inner=512): fused}).norms_are_apart(down)
    assert PlanTable({qkv: apart, up: apart}).norms_are_apart(down)
    assert not PlanTable({qkv: apart, up: fused}).norms_are_apart(down)


@given(site=sites)
def test_the_invariant_plan_fits_everything(site: Site) -> None:
    assert_can_run(INVARIANT, site)


def test_what_does_not_fit() -> None:
    assert Plan("vector", 8, 256).fits(24, 100, False)
    assert not Plan("vector", 8, 256).fits(20, 100, False)
    assert Plan("vector", 8, 256).fits(20, 100, True)
    assert not Plan("skinny", 16, 32, 4).fits(24, 256, False)
    assert Plan("skinny", 16, 32, 4).fits(24, 256, True)
    assert Plan("skinny", 16, 32, 4, ahead=2).fits(32, 256, False)
    assert not Plan("skinny", 16, 32, 4, ahead=3).fits(32, 256, False), "would load beyond the weight's end"
    assert Plan("tiled", 64, 64, rows=16).fits(33, 100, False)
    assert Plan("tma", 64, 64, rows=16).fits(33, 104, False)
    assert not Plan("tma", 64, 64, rows=16).fits(33, 100, False), "rows of x are not aligned"
    assert not Plan("tma", 64, 64, rows=16).fits(36, 104, True)
    assert not Plan("tma", 64, 32, rows=16).fits(64, 128, False), "tiles are of 128 bytes"
    assert not Plan("tma", 64, 64, rows=16, split=2).fits(64, 192, False)
    assert Plan("tma", 16, 128, 8, 16).fits(33, 104, False)
    assert not Plan("tma", 16, 64, 8, 16).fits(33, 104, False), "no K for each of eight warps"
    assert Plan("tiled", 64, 32, rows=16, split=2).fits(33, 128, False)
    assert not Plan("tiled", 64, 32, rows=16, split=2).fits(33, 96, False)


@given(rows=st.integers(1, 5000))
def test_rounded_rows(rows: int) -> None:
    rounded = round_rows(rows)
    assert rounded & (rounded - 1) == 0
    assert rows <= rounded
    assert rounded < 2 * rows or rows <= 8, "up to 8 rows share their plans"
