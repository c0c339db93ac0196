"""Text to token ids and back, and conversations to text, from a model directory's tokenizer files.

tokenizer.json is read with the ``tokenizers`` library alone; transformers, whose import takes seconds, is
needed only for directories that lack it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from asyncengine.api.conversation import Conversation
from asyncengine.api.request import LONG_TEXT, Kept
from asyncengine.errors import (
    AsyncEngineError,
    ConfigError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    ModelError,
    ModelNotFoundError,
)
from asyncengine.models.files import checked_size, excerpt
from asyncengine.models.gguf.paths import is_gguf
from asyncengine.models.weights.hub import resolve_model
from asyncengine.text import sandbox_program, tool_turns
from asyncengine.text.tokenizer_files import add_special_tokens, read_chat_templates, read_config
from asyncengine.text.trust import check_decoder, encodes_in_proportion

_MAX_TOKENIZER_BYTES = 256 << 20
"""Largest tokenizer.json that is read. The largest vocabularies have files of some 35 MB."""


class Tokenizer:
    """A tokenizer with its special tokens and chat templates. Safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        specials: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        num_rows: int | None = None,
    ) -> None:
        """``specials`` maps names such as "bos_token" to tokens; ``chat_templates`` names to Jinja source.

        ``num_rows``: rows of the model's embedding, if they are known.
        """
        self.backend = backend
        self.specials = dict(specials or {})
        self._templates = dict(chat_templates or {})
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """One more than the highest token id, added tokens included."""
        self.num_rows = self.vocab_size if num_rows is None else num_rows
        """The model has no tokens with ids from here on, whatever the vocabulary says."""
        self.longest_token = max(map(len, vocabulary), default=1)
        """Characters of the longest token: no text of more than so many times the context fits in it."""
        self.is_linear = encodes_in_proportion(backend, self.longest_token)
        """True if time and memory are known to be in proportion to a text's length."""
        self.description = None if self.is_linear else backend.to_str()
        """JSON from which another process makes the same tokenizer, if it has to; as long as tokenizer.json."""

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str,
        *,
        revision: str | None = None,
        chat_template: str | None = None,
        num_rows: int | None = None,
    ) -> Self:
        """Read a directory, a GGUF file or a hub repository.

        ``chat_template`` is the path of a Jinja file that replaces the model's own template, or the name of one of the
        model's templates; ``num_rows`` the number of rows of the model's embedding. Raises ModelNotFoundError if there
        is no tokenizer, ModelError if its files are damaged, ConfigError if the template cannot be used.
        """
        directory = resolve_model(path_or_id, revision=revision, weights=False)
        if is_gguf(directory):
            from asyncengine.text.gguf_tokenizer import read_gguf_tokenizer  # it needs numpy and torch

            with _damaged(directory):
                backend, specials, templates = read_gguf_tokenizer(directory)
            check_decoder(backend, str(directory))
        else:
            config = read_config(directory)
            backend, specials = _load_backend(directory, config)
            templates = read_chat_templates(directory, config)
        if chat_template is not None:
            templates = {"default": _choose_template(chat_template, templates)}
        return cls(backend, specials=specials, chat_templates=templates, num_rows=num_rows)

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """The tokens that ``skip_special_tokens`` leaves out, with their texts."""
        return {i: token.content for i, token in self.backend.get_added_tokens_decoder().items() if token.special}

    @functools.cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The ids of ``special_tokens``."""
        return frozenset(self.special_tokens)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def template(self, *, with_tools: bool = False) -> str | None:
        """The source of the chat template, if there is one: some models have another for conversations with tools."""
        return (self._templates.get("tool_use") if with_tools else None) or self._templates.get("default")

    def template_has(self, marker: str) -> bool:
        """Return whether a chat template mentions the marker."""
        return any(marker in source for source in self._templates.values())

    def encode(
        self, text: str, add_special_tokens: bool = True, limit: int | None = None, kept: Kept | None = None
    ) -> list[int]:
        """Token ids of ``text``, with the beginning-of-sequence token where the tokenizer adds one.

        Raises InvalidRequestError if ``text`` is not valid Unicode (lone surrogates), and ContextLengthError, before
        most of the work, if it is long and has far more than ``limit`` tokens. With ``kept`` it is truncated instead.
        """
        check_unicode(text)
        try:
            with _typed_failures():
                if len(text) > LONG_TEXT:
                    truncation = (None,) if kept is None else (kept.count, kept.side)
                    return sandbox_program.encode(self.backend, text, add_special_tokens, limit, *truncation)
                ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
                return ids if kept is None else list(kept.of(ids))
        except sandbox_program.TooLongError as e:
            raise too_many_tokens(e.count, limit or 0) from None

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of short texts, without special tokens. Raises InvalidRequestError."""
        for text in texts:
            check_unicode(text)
        with _typed_failures():
            return sandbox_program.encode_all(self.backend, list(texts))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids that are not in the vocabulary are left out, invalid bytes become U+FFFD."""
        return decode_with(self.backend, list(ids), skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as one text, rendered by the model's template as transformers does. Calls, results and tools
        that the template leaves out or refuses are turns that it has.

        ``variables`` are passed on to the template (enable_thinking and the like). Raises InvalidRequestError
        if there is no template, or if it fails on or rejects the messages.
        """
        conversation = Conversation(
            messages=messages,
            tools=tools or (),
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=variables,
        )
        return self.render(conversation)

    def render(self, conversation: Conversation) -> str:
        """Render a conversation with everything that belongs to it, as ``apply_chat_template`` does."""
        source, values = self.chat(conversation)
        try:
            text = sandbox_program.render(source, tool_turns.fitted(sandbox_program.render, source, values))
        except Exception as e:  # a template is a program: it may raise anything
            problem = sandbox_program.failure(e)
            raise InvalidRequestError(f"the chat template failed: {problem}", param="messages") from e
        return cut_open(conversation, text)

    def chat(self, conversation: Conversation) -> tuple[str, dict[str, Any]]:
        """The template's source and the variables to render it with; ``cut_open`` makes the prompt of its text.

        Raises InvalidRequestError.
        """
        messages = _checked_messages(conversation.messages)
        if conversation.continue_final_message:
            messages[-1]["content"] += _OPEN_END
        source = conversation.chat_template
        if source is None:
            source = self._template(bool(conversation.tools))
        return self._templates.get(source, source), {
            "messages": messages,
            "tools": list(conversation.tools) or None,
            "documents": list(conversation.documents) or None,
            "add_generation_prompt": conversation.add_generation_prompt,
            **self.specials,
            **conversation.chat_template_kwargs,
        }

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation. Templates write all special tokens themselves, so none is added."""
        return self.encode(
            self.apply_chat_template(messages, add_generation_prompt, **variables), add_special_tokens=False
        )

    def _special_id(self, name: str) -> int | None:
        token = self.specials.get(name)
        found: int | None = None if token is None else self.backend.token_to_id(token)
        return found

    def _template(self, with_tools: bool) -> str:
        if (source := self.template(with_tools=with_tools)) is not None:
            return source
        raise InvalidRequestError(
            "the model has no chat template: send a plain prompt, or give one with chat_template=FILE",
            param="messages",
        )


def check_unicode(text: str) -> None:
    """Raises InvalidRequestError if ``text`` has lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise InvalidRequestError(f"the prompt is not valid Unicode: {e}", param="prompt") from e


def too_many_tokens(count: int, context: int) -> ContextLengthError:
    """Make the error for a prompt of at least ``count`` tokens, more than ``context``."""
    return ContextLengthError(
        f"This model's maximum context length is {context} tokens. The prompt has {count} tokens or more.",
        param="prompt",
    )


_OPEN_END = "<open-end-6f0d3c>"
"""Stands where the output goes on in the final message; what the template puts after it is cut off."""


def cut_open(conversation: Conversation, text: str) -> str:
    """``text``, which the template made, up to where a message that is to be continued ends. InvalidRequestError."""
    if not conversation.continue_final_message:
        return text
    end = text.rfind(_OPEN_END)
    if end < 0:
        raise InvalidRequestError(
            "continue_final_message: the chat template does not show the final message", param="continue_final_message"
        )
    return text[:end]


_TEXT_PARTS = ("text", "input_text", "output_text")


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequestError("messages must be a non-empty list", param="messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"messages[{i}] must be an object with a role", param="messages")
    return [_with_text(i, dict(message)) for i, message in enumerate(messages)]


def _with_text(i: int, message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content's parts put together. Raises InvalidRequestError for a part that is no text."""
    parts = message.get("content")
    if not isinstance(parts, list | tuple):
        return message
    for k, part in enumerate(parts):
        if not (isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str)):
            raise InvalidRequestError(f"messages[{i}].content[{k}]: only parts of text are supported", param="messages")
    return message | {"content": "".join(part["text"] for part in parts)}


def decode_with(backend: tokenizers.Tokenizer, ids: list[int], skip_special_tokens: bool) -> str:
    """``backend.decode``; a panic, which ``except Exception`` does not see, becomes EngineError."""
    try:
        return str(backend.decode(ids, skip_special_tokens=skip_special_tokens))
    except BaseException as e:
        if not _is_panic(e):
            raise
        raise EngineError(f"the tokenizer failed on these tokens: {e}") from None


@contextlib.contextmanager
def _typed_failures() -> Iterator[None]:
    """Turn every failure of tokenizers on a text, a panic included, into InvalidRequestError."""
    try:
        yield
    except (AsyncEngineError, sandbox_program.TooLongError):
        raise
    except BaseException as e:
        if not isinstance(e, Exception) and not _is_panic(e):
            raise
        raise InvalidRequestError(f"the tokenizer failed: {sandbox_program.failure(e)}", param="prompt") from None


@contextlib.contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Turn every failure of tokenizers on the tokens of a file, a panic included, into ModelError."""
    try:
        yield
    except AsyncEngineError:
        raise
    except BaseException as e:
        if not isinstance(e, Exception) and not _is_panic(e):
            raise
        raise ModelError(f"cannot make a tokenizer of {path}: {excerpt(str(e))}") from e


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"  # pyo3 makes the class when it first panics


def _load_backend(directory: Path, config: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer proper, and its named special tokens."""
    path = directory / "tokenizer.json"
    if path.is_file():
        checked_size(path, _MAX_TOKENIZER_BYTES)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except BaseException as e:  # the library raises bare Exception, and panics
            if not isinstance(e, Exception) and not _is_panic(e):
                raise
            raise ModelError(f"cannot read {path}: {e}") from e
        specials = add_special_tokens(backend, directory, config)
    else:
        backend, specials = _load_with_transformers(directory)
    # Either may be stored in the file as a left-over of training.
    backend.no_truncation()
    backend.no_padding()
    check_decoder(backend, str(path))
    return backend, specials


def _load_with_transformers(directory: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    names = (
        "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
        "tokenizer_config.json",
    )  # fmt: skip
    if not any((directory / name).is_file() for name in names):
        raise ModelNotFoundError(
            f"{directory} has no tokenizer: neither tokenizer.json nor an older form; with skip_tokenizer_init the "
            "engine takes and gives token ids alone"
        )

    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        backend = slow.backend_tokenizer
    except BaseException as e:  # whatever an arbitrary tokenizer class raises, and panics
        if not isinstance(e, Exception) and not _is_panic(e):
            raise
        raise ModelError(f"{directory} has no tokenizer.json, and transformers cannot convert it: {e}") from e
    return backend, {name: str(token) for name, token in slow.special_tokens_map.items() if isinstance(token, str)}


def _choose_template(name: str, templates: Mapping[str, str]) -> str:
    """The source in the file of that path or, where there is none, of the model's template of that name."""
    if name in templates and not Path(name).exists():
        return templates[name]
    try:
        return _read_template_file(Path(name))
    except ConfigError as e:
        known = f"; the model's own are {', '.join(map(excerpt, templates))}" if templates else ""
        raise ConfigError(f"{e}{known}") from e


def _read_template_file(path: Path) -> str:
    import jinja2

    try:
        source = path.read_text(encoding="utf-8")
        sandbox_program.compile_template(source)
    except (OSError, UnicodeDecodeError, jinja2.TemplateSyntaxError) as e:
        raise ConfigError(f"cannot use the chat template {path}: {e}") from e
    return source


PLACEHOLDER_EOS_TOKEN_ID = 256
_PLACEHOLDER_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def placeholder_tokenizer(vocab_size: int) -> Tokenizer:
    """Make a tokenizer for models without text (random weights, the simulated device): every id has some text, and any
    text has ids.

    Text is encoded as its bytes, ids 0..255; 256 is the end of a sequence; the others are short words.
    """
    from tokenizers import decoders, models, pre_tokenizers

    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    pairs = [a + b for a in syllables for b in syllables]
    words = ("Ġ" + pairs[i % len(pairs)] + pairs[i // len(pairs)][: 4 * (i >= len(pairs))] for i in range(vocab_size))
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", *words][:vocab_size]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.add_special_tokens(["<eos>"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, specials={"eos_token": "<eos>"}, chat_templates={"default": _PLACEHOLDER_TEMPLATE})
