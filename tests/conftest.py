"""Fixtures for all tests. Servers start when the first test asks for them, once per session."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from penstock.core.text import storable
from tests.processes import leave_nothing_behind
from tests.servers import ValkeyCluster, ValkeyServer

pytest_plugins = ["pytester"]


# Whoever runs us in the background has us ignore SIGINT, and so would all that we start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# SQLite waits for the disk at every commit, which protects against the loss of power only. So tests keep their files in
# memory, if there is room and scripts can be run there.
MEMORY = Path("/dev/shm")
if (
    MEMORY.is_dir()
    and shutil.disk_usage(MEMORY).free > 4 << 30
    and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

SPARK = "tests/spark/"

# How long an example takes says nothing where the machine is busy.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


class _ByFile(LoadFileScheduling):  # type: ignore[misc]
    """The tests of a file stay in one process, for they share servers. All tests of Spark share a session, too."""

    def _split_scope(self, nodeid: str) -> str:
        return SPARK if nodeid.startswith(SPARK) else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of Spark first: one process has them all, and nothing else takes as long."""
    items.sort(key=lambda item: not item.nodeid.startswith(SPARK))


def pytest_configure() -> None:
    leave_nothing_behind()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape lone surrogates in captured output: a report that has one ends the whole run of pytest-xdist."""
    report = yield
    report.sections = [(name, storable(text)) for name, text in report.sections]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Give captured log lines their usual form: where a logger of PySpark exists, it makes JSON of them."""
    plugin = item.config.pluginmanager.get_plugin("logging-plugin")
    assert plugin is not None
    for handler in logging.getLogger().handlers:
        if type(handler.formatter).__module__.startswith("pyspark."):
            handler.setFormatter(plugin.formatter)


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """A standalone server shared by the whole session: use a namespace or queue of your own."""
    with ValkeyServer() as server:
        yield server.url


@pytest.fixture(scope="session")
def cluster_url() -> Iterator[str]:
    """A three-node cluster shared by the whole session: use a namespace or queue of your own."""
    with ValkeyCluster() as cluster:
        yield cluster.url
