"""Instructor: typed answers."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Server

instructor = pytest.importorskip("instructor")
openai = pytest.importorskip("openai")

from shapes import Animal  # noqa: E402  # needs pydantic


def ask(server: Server, mode: str, **more: Any) -> Any:
    client = instructor.from_openai(
        openai.OpenAI(base_url=server.v1, api_key=server.key), mode=getattr(instructor.Mode, mode)
    )
    return client.chat.completions.create(
        model=server.model,
        response_model=Animal,
        messages=[{"role": "user", "content": "Invent an animal."}],
        temperature=0,
        max_tokens=100,
        max_retries=0,
        **more,
    )


def test_typed_answers(roomy: Server) -> None:
    assert isinstance(ask(roomy, "JSON_SCHEMA"), Animal)


def test_a_schema_in_the_prompt(roomy: Server) -> None:
    """The client asks for some JSON object. It has to be forced, as the bundled model does not follow instructions."""
    extra = {"guided_json": Animal.model_json_schema(), "response_format": None}
    assert isinstance(ask(roomy, "JSON", extra_body=extra), Animal)


def test_typed_answers_as_tool_calls(roomy: Server) -> None:
    assert isinstance(ask(roomy, "TOOLS"), Animal)
