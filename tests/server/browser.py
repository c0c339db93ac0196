"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_START_S = 60.0
_PATIENCE_S = 15.0


def find() -> str | None:
    """The program, if this machine has it."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def browser(program: str, profile: Path) -> Iterator[str]:
    """Run the program with a profile of its own; the address of its DevTools."""
    command = [
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server",
        "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield _address(profile / "DevToolsActivePort", process)
        finally:
            process.kill()


def _address(file: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        lines = file.read_text().split() if file.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    raise AssertionError(f"{process.args!r} did not start: {process.poll()}")


class Tab:
    """One page. ``complaints``: errors on its console, such as exceptions, failed loads, violations of a policy."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None

    async def read(self) -> None:
        """Take in what the browser says, until the connection is closed."""
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            else:
                self._note(event["method"], event["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        session = {} if self._session is None else {"sessionId": self._session}
        await self._socket.send_json({"id": number, "method": method, "params": params} | session)
        event = await asyncio.wait_for(answer, _PATIENCE_S)
        assert "error" not in event, event
        result: dict[str, Any] = event["result"]
        return result

    async def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """A fresh tab of that size at ``url``."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.call("Page.navigate", url=url)
        await self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def js(self, expression: str) -> Any:
        """The value of an expression, or of its promise. AssertionError if it throws."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def wait_for(self, expression: str) -> Any:
        """The expression's value once that is true."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while not (value := await self.js(expression)):  # noqa: ASYNC110
                    await asyncio.sleep(0.03)
        except TimeoutError:
            text = await self.js("document.body.innerText")
            raise AssertionError(f"never: {expression}\n{self.complaints}\n{text}") from None
        return value

    async def type(self, text: str) -> None:
        """Into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int, modifiers: int = 0) -> None:
        """``modifiers``: 1 Alt, 2 Control, 4 Meta, 8 Shift, added."""
        text = "\r" if key == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "", modifiers=modifiers,
            )  # fmt: skip

    async def click(self, selector: str) -> None:
        """The middle of an element, by the mouse."""
        await self.js(f"document.querySelector({selector!r}).scrollIntoView({{block: 'nearest'}})")
        box = await self.js(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
            f"(document.querySelector({selector!r}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    async def screenshot(self) -> bytes:
        """PNG."""
        image = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(image["data"])


@asynccontextmanager
async def tab(address: str) -> AsyncIterator[Tab]:
    """A tab of a browser at ``address``; at the end its page is closed."""
    async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
        page = Tab(socket)
        reading = asyncio.create_task(page.read())
        try:
            yield page
        finally:
            if page._session is not None:
                await page.call("Page.close")
            await socket.close()
            await reading
