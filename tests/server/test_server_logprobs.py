"""Log probabilities over HTTP: the real client, the real server, the bundled model."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob

from asyncengine import AsyncEngine, SamplingParams, bundled_model
from asyncengine.api.logprobs import LogProb, TokenLogProbs
from asyncengine.api.outputs import FinishReason
from asyncengine.server.logprobs import ChoiceLogProbs, JobLogProbs
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, COMPLETIONS, USER, raw_post, serving

PROMPT = "Once upon a time"
MODEL = "bundled"
#: With and without strings that end the text in the midst of tokens, of one token and of several.
ENDS: list[dict[str, Any]] = [
    {},
    {"stop": ["e wa"]},
    {"stop": ["s"]},
    {"stop": ["e wa"], "extra_body": {"include_stop_str_in_output": True}},
]


@asynccontextmanager
async def client(**config: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, AsyncEngine]]:
    async with (
        AsyncEngine.from_pretrained(bundled_model(), progress=False, **config) as engine,
        serving(engine, served_model_name=MODEL) as site,  # type: ignore[arg-type]
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as api,
    ):
        yield api, engine


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ends", ENDS)
async def test_of_completions(ends: dict[str, Any]) -> None:
    async with client() as (api, engine):
        asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 4, "n": 2} | ends
        answer = await api.completions.create(logprobs=3, **asked)
        plain = await api.completions.create(**asked)
        stream = await api.completions.create(logprobs=3, stream=True, **asked)
        chunks = [choice async for chunk in stream for choice in chunk.choices]
        more = {"stop": ends.get("stop"), **ends.get("extra_body", {})}
        params = SamplingParams(max_tokens=24, temperature=0.8, seed=4, n=2, logprobs=3, **more)
        wanted = await engine.generate(PROMPT, params)
    for i, choice in enumerate(answer.choices):
        assert choice.text == plain.choices[i].text == wanted.outputs[i].text
        assert plain.choices[i].logprobs is None
        found = choice.logprobs
        assert found is not None
        assert "".join(found.tokens) == choice.text
        assert [choice.text[:offset] for offset in found.text_offset] == [
            "".join(found.tokens[:k]) for k in range(len(found.tokens))
        ]
        engines = wanted.outputs[i].logprobs
        assert engines is not None
        assert found.token_logprobs == [data.logprob for data in engines[: len(found.tokens)]]
        for token, top, data in zip(found.tokens, found.top_logprobs, engines, strict=False):
            assert 3 <= len(top) <= 4
            assert top[token] == data.logprob <= max(top.values()) == data.top[0].logprob
        streamed = [c.logprobs for c in chunks if c.index == i and c.logprobs is not None]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for part in streamed for x in getattr(part, name)] == getattr(found, name)
        for c in chunks:
            assert ends or c.logprobs is None or "".join(c.logprobs.tokens) == c.text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ends", ENDS)
async def test_of_chat(ends: dict[str, Any]) -> None:
    async with client() as (api, _):
        asked = {"model": MODEL, "messages": USER, "max_tokens": 24, "temperature": 0.0} | ends
        answer = await api.chat.completions.create(logprobs=True, top_logprobs=2, **asked)
        chosen = await api.chat.completions.create(logprobs=True, **asked)
        stream = await api.chat.completions.create(logprobs=True, top_logprobs=2, stream=True, **asked)
        chunks = [choice async for chunk in stream for choice in chunk.choices]
    found = of_chat(answer.choices[0])
    text = answer.choices[0].message.content
    assert "".join(entry.token for entry in found) == text
    assert bytes(b for entry in found for b in entry.bytes or ()).decode().startswith(text or "")
    for entry in found:
        whole = entry.top_logprobs[0].token  # greedy; a stop string may have cut it
        assert whole.startswith(entry.token)
        assert ends or whole == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert len(entry.top_logprobs) == 2
    assert [(e.token, e.logprob, e.top_logprobs) for e in of_chat(chosen.choices[0])] == [
        (e.token, e.logprob, []) for e in found
    ]
    assert [entry for c in chunks if c.logprobs for entry in c.logprobs.content or ()] == found


def of_chat(choice: Any) -> list[ChatCompletionTokenLogprob]:
    assert choice.logprobs.refusal is None
    return list(choice.logprobs.content)


async def test_numbers_in_place_of_names_and_named_tokens() -> None:
    async with client() as (api, _):
        more = {"return_tokens_as_token_ids": True, "logprob_token_ids": [7, 9], "return_token_ids": True}
        answer = await api.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=4, logprobs=0, temperature=0, extra_body=more
        )
        chat = await api.chat.completions.create(
            model=MODEL, messages=USER, max_tokens=3, logprobs=True, temperature=0, extra_body=more
        )
    choice, told = answer.choices[0], chat.choices[0]
    assert choice.logprobs is not None
    assert choice.model_extra is not None
    assert told.model_extra is not None
    assert chat.model_extra is not None
    assert choice.logprobs.tokens == [f"token_id:{t}" for t in choice.model_extra["token_ids"]]
    assert all({"token_id:7", "token_id:9"} < set(top) and len(top) == 3 for top in choice.logprobs.top_logprobs)
    entries = of_chat(told)
    assert [e.token for e in entries] == [f"token_id:{t}" for t in told.model_extra["token_ids"]]
    assert all([x.token for x in e.top_logprobs] == ["token_id:7", "token_id:9"] for e in entries)
    assert all(e.bytes is None for e in entries)
    assert len(chat.model_extra["prompt_token_ids"]) == chat.usage.prompt_tokens


async def test_an_engine_without_tokenizer_names_numbers() -> None:
    async with client(skip_tokenizer_init=True) as (api, _):
        answer = await api.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=2, logprobs=1, temperature=0)
    assert answer.choices[0].logprobs is not None
    assert all(token.startswith("token_id:") for token in answer.choices[0].logprobs.tokens)


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"logprob_token_ids": [99999, 77777]}, "logprob_token_ids"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": 2}, "logprobs"),
    ],
)
async def test_wrong_counts_are_refused(route: str, fields: dict[str, Any], param: str) -> None:
    async with (
        AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine,
        serving(engine) as site,  # type: ignore[arg-type]
    ):
        prompt: dict[str, Any] = {"prompt": "x"} if route == COMPLETIONS else {"messages": USER}
        reply = await site.post(route, **prompt | fields)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert (await site.post(route, **prompt, max_tokens=1)).status == 200


async def test_what_cannot_come_is_a_finite_number() -> None:
    async with serving(FakeEngine("ab")) as site:
        reply = await site.post(COMPLETIONS, prompt="x", max_tokens=2, logprobs=3)
        chat = await site.post(CHAT, messages=USER, max_tokens=2, logprobs=True, top_logprobs=3)
    assert reply.json["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -1.0, "b": -0.5, "c": -9999.0}
    assert [x["logprob"] for x in chat.json["choices"][0]["logprobs"]["content"][0]["top_logprobs"]][2] == -9999.0


class Part:
    """A piece of news with given text and tokens."""

    def __init__(self, text: str, tokens: list[int], finish: FinishReason | None = None) -> None:
        self.text, self.finish_reason, self.stop_reason = text, finish, None
        self.logprobs = [TokenLogProbs(t, -0.1, 1, (LogProb(t, -0.1),)) for t in tokens]


async def test_parts_of_characters_have_their_bytes() -> None:
    """An emoji of several tokens: the last of them has its text, each has its own bytes."""
    async with client() as (_, engine):
        tokenizer = engine.tokenizer
        text = "a😀b"
        tokens = tokenizer.encode(text, add_special_tokens=False)
        params = SamplingParams(logprobs=1)
        job = JobLogProbs(tokenizer, params, by_number=False)
        (found,) = job.chat(0, Part(tokenizer.decode(tokens), tokens, FinishReason.LENGTH), ())
        (completion,) = JobLogProbs(tokenizer, params, by_number=False).completion(
            0, Part(tokenizer.decode(tokens), tokens, FinishReason.LENGTH), ()
        )
    assert len(tokens) > 3
    assert "".join(entry.token for entry in found.content).strip() == text
    assert bytes(b for entry in found.content for b in entry.bytes or ()).decode().strip() == text
    assert any(name.startswith("bytes:\\x") for top in completion.top_logprobs for name in top or ()) is False
    assert "bytes:\\xf0" in [x.token for entry in found.content for x in entry.top_logprobs]


async def test_held_text_holds_its_tokens() -> None:
    async with client() as (_, engine):
        tokenizer = engine.tokenizer
        tokens = tokenizer.encode("time was", add_special_tokens=False)
        whole = tokenizer.decode(tokens)
        choice = ChoiceLogProbs(tokenizer, SamplingParams(logprobs=0, stop="wasp"))
        cut = len(whole) - 3
        choice.push(Part(whole[:cut], tokens))
        early = choice.take(100)
        choice.push(Part(whole[cut:], [], FinishReason.LENGTH))
        late = choice.take(100)
    assert [t.data.token_id for t in early + late] == tokens
    assert "".join(t.text for t in early) == whole[: len("".join(t.text for t in early))]
    assert late
    assert math.isfinite(late[0].data.logprob)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_echo(n: int, as_ids: bool) -> None:
    """Evaluation harnesses ask so: prompts as token ids, echoed, with log probabilities, and no token or one."""
    texts = [PROMPT, "The sun was"]
    async with client() as (api, engine):
        prompts: Any = [engine.tokenizer.encode(text) for text in texts] if as_ids else texts
        asked = {"model": MODEL, "prompt": prompts, "echo": True, "temperature": 0.0, "n": n}
        for count in (0, 5):
            answer = await api.completions.create(logprobs=2, max_tokens=count, **asked)
            plain = await api.completions.create(max_tokens=count, **asked)
            stream = await api.completions.create(logprobs=2, max_tokens=count, stream=True, **asked)
            chunks = [choice async for chunk in stream for choice in chunk.choices]
            for choice in answer.choices:
                text = texts[choice.index // n]
                found = choice.logprobs
                assert found is not None
                assert choice.text.startswith(text)
                assert choice.text == plain.choices[choice.index].text == "".join(found.tokens)
                assert (choice.text == text) == (count == 0)
                assert found.token_logprobs[0] is found.top_logprobs[0] is None
                assert all(x is not None and x <= 0 for x in found.token_logprobs[1:])
                assert [choice.text[:offset] for offset in found.text_offset] == [
                    "".join(found.tokens[:k]) for k in range(len(found.tokens))
                ]
                score = await engine.score(texts[choice.index // n][:4], texts[choice.index // n][4:])
                last = len(engine.tokenizer.encode(text))
                assert found.token_logprobs[last - 1] == pytest.approx(score.logprobs[-1].logprob, abs=1e-4)
                for token, top in zip(found.tokens[1:], found.top_logprobs[1:], strict=True):
                    assert token in top
                mine = [c for c in chunks if c.index == choice.index]
                assert "".join(c.text for c in mine) == choice.text
                for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                    streamed = [x for c in mine if c.logprobs for x in getattr(c.logprobs, name)]
                    assert streamed == getattr(found, name)
            assert answer.usage.completion_tokens == 2 * n * count


async def test_log_probabilities_of_prompts() -> None:
    async with client() as (api, engine):
        extra = {"prompt_logprobs": 2, "truncate_prompt_tokens": 4}
        asked = {"model": MODEL, "max_tokens": 2, "temperature": 0.0, "extra_body": extra}
        answer = await api.completions.create(prompt=PROMPT + " there was", **asked)
        chat = await api.chat.completions.create(messages=USER, **asked)
        wanted = await engine.generate(
            PROMPT + " there was",
            SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=2, truncate_prompt_tokens=4),
        )
        with pytest.raises(openai.BadRequestError) as refused:
            await api.completions.create(prompt="x", stream=True, **asked)
    assert refused.value.param == "prompt_logprobs"
    found = answer.choices[0].model_extra["prompt_logprobs"]
    assert wanted.prompt_logprobs is not None
    assert found[0] is None
    for place, data in zip(found[1:], wanted.prompt_logprobs[1:], strict=True):
        assert data is not None
        assert place[str(data.token_id)]["logprob"] == data.logprob
        assert place[str(data.token_id)]["rank"] == data.rank
        assert {int(token) for token in place} == {data.token_id, *(x.token_id for x in data.top)}
    assert answer.choices[0].logprobs is None
    assert answer.usage.prompt_tokens == 4
    assert len(chat.model_extra["prompt_logprobs"]) == 4


ROUTES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": PROMPT, "logprobs": 3, "echo": True, "prompt_logprobs": 3},
    CHAT: {"messages": USER, "logprobs": True, "top_logprobs": 3, "prompt_logprobs": 2},
}


@pytest.mark.parametrize("route", ROUTES)
async def test_answers_that_are_made_in_parts_are_the_same(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One or two tokens at a time, sent while it is made, against all at once and as a whole."""
    asked = {"max_tokens": 24, "temperature": 0.8, "seed": 4, "n": 2, "return_token_ids": True, **ROUTES[route]}
    streamed = {name: value for name, value in asked.items() if name != "prompt_logprobs"}
    answers: list[Any] = []
    streams: list[Any] = []
    async with AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine, serving(engine) as site:  # type: ignore[arg-type]
        for at_once, whole in ((4096, 1 << 20), (8, 100)):
            monkeypatch.setattr("asyncengine.server.logprobs._AT_ONCE", at_once)
            monkeypatch.setattr("asyncengine.server.wire._WHOLE", whole)
            monkeypatch.setattr("asyncengine.server.wire._WRITTEN_AT_ONCE", whole)
            monkeypatch.setattr("asyncengine.server.wire._TURN_S", whole * 1e-9)
            reply = await site.post(route, **asked)
            assert reply.status == 200
            assert ("Content-Length" in reply.headers) == (whole > 100)
            answers.append(reply.json | {"id": "", "created": 0, "usage": None})
            streams.append([choice for event in await site.events(route, **streamed) for choice in event["choices"]])
    assert answers[0] == answers[1]
    for choice in streams[1]:
        assert all(len(values or ()) <= 2 for values in (choice["logprobs"] or {}).values())
    for i in range(2):
        texts, found = [], []
        for stream in streams:
            mine = [choice for choice in stream if choice["index"] == i]
            assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
            texts.append("".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in mine))
            records = [choice["logprobs"] for choice in mine if choice["logprobs"]]
            found.append({name: [x for r in records for x in r[name] or []] for name in records[0]})
        choice = answers[0]["choices"][i]
        assert texts[0] == texts[1] == (choice["text"] if route == COMPLETIONS else choice["message"]["content"])
        assert found[0] == found[1]
        assert found[0] | {"refusal": None} == choice["logprobs"] | {"refusal": None}


async def test_a_large_answer_is_cut_where_its_client_leaves() -> None:
    async with serving(FakeEngine("ab"), write_timeout_s=1.0) as site:
        reader, writer = await asyncio.open_connection(*site.address, limit=1024)
        fields = {"messages": USER, "n": 100, "max_tokens": 200, "logprobs": True, "top_logprobs": 3}
        writer.write(raw_post(CHAT, fields))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(2)  # it reads no more
        received = bytearray()
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 20):
                received += piece
        assert not received.endswith(b"0\r\n\r\n")
        writer.close()
        whole = await site.post(CHAT, **fields)
        assert len(whole.body) > 1 << 20
        assert len(whole.json["choices"][99]["logprobs"]["content"]) == 200
