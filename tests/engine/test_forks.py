"""A process that forks, by itself or to start another, leaves its engines to the parent."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.engine.support import BOTH_LOOPS, run_script

KINDS = ["simulated", "bundled model"]
GARBAGE = """
import asyncio, gc, os, sys, uvloop
from asyncengine import AsyncEngine, SamplingParams, bundled_model
from asyncengine.testing import SimulatedEngine

gc.disable()

async def leave_an_engine(kind, disk, closed):
    engine = SimulatedEngine() if kind == "simulated" else AsyncEngine.from_pretrained(
        bundled_model(), device="cpu", cpu_threads=2, num_kv_blocks=24, max_num_seqs=4, max_model_len=256,
        host_kv_memory_bytes=1 << 20, disk_kv_path=disk, hybrid_attention="always", progress=False,
    )
    await engine.start()
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    print(len((await engine.generate([300, 301], params)).token_ids), flush=True)
    if closed:
        await engine.aclose()
    cycle = [engine]
    cycle.append(cycle)
"""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_may_collect_garbage(kind: str, closed: bool, tmp_path: Path) -> None:
    code = f"""
        asyncio.run(leave_an_engine({kind!r}, {str(tmp_path)!r}, {closed}))
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        os._exit(0)  # the parent's garbage is not in question
    """
    assert run_script(GARBAGE + textwrap.dedent(code)).split() == ["20", "7"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_may_collect_garbage_before_it_becomes_another_process(kind: str, tmp_path: Path) -> None:
    """uvloop runs Python's hooks of a fork there, and its event loop waits for the exec."""
    code = f"""
        async def main():
            await leave_an_engine({kind!r}, {str(tmp_path)!r}, closed=True)
            os.register_at_fork(after_in_child=gc.collect)
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(7)")
            print(await process.wait())
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    """
    assert run_script(GARBAGE + textwrap.dedent(code)).split() == ["20", "7"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("simulated", [False, True])
def test_a_forked_process_may_end(simulated):
    code = f"""
        import asyncio, atexit, os
        from asyncengine import AsyncEngine, SamplingParams, bundled_model
        from asyncengine.testing import SimulatedEngine
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        engine = AsyncEngine.from_pretrained(bundled_model(), device="cpu", cpu_threads=2, num_kv_blocks=64)
        if {simulated}:
            engine = SimulatedEngine()
        with asyncio.Runner() as runner:
            runner.run(engine.start())
            runner.run(engine.generate([300, 301], params))
            child = os.fork()
            if child == 0:
                atexit._run_exitfuncs()
                engine._life.backend = None
                os._exit(7)  # and not through the runner, which would close the parent's loop
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            print(len(runner.run(engine.generate([300, 301], params)).token_ids))
            runner.run(engine.aclose())
    """
    assert run_script(code).split() == ["7", "20"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("loop", BOTH_LOOPS)
@pytest.mark.parametrize("child", ["os._exit(7)", "sys.exit(7)", "return", "await engine.aclose(); os._exit(7)"])
def test_a_coroutine_may_fork(loop, child):
    code = f"""
        import asyncio, os, sys, uvloop
        from asyncengine import SamplingParams
        from asyncengine.testing import SimulatedEngine
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        async def main():
            async with SimulatedEngine() as engine:
                await engine.generate([300, 301], params)
                child = os.fork()
                if child == 0:
                    {child}
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                print(len((await engine.generate([300, 301], params)).token_ids))
                await asyncio.to_thread(print, "thread")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if {loop == "uvloop"} else None) as runner:
            runner.run(main())
    """
    assert run_script(code).split() == ["0" if child == "return" else "7", "20", "thread"]
