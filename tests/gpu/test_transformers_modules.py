"""Modules of transformers on a GPU: captured, or run one by one where they wait, with the tokens of transformers.

``python bench/fallback.py --device cuda --hidden 4096 --layers 8 --rows 1 64`` compares their speed with native code.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.models.transformers import decoder
from tests.models import sweep, tiny

KINDS = ("gpt_neox", "qwen2_moe", "deepseek_v2", "vaultgemma", "gemma3n_text", "glm4_moe", "longcat_flash")
PROMPTS = ([3], [5, 9, 4, 7, 20, 11, 3], list(range(40, 75)))


def generate(path: Path) -> list[list[int]]:
    async def main() -> list[list[int]]:
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        config = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, "num_kv_blocks": 64}
        engine = AsyncEngine.from_pretrained(
            str(path), device="cuda", dtype="float32", tokenizer="none", progress=False, tune_linear=False, **config
        )
        async with engine:
            outputs = await asyncio.gather(*(engine.generate(list(prompt), params) for prompt in PROMPTS))
            return [list(output.outputs[0].token_ids) for output in outputs]

    return asyncio.run(main())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by files of some versions of transformers
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_transformers(kind, tmp_path, caplog):
    model = sweep.tiny_model(kind)
    model.save_pretrained(tmp_path)
    assert generate(tmp_path) == [tiny.generate(model, prompt, 12) for prompt in PROMPTS]
    if kind != "gemma3n_text":  # some versions of transformers copy a constant of this family from the host
        assert ("its steps are not captured" in caplog.text) == (kind == "longcat_flash")


def test_a_capture_that_fails_leaves_steps_that_run(tmp_path, caplog, monkeypatch):
    model = sweep.tiny_model("longcat_flash")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(decoder, "find_wait", lambda *_: "")
    assert generate(tmp_path) == [tiny.generate(model, prompt, 12) for prompt in PROMPTS]
    assert "LongcatFlashForCausalLM refuses capture" in caplog.text
