"""The backend for ``django.tasks``, which Django 6 has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from penstock import App, uuid7
from penstock.testing import Harness, harness
from tests.integrations.django.conftest import Manage
from tests.worker.conftest import until

pytest.importorskip("django.tasks")

BACKEND = "penstock.integrations.django.PenstockBackend"


@pytest.fixture
async def jobs() -> AsyncIterator[Harness]:
    """The app of the project under test."""
    from penstock.integrations.django import app

    async with harness(app, name="tester") as under_test:
        yield under_test


@pytest.fixture
def tasks() -> Iterator[Any]:
    from tests.integrations.django.shop import background

    background.ran.clear()
    background.released.clear()
    yield background
    background.released.set()


async def test_a_result_is_ready_then_successful(jobs: Harness, tasks: Any) -> None:
    from django.tasks import TaskResultStatus

    for task in (tasks.add, tasks.add_async):
        result = await task.aenqueue(1, b=2)
        assert result == await task.aget_result(result.id)
        assert (result.status, result.attempts, result.args, result.kwargs) == (
            TaskResultStatus.READY,
            0,
            [1],
            {"b": 2},
        )
        await jobs.drain()
        await result.arefresh()
        assert result.status == TaskResultStatus.SUCCESSFUL
        assert result.return_value == 3
        assert result.errors == []
        [worker] = result.worker_ids
        assert worker.startswith("tester-")
        assert result.enqueued_at <= result.started_at == result.last_attempted_at <= result.finished_at


@pytest.mark.parametrize("skew", [timedelta(hours=-1), timedelta(hours=1)])
async def test_times_are_in_order_although_the_clock_of_the_worker_differs(
    jobs: Harness, tasks: Any, monkeypatch: pytest.MonkeyPatch, skew: timedelta
) -> None:
    from penstock.integrations.django import runs

    now = runs._now
    monkeypatch.setattr(runs, "_now", lambda: now() + skew)
    result = await tasks.add.aenqueue(1, b=2)
    await jobs.drain()
    await result.arefresh()
    assert result.enqueued_at <= result.started_at <= result.finished_at


async def test_a_running_task_says_so_and_names_its_worker(tasks: Any) -> None:
    from django.tasks import TaskResultStatus
    from django.test import override_settings

    with override_settings(PENSTOCK={"URL": f"memory://{uuid7()}"}):
        from penstock.integrations.django.configuration import get_app

        result = await tasks.wait.aenqueue()
        worker = get_app().worker(name="runner", queues=["default"])
        running = asyncio.create_task(worker.run())
        await until(lambda: tasks.ran)
        await until(lambda: _refreshed(result, lambda: len(result.worker_ids) == 1))
        assert result.status == TaskResultStatus.RUNNING
        assert result.worker_ids == [worker.id]
        with pytest.raises(ValueError, match="has not finished yet"):
            _ = result.return_value
        tasks.released.set()
        worker.stop()
        await running
        await result.arefresh()
        assert result.status == TaskResultStatus.SUCCESSFUL
        assert result.attempts == 1
        await get_app().close()


async def _refreshed(result: Any, condition: Any) -> bool:
    await result.arefresh()
    return bool(condition())


@pytest.mark.parametrize("name", ["fail_until", "fail_until_async"])
async def test_a_task_that_is_retried_has_the_errors_of_all_its_attempts(
    name: str, jobs: Harness, tasks: Any
) -> None:
    from django.tasks import TaskResultStatus

    task = replace(getattr(tasks, name), options={"backoff": "10m"})
    result = await task.aenqueue(2)
    await jobs.drain()
    await result.arefresh()
    assert (result.status, result.attempts) == (TaskResultStatus.READY, 1)
    assert [error.exception_class for error in result.errors] == [LookupError]
    jobs.clock.advance("11m")
    await jobs.drain()
    await result.arefresh()
    assert (result.status, result.attempts, result.return_value) == (TaskResultStatus.SUCCESSFUL, 2, 2)
    assert len(result.errors) == 1
    assert len(result.worker_ids) == 2

    hopeless = await task.aenqueue(9)
    await jobs.run_all()
    await hopeless.arefresh()
    assert (hopeless.status, hopeless.attempts) == (TaskResultStatus.FAILED, 2)
    assert [error.traceback.splitlines()[-1] for error in hopeless.errors] == [
        "LookupError: attempt 1",
        "LookupError: attempt 2",
    ]
    with pytest.raises(ValueError, match="Task failed"):
        _ = hopeless.return_value


async def test_signals_tell_of_the_start_of_each_attempt_and_of_the_end_of_the_task(
    jobs: Harness, tasks: Any
) -> None:
    from django.tasks.signals import task_enqueued, task_finished, task_started

    told: list[tuple[str, str, int]] = []

    def note(what: str) -> Any:
        def receive(sender: type, task_result: Any, **other: Any) -> None:
            assert sender.__name__ == "PenstockBackend"
            told.append((what, str(task_result.status), task_result.attempts))

        return receive

    receivers = {
        task_enqueued: note("enqueued"),
        task_started: note("started"),
        task_finished: note("finished"),
    }
    for signal, receiver in receivers.items():
        signal.connect(receiver)
    try:
        await tasks.fail_until.aenqueue(9)
        await jobs.run_all()
    finally:
        for signal, receiver in receivers.items():
            signal.disconnect(receiver)
    assert told == [
        ("enqueued", "READY", 0),
        ("started", "RUNNING", 1),
        ("started", "RUNNING", 2),
        ("finished", "FAILED", 2),
    ]


async def test_larger_priorities_run_first(jobs: Harness, tasks: Any) -> None:
    for n, priority in enumerate([-100, 0, 100]):
        await tasks.add.using(priority=priority).aenqueue(n, 0)
    await jobs.drain()
    assert tasks.ran == [(2, 0), (1, 0), (0, 0)]


async def test_a_task_with_run_after_runs_then(jobs: Harness, tasks: Any) -> None:
    from django.utils import timezone

    due = timezone.now() + timedelta(hours=1, microseconds=7)
    result = await tasks.add.using(run_after=due, queue_name="slow", priority=5).aenqueue(1, 2)
    await jobs.drain()
    assert tasks.ran == []
    found = await tasks.add.aget_result(result.id)
    assert found == result
    assert (found.task.run_after, found.task.queue_name, found.task.priority) == (due, "slow", 5)
    jobs.clock.advance("61m")
    await jobs.drain()
    assert tasks.ran == [(1, 2)]


async def test_without_time_zones_times_are_local(jobs: Harness, tasks: Any) -> None:
    from django.test import override_settings
    from django.utils import timezone

    now = timezone.make_naive(timezone.now())
    with override_settings(USE_TZ=False):
        due = now + timedelta(hours=1)
        result = await tasks.add.using(run_after=due).aenqueue(1, 2)
        found = await tasks.add.aget_result(result.id)
        assert found.task.run_after == due
        assert abs(found.enqueued_at - now) < timedelta(minutes=5)


async def test_what_json_cannot_hold_fails_at_once(jobs: Harness, tasks: Any) -> None:
    with pytest.raises(TypeError, match="Unsupported type"):
        await tasks.add.aenqueue({1}, 2)
    result = await tasks.set_of.aenqueue()
    await jobs.run_all()
    await result.arefresh()
    assert tasks.ran == ["set"], "a retry would not help"
    assert [error.exception_class for error in result.errors] == [TypeError]


async def test_a_job_that_times_out_or_is_cancelled_has_failed(jobs: Harness, tasks: Any) -> None:
    from django.tasks import TaskResultStatus

    from penstock import JobCancelled
    from tests.integrations.django.shop.background import wait_forever

    slow = replace(wait_forever, options={"timeout": "50ms", "attempts": 1})
    late = await slow.aenqueue()
    gone = await tasks.add.aenqueue(1, 2)
    await jobs.app.job(gone.id).cancel()
    await jobs.drain()
    await late.arefresh()
    assert (late.status, late.attempts) == (TaskResultStatus.FAILED, 1)
    assert [error.exception_class.__name__ for error in late.errors] == ["TimeoutError"]
    await gone.arefresh()
    assert (gone.status, gone.attempts) == (TaskResultStatus.FAILED, 0)
    assert [error.exception_class for error in gone.errors] == [JobCancelled]


async def test_a_snooze_is_no_error(jobs: Harness, tasks: Any) -> None:
    result = await tasks.snooze_once.aenqueue()
    await jobs.run_all()
    await result.arefresh()
    assert result.return_value == "awake"
    assert (result.errors, result.attempts) == ([], 2)


def test_options_of_a_task_are_nearer_than_those_of_the_backend(tasks: Any) -> None:
    from django.tasks import task_backends
    from django.test import override_settings

    configured = {"default": {"BACKEND": BACKEND, "OPTIONS": {"attempts": 7, "timeout": "5m"}}}
    with override_settings(TASKS=configured, PENSTOCK={"URL": "memory://options"}):
        backend = task_backends["default"]
        assert backend.check() == []
        plain = tasks.add.enqueue(1, 2)
        own = replace(tasks.add, options={"attempts": 9}).enqueue(1, 2)
        records = [backend.app.sync.job(result.id).get() for result in (plain, own)]
        assert [record.attempts for record in records] == [7, 9]
        assert [record.raw.options.timeout_ms for record in records] == [300_000, 300_000]


def test_options_that_are_not_valid_are_found_by_the_check_and_where_a_task_is_defined(tasks: Any) -> None:
    from django.tasks import task_backends
    from django.tasks.exceptions import InvalidTask
    from django.test import override_settings

    with override_settings(TASKS={"default": {"BACKEND": BACKEND, "OPTIONS": {"attemps": 7}}}):
        [error] = task_backends["default"].check()
        assert error.id == "penstock.E006"
        assert "'attemps'. Did you mean 'attempts'?" in error.msg
        with pytest.raises(InvalidTask, match="'attempts'"):
            tasks.add.using()
    with pytest.raises(InvalidTask, match="attempts must be"):
        replace(tasks.add, options={"attempts": 0})


@pytest.mark.parametrize("queue", ["no spaces", "q" * 31])
def test_a_queue_that_penstock_or_the_id_of_a_result_cannot_have_is_refused(queue: str, tasks: Any) -> None:
    from django.tasks.exceptions import InvalidTask
    from django.test import override_settings

    with override_settings(TASKS={"default": {"BACKEND": BACKEND, "QUEUES": []}}):
        assert len(tasks.add.using(queue_name="q" * 30).enqueue(1, 2).id) == 63
        with pytest.raises(InvalidTask, match=r"queue name|name of queue"):
            tasks.add.using(queue_name=queue)


@pytest.mark.parametrize("option", [True, "default"])
def test_with_enqueue_on_commit_a_task_waits_for_the_transaction(option: Any, tasks: Any) -> None:
    from django.db import transaction
    from django.tasks.exceptions import TaskResultDoesNotExist
    from django.test import override_settings

    given = {"default": {"BACKEND": BACKEND, "OPTIONS": {"enqueue_on_commit": option}}}
    with override_settings(TASKS=given, PENSTOCK={"URL": f"memory://{uuid7()}"}):
        with transaction.atomic():
            result = tasks.add.enqueue(1, 2)
            assert result.enqueued_at is None
            with pytest.raises(TaskResultDoesNotExist):
                tasks.add.get_result(result.id)
        assert result.enqueued_at is not None
        assert tasks.add.get_result(result.id) == result

        with pytest.raises(ZeroDivisionError):
            _roll_back(tasks.add)
        assert tasks.add.enqueue(5, 6).enqueued_at is not None
        counts = tasks.add.get_backend().app.sync.queue("default").counts()
        assert counts.waiting == 2


def _roll_back(task: Any) -> None:
    from django.db import transaction

    with transaction.atomic():
        task.enqueue(3, 4)
        raise ZeroDivisionError


async def test_with_enqueue_on_commit_async_callers_wait_for_the_transaction_of_their_thread(
    tasks: Any,
) -> None:
    from asgiref.sync import sync_to_async
    from django.db import transaction
    from django.test import override_settings

    given = {"default": {"BACKEND": BACKEND, "OPTIONS": {"enqueue_on_commit": True}}}
    with override_settings(TASKS=given, PENSTOCK={"URL": f"memory://{uuid7()}"}):
        block = transaction.atomic()
        await sync_to_async(block.__enter__)()
        result = await tasks.add.aenqueue(1, 2)
        assert result.enqueued_at is None
        await sync_to_async(block.__exit__)(None, None, None)
        assert result.enqueued_at is not None
        assert await tasks.add.aget_result(result.id) == result


async def test_jobs_that_are_not_tasks_of_django_have_no_result(jobs: Harness, tasks: Any) -> None:
    from django.tasks import default_task_backend
    from django.tasks.exceptions import TaskResultDoesNotExist

    app: App = jobs.app
    others = [
        await app.queue("default").enqueue({"no": "task"}),
        await app.queue("default").enqueue({}, task="os.path.join"),
        await app.queue("default").enqueue({}, task="gone.tasks.send"),
    ]
    for ref in [*(job.ref for job in others), "default/unknown", "123"]:
        with pytest.raises(TaskResultDoesNotExist, match=ref):
            await default_task_backend.aget_result(ref)


def test_workers_serve_all_queues_of_the_backend(manage: Manage) -> None:
    run = manage("penstock", "worker", "--burst", "--no-live")
    assert run.returncode == 0, run.stderr
    assert "works on default, orders, slow" in run.stderr


RUN = """
import django
django.setup()
from tests.integrations.django.shop.background import ship, fail_until
from tests.integrations.django.shop.models import Order
print(ship.enqueue(Order.objects.create(item="tea").pk).id)
print(fail_until.enqueue(9).id)
"""
READ = """
import os, sys, django
django.setup()
from django.tasks import default_task_backend
done, failed = map(default_task_backend.get_result, sys.argv[1:])
assert done.return_value[0] == "tea" and done.return_value[1] != os.getpid()
print(failed.status, failed.attempts, [error.traceback.splitlines()[-1] for error in failed.errors])
"""


@pytest.mark.parametrize("engine", ["sqlite", "valkey"])
def test_a_worker_process_runs_tasks_and_other_processes_read_their_results(
    engine: str, manage: Manage, request: pytest.FixtureRequest
) -> None:
    variables = {"DJANGO_SETTINGS_MODULE": "tests.integrations.django.shop.settings"}
    if engine == "valkey":
        variables["STORE"] = f"{request.getfixturevalue('valkey_url')}?namespace=django-{uuid7()}"
    enqueued = manage("-c", RUN, **variables)
    worked = manage("penstock", "worker", "--burst", "--no-live", **variables)
    assert worked.returncode == 0, worked.stderr
    read = manage("-c", READ, *enqueued.stdout.split(), **variables)
    assert read.stdout.strip() == "FAILED 2 ['LookupError: attempt 1', 'LookupError: attempt 2']", read.stderr
