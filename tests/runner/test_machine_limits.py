"""Sizes that the machine does not have, and directories that cannot be used, are errors of the configuration."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

import asyncengine
from asyncengine import AsyncEngine, ConfigError, SamplingParams, machine
from asyncengine.cli.main import main
from asyncengine.config import EngineConfig
from asyncengine.runner.loop_config import choose_disk_bytes
from asyncengine.runner.state.fingerprint import program_digest

MODEL = str(asyncengine.bundled_model())
HOST: dict[str, Any] = {"host_kv_memory_bytes": 16 << 20}
NUMBER = r"[\d,]+"


def start(**config: Any) -> None:
    async def run() -> None:
        async with AsyncEngine.from_pretrained(MODEL, device="cpu", progress=False, **config) as engine:
            await engine.generate("x", SamplingParams(max_tokens=1))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"host_kv_memory_bytes": 10**15}, rf"host_kv_memory_bytes \(1,000,000,000,000,000\).*of {NUMBER} bytes"),
        ({"host_kv_memory_bytes": 2**63 - 1}, rf"host_kv_memory_bytes \({NUMBER}\).*memory of {NUMBER} bytes"),
        ({"host_kv_memory_bytes": 2**63}, "host_kv_memory_bytes must be at most 9223372036854775807"),
        ({"host_kv_memory_bytes": -1}, "host_kv_memory_bytes must be at least 1, got -1"),
        ({"host_kv_memory_bytes": float("nan")}, "host_kv_memory_bytes must be int or NoneType, got nan"),
        ({"kv_cache_memory_bytes": 10**15}, rf"kv_cache_memory_bytes \(1,000,000,000,000,000\).*has {NUMBER} in all"),
        ({"num_kv_blocks": 2**31 - 1}, rf"num_kv_blocks \(2,147,483,647\) takes {NUMBER} bytes.*has {NUMBER} in all"),
        (
            {"max_num_seqs": 10**9, "max_num_batched_tokens": 10**9},
            rf"max_num_seqs \(1,000,000,000\).*of this machine's {NUMBER}: lower max_num_seqs",
        ),
        (
            {"max_num_seqs": 10**7, "max_num_batched_tokens": 10**7},
            rf"max_num_seqs \(10,000,000\).*of this machine's {NUMBER}: lower max_num_seqs",
        ),
        ({"disk_kv_path": "", **HOST}, "disk_kv_path must be the path of a directory, got ''"),
        ({"disk_kv_path": "a\0b", **HOST}, "disk_kv_path must be the path of a directory"),
        ({"disk_kv_path": "/dev/full", **HOST}, "disk_kv_path cannot be used: .*/dev/full: Not a directory"),
        ({"disk_kv_path": "/proc/nothing", **HOST}, "disk_kv_path cannot be used: .*/proc/nothing"),
        ({"disk_kv_path": "x" * 5000, **HOST}, "disk_kv_path cannot be used: .*name too long"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_machine_does_not_have_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(**config)


def test_sizes_of_a_disk_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(ConfigError, match=r"disk_kv_path cannot be used: .*Not a directory"):
            start(disk_kv_path=str(path), **HOST)
    directory = str(tmp_path / "kv")
    for size in (10**17, 2**63 - 1):
        with pytest.raises(ConfigError, match=rf"disk_kv_bytes \({size:,}\) is more than .* has: {NUMBER} bytes"):
            start(disk_kv_path=directory, disk_kv_bytes=size, **HOST)
    with pytest.raises(ConfigError, match=r"disk_kv_bytes cannot be used: .* of 1 bytes .* no room for a block"):
        start(disk_kv_path=directory, disk_kv_bytes=1, **HOST)
    start(disk_kv_path=directory, **HOST)


def test_the_default_size_of_a_disk_is_no_more_than_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 0, 0))  # type: ignore[attr-defined]
    config = {"model": "x", "disk_kv_path": str(tmp_path / "not" / "there"), **HOST}
    assert choose_disk_bytes(EngineConfig(**config)) == 1 << 30
    assert choose_disk_bytes(EngineConfig(**config, disk_kv_bytes=1 << 29)) == 1 << 29
    with pytest.raises(ConfigError, match="disk_kv_bytes"):
        choose_disk_bytes(EngineConfig(**config, disk_kv_bytes=(1 << 30) + 1))


def test_memory_that_runs_out_names_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the sizes even if no check has foreseen the failure."""

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("asyncengine.runner.backend._load_on_cpu", fail)
    with pytest.raises(ConfigError, match=rf"{NUMBER} bytes does not hold max_num_seqs=256, .*host_kv_memory"):
        start(**HOST)


def test_flags_and_the_environment_say_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "x", "--model", MODEL, "--device", "cpu"]
    assert main([*command, "--host-kv-memory-bytes", str(10**15)]) == 2
    flag = capsys.readouterr().err
    monkeypatch.setenv("ASYNCENGINE_HOST_KV_MEMORY_BYTES", str(10**15))
    assert main(command) == 2
    environment = capsys.readouterr().err
    assert flag == environment
    assert "host_kv_memory_bytes (1,000,000,000,000,000)" in flag
    assert f"{machine.total_memory():,} bytes" in flag
    assert flag.count("\n") == 1


def test_blocks_of_another_program_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program changes as by an upgrade: any file of the package may decide the bits of keys and values."""
    config: dict[str, Any] = {
        "max_num_seqs": 2, "max_model_len": 192, "num_kv_blocks": 18, "disk_kv_path": str(tmp_path / "kv"), **HOST
    }  # fmt: skip
    prompts = [f"{word} " * 40 for word in ("river", "clock", "garden", "ship")]

    async def run() -> tuple[int, int]:
        async with AsyncEngine.from_pretrained(MODEL, device="cpu", progress=False, **config) as engine:
            for _ in range(2):
                await asyncio.sleep(0.2)
                for prompt in prompts:
                    await engine.generate(prompt, SamplingParams(max_tokens=2, temperature=0.0))
            return engine.stats().blocks_to_disk, engine.stats().blocks_from_disk

    assert asyncio.run(run())[0] > 0
    assert asyncio.run(run())[1] > 0
    monkeypatch.setattr("asyncengine.runner.steps.model_runner.program_digest", lambda: "another")
    assert asyncio.run(run())[1] == 0
    folders = [folder for folder in (tmp_path / "kv").iterdir() if any(folder.rglob("*.kv"))]
    assert len(folders) == 2


def test_the_programs_digest_is_of_every_file(tmp_path: Path) -> None:
    package = Path(asyncengine.__file__).parent
    for path in package.rglob("*.py"):
        copy = tmp_path / path.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    right = program_digest()
    assert program_digest(tmp_path) == right
    for name in ("kernels/ops.py", "models/config.py", "runner/state/memory.py", "kernels/cpu/ops.py"):
        path, text = tmp_path / name, (package / name).read_text()
        path.write_text(text + "\n")
        assert program_digest(tmp_path) != right
        path.rename(path.with_name("moved.py"))
        assert program_digest(tmp_path) != right
        path.with_name("moved.py").unlink()
        path.write_text(text)
    assert program_digest(tmp_path) == right
