"""An engine on the CUDA path: on a GPU if there is one, else on the simulated device with interpreted kernels.

On the latter slots, ingest, work lists, staging, run-ahead and sampling are the real ones, in the order in which the
device gives them; what is missing is the GPU's speed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from asyncengine import AsyncEngine, _core
from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.ops import CudaOps
from asyncengine.runner.backend import Backend, load_tokenizer
from asyncengine.runner.host.rows import HostRows
from asyncengine.runner.host.tier import HostTier
from asyncengine.runner.loop_config import step_loop_config
from asyncengine.runner.start.calibration import with_kv_scales
from asyncengine.runner.start.prepare import make_steps
from asyncengine.runner.state.groups import choose_groups
from asyncengine.runner.steps.buckets import token_buckets
from asyncengine.runner.steps.device_steps import VARIANTS, step_buckets
from asyncengine.runner.steps.model_runner import load_model
from tests.kernels.interpreter import repair_interpreter


def load(config: EngineConfig) -> Backend:
    assert config.num_kv_blocks is not None
    repair_interpreter()
    device = _core.SimulatedDevice(vocab_size=2)
    native = _core.CudaDevice.simulated(device)
    ops = CudaOps(torch.device("cpu"))
    loaded = with_kv_scales(config, load_model(config, ops), ops)
    groups = choose_groups(config, loaded.config, loaded.max_model_len)
    num_blocks = config.num_kv_blocks * groups.count
    info = loaded.info(config, num_blocks, groups=groups)
    host_rows = HostRows.make(config, native, loaded)
    steps, buffers = make_steps(config, loaded, ops, native, num_blocks, host_rows, groups=groups)
    buckets = step_buckets(config, loaded, ops, 0 if host_rows is None else host_rows.num_lanes)
    graphs = _core.CudaGraphs(native)
    for bucket in buckets:
        variants = [(needs, device.add_graph(partial(_quietly, steps.run, bucket, needs))) for needs in VARIANTS]
        graphs.add_bucket(**bucket._asdict(), variants=variants)
    graphs.set_copy_blocks(device.add_graph(steps.copy_blocks))
    tier = HostTier.make(config, native, steps.cache, num_blocks)
    if tier is not None:
        info = replace(info, num_host_kv_blocks=tier.pool.num_blocks, num_host_states=tier.num_states)
        moves = [device.add_graph(partial(tier.enqueue, transfer)) for transfer in tier.transfers]
        graphs.set_host_pool(tier.pool, moves)
    poison(steps)
    workers = None
    if host_rows is not None and tier is not None:
        workers = host_rows.workers(native, tier.pool, graphs, lambda run: device.add_graph(partial(_quietly, run)))
    settings = step_loop_config(config, info, token_buckets(buckets))
    step_loop = _core.StepLoop.on_cuda(settings, native, buffers.staging, graphs, None, 0, 50.0, workers)
    return Backend(info, load_tokenizer(config), step_loop, (steps, device, tier, host_rows))


def _quietly(run, *args) -> None:
    # Rows that a step does not use hold whatever memory held; numpy would warn of what the kernels make of it.
    with np.errstate(all="ignore"):
        run(*args)


def poison(steps) -> None:
    """Everything that a step must write before it reads: a stale read then shows in the tokens."""
    state = steps.state
    for name in ("input_ids", "positions", "row_query_start", "row_query_len", "row_context_len", "sample_position"):
        getattr(state, name).fill_(1 << 20)
    state.slots.block_tables.fill_(1 << 20)
    if state.slots.window_tables is not None:
        state.slots.window_tables.fill_(1 << 20)
    state.slots.last_token.fill_(1 << 20)
    for planes in steps.cache.groups:
        planes.fill_(float("nan"))
    for states in steps.cache.states:
        states.fill_(255)  # NaN in float32 and in bfloat16


def make_engine(model: str, **config: object) -> AsyncEngine:
    if torch.cuda.is_available():
        return AsyncEngine.from_pretrained(model, device="cuda", progress=False, **config)
    return AsyncEngine(EngineConfig.from_kwargs(model, config), load)
