"""Chat templates that hang, fill the memory or break out, and the process that they do it in."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from asyncengine import ContextLengthError, EngineClosedError, EngineError, InvalidRequestError, SamplingParams
from asyncengine.testing import SimulatedEngine, no_leaks
from asyncengine.text.awake import AwakeTimer
from asyncengine.text.sandbox import SandboxProcess, render_message
from tests.engine.support import BOTH_LOOPS, ROOT, check_canary, run_script

SHORT = SamplingParams(max_tokens=1)
CHAT = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
HANGS_WHEN_ASKED = "{% if messages[0].content == 'hang' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
HOSTILE = {
    "loops": (ENDLESS, "took longer than"),
    "one operation": ("{{ 7 ** (10 ** 9) % 2 }}", "took longer than"),
    "memory": ("{{ 'a' * 10 ** 10 }}", "MemoryError"),
    "number": ("{{ 10 ** (10 ** 11) }}", "MemoryError|took longer"),
    "format": ("{{ '%1000000000d' | format(1) }}", "MemoryError|took longer"),
    "list": (
        "{% set a = namespace(b=['x']) %}{% for i in range(60) %}{% set a.b = a.b + a.b %}{% endfor %}",
        "MemoryError|took longer",
    ),
    "output": ("{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}", "context length"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "nesting": ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "failed"),
    "raises": ("{{ raise_exception('no such role') }}", "^the chat template failed: no such role$"),
    "syntax": ("{% nonsense %}", "^the chat template failed: Encountered unknown tag 'nonsense'"),
    "undefined": ("{{ a.b }}", "^the chat template failed: 'a' is undefined$"),
}


class ChatEngine(SimulatedEngine):
    """A simulated engine with another chat template."""

    def __init__(self, template: str, **config: Any) -> None:
        super().__init__(**config)
        self._template = template

    def _load_simulated(self, config: Any) -> Any:
        backend = super()._load_simulated(config)
        assert backend.tokenizer is not None
        backend.tokenizer._templates = {"default": self._template}
        return backend

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        assert self._life.prompts._sandbox is not None
        return self._life.prompts._sandbox._process


class Ticker:
    """The longest time for which the event loop did not turn."""

    async def __aenter__(self) -> Ticker:
        self.worst = 0.0
        self._task = asyncio.ensure_future(self._tick())
        return self

    async def _tick(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(0.005)
            before, elapsed = time.monotonic(), time.monotonic() - before
            self.worst = max(self.worst, elapsed)

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


@pytest.mark.parametrize("name", HOSTILE)
async def test_whatever_a_template_does_is_its_requests_failure(name: str) -> None:
    template, message = HOSTILE[name]
    async with ChatEngine(template, sandbox_timeout_s=0.7) as engine, no_leaks(engine):
        async with Ticker() as ticker:
            with pytest.raises(InvalidRequestError, match=message):
                await engine.generate(CHAT, SHORT)
        assert ticker.worst < 0.5
        await check_canary(engine)


@pytest.mark.parametrize("loop_name", BOTH_LOOPS)
async def test_the_deadline_fails_one_request_and_the_others_get_a_new_process(loop_name: str) -> None:
    async with ChatEngine(HANGS_WHEN_ASKED, sandbox_timeout_s=0.5) as engine, no_leaks(engine):
        contents = ["hang" if i % 4 == 1 else f"message {i}" for i in range(10)]
        results = await asyncio.gather(
            *(engine.generate([{"role": "user", "content": c}], SHORT) for c in contents), return_exceptions=True
        )
        for content, result in zip(contents, results, strict=True):
            if content == "hang":
                assert isinstance(result, InvalidRequestError), result
                assert result.param == "messages"
            else:
                assert not isinstance(result, BaseException), result
                assert result.prompt_token_ids == tuple(engine.tokenizer.encode(content))


async def test_cancelling_leaves_the_others_alone() -> None:
    async with ChatEngine(HANGS_WHEN_ASKED, sandbox_timeout_s=0.5) as engine, no_leaks(engine):
        tasks = [
            asyncio.ensure_future(engine.generate([{"role": "user", "content": c}], SHORT))
            for c in ("hang", "dropped", "served")
        ]
        await asyncio.sleep(0.2)
        for task in tasks[:2]:
            task.cancel()
        assert (await tasks[2]).prompt_token_ids == tuple(engine.tokenizer.encode("served"))
        assert all(task.cancelled() for task in tasks[:2])


async def test_cancelling_while_the_process_starts() -> None:
    async with ChatEngine("{{ messages[0].content }}") as engine, no_leaks(engine):
        first = asyncio.ensure_future(engine.generate(CHAT, SHORT))
        await asyncio.sleep(0)
        first.cancel()
        await engine.generate(CHAT, SHORT)
        assert first.cancelled()
        assert engine._life.prompts._sandbox is not None
        assert engine._life.prompts._sandbox.num_starts == 1


async def test_small_conversations_go_before_large_ones() -> None:
    sandbox = SandboxProcess(None, 30.0)
    done: list[int] = []

    async def render(size: int) -> None:
        message = render_message("{{ text }}", {"text": "a" * size}, 10**6)
        assert await sandbox.render(message, 10**6) == "a" * size
        done.append(size)

    await asyncio.gather(*(render(100_000 + i) for i in range(50)), *(render(i) for i in range(5)))
    assert done[1:6] == list(range(5)), "the first large one was under way"
    assert done[6:] == list(range(100_001, 100_050)), "large ones come in their order"
    done.clear()
    await asyncio.gather(*(render(100_000 + i) for i in range(2)), *(render(1) for _ in range(50)))
    assert 100_001 in done[:12], "they do not starve"
    await sandbox.aclose()


async def test_messages_may_hold_what_templates_take() -> None:
    class Text(str):
        __slots__ = ()

    template = "{{ messages | tojson }}|{{ messages[0].get('n') }}|{{ messages[0].content is string }}"
    async with ChatEngine(template) as engine, no_leaks(engine):
        chat: list[Any] = [
            {"role": Text("user"), "content": Text("a\x00ü🦊"), "n": 2**70, "parts": ({"x": [1.5, None, True]},)}
        ]
        async with await engine.submit(chat, SHORT) as stream:
            assert stream.prompt_token_ids == engine.tokenizer.encode_chat(chat)
        with pytest.raises(InvalidRequestError, match="must hold text, numbers, lists and mappings, got object"):
            await engine.generate([{"role": "user", "content": object()}], SHORT)  # type: ignore[list-item]
        with pytest.raises(InvalidRequestError, match="not valid Unicode"):
            await engine.generate([{"role": "user", "content": "a\ud800"}], SHORT)
        deep: Any = "x"
        for _ in range(5000):
            deep = [deep]
        with pytest.raises(InvalidRequestError, match="nested too deeply"):
            await engine.generate([{"role": "user", "content": "x", "deep": deep}], SHORT)  # type: ignore[list-item]


async def test_a_text_longer_than_any_prompt_is_refused() -> None:
    async with ChatEngine("{{ 'a' * 10241 }}") as engine, no_leaks(engine):
        with pytest.raises(ContextLengthError, match=r"maximum context length is 2048 tokens.*10241 characters"):
            await engine.generate(CHAT, SHORT)


async def test_the_process_knows_nothing_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    monkeypatch.setenv("PYTHONSTARTUP", "/nowhere.py")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    async with ChatEngine("{{ strftime_now('%d %H') }}") as engine, no_leaks(engine):
        hours = [time.time() + 9 * 3600]
        output = await engine.generate(CHAT, SHORT)
        hours.append(time.time() + 9 * 3600)
        expected = {time.strftime("%d %H", time.gmtime(hour)) for hour in hours}
        assert engine.tokenizer.decode(output.prompt_token_ids) in expected
        assert engine.process is not None
        proc, pid = Path(f"/proc/{engine.process.pid}"), engine.process.pid
        assert {v.split("=")[0] for v in (proc / "environ").read_text().split("\0")[:-1]} <= {
            "TZ", "TOKENIZERS_PARALLELISM", "LD_LIBRARY_PATH", "LC_CTYPE",
        }  # fmt: skip
        assert sorted(os.listdir(proc / "fd")) == ["0", "1", "2"]
        assert os.getsid(pid) == pid
        limits = dict(line.rsplit(maxsplit=2)[0:2] for line in (proc / "limits").read_text().splitlines()[1:12])
        assert any(k.startswith("Max core file size") and k.endswith(" 0") for k in limits)
        assert any(k.startswith("Max address space") and k.endswith(str(1 << 30)) for k in limits)


async def test_a_process_that_dies_is_replaced() -> None:
    async with ChatEngine(HANGS_WHEN_ASKED) as engine, no_leaks(engine):
        await engine.generate(CHAT, SHORT)
        assert engine.process is not None
        kill(engine.process.pid)  # while it is idle: nobody notices
        await engine.generate(CHAT, SHORT)
        hanging = asyncio.ensure_future(engine.generate([{"role": "user", "content": "hang"}], SHORT))
        await asyncio.sleep(0.5)
        kill(engine.process.pid)
        with pytest.raises(InvalidRequestError, match="ended without an answer"):
            await hanging
        await engine.generate(CHAT, SHORT)


def kill(pid: int) -> None:
    """Kill a process. It has ended when this returns, and the event loop has not turned."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize(
    ("executable", "message"), [("/nowhere/python", "No such file"), ("", "sandbox=False"), ("/bin/false", "start")]
)
async def test_without_an_interpreter_chats_fail_and_the_rest_works(
    executable: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    async with ChatEngine("x") as engine, no_leaks(engine):
        with pytest.raises(EngineError, match=message):
            await engine.generate(CHAT, SHORT)
        await check_canary(engine)
    async with ChatEngine("x", sandbox=False) as engine, no_leaks(engine):
        await engine.generate(CHAT, SHORT)


async def test_closing_ends_the_process_and_what_waits_for_it() -> None:
    async with no_leaks():
        engine = ChatEngine(HANGS_WHEN_ASKED)
        await engine.start()
        chats = [{"role": "user", "content": c} for c in ("hang", "a", "b")]
        tasks = [asyncio.ensure_future(engine.generate([chat], SHORT)) for chat in chats]
        await asyncio.sleep(0.2)
        process = engine.process
        assert process is not None
        await engine.aclose(drain=False)
        assert process.returncode == -signal.SIGKILL
        while tasks:
            with pytest.raises(EngineClosedError):
                await tasks.pop()


async def test_engines_have_processes_of_their_own() -> None:
    async with ChatEngine("one") as one, ChatEngine("two") as two, no_leaks():
        for engine, text in ((one, "one"), (two, "two")):
            output = await engine.generate(CHAT, SHORT)
            assert output.prompt_token_ids == tuple(engine.tokenizer.encode(text))


PROGRAM = """
    import asyncio, gc, os
    from asyncengine.testing import SimulatedEngine

    async def main():
        async with SimulatedEngine(sandbox_timeout_s=60) as engine:
            chat = [{"role": "user", "content": "hello"}]
            await engine.generate(chat)
            process = engine._life.prompts._sandbox._process
            __BODY__
    asyncio.run(main())
"""


def test_it_ends_with_its_engines_process() -> None:
    """Killed in the middle of a template, which reads no socket."""
    body = """
            engine.tokenizer._templates["default"] = ENDLESS
            asyncio.ensure_future(engine.generate(chat))
            await asyncio.sleep(0.2)
            print(process.pid, flush=True)
            await asyncio.sleep(60)
    """.replace("ENDLESS", repr(ENDLESS))
    code = textwrap.dedent(PROGRAM.replace("__BODY__", body.strip()))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        assert is_running(pid)
        program.kill()
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_fork_leaves_it_to_the_parent() -> None:
    body = """
            if (child := os.fork()) == 0:
                gc.collect()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            await engine.generate(chat)
            assert process is engine._life.prompts._sandbox._process
            print("served")
    """
    assert run_script(PROGRAM.replace("__BODY__", body.strip()), "-W", "error") == "served\n"


def test_an_engine_that_is_never_closed_leaves_no_process() -> None:
    code = """
        import asyncio
        from asyncengine.testing import SimulatedEngine

        async def main():
            engine = SimulatedEngine()
            await engine.start()
            await engine.generate([{"role": "user", "content": "hello"}])
            print(engine._life.prompts._sandbox._process.pid)

        asyncio.run(main())
    """
    assert not is_running(int(run_script(code)))


async def test_time_in_which_the_processes_are_stopped_does_not_count() -> None:
    """Both processes are stopped, as on a laptop that is closed, for longer than a job may take."""
    sandbox = SandboxProcess(None, 3.0)
    slow = "{% for i in range(100000) %}{% endfor %}{{ messages[0].content }}"
    try:
        message = render_message(slow, {"messages": CHAT}, 100)
        assert await sandbox.render(message, 100) == "hello"
        job = asyncio.ensure_future(sandbox.render(message, 100))
        await asyncio.sleep(0)  # it is sent
        assert sandbox._process is not None
        sandbox._process.send_signal(signal.SIGSTOP)
        time.sleep(4)  # noqa: ASYNC251  # the loop stands, as if this process were stopped
        asyncio.get_running_loop().call_later(0.1, sandbox._process.send_signal, signal.SIGCONT)
        assert await job == "hello"
        assert sandbox.num_starts == 1
    finally:
        await sandbox.aclose()


def test_an_awake_timer_counts_time_in_which_the_loop_runs() -> None:
    class Loop:
        def __init__(self) -> None:
            self.now = 100.0
            self.due: list[tuple[float, Any]] = []

        def time(self) -> float:
            return self.now

        def call_later(self, delay: float, callback: Any) -> Any:
            self.due.append((self.now + delay, callback))
            return None

        def pass_time(self, seconds: float) -> None:
            self.now += seconds
            for entry in [entry for entry in self.due if entry[0] <= self.now]:
                self.due.remove(entry)
                entry[1]()

    loop, calls = Loop(), []
    AwakeTimer(loop, 5.0, lambda: calls.append(loop.now))  # type: ignore[arg-type]
    for _ in range(16):
        loop.pass_time(0.25)
    loop.pass_time(1000.0)  # counts for half a second, so that another half is left
    loop.pass_time(0.25)
    assert calls == []
    loop.pass_time(0.25)
    assert calls == [1104.5]
    assert loop.due == []
