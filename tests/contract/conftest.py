"""Every test of this folder runs on every engine, in a queue of its own."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.storage import open_storage
from penstock.storage.contract import Storage
from tests.contract.engines import ENGINES, engine_url
from tests.contract.factories import Bench


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store_url(engine: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return engine_url(engine, request=request, directory=tmp_path)


@pytest.fixture
async def storage(store_url: str) -> AsyncIterator[Storage]:
    store = open_storage(store_url)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def bench(storage: Storage) -> Bench:
    """A queue that is empty, and hands to work on it."""
    return Bench(storage, f"q{uuid.uuid4().hex[:12]}")
