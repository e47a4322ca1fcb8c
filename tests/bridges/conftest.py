"""A work queue of its own for each test, seen by us, by the published clients, and raw."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
import redis

from penstock import uuid7
from penstock.bridges.redis_work_queue import WorkQueue
from tests.bridges.peers import KINDS, NodeMissing, Peer, node_packages


@pytest.fixture
def prefix() -> str:
    return f"work-{uuid7()}"


@pytest.fixture
async def ours(valkey_url: str, prefix: str) -> AsyncIterator[WorkQueue]:
    async with WorkQueue(valkey_url, prefix) as queue:
        yield queue


@pytest.fixture
def db(valkey_url: str) -> Iterator[redis.Redis]:
    server = urlsplit(valkey_url)
    with redis.Redis(host=str(server.hostname), port=server.port or 0, decode_responses=True) as client:
        yield client


@pytest.fixture(scope="session")
def node() -> None:
    try:
        node_packages()
    except NodeMissing as missing:
        pytest.skip(f"the published Node client is not tested: {missing}")


@pytest.fixture
def start_peer(
    valkey_url: str, prefix: str, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], Peer]]:
    """Starts published clients by kind, and ends them after the test."""
    with ExitStack() as peers:

        def start(kind: str) -> Peer:
            if kind == "node":
                request.getfixturevalue("node")
            return peers.enter_context(Peer(kind, valkey_url, prefix))

        yield start


@pytest.fixture(params=KINDS)
def theirs(request: pytest.FixtureRequest, start_peer: Callable[[str], Peer]) -> Peer:
    return start_peer(request.param)
