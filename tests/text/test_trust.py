"""Trusted tokenizers run in this process; the tests show what becomes of others, and how unusable ones fail."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN3_5

from asyncengine import ContextLengthError, EngineError, InvalidRequestError, ModelError, UnsupportedModelError
from asyncengine.testing import SimulatedEngine
from asyncengine.text.sandbox import SandboxProcess
from asyncengine.text.sandbox_program import PIECE, TooLongError
from asyncengine.text.tokenizer import Tokenizer, decode_with
from asyncengine.text.trust import encodes_in_proportion
from tests.models import tiny

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SLOW = "(a|a){18}b|a"  # a quarter of a million steps at each letter, below the library's own limit


def backend(**parts: Any) -> Backend:
    """A tokenizer of letters with other parts; those of the library are set, those in JSON replaced."""
    vocab = {"<unk>": 0} | {chr(97 + i): i + 1 for i in range(26)}
    made = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def spec(**parts: Any) -> dict[str, Any]:
    return json.loads(backend().to_str()) | parts


def write(directory: Path, described: dict[str, Any], **config: Any) -> str:
    (directory / "tokenizer.json").write_text(json.dumps(described))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


LINEAR: dict[str, Callable[[], Backend]] = {
    "byte-level": tiny.byte_level_tokenizer,
    "metaspace": tiny.metaspace_tokenizer,
    "nothing": backend,
    "gpt2": lambda: backend(pre_tokenizer=split(GPT2)),
    "qwen2": lambda: backend(normalizer=normalizers.NFC(), pre_tokenizer=split(QWEN2)),
    "qwen3.5": lambda: backend(pre_tokenizer=split(QWEN3_5)),
    "tiktoken": lambda: backend(pre_tokenizer=split(TikTokenConverter().pattern)),
    **{
        name: partial(backend, pre_tokenizer=split(GGUF_PRE_TOKENIZER_SPLITS[name]))
        for name in ("llama-bpe", "tekken", "gpt-4o")
    },
    "spaces": lambda: backend(normalizer=normalizers.Replace(Regex(" {2,}"), "▁")),
    "bert": lambda: backend(normalizer=normalizers.BertNormalizer(), pre_tokenizer=pre_tokenizers.BertPreTokenizer()),
}
OTHERS: dict[str, Callable[[], Backend]] = {
    "slow pattern": lambda: backend(pre_tokenizer=split(SLOW)),
    "hidden in a sequence": lambda: backend(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Sequence([split(GPT2), split(r"(\s*)*x")])])
    ),
    "slow replacement": lambda: backend(normalizer=normalizers.Replace(Regex(SLOW), "a")),
    "growth": lambda: backend(normalizer=normalizers.Sequence([normalizers.Replace("a", "aa")] * 30)),
    "prefix": lambda: backend(normalizer=normalizers.Prepend("a" * 100)),
    "empty pattern": lambda: backend(normalizer=normalizers.Replace("", "x")),
    "long words": lambda: Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]", max_input_chars_per_word=10**9)),
    "long pieces": lambda: Backend(models.Unigram([("a" * 2000, -1.0), ("a", -1.0)], 0)),
    "suffix": lambda: Backend(models.BPE({"a": 0}, [], end_of_word_suffix="x" * 1000)),
}


@pytest.mark.parametrize("name", [*LINEAR, *OTHERS])
def test_only_tokenizers_that_are_known_to_be_linear_are_trusted(name: str) -> None:
    made = (LINEAR | OTHERS)[name]()
    assert Tokenizer(made).is_linear == (name in LINEAR)
    described = Backend.from_str(made.to_str())
    assert encodes_in_proportion(described, Tokenizer(made).longest_token) == (name in LINEAR)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [n for n in LINEAR if n not in ("nothing", "metaspace")])
def test_trusted_patterns_take_any_run_of_characters(name: str) -> None:
    """A pattern that took the square of a run's length would take minutes for one of these."""
    tokenizer = Tokenizer(LINEAR[name]())
    started = time.monotonic()
    for run in (" ", "\n", " \n", "a", "A", "ª", "\u0301", "A\u0301", "日", "'", "1", ".", ". ", "/", "\r\n "):
        tokenizer.encode(run * (100_000 // len(run)) + "x")
    assert time.monotonic() - started < 60


class OddEngine(SimulatedEngine):
    """An engine whose tokenizer is not trusted."""

    def __init__(self, tokenizer: Tokenizer, **config: Any) -> None:
        super().__init__(**config)
        self._odd = tokenizer

    def _load_simulated(self, config: Any) -> Any:
        loaded = super()._load_simulated(config)
        object.__setattr__(loaded, "tokenizer", self._odd)
        return loaded


def run(engine: SimulatedEngine, prompts: list[Any]) -> list[Any]:
    """Ids or error of each prompt."""

    async def main() -> list[Any]:
        async with engine:
            return await asyncio.gather(*map(engine._life.prompts.token_ids, prompts), return_exceptions=True)

    return asyncio.run(main())


def test_others_have_the_same_ids_from_their_own_process() -> None:
    odd = tiny.byte_level_tokenizer()
    odd.normalizer = normalizers.Replace(Regex("(xy)+z"), "Größe")
    tokenizer = Tokenizer(odd, chat_templates={"default": "{{ messages[0].content }}"})
    assert not tokenizer.is_linear
    texts = ["xyxyz quick", "x" * 20_000, "two words <s> " * 10, "日本 🦊", "The quick brown fox " * 4000]
    engine = OddEngine(tokenizer, max_model_len=100_000, num_kv_blocks=8192)
    assert run(engine, texts) == [tokenizer.encode(text) for text in texts]
    chats = [[{"role": "user", "content": text}] for text in texts]
    engine = OddEngine(tokenizer, max_model_len=100_000, num_kv_blocks=8192)
    assert run(engine, chats) == [tokenizer.encode_chat(chat) for chat in chats]
    plain = OddEngine(tokenizer, max_model_len=100_000, num_kv_blocks=8192, sandbox=False)
    assert run(plain, texts) == [tokenizer.encode(text) for text in texts]


def test_a_tokenizer_that_takes_too_long_fails_its_request() -> None:
    engine = OddEngine(Tokenizer(OTHERS["slow pattern"]()), sandbox_timeout_s=0.5, max_model_len=10_000)
    slow, quick = run(engine, ["a" * 5000, "b"])
    assert isinstance(slow, InvalidRequestError)
    assert "the tokenizer failed: it took longer than 0.5 s" in str(slow)
    assert slow.param == "prompt"
    assert quick == [2]


def test_a_tokenizer_that_fills_the_memory_fails_its_request() -> None:
    engine = OddEngine(Tokenizer(OTHERS["growth"]()), sandbox_timeout_s=3.0)
    large, quick = run(engine, ["a" * 100, "b"])
    assert isinstance(large, InvalidRequestError)
    assert "the tokenizer failed" in str(large)
    assert quick == [2]


def test_a_text_that_is_too_long_is_refused_there_too() -> None:
    odd = Tokenizer(backend(pre_tokenizer=split("x?")))
    odd.longest_token = 1000

    async def encode() -> None:
        process = SandboxProcess(odd.backend.to_str(), 30.0)
        try:
            await process.encode("a" * (5 * PIECE), True, 1000)
        finally:
            await process.aclose()

    with pytest.raises(TooLongError):
        asyncio.run(encode())
    (refused,) = run(OddEngine(odd), ["a" * (5 * PIECE)])
    assert isinstance(refused, ContextLengthError)
    assert "maximum context length is 2048 tokens" in str(refused)


PANICS = {
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "merges": {
        "model": {
            "type": "BPE", "vocab": {"a": 0, "aa": 1}, "merges": ["a a"], "continuing_subword_prefix": "###########",
        }
    },
    "not a pattern": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}},
    "nesting": {"normalizer": json.loads('{"type":"Sequence","normalizers":[' * 200 + "]}" * 200)},
}  # fmt: skip


@pytest.mark.parametrize("name", PANICS)
def test_a_tokenizer_that_cannot_be_read_is_a_model_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.from_pretrained(write(tmp_path, spec(**PANICS[name])))


FAILS = {
    "no such token": {"model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "<unk>"}},
    "panic": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "panic in the process": {
        "pre_tokenizer": {"type": "FixedLength", "length": 0},
        "normalizer": {"type": "Replace", "pattern": {"Regex": "(xy)+z"}, "content": "x"},
    },
    "pattern that gives up": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    },
}


@pytest.mark.parametrize("name", FAILS)
def test_a_tokenizer_that_fails_fails_the_request(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(write(tmp_path, spec(**FAILS[name])))
    text = "a" * 40 + "b"
    failures = [*run(OddEngine(tokenizer), [text, text]), error_of(tokenizer, text), error_of(tokenizer, text * 300)]
    for failure in failures:
        assert isinstance(failure, InvalidRequestError), failure
        assert "the tokenizer failed" in str(failure)


def error_of(tokenizer: Tokenizer, text: str) -> Exception:
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.encode(text)
    return caught.value


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Replace(Regex("(a+)+b"), "x"),
        decoders.Sequence([decoders.Fuse(), decoders.Sequence([decoders.Replace(Regex("a"), "x")])]),
        decoders.Replace("", "x"),
        decoders.Sequence([decoders.Replace("a", "aa")] * 30),
        decoders.Replace("a", "x" * 100),
    ],
)
def test_a_decoder_that_may_take_long_is_refused(decoder: Any, tmp_path: Path) -> None:
    backend(decoder=decoder).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json.*decoder"):
        Tokenizer.from_pretrained(str(tmp_path))


def test_a_decoder_that_panics_fails_what_it_decodes() -> None:
    odd = backend(decoder=decoders.Strip("a", 0, 5))
    with pytest.raises(EngineError, match="the tokenizer failed"):
        decode_with(odd, [1], True)
    with pytest.raises(EngineError, match="the tokenizer failed"):
        Tokenizer(odd).decode([1])


@pytest.mark.parametrize(
    ("templates", "key"),
    [
        ([{"name": ["a"], "template": "x"}], r"chat_template\[0\]\.name must be a string, found \['a'\]"),
        ([{"name": "default", "template": "x"}, {"name": "b", "template": 5}], r"chat_template\[1\]\.template"),
        ([{"name": None, "template": "x"}], r"chat_template\[0\]\.name"),
    ],
)
def test_templates_and_names_are_strings(templates: Any, key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: " + key):
        Tokenizer.from_pretrained(write(tmp_path, spec(), chat_template=templates))


def test_deep_json_is_a_model_error(tmp_path: Path) -> None:
    write(tmp_path, spec())
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer_config\.json"):
        Tokenizer.from_pretrained(str(tmp_path))
