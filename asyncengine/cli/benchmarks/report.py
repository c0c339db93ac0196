"""Report of a benchmark: figures with units, and everything needed to judge or repeat them."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from asyncengine.cli import collect_env
from asyncengine.version import VERSION

_NOT_RECORDS = ":(top,exclude)bench/results"
_PACKAGES = ("torch", "triton", "transformers", "numpy", "aiohttp", "uvloop")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. ``at_most`` and ``at_least`` are the target, where there is one."""

    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def met(self) -> bool | None:
        """True if the figure reaches its target; None if it has no target."""
        if self.at_most is not None:
            return self.value <= self.at_most
        return None if self.at_least is None else self.value >= self.at_least

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return f"target ≤ {self.at_most:g}"
        return "" if self.at_least is None else f"target ≥ {self.at_least:g}"


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def record(
    name: str, figures: Sequence[Figure], *, repeats: int, settings: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """The result as one JSON object. Call it when the measurement is over: it reads the load of the machine."""
    return {
        "benchmark": name,
        "command": _command(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": dict(collect_env.hardware()),
        "load_average": os.getloadavg(),
        "repeats": repeats,
        "settings": dict(settings),
        "figures": [
            {key: value for key, value in asdict(figure).items() if value is not None}
            | ({} if figure.met is None else {"met": figure.met})
            for figure in figures
        ],
        **more,
    }


def print_figures(title: str, figures: Sequence[Figure]) -> None:
    """A table for people."""
    print(title)
    width = max(len(figure.name) for figure in figures)
    for figure in figures:
        verdict = "" if figure.met is None else f"   {figure.target}: {'met' if figure.met else 'MISSED'}"
        print(f"  {figure.name:<{width}}  {figure.value:>12,.2f} {figure.unit}{verdict}")


def write(path: str | Path, value: Mapping[str, Any]) -> None:
    """Save a record, replacing an older one."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(_without_nan(value), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _without_nan(value: Any) -> Any:
    """NaN is not JSON: a figure of nothing is null."""
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value


def _command() -> str:
    program = Path(sys.argv[0])
    script = program.suffix == ".py" and program.name != "main.py"
    words = [*(["python", os.path.relpath(program)] if script else ["asyncengine"]), *sys.argv[1:]]
    secret = [before == "--api-key" for before in ["", *words[:-1]]]
    return shlex.join("***" if hide else word for word, hide in zip(words, secret, strict=True))


def commit() -> str:
    """The commit of the checkout that this package runs from, with "-dirty" if its code differs from that.

    Outside of a checkout it is what the environment variable ASYNCENGINE_COMMIT says, and else the package's version.
    """
    package = Path(__file__).parents[2]
    top = _git(package, "rev-parse", "--show-toplevel")
    # A virtual environment may lie inside a checkout of something else.
    if top is None or Path(top) / "asyncengine" != package:
        return os.environ.get("ASYNCENGINE_COMMIT", f"asyncengine {VERSION}")
    # The records themselves do not count: a benchmark that has written one makes no code differ.
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", "--", ":/", _NOT_RECORDS)
    dirty = "-dirty" if changed else ""
    return f"{_git(package, 'rev-parse', '--short=12', 'HEAD')}{dirty}"


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    versions = {"asyncengine": VERSION}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
