"""ServerConfig: what shapes the HTTP side. Its fields are flags of ``asyncengine serve``."""

from __future__ import annotations

from dataclasses import dataclass

from asyncengine.config import check_types
from asyncengine.errors import ConfigError


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
    api_key: str | None = None
    """Key that every route but /health demands as `Authorization: Bearer KEY`."""
    max_request_bytes: int = 32 * 2**20
    """Largest request body."""
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

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        if self.max_request_bytes < 1:
            raise ConfigError(f"max_request_bytes must be at least 1, got {self.max_request_bytes}")
        for field in ("read_timeout_s", "write_timeout_s", "keep_alive_s", "shutdown_timeout_s"):
            if not 0 < getattr(self, field) <= 1e6:
                raise ConfigError(f"{field} must be in (0, 1e6] seconds, got {getattr(self, field)}")
        if self.api_key == "":
            raise ConfigError("api_key must not be empty")
