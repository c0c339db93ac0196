"""Documents stay short, and name what exists."""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {
    "README.md": 110,
    "CONTRIBUTING.md": 80,
    "CHANGELOG.md": 60,
    "bench/NOTES.md": 200,
    "asyncengine/models/README.md": 120,
}
DOCUMENTS = sorted(
    {*LIMITS, "SECURITY.md", "csrc/README.md", "bench/log/README.md"}
    | {str(path.relative_to(ROOT)) for path in (ROOT / "asyncengine").rglob("README.md")}
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"[\w./*-]+\.(?:py|pyi|cpp|h|inl|md|json|svg|toml|txt)")
FRAGMENT = re.compile(r"(?:Of|What|Whether|How|Where|Which|Who|Whose|Those|They|Its?) ")
CLAUSE = re.compile(r"// (?:Of|What|Whether|How|Where|Which|Who|Whose|Those) ")
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


def words(document: str) -> list[str]:
    """Return the document's texts in backticks, in words: a command's script is one of them."""
    return [word for text in QUOTED.findall(prose(document)) for word in text.split()]


def repository_paths(document: str) -> list[str]:
    """Return the document's words in backticks that look like a file or a folder of the repository."""
    return [word.removesuffix("/") for word in words(document) if FILE.fullmatch(word) or FOLDER.fullmatch(word)]


@cache
def sources(*folders: str) -> str:
    suffixes = {".py", ".cpp", ".h"}
    files = (path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes)
    return "\n".join(path.read_text() for path in files)


def test_readers_find_what_they_are_promised() -> None:
    assert set(DOCUMENTS) >= {"asyncengine/kernels/README.md", "asyncengine/server/README.md"}


@pytest.mark.parametrize("document", LIMITS)
def test_documents_are_short(document: str) -> None:
    """Tables that bench/tables.py writes do not count."""
    written = re.sub(
        r"(<!-- figures of [^\n]* -->\n).*?(<!-- end -->)", r"\1\2", (ROOT / document).read_text(), flags=re.DOTALL
    )
    assert len(written.splitlines()) <= LIMITS[document]


def test_contributors_read_of_each_command() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    parts_of_others = {
        "asan",
        "asan-build",
        "tsan",
        "tsan-build",
        "collect",
        "wheels",
        "wheels-of-containers",
        "wheel-of-this-machine",
        "clean",
    }
    described = set(re.findall(r"^\| `make ([a-z-]+)`", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    assert described == targets - parts_of_others - {"pytest"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    for target in LINK.findall(prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.exists(), f"{document}: there is no {target}"
        assert not anchor or anchor in anchors(file), f"{document}: {target} names no heading"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_quotes_end_on_their_line(document: str) -> None:
    assert not [line for line in prose(document).splitlines() if line.count("`") % 2]


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


def test_named_tests_exist() -> None:
    text = sources("tests")
    named = {name for name in words("csrc/README.md") if re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+){3,}", name)}
    assert len(named) > 15
    for name in named:
        assert re.search(rf"(def |TEST\(){name}\(?", text), f"csrc/README.md names {name}"


def test_named_functions_exist() -> None:
    native, python = sources("csrc"), sources("asyncengine")
    named = set(words("csrc/README.md"))
    for name in named:
        if match := re.fullmatch(r"(\w+)::(\w+)", name):
            assert re.search(rf"(class|struct) {match[1]}\b", native), name
            assert re.search(rf"\b{match[2]}\(", native), name
        elif match := re.fullmatch(r"([A-Z]\w+)\.(\w+)", name):
            assert re.search(rf"class {match[1]}\b", python), name
            assert re.search(rf"def {match[2]}\(", python), name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_flags_exist(document: str) -> None:
    text = sources("asyncengine", "bench", "tests")
    for flag in words(document):
        if flag.startswith("--"):
            field = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
            assert flag in text or re.search(rf"\b{field}: ", text), f"{document} names {flag}"


@pytest.mark.parametrize("folder", ["asyncengine", "bench", "tests"])
def test_docstrings_name_their_subject(folder: str) -> None:
    """Docstrings, those of fields too, begin with a noun or a verb: a reader of one file has no neighbour to ask."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py*")):
        if path.suffix in {".py", ".pyi"}:
            texts = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Expr))
            docs = (text for text in texts if isinstance(text, ast.Constant))
            found += [f"{path}:{doc.lineno}" for doc in docs if FRAGMENT.match(str(doc.value))]
    assert not found


def test_comments_of_the_core_name_their_subject() -> None:
    """The first line of a comment in csrc begins with a noun or a verb, as docstrings do."""
    found = []
    for path in sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".cpp", ".inl"}):
        before = ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.lstrip().startswith("// ") and not before.lstrip().startswith("//"):
                found += [f"{path}:{number}"] * bool(CLAUSE.match(line.lstrip()))
            before = line
    assert not found
