"""The pytest plugin of Penstock. It imports Penstock only in tests that use the fixture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from penstock import App
    from penstock.testing import Harness, HarnessFactory

__all__ = ["penstock_harness"]


@pytest.fixture
def penstock_harness() -> Iterator[HarnessFactory]:
    """Return a factory of harnesses: ``h = penstock_harness(app)``. They are closed after the test."""
    harnesses: list[Harness] = []

    def make(app: App, **options: Any) -> Harness:
        from penstock.testing import harness

        harnesses.append(harness(app, **options).begin())
        return harnesses[-1]

    yield make
    for harness in reversed(harnesses):
        harness.close()
