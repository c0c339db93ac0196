"""lm-evaluation-harness: its results through this server are those of its own back end, which runs transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import MODEL, Server

lm_eval = pytest.importorskip("lm_eval")

_STORY = (
    "Once upon a time, a clever mouse named Leo lived in a cosy little house near the old mill. Leo spent many happy "
    "days splashing in puddles. One cloudy day, Leo wanted to learn how to sing."
)
DATA: dict[str, list[dict[str, Any]]] = {
    "choice": [
        {"text": "Once upon a", "choices": [" time", " spoon"], "answer": 0},
        {"text": "The mouse was so happy that he hugged his", "choices": [" friend", " and"], "answer": 0},
        {"text": "Leo wanted to learn how", "choices": [" to sing", " sing to"], "answer": 0},
        {"text": "They were the best", "choices": [" of friends.", " the Tom."], "answer": 0},
    ],
    "rolling": [{"text": _STORY}, {"text": " ".join([_STORY] * 16)}],
    "generate": [
        {"text": "Once upon a time", "answer": ""},
        {"text": "Leo spent many happy", "answer": ""},
        {"text": "From that day on", "answer": ""},
    ],
}
TASKS = [f"stories_{name}" for name in DATA]


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of task definitions beside their data, which lm_eval looks for in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, rows in DATA.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / f"{name}.yaml").write_text((Path(__file__).parent / "tasks" / f"{name}.yaml").read_text())
    return tmp_path


def evaluate(tasks: Path, model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=TASKS, task_manager=manager, bootstrap_iters=0, random_seed=0
    )
    return found


def responses(found: dict[str, Any], task: str) -> list[Any]:
    """Return the responses to each document, in order."""
    return [sample["filtered_resps"] for sample in sorted(found["samples"][task], key=lambda s: s["doc_id"])]


def figures(found: dict[str, Any], task: str) -> dict[str, float]:
    return {name: value for name, value in found["results"][task].items() if isinstance(value, int | float)}


def test_the_harness_finds_what_transformers_finds(tasks: Path, server: Server) -> None:
    # The client of the API begins texts without BOS, and keeps two tokens of the context free: so shall the other one.
    alike = {"max_length": 510, "add_bos_token": False}
    theirs = evaluate(tasks, "hf", {"pretrained": str(MODEL), "dtype": "float32", "device": "cpu", **alike})
    for batch_size in (1, 3):
        ours = evaluate(
            tasks,
            "local-completions",
            {
                "model": server.model,
                "base_url": f"{server.v1}/completions",
                "tokenizer": str(MODEL),
                "tokenizer_backend": "huggingface",
                "max_length": 512,
                "batch_size": batch_size,
                "num_concurrent": batch_size,
            },
        )
        check(ours, theirs)


def check(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for task in TASKS:
        assert figures(ours, task) == pytest.approx(figures(theirs, task), rel=1e-4), task
    assert responses(ours, "stories_generate") == responses(theirs, "stories_generate")
    assert all(text for (text,) in responses(ours, "stories_generate"))
    for mine, other in zip(responses(ours, "stories_choice"), responses(theirs, "stories_choice"), strict=True):
        assert [greedy for _, greedy in mine] == [greedy for _, greedy in other]
        assert [score for score, _ in mine] == pytest.approx([score for score, _ in other], abs=1e-3)
    mine, other = (responses(found, "stories_rolling") for found in (ours, theirs))
    assert [x for (x,) in mine] == pytest.approx([x for (x,) in other], rel=1e-4)
    assert ours["results"]["stories_choice"]["acc,none"] > 0.5
