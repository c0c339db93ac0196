"""The page at / in a real browser: talking, what a model's text may not do, and a view of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from asyncengine import AsyncEngine, bundled_model
from tests.server import browser
from tests.server.browser import Tab, tab
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Site, serving

ENTER, ESCAPE = 13, 27
ANSWERED = "document.querySelectorAll('.message.assistant:not([aria-busy])').length === %d"
LAST = "[...document.querySelectorAll('.message')].at(-1)"
PAINTED = """(() => { const c = document.getElementById('%s');
    return new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size })()"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = browser.find()
    if program is None:
        pytest.skip("no Chromium on this machine")
    with browser.browser(program, tmp_path_factory.mktemp("profile")) as address:
        yield address


@asynccontextmanager
async def opened(chromium: str, site: Site, *complaints: str, path: str = "", **view: Any) -> AsyncIterator[Tab]:
    """The page of ``site``; at the end the console may show nothing but ``complaints``."""
    async with tab(chromium) as page:
        await page.open(path or f"{site.url}/", **view)
        yield page
        assert [text for text in page.complaints if not any(known in text for known in complaints)] == []
        origin = "/".join((path or site.url).split("/")[:3])
        assert all(url.startswith(origin) for url in page.requests), page.requests


async def say(page: Tab, text: str) -> None:
    await page.wait_for("!document.getElementById('model').textContent.includes('connecting')")
    await page.js("document.getElementById('input').focus()")
    await page.type(text)
    await page.press("Enter", ENTER)


def click(text: str) -> str:
    return f"[...document.querySelectorAll('button')].findLast((b) => b.textContent === {text!r}).click()"


async def test_a_visitor_talks_to_the_bundled_model_and_sees_the_engine(chromium: str) -> None:
    async with (
        AsyncEngine.from_pretrained(bundled_model(), progress=False, num_kv_blocks=512) as engine,
        serving(engine, served_model_name="stories") as site,  # type: ignore[arg-type]
        opened(chromium, site) as page,
    ):
        await page.wait_for("document.querySelector('h2').textContent === 'Chat with stories.'")
        await page.click("#starters button")
        await page.wait_for(ANSWERED % 1)
        story = await page.js(f"{LAST}.querySelector('.body').innerText")
        assert len(story) > 100
        assert "tokens" in await page.js(f"{LAST}.querySelector('.figures').textContent")
        await say(page, "Tell me another story about a bear.")
        await page.wait_for(ANSWERED % 2)
        await page.js(click("Regenerate"))
        await page.wait_for(ANSWERED % 2)
        await page.js("document.getElementById('work').click()")
        await page.wait_for("/busy \\d+%/.test(document.getElementById('overlap').textContent)")
        await page.wait_for("document.getElementById('work').textContent === 'Send eight'")
        assert engine.stats().generation_tokens > 1000
        await page.wait_for("document.getElementById('hits').textContent")
        await page.wait_for("document.getElementById('spark-ttft-now').textContent !== '–'")
        for canvas, colours in {"strip": 6, "map": 3, "spark-rate": 3}.items():
            await page.wait_for(f"{PAINTED % canvas} >= {colours}")


async def test_text_streams_and_stops(chromium: str) -> None:
    engine = FakeEngine("One **bold** word after another. ", step_s=0.005, max_model_len=100_000)
    async with serving(engine) as site, opened(chromium, site) as page:
        await say(page, "Go")
        await page.wait_for(f"{LAST}.getAttribute('aria-busy') === 'true' && {LAST}.innerText.includes('bold word')")
        assert await page.js("document.querySelector('.message strong').textContent") == "bold"
        assert not await page.js("document.getElementById('stop').hidden")
        await page.click("#stop")
        await engine.wait_for(open=0, aborted=1)
        await page.wait_for(f"{LAST}.querySelector('.figures').textContent.includes('stopped')")
        assert await page.js("document.getElementById('stop').hidden")


async def test_saying_it_differently(chromium: str) -> None:
    engine = FakeEngine("Yes.", ends=True)
    async with serving(engine) as site, opened(chromium, site) as page:
        await page.js("document.getElementById('open-settings').click()")
        await page.js("document.querySelector('[name=system]').focus()")
        await page.type("Be kind")
        await page.js("document.querySelector('[name=seed]').focus()")
        await page.type("7")
        await page.js("document.querySelector('[name=stop]').value = 'a\\nb'")
        await page.press("Escape", ESCAPE)
        await say(page, "First")
        await page.wait_for(ANSWERED % 1)
        system, user = {"role": "system", "content": "Be kind"}, {"role": "user", "content": "First"}
        assert engine.prompts[-1] == [system, user]
        params = engine.submitted[-1][1]
        assert (params.seed, params.temperature, params.stop) == (7, 0.7, ("a", "b"))
        await page.js(click("Edit"))
        assert await page.js("document.getElementById('input').value") == "First"
        await page.press("Escape", ESCAPE)
        assert await page.js("document.querySelectorAll('.message').length") == 2
        await page.js(click("Edit"))
        await page.js("document.getElementById('input').value = ''")
        await say(page, "Second")
        await page.wait_for(ANSWERED % 1)
        assert engine.prompts[-1] == [system, user | {"content": "Second"}]
        assert await page.js("document.querySelectorAll('.message').length") == 2
        await page.js("document.getElementById('new-chat').click()")
        await page.wait_for("document.querySelector('#starters').checkVisibility()")


async def test_a_model_without_a_template_continues_text(chromium: str) -> None:
    engine = FakeEngine(" there was", ends=True)
    engine.tokenizer.has_chat_template = False
    async with serving(engine) as site, opened(chromium, site) as page:
        await page.wait_for("document.querySelector('h2').textContent.includes('continues your text')")
        await say(page, "Once")
        await page.wait_for(ANSWERED % 1)
        await page.press("Enter", ENTER)  # nothing new: it goes on
        await page.wait_for(ANSWERED % 2)
        await say(page, "Then")
        await page.wait_for(ANSWERED % 3)
        assert engine.prompts == ["Once", "Once there was", "Once there was there was\n\nThen"]
        assert engine.submitted[-1][1].truncate_prompt_tokens == 56


TAGS = "a article br button code div h3 p pre span strong table tbody td th thead tr"
HOSTILE = """<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>

[press](javascript:window.hacked=1) [data](data:text/html,x) [file](//evil.example) [ok](https://example.org/a) ![i](https://example.org/i.png)

**<b onclick=alert(1)>** `</code><script>` https://example.org/b"onmouseover=1

```html
</code></pre><img src=x onerror=window.hacked=1>
```

| <i>a | b |
|---|---|
| [c](java\tscript:alert(1)) | d |
"""


async def test_what_a_model_writes_stays_text(chromium: str) -> None:
    engine = FakeEngine(HOSTILE, ends=True, max_model_len=4096)
    async with serving(engine) as site, opened(chromium, site) as page:
        await say(page, "<img src=x onerror=window.hacked=2>")
        await page.wait_for(ANSWERED % 1)
        assert await page.js("window.hacked === undefined")
        inside = "document.getElementById('transcript')"
        tags = await page.js(f"[...new Set([...{inside}.querySelectorAll('*')].map((e) => e.localName))].sort()")
        assert set(tags) <= set(TAGS.split())
        names = f"[...{inside}.querySelectorAll('*')].flatMap((e) => e.getAttributeNames())"
        assert not [name for name in await page.js(names) if name.startswith("on")]
        links = await page.js(f"[...{inside}.querySelectorAll('a')].map((a) => [a.href, a.rel, a.target])")
        assert [href for href, _, _ in links] == [f"https://example.org/{name}" for name in ("a", "i.png", "b")]
        assert all(("noopener" in rel, target) == (True, "_blank") for _, rel, target in links)
        shown = await page.js(f"{inside}.textContent")
        for text in ("<img src=x onerror=", "<script>window", "[press](javascript:", "</code></pre><img"):
            assert text in shown
        assert "src=x onerror=window.hacked=2" in shown
        assert await page.js("[...document.querySelectorAll('.code button')].map((b) => b.textContent)") == [
            "Copy code"
        ]


MARKDOWN = {
    "a\nb": "<p>a<br>b</p>",
    "# A *b*\n\n---": "<h1>A <em>b</em></h1><hr>",
    "- a\n- b\n  - c\n\n1. x\n2. y": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol><li>x</li><li>y</li></ol>",
    "> q\n> r": "<blockquote><p>q<br>r</p></blockquote>",
    "snake_case_name 2*3*4 ** a": "<p>snake_case_name 2<em>3</em>4 ** a</p>",
    "``a`b`` \\*c\\* ~~d~~": "<p><code>a`b</code> *c* <del>d</del></p>",
    "**a": "<p>**a</p>",
    "| a | b |\n|--|:-:|\n| 1 | `2` |": '<div class="wide" tabindex="0"><table><thead><tr><th>a</th>'
    '<th class="center">b</th></tr></thead><tbody><tr><td>1</td><td class="center"><code>2</code></td></tr></tbody>'
    "</table></div>",
    "text\n1) one": "<p>text</p><ol><li>one</li></ol>",
}


async def test_markdown(chromium: str) -> None:
    async with serving(FakeEngine()) as site, opened(chromium, site) as page:
        for source, expected in MARKDOWN.items():
            html = await page.js(f"""import('/page/markdown.js').then(({{ render }}) => {{
                const node = document.createElement('div');
                const text = {source!r};
                for (let i = 1; i <= text.length; ++i) render(node, text.slice(0, i));
                return node.innerHTML;
            }})""")
            assert html == expected, source
        quick = """import('/page/markdown.js').then(({ render }) => {
            const began = performance.now();
            for (const s of ['*a ', '[', '](', '`', '> ', '- ', '**', '_a_', '|\\n-|\\n', '~~x'])
                render(document.createElement('div'), s.repeat(20000 / s.length));
            return performance.now() - began;
        })"""
        assert await page.js(quick) < 10_000


async def test_docs_send_requests(chromium: str) -> None:
    engine = FakeEngine("<b>One</b> word. ", step_s=0.01, max_model_len=100_000)
    route = "document.getElementById('post_v1_chat_completions')"
    told = f"{route}.querySelector('.told').textContent"
    async with serving(engine, api_key="it's", served_model_name="a") as site, tab(chromium) as page:
        await page.open(f"{site.url}/docs#post_v1_chat_completions")
        await page.wait_for("document.activeElement.id === 'key'")
        await page.type("it's")
        await page.press("Enter", ENTER)
        await page.wait_for(f"{route}?.open && !!{route}.querySelector('form')")
        await page.js(f"{route}.querySelector('form button').click()")
        await page.wait_for(f"{told}.includes('whole after')")
        assert (await page.js(told)).startswith("200 OK, headers after")
        assert await page.js(f"{route}.querySelector('details').textContent.includes('text/event-stream')")
        answer = f"{route}.querySelector('form > .answer:last-child').textContent"
        assert "[DONE]" in await page.js(answer)
        body = f"{route}.querySelector('textarea')"
        await page.js(f"{body}.value = {body}.value.replace('64', '5000').replace('a fox', \"a fox's <i>\")")
        await page.js(f"{route}.querySelector('form button').click()")
        await page.wait_for(f"{answer}.includes('delta') && {told}.endsWith('…')")  # as it comes
        await page.js(f"[...{route}.querySelectorAll('button')][1].click()")
        await page.wait_for(f"{told}.includes('stopped after')")
        await engine.wait_for(open=0, aborted=1)
        await page.js(f"[...{route}.querySelectorAll('button')][2].click()")
        line = await page.js(f"{route}.querySelector('.answer').textContent")
        assert "a fox'\\''s <i>" in line
        assert '-H "Authorization: Bearer $ASYNCENGINE_API_KEY"' in line
        await page.js("document.getElementById('get_v1_models').open = true")
        models = "document.querySelector('#get_v1_models form > .answer:last-child')"
        await page.wait_for(f"!!{models}")
        await page.js("document.querySelector('#get_v1_models form button').click()")
        await page.wait_for(f"{models}.textContent.includes('\\n  ')")  # in lines
        assert await page.js("document.querySelectorAll('main b, main i').length") == 0
        assert await page.js('localStorage.length === 0 && Object.values(sessionStorage).includes("it\'s")')
        assert [text for text in page.complaints if "401" not in text] == []


async def test_a_key_is_asked_for_and_kept(chromium: str) -> None:
    engine = FakeEngine("Yes.", ends=True)
    async with serving(engine, api_key="secret") as site, opened(chromium, site, "401") as page:
        await page.wait_for("document.activeElement.name === 'key'")
        await page.press("Escape", ESCAPE)  # without a key the page can be read, and does not ask again
        await asyncio.sleep(0.1)
        assert not await page.js("document.getElementById('settings').open")
        await page.js("document.getElementById('open-settings').click()")
        await page.js("document.querySelector('[name=key]').focus()")
        await page.type("secret")
        await page.press("Enter", ENTER)
        await page.wait_for("document.getElementById('model').textContent.includes('fake')")
        await say(page, "Hello")
        await page.wait_for(ANSWERED % 1)
        await page.wait_for("document.getElementById('running').textContent === '0'")
        assert await page.js("!JSON.stringify({ ...localStorage }).includes('secret') && document.cookie === ''")
        assert await page.js("Object.values(sessionStorage).includes('secret')")


async def test_errors_are_shown(chromium: str) -> None:
    engine = FakeEngine("a", max_model_len=100_000, step_s=0.01)
    async with serving(engine) as site, opened(chromium, site, "503", "ERR_") as page:
        engine.overloaded = True
        await say(page, "Hello")
        await page.wait_for("document.getElementById('notice').textContent.includes('queue is full')")
        engine.overloaded = False
        await page.js(click("Edit"))
        await say(page, "")
        await page.wait_for(f"{LAST}.innerText.includes('aaa')")
        engine.die()
        # The server says why and cuts the connection; a browser that sees the cut first drops what was said.
        await page.wait_for("/failed|lost/.test(document.getElementById('notice').textContent)")
        await page.wait_for("document.getElementById('model').textContent.includes('dead')")


async def test_a_narrow_screen_and_who_pays_for_looking(chromium: str) -> None:
    async with (
        serving(FakeEngine("word " * 30, ends=True)) as site,
        opened(chromium, site, width=360, height=700) as page,
    ):
        await say(page, "x" * 200)
        await page.wait_for(ANSWERED % 1)
        asked = "performance.getEntriesByType('resource').filter((e) => e.name.endsWith('/stats')).length"
        fits = "document.documentElement.scrollWidth <= 360"
        heights = "[...document.querySelectorAll('.top button, .top a')].map((e) => e.getBoundingClientRect().height)"
        assert min(await page.js(heights)) >= 44
        assert await page.js(fits)
        assert await page.js(asked) == 0  # the engine's view is not shown
        await page.click("#show-engine")
        await page.wait_for(f"{asked} > 1")
        await page.wait_for("document.getElementById('overlap').textContent.startsWith('Idle.')")
        assert await page.js("['work', 'freeze'].every((id) => document.getElementById(id).offsetHeight >= 44)")
        assert await page.js(fits)
        assert await page.js("document.getElementById('show-engine').getAttribute('aria-pressed')") == "true"
        await page.js("Object.defineProperty(document, 'visibilityState', { value: 'hidden', configurable: true })")
        await page.js("document.dispatchEvent(new Event('visibilitychange'))")
        before = await page.js(asked)
        await asyncio.sleep(0.6)
        assert await page.js(asked) <= before + 1  # one may have been under way


async def test_what_a_screen_reader_hears(chromium: str) -> None:
    async with serving(FakeEngine("Yes.", ends=True)) as site, opened(chromium, site) as page:
        await say(page, "Hello")
        await page.wait_for(ANSWERED % 1)
        await page.js("document.getElementById('open-settings').click()")
        for _ in range(2):
            nodes = (await page.call("Accessibility.getFullAXTree"))["nodes"]
            controls = {"button", "textbox", "spinbutton", "link", "image", "dialog", "main", "complementary", "log"}
            seen = [(n["role"]["value"], n["name"]["value"]) for n in nodes if not n["ignored"] and "name" in n]
            assert not [role for role, name in seen if role in controls and not name.strip()]
            await page.press("Escape", ESCAPE)
        assert {"main", "complementary", "log", "image", "textbox"} <= {role for role, _ in seen}
        assert await page.js("document.querySelector('[role=log]').getAttribute('aria-live')") == "polite"


async def test_it_works_below_a_path(chromium: str) -> None:
    async with serving(FakeEngine("Yes.", ends=True)) as site:

        async def forward(request: web.Request) -> web.Response:
            assert request.path.startswith("/deep/down/")
            url, body = site.url + request.path.removeprefix("/deep/down"), await request.read()
            headers = {"Content-Type": request.content_type}
            async with site.session.request(request.method, url, data=body, headers=headers) as reply:
                names = ("Content-Type", "Content-Security-Policy")
                kept = {name: reply.headers[name] for name in names if name in reply.headers}
                return web.Response(body=await reply.read(), status=reply.status, headers=kept)

        proxy = web.Application()
        proxy.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(proxy)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            async with opened(chromium, site, path=f"http://{host}:{port}/deep/down/") as page:
                await page.wait_for("document.getElementById('docs').checkVisibility()")
                assert (await page.js("document.getElementById('docs').href")).endswith("/deep/down/docs")
                await say(page, "Hello")
                await page.wait_for(ANSWERED % 1)
                await page.wait_for("document.getElementById('running').textContent === '0'")
        finally:
            await runner.cleanup()
