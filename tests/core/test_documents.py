"""Documents stay short, and name what exists."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"README.md": 110, "bench/NOTES.md": 200}
DOCUMENTS = sorted(
    {*LIMITS, "SECURITY.md", "csrc/README.md", "bench/log/README.md"}
    | {str(path.relative_to(ROOT)) for path in (ROOT / "asyncengine").rglob("README.md")}
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"[\w./*-]+\.(?:py|pyi|cpp|h|inl|md|json|svg|toml|txt)")
FOLDER = re.compile(r"(?:asyncengine|csrc|tests|bench)(?:/[\w-]+)+/?|(?:[\w-]+/)+")


@cache
def tree() -> list[str]:
    """Files and folders of the repository, relative to its root, each with a slash before it."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in {"build", "__pycache__"}]
        base = "/" + os.path.relpath(folder, ROOT) + "/" if folder != str(ROOT) else "/"
        found += [base + name for name in (*folders, *files)]
    return found


def lines_of(document: str) -> list[str]:
    return (ROOT / document).read_text().splitlines()


def prose(document: str) -> str:
    return FENCE.sub("", (ROOT / document).read_text())


def repository_paths(document: str) -> list[str]:
    """What the document has in backticks that looks like a file or a folder of the repository."""
    quoted = (text.removesuffix("/") for text in QUOTED.findall(prose(document)) if FOLDER.fullmatch(text))
    files = [text for text in QUOTED.findall(prose(document)) if FILE.fullmatch(text)]
    return [*quoted, *files]


def test_readers_find_what_they_are_promised() -> None:
    assert set(DOCUMENTS) >= {"asyncengine/kernels/README.md", "asyncengine/server/README.md"}


@pytest.mark.parametrize("document", LIMITS)
def test_documents_are_short(document: str) -> None:
    assert len(lines_of(document)) <= LIMITS[document]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    for target in LINK.findall(prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.exists(), f"{document}: there is no {target}"
        assert not anchor or anchor in anchors(file), f"{document}: {target} names no heading"


def anchors(file: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document: str) -> None:
    if document == "bench/log/README.md":  # its table has names of the past
        return
    for path in repository_paths(document):
        pattern = re.escape(path.removeprefix("/")).replace(r"\*", r"[^/]*")
        assert any(re.search(f"/{pattern}$", known) for known in tree()), f"{document} names {path}"


@pytest.mark.parametrize("path", sorted((ROOT / "bench/log").glob("*.md")), ids=lambda path: path.name)
def test_the_log_has_an_index(path: Path) -> None:
    assert f"(log/{path.name})" in (ROOT / "bench/NOTES.md").read_text()
