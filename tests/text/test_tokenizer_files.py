"""Special tokens, ends and templates of every file that may have them, as transformers.AutoTokenizer has them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from asyncengine.api.conversation import Conversation
from asyncengine.errors import ConfigError, ModelError
from asyncengine.text.tokenizer import Tokenizer
from tests.models import tiny

TEXT = "The<a>fox </s> <b> <c>two <img>words<eot> end"
CHAT = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "go"}}]


def plain() -> tokenizers.Tokenizer:
    """A tokenizer without tokens of its own beside the vocabulary, in which </s> and <s> are plain entries."""
    values = json.loads(tiny.byte_level_tokenizer(bos=False).to_str())
    values["added_tokens"] = []
    return tokenizers.Tokenizer.from_str(json.dumps(values))


def write(path: Path, **files: Any) -> Path:
    """tokenizer.json and the files by their stems; a name with __ lies in a folder, and text is a template."""
    plain().save(str(path / "tokenizer.json"))
    files = {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"}} | files
    for name, value in files.items():
        file = path / name.replace("__", "/")
        file.parent.mkdir(exist_ok=True)
        if isinstance(value, str):
            file.with_suffix(".jinja").write_text(value)
        else:
            file.with_suffix(".json").write_text(json.dumps(value))
    return path


def config(**values: Any) -> dict[str, Any]:
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | values


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
            "special": True} | flags  # fmt: skip


DECODER = {
    "400": token("<a>"),
    "401": token("<b>", special=False),
    "1": token("</s>"),
    "402": token("<eot>", lstrip=True),
}
SPECIALS = {
    "named in tokenizer_config": {"tokenizer_config": config(eos_token="</s>", bos_token="<s>", pad_token="<a>")},
    "as objects": {
        "tokenizer_config": config(eos_token={"__type": "AddedToken", **token("<eot>", rstrip=True)}, bos_token=None)
    },
    "added_tokens_decoder": {"tokenizer_config": config(eos_token="<eot>", added_tokens_decoder=DECODER)},
    "added_tokens_decoder makes special": {
        "tokenizer_config": config(eos_token="</s>", added_tokens_decoder=DECODER, pad_token="<b>")
    },
    "special_tokens_map alone": {"special_tokens_map": {"eos_token": "<eot>", "bos_token": token("<s>")}},
    "special_tokens_map overrides": {
        "tokenizer_config": config(eos_token="</s>", unk_token="<c>"),
        "special_tokens_map": {"eos_token": "<eot>"},
    },
    "added_tokens_decoder hides special_tokens_map": {
        "tokenizer_config": config(eos_token="</s>", added_tokens_decoder=DECODER),
        "special_tokens_map": {"eos_token": "<eot>", "pad_token": "<c>"},
    },
    "added_tokens.json": {
        "tokenizer_config": config(eos_token="<eot>"),
        "added_tokens": {"<b>": 401, "<a>": 400, "<eot>": 402},
    },
    "additional_special_tokens": {
        "tokenizer_config": config(eos_token="</s>", additional_special_tokens=["<a>", "<c>"])
    },
    "extra_special_tokens": {"tokenizer_config": config(extra_special_tokens=["<a>", "<b>"])},
    "extra_special_tokens by name": {
        "tokenizer_config": config(eos_token="</s>", extra_special_tokens={"image_token": "<img>"})
    },
    "tokens of the model's own": {
        "tokenizer_config": config(eos_token="</s>", image_token="<img>", add_bos_token=True)
    },
    "additional tokens in special_tokens_map": {
        "special_tokens_map": {"eos_token": "</s>", "additional_special_tokens": ["<a>", "<b>"]}
    },
}  # fmt: skip


def both(path: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer.from_pretrained(str(path)), transformers.AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("name", SPECIALS)
def test_special_tokens_equal_transformers(tmp_path: Path, name: str) -> None:
    ours, theirs = both(write(tmp_path, **SPECIALS[name]))
    assert ours.specials == theirs.special_tokens_map
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.backend.get_vocab() == theirs.get_vocab()
    assert set(theirs.all_special_ids) <= ours.special_token_ids
    added = theirs.added_tokens_decoder
    assert {i: repr(t) for i, t in ours.backend.get_added_tokens_decoder().items()} == {
        i: repr(t) for i, t in added.items()
    }
    for special in (True, False):
        ids = ours.encode(TEXT, add_special_tokens=special)
        assert ids == theirs.encode(TEXT, add_special_tokens=special)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


NAMED = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "list with {{ tools | length }}"}]
TEMPLATES = {
    "in tokenizer_config": {"tokenizer_config": config(chat_template="one {{ eos_token }}", eos_token="</s>")},
    "a list": {"tokenizer_config": config(chat_template=NAMED)},
    "an object": {
        "tokenizer_config": config(chat_template={"default": "object", "tool_use": "object {{ tools[0].type }}"})
    },
    "a file": {"chat_template": "file {{ messages[0].content }} {{ tools | tojson }}"},
    "a file before a list": {"chat_template": "file", "tokenizer_config": config(chat_template=NAMED)},
    "files": {"chat_template": "file", "additional_chat_templates__tool_use": "tools {{ tools | length }}"},
    "files before a list": {
        "chat_template": "file",
        "additional_chat_templates__tool_use": "file for tools",
        "additional_chat_templates__rag": "file for documents",
        "tokenizer_config": config(chat_template=NAMED),
    },
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_equal_transformers(tmp_path: Path, name: str) -> None:
    ours, theirs = both(write(tmp_path, **TEMPLATES[name]))
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(CHAT, tokenize=False, tools=tools)
        assert ours.apply_chat_template(CHAT, add_generation_prompt=False, tools=tools) == expected


def test_a_template_is_chosen_by_its_name(tmp_path: Path) -> None:
    write(tmp_path, chat_template="plain", **{"additional_chat_templates__rag": "documents {{ messages | length }}"})
    ours, theirs = both(tmp_path)
    expected = theirs.apply_chat_template(CHAT, tokenize=False, chat_template="rag")
    assert ours.render(Conversation(messages=CHAT, chat_template="rag")) == expected == "documents 1"
    assert ours.render(Conversation(messages=CHAT, chat_template="its own")) == "its own"
    for name, text in (("rag", expected), ("default", "plain")):
        chosen = Tokenizer.from_pretrained(str(tmp_path), chat_template=name)
        assert chosen.apply_chat_template(CHAT, tools=TOOLS) == text
    with pytest.raises(ConfigError, match=r"cannot use the chat template other: .*the model's own are .*'rag'"):
        Tokenizer.from_pretrained(str(tmp_path), chat_template="other")


def test_a_template_beside_one_for_tools_stays(tmp_path: Path) -> None:
    """transformers renders no conversation without tools here."""
    write(tmp_path, tokenizer_config=config(chat_template="plain"), additional_chat_templates__tool_use="tools")
    ours = Tokenizer.from_pretrained(str(tmp_path))
    assert ours.apply_chat_template(CHAT) == "plain"
    assert ours.apply_chat_template(CHAT, tools=TOOLS) == "tools"


@pytest.mark.parametrize("value", ["from json", {"default": "from json", "tool_use": "tools"}, NAMED])
def test_a_processors_template_counts_if_there_is_no_other(tmp_path: Path, value: Any) -> None:
    write(tmp_path, chat_template={"chat_template": value})
    ours = Tokenizer.from_pretrained(str(tmp_path))
    assert ours.apply_chat_template(CHAT) in ("from json", "list")
    if not isinstance(value, str):
        assert ours.apply_chat_template(CHAT, tools=TOOLS) in ("tools", "list with 1")
    write(tmp_path, tokenizer_config=config(chat_template="other"))
    assert Tokenizer.from_pretrained(str(tmp_path)).apply_chat_template(CHAT) == "other"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": config(eos_token=7)}, r"tokenizer_config\.json: 'eos_token' must be a token, found 7"),
        ({"tokenizer_config": config(eos_token={"content": 7})}, r"tokenizer_config\.json: 'eos_token'"),
        ({"tokenizer_config": config(eos_token=token("x") | {"lstrip": 1})}, r"tokenizer_config\.json: 'eos_token'"),
        ({"tokenizer_config": config(added_tokens_decoder=[])}, r"tokenizer_config\.json: 'added_tokens_decoder'"),
        ({"tokenizer_config": config(added_tokens_decoder={"-1": token("x")})}, "added_tokens_decoder"),
        ({"tokenizer_config": config(added_tokens_decoder={"1": None})}, r"'added_tokens_decoder\.1' must be a token"),
        ({"tokenizer_config": config(extra_special_tokens=7)}, "extra_special_tokens"),
        ({"tokenizer_config": config(extra_special_tokens=[7])}, r"extra_special_tokens\[0\]"),
        ({"special_tokens_map": {"eos_token": []}}, r"special_tokens_map\.json: 'eos_token'"),
        ({"special_tokens_map": []}, r"special_tokens_map\.json must hold a JSON object"),
        ({"added_tokens": {"x": "1"}}, r"added_tokens\.json: 'x' must have an id"),
        ({"tokenizer_config": config(chat_template=7)}, r"tokenizer_config\.json: chat_template must be a string"),
        ({"tokenizer_config": config(chat_template={"default": 7})}, r"chat_template\.'default' must be a string"),
        ({"tokenizer_config": config(chat_template=["x"])}, r"chat_template\[0\] must have a name"),
        ({"chat_template": {"chat_template": 7}}, r"chat_template\.json: chat_template must be a string"),
        ({"chat_template": "y", "additional_chat_templates__a": "x" * (8 << 20)}, r"at most 8,388,607 are read"),
    ],
)  # fmt: skip
def test_wrong_values_name_their_file(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer.from_pretrained(str(write(tmp_path, **files)))
    assert len(str(caught.value)) < 1000


def test_only_regular_files_and_a_limited_number_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path) / "additional_chat_templates"
    folder.mkdir()
    os.mkfifo(folder / "tool_use.jinja")
    with pytest.raises(ModelError, match=r"tool_use\.jinja is not a regular file"):
        Tokenizer.from_pretrained(str(tmp_path))
    (folder / "tool_use.jinja").unlink()
    for i in range(65):
        (folder / f"{i}.jinja").write_text("x")
    with pytest.raises(ModelError, match="more than 64 templates"):
        Tokenizer.from_pretrained(str(tmp_path))


def test_many_tokens_are_added_in_little_time(tmp_path: Path) -> None:
    decoder = {str(400 + i): token(f"<extra {i}>") for i in range(20_000)}
    ours = Tokenizer.from_pretrained(str(write(tmp_path, tokenizer_config=config(added_tokens_decoder=decoder))))
    assert ours.vocab_size == 20_400
    assert ours.encode("<extra 19999>") == [20_399]
