"""Servers and stores that several tests of the Valkey engine share."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from penstock.storage.valkey.engine import ValkeyStorage
from tests.servers import ValkeyServer


@pytest.fixture
async def storage(valkey_url: str) -> AsyncIterator[ValkeyStorage]:
    """Return an open store with a namespace of its own, on the shared server."""
    store = ValkeyStorage.from_url(f"{valkey_url}?namespace=t{uuid.uuid4().hex[:12]}")
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def primary() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def replica(primary: ValkeyServer) -> Iterator[ValkeyServer]:
    with ValkeyServer(replica_of=primary) as server:
        yield server
