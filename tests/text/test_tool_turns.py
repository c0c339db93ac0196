"""Conversations with tools, rendered by templates of many kinds: no tool, call or result is left out."""

from __future__ import annotations

from typing import Any

import pytest

from asyncengine import AsyncEngine, bundled_model
from asyncengine.api.conversation import Conversation
from asyncengine.api.request import SamplingParams
from asyncengine.errors import InvalidRequestError
from asyncengine.text import sandbox_program
from asyncengine.text.tokenizer import Tokenizer
from tests.models import tiny

HOW = (
    'To call one, answer with nothing but {"name": its name, "arguments": {its arguments}}, '
    "to call several with an array of these. Results come in the next message."
)
LISTED = (
    "You can call these functions:\n"
    '{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}'
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def call(i: int, city: str) -> dict[str, Any]:
    return {"id": f"call0000{i}", "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


def calls(*made: dict[str, Any], content: str | None = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [*made]}


def result(i: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{i}", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hot?"}
LOOP = [
    SYSTEM, USER, calls(call(1, "Rom")), result(1, "30"), calls(call(2, "Oslo"), call(3, "Bergen")),
    result(3, "wet"), result(2, "5"), {"role": "assistant", "content": "In Rom."}, {"role": "user", "content": "Now?"},
]  # fmt: skip
ROM, OSLO, BERGEN = (f'{{"city": "{city}"}}' for city in ("Rom", "Oslo", "Bergen"))
FIRST = '{"name": "weather", "arguments": {"city": "Rom"}}'
BOTH = '[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "weather", "arguments": {"city": "Bergen"}}]'

ALTERNATES = (
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must take turns') }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}"
    "{% set said = '<<SYS>>' + messages[0].content + '<</SYS>>' %}"
    "{% else %}{% set turns = messages %}{% set said = '' %}{% endif %}" + ALTERNATES +
    "{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + (said if loop.first else '') + m.content | trim + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)  # fmt: skip
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% set turns = messages %}"
    + ALTERNATES +
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)  # fmt: skip
MISTRAL_1 = (
    "{{ bos_token }}{% set turns = messages %}" + ALTERNATES +
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)  # fmt: skip
SKIPS = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ '<s>' + m.content }}"
    "{% elif m.role == 'user' %}{{ '<u>' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<a>' + (m.content or '') }}{% endif %}{% endfor %}<a>"
)
SKIPS_RESULTS = (
    "{% for t in tools or [] %}{{ '<t>' + t.function.name }}{% endfor %}"
    "{% for m in messages %}{% if m.role != 'tool' %}{{ '<' + m.role[0] + '>' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<c>' + c.function.arguments | tojson }}{% endfor %}{% endif %}{% endfor %}<a>"
)
HERMES = (
    "{% if tools %}{{ '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else '') }}<tools>"
    "{% for t in tools %}{{ t | tojson }}{% endfor %}</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or m.role == 'system' and not (tools and loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}{{ '<|im_start|>' + tool_role }}{% endif %}"
    "{{ '\n<tool_response>' + m.content + '</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = "{% set tool_role = 'user' %}" + HERMES
HERMES = "{% set tool_role = 'tool' %}" + HERMES
MISTRAL_3 = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}{{ '[AVAILABLE_TOOLS]' + tools | tojson }}{% endif %}{{ '[INST]' + m.content }}"
    "{% elif m.role == 'system' %}{{ '[SYS]' + m.content }}"
    "{% elif m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    "{{ c.function | tojson + c.id }}{% endfor %}"
    "{% elif m.role == 'assistant' %}{{ m.content }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + m.tool_call_id }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{{ '<|assistant|>' + m.tool_calls[0].function.name + (m.tool_calls[0].function.arguments | tojson) }}"
    "{% elif m.role in ['tool', 'ipython'] %}{{ '<|ipython|>' + m.content }}"
    "{% else %}{{ '<|' + m.role + '|>' + m.content }}{% endif %}{% endfor %}<|assistant|>"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<U>' + m.content }}"
    "{% elif m.role == 'assistant' and m.content is none %}<A>{% for c in m.tool_calls %}"
    "{{ '<call>' + c.function.name + '<sep>' + c.function.arguments + '</call>' }}{% endfor %}"
    "{% elif m.role == 'assistant' %}{{ '<A>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<R>' + m.content }}{% endif %}{% endfor %}<A>"
)
PRINTS_RESULTS = SKIPS.replace("{% endif %}{% endfor %}", "{% elif m.role == 'tool' %}{{ '<r>' + m.content }}"
                               "{% endif %}{% endfor %}")  # fmt: skip


def tokenizer(template: str) -> Tokenizer:
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(tiny.byte_level_tokenizer(), specials=specials, chat_templates={"default": template})


def rendered(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer(template).render(Conversation(messages=messages, **options))


def chatml(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def gemma(*turns: tuple[str, str]) -> str:
    body = "".join(f"<start_of_turn>{role}\n{text}<end_of_turn>\n" for role, text in turns)
    return body + "<start_of_turn>model\n"


RESULTS = "Result of weather: 5\n\nResult of weather: wet"  # in the order of the calls, whose ids are not shown


def test_a_template_that_prints_any_role() -> None:
    assert rendered(CHATML, LOOP, tools=TOOLS) == chatml(
        ("system", f"Be brief.\n\n{LISTED}\n{HOW}"), ("user", "Hot?"), ("assistant", FIRST),
        ("user", "Result of weather: 30"), ("assistant", BOTH), ("user", RESULTS),
        ("assistant", "In Rom."), ("user", "Now?"),
    )  # fmt: skip
    assert f"assistant\nHm.\n{FIRST}<" in rendered(CHATML, [USER, calls(call(1, "Rom"), content="Hm."), result(1, "")])


def test_a_template_that_demands_turns_and_has_no_system_message() -> None:
    turns = [
        ("user", f"Be brief.\n\n{LISTED}\n{HOW}\n\nHot?"), ("model", FIRST), ("user", "Result of weather: 30"),
        ("model", BOTH), ("user", RESULTS), ("model", "In Rom."), ("user", "Now?"),
    ]  # fmt: skip
    assert rendered(GEMMA, LOOP, tools=TOOLS) == gemma(*turns)
    assert rendered(GEMMA, LOOP) == gemma(("user", "Be brief.\n\nHot?"), *turns[1:])  # tool_choice: none
    # A result and a text of the user are one turn, and so are a text and a call of the assistant.
    more = [USER, {"role": "assistant", "content": "Hm."}, calls(call(1, "Rom")), result(1, "30"), USER]
    assert rendered(GEMMA, more) == gemma(
        ("user", "Hot?"), ("model", f"Hm.\n\n{FIRST}"), ("user", "Result of weather: 30\n\nHot?")
    )
    with pytest.raises(InvalidRequestError, match="no system role"):
        rendered(GEMMA, [SYSTEM, USER])  # without tools the template's word is final
    with pytest.raises(InvalidRequestError, match="take turns"):
        rendered(GEMMA, [USER, USER, calls(call(1, "Rom")), result(1, "30")])


def test_llama_2_and_the_first_mistral() -> None:
    told = f"<s>[INST] <<SYS>>Be brief.\n\n{LISTED}\n{HOW}<</SYS>>Hot? [/INST] {FIRST} </s>"
    text = rendered(LLAMA_2, LOOP, tools=TOOLS)
    assert text.startswith(told + "<s>[INST] Result of weather: 30 [/INST]")
    assert f"{BOTH} </s><s>[INST] {RESULTS} [/INST] In Rom. </s><s>[INST] Now? [/INST]" in text
    assert rendered(MISTRAL_1, LOOP[1:6]) == (
        f"<s>[INST] Hot? [/INST]{FIRST}</s>[INST] Result of weather: 30 [/INST]{BOTH}</s>"
        "[INST] Result of weather: wet [/INST]"
    )


def test_templates_that_skip_something() -> None:
    text = rendered(SKIPS, LOOP, tools=TOOLS)
    assert text == (
        f"<s>Be brief.\n\n{LISTED}\n{HOW}<u>Hot?<a>{FIRST}<u>Result of weather: 30<a>{BOTH}<u>{RESULTS}"
        "<a>In Rom.<u>Now?<a>"
    )
    assert rendered(SKIPS_RESULTS, LOOP, tools=TOOLS) == (
        f"<t>weather<s>Be brief.<u>Hot?<a><c>{ROM}<u>Result of weather: 30<a><c>{OSLO}<c>{BERGEN}<u>{RESULTS}"
        "<a>In Rom.<u>Now?<a>"
    )
    # A template that has results of its own, and no calls: only those are made of JSON.
    assert rendered(PRINTS_RESULTS, LOOP).startswith(f"<s>Be brief.<u>Hot?<a>{FIRST}<r>30<a>{BOTH}<r>5<r>wet")
    no_system = SKIPS.replace("'system'", "'nothing'")
    assert rendered(no_system, [SYSTEM, USER], tools=TOOLS) == f"<u>Be brief.\n\n{LISTED}\n{HOW}\n\nHot?<a>"


@pytest.mark.parametrize("template", [HERMES, QWEN, MISTRAL_3], ids=["hermes", "qwen", "mistral"])
def test_a_template_that_knows_tools_gets_what_it_was_given(template: str) -> None:
    conversation = Conversation(messages=LOOP, tools=TOOLS)
    made = tokenizer(template)
    assert made.render(conversation) == sandbox_program.render(*made.chat(conversation))
    assert all(word in made.render(conversation) for word in ("Rom", "Oslo", "Bergen", "30", "wet", "5", "weather"))


def test_a_template_with_one_call_at_a_time() -> None:
    text = rendered(LLAMA_3, LOOP, tools=TOOLS)
    assert text.endswith(
        '<|assistant|>weather{"city": "Oslo"}<|ipython|>5<|assistant|>weather{"city": "Bergen"}<|ipython|>wet'
        "<|assistant|>In Rom.<|user|>Now?<|assistant|>"
    )
    strange = [USER, calls(call(1, "Rom"), call(2, "Oslo")), result(2, "5"), result(7, "lost")]
    assert rendered(LLAMA_3, strange).endswith('{"city": "Rom"}<|assistant|>weather{"city": "Oslo"}<|ipython|>5'
                                               "<|ipython|>lost<|assistant|>")  # fmt: skip


def test_a_template_that_shows_calls_without_content_alone() -> None:
    as_text = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
    wanted = '<call>weather<sep>{"city": "Rom"}</call><R>30<A>'
    assert rendered(DEEPSEEK, [USER, calls(as_text, content=None), result(1, "30")]) == "<U>Hot?<A>" + wanted
    both = rendered(DEEPSEEK, [USER, calls(as_text, content="Hm."), result(1, "30")])
    assert both == "<U>Hot?<A>Hm.<A>" + wanted


def test_calls_and_results_of_odd_forms() -> None:
    """A program may hand in arguments as OpenAI gives them, results without a name, and contents that are no text."""

    def odd(function: Any, content: Any) -> str:
        message = {"role": "assistant", "content": None, "tool_calls": [function]}
        return rendered(SKIPS, [USER, message, {"role": "tool", "content": content}])

    text = odd({"function": {"name": "f", "arguments": '{"a": [1, "ü"]}'}}, {"b": 1})
    assert text == '<u>Hot?<a>{"name": "f", "arguments": {"a": [1, "ü"]}}<u>Result: {"b": 1}<a>'
    assert '{"name": "f", "arguments": "{oops"}' in odd({"name": "f", "arguments": "{oops"}, "")
    assert '{"name": "f", "arguments": {}}' in odd({"function": {"name": "f"}}, None)
    assert '"arguments": "' + "[" * 9 in odd({"name": "f", "arguments": "[" * 100_000}, "")
    assert "<a>7<u>" in odd(7, "")
    with pytest.raises(InvalidRequestError, match="the chat template failed"):
        odd({"name": "f", "arguments": object()}, "")


def test_templates_without_a_word_of_the_user_get_what_they_were_given() -> None:
    assert rendered("fixed", LOOP, tools=TOOLS) == "fixed"
    with pytest.raises(InvalidRequestError, match="never"):
        rendered("{{ raise_exception('never') }}", LOOP)


async def test_the_process_of_templates_does_the_same() -> None:
    async with AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine:
        made = engine.tokenizer
        chat = Conversation(messages=LOOP, tools=TOOLS, chat_template=GEMMA)
        ids = await engine.tokenize(chat)
        assert made.decode(ids, skip_special_tokens=False) == made.render(chat)
        assert "Result of weather: wet" in made.render(chat)
        output = await engine.generate([USER, calls(call(1, "Rom")), result(1, "30")], SamplingParams(max_tokens=4))
        shown = made.decode(output.prompt_token_ids, skip_special_tokens=False)
        assert shown == '<|bos|><|user|>Hot?<|end|><|assistant|>[weather(city="Rom")]<|end|><|user|>Result: 30<|end|>' \
                        "<|assistant|>"  # fmt: skip
