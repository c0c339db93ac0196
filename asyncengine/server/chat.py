"""/v1/chat/completions: a conversation in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from asyncengine.api.conversation import Conversation
from asyncengine.api.outputs import CompletionOutput, FinishReason, RequestOutput
from asyncengine.api.request import Prompt, SamplingParams
from asyncengine.errors import InvalidRequestError
from asyncengine.server.chat_chunks import ChatFormat, DetailedFormat, ParsedFormat
from asyncengine.server.chat_messages import Message, as_messages
from asyncengine.server.config import ServerConfig
from asyncengine.server.effort import with_effort, with_verbosity
from asyncengine.server.errors import ApiError, bad_request
from asyncengine.server.functions import as_functions, check_functions, function_use, name_as_functions
from asyncengine.server.generation import Endpoint, Job, joined
from asyncengine.server.logprobs import ChatLogProbs, PromptLogProb
from asyncengine.server.parsing import ParsedCall, ParsedOutput, parse
from asyncengine.server.parsing.choose import Parsing
from asyncengine.server.preparing import prepare
from asyncengine.server.protocol import BodyDecoder, GenerationBody, UsageBody, sampling_params
from asyncengine.server.sse import StreamFormat, encode
from asyncengine.server.tools import FunctionBody, NamedFunction, NamedTool, ToolBody, tool_use
from asyncengine.server.unserved import CHAT
from asyncengine.text.tokenizer import Tokenizer


class ChatBody(GenerationBody, kw_only=True):
    messages: list[Message] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionBody] | None = None
    """Once the request is prepared: empty where it has any, None where it has none."""
    function_call: str | NamedFunction | None = None
    echo: bool | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    include_reasoning: bool | None = None


_DECODER = BodyDecoder(ChatBody, CHAT)


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: dict[str, str] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same text, under vLLM's and OpenRouter's name."""
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogProbs | None = None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    service_tier: None = None
    kv_transfer_params: None = None
    prompt_logprobs: list[PromptLogProb] | None = None
    """The last member: ``Job.with_prompt_logprobs`` writes it."""


class Chat(Endpoint):
    id_prefix = "chatcmpl-"
    fields = _DECODER.fields
    chunk_format = ChatFormat

    def chunks(self, job: Job) -> StreamFormat:
        echo = _echo(job)
        if job.parsing is None:
            return DetailedFormat(job, echo) if job.detailed else ChatFormat(job, echo)
        return ParsedFormat(
            job, job.parsing, echo, with_reasoning=_tells_reasoning(job), with_functions=_has_functions(job)
        )

    def params(self, body: GenerationBody) -> SamplingParams:
        assert isinstance(body, ChatBody)
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        return sampling_params(body, logprobs=body.top_logprobs or 0 if body.logprobs else None)

    def parse(self, raw: bytes | bytearray, config: ServerConfig) -> tuple[GenerationBody, list[Prompt]]:
        body = _DECODER.decode(raw)
        check_functions(body.functions, body.function_call, body.tools)
        messages, body.messages = body.messages, None  # they would live as long as the request
        chat = Conversation(
            messages=as_messages(messages or ()),
            documents=body.documents or (),
            add_generation_prompt=not body.continue_final_message
            if body.add_generation_prompt is None
            else body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs or {},
        )
        body.documents = body.chat_template = body.chat_template_kwargs = None
        return body, [chat]

    def prepare(
        self, body: GenerationBody, prompts: list[Prompt], tokenizer: Tokenizer | None, config: ServerConfig
    ) -> tuple[list[Prompt], SamplingParams, Parsing | None]:
        assert isinstance(body, ChatBody)
        (chat,) = prompts
        assert isinstance(chat, Conversation)
        if body.reasoning_effort is not None:
            chat = with_effort(chat, body.reasoning_effort, tokenizer, "reasoning_effort")
        if body.verbosity is not None:
            chat = with_verbosity(chat, body.verbosity, tokenizer, "verbosity")
        functions, body.functions = body.functions, [] if body.functions else None
        if functions:
            use = function_use(functions, body.function_call)
        else:
            use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
        body.tools = None
        try:
            prepared = prepare(chat, use, self.params(body), tokenizer, config)
        except ApiError as exc:
            raise as_functions(exc) if functions else exc from None
        return [prepared.prompt], prepared.params, prepared.parsing

    def name_as_asked(self, exc: InvalidRequestError, body: GenerationBody, grammar: str | None = None) -> None:
        super().name_as_asked(exc, body, grammar)
        assert isinstance(body, ChatBody)
        if body.functions is not None:
            name_as_functions(exc)

    def pieces(self, job: Job, outputs: list[RequestOutput]) -> Iterator[bytes]:
        answer = ChatCompletion(
            id=job.id,
            created=job.created,
            model=job.model,
            system_fingerprint=job.fingerprint,
            choices=[],
            usage=UsageBody.of([output.usage for output in outputs], _reasoning_tokens(job, outputs)),
            prompt_token_ids=outputs[0].prompt_token_ids if job.body.return_token_ids else UNSET,
        )
        begin, end = encode(answer).split(b'"choices":[]')  # no string has it: quotes within them are escaped
        yield begin + b'"choices":['
        for i, (output, sequence) in enumerate((each, s) for each in outputs for s in each.outputs):
            if i:
                yield b","
            yield from _choice(job, i, output, sequence)
        yield from job.with_prompt_logprobs(b"]" + end, outputs[0])


def _choice(job: Job, index: int, output: RequestOutput, sequence: CompletionOutput) -> Iterator[bytes]:
    """One choice of a response as JSON, in parts."""
    parsed = _answer(job, output, sequence)
    choice = encode(
        ChatChoice(
            index=index,
            message=_message(job, parsed),
            finish_reason=_finish_reason(job, parsed, sequence.finish_reason),
            stop_reason=sequence.stop_reason,
            token_ids=sequence.token_ids if job.body.return_token_ids else UNSET,
        )
    )
    if job.choice_logprobs is None:
        yield choice
        return
    begin, end = choice.split(b'"logprobs":null')
    yield begin + b'"logprobs":{"content":['
    prompt = output.prompt_token_ids
    yield from joined(encode(batch.content)[1:-1] for batch in job.choice_logprobs.chat(index, sequence, prompt))
    yield b'],"refusal":null}' + end


def _answer(job: Job, output: RequestOutput, sequence: CompletionOutput) -> ParsedOutput:
    if job.parsing is None:
        return ParsedOutput(sequence.text, "", [])
    parser = job.parsing.parser(job.tokenizer, output.prompt_token_ids)
    return parse(parser, sequence.text, cut=sequence.finish_reason != FinishReason.STOP)


def _is_forced(job: Job) -> bool:
    return job.parsing is not None and bool(job.parsing.calls.forced)


def _message(job: Job, parsed: ParsedOutput) -> AssistantMessage:
    reasoning = (parsed.reasoning if _tells_reasoning(job) else "") or None
    content, calls = _echo(job) + parsed.content, parsed.tool_calls
    message = AssistantMessage(
        content=None if not content and (calls or _is_forced(job)) else content,
        reasoning_content=reasoning,
        reasoning=reasoning,
    )
    if calls and _has_functions(job):
        message.function_call = {"name": calls[0].name, "arguments": calls[0].arguments}
    elif calls:
        message.tool_calls = [_call(call) for call in calls]
    return message


def _echo(job: Job) -> str:
    """The last message's content, for the beginning of the answer: of one that is the assistant's, or is continued."""
    (prompt,) = job.prompts
    if not isinstance(job.body, ChatBody) or not job.body.echo:
        return ""
    continues = isinstance(prompt, Conversation) and prompt.continue_final_message
    last: Any = prompt.messages[-1] if isinstance(prompt, Conversation) else prompt[-1]
    return last.get("content") or "" if continues or last["role"] == "assistant" else ""


def _has_functions(job: Job) -> bool:
    return isinstance(job.body, ChatBody) and job.body.functions is not None


def _call(call: ParsedCall) -> dict[str, Any]:
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tells_reasoning(job: Job) -> bool:
    return isinstance(job.body, ChatBody) and job.body.include_reasoning is not False


def _finish_reason(job: Job, parsed: ParsedOutput, reason: FinishReason) -> str:
    if not parsed.tool_calls or reason != FinishReason.STOP or parsed.unfinished:
        return reason
    return "function_call" if _has_functions(job) else "tool_calls"


def _reasoning_tokens(job: Job, outputs: list[RequestOutput]) -> int | None:
    """Count the reasoning tokens of all choices; None where they are not counted."""
    if job.parsing is None:
        return None
    total = None
    for output in outputs:
        for sequence in output.outputs:
            counter = job.parsing.reasoning_tokens(job.tokenizer, output.prompt_token_ids)
            if counter is not None:
                counter.push(sequence.token_ids)
                total = (total or 0) + counter.count
    return total
