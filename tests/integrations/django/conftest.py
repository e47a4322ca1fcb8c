"""Django, set up once for the process of the tests, and commands of the project in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MANAGE = Path(__file__).with_name("manage.py")

Manage = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session", autouse=True)
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set Django up with the settings of the project, and make its table."""
    os.environ["DATABASE"] = str(tmp_path_factory.mktemp("django") / "db.sqlite3")
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.integrations.django.shop.settings"
    import django
    from asgiref.sync import SyncToAsync
    from django.core.management import call_command
    from django.db import connections

    zone = os.environ.get("TZ")
    django.setup()
    # Django makes its zone that of the process, where other tests run.
    del os.environ["TZ"]
    if zone is not None:
        os.environ["TZ"] = zone
    time.tzset()
    call_command("migrate", run_syncdb=True, verbosity=0)
    connections.close_all()
    shutil.copy(os.environ["DATABASE"], _empty())
    yield
    connections.close_all()
    # The thread of asynchronous queries has connections of its own.
    SyncToAsync.single_thread_executor.submit(connections.close_all).result()
    del os.environ["DATABASE"], os.environ["DJANGO_SETTINGS_MODULE"]


def _empty() -> str:
    return f"{os.environ['DATABASE']}.empty"


@pytest.fixture
def manage(tmp_path: Path) -> Manage:
    """Run ``manage.py``, or a script with ``-c``, with a store and a database of the test."""
    shutil.copy(_empty(), tmp_path / "db.sqlite3")

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = arguments if arguments[0] == "-c" else (str(MANAGE), *arguments)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        return subprocess.run(
            [sys.executable, "-W", "error", *command],
            cwd=tmp_path,
            env={
                **kept,
                "PYTHONPATH": str(ROOT),
                "STORE": f"sqlite:///{tmp_path}/jobs.db",
                "DATABASE": f"{tmp_path}/db.sqlite3",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    return run
