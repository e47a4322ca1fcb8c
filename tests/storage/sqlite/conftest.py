"""A database file, and storage objects on it that are closed after the test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from penstock.storage.sqlite.engine import SqliteStorage

PEER = Path(__file__).with_name("peer.py")

Opener = Callable[..., Awaitable[SqliteStorage]]
Starter = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "penstock.db"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture
async def opened(url: str) -> AsyncIterator[Opener]:
    """Open a storage on the file, or on another URL; ``opened(namespace=...)`` for a namespace."""
    storages: list[SqliteStorage] = []

    async def open_one(other: str | None = None, **options: str) -> SqliteStorage:
        storage = SqliteStorage.from_url(other or url, **options)
        await storage.open()
        storages.append(storage)
        return storage

    yield open_one
    for storage in storages:
        await storage.close()


@pytest.fixture
async def storage(opened: Opener) -> SqliteStorage:
    return await opened()


@pytest.fixture
def peer(url: str) -> Iterator[Starter]:
    """Start another process on the same file: ``peer("work-off", "name")``."""
    started: list[subprocess.Popen[str]] = []

    def start(what: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(PEER), what, url, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
