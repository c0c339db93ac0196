"""``suffix``: prompts around a gap by the markers of real tokenizers, and the model's answer over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers
from fake_engine import FakeEngine
from harness import COMPLETIONS, Site, serving
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from asyncengine import AsyncEngine, bundled_model
from asyncengine.server import infilling
from asyncengine.server.engine_api import Engine
from asyncengine.server.errors import ApiError
from asyncengine.server.infilling import infills, markers_of
from asyncengine.tokenization import Tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
#: Markers, and whether the prompt comes first.
FAMILIES = {
    "qwen": (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"), True),
    "starcoder": (("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>"), True),
    "santacoder": (("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), True),
    "codegemma": (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>"), True),
    "deepseek": (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), True),
    "glm": (("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), True),
    "codestral": (("[PREFIX]", "[SUFFIX]"), False),
}


def byte_level(names: Sequence[str], *, special: bool = False, begins: bool = True) -> Tokenizer:
    """A tokenizer of bytes with these markers, which puts <s> before a text."""
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(BYTES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(name, special=special, normalized=False) for name in ("<s>", *names)])
    if begins:
        start = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[start])
    return Tokenizer(backend)


def code_llama() -> Tokenizer:
    """A tokenizer in the way of SentencePiece: a text begins with a space, and unknown characters are bytes."""
    pieces = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdef=()", "▁a", "▁<PRE>", "▁<SUF>"]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, "▁<MID>", "▁<EOT>"])}
    model = models.BPE(vocabulary, [("▁", "a")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = ("<s>", "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    return Tokenizer(backend)


class Texts:
    """In place of an engine: what ``infills`` needs of it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    async def tokenize(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(prompt, add_special_tokens)


async def made(tokenizer: Tokenizer, prompt: Any, suffix: str) -> list[int]:
    (ids,) = await infills(cast(Engine, Texts(tokenizer)), [prompt], suffix)
    return list(ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
async def test_the_markers_of_each_family_are_put_between_the_texts(family: str, special: bool) -> None:
    names, prompt_first = FAMILIES[family]
    tokenizer = byte_level(names, special=special)
    token = tokenizer.backend.token_to_id
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in ("def f():", "\n  return x😀"))
    prefix, suffix = token(names[0]), token(names[1])
    if prompt_first:
        wanted = [token("<s>"), prefix, *before, suffix, *after, token(names[2])]
    else:
        wanted = [token("<s>"), suffix, *after, prefix, *before]
    assert await made(tokenizer, "def f():", "\n  return x😀") == wanted
    assert await made(tokenizer, before, "\n  return x😀") == wanted
    assert await made(tokenizer, [token("<s>"), *before], "\n  return x😀") == wanted
    assert {token(name) for name in names} == set(markers_of(tokenizer).ends)


async def test_a_tokenizer_without_a_beginning_gets_none() -> None:
    tokenizer = byte_level(FAMILIES["qwen"][0], begins=False)
    token = tokenizer.backend.token_to_id
    ids = await made(tokenizer, "", "b")
    assert ids == [token("<|fim_prefix|>"), token("<|fim_suffix|>"), token("b"), token("<|fim_middle|>")]


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_marker_in_a_text_stays_text(family: str) -> None:
    names, _ = FAMILIES[family]
    tokenizer = byte_level(names)
    markers = markers_of(tokenizer)
    text = "".join(names) + "x" + names[1] * 3 + "<<" + names[0]
    ids = await made(tokenizer, text, text)
    written = [token for token in ids if token in markers.ends]
    assert len(written) == 3 - (markers.middle is None)
    plain = [token for token in ids[1:] if token not in markers.ends]
    assert tokenizer.decode(plain, skip_special_tokens=False) == text * 2


async def test_code_llama_gets_no_space_before_the_suffix() -> None:
    tokenizer = code_llama()
    pre, suf, mid, begin = (tokenizer.backend.token_to_id(t) for t in ("▁<PRE>", "▁<SUF>", "▁<MID>", "<s>"))
    one = tokenizer.backend.token_to_id
    assert await made(tokenizer, "a=", "=b") == [begin, pre, one("▁a"), one("="), suf, one("="), one("b"), mid]
    for text in ("▁<PRE>", "a <PRE>b", "a▁<SUF> <EOT>"):
        ids = await made(tokenizer, text, "=" + text)
        assert [i for i in ids if i in markers_of(tokenizer).ends] == [pre, suf, mid]
        end = ids.index(suf)
        assert tokenizer.decode(ids[end + 1 : -1], skip_special_tokens=False).replace("▁", " ") == ("=" + text).replace(
            "▁", " "
        )


async def test_what_cannot_be_told_from_a_marker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ApiError, match="no markers"):
        markers_of(byte_level(["<|fim_prefix|>", "<|fim_suffix|>"]))
    with pytest.raises(ApiError, match="no markers"):
        markers_of(None)
    tokenizer = byte_level(FAMILIES["qwen"][0])
    few = Tokenizer(tokenizer.backend, num_rows=tokenizer.vocab_size - 2)  # the model has no rows for two of them
    with pytest.raises(ApiError, match="no markers"):
        markers_of(few)
    backend = byte_level([]).backend
    backend.normalizer = normalizers.NFKC()
    backend.add_tokens([AddedToken(name, normalized=True) for name in FAMILIES["starcoder"][0]])
    with pytest.raises(ApiError, match="for a marker"):
        await made(Tokenizer(backend), "＜fim_prefix＞", "b")
    with pytest.raises(ApiError, match="1024 names"):
        await made(tokenizer, "<|fim_pad|>" * 600, "<|fim_pad|>" * 600)
    assert len(await made(tokenizer, "<|fim_pad|>" * 500, "<|fim_pad|>" * 500)) == 11 * 1000 + 4
    monkeypatch.setattr(infilling, "MAX_TOKENS", 20)
    with pytest.raises(ApiError, match="20 tokens"):
        await infills(cast(Engine, Texts(tokenizer)), ["a" * 5, "b" * 5], "c" * 6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, whose last tokens are markers."""
    folder = tmp_path_factory.mktemp("infilling")
    source = Path(bundled_model())
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    described = json.loads((source / "tokenizer.json").read_text())
    names = FAMILIES["qwen"][0]
    first = 1024 - len(names)
    described["model"]["vocab"] = {token: i for token, i in described["model"]["vocab"].items() if i < first}
    described["model"]["merges"] = described["model"]["merges"][: -len(names)]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    described["added_tokens"] += [{"id": first + i, "content": name, **plain} for i, name in enumerate(names)]
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return folder


@asynccontextmanager
async def site_of(folder: str) -> AsyncIterator[tuple[AsyncEngine, Site]]:
    async with (
        AsyncEngine.from_pretrained(folder, progress=False) as engine,
        serving(cast(FakeEngine, engine)) as site,
    ):
        yield engine, site


async def test_a_gap_is_filled(checkpoint: Path) -> None:
    async with site_of(str(checkpoint)) as (engine, site):
        token = engine.tokenizer.backend.token_to_id
        before = engine.tokenizer.encode("One day", add_special_tokens=False)
        after = engine.tokenizer.encode(" the end.", add_special_tokens=False)
        ids = [0, token("<|fim_prefix|>"), *before, token("<|fim_suffix|>"), *after, token("<|fim_middle|>")]
        fixed = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        wanted = (await site.post(COMPLETIONS, prompt=ids, **fixed)).json["choices"][0]["text"]
        asked = {"suffix": " the end.", "return_token_ids": True, **fixed}
        whole = (await site.post(COMPLETIONS, prompt="One day", **asked)).json
        assert whole["choices"][0]["text"] == wanted
        assert whole["choices"][0]["prompt_token_ids"] == ids
        assert whole["usage"]["prompt_tokens"] == len(ids)
        events = await site.events(COMPLETIONS, prompt="One day", **asked)
        assert "".join(event["choices"][0]["text"] for event in events) == wanted
        assert events[0]["choices"][0]["prompt_token_ids"] == ids
        for prompt in ("One day", before, [0, *before]):
            for echoed in (
                (await site.post(COMPLETIONS, prompt=prompt, echo=True, **asked)).json["choices"],
                [event["choices"][0] for event in await site.events(COMPLETIONS, prompt=prompt, echo=True, **asked)],
            ):
                assert "".join(choice["text"] for choice in echoed) == "One day" + wanted
        several = (await site.post(COMPLETIONS, prompt=["One day", "A fox"], n=2, logprobs=1, **asked)).json["choices"]
        assert [choice["text"] for choice in several[:2]] == [wanted] * 2
        assert "".join(several[0]["logprobs"]["tokens"]) == wanted
        assert several[2]["prompt_token_ids"][:2] == ids[:2]
        best = (await site.post(COMPLETIONS, prompt="One day", best_of=2, **asked)).json
        assert best["choices"][0]["text"] == wanted
        empty = (await site.post(COMPLETIONS, prompt="", **asked)).json["choices"][0]
        assert empty["prompt_token_ids"] == [*ids[:2], *ids[2 + len(before) :]]
        assert (await site.post(COMPLETIONS, prompt="", **fixed)).error["param"] == "prompt"


async def test_markers_end_the_text_in_the_gap(checkpoint: Path) -> None:
    async with site_of(str(checkpoint)) as (engine, site):
        pad = engine.tokenizer.backend.token_to_id("<|fim_pad|>")
        asked = {"prompt": "One day", "suffix": ".", "max_tokens": 4, "logit_bias": {str(pad): 100}}
        (choice,) = (await site.post(COMPLETIONS, **asked)).json["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", pad)
        (choice,) = (await site.post(COMPLETIONS, **asked, ignore_eos=True)).json["choices"]
        assert choice["finish_reason"] == "length"


async def test_the_context_holds_the_prompt_and_the_suffix(checkpoint: Path) -> None:
    async with site_of(str(checkpoint)) as (_, site):
        for fields in (
            {"prompt": [5] * 300, "suffix": "The cat sat. " * 60},
            {"prompt": "x", "suffix": "The cat sat. " * 600},
            {"prompt": ["x", [5] * 600], "suffix": "y"},
            {"prompt": "x", "suffix": "y", "max_tokens": 510},
        ):
            for stream in (False, True):
                reply = await site.post(COMPLETIONS, stream=stream, **fields)
                assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        reply = await site.post(COMPLETIONS, prompt="x", suffix="The cat sat. " * 600)
        assert reply.error["param"] == "suffix"
        reply = await site.post(COMPLETIONS, prompt=[5000], suffix="y")
        assert (reply.status, reply.error["param"]) == (400, "prompt")


async def test_a_model_without_markers_says_so() -> None:
    async with site_of(bundled_model()) as (_, site):
        reply = await site.post(COMPLETIONS, prompt="x", suffix="y")
        assert (reply.status, reply.error["param"]) == (400, "suffix")
        assert "markers" in reply.error["message"]
        assert (await site.post(COMPLETIONS, prompt="x", suffix="", max_tokens=1)).status == 200
