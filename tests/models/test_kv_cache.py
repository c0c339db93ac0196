"""How many KV blocks there are."""

from __future__ import annotations

import re

import pytest

from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError
from asyncengine.runner import kv_cache


def engine(**config: object) -> EngineConfig:
    return EngineConfig.from_kwargs("unused", config)


def test_number_of_blocks(monkeypatch):
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 1000 << 20)
    block = 1 << 20
    choose = kv_cache.choose_num_blocks
    # What 3 sequences of 100 tokens can use: 7 blocks of 16 each.
    assert choose(engine(max_num_seqs=3), 100, block) == 21
    # 40% of the memory, less what mapped weights take.
    assert choose(engine(), 1024, block) == 400
    assert choose(engine(), 1024, block, reserved_bytes=500 << 20) == 200
    assert choose(engine(kv_cache_memory_bytes=100 << 20), 1024, block) == 100
    assert choose(engine(kv_cache_memory_bytes=100 << 20, num_kv_blocks=70), 1024, block) == 70
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 1 << 50)
    assert choose(engine(), 1 << 20, 1 << 16) == (4 << 30) >> 16


@pytest.mark.parametrize("config", [{"num_kv_blocks": 63}, {"kv_cache_memory_bytes": 63 << 20}, {}])
def test_one_sequence_of_the_configured_length_must_fit(monkeypatch, caplog, config):
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 150 << 20)
    origin = next(iter(config), "default budget")
    message = rf"{origin}.* holds [\d,]+ tokens.*takes 1,024 .*max_model_len"
    with pytest.raises(ConfigError, match=message):
        kv_cache.choose_num_blocks(engine(max_model_len=1024, **config), 1024, 1 << 20)
    # The model's own context may be longer than the cache: said once, and refused request by request.
    assert kv_cache.choose_num_blocks(engine(**config), 1024, 1 << 20) < 64
    assert re.search(message, caplog.text)


def test_available_memory_is_plausible():
    assert 1 << 20 < kv_cache.available_memory() < 1 << 50
