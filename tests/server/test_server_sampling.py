"""Penalties, biases and bans over HTTP: the real client, the real server, the bundled model."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from asyncengine import AsyncEngine, SamplingParams, bundled_model
from tests.server.harness import serving

PROMPT = "Once upon a time"
EDITS: dict[str, Any] = {"presence_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {"30": 4.5, "17": -100}}
EXTENSIONS: dict[str, Any] = {
    "repetition_penalty": 1.3, "bad_words": ["clever"], "min_tokens": 20, "no_repeat_ngram_size": 3,
}  # fmt: skip


async def test_the_clients_parameters_are_the_engines() -> None:
    async with (
        AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine,
        serving(engine) as site,  # type: ignore[arg-type]
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as api,
    ):
        bias = {int(token): value for token, value in EDITS["logit_bias"].items()}
        common: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0}
        wanted = await engine.generate(PROMPT, SamplingParams(**common | EDITS | EXTENSIONS | {"logit_bias": bias}))
        plain = await engine.generate(PROMPT, SamplingParams(**common))
        asked = common | EDITS | {"model": (await api.models.list()).data[0].id, "extra_body": EXTENSIONS}
        answer = await api.completions.create(prompt=PROMPT, **asked)
        assert answer.choices[0].text == wanted.text != plain.text
        stream = await api.completions.create(prompt=PROMPT, stream=True, **asked)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == wanted.text
        only = {"allowed_token_ids": [40, 41]}
        answer = await api.completions.create(prompt=PROMPT, **asked | {"logit_bias": {}, "extra_body": only})
        assert set(answer.choices[0].text) <= set(engine.tokenizer.decode([40, 41]))
        for wrong in ({"x": 1}, {"-1": 1}, {"99999": 1, "88888": 2}, {"5": 101}):
            with pytest.raises(openai.BadRequestError) as refused:
                await api.completions.create(prompt=PROMPT, **asked | {"logit_bias": wrong})
            assert refused.value.param == "logit_bias"
            if "99999" in wrong:
                assert "99999, 88888" in refused.value.message
