"""The line that the log has for each request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncengine.api.outputs import RequestTiming, Usage

logger = logging.getLogger("asyncengine.access")

CLIENT_LEFT = 499
"""Status of a request whose client left before its answer, as in nginx's log."""


@dataclass(slots=True)
class Account:
    """Tokens and times of one HTTP request, which fill while its prompts end."""

    usages: list[Usage] = field(default_factory=list)
    first_token_s: float | None = None
    """Seconds from the request's arrival in the engine to its first token."""

    def add(self, usage: Usage | None, timing: RequestTiming | None) -> None:
        """One prompt has ended."""
        if usage is not None:
            self.usages.append(usage)
        if timing is not None:
            self.first_token_s = min(timing.ttft, self.first_token_s if self.first_token_s is not None else timing.ttft)


def log_request(
    method: str, route: str, status: int, seconds: float, request_id: str, account: Account | None, *, quiet: bool
) -> None:
    """One line at info, of which a log in JSON has the numbers as fields; ``quiet`` ones are for debugging."""
    level = logging.DEBUG if quiet else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields: dict[str, Any] = {"method": method, "route": route, "status": status}
    words = [method, route, str(status)]
    if account is not None and account.usages:
        fields |= _tokens(account.usages)
        words.append("{prompt_tokens} -> {completion_tokens} tokens ({cached_tokens} cached)".format(**fields))
    if account is not None and account.first_token_s is not None:
        fields["first_token_s"] = round(account.first_token_s, 6)
        words.append(f"first {account.first_token_s:.3f} s")
    fields |= {"seconds": round(seconds, 6), "request_id": request_id}
    words += [f"{seconds:.3f} s", request_id]
    logger.log(level, "%s", ", ".join([" ".join(words[:3]), *words[3:]]), extra={"fields": fields})


def _tokens(usages: Sequence[Usage]) -> dict[str, int]:
    return {
        name: sum(getattr(usage, name) for usage in usages)
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
    }
