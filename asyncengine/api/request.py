"""Requests: prompts and sampling parameters, plain and immutable values that go into the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, TypeVar

from asyncengine.api.checks import integer, number, quoted, sequence
from asyncengine.api.conversation import Conversation
from asyncengine.api.structured_outputs import FIELDS, JsonModel, StructuredOutputs, wrong_structure
from asyncengine.api.token_sets import TokenSet
from asyncengine.errors import InvalidRequestError

T = TypeVar("T")

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 1024
MAX_NGRAM = 1024
MAX_LOGPROBS = 128
MAX_NAMED_TOKENS = 32
_FEATURES = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "no_repeat_ngram_size",
    "logprobs",
    "logprob_token_ids",
    "prompt_logprobs",
    "structured_outputs",
    "logits_processor",
)
_NEUTRAL: dict[str, Any] = dict.fromkeys(_FEATURES, 0) | {
    "repetition_penalty": 1.0,
    **dict.fromkeys(("allowed_token_ids", "logprobs", "prompt_logprobs", "structured_outputs", "logits_processor")),
}
"""Values of the features that ask for nothing. An empty collection asks for nothing either."""
_FLAGS = (
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "detokenize",
)
TRUNCATION_SIDES = ("left", "right")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
LONG_TEXT = 8192
"""Longer text is tokenized on a thread, without the interpreter's lock: about 1 ms of the event loop's time."""
MAX_SEED = 2**63 - 1


class ChatMessage(TypedDict):
    """One turn of a conversation, as chat templates take it."""

    role: str
    content: str | Sequence[Mapping[str, Any]]
    """Text, or parts such as {"type": "text", "text": ...}, whose texts are put together."""


#: Text, token ids, or a conversation that the model's chat template turns into text.
Prompt = str | Sequence[int] | Sequence[ChatMessage] | Sequence[Mapping[str, Any]] | Conversation


@dataclass(frozen=True, slots=True)
class Truncation:
    """Truncation of a prompt that has too many tokens. Wrong values raise InvalidRequestError."""

    tokens: int | None = None
    """Tokens to keep; -1: as many as the context has room for; None: all."""
    side: str = "left"
    """The side on which tokens are left out."""

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens != -1:
            integer("truncate_prompt_tokens", self.tokens, 1, 2**31 - 1)
        if self.side not in TRUNCATION_SIDES:
            raise InvalidRequestError(
                f"truncation_side must be left or right, got {quoted(self.side)}", param="truncation_side"
            )

    def kept(self, context: int, places: int) -> Kept | None:
        """Return how much of a prompt is kept in a context of which the output takes ``places`` tokens; None: all of
        it."""
        if self.tokens is None or self.tokens > context:  # it is refused if it has more than the context
            return None
        return Kept(max(1, context - places) if self.tokens == -1 else self.tokens, self.side)


@dataclass(frozen=True, slots=True)
class Kept:
    """The tokens that a truncated prompt keeps."""

    count: int
    side: str

    def of(self, ids: Sequence[T]) -> Sequence[T]:
        """The part of ``ids`` that is kept."""
        return ids[-self.count :] if self.side == "left" else ids[: self.count]


#: Gets the token ids so far, prompt and output, and logits, a NumPy array float32 [vocabulary] to change in place, as
#: they are after penalties, biases and bans. May return others in their place. It runs on a thread
#: and has 30 s for each token.
LogitsProcessor = Callable[[Sequence[int], Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings for sampling tokens and ending a sequence. Names follow OpenAI's API and vLLM.

    Every value is checked here; a wrong one raises InvalidRequestError that names the field.
    """

    n: int = 1
    """Sequences to sample from the prompt, 1..128."""
    max_tokens: int | None = 16
    """Tokens to generate at most. Exactly so many are made unless a stop comes first; None: to the end of the context,
    or of a KV cache that holds less. 0: the prompt is only computed, as for its log probabilities."""
    temperature: float = 1.0
    """0 is greedy; at most 2."""
    top_p: float = 1.0
    """Share of probability to keep. The smallest set of tokens whose probability reaches top_p, in
    (0, 1], is kept. Holtzman et al. 2020."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less probable than min_p times the most probable one, in [0, 1]. Nguyen et al. 2024."""
    seed: int | None = None
    """The same seed and prompt make the same output. They do so whatever else runs. Sequence i of n uses seed + i.
    None: drawn anew."""
    stop: str | Sequence[str] | None = None
    """Strings that end the sequence. At most 16 of 1,024 characters; not part of the text."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the sequence, at most 1,024 besides the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token (stop and stop_token_ids still end it)."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    kept_special_tokens: Sequence[int] = ()
    """Special tokens, at most 32, that skip_special_tokens keeps, such as the markers of tool calls."""
    include_stop_str_in_output: bool = False
    """Keep the stop string that ended the sequence in its text."""
    spaces_between_special_tokens: bool = True
    """This field has no effect: the tokenizers library puts no spaces between special tokens."""
    detokenize: bool = True
    """Make text of the tokens; without it the text is empty, and stop strings are refused."""
    truncate_prompt_tokens: int | None = None
    """Keep so many tokens of the prompt; -1: as many as the context has room for. If a text is much longer than the
    context, only as much is tokenized as they need."""
    truncation_side: str = "left"
    """The side on which truncate_prompt_tokens works: left keeps the last tokens, right the first."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token of the output so far, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token as often as the output has it, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens of prompt and output are divided by it, negative ones multiplied; in (0, 2]. Keskar et
    al. 2019. Comes before the other penalties, and they before biases."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of tokens, at most 1,024 of them, each in [-100, 100]."""
    allowed_token_ids: Sequence[int] | None = None
    """No other token may be sampled; None allows all."""
    bad_words: Sequence[str] = ()
    """Words that may not be completed, at most 256 of 1,024 characters; each also as it follows a space. With that the
    words may have 1,024 tokens in all, a word counting one more."""
    min_tokens: int = 0
    """No token or string ends the sequence before it has so many."""
    no_repeat_ngram_size: int = 0
    """No so many tokens come twice in a row in prompt and output; 0 allows that, at most 1,024."""
    logprobs: int | None = None
    """Log probabilities of each sampled token and of so many most probable ones, up to EngineConfig.max_logprobs; None:
    none."""
    prompt_logprobs: int | None = None
    """Log probabilities of each token of the prompt but the first, and of so many most probable ones, up to
    EngineConfig.max_logprobs; None: none. Tokens that the prefix cache knows are computed again."""
    logprob_start_len: int = 0
    """Tokens of the prompt before this one have no log probabilities, and may come from the prefix cache."""
    logprob_token_ids: Sequence[int] = ()
    """Further tokens, at most 32, whose log probabilities are wanted at each place."""
    logprobs_mode: str = "raw_logprobs"
    """raw_logprobs: of the model's logits. processed_logprobs: after penalties, biases, bans and temperature, before
    top_k, top_p and min_p."""
    structured_outputs: StructuredOutputs | Mapping[str, Any] | type[JsonModel] | None = None
    """A constraint that the text satisfies; for a model that reasons, the text after the reasoning does. The value may
    also be a mapping of the constraint's fields, or a pydantic class, whose JSON Schema the text satisfies."""
    logits_processor: LogitsProcessor | None = None
    """A callable that changes the logits of each token before it is drawn; see LogitsProcessor. Only this request waits
    for it. Tokens that other fields ban stay banned. If it raises, its request ends with LogitsProcessorError."""
    timeout: float | None = None
    """Seconds after which the request ends with what it has, the reason being "timeout". Without any token by then it
    fails with RequestTimeoutError."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "n", integer("n", self.n, 1, MAX_N))
        if self.max_tokens is not None:
            put(self, "max_tokens", integer("max_tokens", self.max_tokens, 0, 2**31 - 1))
        put(self, "temperature", number("temperature", self.temperature, 0, 2))
        put(self, "top_p", number("top_p", self.top_p, 0, 1, open_low=True))
        put(self, "top_k", max(0, integer("top_k", self.top_k, -1, 2**31 - 1)))
        put(self, "min_p", number("min_p", self.min_p, 0, 1))
        if self.seed is not None:
            put(self, "seed", integer("seed", self.seed, -(2**63), MAX_SEED))
        put(self, "stop", self._checked_stop())
        given = () if self.stop_token_ids is None else self.stop_token_ids
        stop_ids = sequence("stop_token_ids", given, MAX_STOP_TOKENS, "tokens")
        put(self, "stop_token_ids", tuple(integer("stop_token_ids", t, 0, 2**31 - 1) for t in stop_ids))
        self._check_edits()
        self._check_logprobs()
        self._check_structure()
        self._check_processor()
        Truncation(self.truncate_prompt_tokens, self.truncation_side)
        if self.timeout is not None:
            put(self, "timeout", number("timeout", self.timeout, 0, 1e6, open_low=True))
        if not self.detokenize and self.stop:
            raise InvalidRequestError("stop needs text: it conflicts with detokenize=False", param="stop")
        for flag in _FLAGS:
            value = getattr(self, flag)
            if not isinstance(value, bool):
                raise InvalidRequestError(f"{flag} must be a boolean, got {quoted(value)}", param=flag)

    def _check_edits(self) -> None:
        put = object.__setattr__
        for name in ("presence_penalty", "frequency_penalty"):
            put(self, name, number(name, getattr(self, name), -2, 2))
        put(self, "repetition_penalty", number("repetition_penalty", self.repetition_penalty, 0, 2, open_low=True))
        put(self, "logit_bias", self._checked_bias())
        if self.allowed_token_ids is not None:
            allowed = TokenSet.checked("allowed_token_ids", self.allowed_token_ids, 2**20)
            if not allowed:
                raise InvalidRequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
            put(self, "allowed_token_ids", allowed)
        words = sequence("bad_words", () if self.bad_words is None else self.bad_words, MAX_BAD_WORDS, "words")
        for word in words:
            if not isinstance(word, str) or not 0 < len(word) <= MAX_STOP_LENGTH:
                raise InvalidRequestError(
                    f"bad_words must hold strings of 1 to {MAX_STOP_LENGTH} characters, got {quoted(word)}",
                    param="bad_words",
                )
        put(self, "bad_words", words)
        put(self, "min_tokens", integer("min_tokens", self.min_tokens, 0, 2**31 - 1))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens})", param="min_tokens"
            )
        put(self, "no_repeat_ngram_size", integer("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, MAX_NGRAM))

    def _checked_bias(self) -> dict[int, float]:
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise InvalidRequestError(f"logit_bias must be a mapping, got {quoted(bias)}", param="logit_bias")
        if len(bias) > MAX_BIASES:
            raise InvalidRequestError(f"logit_bias: at most {MAX_BIASES} tokens are allowed", param="logit_bias")
        tokens = [integer("logit_bias", token, 0, 2**31 - 1) for token in bias]
        return {t: number("logit_bias", v, -100, 100) for t, v in zip(tokens, bias.values(), strict=True)}

    def _check_logprobs(self) -> None:
        put = object.__setattr__
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(self, name, integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        put(self, "logprob_start_len", integer("logprob_start_len", self.logprob_start_len, 0, 2**31 - 1))
        given = () if self.logprob_token_ids is None else self.logprob_token_ids
        named = sequence("logprob_token_ids", given, MAX_NAMED_TOKENS, "tokens")
        put(self, "logprob_token_ids", tuple(integer("logprob_token_ids", token, 0, 2**31 - 1) for token in named))
        kept = sequence("kept_special_tokens", self.kept_special_tokens, MAX_NAMED_TOKENS, "tokens")
        put(self, "kept_special_tokens", tuple(integer("kept_special_tokens", token, 0, 2**31 - 1) for token in kept))
        if self.logprobs_mode not in LOGPROBS_MODES:
            known = " or ".join(LOGPROBS_MODES)
            raise InvalidRequestError(
                f"logprobs_mode must be {known}, got {quoted(self.logprobs_mode)}", param="logprobs_mode"
            )

    def _check_structure(self) -> None:
        asked: object = self.structured_outputs
        if isinstance(asked, type) and issubclass(asked, JsonModel):
            object.__setattr__(self, "structured_outputs", StructuredOutputs(json=asked))
        elif isinstance(asked, Mapping):
            unknown = [name for name in asked if name not in FIELDS]
            if unknown:
                raise wrong_structure(f"unknown field {quoted(unknown[0])}")
            object.__setattr__(self, "structured_outputs", StructuredOutputs(**asked))
        elif asked is not None and not isinstance(asked, StructuredOutputs):
            raise wrong_structure(f"StructuredOutputs or a mapping is needed, got {quoted(asked)}")
        if asked is None:
            return
        for name, neutral in (("ignore_eos", False), ("min_tokens", 0), ("allowed_token_ids", None)):
            if getattr(self, name) != neutral:
                raise wrong_structure(f"{name} conflicts with it: the grammar says what the text holds, and its end")

    @property
    def structure(self) -> StructuredOutputs | None:
        """``structured_outputs``, whatever it was made of."""
        made = self.structured_outputs
        assert made is None or isinstance(made, StructuredOutputs)  # since the values were checked
        return made

    def _check_processor(self) -> None:
        processor = self.logits_processor
        if processor is None:
            return
        if not callable(processor):
            raise InvalidRequestError(
                f"logits_processor must be callable, got {quoted(processor)}", param="logits_processor"
            )
        conflicts = {
            "structured_outputs": self.structured_outputs is not None,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "max_tokens=0": self.max_tokens == 0,
            "logprobs_mode='processed_logprobs'": self.wants_logprobs and self.logprobs_mode == "processed_logprobs",
        }
        for name, conflict in conflicts.items():
            if conflict:
                raise InvalidRequestError(f"logits_processor conflicts with {name}", param="logits_processor")

    @property
    def truncation(self) -> Truncation:
        """Truncation of the prompt."""
        return Truncation(self.truncate_prompt_tokens, self.truncation_side)

    @property
    def penalized(self) -> bool:
        """True if a penalty changes logits."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def contradiction(self) -> tuple[str, str] | None:
        """A field that says which tokens may come, and one that bans tokens. They may leave none between them."""
        allows = ("structured_outputs", "allowed_token_ids")
        allowing = next((name for name in allows if getattr(self, name) is not None), None)
        bans = ("bad_words", "no_repeat_ngram_size", "min_tokens")
        banning = next((name for name in bans if getattr(self, name)), None)
        return None if allowing is None or banning is None else (allowing, banning)

    @property
    def features(self) -> tuple[str, ...]:
        """The fields that ask for more than plain sampling and that not every device serves."""
        return tuple(name for name, neutral in _NEUTRAL.items() if getattr(self, name) not in (neutral, (), {}))

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None or bool(self.logprob_token_ids)

    def _checked_stop(self) -> tuple[str, ...]:
        stop = self.stop
        if stop is None:
            return ()
        strings = (stop,) if isinstance(stop, str) else sequence("stop", stop, MAX_STOP_STRINGS, "strings")
        for s in strings:
            if not isinstance(s, str) or not s:
                raise InvalidRequestError(f"stop must hold non-empty strings, got {quoted(s)}", param="stop")
            if len(s) > MAX_STOP_LENGTH:
                raise InvalidRequestError(
                    f"stop: at most {MAX_STOP_LENGTH} characters a string, got {len(s)}", param="stop"
                )
        return strings

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return self.stop  # type: ignore[return-value]  # __post_init__ made it a tuple
