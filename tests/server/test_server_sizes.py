"""A tokenizer and an embedding of different sizes: every feature works beside every such pair, over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from asyncengine import AsyncEngine, SamplingParams
from tests.models import tiny
from tests.server.harness import CHAT, COMPLETIONS, USER, Site, serving

TOKENS = 404
"""Tokens of the tokenizer, its added ones included."""


class Sizes(NamedTuple):
    rows: int
    """Rows of the embedding."""
    end: int | list[int] | None
    """eos_token_id of config.json"""
    ends: tuple[int, ...]
    """Tokens that end a sequence."""
    tokenizer_end: str = "</s>"


SIZES = {
    "padded to a multiple of 64": Sizes(448, 1, (1,)),
    "tokens added behind the last row": Sizes(402, 1, (1,)),
    "the end is a padded row": Sizes(448, 440, (440, 1)),
    "the end alone is a padded row": Sizes(448, 440, (440,), ""),
    "ends are padded rows and a token": Sizes(448, [445, 1, 446], (445, 1, 446)),
    "an end lies past the last row": Sizes(402, [1, 402, 5000, -1], (1,)),
    "the tokenizer's end lies past the last row": Sizes(402, 7, (7,), "Maß"),
    "no end at all": Sizes(448, None, (), ""),
    "every end lies past the last row": Sizes(402, 403, (), "Maß"),
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}


@pytest.fixture(scope="module", params=SIZES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Sizes, Path]:
    sizes, path = SIZES[request.param], tmp_path_factory.mktemp("sizes")
    save(sizes, path)
    return sizes, path


def engine_of(path: Path) -> AsyncEngine:
    return AsyncEngine.from_pretrained(str(path), progress=False, cpu_threads=1, num_kv_blocks=96)


@asynccontextmanager
async def serve(saved: tuple[Sizes, Path]) -> AsyncIterator[Site]:
    sizes, path = saved
    async with (
        engine_of(path) as engine,
        serving(engine, served_model_name="tiny", tool_call_parser="hermes") as site,  # type: ignore[arg-type]
    ):
        assert engine.model_info.eos_token_ids == sizes.ends
        yield site


def save(sizes: Sizes, path: Path, *more: str) -> None:
    """``more``: further tokens of the tokenizer."""
    tiny.build_model("llama", vocab_size=sizes.rows, max_position_embeddings=512).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": sizes.end}))
    tokenizer = tiny.byte_level_tokenizer(vocab_size=TOKENS - 4)
    assert tokenizer.get_vocab_size() == TOKENS
    tokenizer.add_special_tokens(list(more))
    tiny.save_tokenizer(tokenizer, path, "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>")
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": sizes.tokenizer_end or None}))


async def complete(site: Site, **fields: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "prompt": "The fox", "max_tokens": 60, "temperature": 1.0, "seed": 3} | fields
    reply = await site.post(COMPLETIONS, **asked)
    assert reply.status == 200, reply.body
    choice: dict[str, Any] = reply.json["choices"][0]
    return choice


Saved = tuple[Sizes, Path]


async def test_plain(saved: Saved) -> None:
    async with serve(saved) as site:
        assert (await complete(site, ignore_eos=True))["finish_reason"] == "length"


GRAMMARS: list[tuple[dict[str, Any], str]] = [
    ({"json": SCHEMA}, r'\{"a":"(x|yy)"\}'),
    ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
    ({"choice": ["left", "right side"]}, "left|right side"),
    ({"grammar": 'start: "ab" | "cde"'}, "ab|cde"),
]


@pytest.mark.sampled(3)
async def test_grammars(saved: Saved) -> None:
    async with serve(saved) as site:
        for asked, pattern in GRAMMARS:
            for logprobs in (None, 2):
                choice = await complete(site, structured_outputs=asked, logprobs=logprobs)
                assert choice["finish_reason"] == "stop", asked
                assert re.fullmatch(pattern, choice["text"]), asked


async def call_go(site: Site) -> None:
    named = {"type": "function", "function": {"name": "go"}}
    asked = {"messages": USER, "tools": [TOOL], "tool_choice": named, "max_tokens": 100, "seed": 1}
    reply = await site.post(CHAT, model="tiny", **asked)
    assert reply.status == 200, reply.body
    choice = reply.json["choices"][0]
    assert choice["finish_reason"] in ("stop", "tool_calls")
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["a"] in ("x", "yy")


@pytest.mark.sampled(3)
async def test_tool_calls(saved: Saved) -> None:
    async with serve(saved) as site:
        await call_go(site)


async def test_markers_of_calls_without_a_row_are_text(tmp_path: Path) -> None:
    sizes = Sizes(TOKENS, 1, (1,))
    save(sizes, tmp_path, "<tool_call>", "</tool_call>", "<think>", "</think>")
    async with serve((sizes, tmp_path)) as site:
        await call_go(site)
        choice = await complete(site, prompt="a", structured_outputs={"choice": ["x"]})
    assert choice["text"] == "x"


async def test_biases_and_sets_of_every_row(saved: Saved) -> None:
    """Each for the last row, which may have no text; the row behind it is refused."""
    sizes, _ = saved
    last = sizes.rows - 1
    async with serve(saved) as site:
        for fields in (
            {"logit_bias": {str(last): 100}},
            {"allowed_token_ids": [last]},
            {"stop_token_ids": [last], "logit_bias": {str(last): 100}, "include_stop_str_in_output": True},
        ):
            choice = await complete(site, max_tokens=2, return_token_ids=True, **fields)
            assert set(choice["token_ids"]) == {last}, fields
            behind = json.loads(json.dumps(fields).replace(str(last), str(last + 1)))
            reply = await site.post(COMPLETIONS, model="tiny", prompt="a", max_tokens=2, **behind)
            assert reply.status == 400
            assert str(sizes.rows) in reply.error["message"]


@pytest.mark.sampled(3)
async def test_banned_words(saved: Saved) -> None:
    """ "two words" has no row if the tokenizer is larger, and cannot come anyway; e is a single token."""
    async with serve(saved) as site:
        choice = await complete(site, bad_words=["e", "two words"], ignore_eos=True, return_token_ids=True)
    assert choice["finish_reason"] == "length"
    tokenizer = tiny.byte_level_tokenizer(vocab_size=TOKENS - 4)
    assert not {tokenizer.token_to_id(token) for token in ("e", "Ġe", "two words")} & set(choice["token_ids"])


async def test_log_probabilities(saved: Saved) -> None:
    """Padded rows have some as well."""
    last = saved[0].rows - 1
    async with serve(saved) as site:
        choice = await complete(site, logprobs=5, max_tokens=4, logit_bias={str(last): 100}, echo=True)
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"]) > 4
    assert all(p <= 0 for p in choice["logprobs"]["token_logprobs"][1:])
    assert all(len(top) >= 1 for top in choice["logprobs"]["top_logprobs"][1:])


async def test_every_token_that_comes_has_a_text(saved: Saved) -> None:
    """The text of a row without a token is empty."""
    last = max(saved[0].rows, TOKENS) - 1
    async with serve(saved) as site:
        for token in (last, saved[0].rows - 1):
            reply = await site.post("/detokenize", tokens=[token])
            assert reply.status == 200, reply.body
            assert token < TOKENS or reply.json["prompt"] == ""
        assert (await site.post("/detokenize", tokens=[last + 1])).status == 400


async def test_logits_processor(saved: Saved) -> None:
    sizes, path = saved
    seen = []

    def only_the_last(ids: list[int], logits: npt.NDArray[np.float32]) -> None:
        seen.append(logits.shape)
        logits[:-1] = -np.inf

    async with engine_of(path) as engine:
        params = SamplingParams(max_tokens=3, logits_processor=only_the_last, ignore_eos=True)
        output = await engine.generate("The fox", params)
    assert output.outputs[0].token_ids == (sizes.rows - 1,) * 3
    assert set(seen) == {(sizes.rows,)}
