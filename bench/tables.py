"""Writes the figures of documents from the records of bench/results.

    python bench/tables.py [--check]

Between ``<!-- figures of NAME -->`` and ``<!-- end -->`` a document has the table of that name in TABLES, made from its
record, with the record's commit, hardware and repeats below it. A row whose record or figure is not there is left out,
and a table without rows is empty. ``--check`` writes nothing, and ends with 1 where a document differs.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"
DOCUMENTS = ("bench/NOTES.md", "README.md", "SECURITY.md")
MODELS = {"gpt2": "GPT-2", "qwen3-0.6b": "Qwen3-0.6B", "llama-3.1-8b": "Llama-3.1-8B"}
BLOCK = re.compile(r"(<!-- figures of ([\w, -]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Record = dict[str, Any]


class Row(NamedTuple):
    label: str
    cells: Sequence[str]
    """Text in which {figure|format} stands for a figure of the record, and {max figure|format} for the largest of
    those that match. One that misses its target is bold."""
    record: str = ""
    """Name of the record, where it is not the table's."""


class Table(NamedTuple):
    record: str
    head: Sequence[str]
    rows: Sequence[Row | tuple[str, Sequence[str]]]


def _per_model(*cells: str) -> list[tuple[str, list[str]]]:
    """A row for each model; MODEL in a cell is its name in records."""
    return [(name, [cell.replace("MODEL", model) for cell in cells]) for model, name in MODELS.items()]


def _batches(model: str) -> list[str]:
    return [f"{{{model}, batch {rows}|#.3g}}" for rows in (1, 8, 64, 256)]


TABLES: dict[str, Table] = {
    "core": Table(
        "core",
        ["sequences", "256", "1,024", "4,096", "prefix match of 8,192 tokens", "a sequence of 4,096 over one of 256"],
        [("microseconds", [
            *(f"{{decode step, {count} sequences|.1f}}" for count in (256, 1024, 4096)),
            "{prefix match, 8192 tokens|.0f}", "{cost per sequence, 4096 over 256|.2f}"])],
    ),
    "server_sim": Table(
        "server_sim",
        ["", "tokens/s", "events/s", "tokens per event", "server µs/token (event loop)", "client µs/token"],
        [(text, [f"{{{kind}: output|,.0f}}", f"{{{kind}: events|,.0f}}", f"{{{kind}: tokens per event|.1f}}",
                 f"{{{kind}: server CPU, all threads|.1f}} ({{{kind}: server CPU, event loop|.1f}})",
                 f"{{{kind}: client CPU|.1f}}"])
         for kind, text in (("flat out", "flat out: a step is due every 2 ms"), ("paced", "paced: every 7 ms"))],
    ),
    "hostile": Table(
        "hostile",
        ["the worst of all loads", "figure"],
        [("processor time of the event loop in one go, ms", ["{max *: loop's processor time in one go|.0f}"]),
         ("a small request beside, ms", ["{max *: slowest small request beside|,.0f}"]),
         ("p99 between events of 100 streams, without and with 100 stalled readers, ms",
          ["{readers: p99 between events, control|.1f} and {readers: p99 between events, 100 stalled|.1f}"])],
    ),
    "startup": Table(
        "startup",
        ["", "process start to /health 200, s", "`import torch`, s", "ratio"],
        [("bundled model, CPU",
          ["{serve to /health 200|.2f}", "{import torch|.2f}", "{of import torch|.2f}"])],
    ),
    "startup on a GPU": Table(
        "decode",
        ["", *MODELS.values()],
        [("process start to first token, s", [f"{{{m}, process start to first token|.1f}}" for m in MODELS])],
    ),
    "cpu_generation": Table(
        "cpu_generation",
        ["", "alone, ms a token", "of generate's time", "16 requests, useful tokens/s", "of its static batch",
         "of its continuous batching"],
        [(dtype, [f"{{{dtype}: asyncengine alone|.1f}}", f"{{{dtype}: alone, of generate's time|.2f}}",
                  f"{{{dtype}: asyncengine mixed|.0f}}", f"{{{dtype}: mixed, over static|.2f}}",
                  f"{{{dtype}: mixed, over continuous|.2f}}"]) for dtype in ("float32", "bfloat16")],
    ),
    "overlap": Table(
        "overlap",
        ["case", "engine, µs", "over bare, in-process", "over bare, SSE", "tokens/s by SSE"],
        [(f"{MODELS[model]}, {rows}", [f"{{{model}:{rows} in-process: engine|,.0f}}",
                                      f"{{{model}:{rows} in-process: engine over bare|.3f}}",
                                      f"{{{model}:{rows} SSE: engine over bare|.3f}}",
                                      f"{{{model}:{rows} SSE: output in the window|,.0f}}"])
         for model, rows in (
             ("gpt2", 64), ("gpt2", 256), ("qwen3-0.6b", 64), ("llama-3.1-8b", 1), ("llama-3.1-8b", 64))],
    ),
    "overlap_ablation": Table(
        "overlap_ablation",
        ["step over the default's", "GPT-2, 64", "GPT-2, 256", "Qwen3-0.6B, 64"],
        [(part, [f"{{{case} {part}: step over default|.2f}}" for case in ("gpt2:64", "gpt2:256", "qwen3-0.6b:64")])
         for part in ("eager, no graphs", "event loop launches", "event loop launches, SSE", "one step in flight",
                      "staging pinned", "staging pageable")],
    ),
    "streaming": Table(
        "streaming",
        ["", "TTFT p50, p99", "TPOT p50", "ITL p50, p99, max", "tokens/s"],
        _per_model("{MODEL: TTFT p50|.2f}, {MODEL: TTFT p99|.2f}", "{MODEL: TPOT p50|.2f}",
                   "{MODEL: ITL p50|.2f}, {MODEL: ITL p99|.2f}, {MODEL: ITL max|.2f}", "{MODEL: throughput|,.0f}"),
    ),
    "decode": Table("decode", ["rows", "1", "8", "64", "256"], [(MODELS[m], _batches(m)) for m in MODELS]),
    "decode_fp8": Table(
        "decode_fp8", ["rows", "1", "8", "64", "256"], [("Llama-3.1-8B, float8", _batches("llama-3.1-8b"))],
    ),
    "decode_invariant": Table(
        "decode_invariant", ["rows", "1", "64"],
        [("GPT-2, of the default's time",
          [f"{{gpt2, batch {rows}, batch-invariant over default|.1f}}" for rows in (1, 64)])],
    ),
    "kernels": Table(
        "kernels",
        ["kernel", "figure"],
        [("attention of decode, 8B, 64 x 2,048 and 1 x 32,768, % of 4.4 TB/s",
          ["{attention: decode, paged, llama-3.1-8b, 64 x 2048: of the floor|.0f} and "
           "{attention: decode, paged, llama-3.1-8b, 1 x 32768: of the floor|.0f}"]),
         ("sampler, 151,936 tokens, 256 rows: greedy, temperature, top-p, µs",
          ["{sampler: greedy, qwen3-0.6b, 256 x 151936 peaked|.0f}, "
           "{sampler: temperature, qwen3-0.6b, 256 x 151936 peaked|.0f}, "
           "{sampler: top-p 0.95, qwen3-0.6b, 256 x 151936 peaked|.0f} to "
           "{sampler: top-p 0.95, qwen3-0.6b, 256 x 151936 normal|.0f}"])],
    ),
    "kernels_prefill": Table(
        "kernels_prefill",
        ["kernel", "µs a layer"],
        [("attention of prompts, 8B, 2,048 fresh tokens and after 14,336",
          ["{attention: prefill, llama-3.1-8b, 1 x 2048 after 0|.0f} and "
           "{attention: prefill, llama-3.1-8b, 1 x 2048 after 14336|.0f}"])],
    ),
    "kernels_fp8_kv": Table(
        "kernels_fp8_kv",
        ["attention, 8B, µs a layer", "bfloat16 keys and values", "float8"],
        [(text, [f"{{attention: {kernel}, llama-3.1-8b, {size}|.0f}}",
                 f"{{attention: {kernel}, llama-3.1-8b*fp8*, {size}|.0f}}"])
         for text, kernel, size in (("decode, 64 x 16,384", "decode, paged", "64 x 16384"),
                                    ("prompt, 2,048 after 14,336", "prefill", "1 x 2048 after 14336"))],
    ),
    "fp8_accuracy": Table(
        "fp8_accuracy",
        ["float8 weights, bundled model", "figure"],
        [("distance of logits, % of their norm", ["{stories, prompts: relative error|.1f}"]),
         ("perplexity without and with", ["{stories, perplexity bf16|.4f} and {stories, perplexity fp8|.4f}"])],
    ),
    "prefill": Table(
        "prefill",
        ["prompts of", "2,048 tokens (GPT-2 1,023), tokens/s", "of the matrix rate, %", "16,384 tokens", "%"],
        [("GPT-2", ["{gpt2, prompts of 1023|,.0f}", "{gpt2, prompts of 1023: of the matrix rate|.0f}", "", ""]),
         *((MODELS[m], [f"{{{m}, prompts of 2048|,.0f}}", f"{{{m}, prompts of 2048: of the matrix rate|.0f}}",
                        f"{{{m}, prompts of 16384|,.0f}}", f"{{{m}, prompts of 16384: of the matrix rate|.0f}}"])
           for m in ("qwen3-0.6b", "llama-3.1-8b"))],
    ),
    "features": Table(
        "features",
        ["of a plain step, 256 rows", "GPT-2", "Llama-3.1-8B"],
        [(name, [f"{{gpt2, {name}|.2f}}", f"{{llama-3.1-8b, {name}|.2f}}"])
         for name in ("a temperature", "penalties, 16 biases", "top-20 log probabilities", "chosen log probability")],
    ),
    "features_schema": Table(
        "features_schema", ["of a plain step, 64 rows of Llama-3.1-8B", "figure"],
        [("JSON schema", ["{llama-3.1-8b, JSON schema|.2f}"]),
         ("a mask on one thread, µs, p50 and p99",
          ["{llama-3.1-8b, masks on one thread: p50|.0f} and {llama-3.1-8b, masks on one thread: p99|.0f}"])],
    ),
    "embeddings": Table(
        "embeddings", ["embeddings of 512 tokens by Qwen3-0.6B", "rate over prefill's"],
        [(pooling, [f"{{qwen3-0.6b, pooling {pooling}: rate over prefill's|.2f}}"]) for pooling in ("last", "mean")],
    ),
    "slow_mask": Table(
        "slow_mask", ["63 rows of GPT-2 beside a row whose masks take 50 ms", "ITL of that without"],
        [(p, [f"{{gpt2, 63 rows beside it: ITL {p} *|.2f}}"]) for p in ("p50", "p99")],
    ),
    "memory": Table(
        "memory", ["of computing it", "figure"],
        [("first token after a prefix of 32,768 tokens, from the host", ["{of computing it, from the host|.2f}"]),
         ("the same from the disk", ["{of computing it, from the disk|.2f}"]),
         *(Row(f"a sequence of {n} tokens resumed by copy", [f"{{copied over computed again, {n}|.2f}}"],
               "memory_resume") for n in ("4,096", "16,384"))],
    ),
    "long_prompt": Table(
        "long_prompt",
        ["16 streams of the 8B beside a prompt of 100,000 tokens", "no target", "`--target-itl-ms 20`"],
        [("ITL p99, ms", ["{no target: beside the prompt, p99|.1f}", "{target 20 ms: beside the prompt, p99|.1f}"]),
         ("the prompt's first token, s", ["{no target: the prompt beside streams|.1f}",
                                          "{target 20 ms: the prompt beside streams|.1f}"])],
    ),
    "memory_hybrid": Table(
        "memory_hybrid",
        ["pool, context", "tokens/s over swap", "% gain predicted at the start", "TPOT p50 on the GPU over swap's"],
        [(f"{pool} GB, 2,048", [f"{{{pool} GB, 2,048: auto over swap|.2f}}",
                                f"{{{pool} GB, 2,048: auto: gain predicted at the start|.0f}}",
                                f"{{{pool} GB, 2,048: auto: TPOT p50 on the device over swap|.2f}}"])
         for pool in ("1", "3.5")],
    ),
    "the project": Table(
        "decode",
        ["measured", *MODELS.values()],
        [("decode step, 1 / 8 / 64 / 256 rows, ms", [" / ".join(_batches(m)) for m in MODELS]),
         Row("engine over bare replay, 64 rows, SSE",
             [f"{{{m}:64 SSE: engine over bare|.3f}}" for m in MODELS], "overlap"),
         Row("TTFT / TPOT, a request every 20 ms, ms",
             [f"{{{m}: TTFT p50|.2f}} / {{{m}: TPOT p50|.2f}}" for m in MODELS], "streaming"),
         Row("prefill of 2,048 tokens (GPT-2 1,023), tokens/s",
             ["{gpt2, prompts of 1023|,.0f}", *(f"{{{m}, prompts of 2048|,.0f}}" for m in list(MODELS)[1:])],
             "prefill"),
         Row("CPU, float32: tokens/s over continuous batching of transformers",
             ["{float32: mixed, over continuous|.1f} times", "", ""], "cpu_generation")],
    ),
}  # fmt: skip


class Missing(Exception):
    """A record, or a figure of it, that is not there."""


def load(name: str, folder: Path | None = None) -> Record:
    """The record of that name. Raises Missing."""
    path = (folder or RESULTS) / f"{name}.json"
    if not path.exists():
        raise Missing(path.name)
    record: Record = json.loads(path.read_text())
    return record


def render(table: Table, folder: Path | None = None) -> str:
    """The table in Markdown with its caption; nothing if its records have nothing of it."""
    lines, used = [], {}
    for row in (Row(*each) for each in table.rows):
        name = row.record or table.record
        try:
            record = load(name, folder)
            lines.append(f"| {' | '.join([row.label, *(fill(cell, record) for cell in row.cells)])} |")
            used[name] = record
        except Missing:
            continue
    if not lines:
        return ""
    head = [f"| {' | '.join(table.head)} |", "|" + "---|" * len(table.head)]
    captions = " ".join(caption(name, record) for name, record in used.items())
    return "\n".join(["", *head, *lines, "", captions, ""])


def caption(name: str, record: Record) -> str:
    repeats = record["repeats"]
    count = f"{repeats} repeat{'s' * (repeats != 1)}" if isinstance(repeats, int) else f"repeats: {repeats}"
    return f"{name}.json: commit {record['commit'][:7]}, {hardware(record)}, {count}."


def hardware(record: Record) -> str:
    found = record["hardware"]
    gpu = found.get("GPU 0")
    return gpu.split(",")[0] if gpu else f"CPU, {found['cores'].split()[0]} cores"


def fill(cell: str, record: Record) -> str:
    return re.sub(r"\{(max )?([^|{}]+)\|([^{}]+)\}", lambda match: _figure(record, *match.groups()), cell)


def _figure(record: Record, largest: str | None, name: str, form: str) -> str:
    found = [figure for figure in record["figures"] if fnmatchcase(figure["name"], name.replace("[", "[[]"))]
    if not found or (len(found) > 1 and not largest):
        raise Missing(name)
    figure = max(found, key=lambda one: one["value"])
    text = format(figure["value"], form)
    return f"**{text}**" if figure.get("met") is False else text


def filled(text: str, folder: Path | None = None) -> str:
    """A document with the figures of the records."""

    def block(match: re.Match[str]) -> str:
        return match[1] + render(TABLES[match[2]], folder) + match[4]

    return BLOCK.sub(block, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        before = path.read_text()
        if (after := filled(before)) != before:
            stale.append(name)
            if not args.check:
                path.write_text(after)
    if args.check and stale:
        raise SystemExit(f"other figures than the records': {', '.join(stale)}")
    print(f"written: {', '.join(stale)}" if stale else "every document has the records' figures")


if __name__ == "__main__":
    main()
