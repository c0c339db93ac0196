"""ServerConfig: what shapes the HTTP side. Its fields are flags of ``asyncengine serve``."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from asyncengine.config import check_types
from asyncengine.errors import ConfigError
from asyncengine.server.parsing.names import checked_parser


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where and how to listen. Wrong values raise ConfigError."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every IPv4 interface."""
    port: int = 8000
    """TCP port; 0 takes a free one."""
    uds: str | None = None
    """Listen on a Unix socket at this path instead of TCP."""
    served_model_name: str | None = None
    """Name of the model in the API; None: the model's own."""
    api_key: str | None = field(default=None, repr=False)
    """Key that every route but /health and the files of the page demands as `Authorization: Bearer KEY`. Other users of
    the machine can read it in the list of processes: give it by api_key_file or the environment."""
    api_key_file: str | None = None
    """File of keys, one a line, each of which those routes accept."""
    max_request_bytes: int = 32 * 2**20
    """Largest request body."""
    max_request_values: int = 500_000
    """Most values in a request body. A number counts once, so that a token id does; a string, a field's name, an array
    and an object count twice."""
    max_inflight_body_bytes: int = 256 * 2**20
    """Bytes of request bodies that all clients together may have in the server before they are parsed; over it, bodies
    of more than 64 KiB are refused with 503."""
    max_sequences_per_request: int = 1024
    """Most sequences that one request may ask for: its prompts times n."""
    max_stored_responses: int = 1024
    """Most responses that /v1/responses keeps for previous_response_id; 0 keeps none."""
    max_stored_response_bytes: int = 64 * 2**20
    """Bytes that they may have together; over either limit the least recently used ones go."""
    allow_priority: bool = False
    """Let clients choose the priority of their requests."""
    tool_call_parser: str | None = None
    """Format of the model's tool calls: hermes, json, llama3_json, pythonic, mistral, deepseek_v3 or harmony; None: as
    its chat template shows."""
    reasoning_parser: str | None = None
    """How the model marks its reasoning: think, mistral, cohere, harmony, or none to leave it in the content; None: as
    its chat template shows."""
    trust_request_chat_template: bool = False
    """Let requests bring a chat template of their own, which is a program."""
    read_timeout_s: float = 60.0
    """Seconds a client may take to send a request body."""
    write_timeout_s: float = 30.0
    """Seconds a client may go without reading before it is cut and its request aborted."""
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
        for name in ("request_bytes", "request_values", "inflight_body_bytes", "sequences_per_request"):
            if getattr(self, f"max_{name}") < 1:
                raise ConfigError(f"max_{name} must be at least 1, got {getattr(self, f'max_{name}')}")
        for name in ("max_stored_responses", "max_stored_response_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.max_inflight_body_bytes < self.max_request_bytes:
            raise ConfigError(
                f"max_inflight_body_bytes ({self.max_inflight_body_bytes}) must be at least "
                f"max_request_bytes ({self.max_request_bytes}): a body of that size could never be received"
            )
        for name in ("read_timeout_s", "write_timeout_s", "keep_alive_s", "shutdown_timeout_s"):
            if not 0 < getattr(self, name) <= 1e6:
                raise ConfigError(f"{name} must be in (0, 1e6] seconds, got {getattr(self, name)}")
        for name in ("tool_call_parser", "reasoning_parser"):
            object.__setattr__(self, name, checked_parser(name, getattr(self, name)))
        _ = self.api_keys  # read the file now

    @cached_property
    def api_keys(self) -> tuple[bytes, ...]:
        """The keys of ``api_key`` and ``api_key_file`` as they stand in a header; empty: none is demanded."""
        keys = []
        if self.api_key is not None:
            try:
                # An argument that is not UTF-8 reaches Python with surrogates in place of its bytes.
                keys.append(self.api_key.encode(errors="surrogateescape"))
            except UnicodeEncodeError:
                raise ConfigError("api_key is not valid Unicode") from None
        if self.api_key_file is not None:
            try:
                lines = Path(self.api_key_file).read_bytes().splitlines()
            except (OSError, ValueError) as exc:
                raise ConfigError(f"cannot read api_key_file: {exc}") from None
            found = [key for line in lines if (key := line.strip())]
            if not found:
                raise ConfigError(f"api_key_file {self.api_key_file} holds no key")
            keys += found
        for key in keys:
            if not key or key != key.strip() or any(byte < 32 or byte == 127 for byte in key):
                raise ConfigError(
                    "api_key must not be empty, begin or end with white space, or hold control characters: "
                    "no header could bring it"
                )
        return tuple(keys)
