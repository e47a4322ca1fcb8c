"""An app whose store is never opened, and a harness around it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock import App
from penstock.testing import Harness, harness


@pytest.fixture
def app() -> App:
    # Never opened: a harness that let a call through would make this folder, or fail.
    return App("sqlite:////nowhere/at/all/penstock.db")


@pytest.fixture
async def h(app: App) -> AsyncIterator[Harness]:
    async with harness(app) as h:
        yield h
