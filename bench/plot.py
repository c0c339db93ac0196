"""Pictures of what the benchmarks left in bench/results.

    pip install 'asyncengine[bench]'
    python bench/plot.py [--results DIRECTORY] [--out DIRECTORY] [--format svg|png]

One picture per kind of record: decode steps beside floor, target and peers, the bandwidth that whole steps and
attention reach, and what the core costs per sequence. A record that is not there is passed over.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode import INVARIANT, PEERS, TARGETS, by_batch

Points = list[tuple[float, float]]
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Curve:
    label: str
    points: Points
    style: str = "-o"
    """line style of matplotlib"""


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    curves: list[Curve]
    log_y: bool = False
    top: float | None = None


# ---- records as panels ----


def decode_steps(record: Record) -> list[Panel]:
    """Milliseconds by batch, a panel for each shape."""
    panels = []
    for model, result in record["results"].items():
        curves = [Curve("asyncengine", points_of(result["step_ms"]))]
        if INVARIANT in result:
            curves.append(Curve(f"asyncengine, {INVARIANT}", points_of(result[INVARIANT]["step_ms"])))
        curves.append(Curve("memory floor", points_of(result["floor_ms"]), "k--"))
        if model in TARGETS:
            curves.append(Curve("target", sorted(TARGETS[model].items()), "k_"))
        curves += [Curve(name, sorted(steps.items()), ":s") for name, (steps, _) in PEERS.get(model, {}).items()]
        panels.append(Panel(model, "sequences", "ms per decode step", curves, log_y=True))
    return panels


def decode_bandwidth(record: Record) -> list[Panel]:
    """Share of the bandwidth by context, a curve for each batch but those between, which have one context."""
    panels = []
    for model, result in record["results"].items():
        batches = by_batch(result.get("step_ms", {}))
        measured = [point for point in result.get("contexts", ()) if "ms" in point and point["batch"] in batches]
        if measured:
            found = [(point["batch"], point["context"], 100 * point["share"]) for point in measured]
            curves = by_first(found, "batch")
            panels.append(Panel(model, "context, tokens", "% of 4.4 TB/s, whole step", curves, top=105.0))
    return panels


_SIZE = re.compile(r"(\d+) x (\d+)")


def attention_bandwidth(record: Record) -> list[Panel]:
    """Share of the bandwidth of decode attention by context, of the faster kernel where two can do it."""
    found: dict[str, dict[tuple[int, int], float]] = {}
    targets: dict[str, list[Curve]] = defaultdict(list)
    for line in record["lines"]:
        size = _SIZE.fullmatch(line["size"])
        if line["part"] == "attention" and line["kernel"].startswith("decode") and size:
            shares, at = found.setdefault(line["shape"], {}), (int(size[1]), int(size[2]))
            shares[at] = max(shares.get(at, 0.0), 100 * line["share"])
            if line["at_least"] is not None:
                label = f"target of {size[1]} x {short(int(size[2]))}"
                targets[line["shape"]].append(Curve(label, [(int(size[2]), 100 * line["at_least"])], "_"))
    panels = []
    for shape, shares in found.items():
        curves = by_first([(rows, context, share) for (rows, context), share in shares.items()], "rows")
        curves += targets[shape]
        panels.append(Panel(shape, "context, tokens", "% of 4.4 TB/s, attention alone", curves, top=105.0))
    return panels


def core_cost(record: Record) -> list[Panel]:
    """Nanoseconds per sequence of a decode step of the core."""
    points, targets = [], []
    for figure in record["figures"]:
        name = re.fullmatch(r"decode step, (\d+) sequences", figure["name"])
        if name:
            count = int(name[1])
            points.append((count, 1e3 * figure["value"] / count))
            targets += [(count, 1e3 * figure["at_most"] / count)] if "at_most" in figure else []
    curves = [Curve("asyncengine", sorted(points)), Curve("target", sorted(targets), "k_")]
    title = "schedule, pack and commit of a decode step"
    return [Panel(title, "sequences", "ns per sequence", curves)] if points else []


def points_of(values: Mapping[str, float]) -> Points:
    return sorted(by_batch(values).items())


def by_first(found: Sequence[tuple[int, int, float]], word: str) -> list[Curve]:
    """A curve for each of the first numbers, over the second ones."""
    firsts = sorted({first for first, _, _ in found})
    return [Curve(f"{word} {first}", sorted((x, y) for other, x, y in found if other == first)) for first in firsts]


PICTURES: dict[str, tuple[str, Callable[[Record], list[Panel]]]] = {
    "decode_steps": ("decode.json", decode_steps),
    "decode_bandwidth": ("decode.json", decode_bandwidth),
    "attention_bandwidth": ("kernels.json", attention_bandwidth),
    "core_cost": ("core.json", core_cost),
}


# ---- drawing ----


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--out", type=Path, help="(default: the directory of the results)")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    args = parser.parse_args()
    for name, (file, panels_of) in PICTURES.items():
        path = args.results / file
        if not path.is_file():
            print(f"{name}: there is no {path}")
            continue
        record = json.loads(path.read_text())
        panels = panels_of(record)
        if not panels:
            print(f"{name}: {path} has nothing to draw")
            continue
        target = (args.out or args.results) / f"{name}.{args.format}"
        draw(panels, f"{record['commit']}, {record['date'][:10]}", target)
        print(f"{name}: {target}")


def draw(panels: Sequence[Panel], source: str, target: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("matplotlib is needed: pip install 'asyncengine[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    # The same picture from the same record, byte for byte, so that git sees no change where there is none.
    matplotlib.rcParams.update({"svg.hashsalt": "asyncengine", "svg.fonttype": "none"})
    size = (5.2 * len(panels), 4.2)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for panel, axis in zip(panels, axes[0], strict=True):
        draw_panel(panel, axis)
    figure.text(0.995, 0.005, source, ha="right", va="bottom", size=6, color="gray")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120, metadata={"Date": None} if target.suffix == ".svg" else None)
    pyplot.close(figure)


def draw_panel(panel: Panel, axis: Any) -> None:
    for curve in (curve for curve in panel.curves if curve.points):
        bar = curve.style.endswith("_")
        style: dict[str, Any] = {"markersize": 16, "markeredgewidth": 2} if bar else {"markersize": 4}
        axis.plot(*zip(*curve.points, strict=True), curve.style, label=curve.label, **style)
    ticks = sorted({x for curve in panel.curves for x, _ in curve.points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [short(x) for x in ticks])
    axis.minorticks_off()
    axis.margins(x=0.08)
    if panel.log_y:
        axis.set_yscale("log")
        steps = [step * 10.0**power for power in range(-3, 4) for step in (1, 2, 3, 4, 5, 7)]
        low, high = axis.get_ylim()
        axis.set_yticks(steps, [f"{step:g}" for step in steps])
        axis.minorticks_off()
        axis.set_ylim(low, high)
    else:
        axis.set_ylim(0, panel.top)
    axis.set_title(panel.title)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    axis.grid(True, linewidth=0.3)
    axis.legend(fontsize=7)


def short(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


if __name__ == "__main__":
    main()
