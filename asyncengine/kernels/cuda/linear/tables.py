"""Tables of measured plans: the files that come with the package, and those of the user's cache directory."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import asdict
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from asyncengine.kernels.cuda.linear.formats.registry import format_of_kind
from asyncengine.kernels.cuda.linear.plan import Plan, Site

logger = logging.getLogger(__name__)

_OLD_KINDS = {"streamed": "tma"}
"""Words that cache files of earlier versions have for kinds of plan."""


class PlanTable:
    """Plans by site. ``default_plan`` serves the sites that a table lacks."""

    def __init__(self, plans: dict[Site, Plan] | None = None, *, measured: bool = False) -> None:
        self._plans = dict(plans or {})
        self._measured = set(self._plans) if measured else set()
        """Sites whose plans were measured on this card, and did not come with the package."""

    @classmethod
    def load(cls, gpu: str) -> PlanTable:
        """The plans that come with the package for this card, overridden by those of the cache directory.

        Other cards with the H200's chip, which differ in their memory alone, start from the H200's plans.
        """
        table = _read(_SHIPPED.joinpath(_SAME_CHIP.get(table_name(gpu), table_name(gpu))))
        table.update(_read(cache_path(gpu), measured=True))
        return table

    @classmethod
    def shipped(cls) -> PlanTable:
        """All plans that come with the package, of whatever card."""
        table = cls()
        for path in sorted(_SHIPPED.iterdir(), key=lambda path: path.name):
            if path.name.endswith(".json"):
                table.update(_read(path))
        return table

    @classmethod
    def from_json(cls, text: str, *, measured: bool = False) -> PlanTable:
        """Raises ValueError if it is no table."""
        try:
            entries = msgspec.json.decode(text, type=list[tuple[Site, dict[str, Any]]])
            for _, plan in entries:
                plan["kind"] = _OLD_KINDS.get(plan["kind"], plan["kind"])
            for site, _ in entries:
                format_of_kind(site.weight)  # KeyError for one that is not known
            # By way of Plan, which refuses names that it does not know.
            plans = {site: msgspec.convert(asdict(Plan(**plan)), Plan) for site, plan in entries}
        except (KeyError, TypeError, RecursionError) as e:
            raise ValueError(f"not a table of plans: {e}") from e
        return cls(plans, measured=measured)

    def to_json(self) -> str:
        entries = sorted(self._plans.items(), key=_order)
        lines = (json.dumps([_short_site(site), _short(plan)]) for site, plan in entries)
        return "[\n" + ",\n".join(lines) + "\n]\n"

    def update(self, other: PlanTable) -> None:
        self._plans.update(other._plans)
        self._measured = (self._measured - other._plans.keys()) | other._measured

    def add(self, site: Site, plan: Plan) -> None:
        """Enter a plan that was measured on this card."""
        self._plans[site] = plan
        self._measured.add(site)

    def find(self, site: Site) -> Plan | None:
        return self._plans.get(site)

    def is_measured(self, site: Site) -> bool:
        """Return whether the plan of this site was measured on this card, and did not come with the package."""
        return site in self._measured

    def items(self) -> Iterable[tuple[Site, Plan]]:
        return self._plans.items()

    def norms_are_apart(self, site: Site) -> bool:
        """Return whether all norms known to read the sum of ``site`` are kernels of their own, which may add up
        parts."""
        readers = (s for s in self._plans if s.norm != "none" and s[1:3] == (site.columns, site.rows))
        return not any(self._plans[s].fused_norm for s in readers)

    def __len__(self) -> int:
        return len(self._plans)


def _order(item: tuple[Site, Plan]) -> str:
    return repr(item[0])


def _short_site(site: Site) -> list[Any]:
    """Return a site as tables wrote it before there were other weights than bfloat16."""
    return list(site[:-1] if site.weight == "bf16" else site)


def _short(plan: Plan) -> dict[str, Any]:
    """Return a plan's fields without those at their defaults."""
    default = asdict(Plan(plan.kind))
    return {key: value for key, value in asdict(plan).items() if key == "kind" or value != default[key]}


_SHIPPED = files("asyncengine.kernels.cuda.linear").joinpath("plans")
_SAME_CHIP = dict.fromkeys(
    ("nvidia-h100-80gb-hbm3.json", "nvidia-h100-nvl.json", "nvidia-gh200-480gb.json"), "nvidia-h200.json"
)


def _read(path: Traversable, *, measured: bool = False) -> PlanTable:
    """A table without plans if there is no such file, or with a warning if it is of no use."""
    if not path.is_file():
        return PlanTable()
    try:
        return PlanTable.from_json(path.read_text(), measured=measured)
    except (OSError, ValueError) as e:
        logger.warning("%s is ignored: %s", path, e)
        return PlanTable()


def keep(gpu: str, measured: PlanTable) -> Path:
    """Add plans to those of the cache directory, for later starts; the path of the file. Raises OSError.

    A reader of the file meanwhile finds it whole, old or new. If two processes write it at the same time the last one
    wins; plans of the other are measured again.
    """
    path = cache_path(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = _read(path)
    table.update(measured)
    written = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        written.write_text(table.to_json())
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)
    return path


def table_name(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def cache_path(gpu: str) -> Path:
    """Return the file that keeps the plans measured on a card."""
    return cache_directory() / "plans" / table_name(gpu)


def cache_directory() -> Path:
    """Return the folder of measurements: ASYNCENGINE_CACHE, or asyncengine in the user's cache directory."""
    base = os.environ.get("ASYNCENGINE_CACHE")
    # os.path.expanduser leaves a ~ that nobody knows as it is, as Triton does for its own cache.
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) if base else Path(user) / "asyncengine"
