"""Prompts of any size and form: what is refused, in which order the rest is tokenized, and what is left at the end."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from asyncengine import (
    AsyncEngine,
    ConfigError,
    ContextLengthError,
    Conversation,
    EngineClosedError,
    EngineOverloadedError,
    InvalidRequestError,
    SamplingParams,
    bundled_model,
)
from asyncengine.api.conversation import MAX_TEMPLATE
from asyncengine.api.request import LONG_TEXT
from asyncengine.testing import SimulatedEngine, no_leaks
from asyncengine.text.sandbox_program import PIECE
from asyncengine.text.threads import SMALL_TEXT, TextThreads
from asyncengine.text.tokenizer import Tokenizer
from tests.engine.support import BOTH_LOOPS, CANARY, check_canary, run_script

SHORT = SamplingParams(max_tokens=1)
LONG_CONTEXT = {"max_model_len": 400_000, "num_kv_blocks": 30_000}
MESSAGES = [{"role": "user", "content": "hello"}]


class Gate:
    """Holds up whatever calls it, on a thread, until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self._open = threading.Event()

    def __call__(self, result: Any = None) -> Any:
        self.entered.release()
        assert self._open.wait(60)
        return result

    def open(self) -> None:
        self._open.set()

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=60)


async def test_texts_that_cannot_fit_are_refused_before_they_are_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    async with SimulatedEngine() as engine, no_leaks(engine):
        longest = 2048 * engine.tokenizer.longest_token
        many = [{"role": "user", "content": ""}] * 2049
        monkeypatch.setattr(Tokenizer, "encode", lambda *arguments: pytest.fail("this was tokenized"))
        for prompt in ("a" * 30_000_000, "a" * (longest + 1), [MESSAGES[0] | {"content": "a" * (longest + 1)}], many):
            with pytest.raises(ContextLengthError, match=rf"maximum context length is 2048 tokens.*{len(prompt)}|has"):
                await engine.generate(prompt, SHORT)
        monkeypatch.undo()
        await check_canary(engine)


async def test_a_long_text_is_given_up_after_some_of_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    async with SimulatedEngine(max_model_len=100_000, num_kv_blocks=8192) as engine, no_leaks(engine):
        text = "a" * 490_000
        assert 4 * 100_000 < len(text) < 100_000 * engine.tokenizer.longest_token
        with pytest.raises(ContextLengthError, match=r"maximum context length is 100000 tokens.*131072 tokens or more"):
            await engine.generate(text, SHORT)  # two pieces of 65,536: each letter is a token
        with pytest.raises(ContextLengthError, match=r"maximum context length is 100000 tokens.*has 110000 tokens"):
            await engine.generate(text[:110_000], SHORT)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("length", [1, LONG_TEXT, LONG_TEXT + 1, PIECE + 1, 3 * PIECE])
async def test_texts_and_chats_of_any_length_have_the_ids_of_the_whole(length: int) -> None:
    async with SimulatedEngine(**LONG_CONTEXT) as engine, no_leaks(engine):
        text = ("Größe? \n日本 🦊 " * length)[:length]
        expected = engine.tokenizer.backend.encode(text).ids
        assert await ids_of(engine, text) == expected
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        assert await ids_of(engine, messages) == engine.tokenizer.encode_chat(messages)
    async with SimulatedEngine(**LONG_CONTEXT, sandbox=False) as engine, no_leaks(engine):
        assert await ids_of(engine, messages) == engine.tokenizer.encode_chat(messages)


async def ids_of(engine: SimulatedEngine, prompt: Any) -> list[int]:
    async with await engine.submit(prompt, SHORT) as stream:
        return stream.prompt_token_ids


async def test_small_work_is_never_behind_large() -> None:
    threads, gate, order = TextThreads(), Gate(), []
    large = [asyncio.ensure_future(threads.run(SMALL_TEXT + 1, gate))]
    await gate.wait_entered()
    large += [asyncio.ensure_future(threads.run(SMALL_TEXT + 1, order.append, i)) for i in range(49)]
    for i in range(100, 110):
        await threads.run(SMALL_TEXT, order.append, i)
    assert order == list(range(100, 110)), "one large text runs, the others wait"
    gate.open()
    await asyncio.gather(*large)
    assert order[10:] == list(range(49)), "large ones come in their order"
    threads.close()


async def test_large_work_does_not_starve_behind_small() -> None:
    """Both threads are busy; when one of them is free, it takes what came first, whatever its size."""
    threads, gate, order = TextThreads(), Gate(), []
    count = 3000  # more than one thread does while the other, with the large one, waits for its turn of the interpreter
    busy = [asyncio.ensure_future(threads.run(1, gate)) for _ in range(2)]
    for _ in busy:
        await gate.wait_entered()
    work = [asyncio.ensure_future(threads.run(1, order.append, "small"))]
    work += [asyncio.ensure_future(threads.run(SMALL_TEXT + 1, order.append, "large"))]
    work += [asyncio.ensure_future(threads.run(1, order.append, "small")) for _ in range(count)]
    await asyncio.sleep(0)
    gate.open()
    await asyncio.gather(*busy, work[1])
    assert order.index("large") <= count
    await asyncio.gather(*work)
    assert len(order) == count + 2
    threads.close()


async def test_cancelled_work_is_dropped_and_running_work_ends_unobserved() -> None:
    threads, gate, ran = TextThreads(), Gate(), []
    running = asyncio.ensure_future(threads.run(SMALL_TEXT + 1, gate))
    await gate.wait_entered()
    waiting = asyncio.ensure_future(threads.run(SMALL_TEXT + 1, ran.append, 1))
    await asyncio.sleep(0)
    for task in (running, waiting):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    gate.open()
    await threads.run(SMALL_TEXT + 1, ran.append, 2)
    assert ran == [2]
    threads.close()
    with pytest.raises(EngineClosedError):
        await threads.run(1, ran.append, 3)


async def test_closing_fails_work_that_waits() -> None:
    threads, gate = TextThreads(), Gate()
    running = asyncio.ensure_future(threads.run(SMALL_TEXT + 1, gate, "done"))
    await gate.wait_entered()
    waiting = asyncio.ensure_future(threads.run(SMALL_TEXT + 1, print))
    await asyncio.sleep(0)
    threads.close()
    with pytest.raises(EngineClosedError):
        await waiting
    gate.open()
    assert await running == "done"


async def test_text_that_waits_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, encode = Gate(), Tokenizer.encode
    async with SimulatedEngine(**LONG_CONTEXT, max_queued_characters=100_000) as engine, no_leaks(engine):
        text = "a" * 60_000
        expected = engine.tokenizer.encode(text)
        monkeypatch.setattr(Tokenizer, "encode", lambda self, *a: gate(encode(self, *a)))
        first = asyncio.ensure_future(ids_of(engine, text))
        await gate.wait_entered()
        for prompt in (text, [{"role": "user", "content": text}]):
            with pytest.raises(EngineOverloadedError, match="too much text"):
                await ids_of(engine, prompt)
        gate.open()
        assert await first == expected
        assert await ids_of(engine, "a" * 120_000) == expected * 2, "one that is longer than the limit waits alone"


async def test_a_prompt_under_way_fails_when_its_engine_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, encode = Gate(), Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, *a: gate(encode(self, *a)))
    async with no_leaks():
        engine = SimulatedEngine(**LONG_CONTEXT)
        await engine.start()
        prompts = [asyncio.ensure_future(ids_of(engine, "a" * 100_000)) for _ in range(3)]
        await gate.wait_entered()
        await engine.aclose(drain=False)
        gate.open()
        while prompts:
            with pytest.raises(EngineClosedError):
                await prompts.pop()


def test_nobody_waits_for_a_text_at_exit() -> None:
    """A long text holds up neither the end of its loop nor that of the interpreter."""
    started = time.monotonic()
    run_script("""
        import asyncio, time
        from asyncengine.testing import SimulatedEngine
        from asyncengine.text.tokenizer import Tokenizer

        async def main():
            Tokenizer.encode = lambda *arguments: time.sleep(80)
            async with SimulatedEngine(max_model_len=100_000, num_kv_blocks=8192) as engine:
                tasks = [asyncio.ensure_future(engine.submit("a" * size)) for size in (10_000, 100_000)]
                await asyncio.sleep(0.1)
                for task in tasks:
                    assert task.cancel()

        asyncio.run(main())
    """)
    assert time.monotonic() - started < 40


def test_a_text_under_way_at_exit_is_cut_off() -> None:
    """The native code of a daemon thread meets the end of the interpreter."""
    for _ in range(3):
        run_script("""
            import asyncio
            from asyncengine.testing import SimulatedEngine

            async def main():
                async with SimulatedEngine(max_model_len=1_000_000, num_kv_blocks=80_000) as engine:
                    tasks = [asyncio.ensure_future(engine.submit("a" * size)) for size in (10_000, 3_000_000)]
                    await tasks[0]
                    assert tasks[1].cancel()

            asyncio.run(main())
        """)


@pytest.mark.parametrize("loop_name", BOTH_LOOPS)
async def test_without_a_tokenizer_token_ids_go_in_and_out(loop_name: str) -> None:
    for without in ({"skip_tokenizer_init": True}, {"tokenizer": "none"}):
        async with SimulatedEngine(**without) as engine, no_leaks(engine):
            params = SamplingParams(max_tokens=20, temperature=0.0, n=2)
            output = await engine.generate(CANARY, params)
            assert list(output.token_ids) == engine.expected_token_ids(CANARY, params)
            assert {s.text for s in output.outputs} == {""}
            deltas = [delta async for delta in engine.stream(CANARY, params)]
            assert "".join(d.text for d in deltas) == ""
            assert [t for d in deltas if d.index == 0 for t in d.token_ids] == list(output.token_ids)
            for prompt in ("text", MESSAGES):
                with pytest.raises(InvalidRequestError, match="no tokenizer"):
                    await engine.generate(prompt, params)
            with pytest.raises(InvalidRequestError, match="no tokenizer", check=lambda e: e.param == "stop"):
                await engine.generate(CANARY, SamplingParams(stop="."))
            with pytest.raises(ConfigError, match="skip_tokenizer_init"):
                _ = engine.tokenizer


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}{{ tools | tojson if tools }}"
    "{{ documents[0].text if documents }}{{ mood }}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("sandbox", [True, False])
async def test_a_conversation_with_everything(sandbox: bool) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is "}]
    async with AsyncEngine.from_pretrained(bundled_model(), progress=False, sandbox=sandbox) as engine:

        async def text(**options: Any) -> str:
            prompt = Conversation(messages=chat, **{"chat_template": TEMPLATE} | options)
            output = await engine.generate(prompt, SamplingParams(max_tokens=1))
            return engine.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

        both = "[user]Hi[end][assistant]It is[end]"
        assert await text() == f"{both}[assistant]"
        assert await text(add_generation_prompt=False) == both
        assert await text(chat_template_kwargs={"mood": "!"}) == f"{both}![assistant]"
        assert await text(documents=[{"text": "paper"}]) == f"{both}paper[assistant]"
        assert await text(tools=[{"name": "f"}]) == both + '[{"name": "f"}][assistant]'
        going_on = {"add_generation_prompt": False, "continue_final_message": True}
        assert await text(**going_on) == "[user]Hi[end][assistant]It is "
        assert (await text(chat_template=None, **going_on)).endswith("<|assistant|>It is ")
        with pytest.raises(InvalidRequestError, match="does not show the final message"):
            await text(chat_template="{{ messages[0].content }}", **going_on)
        with pytest.raises(InvalidRequestError, match="chat template failed"):
            await text(chat_template="{{ messages[9].content.x }}")
        assert engine.debug_stats().queued_characters == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages"),
        ({"tools": "x"}, "tools"),
        ({"documents": [1]}, "documents"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template": "x" * (MAX_TEMPLATE + 1)}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_wrong_conversations(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        Conversation(**{"messages": [{"role": "user", "content": "x"}]} | fields)
    assert error.value.param == param
