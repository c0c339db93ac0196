"""/v1/chat/completions: a conversation in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from asyncengine.conversation import Conversation
from asyncengine.request import CompletionOutput, Prompt, RequestOutput, SamplingParams
from asyncengine.server import protocol
from asyncengine.server.chat_chunks import ChatFormat, DetailedFormat, ParsedFormat
from asyncengine.server.config import ServerConfig
from asyncengine.server.effort import with_effort
from asyncengine.server.errors import bad_request
from asyncengine.server.generation import Endpoint, Job
from asyncengine.server.logprobs import ChatLogProbs, PromptLogProb
from asyncengine.server.messages import Message, as_messages
from asyncengine.server.parsing import parse
from asyncengine.server.parsing.choose import Parsing
from asyncengine.server.preparing import prepare
from asyncengine.server.protocol import NOTHING, BodyDecoder, GenerationBody, UsageBody, sampling_params
from asyncengine.server.sse import StreamFormat
from asyncengine.server.tools import NamedTool, ToolBody, tool_use
from asyncengine.tokenization import Tokenizer

_UNIMPLEMENTED: dict[str, tuple[object, ...]] = protocol.UNIMPLEMENTED | {
    "echo": (None, False),
    "functions": NOTHING,
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "add_special_tokens": (None, False),
}


class ChatBody(GenerationBody, kw_only=True):
    messages: list[Message] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


_DECODER = BodyDecoder(ChatBody, _UNIMPLEMENTED)


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogProbs | None = None
    finish_reason: str
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: list[PromptLogProb] | UnsetType = UNSET


class Chat(Endpoint):
    id_prefix = "chatcmpl-"
    chunk_format = ChatFormat

    def chunks(self, job: Job) -> StreamFormat:
        if job.parsing is not None:
            return ParsedFormat(job, job.parsing)
        return DetailedFormat(job) if job.detailed else super().chunks(job)

    def params(self, body: GenerationBody) -> SamplingParams:
        assert isinstance(body, ChatBody)
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        return sampling_params(body, logprobs=body.top_logprobs or 0 if body.logprobs else None)

    def parse(self, raw: bytes | bytearray, config: ServerConfig) -> tuple[GenerationBody, list[Prompt]]:
        body = _DECODER.decode(raw)
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
        use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
        body.tools = None
        prepared = prepare(chat, use, self.params(body), tokenizer, config)
        return [prepared.prompt], prepared.params, prepared.parsing

    def document(self, job: Job, outputs: list[RequestOutput]) -> ChatCompletion:
        sequences = [(output, s) for output in outputs for s in output.outputs]
        with_ids, logprobs = job.body.return_token_ids, job.choice_logprobs
        messages = [_answer(job, output, s) for output, s in sequences]
        return ChatCompletion(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=[
                ChatChoice(
                    index=i,
                    message=message,
                    logprobs=None
                    if logprobs is None
                    else logprobs.chat(i, s, output.prompt_token_ids) or ChatLogProbs([]),
                    finish_reason="tool_calls" if message.tool_calls and s.finish_reason == "stop" else s.finish_reason,
                    token_ids=s.token_ids if with_ids else UNSET,
                )
                for i, ((output, s), message) in enumerate(zip(sequences, messages, strict=True))
            ],
            usage=UsageBody.of([output.usage for output in outputs], _reasoning_tokens(job, outputs)),
            prompt_token_ids=outputs[0].prompt_token_ids if with_ids else UNSET,
            prompt_logprobs=job.prompt_logprobs(outputs[0]),
        )


def _answer(job: Job, output: RequestOutput, sequence: CompletionOutput) -> AssistantMessage:
    if job.parsing is None:
        return AssistantMessage(content=sequence.text)
    parsed = parse(job.parsing.parser(job.tokenizer, output.prompt_token_ids), sequence.text)
    return AssistantMessage(
        content=parsed.content if parsed.content or not parsed.tool_calls else None,
        reasoning_content=parsed.reasoning or UNSET,
        tool_calls=[
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.tool_calls
        ]
        or UNSET,
    )


def _reasoning_tokens(job: Job, outputs: list[RequestOutput]) -> int | None:
    """Of all choices; None where they are not counted."""
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
