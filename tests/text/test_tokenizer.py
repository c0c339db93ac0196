"""Token ids, texts and chat prompts equal to those of transformers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncengine.api.request import LONG_TEXT
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError, InvalidRequestError, ModelError, ModelNotFoundError
from asyncengine.runner.backend import load_tokenizer
from asyncengine.runner.steps import model_runner
from asyncengine.text import tokenizer as tokenization
from asyncengine.text.tokenizer import Tokenizer
from tests.amounts import examples
from tests.models import tiny

KINDS = {
    "byte-level": lambda: tiny.byte_level_tokenizer(bos=False),
    "byte-level-bos": tiny.byte_level_tokenizer,
    "byte-level-prefix-space": lambda: tiny.byte_level_tokenizer(add_prefix_space=True),
    "metaspace": tiny.metaspace_tokenizer,
}
CHAT = [
    {"role": "system", "content": "  Be brief. "},
    {"role": "user", "content": "Größe? <b>\n日本"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": '</s> & "quotes"'},
]


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    path = tiny.save_tokenizer(KINDS[request.param](), tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer.from_pretrained(str(path)), transformers.PreTrainedTokenizerFast.from_pretrained(path)


@pytest.mark.sampled(2)
@settings(max_examples=examples(100), deadline=None)
@given(text=st.text() | st.lists(st.sampled_from([*"".join(tiny.CORPUS), "<s>", "two words", "  "])).map("".join))
def test_encode_and_decode_equal_transformers(pair, text):
    ours, theirs = pair
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("length", [LONG_TEXT, LONG_TEXT + 1, 5 * LONG_TEXT])
def test_long_texts_are_encoded_as_short_ones_are(pair, length):
    ours, theirs = pair
    text = ("Größe? <s>two words  \n日本 " * length)[:length]
    for special in (True, False):
        assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)


def test_special_tokens_equal_transformers(pair):
    ours, theirs = pair
    assert ours.bos_token_id == theirs.bos_token_id is not None
    assert ours.eos_token_id == theirs.eos_token_id is not None
    assert ours.vocab_size == len(theirs)
    assert set(theirs.all_special_ids) <= ours.special_token_ids


@pytest.mark.parametrize("generation", [True, False])
def test_chat_equals_transformers(pair, generation):
    ours, theirs = pair
    expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=generation)
    assert ours.apply_chat_template(CHAT, generation) == expected
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=generation, return_dict=False)
    assert ours.encode_chat(CHAT, generation) == ids
    assert ids.count(ours.bos_token_id) == 1, "the template writes the only one"


TEMPLATES = [
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
    "{{ messages | tojson(indent=2) }}{{ tools }}{{ documents is none }}{{ unk_token is defined }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ style }}",
    "{%- for m in messages %}\n  {%- if m.role == 'assistant' %}{% generation %}{% set x = 1 %}"
    "{{ m.content }}{% endgeneration %}{{ x is defined }}{% endif %}\n{% endfor %}\n",
    "{{ strftime_now('%Y') | length }}{{ dict(a=1).items() | list }}{{ messages[0].get('name', 'nobody') }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(tmp_path, template):
    tiny.save_tokenizer(tiny.byte_level_tokenizer(), tmp_path, template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_pretrained(str(tmp_path))
    expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, style="plain")
    assert ours.apply_chat_template(CHAT, style="plain") == expected


def test_named_templates(tmp_path):
    tiny.save_tokenizer(tiny.byte_level_tokenizer(), tmp_path, None)
    path = tmp_path / "tokenizer_config.json"
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].name }}"},
    ]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    tokenizer = Tokenizer.from_pretrained(str(tmp_path))
    assert tokenizer.apply_chat_template(CHAT) == "plain"
    assert tokenizer.apply_chat_template(CHAT, tools=[{"name": "search"}]) == "search"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_pretrained(str(tmp_path)).apply_chat_template(CHAT) == "from the file"


def test_own_template_file(tmp_path):
    tiny.save_tokenizer(tiny.byte_level_tokenizer(), tmp_path)
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[-1].content }}")
    tokenizer = Tokenizer.from_pretrained(str(tmp_path), chat_template=str(own))
    assert tokenizer.apply_chat_template(CHAT) == CHAT[-1]["content"]
    own.write_text("{% if %}")
    for path in (own, tmp_path / "absent.jinja"):
        with pytest.raises(ConfigError, match=path.name):
            Tokenizer.from_pretrained(str(tmp_path), chat_template=str(path))


@pytest.mark.parametrize("add_bos", [True, False])
def test_tokenizer_json_overrules_bos_flag_as_in_transformers(tmp_path, add_bos):
    tiny.save_tokenizer(tiny.byte_level_tokenizer(), tmp_path)
    path = tmp_path / "tokenizer_config.json"
    flags = {"add_bos_token": add_bos, "add_eos_token": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | flags))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert Tokenizer.from_pretrained(str(tmp_path)).encode("The fox") == theirs.encode("The fox")


def test_stored_truncation_and_padding_are_ignored(tmp_path):
    backend = tiny.byte_level_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_pretrained(str(tmp_path))
    text = "The quick brown fox jumps over the lazy dog."
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vocab_and_merges_without_tokenizer_json(tmp_path):
    backend = tiny.byte_level_tokenizer(bos=False)
    model = json.loads(backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(m) for m in model["merges"]))
    special = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "</s>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    tokenizer = Tokenizer.from_pretrained(str(tmp_path))
    for text in tiny.CORPUS[:1]:
        assert tokenizer.encode(text) == backend.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == 1


def test_a_revision_of_the_model_is_none_of_another_tokenizers(tmp_path, monkeypatch):
    asked = []

    def resolve(name, *, revision, weights):
        asked.append((name, revision))
        return tiny.save_tokenizer(tiny.byte_level_tokenizer(), tmp_path)

    monkeypatch.setattr(tokenization, "resolve_model", resolve)
    monkeypatch.setattr(model_runner, "read_model_config", lambda config: SimpleNamespace(vocab_size=400))
    for tokenizer in (None, "a/model", "a/tokenizer"):
        load_tokenizer(EngineConfig(model="a/model", tokenizer=tokenizer, revision="c0ffee"))
    assert asked == [("a/model", "c0ffee"), ("a/model", "c0ffee"), ("a/tokenizer", None)]


def test_errors_are_typed(tmp_path):
    with pytest.raises(ModelNotFoundError, match="tokenizer"):
        Tokenizer.from_pretrained(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_pretrained(str(tmp_path))
    tiny.byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelError, match="tokenizer_config"):
        Tokenizer.from_pretrained(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"template": "x"}]}')
    assert Tokenizer.from_pretrained(str(tmp_path)).apply_chat_template(CHAT) == "x"
    (tmp_path / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(ModelError, match=r"chat_template\.jinja.*utf-8"):
        Tokenizer.from_pretrained(str(tmp_path))


def invalid(param: str, match: str):
    return pytest.raises(InvalidRequestError, match=match, check=lambda e: e.param == param)


def test_bad_requests_are_typed():
    plain = Tokenizer(tiny.byte_level_tokenizer())
    with invalid("prompt", "Unicode"):
        plain.encode("a\ud800")
    with invalid("messages", "no chat template"):
        plain.apply_chat_template(CHAT)
    assert not plain.has_chat_template

    chat = Tokenizer(tiny.byte_level_tokenizer(), chat_templates={"default": tiny.CHAT_TEMPLATE})
    for messages in ([], "hello", [{"content": "x"}], ["x"], [{"role": 1}]):
        with invalid("messages", "messages"):
            chat.apply_chat_template(messages)
    with invalid("messages", "unknown role narrator"):
        chat.apply_chat_template([{"role": "narrator", "content": "x"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{% nonsense %}",
        "{{ a.b }}",
    ],
)
def test_a_template_cannot_break_out(template):
    """Templates come with the model: they are sandboxed, and whatever they do is the request's failure."""
    chat = Tokenizer(tiny.byte_level_tokenizer(), chat_templates={"default": template})
    with invalid("messages", "chat template failed"):
        chat.apply_chat_template(CHAT)
