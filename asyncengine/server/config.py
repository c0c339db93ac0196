"""ServerConfig: what shapes the HTTP side. Its fields are flags of ``asyncengine serve``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from asyncengine.config import check_types
from asyncengine.errors import ConfigError
from asyncengine.server.keys import ApiKey, check_key, read_keys
from asyncengine.server.parsing.names import checked_parser

_MODE = re.compile(r"0?[0-7]{3}", re.ASCII)
_ENDPOINT = re.compile(r"tcp://(\*|[\w.:\[\]-]+):(\d{1,5}|\*)|ipc://\S+", re.ASCII)
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the server: addresses, limits and files. Wrong values raise ConfigError."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 stands for every IPv4 interface."""
    port: int = 8000
    """TCP port; 0 takes a free one."""
    uds: str | None = None
    """Listen on a Unix socket at this path instead of TCP."""
    uds_mode: str | None = None
    """Permissions of that socket in octal, such as 660; None: as the umask leaves them."""
    served_model_name: str | Sequence[str] | None = None
    """Names of the model in the API. Answers carry the first. None: the model's own."""
    strict_model_names: bool = False
    """Answer requests that name another model than the served one with 404. Else any name means the served model."""
    api_key: str | None = field(default=None, repr=False)
    """Key that every route but /health and the files of the page demands as `Authorization: Bearer KEY`. Other users of
    the machine can read it in the list of processes: give it by api_key_file or the environment."""
    api_key_file: str | None = None
    """File of API keys, one a line. Each opens the routes of api_key. Behind a key may stand priority=high, normal or
    low, or an integer in [-1000, 1000] of which smaller ones run sooner: its requests have that priority."""
    cors_origins: Sequence[str] = ()
    """Origins of web pages that may read answers. They are like https://example.org; * stands for all."""
    ssl_certfile: str | None = None
    """Speak TLS alone, with the certificate chain in this PEM file. It is read again when it has changed."""
    ssl_keyfile: str | None = None
    """PEM file of the certificate's key, if it is not in ssl_certfile."""
    default_max_tokens: int | None = 16
    """Tokens that /v1/completions makes where a request says no number. 16 is what OpenAI's clients expect; None: to
    the end of the context, as chats go."""
    root_path: str = ""
    """Path under which a proxy shows the server, such as /llm; it may strip that or not."""
    public_metrics: bool = False
    """Answer /metrics without a key where keys are configured."""
    metrics_prefix: Literal["asyncengine", "vllm"] = "asyncengine"
    """Prefix of the names at /metrics. vllm gives metrics that vLLM has its names, labels and buckets, for dashboards
    and routers that read those."""
    kv_events_endpoint: str | None = None
    """Publish events of the KV cache over ZeroMQ in vLLM's wire format at this address, such as tcp://*:5557 or
    ipc:///run/events. They show the tokens of prompts to whoever connects. Needs pyzmq (asyncengine[kv-events])."""
    kv_events_replay_endpoint: str | None = None
    """Address where subscribers ask for batches of events that they missed. The last 10,000 are kept."""
    kv_events_topic: str = ""
    """First frame of each message; such as kv@POD@MODEL for the router of llm-d."""
    max_request_bytes: int = 32 * 2**20
    """Largest request body."""
    max_request_values: int = 500_000
    """Most values in a request body. A number counts once, so that a token id does; a string, a field's name, an array
    and an object count twice."""
    max_inflight_body_bytes: int = 256 * 2**20
    """Bytes that all clients together may have in the server: of request bodies until they are parsed, and of prompts
    and whole answers until the answers are sent. Over it, bodies of more than 64 KiB are refused with 503."""
    max_sequences_per_request: int = 1024
    """Most sequences that one request may ask for: its prompts times n."""
    max_stored_responses: int = 1024
    """Most responses that /v1/responses keeps for previous_response_id; 0 keeps none."""
    max_stored_response_bytes: int = 64 * 2**20
    """Bytes that they may have together; over either limit the least recently used ones go."""
    allow_priority: bool = False
    """Let clients choose the priority of their requests."""
    tool_call_parser: str | None = None
    """Format of the model's tool calls. It is hermes, json, llama3_json, pythonic, mistral, deepseek_v3 or harmony;
    None: as its chat template shows."""
    reasoning_parser: str | None = None
    """Format of the model's reasoning. It is think, mistral, cohere, harmony, or none to leave the reasoning in the
    content; None: the format that the chat template shows."""
    trust_request_chat_template: bool = False
    """Let requests bring a chat template of their own, which is a program."""
    read_timeout_s: float = 60.0
    """Seconds a client may take to send a request body."""
    write_timeout_s: float = 30.0
    """Seconds a client may go without reading before it is cut and its request aborted."""
    ping_interval_s: float = 5.0
    """Seconds after which a stream without any event so far, since it waits or its prompt is long, gets its headers and
    a comment, and again after as many: so that no proxy takes it for dead."""
    keep_alive_s: float = 75.0
    """Seconds after which an idle connection, or one that has not finished its headers, is closed."""
    shutdown_timeout_s: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    exit_on_death: bool = True
    """End the process with code 1 when the engine has died, so that a supervisor starts it anew."""
    page: bool = True
    """Serve a page at / with a chat and a view of the engine. It needs no key; what it asks for does."""

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        if self.uds_mode is not None and not _MODE.fullmatch(self.uds_mode):
            raise ConfigError(f"uds_mode must be an octal number such as 660, got {self.uds_mode!r}")
        if self.uds_mode is not None and self.uds is None:
            raise ConfigError("uds_mode needs uds")
        for name in ("request_bytes", "request_values", "inflight_body_bytes", "sequences_per_request"):
            if getattr(self, f"max_{name}") < 1:
                raise ConfigError(f"max_{name} must be at least 1, got {getattr(self, f'max_{name}')}")
        for name in ("max_stored_responses", "max_stored_response_bytes", "default_max_tokens"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.max_inflight_body_bytes < self.max_request_bytes:
            raise ConfigError(
                f"max_inflight_body_bytes ({self.max_inflight_body_bytes}) must be at least "
                f"max_request_bytes ({self.max_request_bytes}): a body of that size could never be received"
            )
        for name in ("read_timeout_s", "write_timeout_s", "ping_interval_s", "keep_alive_s", "shutdown_timeout_s"):
            if not 0 < getattr(self, name) <= 1e6:
                raise ConfigError(f"{name} must be in (0, 1e6] seconds, got {getattr(self, name)}")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile needs ssl_certfile")
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path, re.ASCII):
            raise ConfigError(f"root_path must be like /llm, without a slash at its end, got {self.root_path!r}")
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            endpoint = getattr(self, name)
            if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
                raise ConfigError(f"{name} must be like tcp://*:5557 or ipc:///run/events, got {endpoint!r}")
        for name in ("kv_events_replay_endpoint", "kv_events_topic"):
            if getattr(self, name) and self.kv_events_endpoint is None:
                raise ConfigError(f"{name} needs kv_events_endpoint")
        if len(self.kv_events_topic) > 256:
            raise ConfigError(f"kv_events_topic may have 256 characters, got {len(self.kv_events_topic)}")
        for origin in self.cors_origins:
            if isinstance(self.cors_origins, str) or not isinstance(origin, str) or not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"cors_origins must hold origins such as https://example.org, got {origin!r}")
        if not all(isinstance(name, str) and name for name in self.model_names):
            raise ConfigError(f"served_model_name must be non-empty strings, got {self.served_model_name!r}")
        for name in ("tool_call_parser", "reasoning_parser"):
            object.__setattr__(self, name, checked_parser(name, getattr(self, name)))
        _ = self.api_keys  # read the file now

    @cached_property
    def model_names(self) -> tuple[str, ...]:
        """``served_model_name``, in order and each once; empty: the model's own."""
        names = self.served_model_name
        return tuple(dict.fromkeys([names] if isinstance(names, str) else names or ()))

    @cached_property
    def api_keys(self) -> tuple[ApiKey, ...]:
        """The keys of ``api_key`` and ``api_key_file``; empty: none is demanded."""
        keys = []
        if self.api_key is not None:
            try:
                # An argument that is not UTF-8 reaches Python with surrogates in place of its bytes.
                key = self.api_key.encode(errors="surrogateescape")
            except UnicodeEncodeError:
                raise ConfigError("api_key is not valid Unicode") from None
            check_key(key)
            keys.append(ApiKey(key))
        if self.api_key_file is not None:
            keys += read_keys(self.api_key_file)
        return tuple(keys)
