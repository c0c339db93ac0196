"""Conversion of a prompt, whatever its form, to checked token ids, without holding up the event loop.

A short text is tokenized at once. A longer one goes to the engine's own threads, a conversation to the process that
renders chat templates. All of them together hold a limited amount of text, and none is tokenized that cannot fit. A
text that is truncated is tokenized up to as many characters as the context can hold.
"""

from __future__ import annotations

import asyncio
import hashlib
import operator
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from asyncengine.api.checks import quoted
from asyncengine.api.conversation import Conversation
from asyncengine.api.request import LONG_TEXT, Kept, Prompt, SamplingParams, Truncation
from asyncengine.errors import ContextLengthError, EngineOverloadedError, InvalidRequestError, KVCapacityError
from asyncengine.text.sandbox import SandboxProcess, render_message
from asyncengine.text.sandbox_program import PIECE, TooLongError
from asyncengine.text.threads import TextThreads
from asyncengine.text.tokenizer import Tokenizer, check_unicode, cut_open, too_many_tokens

if TYPE_CHECKING:
    from asyncengine.api.model_info import ModelInfo
    from asyncengine.config import EngineConfig

MAX_PRIORITY = 1000
_KEPT_WORDS = 8
"""Lists of words whose tokens are kept: those of requests that are being submitted."""
_PER_MESSAGE = 16
"""Characters that a message counts for beside its content."""


class Prompts:
    """Converter of an engine's prompts to token ids. All methods belong to the engine's event loop."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, model: ModelInfo) -> None:
        self._tokenizer = tokenizer
        self._loop = asyncio.get_running_loop()
        self._context = model.max_model_len
        self._vocab_size = model.vocab_size
        self._max_characters = self._context * (tokenizer.longest_token if tokenizer is not None else 0)
        self._max_held = config.max_queued_characters
        self._held = 0
        self._words: OrderedDict[tuple[str, ...], asyncio.Future[list[list[int]]]] = OrderedDict()
        self._threads = TextThreads()
        self._sandbox: SandboxProcess | None = None
        if config.sandbox and tokenizer is not None:  # the first prompt that needs the process starts it
            self._sandbox = SandboxProcess(tokenizer.description, config.sandbox_timeout_s)
        _live.add(self)

    @property
    def held_characters(self) -> int:
        """Characters of the prompts that are being tokenized or wait for it."""
        return self._held

    async def token_ids(self, prompt: Prompt, kept: Kept | None = None, add_special_tokens: bool = True) -> list[int]:
        """``kept``: those of a prompt that is truncated, of any length.

        Raises InvalidRequestError, ContextLengthError, EngineOverloadedError, EngineClosedError.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequestError("the prompt is empty", param="prompt")
            return await self._encode(prompt, self._text_tokenizer("prompt"), add_special_tokens, kept)
        if isinstance(prompt, Conversation):
            return await self._encode_chat(prompt, self._text_tokenizer("messages"), kept)
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise InvalidRequestError(
                f"the prompt must be text, token ids or messages, got {type(prompt).__name__}", param="prompt"
            )
        if len(prompt) > 0 and isinstance(prompt[0], dict):
            chat = Conversation(messages=prompt)  # type: ignore[arg-type]
            return await self._encode_chat(chat, self._text_tokenizer("messages"), kept)
        ids: Sequence[Any] = prompt if kept is None else kept.of(prompt)
        check_length(len(ids), self._context, 0)  # before looking at each of millions
        return _checked_ids(ids, self._vocab_size)

    async def words(self, words: Sequence[str], param: str) -> list[list[int]]:
        """Token ids of each word, as it begins a text and as it follows a space, each once.

        Raises InvalidRequestError that names ``param``, EngineOverloadedError, EngineClosedError.
        """
        if not words:
            return []
        tokenizer, key = self._text_tokenizer(param), tuple(words)
        # The prompts of a request have the same words: they are tokenized once.
        if (making := self._words.get(key)) is None:
            making = self._words[key] = asyncio.ensure_future(self._encode_words(key, tokenizer, param))
            making.add_done_callback(partial(self._forget_words, key))
            if len(self._words) > _KEPT_WORDS:
                self._words.popitem(last=False)
        return await asyncio.shield(making)

    def check_parts(self, *parts: str | Sequence[int]) -> None:
        """Raises ContextLengthError if texts, or token ids, cannot fit together: before they are put together."""
        count = sum(map(len, parts))
        if isinstance(parts[0], str):
            self._text_tokenizer("prompt")
            self._check_characters(count)
        else:
            check_length(count, self._context, 0)

    def check_stop_strings(self, params: SamplingParams) -> None:
        """Raises InvalidRequestError for stop strings where there is no text to search."""
        if params.stop_strings:
            self._text_tokenizer("stop")

    def release(self) -> None:
        """End idle threads and the idle process; the next prompt that needs them starts others."""
        self._threads.release()
        if self._sandbox is not None:
            self._sandbox.release()

    async def aclose(self) -> None:
        """End the process and let the threads end; prompts under way fail with EngineClosedError. Idempotent."""
        self._threads.close()
        if self._sandbox is not None:
            await self._sandbox.aclose()

    # ---- inside ----

    def _text_tokenizer(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"{param}: this engine has no tokenizer (skip_tokenizer_init): it takes and gives token ids alone",
                param=param,
            )
        return self._tokenizer

    async def _encode(self, text: str, tokenizer: Tokenizer, add_special_tokens: bool, kept: Kept | None) -> list[int]:
        if kept is None:
            self._check_characters(len(text))
        text = self._part(text, kept)
        if len(text) <= LONG_TEXT and (tokenizer.is_linear or self._sandbox is None):
            return tokenizer.encode(text, add_special_tokens, kept=kept)
        with self._hold(len(text)):
            return await self._encode_elsewhere(text, tokenizer, add_special_tokens, kept)

    def _part(self, text: str, kept: Kept | None) -> str:
        """The end or the beginning of a text, as much as may be tokenized of it."""
        most = self._max_characters + PIECE
        if kept is None or len(text) <= most:
            return text
        return text[-most:] if kept.side == "left" else text[:most]

    async def _encode_elsewhere(
        self, text: str, tokenizer: Tokenizer, add_special_tokens: bool, kept: Kept | None
    ) -> list[int]:
        if self._sandbox is None or tokenizer.is_linear:
            return await self._threads.run(len(text), tokenizer.encode, text, add_special_tokens, self._context, kept)
        check_unicode(text)
        try:
            return await self._sandbox.encode(text, add_special_tokens, self._context, kept)
        except TooLongError as e:
            raise too_many_tokens(e.count, self._context) from None

    async def _encode_words(self, words: Sequence[str], tokenizer: Tokenizer, param: str) -> list[list[int]]:
        texts = []
        for word in words:
            bare = word.lstrip(" ")
            texts += [bare, " " + bare] if bare else [word]
        size = sum(map(len, texts))
        try:
            if size <= LONG_TEXT and (tokenizer.is_linear or self._sandbox is None):
                found = tokenizer.encode_all(texts)
            else:
                with self._hold(size):
                    found = await self._encode_words_elsewhere(texts, size, tokenizer, param)
        except InvalidRequestError as e:
            e.param = param
            raise
        return [list(ids) for ids in dict.fromkeys(map(tuple, found)) if ids]

    async def _encode_words_elsewhere(
        self, texts: Sequence[str], size: int, tokenizer: Tokenizer, param: str
    ) -> list[list[int]]:
        if self._sandbox is None or tokenizer.is_linear:
            return await self._threads.run(size, tokenizer.encode_all, texts)
        for text in texts:
            check_unicode(text)
        return await self._sandbox.encode_all(texts, 4 * size + 16 * len(texts), param)

    def _forget_words(self, words: tuple[str, ...], making: asyncio.Future[list[list[int]]]) -> None:
        """Forget words whose tokenization failed: the next request tries again."""
        if (making.cancelled() or making.exception() is not None) and self._words.get(words) is making:
            del self._words[words]

    async def _encode_chat(self, chat: Conversation, tokenizer: Tokenizer, kept: Kept | None) -> list[int]:
        messages = chat.messages
        if len(messages) > self._context and kept is None:
            raise ContextLengthError(
                f"This model's maximum context length is {self._context} tokens. "
                f"The prompt has {len(messages)} messages.",
                param="messages",
            )
        characters, simple = _measure(chat)
        most = self._max_characters if kept is None else max(self._max_characters, self._max_held)
        if characters > most:
            raise self._too_many_characters(characters, most)
        size = characters + _PER_MESSAGE * len(messages)
        short = simple and size <= LONG_TEXT
        if self._sandbox is None:
            if short:
                return self._chat_here(chat, tokenizer, most, kept)
            with self._hold(size):
                return await self._threads.run(size, self._chat_here, chat, tokenizer, most, kept)
        with self._hold(size):
            if short:
                message = self._render_message(chat, tokenizer, most)
            else:
                message = await self._threads.run(size, self._render_message, chat, tokenizer, most)
            try:
                with self._hold(max(0, len(message) - size)):  # tools and the like
                    text = await self._sandbox.render(message, most)
            except TooLongError as e:
                raise self._too_many_characters(e.count, most) from None
            text = self._part(cut_open(chat, text), kept)
            # Templates write all special tokens themselves, so none is added.
            if len(text) <= LONG_TEXT and tokenizer.is_linear:
                return tokenizer.encode(text, add_special_tokens=False, kept=kept)
            return await self._encode_elsewhere(text, tokenizer, False, kept)

    def _render_message(self, chat: Conversation, tokenizer: Tokenizer, most: int) -> bytes:
        return render_message(*tokenizer.chat(chat), most)

    def _chat_here(self, chat: Conversation, tokenizer: Tokenizer, most: int, kept: Kept | None) -> list[int]:
        text = tokenizer.render(chat)
        if len(text) > most:
            raise self._too_many_characters(len(text), most)
        return tokenizer.encode(self._part(text, kept), add_special_tokens=False, limit=self._context, kept=kept)

    def _check_characters(self, count: int) -> None:
        if count > self._max_characters:
            raise self._too_many_characters(count, self._max_characters)

    def _too_many_characters(self, count: int, most: int) -> ContextLengthError:
        if most > self._max_characters:
            message = f"A chat that is truncated may have {most} characters. The prompt has {count} or more."
            return ContextLengthError(message, param="messages")
        return ContextLengthError(
            f"This model's maximum context length is {self._context} tokens, which are {self._max_characters} "
            f"characters at the very most. The prompt has {count} characters or more.",
            param="prompt",
        )

    @contextmanager
    def _hold(self, characters: int) -> Iterator[None]:
        """Count a text that waits. A text longer than the limit waits alone."""
        if self._held and self._held + characters > self._max_held:
            raise EngineOverloadedError("the queue is full: too much text is waiting to be tokenized")
        self._held += characters
        try:
            yield
        finally:
            self._held -= characters


_live: WeakSet[Prompts] = WeakSet()


def release_idle() -> None:
    """``release`` for every engine of the running event loop."""
    loop = asyncio.get_running_loop()
    for prompts in list(_live):
        if prompts._loop is loop:
            prompts.release()


def _measure(chat: Conversation) -> tuple[int, bool]:
    """Characters of the messages' text, and whether that is all there is: other values may have any size."""
    characters = 0
    simple = not (chat.tools or chat.documents or chat.chat_template or chat.chat_template_kwargs)
    for message in chat.messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            characters += len(content)
        simple = simple and isinstance(content, str) and len(message) == 2
    return characters, simple


# ---- checks of what the prompt and its parameters ask for ----


def check_length(length: int, context: int, places: int) -> None:
    """Raises InvalidRequestError for no tokens, ContextLengthError where the context lacks ``places`` for an output."""
    if length == 0:
        raise InvalidRequestError("the prompt has no tokens", param="prompt")
    if length + min(places, 1) > context:
        raise ContextLengthError(
            f"This model's maximum context length is {context} tokens. The prompt has {length} tokens"
            + (", which leaves no room for the output." if places else "."),
            param="prompt",
        )


def check_size(model: ModelInfo, prompt_ids: list[int], params: SamplingParams) -> int:
    """Tokens that the core is to generate at most, or the typed error that says why the request cannot be served.

    The core samples a token after every prompt. One that nobody asked for takes no place.
    """
    length, context, capacity = len(prompt_ids), model.max_model_len, model.kv_capacity_tokens
    places = _output_places(params)
    check_length(length, context, places)
    if params.max_tokens is None:
        places = max(1, min(context, capacity) - length)
    if length + places > context:
        raise ContextLengthError(
            f"This model's maximum context length is {context} tokens. The request asks for {length + places} "
            f"tokens: {length} of the prompt and {places} of the output (max_tokens).",
            param="max_tokens",
        )
    if length + places > capacity:
        raise KVCapacityError(
            f"the request needs KV for {length + places} tokens, the cache holds {capacity}; "
            "raise kv_cache_memory_bytes or lower max_tokens",
            param="max_tokens",
        )
    return max(1, places)


def kept_tokens(truncation: Truncation, params: SamplingParams, model: ModelInfo) -> Kept | None:
    """Return how much of a prompt is kept beside the output that ``params`` ask for; None: all of it."""
    return truncation.kept(model.max_model_len, _output_places(params))


def _output_places(params: SamplingParams) -> int:
    """Places of the context that an output needs."""
    return 1 if params.max_tokens is None else params.max_tokens


def check_terms(priority: object, **names: object) -> None:
    """Raises InvalidRequestError unless the priority is in its range and each of the names a string or None."""
    if isinstance(priority, bool) or not isinstance(priority, int) or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority must be an integer in [-{MAX_PRIORITY}, {MAX_PRIORITY}], got {quoted(priority)}",
            param="priority",
        )
    for name, value in names.items():
        if value is not None and not isinstance(value, str):
            raise InvalidRequestError(f"{name} must be a string, got {quoted(value)}", param=name)


def check_vocabulary(ids: list[int], vocab_size: int) -> None:
    """A tokenizer may have tokens that the model has no embedding for: InvalidRequestError."""
    if (highest := max(ids, default=0)) >= vocab_size:
        raise InvalidRequestError(
            f"token id {highest} is outside the vocabulary of {vocab_size}: the tokenizer is larger", param="prompt"
        )


def stop_tokens(model: ModelInfo, params: SamplingParams) -> list[int]:
    """Tokens that end a sequence, each once. Raises InvalidRequestError for one outside the vocabulary."""
    for token in params.stop_token_ids:
        if token >= model.vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids: {token} is outside the vocabulary of {model.vocab_size}", param="stop_token_ids"
            )
    eos = () if params.ignore_eos else model.eos_token_ids
    return list(dict.fromkeys((*eos, *params.stop_token_ids)))


def hash_salt(cache_salt: str | None) -> int:
    """64 bits for the prefix index; 0 without a salt."""
    if cache_salt is None:
        return 0
    return int.from_bytes(hashlib.blake2b(cache_salt.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _checked_ids(ids: Sequence[Any], vocab_size: int) -> list[int]:
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return list(ids)  # nearly every prompt, checked without a step of Python for each id
    checked = []
    for i, value in enumerate(ids):
        try:
            token = None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            token = None
        if token is None:
            raise InvalidRequestError(f"the prompt must hold token ids, got {quoted(value)} at {i}", param="prompt")
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"token id {quoted(token)} at {i} is outside the vocabulary of {vocab_size}", param="prompt"
            )
        checked.append(token)
    return checked
