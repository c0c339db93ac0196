from fake_engine import FakeEngine
from harness import CHAT, COMPLETIONS, USER, serving


async def test_stream_equals_whole() -> None:
    async with serving(FakeEngine()) as site:
        whole = (await site.post(COMPLETIONS, prompt="Hello", max_tokens=40)).json
        events = await site.events(COMPLETIONS, prompt="Hello", max_tokens=40)
        print(whole, events[0], events[-1])
        chat = (await site.post(CHAT, messages=USER, max_tokens=4)).json
        ev = await site.events(CHAT, messages=USER, max_tokens=4, stream_options={"include_usage": True})
        print(chat, *ev, sep="\n")
        print((await site.get("/metrics")).body.decode()[:3000])
        print((await site.get("/v1/models")).body)
        print((await site.get("/v1/models/fake")).body)
        print((await site.get("/health")).body)
        print((await site.get("/healthx")).body)
        assert "".join(e["choices"][0]["text"] for e in events) == whole["choices"][0]["text"]
