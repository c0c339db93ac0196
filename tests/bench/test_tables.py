"""Figures of the documents come from records of bench/results: by tables that bench/tables.py writes, or not at all."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import records
import tables
from tables import BLOCK, DOCUMENTS, TABLES, Missing, Row, Table

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
UNITS = r"[nµu]?s|ms|seconds?|minutes?|hours?|[\w ]*/s|[KMGT]i?B|tok|tokens a second|times|x|microseconds|milliseconds"
FIGURE = re.compile(rf"(?<![\w.,-])\d[\d,]*(?:\.\d+)? ?(?:%|(?:{UNITS})(?:/\w+)?\b)|(?<![\w.,-])\d+\.\d+(?![\w.-])")
NO_TIMES = {"json_schema_suite.json"}
"""Files that count cases and measure nothing."""

#: Limits, settings, hardware and versions, which nobody measured: all that looks like a figure outside of a table.
STATED = {
    "README.md": [
        "Python 3.11", "(2.9 or newer",
    ],
    "SECURITY.md": [
        "for more than 100 ms, in processor time", "speaks TLS 1.2", "A handshake has 10 s",
        "after 2 s of processor time or 256 MiB of memory", "at most 64 MiB", "above 1 GiB", "at most 256 MiB",
        "refused after 30 s", "at most 16,384 states, which take some 12 MiB", "more than 0.1 s to compile",
    ],
    "bench/NOTES.md": [
        "a request every 20 ms", "one every 20 ms", "H100 80GB HBM3", "(139.8 GiB,", "driver 580.159", "Python 3.12,",
        "torch 2.11.0", "Triton 3.6.0", "at 2.6 GHz", "(2 MB of second-level", "24 GB,", "Python 3.11,", "torch 2.13.0",
    ],
}  # fmt: skip


def sentences(text: str) -> list[str]:
    """Sentences and rows of tables, without code and without the tables that are written from records."""
    text = FENCE.sub("", BLOCK.sub("\n\n", text))
    found: list[str] = []
    for block in re.split(r"\n\s*\n|\n(?=[|#-])", text):
        flat = " ".join(block.split())
        found += [flat] if flat.startswith("|") else re.split(r"(?<=[.!?]) (?=[A-Z`*\[])", flat)
    return [sentence for sentence in found if sentence]


def without_record(text: str, stated: list[str]) -> list[str]:
    """Sentences with a figure that nothing backs."""
    found = []
    for sentence in sentences(text):
        rest = sentence
        for phrase in stated:
            rest = rest.replace(phrase, "")
        if FIGURE.search(rest):
            found.append(sentence)
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_sentences_have_no_figure_without_a_record(document: str) -> None:
    text = (ROOT / document).read_text()
    assert without_record(text, STATED[document]) == []
    assert [phrase for phrase in STATED[document] if phrase not in " ".join(text.split())] == [], "stated no more"


@pytest.mark.parametrize(
    "sentence",
    [
        "The prompt takes 33% longer.", "A step of 3.78 ms.", "It makes 1,277 tokens/s.", "That is 1.56 of swap.",
        "An event costs the loop some 30 µs.", "It ran for half an hour: +0.25 MB of memory.", "It is 3 times faster.",
        "| attention | 101 and 72 % |", "The memory gives 30 GB/s.",
    ],
)  # fmt: skip
def test_a_figure_without_a_record_is_found(sentence: str) -> None:
    text = f"# Heading\n\nA true sentence. {sentence}\n\nAnother, of 64 rows and 2,048 tokens with `x 3 ms`.\n"
    assert sentence in " ".join(without_record(text.replace("`x 3 ms`", "`x`"), []))
    assert without_record("A step of 64 rows at 905291c, block size 16, of bench/log/core.md.", []) == []
    assert without_record(f"<!-- figures of core -->\n{sentence}\n<!-- end -->", []) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tables_have_the_figures_of_the_records(document: str) -> None:
    text = (ROOT / document).read_text()
    assert text.count("<!-- figures of ") == text.count("<!-- end -->") == len(BLOCK.findall(text))
    assert tables.filled(text) == text, "python bench/tables.py writes them"


def test_every_table_is_in_a_document() -> None:
    shown = {match[1] for document in DOCUMENTS for match in BLOCK.findall((ROOT / document).read_text())}
    assert shown == TABLES.keys()


RECORDS = sorted(path for path in (ROOT / "bench/results").glob("*.json") if path.name not in NO_TIMES)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_every_record_says_what_it_measured(path: Path) -> None:
    record = json.loads(path.read_text())
    records.check_commit(record["commit"])
    assert record["hardware"]["cores"]
    assert record["repeats"]
    assert record["figures"]
    if git("rev-parse", "--is-shallow-repository") == "false":
        assert git("merge-base", "--is-ancestor", record["commit"], "HEAD") is not None, "of another history"


def git(*words: str) -> str | None:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def test_every_table_has_a_record_that_is_measured_anew() -> None:
    """Or one of these, whose benchmarks take longer than a chunk."""
    measured = {one.record for chunk in records.CHUNKS.values() for one in chunk}
    shown = {Row(*row).record or table.record for table in TABLES.values() for row in table.rows}
    assert shown - measured == {"kernels", "kernels_prefill", "overlap_ablation", "fp8_accuracy"}


RECORD = {
    "commit": "2c9b2338f1a0",
    "hardware": {"cores": "16 usable of 16", "GPU 0": "NVIDIA H200, 139.8 GiB"},
    "repeats": 3,
    "figures": [
        {"name": "a: step", "value": 1.2345, "at_most": 1.0, "met": False},
        {"name": "b: step", "value": 1234.5, "at_most": 2000, "met": True},
    ],
}


def test_a_table_by_hand(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(RECORD))
    table = Table(
        "one", ["", "first", "second"],
        [("both", ["{a: step|.2f} ms", "{b: step|,.0f}"]), ("worst", ["{max *: step|.1f}", ""]),
         ("no figure", ["{c: step|.2f}", ""]), Row("no record", ["{a: step|.2f}", ""], "two")],
    )  # fmt: skip
    assert tables.render(table, tmp_path).split("\n") == [
        "", "|  | first | second |", "|---|---|---|", "| both | **1.23** ms | 1,234 |", "| worst | 1234.5 |  |", "",
        "one.json: commit 2c9b233, NVIDIA H200, 3 repeats.", "",
    ]  # fmt: skip
    assert tables.render(Table("two", [""], [("x", ["{a|.1f}"])]), tmp_path) == ""
    with pytest.raises(Missing):
        tables.fill("{*: step|.1f}", RECORD)


def test_documents_are_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.json").write_text(json.dumps(RECORD))
    (tmp_path / "doc.md").write_text("Before.\n\n<!-- figures of one -->\nold\n<!-- end -->\n\nAfter.\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", ("doc.md",))
    monkeypatch.setattr(tables, "TABLES", {"one": Table("one", ["", "x"], [("step", ["{a: step|.1f}"])])})
    monkeypatch.setattr("sys.argv", ["bench/tables.py", "--check"])
    with pytest.raises(SystemExit, match=r"doc\.md"):
        tables.main()
    monkeypatch.setattr("sys.argv", ["bench/tables.py"])
    tables.main()
    written = (tmp_path / "doc.md").read_text()
    assert "| step | **1.2** |" in written
    assert "old" not in written
    assert written.startswith("Before.\n\n<!-- figures of one -->\n")
    assert written.endswith("<!-- end -->\n\nAfter.\n")
    monkeypatch.setattr("sys.argv", ["bench/tables.py", "--check"])
    tables.main()
