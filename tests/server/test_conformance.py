"""Behaviours that OpenAI clients rely on, one by one, from a real client to the real server with the bundled model.

Each test is called by the number of its line in the list of behaviours. Lines that are not here have tests of their own
elsewhere, with the number in their names or in the files about bodies, errors and departures.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import openai
import pytest
import requests
import uvloop

from asyncengine import AsyncEngine, bundled_model
from asyncengine.server.config import ServerConfig
from asyncengine.server.http_server import HttpServer
from asyncengine.server.openapi import document
from tests.server.harness import CHAT, COMPLETIONS, USER

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PROMPT = "Once upon a time there was a "
CONTEXT = 256
DESCRIPTION = json.loads(document(keys=False, root_path=""))


@dataclass
class Client:
    """HTTP by path."""

    base_url: str
    session: requests.Session

    def get(self, path: str) -> requests.Response:
        return self.session.get(self.base_url + path, timeout=60)

    def post(self, path: str, **options: Any) -> requests.Response:
        return self.session.post(self.base_url + path, timeout=60, **options)


@pytest.fixture(scope="module")
def http() -> Iterator[Client]:
    """A client of one server for all tests, which runs on a thread of its own."""
    ready = threading.Event()
    url, stop, loops = [""], asyncio.Event(), []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        config = ServerConfig(port=0, served_model_name=["first", "second"], strict_model_names=True)
        server = HttpServer(config)
        async with AsyncEngine.from_pretrained(bundled_model(), progress=False, max_model_len=CONTEXT) as engine:
            await server.start()
            server.app.engine = engine
            url[0] = server.url
            ready.set()
            await stop.wait()
            await server.aclose()

    def body() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())
        finally:
            ready.set()

    thread = threading.Thread(target=body)
    thread.start()
    ready.wait(60)
    try:
        with requests.Session() as session:
            yield Client(url[0], session)
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(60)


@pytest.fixture(scope="module")
def api(http: Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(http: Client, path: str, **fields: Any) -> Any:
    reply = http.post(path, json=fields)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    described = DESCRIPTION["paths"][path.rstrip("/")]["post"]["responses"]["200"]["content"]["application/json"]
    jsonschema.validate(answer, described["schema"] | {"components": DESCRIPTION["components"]})
    return answer


def events(http: Client, path: str, **fields: Any) -> list[Any]:
    reply = http.post(path, json=fields | {"stream": True})
    assert reply.status_code == 200, reply.text
    *parts, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def refused(http: Client, path: str, status: int = 400, **fields: Any) -> dict[str, Any]:
    reply = http.post(path, json=fields)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_streams(http: Client) -> None:
    whole = post(http, COMPLETIONS, prompt=PROMPT, **GREEDY)
    reply = http.post(COMPLETIONS, json={"prompt": PROMPT, "stream": True, **GREEDY})
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    chunks = events(http, COMPLETIONS, prompt=PROMPT, **GREEDY)
    assert {(c["id"], c["created"], c["model"], c["object"]) for c in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "first", "text_completion")
    }
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert whole["object"] == "text_completion"
    chat = post(http, CHAT, messages=USER, **GREEDY)
    assert chat["object"] == "chat.completion"
    assert {c["object"] for c in events(http, CHAT, messages=USER, **GREEDY)} == {"chat.completion.chunk"}


def test_chat_chunks_usage_and_choices(http: Client) -> None:
    *chunks, last = events(http, CHAT, messages=USER, n=2, stream_options={"include_usage": True}, **GREEDY)
    for index in range(2):
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
        assert deltas[0]["role"] == "assistant"
        assert not any("role" in d for d in deltas[1:])
        assert deltas[-1] == {}
    assert all(c["usage"] is None for c in chunks)
    assert last["choices"] == []
    whole = post(http, CHAT, messages=USER, n=2, **GREEDY)
    assert {k: v for k, v in last["usage"].items() if k != "prompt_tokens_details"} == {
        k: v for k, v in whole["usage"].items() if k != "prompt_tokens_details"
    }
    counted = post(http, "/tokenize", messages=USER)["count"]
    assert whole["usage"]["prompt_tokens"] == counted
    assert whole["usage"]["total_tokens"] == counted + 24
    choice = whole["choices"][1]
    assert choice.keys() >= {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"].keys() >= {"role", "content", "refusal"}
    text = post(http, COMPLETIONS, prompt=PROMPT, **GREEDY)["choices"][0]
    assert text.keys() == {"text", "index", "logprobs", "finish_reason", "stop_reason", "prompt_logprobs"}
    assert not any("usage" in c for c in events(http, CHAT, messages=USER, **GREEDY))


def test_errors(http: Client) -> None:
    assert http.get("/nowhere").json()["error"]["code"] == "not_found"
    assert http.get(COMPLETIONS).status_code == 405
    assert http.post(COMPLETIONS, data=b"{").json()["error"]["type"] == "invalid_request_error"
    for content in (b"[]", b"3", b"null"):
        assert http.post(CHAT, data=content).status_code == 400
    assert refused(http, COMPLETIONS)["param"] == "prompt"
    assert refused(http, CHAT, messages=[])["param"] == "messages"
    assert refused(http, CHAT, 404, messages=USER, model="third")["code"] == "model_not_found"
    assert refused(http, CHAT, messages=USER, temperature=3, stream=True)["param"] == "temperature"


def test_models_and_health(http: Client) -> None:
    listing = http.get("/v1/models").json()
    assert [card["id"] for card in listing["data"]] == ["first", "second"]
    for card in listing["data"]:
        openai = {"id", "object", "created", "owned_by", "max_model_len", "root", "parent", "permission"}
        assert card.keys() == openai | {"type", "display_name", "created_at", "lifecycle"}
        assert http.get(f"/v1/models/{card['id']}").json() == card
    assert http.get("/health").status_code == http.get("/ping").status_code == 200


def test_lengths(http: Client) -> None:
    assert (
        post(http, COMPLETIONS, prompt=PROMPT, ignore_eos=True, unknown=1, n=None)["usage"]["completion_tokens"] == 16
    )
    fields = {"messages": USER, "max_tokens": 5, "max_completion_tokens": 3, "ignore_eos": True}
    assert post(http, CHAT, **fields)["usage"]["completion_tokens"] == 3
    error = refused(http, COMPLETIONS, prompt=PROMPT, max_tokens=1000)
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]
    assert "1000" in error["message"]
    error = refused(http, COMPLETIONS, prompt=[5] * 300)
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]
    assert "300" in error["message"]
    assert error["code"] == "context_length_exceeded"


def test_prompts_times_n_and_seeds(http: Client) -> None:
    fields = {"prompt": [PROMPT, "The cat"], "n": 2, "seed": 5, "max_tokens": 10, "ignore_eos": True}
    whole = post(http, COMPLETIONS, **fields)
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    assert len({c["text"] for c in whole["choices"]}) == 4
    assert post(http, COMPLETIONS, **fields)["choices"] == whole["choices"]
    assert (
        post(http, COMPLETIONS, **fields | {"prompt": "The cat"})["choices"][0]["text"] == whole["choices"][2]["text"]
    )
    assert refused(http, COMPLETIONS, prompt=PROMPT, n=129)["param"] == "n"
    for name, value in (("temperature", 2.1), ("top_p", 0), ("presence_penalty", -3)):
        assert refused(http, COMPLETIONS, prompt=PROMPT, **{name: value})["param"] == name
    for literal in (b"NaN", b"Infinity"):
        assert http.post(COMPLETIONS, data=b'{"prompt": "a", "temperature": %b}' % literal).status_code == 400


def test_stop(http: Client) -> None:
    text = post(http, COMPLETIONS, prompt=PROMPT, **GREEDY)["choices"][0]["text"]
    stop = text[8:14]  # in the midst of tokens
    for answer in (
        post(http, COMPLETIONS, prompt=PROMPT, stop=stop, **GREEDY)["choices"],
        [c["choices"][0] for c in events(http, COMPLETIONS, prompt=PROMPT, stop=["#", stop], **GREEDY)],
    ):
        assert "".join(c["text"] for c in answer) == text[: text.index(stop)]
        assert answer[-1]["finish_reason"] == "stop"
    assert refused(http, COMPLETIONS, prompt=PROMPT, stop="")["param"] == "stop"


def test_logit_bias(http: Client) -> None:
    first = post(http, COMPLETIONS, prompt=PROMPT, return_token_ids=True, **GREEDY)["choices"][0]["token_ids"][0]
    fields = GREEDY | {"prompt": PROMPT, "return_token_ids": True}
    assert post(http, COMPLETIONS, logit_bias={str(first): -100}, **fields)["choices"][0]["token_ids"][0] != first
    assert set(post(http, COMPLETIONS, logit_bias={"77": 100}, **fields)["choices"][0]["token_ids"]) == {77}
    error = refused(http, COMPLETIONS, prompt=PROMPT, logit_bias={"99999999": 1, "88888888": 1})
    assert "99999999" in error["message"]
    assert "88888888" in error["message"]
    for prompt in ([10**7], [-1]):
        assert refused(http, COMPLETIONS, prompt=prompt)["param"] == "prompt"


def test_logprobs_and_echo(http: Client) -> None:
    choice = post(http, COMPLETIONS, prompt=PROMPT, logprobs=2, echo=True, **GREEDY)["choices"][0]
    data = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert "".join(data["tokens"]).strip().startswith(PROMPT.strip()[:4])
    assert data["token_logprobs"][0] is None
    assert all(math.isfinite(x) and x <= 0 for x in data["token_logprobs"][1:])
    ids = post(http, "/tokenize", prompt=PROMPT)["tokens"]
    scored = post(http, COMPLETIONS, prompt=ids, logprobs=0, echo=True, max_tokens=0)
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == len(ids)
    content = post(http, CHAT, messages=USER, logprobs=True, top_logprobs=3, **GREEDY)["choices"][0]
    assert "".join(each["token"] for each in content["logprobs"]["content"]) == content["message"]["content"]
    assert all(len(each["top_logprobs"]) == 3 for each in content["logprobs"]["content"])
    assert refused(http, CHAT, messages=USER, logprobs=True, top_logprobs=100)["param"] == "top_logprobs"


def test_stream_options_and_content_parts(http: Client) -> None:
    assert refused(http, CHAT, messages=USER, stream_options={"include_usage": True})["param"] == "stream_options"
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert all(c["usage"] for c in events(http, CHAT, messages=USER, stream_options=options, **GREEDY))
    parts = [{"role": "user", "content": [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "a story"}]}]
    assert post(http, CHAT, messages=parts, **GREEDY)["choices"] == post(http, CHAT, messages=USER, **GREEDY)["choices"]
    assert refused(http, CHAT, messages=[{"role": "user", "content": [{"type": "text"}]}])["param"]


def test_response_format(http: Client) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = post(http, CHAT, messages=USER, response_format=form, max_tokens=60, temperature=0)
    assert isinstance(json.loads(answer["choices"][0]["message"]["content"])["a"], bool)
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    assert refused(http, CHAT, messages=USER, response_format=wrong)["param"]


def test_extensions(http: Client) -> None:
    fields = GREEDY | {"prompt": PROMPT, "return_token_ids": True}
    plain = post(http, COMPLETIONS, **fields)["choices"][0]
    stopped = post(http, COMPLETIONS, stop_token_ids=plain["token_ids"][3:4], **fields)["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert len(stopped["token_ids"]) <= 4
    assert len(post(http, COMPLETIONS, min_tokens=12, **fields)["choices"][0]["token_ids"]) == 12
    cut = post(http, COMPLETIONS, truncate_prompt_tokens=2, **fields)
    assert cut["usage"]["prompt_tokens"] == 2
    word = plain["text"].split()[0]
    assert word not in post(http, COMPLETIONS, bad_words=[word], **fields)["choices"][0]["text"].split()
    for extension in ({"top_k": 1}, {"min_p": 1.0}):
        sampled = post(http, COMPLETIONS, **fields | {"temperature": 1.5, **extension})["choices"][0]
        assert sampled["text"] == plain["text"]
    assert post(http, COMPLETIONS, repetition_penalty=1.9, **fields)["choices"][0]["text"] != plain["text"]


def test_characters_are_whole(http: Client) -> None:
    """Each emoji takes several tokens of the bundled model, which a grammar makes it write."""
    wanted = "🦊 naïve 日本 🙂"
    fields = {"prompt": PROMPT, "structured_outputs": {"choice": [wanted]}, "max_tokens": 60, "temperature": 0}
    answer = post(http, COMPLETIONS, **fields)
    assert answer["choices"][0]["text"] == wanted
    assert answer["usage"]["completion_tokens"] > len(wanted)
    response = http.post(COMPLETIONS, json=fields | {"stream": True, "logprobs": 0})
    events = [json.loads(line[6:]) for line in response.content.split(b"\n") if line.startswith(b"data: {")]
    texts = [event["choices"][0]["text"] for event in events]
    assert "".join(texts) == wanted
    assert len(events) > 3
    assert not any("\ufffd" in text for text in texts)


def test_tokenize_and_detokenize(http: Client) -> None:
    answer = post(http, "/tokenize", prompt=PROMPT, return_token_strs=True)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == CONTEXT
    bare = post(http, "/tokenize", prompt=PROMPT, add_special_tokens=False)
    assert bare["token_strs"] is None
    assert post(http, "/tokenize", content=PROMPT) == bare  # llama.cpp's form
    assert post(http, "/tokenize", content=PROMPT, add_special=True)["tokens"] == answer["tokens"]
    assert post(http, "/detokenize", tokens=bare["tokens"]) == {"prompt": PROMPT}
    assert post(http, "/detokenize", tokens=answer["tokens"], skip_special_tokens=True) == {"prompt": PROMPT}
    assert post(http, "/detokenize", tokens=[]) == {"prompt": ""}
    usage = post(http, COMPLETIONS, prompt=PROMPT, **GREEDY)["usage"]
    assert usage["prompt_tokens"] == answer["count"]
    for fields, param in (
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "messages": USER}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": "a", "content": "a"}, "content"),
        ({"content": "a", "messages": USER}, "prompt"),
        ({"content": "a", "with_pieces": True}, "with_pieces"),
        ({"prompt": "word " * 100_000}, "prompt"),
    ):
        assert refused(http, "/tokenize", **fields)["param"] == param
    for tokens in ([-1], [10**6], [10**30], None):
        assert refused(http, "/detokenize", tokens=tokens)["param"].startswith("tokens")


def test_metrics(http: Client) -> None:
    text = http.get("/metrics").text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
        "prompt_tokens_total", "generation_tokens_total", "request_success_total", "prefix_cache_queries_total",
        "prefix_cache_hits_total", "time_to_first_token_seconds_count", "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count", "request_queue_time_seconds_count", "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count", "request_inference_time_seconds_count", "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket", "request_max_num_generation_tokens_bucket", "cache_config_info",
        "iteration_tokens_total_bucket", "iteration_tokens_total_sum",
    ):  # fmt: skip
        assert f"\nasyncengine:{name}{{" in text, name
    assert '\nasyncengine:num_requests_running{model_name="first"} 0.0' in text


def test_turns_of_a_conversation_share_their_beginning(api: openai.OpenAI) -> None:
    """cached_tokens of the second turn covers the first turn's prompt, in whole blocks of 16 tokens."""
    messages: list[Any] = [
        {"role": "user", "content": "Tell me a story about a small grey mouse and an old brown bear. "}
    ]
    options: dict[str, Any] = {"model": "first", "temperature": 0, "max_tokens": 20}
    first = api.chat.completions.create(messages=messages, **options)
    assert first.usage is not None
    messages += [
        first.choices[0].message.model_dump(include={"role", "content"}),
        {"role": "user", "content": "Go on."},
    ]
    second = api.chat.completions.create(messages=messages, **options)
    stream = api.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **options
    )
    streamed = [chunk.usage for chunk in stream][-1]
    for usage, shared in ((second.usage, first.usage.prompt_tokens), (streamed, second.usage.prompt_tokens)):  # type: ignore[union-attr]
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached is not None
        assert (shared - 1) // 16 * 16 <= cached < usage.prompt_tokens


def test_embeddings(http: Client, api: openai.OpenAI) -> None:
    texts = ["the cat", "a dog ran"]
    plain = post(http, "/v1/embeddings", input=texts, encoding_format="float", user="me")
    assert (plain["object"], plain["model"]) == ("list", "first")
    assert [(d["index"], d["object"]) for d in plain["data"]] == [(0, "embedding"), (1, "embedding")]
    vectors = [d["embedding"] for d in plain["data"]]
    assert math.isclose(sum(x * x for x in vectors[0]), 1, rel_tol=1e-4)
    counts = [post(http, "/tokenize", prompt=text)["count"] for text in texts]
    assert plain["usage"]["prompt_tokens"] == plain["usage"]["total_tokens"] == sum(counts)
    coded = post(http, "/v1/embeddings", input=texts, encoding_format="base64")["data"]
    for code, vector in zip(coded, vectors, strict=True):
        raw = base64.b64decode(code["embedding"])
        assert list(struct.unpack(f"<{len(vector)}f", raw)) == pytest.approx(vector, abs=1e-6)
    ids = [post(http, "/tokenize", prompt=text)["tokens"] for text in texts]
    for given in (ids, [ids[0]], ids[0], texts[0], [texts[0], ids[1]], [ids[0], texts[1]]):
        data = post(http, "/v1/embeddings", input=given)["data"]
        assert data[0]["embedding"] == pytest.approx(vectors[0], abs=1e-5)
        assert len(data) == (2 if len(given) == 2 and given is not ids[0] else 1)
    through = api.embeddings.create(model="second", input=texts, dimensions=8)  # which asks for base64
    assert [len(d.embedding) for d in through.data] == [8, 8]
    assert post(http, "/v1/embeddings", input="a", normalize=False, pooling="mean")["data"]
    for fields, param in (
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 3]}, "input"),
        ({"input": [[10**7]]}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 10**6}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "best"}, "pooling"),
        ({"input": "a", "priority": 1}, "priority"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 4, "truncation_side": "middle"}, "truncation_side"),
        ({"input": ["a"] * 1025}, "input"),
        ({"input": "word " * 1000}, "input"),
    ):
        assert refused(http, "/v1/embeddings", **fields)["param"] == param
    assert refused(http, "/v1/embeddings", 404, input="a", model="third")["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score(http: Client, path: str) -> None:
    answer = post(http, path, text_1="the cat", text_2=["the cat", "a dog ran"])
    assert answer["object"] == "list"
    assert [d["index"] for d in answer["data"]] == [0, 1]
    scores = [d["score"] for d in answer["data"]]
    assert scores[0] == pytest.approx(1, abs=1e-4)
    assert scores[1] < scores[0]
    other = post(http, path, queries=["the cat"] * 2, documents=["the cat", "a dog ran"])
    assert [d["score"] for d in other["data"]] == pytest.approx(scores, abs=1e-5)
    for fields, param in (
        ({"text_1": "a"}, "text_2"),
        ({"text_2": "a"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"text_1": "a", "text_2": "b", "queries": "c"}, "queries"),
        ({"queries": "c"}, "documents"),
        ({"text_1": [1], "text_2": "b"}, "text_1[0]"),
    ):
        assert refused(http, path, **fields)["param"] == param


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(http: Client, path: str) -> None:
    documents = ["a dog ran", "the cat", {"text": "it was night"}]
    answer = post(http, path, query="the cat", documents=documents)
    scores = [r["relevance_score"] for r in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert answer["results"][0]["index"] == 1
    assert {r["index"]: r["document"]["text"] for r in answer["results"]} == {
        0: "a dog ran",
        1: "the cat",
        2: "it was night",
    }
    short = post(http, path, query="the cat", documents=documents, top_n=1, return_documents=False)
    assert [set(r) for r in short["results"]] == [{"index", "relevance_score"}]
    for fields, param in (
        ({"documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": ["b", ""]}, "documents[1]"),
        ({"query": "a", "documents": ["b"], "max_tokens_per_doc": 7}, "max_tokens_per_doc"),
    ):
        assert refused(http, path, **fields)["param"] == param


def test_rerank_as_text_embeddings_inference_has_it(http: Client) -> None:
    texts = ["a dog ran", "the cat", "it was night"]
    ours = post(http, "/rerank", query="the cat", documents=texts)["results"]
    theirs = post(http, "/rerank", query="the cat", texts=texts, return_text=True, raw_scores=False, truncate=True)
    assert [(r["index"], r["text"]) for r in theirs] == [(r["index"], r["document"]["text"]) for r in ours]
    assert [r["score"] for r in theirs] == pytest.approx([r["relevance_score"] for r in ours], abs=1e-5)
    assert [set(r) for r in post(http, "/rerank", query="the cat", texts=texts)] == [{"index", "score"}] * 3
    for fields, param in (({}, "texts[1]"), ({"documents": ["b"]}, "texts"), ({"raw_scores": True}, "raw_scores")):
        assert refused(http, "/rerank", query="a", texts=["b", ""], **fields)["param"] == param


def test_what_the_model_cannot_serve_is_refused_by_name(http: Client) -> None:
    error = refused(http, "/classify", input="a")
    assert error["param"] == "model"
    assert "no classification model" in error["message"]


def test_small_routes_and_slashes(http: Client) -> None:
    assert set(http.get("/version").json()) == {"version"}
    for path in ("/version", "/ping", "/health", "/v1/models", "/v1/models/first", "/metrics"):
        assert http.get(path + "/").status_code == http.get(path).status_code == 200
    assert post(http, COMPLETIONS + "/", prompt=PROMPT, **GREEDY)["choices"]
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()


def test_the_answer_carries_the_first_name(http: Client) -> None:
    for name in ("first", "second", None):
        assert post(http, COMPLETIONS, prompt=PROMPT, model=name, **GREEDY)["model"] == "first"


def test_extensions_that_are_not_served_are_named(http: Client) -> None:
    for name, value in (("typical_p", 0.5), ("mirostat", 2), ("dry_multiplier", 0.8), ("xtc_probability", 0.5)):
        error = refused(http, CHAT, messages=USER, **{name: value})
        assert error["param"] == name
        assert name in error["message"]
