"""Log probabilities as OpenAI's clients read them: each leaves with the text that its token adds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from asyncengine.api.logprobs import LogProb, TokenLogProbs
from asyncengine.api.outputs import FinishReason
from asyncengine.api.request import SamplingParams
from asyncengine.text.detokenizer import IncrementalDetokenizer, token_bytes
from asyncengine.text.tokenizer import Tokenizer

_LOWEST = -9999.0
"""Value in place of -inf, which JSON lacks; OpenAI's value."""
_AT_ONCE = 4096
"""Log probabilities that become objects in one turn of the event loop: some 10 ms."""


class CompletionLogProbs(msgspec.Struct):
    """Lists with an element for each token."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)
    """Characters before the token in the text of the choice."""


class ChatLogProb(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogProbs(ChatLogProb):
    top_logprobs: list[ChatLogProb]


class ChatLogProbs(msgspec.Struct):
    content: list[ChatTokenLogProbs]
    refusal: None = None


class TokenLogProb(msgspec.Struct):
    """Log probability of a token at a place of a prompt, in vLLM's form."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogProb = dict[str, TokenLogProb] | None


class TokenNames:
    """Names of tokens in a response: their text, or their numbers."""

    def __init__(self, tokenizer: Tokenizer | None, by_number: bool) -> None:
        self._bytes = None if tokenizer is None or by_number else token_bytes(tokenizer)

    def alone(self, token_id: int) -> str:
        """The token's own text, in the form ``bytes:\\xe2\\x82`` where it is a part of a character."""
        if self._bytes is None:
            return f"token_id:{token_id}"
        raw = self._bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def in_place(self, token_id: int, text: str) -> str:
        """Return the name of a token that adds ``text``: the names of all tokens make up the text of the choice."""
        return f"token_id:{token_id}" if self._bytes is None else text

    def bytes_alone(self, token_id: int) -> list[int] | None:
        return None if self._bytes is None else list(self._bytes(token_id))

    def bytes_in_place(self, token_id: int, text: str) -> list[int] | None:
        """Return the bytes that the token adds: its own if it is a part of a character, else those of ``text``."""
        if self._bytes is None:
            return None
        raw = self._bytes(token_id)
        try:
            raw.decode()
        except UnicodeDecodeError:
            return list(raw)
        return list(text.encode())


@dataclass(slots=True)
class PlacedToken:
    """A token in the text of a choice."""

    token_id: int
    text: str
    """Text that the token adds."""
    offset: int
    data: TokenLogProbs | None
    """Log probabilities at the token; None: the first token of a prompt has none."""


class News(Protocol):
    """A RequestDelta or a CompletionOutput."""

    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> FinishReason | None: ...
    @property
    def stop_reason(self) -> str | int | None: ...
    @property
    def logprobs(self) -> Sequence[TokenLogProbs] | None: ...


class ChoiceLogProbs:
    """One choice. A token is held back while its text is; tokens of a stop string that is left out are left out."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        """``prompt``: the token ids that the text of the choice follows."""
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = IncrementalDetokenizer.of(tokenizer, params, prompt)
        self._keeps_end = params.include_stop_str_in_output
        self._coming: deque[Iterator[PlacedToken]] = deque()  # what is not placed yet, in order
        self._held: PlacedToken | None = None  # it is placed, and its text is not out
        self._offset = 0  # of the next token
        self._length = 0  # of the text so far
        self._last = self._ended_by_string = False
        self._end = ""  # of the text so far: that of the last news

    def begin(self, text: str, ids: Sequence[int], logprobs: Sequence[TokenLogProbs | None]) -> None:
        """The text of the choice begins with the prompt, ``text``."""
        self._coming.append(self._placed_prompt(len(text), ids, logprobs))
        self._length = len(text)

    def push(self, news: News) -> None:
        """Add news of the choice. ``take`` must have returned all tokens of the news before."""
        self._coming.append(self._placed(news))
        self._length += len(news.text)
        self._last = news.finish_reason is not None
        self._ended_by_string = isinstance(news.stop_reason, str)
        self._end = news.text

    def take(self, limit: int) -> list[PlacedToken]:
        """The next tokens whose text is out, at most so many; none when there are no more of them so far."""
        out: list[PlacedToken] = []
        while len(out) < limit and (token := self._next()) is not None and self._is_out(token):
            self._held = None
            if self._ended_by_string:
                token.text = token.text[: self._length - token.offset]
                if self._keeps_end and self._next() is None:  # a special token that ends the text shows only there
                    token.text = self._end[token.offset - self._length :]
            out.append(token)
        return out

    def _next(self) -> PlacedToken | None:
        while self._held is None and self._coming:
            self._held = next(self._coming[0], None)
            if self._held is None:
                self._coming.popleft()
        return self._held

    def _is_out(self, token: PlacedToken) -> bool:
        if self._last:
            return not self._ended_by_string or token.offset < self._length
        return token.offset + len(token.text) <= self._length

    def _placed_prompt(
        self, length: int, ids: Sequence[int], logprobs: Sequence[TokenLogProbs | None]
    ) -> Iterator[PlacedToken]:
        detokenizer = IncrementalDetokenizer(self._tokenizer, self._params.skip_special_tokens)
        for token, data in zip(ids, logprobs, strict=True):
            added = detokenizer.push([token])
            yield PlacedToken(token, added, self._offset, data)
            self._offset += len(added)
        self._offset = length

    def _placed(self, news: News) -> Iterator[PlacedToken]:
        tokens = news.logprobs or ()
        by_token = news.finish_reason is FinishReason.STOP and not isinstance(news.stop_reason, str)
        for left, data in zip(range(len(tokens) - 1, -1, -1), tokens, strict=True):
            last = left == 0 and news.finish_reason is not None
            # The token that ended the sequence is not part of its text.
            silent = last and by_token and not self._keeps_end
            text = "" if silent else self._detokenizer.push([data.token_id])
            if last:
                text += self._detokenizer.flush()
            yield PlacedToken(data.token_id, text, self._offset, data)
            self._offset += len(text)


class JobLogProbs:
    """Log probabilities of all choices of a response."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, by_number: bool) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._choices: dict[int, ChoiceLogProbs] = {}
        self._names = TokenNames(tokenizer, by_number)
        most = max(params.logprobs or 0, params.prompt_logprobs or 0) + len(params.logprob_token_ids)
        self._tokens_at_once = max(1, _AT_ONCE // (1 + most))

    def echo(self, index: int, text: str, ids: Sequence[int], logprobs: Sequence[TokenLogProbs | None] | None) -> None:
        """Choice ``index`` begins with its prompt."""
        self._choice(index, ids).begin(text, ids, logprobs or ())

    def prompt(self, logprobs: Sequence[TokenLogProbs | None]) -> Iterator[list[PromptLogProb]]:
        """Give a prompt's log probabilities as vLLM has them: those of some tokens at each place, by their ids, some at
        a time."""
        for first in range(0, len(logprobs), self._tokens_at_once):
            some = logprobs[first : first + self._tokens_at_once]
            yield [None if data is None else _of_prompt(data, self._names) for data in some]

    def completion(self, index: int, news: News, prompt: Sequence[int]) -> Iterator[CompletionLogProbs]:
        """Give the log probabilities of choice ``index`` whose text is out with this news, some at a time. ``prompt``
        are the token ids before the choice."""
        return (completion_logprobs(tokens, self._names) for tokens in self._batches(index, news, prompt))

    def chat(self, index: int, news: News, prompt: Sequence[int]) -> Iterator[ChatLogProbs]:
        """Give the log probabilities of chat completions, as ``completion`` does."""
        return (chat_logprobs(tokens, self._names) for tokens in self._batches(index, news, prompt))

    def placed(self, news: News, prompt: Sequence[int]) -> Iterator[list[PlacedToken]]:
        """The tokens of a response's only choice, as ``completion``. Their texts, joined, are that of the choice."""
        return self._batches(0, news, prompt)

    def told(self, tokens: Iterable[PlacedToken]) -> list[ChatTokenLogProbs]:
        """Return the tokens' log probabilities in the form of chat completions."""
        return chat_logprobs(tokens, self._names).content

    def _batches(self, index: int, news: News, prompt: Sequence[int]) -> Iterator[list[PlacedToken]]:
        choice = self._choice(index, prompt)
        choice.push(news)
        return iter(lambda: choice.take(self._tokens_at_once), [])

    def _choice(self, index: int, prompt: Sequence[int]) -> ChoiceLogProbs:
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = ChoiceLogProbs(self._tokenizer, self._params, prompt)
        return choice


def completion_logprobs(tokens: Iterable[PlacedToken], names: TokenNames) -> CompletionLogProbs:
    """Return log probabilities for /v1/completions. The chosen token is one of the top ones, by the same name."""
    out = CompletionLogProbs()
    for token in tokens:
        data = token.data
        name = names.in_place(token.token_id, token.text)
        out.tokens.append(name)
        out.text_offset.append(token.offset)
        if data is None:
            out.token_logprobs.append(None)
            out.top_logprobs.append(None)
            continue
        top = {name: _finite(data.logprob)}
        for other in _others(data):
            top.setdefault(names.alone(other.token_id), _finite(other.logprob))
        out.token_logprobs.append(_finite(data.logprob))
        out.top_logprobs.append(top)
    return out


def chat_logprobs(tokens: Iterable[PlacedToken], names: TokenNames) -> ChatLogProbs:
    """Return log probabilities for /v1/chat/completions."""
    return ChatLogProbs(
        [
            ChatTokenLogProbs(
                names.in_place(t.token_id, t.text),
                _finite(t.data.logprob),
                names.bytes_in_place(t.token_id, t.text),
                [
                    ChatLogProb(names.alone(x.token_id), _finite(x.logprob), names.bytes_alone(x.token_id))
                    for x in (*t.data.top, *t.data.named)
                ],
            )
            for t in tokens
            if t.data is not None
        ]
    )


def _of_prompt(data: TokenLogProbs, names: TokenNames) -> dict[str, TokenLogProb]:
    rank = {token.token_id: place for place, token in enumerate(data.top, 1)} | {data.token_id: data.rank}
    tokens = dict(((data.token_id, data.logprob), *data.top, *data.named))
    return {
        str(token): TokenLogProb(_finite(logprob), rank.get(token), names.alone(token))
        for token, logprob in tokens.items()
    }


def _others(data: TokenLogProbs) -> Iterator[LogProb]:
    return (other for other in (*data.top, *data.named) if other.token_id != data.token_id)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
