"""bench/records.py: what it runs, when it refuses, and what a benchmark that fails or hangs leaves."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import pytest
import records
from records import CHUNKS, Measurement

from asyncengine.cli.benchmarks import report

ROOT = Path(__file__).parents[2]
MEASUREMENTS = [one for chunk in CHUNKS.values() for one in chunk]


def test_chunks_are_short_and_name_each_record_once() -> None:
    for chunk in CHUNKS.values():
        assert sum(one.limit_s for one in chunk) <= records.CHUNK_LIMIT_S
    assert sum(one.limit_s for name, chunk in CHUNKS.items() if name.startswith("gpu") for one in chunk) <= 45 * 60
    names = [one.record for one in MEASUREMENTS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("one", MEASUREMENTS, ids=lambda one: one.record)
def test_commands_are_taken(one: Measurement) -> None:
    """Every option of a command is one that its benchmark, or a module of bench that it imports, adds to a parser."""
    words = records.words(one, "/disk")
    text = sources(ROOT / (words[0] if words[0] != "-m" else "asyncengine/cli/benchmarks/core.py"))
    assert {word for word in words if word.startswith("--")} <= set(
        re.findall(r'add(?:_argument)?\(\s*"(--[\w-]+)"', text)
    )


def sources(script: Path) -> str:
    text = script.read_text()
    imported = (ROOT / f"bench/{name}.py" for name in re.findall(r"^from (\w+) import", text, re.MULTILINE))
    return text + "".join(path.read_text() for path in imported if path.exists())


@pytest.mark.parametrize("commit", ["2c9b2338f1a0-dirty", "asyncengine 0.1.0", ""])
def test_code_without_a_commit_is_not_measured(commit: str) -> None:
    with pytest.raises(SystemExit, match="must name the commit"):
        records.check_commit(commit)
    records.check_commit("2c9b2338f1a0")


def test_a_copy_without_git_says_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_git", lambda *_: None)
    assert report.commit().startswith("asyncengine ")
    monkeypatch.setenv("ASYNCENGINE_COMMIT", "2c9b233")
    assert report.commit() == "2c9b233"


def test_records_make_no_checkout_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    for name in ("asyncengine/cli/benchmarks/report.py", "bench/results/core.json", "bench/memory.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    package = tmp_path / "asyncengine/cli/benchmarks/report.py"
    monkeypatch.setattr(report, "__file__", str(package))
    clean = report.commit()
    records.check_commit(clean)
    (tmp_path / "bench/results/core.json").write_text("2")
    assert report.commit() == clean
    (tmp_path / "bench/memory.py").write_text("2")
    assert report.commit() == f"{clean}-dirty"


def test_a_benchmark_that_fails_or_hangs_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scripts = {
        "writes": "import sys, json; json.dump({'argv': sys.argv}, open(sys.argv[-1], 'w'))",
        "fails": "raise SystemExit(3)",
        "hangs": "import time; time.sleep(60)",
        "silent": "pass",
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
    chunk = tuple(Measurement(name, f"{tmp_path / name}.py --disk {{disk}}", 2) for name in scripts)
    monkeypatch.setattr(records, "CHUNKS", {"gpu-1": chunk})
    monkeypatch.setenv("ASYNCENGINE_COMMIT", "2c9b233")
    monkeypatch.setattr(report, "_git", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["bench/records.py", "gpu-1", "--out", str(tmp_path / "out")])
    started = time.monotonic()
    with pytest.raises(SystemExit, match=r"no record of fails, hangs, silent$"):
        records.main()
    assert time.monotonic() - started < 50
    _, option, disk, *rest = json.loads((tmp_path / "out/writes.json").read_text())["argv"]
    assert (option, rest) == ("--disk", ["--json", str(tmp_path / "out/writes.json")])
    assert not Path(disk).exists()
    printed = capfd.readouterr().out
    assert "fails: ended with 3" in printed
    assert "hangs: took too long" in printed
