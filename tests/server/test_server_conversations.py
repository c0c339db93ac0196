"""The page at / in a real browser: what a conversation keeps, how it branches, and what helps after a failure."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import browser
import pytest
from browser import Tab, tab
from fake_engine import FakeEngine
from harness import Site, serving

from asyncengine.conversation import Conversation

ENTER, ESCAPE, UP = 13, 27, 38
CONTROL, SHIFT = 2, 8
ANSWERED = "document.querySelectorAll('.message.assistant:not([aria-busy])').length === %d"
LAST = "[...document.querySelectorAll('.message')].at(-1)"
SHOWN = "[...document.querySelectorAll('.message .body')].map((b) => b.innerText)"
NOTICE = "document.getElementById('notice').textContent"
TEMPLATE = "{{ messages }}<think></think>{{ tools }}<tool_call>"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "id": 12345678901234567890}}</tool_call>'


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = browser.find()
    if program is None:
        pytest.skip("no Chromium on this machine")
    with browser.browser(program, tmp_path_factory.mktemp("profile")) as address:
        yield address


@asynccontextmanager
async def opened(chromium: str, site: Site, *complaints: str, fresh: bool = True, **view: Any) -> AsyncIterator[Tab]:
    """The page of ``site``, with empty storage if it is ``fresh``; the console may show only ``complaints``."""
    async with tab(chromium) as page:
        await page.open(f"{site.url}/", **view)
        if fresh:
            await page.js("localStorage.clear()")
        await page.wait_for("!document.getElementById('model').textContent.includes('connecting')")
        yield page
        assert [text for text in page.complaints if not any(known in text for known in complaints)] == []


async def say(page: Tab, text: str) -> None:
    await page.js("document.getElementById('input').focus()")
    await page.type(text)
    await page.press("Enter", ENTER)


async def talk(page: Tab, *texts: str) -> None:
    """Say each text once the one before is answered."""
    for text in texts:
        before = await page.js("document.querySelectorAll('.message.assistant').length")
        await say(page, text)
        await page.wait_for(ANSWERED % (before + 1))


def click(text: str, place: int = -1) -> str:
    return f"[...document.querySelectorAll('button')].filter((b) => b.textContent === {text!r}).at({place}).click()"


def asked(engine: FakeEngine) -> list[str]:
    """The texts of the last request's messages."""
    prompt = engine.prompts[-1]
    messages = prompt.messages if isinstance(prompt, Conversation) else prompt
    return [message["content"] for message in messages]  # type: ignore[index]


async def test_reasoning_is_shown_while_it_comes_and_collapses_when_it_ends(chromium: str) -> None:
    engine = FakeEngine("<think>Let me **see**.</think>Rome.", ends=True, max_model_len=4096, chat_template=TEMPLATE)
    async with serving(engine) as site, opened(chromium, site) as page:
        engine.hold(20)
        await say(page, "Which city?")
        await page.wait_for(f"{LAST}.innerText.includes('Let me')")
        summary = f"{LAST}.querySelector('summary').textContent"
        assert await page.js(f"{LAST}.querySelector('details').open")
        assert await page.js(summary) == "Thinking…"
        engine.release()
        await page.wait_for(ANSWERED % 1)
        assert not await page.js(f"{LAST}.querySelector('details').open")
        assert (await page.js(summary)).startswith("Thought for ")
        assert await page.js(f"{LAST}.textContent.split('Let me').length") == 2  # it comes under two names
        assert await page.js(f"{LAST}.querySelector('details strong').textContent") == "see"
        assert await page.js(f"{LAST}.querySelector('.body:not(details *)').innerText") == "Rome."
        engine.hold(20)
        await page.js(click("Regenerate"))
        await page.wait_for(f"{LAST}.innerText.includes('Let me')")
        await page.click(".message:last-child summary")
        await page.click(".message:last-child summary")
        engine.release()
        await page.wait_for(ANSWERED % 1)
        assert await page.js(f"{LAST}.querySelector('details').open")  # somebody opened it


async def test_answers_without_text_say_why(chromium: str) -> None:
    engine = FakeEngine(f"<think>a</think>{CALL}", ends=True, max_model_len=4096, chat_template=TEMPLATE)
    async with serving(engine) as site, opened(chromium, site) as page:
        await page.js(f"document.querySelector('[name=tools]').value = {json.dumps(TOOLS)!r}")
        await talk(page, "The weather?")
        assert await page.js(f"{LAST}.querySelector('.code-head').firstChild.data") == "Calls weather"
        lines = '{\n  "city": "Rome",\n  "id": 12345678901234567890\n}'
        assert await page.js(f"{LAST}.querySelector('.calls code').textContent") == lines
        assert "asks for a tool" in await page.js(f"{LAST}.querySelector('.note').textContent")
        engine.answer = [ord(c) for c in "<think>and so on "]
        await page.js("document.querySelector('[name=max_tokens]').value = 20")
        await talk(page, "Sunny.")
        call = json.loads(asked(engine)[1])
        assert call == {"name": "weather", "arguments": {"city": "Rome", "id": 12345678901234567890}}
        assert "limit of tokens" in await page.js(f"{LAST}.querySelector('.note').textContent")
        assert "reasoning" in await page.js(f"{LAST}.querySelector('.note').textContent")
        engine.answer = [-1]
        await talk(page, "And now?")
        assert "no text" in await page.js(f"{LAST}.querySelector('.note').textContent")
        await page.js("document.querySelector('[name=tools]').value = '{'")
        await page.js("document.querySelector('[name=tools]').dispatchEvent(new Event('input', { bubbles: true }))")
        await say(page, "Again")
        await page.wait_for(f"{NOTICE}.includes('not JSON')")


async def test_a_failed_send_offers_retry_and_leaves_nothing_half(chromium: str) -> None:
    engine = FakeEngine("Yes.", ends=True, max_model_len=4096)
    async with serving(engine) as site, opened(chromium, site, "503", "ERR_", "500") as page:
        await talk(page, "One")
        engine.overloaded = True
        await say(page, "Two")
        await page.wait_for(f"{NOTICE}.includes('queue is full')")
        assert await page.js(SHOWN) == ["One", "Yes.", "Two"]
        engine.overloaded = False
        await page.js(click("Retry"))
        await page.wait_for(ANSWERED % 2)
        assert asked(engine) == ["One", "Yes.", "Two"]
        await page.call(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
        )
        await say(page, "Lost")
        await page.wait_for(f"{NOTICE}.includes('cannot be reached')")
        assert (await page.js(SHOWN))[-1] == "Lost"
        await page.call(
            "Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
        await talk(page, "Three")  # takes the place of what failed, which stays as another version
        assert asked(engine) == ["One", "Yes.", "Two", "Yes.", "Three"]
        assert await page.js("document.querySelectorAll('.message')[4].innerText.includes('2/2')")
        engine.answer, engine.step_s = [ord("a")], 0.01
        await say(page, "Four")
        await page.wait_for(f"{LAST}.innerText.includes('aaa')")
        engine.fail(RuntimeError("injected"))
        await page.wait_for(f"!{NOTICE}.includes('reached') && {NOTICE}")
        await page.wait_for(f"{LAST}.innerText.includes('broke off')")
        engine.answer, engine.step_s = [ord("B"), -1], 0.0
        await page.js(click("Retry"))
        await page.wait_for(f"{LAST}.querySelector('.body').innerText === 'B'")
        assert asked(engine)[-2:] == ["Yes.", "Four"]


async def test_stopping_by_escape_keeps_what_was_written(chromium: str) -> None:
    engine = FakeEngine("word ", step_s=0.005, max_model_len=100_000)
    async with serving(engine) as site, opened(chromium, site) as page:
        await say(page, "Go")
        await page.wait_for(f"{LAST}.innerText.includes('word word')")
        await page.press("Escape", ESCAPE)
        await page.wait_for(ANSWERED % 1)
        await engine.wait_for(open=0, aborted=1)
        engine.answer = [ord("B"), -1]
        await talk(page, "More")
        assert asked(engine)[1].startswith("word word")


async def test_editing_any_message_makes_a_branch(chromium: str) -> None:
    engine = FakeEngine("Yes.", ends=True, max_model_len=4096)
    async with serving(engine) as site, opened(chromium, site) as page:
        await talk(page, "One", "Two", "Three")
        await page.js("document.getElementById('input').focus()")
        await page.type("a draft")
        await page.js(click("Edit", 0))
        assert await page.js("document.getElementById('input').value") == "One"
        await page.press("Escape", ESCAPE)
        assert await page.js("document.getElementById('input').value") == "a draft"
        await page.js(click("Edit", 1))
        await page.js("document.getElementById('input').value = ''")
        await say(page, "Zwei")
        await page.wait_for(ANSWERED % 2)
        assert asked(engine) == ["One", "Yes.", "Zwei"]
        assert await page.js("document.getElementById('input').value") == "a draft"
        await page.js("document.querySelector('[aria-label=\"Earlier version\"]').click()")
        assert await page.js(SHOWN) == ["One", "Yes.", "Two", "Yes.", "Three", "Yes."]
        assert await page.js("document.activeElement.ariaLabel") == "Later version"
        await page.js("document.activeElement.click()")
        assert await page.js(SHOWN) == ["One", "Yes.", "Zwei", "Yes."]
        await page.js("document.getElementById('input').value = ''")
        await page.js("document.getElementById('input').focus()")
        await page.press("ArrowUp", UP)
        assert await page.js("document.getElementById('input').value") == "Zwei"


async def test_a_full_context_leaves_out_the_oldest_turns(chromium: str) -> None:
    engine = FakeEngine("Yes.", ends=True, max_model_len=256)
    async with serving(engine) as site, opened(chromium, site, "400") as page:
        await talk(page, "a" * 60, "b" * 60, "c" * 20)
        await say(page, "d" * 60)
        await page.wait_for(f"{NOTICE}.includes('longer than the model')")
        await page.js(click("Leave out the oldest turns"))
        await page.wait_for(ANSWERED % 4)
        texts = asked(engine)
        assert texts == ["c" * 20, "Yes.", "d" * 60]  # with a quarter of the context for the answer
        assert await page.js("document.querySelectorAll('.unsent').length") == 4
        assert await page.js("document.querySelectorAll('.message').length") == 8
        await page.js(click("New chat"))
        await say(page, "e" * 300)
        await page.wait_for(f"{NOTICE}.includes('longer than the model')")
        await page.js(click("Leave out the oldest turns"))
        await page.wait_for(f"{NOTICE}.includes('Even the last message')")


async def test_conversations_are_kept_found_renamed_deleted_and_moved(chromium: str, tmp_path: Path) -> None:
    engine = FakeEngine("Yes.", ends=True, max_model_len=4096)
    async with serving(engine, api_key="secret") as site, opened(chromium, site, "401") as page:
        await page.wait_for("document.activeElement.name === 'key'")
        assert "asks for" in await page.js("document.getElementById('key-why').textContent")
        await page.type("wrong")
        await page.press("Enter", ENTER)
        await page.wait_for("document.getElementById('key-why').textContent.includes('refused')")
        await page.type("secret")
        await page.press("Enter", ENTER)
        await page.wait_for("document.getElementById('model').textContent.includes('fake')")
        await page.js("document.querySelector('[name=system]').value = 'Be kind'")
        await page.js("document.querySelector('[name=system]').dispatchEvent(new Event('input', { bubbles: true }))")
        await talk(page, "About foxes")
        await page.js(click("New chat"))
        await page.js("document.querySelector('[name=system]').value = 'Be brief'")
        await page.js("document.querySelector('[name=system]').dispatchEvent(new Event('input', { bubbles: true }))")
        await talk(page, "About bears")
        await page.js("document.getElementById('open-list').click()")
        titles = "[...document.querySelectorAll('#chats li span')].map((s) => s.textContent)"
        assert await page.js(titles) == ["About bears", "About foxes"]
        await page.type("FOX")
        assert await page.js(titles) == ["About foxes"]
        await page.js("window.prompt = () => 'Red ones'; window.confirm = () => true")
        await page.js(click("✎"))
        assert await page.js(titles) == ["Red ones"]
        await page.js("document.querySelector('#chats button').click()")
        assert await page.js(SHOWN) == ["About foxes", "Yes."]
        assert await page.js("document.querySelector('[name=system]').value") == "Be kind"
        await page.js("document.getElementById('open-list').click()")
        await page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        await page.js(click("Export these"))
        file = tmp_path / "conversations.json"
        for _ in range(100):
            if file.exists():
                break
            await page.js("new Promise((done) => setTimeout(done, 50))")
        text = file.read_text()
        assert "secret" not in text
        assert [chat["title"] for chat in json.loads(text)["conversations"]] == ["About bears", "Red ones"]
        await page.js(click("✕", 1))
        assert await page.js(titles) == ["About bears"]
        assert await page.js(SHOWN) == []
        bad = '{"conversations": [{}]}'
        tags = "<img src=x onerror=window.hacked=1>"
        turn: dict[str, Any] = {"id": "__proto__", "parent": "", "role": "assistant", "text": tags, "figures": tags}
        turn["calls"] = [{"name": tags, "args": tags}]
        hostile = json.dumps({"conversations": [{"id": "x", "title": tags, "tip": "__proto__", "nodes": [turn]}]})
        none = "Nothing is imported"
        for content, words in {text: "2 imported", "[": none, bad: none, hostile: "1 imported"}.items():
            file.write_text(content)
            root = (await page.call("DOM.getDocument"))["root"]["nodeId"]
            field = (await page.call("DOM.querySelector", nodeId=root, selector="#import"))["nodeId"]
            await page.call("DOM.setFileInputFiles", files=[str(file)], nodeId=field)
            await page.wait_for(f"document.getElementById('list-note').textContent.includes({words!r})")
        assert sorted(await page.js(titles)) == [tags, "About bears", "About bears", "Red ones"]
        await page.js("document.querySelector('#chats li:last-child button').click()")  # it has no time
        assert tags in await page.js("document.querySelector('.message').innerText")
        assert await page.js("document.querySelector('#transcript img') === null && window.hacked === undefined")
        await page.js("document.getElementById('open-list').click()")
        chats = "[...document.querySelectorAll('#chats button')]"
        await page.js(f"{chats}.find((b) => b.innerText.includes('Red')).click()")
        await page.call("Page.reload")
        await page.wait_for("document.readyState === 'complete' && document.querySelectorAll('.message').length === 2")
        assert await page.js(SHOWN) == ["About foxes", "Yes."]


async def test_without_docs_there_is_no_link_to_them(chromium: str) -> None:
    async with serving(FakeEngine()) as site:
        del site.server.app._routes["/docs"]
        async with opened(chromium, site, "404") as page:
            await page.wait_for("performance.getEntriesByType('resource').some((e) => e.name.endsWith('/docs'))")
            assert not await page.js("document.getElementById('docs').checkVisibility()")


async def test_shortcuts(chromium: str) -> None:
    async with serving(FakeEngine("Yes.", ends=True)) as site, opened(chromium, site) as page:
        await talk(page, "One")
        await page.press("k", 75, CONTROL)
        assert await page.js("document.activeElement.id") == "find"
        await page.press("Escape", ESCAPE)
        assert not await page.js("document.getElementById('list').open")
        assert len(await page.js(SHOWN)) == 2
        await page.press("O", 79, CONTROL | SHIFT)
        assert await page.js(SHOWN) == []


async def test_two_tabs_write_one_conversation_and_bad_records_harm_nothing(chromium: str) -> None:
    engine = FakeEngine("Yes.", ends=True, max_model_len=4096)
    async with serving(engine) as site, opened(chromium, site) as one:
        await talk(one, "First")
        name = await one.js("Object.keys(localStorage).find((name) => name.startsWith('asyncengine.chat.'))")
        async with opened(chromium, site, fresh=False) as two:
            await two.js("document.getElementById('open-list').click()")
            await two.js("document.querySelector('#chats button').click()")
            await talk(two, "Second of two")
            await one.js("new Promise((done) => setTimeout(done, 100))")
            await talk(one, "Second of one")
            texts = await one.js(f"JSON.parse(localStorage.getItem({name!r})).nodes.map((node) => node.text)")
            assert sorted(texts) == ["First", "Second of one", "Second of two", "Yes.", "Yes.", "Yes."]
            for record in ("{", "null", '{"id": 1}', '{"id": "x", "title": "", "tip": "", "nodes": [9]}'):
                await two.js(f"localStorage.setItem('asyncengine.chat.bad' + Math.random(), {record!r})")
            await two.js("document.getElementById('open-list').click()")
            assert "4 that cannot be read" in await two.js("document.getElementById('list-state').textContent")
            assert await two.js("document.querySelectorAll('#chats li').length") == 1


@pytest.mark.parametrize("failure", ["QuotaExceededError", "SecurityError"])
async def test_without_storage_conversations_last_as_long_as_the_tab(chromium: str, failure: str) -> None:
    engine = FakeEngine("Yes.", ends=True, max_model_len=4096)
    async with serving(engine) as site, opened(chromium, site) as page:
        await page.js(f"Storage.prototype.setItem = () => {{ throw new DOMException('', '{failure}') }}; undefined")
        await talk(page, "Kept in memory")
        words = "full" if failure == "QuotaExceededError" else "keeps nothing"
        assert words in await page.js(NOTICE)
        await page.js(click("New chat"))
        await page.js("document.getElementById('open-list').click()")
        assert words in await page.js("document.getElementById('list-state').textContent")
        await page.js("document.querySelector('#chats button').click()")
        assert await page.js(SHOWN) == ["Kept in memory", "Yes."]
