"""The task of the agents: ten turns that call one tool, and a last one that calls none.

The model tells stories: it calls a tool only where a request demands that. So each agent demands it until ``is_over``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TURNS = 10
ASKED = "Walk, then tell a story."


@dataclass
class Walk:
    places: list[int] = field(default_factory=list)
    """Places to which the calls have led, in order."""

    def go(self, steps: int) -> str:
        self.places.append((self.places[-1] if self.places else 0) + steps)
        return f"place {self.places[-1]}"

    @property
    def is_over(self) -> bool:
        return len(self.places) >= TURNS

    @property
    def choice(self) -> str:
        """The tool_choice of the next turn."""
        return "none" if self.is_over else "required"

    def check(self, text: object) -> None:
        """Check that ten calls came, and then ``text`` ended the walk."""
        assert len(self.places) == TURNS
        assert sorted(self.places) == self.places
        assert isinstance(text, str)
        assert len(text) > 20
