"""The adapter of a request reaches the operations of each step that computes it, as a number of its row."""

from __future__ import annotations

import time

import numpy as np

from asyncengine import _core
from asyncengine._core import EntryKind, RequestExtras, RequestSpec, StepBatch

VOCAB = 8


def test_a_row_has_the_adapter_of_its_sequence_and_no_others() -> None:
    """Slots are used again, in this case two for five requests: a slot does not keep the adapter that it had."""
    seen: list[list[tuple[int, int]]] = []
    logits = np.zeros((2, VOCAB), np.float32)

    def forward(batch: StepBatch) -> tuple[int, int, int]:
        firsts = batch.input_ids[batch.query_start[:-1]]
        adapters = batch.adapters.tolist() or [0] * batch.num_rows
        seen.append(list(zip(firsts.tolist(), adapters, strict=True)))
        logits[:] = 0
        for sample, token in enumerate(batch.sample_index):
            logits[sample, int(batch.input_ids[token])] = 1  # each request repeats its one token
        return logits.ctypes.data, 0, 0

    blocks = np.zeros((8, 64), np.float32)
    config = _core.StepLoopConfig(
        scheduler=_core.SchedulerConfig(
            max_num_seqs=2, max_num_batched_tokens=16, num_blocks=8, block_size=16, max_model_len=32,
            max_update_words=64,
        )
    )  # fmt: skip
    loop = _core.StepLoop.on_cpu(config, forward, _core.CpuKernels(1), VOCAB, [(blocks.ctypes.data, blocks[0].nbytes)])
    wanted = {1: 0, 2: 7, 3: 0, 4: 3, 5: 0}
    for token, adapter in wanted.items():
        extras = RequestExtras(entries=[(EntryKind.adapter, [adapter])]) if adapter else RequestExtras()
        spec = RequestSpec(id=token, prompt=[token, token], max_tokens=3, extras=extras)
        assert loop.submit(spec) == _core.SubmitResult.accepted
    ended: set[int] = set()
    until = time.monotonic() + 20
    while len(ended) < len(wanted) and time.monotonic() < until:
        if not loop.advance():
            time.sleep(0.001)  # the executor has a thread of its own
        news, alive = loop.drain()
        assert alive, loop.take_step_error()
        ended |= {entry.request for entry in news if entry.finish != _core.FinishReason.none}
    loop.stop(1.0)
    assert ended == set(wanted)
    rows = [row for step in seen for row in step]
    assert {token for token, _ in rows} == set(wanted)
    assert all(adapter == wanted[token] for token, adapter in rows)
    assert any(len({adapter for _, adapter in step}) == 2 for step in seen), "rows of one step differ"
