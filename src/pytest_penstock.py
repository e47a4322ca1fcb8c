"""The pytest plugin of Penstock. A module of its own, so that pytest does not import Penstock where no test uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from penstock import App
    from penstock.testing import Harness

__all__ = ["HarnessFactory", "penstock_harness"]


class HarnessFactory(Protocol):
    """Takes what ``penstock.testing.harness`` takes."""

    def __call__(self, app: App, **options: Any) -> Harness: ...


@pytest.fixture
def penstock_harness() -> Iterator[HarnessFactory]:
    """Put apps under test: ``h = penstock_harness(app)``. Their stores come back when the test is over."""
    made: list[Harness] = []

    def make(app: App, **options: Any) -> Harness:
        from penstock.testing import harness

        made.append(harness(app, **options).begin())
        return made[-1]

    yield make
    for harness in reversed(made):
        harness.close()
