"""Text over HTTP that goes on where the prompt ended, stops at special tokens, and is truncated on either side."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncengine import AsyncEngine
from tests.models import tiny
from tests.server.harness import serving
from tests.text.kinds import KINDS

SPACED = ["metaspace", "metaspace-first", "metaspace-never", "byte-fallback"]


@asynccontextmanager
async def served(kind: str, directory: Path) -> AsyncIterator[tuple[Any, AsyncEngine]]:
    backend = KINDS[kind]()
    tiny.save_tokenizer(backend, directory, "{% for m in messages %}{{ m.content }}{% endfor %}")
    tiny.build_model("llama", vocab_size=backend.get_vocab_size()).save_pretrained(directory)
    async with (
        AsyncEngine.from_pretrained(directory, progress=False, num_kv_blocks=64) as engine,
        serving(engine, served_model_name="m") as site,  # type: ignore[arg-type]
        aiohttp.ClientSession(site.url) as http,
    ):

        async def post(path: str, **fields: Any) -> Any:
            async with http.post(path, json={"model": "m", **fields}) as reply:
                if "stream" not in fields:
                    return await reply.json()
                lines = [line async for line in reply.content if line.startswith(b"data: {")]
                return [json.loads(line[6:]) for line in lines]

        yield post, engine


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [*SPACED, "word-piece", "byte-level"])
async def test_the_first_space_of_an_output_is_there(kind: str, tmp_path: Path) -> None:
    async with served(kind, tmp_path) as (post, engine):
        name = {"word-piece": "world", "byte-level": "Ġworld"}.get(kind, "▁world")
        prompt, world = (
            engine.tokenizer.encode("hello", add_special_tokens=False),
            engine.tokenizer.backend.token_to_id(name),
        )
        fields = {"prompt": prompt, "max_tokens": 2, "allowed_token_ids": [world]}
        for echo in ({}, {"echo": True}):
            head = "hello" if echo else ""
            more = fields | echo
            answer = await post("/v1/completions", logprobs=0, **more)
            choice = answer["choices"][0]
            assert choice["text"] == head + " world world"
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
            tokens = choice["logprobs"]["tokens"]
            offsets = [len("".join(tokens[:k])) for k in range(len(tokens))]
            assert choice["logprobs"]["text_offset"] == offsets
            chunks = await post("/v1/completions", stream=True, **more)
            assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]
        chat = {
            "messages": [{"role": "user", "content": "it"}, {"role": "assistant", "content": " hello"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
            "max_tokens": 1,
            "allowed_token_ids": [world],
        }
        choice = (await post("/v1/chat/completions", logprobs=True, **chat))["choices"][0]
        assert choice["message"]["content"] == " world"
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [" world"]
        chunks = await post("/v1/chat/completions", stream=True, **chat)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == " world"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("structure", [{"choice": [" yes", " no"]}, {"regex": " (yes|no)"}])
@pytest.mark.parametrize("kind", ["byte-fallback", "byte-level"])
async def test_a_structured_output_has_its_first_space(kind: str, structure: dict[str, Any], tmp_path: Path) -> None:
    """The grammar has seen the space, behind a prompt with text and behind one without."""
    async with served(kind, tmp_path) as (post, engine):
        for prompt in (engine.tokenizer.encode("hello", add_special_tokens=False), [0]):
            answer = await post("/v1/completions", prompt=prompt, max_tokens=8, structured_outputs=structure)
            assert answer["choices"][0]["text"] in (" yes", " no")


@pytest.mark.parametrize("include", [False, True])
async def test_a_special_token_stops(include: bool, tmp_path: Path) -> None:
    async with served("byte-fallback", tmp_path) as (post, engine):
        end = engine.tokenizer.backend.token_to_id("<|im_end|>")
        fields = {
            "prompt": "hello",
            "max_tokens": 8,
            "allowed_token_ids": [end],
            "stop": ["no", "<|im_end|>"],
            "include_stop_str_in_output": include,
        }
        answer = (await post("/v1/completions", logprobs=0, return_token_ids=True, **fields))["choices"][0]
        text = "<|im_end|>" if include else ""
        assert (answer["text"], answer["finish_reason"], answer["token_ids"]) == (text, "stop", [end])
        assert "".join(answer["logprobs"]["tokens"]) == text
        chunks = await post("/v1/completions", stream=True, **fields)
        assert "".join(c["choices"][0]["text"] for c in chunks) == text
        # The model's own end as a stop string, where it does not end the sequence by itself.
        (eos,) = [engine.tokenizer.backend.token_to_id("</s>")]
        fields |= {"allowed_token_ids": [eos], "stop": "</s>", "ignore_eos": True}
        answer = (await post("/v1/completions", **fields))["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == ("</s>" if include else "", "stop")


async def test_routes_truncate_on_either_side(tmp_path: Path) -> None:
    async with served("byte-level", tmp_path) as (post, engine):
        text = "hello world it is " * 3000  # longer than the context in characters
        whole = engine.tokenizer.encode(text)
        cut = {"truncate_prompt_tokens": 3}
        for side, kept in (({}, whole[-3:]), ({"truncation_side": "right"}, whole[:3])):
            tokens = await post("/tokenize", prompt=text, **cut, **side)
            assert tokens["tokens"] == kept
            answer = await post("/v1/completions", prompt=text, max_tokens=1, return_token_ids=True, **cut, **side)
            assert answer["choices"][0]["prompt_token_ids"] == kept
            messages = [{"role": "user", "content": text}]
            answer = await post(
                "/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True, **cut, **side
            )
            assert answer["prompt_token_ids"] == kept
            assert (await post("/tokenize", messages=messages, **cut, **side))["tokens"] == kept
        for side, kept in (({}, whole[:3]), ({"truncation_side": "left"}, whole[-3:])):
            found, wanted = [
                (await post("/v1/embeddings", input=given, **more))["data"][0]["embedding"]
                for given, more in ((text, cut | side), (kept, {}))
            ]
            assert found == pytest.approx(wanted, abs=1e-5)
        answer = await post("/score", text_1=text, text_2=text, **cut)
        assert answer["data"][0]["score"] == pytest.approx(1.0, abs=1e-5)
        assert answer["usage"]["prompt_tokens"] == 6
        wrong = await post("/v1/completions", prompt="hello", truncation_side="middle")
        assert wrong["error"]["param"] == "truncation_side"
