"""Django's own tests of ``django.tasks``, run with Penstock's backend in the place of Django's.

``python -m tests.integrations.django.upstream FOLDER`` takes the folder ``tests/tasks`` of Django's source. It writes a
copy in which the names of Django's backends are those of ``Waiting`` and ``Immediate``, and runs it with Django's own
test runner.

``test_custom_backend.py`` is left out: it tests Django's base class, with backends of its own.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import unittest
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import django
from django.conf import settings
from django.tasks import Task, TaskResult

from penstock import uuid7
from penstock.integrations.django.backend import PenstockBackend

MODULES: Final = ("test_tasks", "test_dummy_backend", "test_immediate_backend")

IN_MEMORY: Final = (
    "it changes a result inside DummyBackend.results; tests/integrations/django has a test of refresh()"
)
LACKING: Final = "it tests that ImmediateBackend lacks what Penstock has"
NOT_OURS: Final = {
    "test_dummy_backend.DummyBackendTestCase.test_refresh_result": IN_MEMORY,
    "test_dummy_backend.DummyBackendTestCase.test_refresh_result_async": IN_MEMORY,
    "test_immediate_backend.ImmediateBackendTestCase.test_cannot_get_result": LACKING,
    "test_immediate_backend.ImmediateBackendTestCase.test_cannot_refresh_result": LACKING,
    "test_immediate_backend.ImmediateBackendTestCase.test_cannot_pass_run_after": LACKING,
    "test_immediate_backend.ImmediateBackendTestCase.test_throws_keyboard_interrupt": (
        "ImmediateBackend runs a task in its caller, which a KeyboardInterrupt of the task interrupts; in a worker, "
        "it fails the task"
    ),
}
"""The tests that only Django's backend of the module can pass, and why."""


class Waiting(PenstockBackend):
    """In the place of ``DummyBackend``: tasks wait in the store. ``results`` and ``clear`` are for its tests."""

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        self._ids: list[str] = []

    @property
    def results(self) -> list[TaskResult]:
        """Return the results of the enqueued tasks, as the store has them."""
        return [self.get_result(id) for id in self._ids]

    def clear(self) -> None:
        """Remove all jobs."""
        self._ids.clear()
        for queue in self.app.sync.queues():
            self.app.sync.queue(queue).obliterate(force=True)

    def _enqueued(self, result: TaskResult) -> None:
        self._ids.append(result.id)
        super()._enqueued(result)


class Immediate(PenstockBackend):
    """In the place of ``ImmediateBackend``: a worker runs each task before ``enqueue`` returns."""

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        self.job_options["attempts"] = 1

    def enqueue(self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult:
        """Enqueue the task, and run it."""
        result = super().enqueue(task, args, kwargs)
        asyncio.run(self._run(result))
        return result

    async def aenqueue(self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult:
        """Enqueue the task, and run it."""
        result = await super().aenqueue(task, args, kwargs)
        await self._run(result)
        return result

    async def _run(self, result: TaskResult) -> None:
        await self.app.worker(queues=[result.task.queue_name], burst=True).run()
        await result.arefresh()


def adapted(text: str) -> str:
    """Return the text of a module of tests with our backends in the places of Django's."""
    ours = __spec__.name
    for name, replacement in (("Dummy", "Waiting"), ("Immediate", "Immediate")):
        module = f"django.tasks.backends.{name.lower()}"
        text = text.replace(f"from {module} import {name}Backend", f"from {ours} import {replacement}")
        text = text.replace(f"{module}.{name}Backend", f"{ours}.{replacement}")
        text = re.sub(rf"\b{name}Backend\b", replacement, text)
    return text


def _configure() -> None:
    settings.configure(
        SECRET_KEY="not secret",
        USE_TZ=True,
        INSTALLED_APPS=["penstock.integrations.django"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        PENSTOCK={"URL": f"memory://{uuid7()}"},
        TASKS={"default": {"BACKEND": f"{__spec__.name}.Waiting", "QUEUES": []}},
    )
    django.setup()


def run(source: Path) -> dict[str, Any]:
    """Run the tests in ``source``. Return how many ran, which failed, and which were left out."""
    from django.test.runner import DiscoverRunner

    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "tasks")
        package.mkdir()
        for path in source.glob("*.py"):
            (package / path.name).write_text(adapted(path.read_text()))
        sys.path.insert(0, folder)
        _configure()
        runner = DiscoverRunner(verbosity=0, interactive=False)
        suite = runner.build_suite([f"tasks.{module}" for module in MODULES])
        tests = {test.id().removeprefix("tasks."): test for test in _tests(suite)}
        runner.setup_test_environment()
        databases = runner.setup_databases()
        chosen = unittest.TestSuite(test for name, test in tests.items() if name not in NOT_OURS)
        result = unittest.TextTestRunner(sys.stderr).run(chosen)
        runner.teardown_databases(databases)
    broken = [test.id() for test, _ in (*result.failures, *result.errors)]
    return {
        "ran": result.testsRun,
        "failed": broken,
        "left_out": sorted(NOT_OURS.keys() & tests.keys()),
        "skipped": [test.id() for test, _ in result.skipped],
    }


def _tests(suite: unittest.TestSuite) -> list[unittest.TestCase]:
    found: list[unittest.TestCase] = []
    for test in suite:
        found += _tests(test) if isinstance(test, unittest.TestSuite) else [test]
    return found


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]))))
