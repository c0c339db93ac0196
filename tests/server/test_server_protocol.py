"""The shapes of responses and streams on which OpenAI clients rely."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncengine import DataParallelEngine
from asyncengine.testing import SimulatedEngine
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, COMPLETIONS, USER, Site, serving

NULLS = {"logprobs": None, "stop_reason": None}
PROMPT = {COMPLETIONS: {"prompt": "Hello"}, CHAT: {"messages": USER}}
ROUTES = pytest.mark.parametrize("route", [COMPLETIONS, CHAT])


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice or chunk of either route."""
    if "text" in choice:
        return choice["text"]
    return choice.get("message", choice.get("delta", {})).get("content", "")


def choices_of(events: list[Any]) -> dict[int, list[Any]]:
    """Chunks of each choice, in order; every chunk has at most one choice."""
    chunks: dict[int, list[Any]] = {}
    for event in events:
        assert len(event["choices"]) <= 1
        for choice in event["choices"]:
            chunks.setdefault(choice["index"], []).append(choice)
    return chunks


async def test_completion_shape() -> None:
    async with serving(FakeEngine("abc")) as site:
        reply = (await site.post(COMPLETIONS, model="fake", prompt="Hello", max_tokens=4)).json
    assert reply.pop("id").startswith("cmpl-")
    assert isinstance(reply.pop("created"), int)
    assert reply.pop("system_fingerprint").startswith("fp_")
    assert [reply.pop(name) for name in ("service_tier", "kv_transfer_params")] == [None, None]
    assert reply == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": "abca", "finish_reason": "length", **NULLS, "prompt_logprobs": None}],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 4,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


async def test_chat_shape() -> None:
    async with serving(FakeEngine("abc", ends=True)) as site:
        reply = (await site.post(CHAT, messages=USER)).json
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    nothing = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning_content", "reasoning"))
    message = {"role": "assistant", "content": "abc", **nothing}
    assert [reply[name] for name in ("prompt_logprobs", "service_tier", "kv_transfer_params")] == [None] * 3
    assert reply["choices"] == [{"index": 0, "message": message, "finish_reason": "stop", **NULLS}]
    assert reply["usage"]["completion_tokens"] == 4


@ROUTES
@pytest.mark.parametrize("ends", [False, True])
async def test_stream_equals_whole(route: str, ends: bool) -> None:
    async with serving(FakeEngine(ends=ends)) as site:
        whole = (await site.post(route, **PROMPT[route], max_tokens=60)).json
        events = await site.events(route, **PROMPT[route], max_tokens=60)
    (chunks,) = choices_of(events).values()
    assert "".join(map(text_of, chunks)) == text_of(whole["choices"][0])
    reasons = [c["finish_reason"] for c in chunks]
    assert reasons[-1] == whole["choices"][0]["finish_reason"] == ("stop" if ends else "length")
    assert set(reasons[:-1]) == {None}
    assert all(c["logprobs"] is None for c in chunks)
    assert not any("usage" in e for e in events)
    heads = {(e["id"], e["created"], e["model"], e["object"]) for e in events}
    ((id_, _, model, kind),) = heads
    assert model == "fake"
    assert (id_[:5], kind) in {("cmpl-", "text_completion"), ("chatc", "chat.completion.chunk")}


async def test_chat_stream_opens_with_the_role_and_ends_with_an_empty_delta() -> None:
    async with serving(FakeEngine()) as site:
        events = await site.events(CHAT, messages=USER, max_tokens=3, n=2)
    for chunks in choices_of(events).values():
        deltas = [c["delta"] for c in chunks]
        assert deltas[0]["role"] == "assistant"
        assert not any("role" in d for d in deltas[1:])
        assert deltas[-1] == {}
        assert all(d["content"] for d in deltas[1:-1])


@ROUTES
async def test_usage_chunk_comes_last(route: str) -> None:
    async with serving(FakeEngine()) as site:
        whole = (await site.post(route, **PROMPT[route], max_tokens=5)).json
        events = await site.events(route, **PROMPT[route], max_tokens=5, stream_options={"include_usage": True})
    *others, last = events
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(e["usage"] is None and e["choices"] for e in others)
    assert last["id"] == others[0]["id"]


@ROUTES
async def test_continuous_usage_counts_up(route: str) -> None:
    async with serving(FakeEngine()) as site:
        options = {"continuous_usage_stats": True, "include_usage": True}
        events = await site.events(route, **PROMPT[route], max_tokens=5, stream_options=options)
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert all(u["prompt_tokens"] + u["completion_tokens"] == u["total_tokens"] for u in (e["usage"] for e in events))
    cached = {e["usage"]["prompt_tokens_details"]["cached_tokens"] for e in events}
    assert cached == {events[-1]["usage"]["prompt_tokens"] // 2}


async def test_default_and_exact_max_tokens() -> None:
    async with serving(FakeEngine(max_model_len=100)) as site:
        for fields, expected in [
            ({}, 16),
            ({"max_tokens": None}, 16),
            ({"max_tokens": 3}, 3),
            ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
        ]:
            reply = (await site.post(COMPLETIONS, prompt="Hello", **fields)).json
            assert reply["usage"]["completion_tokens"] == expected
            assert reply["choices"][0]["finish_reason"] == "length"
        chat = (await site.post(CHAT, messages=USER)).json
        assert chat["usage"]["total_tokens"] == 100
    for default, expected in [(3, 3), (None, 100 - len("Hello"))]:
        async with serving(FakeEngine(max_model_len=100), default_max_tokens=default) as site:
            reply = (await site.post(COMPLETIONS, prompt="Hello")).json
            assert reply["usage"]["completion_tokens"] == expected
            reply = (await site.post(COMPLETIONS, prompt="Hello", max_tokens=2)).json
            assert reply["usage"]["completion_tokens"] == 2


async def test_default_max_tokens_of_chats() -> None:
    async with serving(FakeEngine(max_model_len=100)) as site:
        chat = (await site.post(CHAT, messages=USER, max_completion_tokens=7)).json
        assert chat["usage"]["completion_tokens"] == 7


async def test_unknown_fields_and_nulls_are_ignored() -> None:
    nulls = dict.fromkeys(
        ["model", "stream", "stream_options", "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
         "stop_token_ids", "ignore_eos", "logprobs", "logit_bias", "presence_penalty", "best_of", "priority"]
    )  # fmt: skip
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "echo": False,
               "logit_bias": {}, "best_of": 1, "suffix": "", "response_format": {"type": "text"},
               "min_tokens": 0, "bad_words": []}  # fmt: skip
    async with serving(FakeEngine()) as site:
        plain = (await site.post(COMPLETIONS, prompt="Hello", max_tokens=4)).json["choices"]
        for extra in (nulls, neutral, {"user": "me", "no_such_field": {"a": [1]}, "store": True}):
            reply = await site.post(COMPLETIONS, prompt="Hello", max_tokens=4, **extra)
            assert reply.status == 200, reply.body
            assert reply.json["choices"] == plain


async def test_sampling_fields_reach_the_engine() -> None:
    engine = FakeEngine()
    fields: dict[str, Any] = {
        "max_tokens": 3, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": 11,
        "stop": ["x", "yz"], "stop_token_ids": [5], "ignore_eos": True, "skip_special_tokens": False,
        "include_stop_str_in_output": True, "n": 2,
    }  # fmt: skip
    async with serving(engine, allow_priority=True) as site:
        await site.post(COMPLETIONS, prompt="Hello", priority=3, cache_salt="tenant", **fields)
    ((_, params, priority, salt),) = engine.submitted
    assert {name: getattr(params, name) for name in fields} == fields | {
        "stop": ("x", "yz"),
        "stop_token_ids": (5,),
    }
    assert (priority, salt) == (3, "tenant")


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        ("abc", [3]),
        (["abc"], [3]),
        (["abc", "de"], [3, 2]),
        ([65, 66], [2]),
        ([[65, 66], [67]], [2, 1]),
    ],
)
@pytest.mark.parametrize("n", [1, 3])
async def test_prompt_forms_and_choice_indices(prompt: Any, lengths: list[int], n: int) -> None:
    async with serving(FakeEngine("abcdefgh")) as site:
        whole = (await site.post(COMPLETIONS, prompt=prompt, n=n, max_tokens=4)).json
        events = await site.events(
            COMPLETIONS, prompt=prompt, n=n, max_tokens=4, stream_options={"include_usage": True}
        )
    assert [c["index"] for c in whole["choices"]] == list(range(len(lengths) * n))
    for p, i in itertools.product(range(len(lengths)), range(n)):
        assert whole["choices"][p * n + i]["text"] == "abcdefgh"[i : i + 4]
    assert whole["usage"]["prompt_tokens"] == sum(lengths)
    assert whole["usage"]["completion_tokens"] == len(lengths) * n * 4
    chunks = choices_of(events)
    assert {i: "".join(map(text_of, c)) for i, c in chunks.items()} == {c["index"]: c["text"] for c in whole["choices"]}
    assert all([c["finish_reason"] for c in cs] == [None] * 3 + ["length"] for cs in chunks.values())
    assert events[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_are_submitted_in_turns_of_their_own(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are submitted in turns, so that tokenizing thousands does not hold up everybody else."""
    engine, turns = FakeEngine(), [0]
    at: list[int] = []

    async def count() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    submit = engine.submit

    async def noted(*args: Any, **kwargs: Any) -> Any:
        at.append(turns[0])
        return await submit(*args, **kwargs)

    monkeypatch.setattr(engine, "submit", noted)
    counting = asyncio.create_task(count())
    async with serving(engine) as site:
        reply = await site.post(COMPLETIONS, prompt=["a"] * 20, max_tokens=1, stream=stream)
        assert reply.status == 200
    counting.cancel()
    assert len(at) == len(set(at)) == 20


async def test_content_parts_equal_the_joined_string() -> None:
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "a story"}]
    async with serving(FakeEngine()) as site:
        joined = (await site.post(CHAT, messages=USER, max_tokens=4)).json
        split = (await site.post(CHAT, messages=[{"role": "user", "content": parts}], max_tokens=4)).json
    assert split["choices"] == joined["choices"]
    assert split["usage"] == joined["usage"]


async def test_models() -> None:
    async with serving(FakeEngine(), served_model_name="org/name") as site:
        listing = (await site.get("/v1/models")).json
        (card,) = listing["data"]
        assert listing["object"] == "list"
        assert (card["id"], card["object"], card["max_model_len"]) == ("org/name", "model", 256)
        assert (card["root"], card["parent"]) == ("fake", None)
        (permission,) = card["permission"]
        assert (permission["object"], permission["allow_sampling"]) == ("model_permission", True)
        assert isinstance(card["created"], int)
        assert card["owned_by"]
        assert (await site.get("/v1/models/org/name")).json == card
        assert (await site.get("/v1/models/org%2Fname")).json == card
        missing = await site.get("/v1/models/other")
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")
        assert (await site.post(COMPLETIONS, model="org/name", prompt="x")).json["model"] == "org/name"


async def test_health_follows_the_engine() -> None:
    async with serving(None) as site:
        for route in ("/health", "/v1/models"):
            loading = await site.get(route)
            assert (loading.status, loading.error["code"]) == (503, "loading")
        early = await site.post(COMPLETIONS, prompt="x")
        assert (early.status, early.error["code"]) == (503, "loading")
        assert "Retry-After" in early.headers
        assert (await site.get("/metrics")).status == 200
        engine = FakeEngine()
        site.server.app.engine = engine  # type: ignore[assignment]
        assert (await site.get("/health")).status == 200
        assert (await site.request("HEAD", "/health")).status == 200
        for health in ("draining", "closed", "dead"):
            engine.health = health
            reply = await site.get("/health")
            assert (reply.status, reply.error["code"]) == (503, health)


async def check_gauges(site: Site, **expected: float) -> None:
    for name, value in expected.items():
        assert await site.metric(f"asyncengine:{name}") == {'{model_name="fake"}': value}


async def test_metrics_count_requests_and_tokens() -> None:
    engine = FakeEngine()
    async with serving(engine) as site:
        await site.post(COMPLETIONS, prompt="Hello", max_tokens=4)
        await site.events(COMPLETIONS, prompt="Hello", max_tokens=6)
        await check_gauges(
            site,
            num_requests_running=0,
            num_requests_waiting=0,
            kv_cache_usage_perc=0,
            num_preemptions_total=0,
            prompt_tokens_total=10,
            generation_tokens_total=10,
            prefix_cache_queries_total=10,
            prefix_cache_hits_total=0,
            time_to_first_token_seconds_count=2,
            e2e_request_latency_seconds_count=2,
            request_queue_time_seconds_count=2,
            request_prefill_time_seconds_count=2,
            request_decode_time_seconds_count=2,
            request_inference_time_seconds_count=2,
            request_prompt_tokens_count=2,
            request_prompt_tokens_sum=10,
            request_generation_tokens_sum=10,
            request_max_num_generation_tokens_sum=10,
            iteration_tokens_total_count=3,
            iteration_tokens_total_sum=6,
        )
        assert await site.metric("asyncengine:cache_config_info") == {
            '{block_size="16",bytes_per_sequence="65536",model_name="fake",num_gpu_blocks="64"}': 1
        }
        for name, count in (("inter_token_latency", 5), ("request_time_per_output_token", 2)):
            assert await site.metric(f"asyncengine:{name}_seconds_count") == {
                '{decoded_on="device",model_name="fake"}': count,
                '{decoded_on="host",model_name="fake"}': 0,
            }
        engine.hold(at=2)
        async with site.session.post(site.url + COMPLETIONS, json={"prompt": "x", "stream": True}):
            await engine.wait_for(open=1)
            await check_gauges(site, num_requests_running=1)
        await engine.wait_for(open=0)
        await check_gauges(site, num_requests_running=0)
        success = await site.metric("asyncengine:request_success_total")
        assert success['{finished_reason="length",model_name="fake"}'] == 2
        assert success['{finished_reason="abort",model_name="fake"}'] == 1


async def test_metrics_in_the_form_of_vllm() -> None:
    async with serving(FakeEngine(), metrics_prefix="vllm") as site:
        await site.events(COMPLETIONS, prompt="Hello", max_tokens=6)
        labels = '{engine="0",model_name="fake"}'
        for name, value in {
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0,
            "num_preemptions_total": 0,
            "prefix_cache_queries_total": 5,
            "prefix_cache_hits_total": 0,
            "prompt_tokens_total": 5,
            "generation_tokens_total": 6,
            "request_prompt_tokens_sum": 5,
            "request_generation_tokens_sum": 6,
            "time_to_first_token_seconds_count": 1,
            "inter_token_latency_seconds_count": 5,
            "e2e_request_latency_seconds_count": 1,
        }.items():
            assert await site.metric(f"vllm:{name}") == {labels: value}, name
        config = await site.metric("vllm:cache_config_info")
        assert config == {'{block_size="16",engine="0",model_name="fake",num_gpu_blocks="64"}': 1}
        # Buckets that vLLM's dashboards draw, from the first to the last.
        for name, first, last in (
            ("inter_token_latency_seconds", "0.01", "80.0"),
            ("time_to_first_token_seconds", "0.001", "2560.0"),
            ("e2e_request_latency_seconds", "0.3", "7680.0"),
            ("request_prompt_tokens", "1.0", "200.0"),
        ):
            buckets = [key.split('le="')[1].split('"')[0] for key in await site.metric(f"vllm:{name}_bucket")]
            assert (buckets[0], *buckets[-2:]) == (first, last, "+Inf")
        # A metric that vLLM has not keeps the engine's own prefix.
        assert not await site.metric("vllm:queued_tokens")
        assert await site.metric("asyncengine:queued_tokens") == {labels: 0}


@pytest.mark.parametrize("prefix", ["asyncengine", "vllm"])
async def test_metrics_of_several_engines_have_a_row_for_each(prefix: str) -> None:
    whole = {"request_body_bytes"} | ({"cache_config_info"} if prefix == "asyncengine" else set())  # the server's
    engines = [SimulatedEngine(max_num_seqs=1, step_driver="loop") for _ in range(3)]
    async with DataParallelEngine(engines) as front, serving(front, metrics_prefix=prefix) as site:  # type: ignore[arg-type]
        fields = {"prompt": [300] * 5, "max_tokens": 3, "ignore_eos": True, "temperature": 0}
        jobs = [site.post(COMPLETIONS, **fields) for _ in range(6)] + [
            site.events(COMPLETIONS, **fields) for _ in range(6)
        ]
        await asyncio.gather(*jobs)
        families = list(text_string_to_metric_families(await (await site.session.get(site.url + "/metrics")).text()))
        numbers = {
            family.name.partition(":")[2]: {sample.labels.get("engine") for sample in family.samples}
            for family in families
            if family.name.startswith(("asyncengine:", "vllm:"))
        }
        assert {name for name, found in numbers.items() if found != {"0", "1", "2"}} == whole

        def by_engine(name: str) -> list[float]:
            rows = [s for family in families for s in family.samples if s.name == f"{prefix}:{name}"]
            return [sum(row.value for row in rows if row.labels["engine"] == str(rank)) for rank in range(3)]

        served = by_engine("e2e_request_latency_seconds_count")
        assert sum(served) == 12
        assert all(served)
        for name, times in {
            "generation_tokens_total": 3,
            "request_success_total": 1,
            "request_generation_tokens_sum": 3,
            "request_prompt_tokens_sum": 5,
            "time_to_first_token_seconds_count": 1,
            "request_time_per_output_token_seconds_count": 1,
        }.items():
            assert by_engine(name) == [times * count for count in served], name


async def test_load() -> None:
    engine = FakeEngine()
    async with serving(None) as site:
        assert (await site.get("/load")).status == 503
        site.server.app.engine = engine  # type: ignore[assignment]
        rest: dict[str, Any] = {"num_requests_waiting": 0, "queued_tokens": 0}
        load = rest | {"server_load": 0, "num_requests_running": 0, "kv_cache_usage": 0}
        assert (await site.get("/load")).json == load
        engine.hold(at=2)
        async with site.session.post(site.url + COMPLETIONS, json={"prompt": "x", "stream": True}):
            await engine.wait_for(open=1)
            load = rest | {"server_load": 1, "num_requests_running": 1, "kv_cache_usage": 1 / 64}
            assert (await site.get("/load")).json == load
        site.server.app.draining = True
        assert (await site.get("/load")).error["code"] == "draining"


@pytest.mark.parametrize("n", [1, 2])
async def test_token_ids_are_returned_on_request(n: int) -> None:
    fields: dict[str, Any] = {"prompt": [[1, 2, 3], [4, 5]], "n": n, "max_tokens": 5, "return_token_ids": True}
    async with serving(FakeEngine("abc")) as site:
        plain = (await site.post(COMPLETIONS, **fields | {"return_token_ids": False})).json
        whole = (await site.post(COMPLETIONS, **fields)).json
        events = await site.events(COMPLETIONS, **fields)
        chat = (await site.post(CHAT, messages=USER, n=n, max_tokens=5, return_token_ids=True)).json
        chunks = await site.events(CHAT, messages=USER, n=n, max_tokens=5, return_token_ids=True)
    plainly = {"index", "text", "finish_reason", *NULLS, "prompt_logprobs"}
    assert all(choice.keys() == plainly for choice in plain["choices"])
    for choice in chat["choices"]:
        assert choice["token_ids"] == [ord(c) for c in choice["message"]["content"]]
        streamed = [t for c in choices_of(chunks)[choice["index"]] for t in c.get("token_ids", [])]
        assert streamed == choice["token_ids"]
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert [e["prompt_token_ids"] for e in chunks if "prompt_token_ids" in e] == [chat["prompt_token_ids"]]
    for choice in whole["choices"]:
        assert choice["token_ids"] == [ord(c) for c in choice["text"]]
        assert choice["prompt_token_ids"] == fields["prompt"][choice["index"] // n]
    for index, chunks in choices_of(events).items():
        assert [t for c in chunks for t in c["token_ids"]] == whole["choices"][index]["token_ids"]
        assert chunks[0]["prompt_token_ids"] == whole["choices"][index]["prompt_token_ids"]
        assert not any("prompt_token_ids" in c for c in chunks[1:])
        assert "".join(map(text_of, chunks)) == whole["choices"][index]["text"]
    assert len(choices_of(events)) == 2 * n
