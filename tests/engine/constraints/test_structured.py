"""Structured output: texts of real grammars from the bundled model, whatever else runs and however steps overlap."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
import torch
import transformers

from asyncengine import AsyncEngine, InvalidRequestError, SamplingParams, bundled_model, testing
from asyncengine.engine.constraints import masks
from asyncengine.engine.constraints.masks import Constraint
from asyncengine.engine.constraints.reasoning import Reasoning, reasoning_at
from asyncengine.text.tokenizer import Tokenizer
from tests.amounts import sample_of

PROMPT = "Once upon a time"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["little cat", "big dog"]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
}


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, "temperature": 1.0, "seed": 1} | given)


def engine_with(**config: Any) -> AsyncEngine:
    return AsyncEngine.from_pretrained(bundled_model(), progress=False, **config)


class RandomSchema:
    """A schema, and nothing in it that a text of bounded length cannot satisfy."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.schema = self._any(3)

    def _any(self, depth: int) -> dict[str, Any]:
        kinds = [self._string, self._integer, self._number, self._enum, self._const, self._flag]
        if depth:
            kinds += [self._object, self._object, self._array, self._any_of]
        made: dict[str, Any] = self._draw.choice(kinds)(depth)
        return made

    def _string(self, _: int) -> dict[str, Any]:
        form = self._draw.choice(["plain", "pattern", "date", "ipv4"])
        if form == "plain":
            least = self._draw.randrange(4)
            return {"type": "string", "minLength": least, "maxLength": least + self._draw.randrange(6)}
        if form == "pattern":
            return {"type": "string", "pattern": self._draw.choice(["^[a-c]{2,4}$", "^x[0-9]+y?$", "^(ab|cd){1,3}$"])}
        return {"type": "string", "format": form}

    def _integer(self, _: int) -> dict[str, Any]:
        low = self._draw.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + self._draw.randrange(200)}

    def _number(self, _: int) -> dict[str, Any]:
        return {"type": "number", "minimum": 0, "exclusiveMaximum": self._draw.choice([1, 10, 12.5])}

    def _enum(self, _: int) -> dict[str, Any]:
        return {"enum": self._draw.sample(["red", "blue", 1, 2.5, None, True, ["a", 1], {"b": None}], 3)}

    def _const(self, _: int) -> dict[str, Any]:
        return {"const": self._draw.choice(["fixed text", 42, None, {"nested": [1, 2]}])}

    def _flag(self, _: int) -> dict[str, Any]:
        return {"type": self._draw.choice(["boolean", "null", ["boolean", "null"]])}

    def _array(self, depth: int) -> dict[str, Any]:
        least = self._draw.randrange(3)
        most = least + self._draw.randrange(1, 3)
        return {"type": "array", "items": self._any(depth - 1), "minItems": least, "maxItems": most}

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth - 1) for _ in range(2)]}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._draw.sample(["id", "name", "size of it", "ünï", 'qu"ote', "tags"], self._draw.randrange(1, 4))
        required = [name for name in names if self._draw.random() < 0.7]
        properties = {name: self._any(depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


async def test_many_random_schemas() -> None:
    schemas = [RandomSchema(seed).schema for seed in range(sample_of(1000, 200))]
    async with engine_with(max_num_seqs=64) as engine:
        outputs = await asyncio.gather(
            *(
                engine.generate(PROMPT, params(seed=i, max_tokens=250, structured_outputs={"json": schema}))
                for i, schema in enumerate(schemas)
            )
        )
        await testing.settle(engine)  # a request may be over a step before the engine lets go of it
    whole, formats = 0, jsonschema.FormatChecker(["ipv4", "date"])
    for schema, output in zip(schemas, outputs, strict=True):
        if output.finish_reason == "stop":
            whole += 1
            jsonschema.validate(json.loads(output.text), schema, format_checker=formats)
    assert whole > 0.95 * len(schemas)  # the others ran into max_tokens: digits of numbers have no end


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "regex",
    [
        r"[0-9]{3}-[0-9]{4}",
        r"(ab|cd)+e?",
        r"[^a-z\s]{1,6}",
        r"\w{1,5}@\w{1,5}\.(com|org)",
        r"é{2}[α-ω]{1,3}",
        r"a{2,3}|b{4}",
    ],
)
@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_regular_expressions(regex: str, depth: int) -> None:
    async with engine_with(steps_in_flight=depth, num_kv_blocks=24) as engine:
        outputs = await asyncio.gather(
            *(engine.generate(PROMPT, params(seed=i, n=2, structured_outputs={"regex": regex})) for i in range(8))
        )
    texts = [s for output in outputs for s in output.outputs]
    assert all(re.fullmatch(regex, s.text) for s in texts if s.finish_reason == "stop")
    assert sum(s.finish_reason == "stop" for s in texts) >= 8


def constrained_greedy(prompt: str, schema: dict[str, Any], count: int) -> list[int]:
    """The plain reference: transformers' forward and the library's mask, one token after the other."""
    model = transformers.AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_pretrained(str(bundled_model()))
    vocab = model.config.vocab_size
    library = llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=vocab, eos_token=[tokenizer.eos_token_id])
    form = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    matcher = llguidance.LLMatcher(library, llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=form))
    ids = tokenizer.encode(prompt)
    out: list[int] = []
    while len(out) < count:
        with torch.inference_mode():
            logits = model(torch.tensor([ids + out])).logits[0, -1]
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)
        allowed = torch.from_numpy(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab].astype(bool))
        out.append(int(logits.masked_fill(~allowed, -torch.inf).argmax()))
        if out[-1] == tokenizer.eos_token_id:
            break
        assert matcher.consume_token(out[-1])
    return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("chunk", "blocks"), [(1, 64), (5, 64), (64, 9)])
async def test_tokens_are_those_of_a_plain_loop(depth: int, chunk: int, blocks: int) -> None:
    """With log probabilities every token is sampled. Neighbours with and without grammars, prefix hits, preemption."""
    prompts = [PROMPT, PROMPT + " there was a fox", "The sun"]
    wanted = {prompt: constrained_greedy(prompt, SCHEMA, 60) for prompt in prompts}
    settings = {"steps_in_flight": depth, "prefill_chunk_size": chunk, "num_kv_blocks": blocks, "max_model_len": 128}
    async with engine_with(**settings) as engine:
        asked = params(temperature=0.0, max_tokens=60, logprobs=1, structured_outputs={"json": SCHEMA})
        plain = params(temperature=0.0, max_tokens=60, ignore_eos=True)
        alone = [await engine.generate(prompt, plain) for prompt in prompts]
        both = await asyncio.gather(
            *(engine.generate(prompt, given) for _ in range(2) for prompt in prompts for given in (asked, plain))
        )
        assert (engine.stats().num_preemptions > 0) == (blocks == 9)
    for i, output in enumerate(both):
        prompt = prompts[i // 2 % 3]
        if i % 2:
            assert output.token_ids == alone[i // 2 % 3].token_ids
        else:
            assert list(output.token_ids) == wanted[prompt]
            assert output.outputs[0].logprobs is not None
            assert [data.token_id for data in output.outputs[0].logprobs] == wanted[prompt]


async def test_forced_tokens_are_not_sampled_one_by_one() -> None:
    fixed = {"const": "the same long text for everybody, whoever asks for it, today and tomorrow"}
    async with engine_with() as engine:
        before = engine.stats().num_steps
        output = await engine.generate(PROMPT, params(structured_outputs={"json": fixed}))
        steps = engine.stats().num_steps - before
    assert json.loads(output.text) == fixed["const"]
    assert len(output.token_ids) > 15
    assert steps < len(output.token_ids) / 2
    assert output.usage.completion_tokens == len(output.token_ids)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("feature", "changes_it"),
    [
        ({"frequency_penalty": 2.0}, True),
        ({"presence_penalty": 1.0}, False),
        ({"repetition_penalty": 1.9}, True),
        ({"no_repeat_ngram_size": 2}, True),
        ({"bad_words": [" dragon castle"]}, False),
        ({"logprobs": 0}, False),
    ],
)
async def test_what_looks_back_sees_the_tokens_that_a_grammar_forces(feature: dict[str, Any], changes_it: bool) -> None:
    """Tokens behind a fixed text equal those of a sequence whose every token was sampled, as for log probabilities."""
    fixed = (
        "There was a little cat named Tom. He lived in a big house with his mom and dad. One day he went to the park "
        "to play with a red ball. She saw many trees, birds and some pretty flowers near it."
    )
    free = {"type": "string", "minLength": 60, "maxLength": 80}
    schema = {"type": "array", "prefixItems": [{"const": fixed}, free], "minItems": 2, "items": False}
    asked = {"max_tokens": 160, "temperature": 0.0, "structured_outputs": {"json": schema}}
    async with engine_with() as engine:
        steps = [engine.stats().num_steps]
        outputs = []
        for given in ({}, feature, feature | {"logprobs": 0}):
            outputs.append(await engine.generate(PROMPT, params(**asked, **given)))
            steps.append(engine.stats().num_steps)
    plain, found, sampled = outputs
    assert steps[1] - steps[0] < len(plain.token_ids)  # without the feature the fixed text is forced
    assert steps[2] - steps[1] >= len(found.token_ids)
    assert found.token_ids == sampled.token_ids
    assert json.loads(found.text)[0] == fixed
    assert (found.token_ids != plain.token_ids) == changes_it
    if "no_repeat_ngram_size" in feature:
        pairs = list(zip(found.token_ids, found.token_ids[1:], strict=False))
        assert len(set(pairs)) == len(pairs)


async def test_penalties_and_log_probabilities_go_with_a_grammar() -> None:
    async with engine_with() as engine:
        given = params(frequency_penalty=1.0, repetition_penalty=1.2, logprobs=2, structured_outputs={"json": SCHEMA})
        output = await engine.generate(PROMPT, given)
        chosen = await engine.generate(PROMPT, params(logprobs=0, structured_outputs={"choice": ["yes", "no"]}))
    jsonschema.validate(json.loads(output.text), SCHEMA)
    assert output.outputs[0].logprobs is not None
    assert [data.token_id for data in output.outputs[0].logprobs] == list(output.token_ids)
    assert chosen.text in ("yes", "no")


async def test_a_slow_mask_delays_its_own_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Constraint.work

    def slow(self: Constraint, tokens: Sequence[int]) -> None:
        if self is planted[0]:
            time.sleep(0.05)
        work(self, tokens)

    planted: list[Constraint] = []
    monkeypatch.setattr(Constraint, "work", slow)
    async with engine_with() as engine:
        regex = {"regex": "[a-z ]{500}"}
        stream = await engine.submit(PROMPT, params(logprobs=0, max_tokens=400, structured_outputs=regex))
        planted += stream._constraints
        others = [
            engine.generate(PROMPT, params(seed=i, max_tokens=100, ignore_eos=i % 2 == 0, **grammar))
            for i, grammar in enumerate([{}, {"structured_outputs": {"json": SCHEMA}}] * 4)
        ]
        outputs = await asyncio.gather(*others)
        delta = await anext(stream)
        await stream.aclose()
    assert all(len(outputs[i].token_ids) == 100 for i in range(0, 8, 2))
    assert 1 <= len(delta.token_ids) < 100


async def test_a_grammar_that_fails_on_the_way_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Constraint.work

    def failing(self: Constraint, tokens: Sequence[int]) -> None:
        if self._position > 15:
            raise masks._failed(self._matcher)
        work(self, tokens)

    async with engine_with() as engine:
        other = asyncio.create_task(engine.generate(PROMPT, params(max_tokens=60, ignore_eos=True)))
        with monkeypatch.context() as patched:
            patched.setattr(Constraint, "work", failing)
            with pytest.raises(InvalidRequestError, match="the grammar failed"):
                await engine.generate(PROMPT, params(structured_outputs={"regex": "[a-z]{400}"}))
        assert len((await other).token_ids) == 60
        assert (await engine.generate(PROMPT, params(structured_outputs={"choice": ["ok"]}))).text == "ok"
        assert engine.stats().num_requests_running == 0


async def test_aborts_and_closing_under_way() -> None:
    engine = engine_with()
    await engine.start()
    grammar = {"structured_outputs": {"regex": "[a-z ]{900}"}}
    tasks = [asyncio.create_task(engine.generate(PROMPT, params(seed=i, max_tokens=400, **grammar))) for i in range(6)]
    await asyncio.sleep(0.05)
    tasks[0].cancel()
    await asyncio.sleep(0.02)
    await engine.aclose(drain=False)
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, BaseException) for outcome in done)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"regex": "a" * 2**20 + "b"}, "1048576"),
        ({"json": {"type": "array", "items": {"$ref": "#/$defs/no"}}}, "no"),
        ({"json": "not json"}, "no schema"),
        ({"json": {"a": {1, 2}}}, "no schema"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"choice": []}, "non-empty"),
        ({"choice": ["a", 3]}, "non-empty"),
        ({"regex": 3}, "string"),
        ({"schema": {}}, "unknown field"),
        ({}, "got none"),
        (7, "mapping"),
    ],
)
async def test_wrong_structures_are_refused(asked: Any, says: str) -> None:
    async with engine_with() as engine:
        with pytest.raises(InvalidRequestError, match=says) as refused:
            await engine.generate(PROMPT, params(structured_outputs=asked))
    assert refused.value.param == "structured_outputs"


async def test_explosive_grammars_end_in_time() -> None:
    """Each is refused, or is compiled and gives a text that goes on. Others have their structured output meanwhile."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    explosive: list[dict[str, Any]] = [
        {"regex": "(a{1,1000}){1,1000}(b{1,1000}){1,1000}"},
        {"regex": "((a|aa|aaa)*(b|bb)*){900}"},
        {"regex": ".*.*.*.*.*.*x.{999}"},
        {"json": {"type": "array", "minItems": 10**9, "items": {"type": "string", "minLength": 10**9}}},
        {"json": deep},
        {"json": {"enum": [f"value {i} " * 9 for i in range(9000)]}},
        {"grammar": 'start: start start start | start start | "a"\n'},
        {"grammar": "start: s\ns: s s | X | Y\nX: /[a-z ]{1,9}/\nY: /[a-z]{1,7}/\n"},
        {"regex": "[a-z ]*[aeiou][a-z ]{3000}"},
        {"regex": "(.|\n)*a(.|\n){400}"},
        {"json": {"type": "integer", "multipleOf": 99999989}},
        {"json": {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}},
    ]

    async def neighbours(engine: AsyncEngine) -> list[str]:
        asked = [params(seed=i, structured_outputs={"json": SCHEMA | {"title": f"{i}"}}) for i in range(6)]
        return [(await engine.generate(PROMPT, each, tenant="neighbour")).text for each in asked]

    async with engine_with() as engine:
        other = asyncio.create_task(neighbours(engine))
        outcomes = await asyncio.gather(
            *(
                engine.generate(PROMPT, params(max_tokens=60, n=2, structured_outputs=e), tenant="explosive")
                for e in explosive
            ),
            return_exceptions=True,
        )
        for text in await other:
            jsonschema.validate(json.loads(text), SCHEMA)
    assert all(not isinstance(o, BaseException) or isinstance(o, InvalidRequestError) for o in outcomes), outcomes
    refused = [isinstance(o, InvalidRequestError) for o in outcomes]
    assert refused[-2:] == [True, True]


class ThinkingTokenizer:
    """The bundled tokenizer, in which two words are the markers."""

    class Backend:
        @staticmethod
        def token_to_id(name: str) -> int | None:
            return {"<think>": 300, "</think>": 301}.get(name)

    backend = Backend()
    num_rows = 400

    @staticmethod
    def template_has(marker: str) -> bool:
        return marker == "</think>"

    @staticmethod
    def decode(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join({300: "<think>", 301: "</think>"}.get(i, chr(96 + i)) for i in ids)


@pytest.mark.parametrize(
    ("prompt", "is_chat", "under_way", "may_begin"),
    [
        ([1, 2], False, False, False),
        ([1, 2], True, False, True),
        ([1, 300], True, True, False),
        ([1, 300], False, True, False),
        ([300, 5, 301], True, False, False),
        ([300, 5, 301, 9], True, False, True),  # of an earlier turn
        ([300, 9], True, False, True),  # a message speaks of it
    ],
)
def test_where_reasoning_begins(prompt: list[int], is_chat: bool, under_way: bool, may_begin: bool) -> None:
    tokenizer: Any = ThinkingTokenizer()
    found = reasoning_at(tokenizer, prompt, is_chat=is_chat)
    assert (found.begin, found.end, found.under_way, found.may_begin) == (300, 301, under_way, may_begin)
    plain: Any = Tokenizer.from_pretrained(str(bundled_model()))
    assert reasoning_at(plain, prompt, is_chat=is_chat) == Reasoning()
    tokenizer.num_rows = 301  # a marker has no row
    assert reasoning_at(tokenizer, prompt, is_chat=is_chat) == Reasoning()


@pytest.mark.parametrize("starts_inside", [False, True])
async def test_a_grammar_begins_after_the_reasoning(monkeypatch: pytest.MonkeyPatch, starts_inside: bool) -> None:
    """The first tokens that the model gives are free, until the token that is taken for the marker."""
    from asyncengine.engine.constraints import requests

    async with engine_with() as engine:
        plain = await engine.generate(PROMPT, params(temperature=0.0, max_tokens=12, ignore_eos=True))
        begin, end = plain.token_ids[0], plain.token_ids[7]
        assert end not in plain.token_ids[:7]
        marked = Reasoning(begin, end, under_way=starts_inside, may_begin=not starts_inside)
        monkeypatch.setattr(requests, "reasoning_at", lambda *_, **__: marked)
        asked = params(temperature=0.0, structured_outputs={"choice": ["blue 7"]})
        output = await engine.generate(PROMPT, asked)
    assert output.token_ids[:8] == plain.token_ids[:8]
    assert output.text.endswith("blue 7")
    assert engine_text(output.token_ids[8:]) == "blue 7"


def engine_text(tokens: Sequence[int]) -> str:
    return Tokenizer.from_pretrained(str(bundled_model())).decode(tokens)
