"""One check at the end of every test that closes an engine which is well: it holds nothing, and it still answers."""

from __future__ import annotations

import pytest

from asyncengine import AsyncEngine, testing


@pytest.fixture(autouse=True)
def engines_close_at_rest(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Engines that drain are checked before they close. The value names those that were."""
    checked: list[str] = []
    aclose = AsyncEngine.aclose

    async def check_and_close(self: AsyncEngine, drain: bool = True, timeout_s: float = 30.0) -> None:
        if drain and self.health == "ready" and not self._life.requests:
            await testing.check_at_rest(self)
            checked.append(repr(self))
        await aclose(self, drain, timeout_s)

    monkeypatch.setattr(AsyncEngine, "aclose", check_and_close)
    return checked
