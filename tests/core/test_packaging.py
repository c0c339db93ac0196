"""The package as a stranger installs it: steps of the Makefile, versions of Python that have a wheel, of packages."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

import asyncengine

ROOT = Path(__file__).resolve().parents[2]
CPU_BUILD = "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def commands(*targets: str) -> str:
    """The commands of make on a fresh clone, none of which is run."""
    fresh = ["VENV=/nonexistent/venv"]
    done = subprocess.run(["make", "-n", *fresh, *targets], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_serve_says_what_it_does_and_needs_no_tools() -> None:
    told = commands("serve")
    steps = [told.index(step) for step in ("Compiling the C++ core", "Installing packages", "asyncengine serve")]
    assert steps == sorted(steps)
    assert "--quiet" not in told  # which hides how far a download is
    assert "names['dev']" not in told  # of pyproject.toml's extras
    assert "names['dev']" in commands("test")


def test_one_file_states_the_version() -> None:
    """An editable installation knows the version of the day on which it was made: make install renews it."""
    version = project()["project"]["version"]
    assert asyncengine.__version__ == version
    folders = [ROOT / "asyncengine", ROOT / "csrc"]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in {".py", ".pyi", ".cpp", ".h"}]
    stating = re.compile(rf"(?<![\d.]){re.escape(version)}(?![\d.])")
    assert [path for path in (*files, ROOT / "CMakeLists.txt") if stating.search(path.read_text())] == []
    newest = re.search(r"^## \[(\S+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == version


@pytest.mark.parametrize("document", ["README.md", "asyncengine/server/README.md", "Makefile"])
def test_documents_name_the_index_of_the_cpu_build(document: str) -> None:
    text = (ROOT / document).read_text()
    assert CPU_BUILD in text
    assert project()["tool"]["cibuildwheel"]["test-environment"] == dict([CPU_BUILD.split("=", 1)])


def test_every_version_of_python_has_a_wheel() -> None:
    table = project()
    builds, classifiers = table["tool"]["cibuildwheel"]["build"], "\n".join(table["project"]["classifiers"])
    versions = re.findall(r"^Programming Language :: Python :: 3\.(\d+)$", classifiers, re.MULTILINE)
    assert builds == [f"cp3{version}-manylinux*" for version in versions]
    assert table["project"]["requires-python"] == f">=3.{versions[0]}"


def test_versions_are_pinned_for_each_package_that_is_needed() -> None:
    pinned = {
        re.sub(r"[-_.]+", "-", line.split("==")[0]).lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    table = project()
    needed = [*table["project"]["dependencies"], *table["build-system"]["requires"]]
    for extra in table["project"]["optional-dependencies"].values():
        needed += extra
    names = {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", each)[0]).lower() for each in needed}  # type: ignore[index]
    assert names <= pinned
