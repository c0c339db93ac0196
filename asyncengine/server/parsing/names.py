"""Names of parsers, as operators give them."""

from __future__ import annotations

from asyncengine.errors import ConfigError
from asyncengine.text.markers import REASONING

HARMONY = "harmony"
TOOL_PARSERS = ("hermes", "json", "llama3_json", "pythonic", "mistral", "deepseek_v3", HARMONY)
REASONING_PARSERS = (*REASONING, HARMONY, "none")
_ALIASES = {"qwen3": "think", "deepseek_r1": "think", "openai_gptoss": HARMONY, "openai": HARMONY}


def checked_parser(field: str, name: str | None) -> str | None:
    """``name`` as this package calls it. Raises ConfigError that lists those that are known."""
    known = TOOL_PARSERS if field == "tool_call_parser" else REASONING_PARSERS
    name = _ALIASES.get(name or "", name)
    if name is not None and name not in known:
        raise ConfigError(f"{field} must be one of {', '.join(known)}, got {name!r}")
    return name
