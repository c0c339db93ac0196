"""Parsing of a model's text into reasoning, content and tool calls, piece by piece."""

from asyncengine.server.parsing.parser import (
    CallRules,
    OutputParser,
    ParsedCall,
    ParsedDelta,
    ParsedOutput,
    ToolCallDelta,
    parse,
)

__all__ = ["CallRules", "OutputParser", "ParsedCall", "ParsedDelta", "ParsedOutput", "ToolCallDelta", "parse"]
