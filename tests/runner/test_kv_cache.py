"""Choice of the number of KV blocks."""

from __future__ import annotations

import re

import pytest

from asyncengine import machine
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError
from asyncengine.runner.state import memory as kv_cache


def engine(**config: object) -> EngineConfig:
    return EngineConfig.from_kwargs("unused", config)


def test_number_of_blocks():
    block = 1 << 20
    choose = kv_cache.choose_num_blocks
    # 3 sequences of 100 tokens can use 7 blocks of 16 each.
    assert choose(engine(max_num_seqs=3), 100, block, 1000 << 20, 1 << 40) == 21
    assert choose(engine(), 1024, block, 400 << 20, 1 << 40) == 400
    assert choose(engine(kv_cache_memory_bytes=100 << 20), 1024, block, 0, 1 << 40) == 100
    assert choose(engine(kv_cache_memory_bytes=100 << 20, num_kv_blocks=70), 1024, block, 0, 1 << 40) == 70


def test_budget_in_host_memory(monkeypatch):
    """40% of the memory, less what mapped weights take, and never more than 4 GiB."""
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 1000 << 20)
    assert kv_cache.host_budget(0) == 400 << 20
    assert kv_cache.host_budget(500 << 20) == 200 << 20
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 1 << 50)
    assert kv_cache.host_budget(0) == 4 << 30


@pytest.mark.parametrize("config", [{"num_kv_blocks": 63}, {"kv_cache_memory_bytes": 63 << 20}, {}])
def test_one_sequence_of_the_configured_length_must_fit(caplog, config):
    budget = 60 << 20
    origin = next(iter(config), "default budget")
    message = rf"{origin}.* holds [\d,]+ tokens.*takes 1,024 .*max_model_len"
    with pytest.raises(ConfigError, match=message):
        kv_cache.choose_num_blocks(engine(max_model_len=1024, **config), 1024, 1 << 20, budget, 1 << 40)
    # The model's own context may be longer than the cache: said once, and refused request by request.
    assert kv_cache.choose_num_blocks(engine(**config), 1024, 1 << 20, budget, 1 << 40) < 64
    assert re.search(message, caplog.text)


@pytest.mark.parametrize("config", [{"num_kv_blocks": 1001}, {"kv_cache_memory_bytes": 1001 << 20}])
def test_a_cache_larger_than_the_devices_memory_is_named(config):
    ((field, value),) = config.items()
    with pytest.raises(ConfigError, match=rf"{field} \({value:,}\) takes 1,049,624,576 bytes .* 1,048,576,000 in all"):
        kv_cache.choose_num_blocks(engine(**config), 1024, 1 << 20, 60 << 20, 1000 << 20)


def test_available_memory_is_plausible():
    assert 1 << 20 < machine.available_memory() <= machine.total_memory() < 1 << 50
