"""Enqueueing when the transaction commits, and connections around jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from penstock import InvalidInput, State
from penstock.testing import SyncHarness, harness


@pytest.fixture
def jobs() -> Iterator[SyncHarness]:
    """The app of the project under test."""
    from penstock.integrations.django import app

    with harness(app) as under_test:
        yield under_test.sync


@pytest.fixture
def ship() -> Any:
    from tests.integrations.django.shop.tasks import ship

    return ship


def test_a_job_is_enqueued_when_the_transaction_commits(jobs: SyncHarness, ship: Any) -> None:
    from django.db import transaction

    from penstock.integrations.django import enqueue_on_commit
    from tests.integrations.django.shop.models import Order

    with transaction.atomic():
        order = Order.objects.create(item="tea")
        job = enqueue_on_commit(ship, order.pk)
        jobs.assert_enqueued(ship, count=0)
    jobs.assert_enqueued(ship, order.pk, count=1)
    jobs.drain()
    assert ship.app.sync.job(job.ref).result("10s") == "tea"


def test_nothing_is_enqueued_when_the_transaction_or_the_savepoint_is_rolled_back(
    jobs: SyncHarness, ship: Any
) -> None:
    from django.db import transaction

    from penstock.integrations.django import enqueue_on_commit

    with suppress(ZeroDivisionError), transaction.atomic():
        enqueue_on_commit(ship, 1)
        raise ZeroDivisionError
    with transaction.atomic():
        with suppress(ZeroDivisionError), transaction.atomic():
            enqueue_on_commit(ship, 2)
            raise ZeroDivisionError
        enqueue_on_commit(ship, 3)
    jobs.assert_enqueued(ship, 3, count=1)
    jobs.assert_enqueued(ship, count=1)


def test_a_view_that_raises_enqueues_nothing(jobs: SyncHarness, ship: Any) -> None:
    from django.test import Client

    from tests.integrations.django.shop.urls import Refused

    with pytest.raises(Refused):
        Client().get("/orders/tea?refuse")
    jobs.assert_enqueued(ship, count=0)
    ref = Client().get("/orders/milk").content.decode()
    assert ship.app.sync.job(ref).get().state is State.WAITING


def test_outside_a_transaction_a_job_is_enqueued_at_once_with_its_options(
    jobs: SyncHarness, ship: Any
) -> None:
    from penstock.integrations.django import enqueue_on_commit

    job = enqueue_on_commit(ship.options(id="order-7", delay="5m", queue="slow"), 7)
    assert job.ref == "slow/order-7"
    assert ship.app.sync.job(job.ref).get().state is State.SCHEDULED


def test_arguments_that_do_not_fit_raise_in_the_transaction(jobs: SyncHarness, ship: Any) -> None:
    from django.db import transaction

    from penstock.integrations.django import enqueue_on_commit

    with pytest.raises(InvalidInput), transaction.atomic():
        enqueue_on_commit(ship, "seven")
    jobs.assert_enqueued(ship, count=0)


async def test_an_async_caller_awaits_it(ship: Any) -> None:
    from asgiref.sync import sync_to_async
    from django.core.exceptions import SynchronousOnlyOperation
    from django.db import transaction

    from penstock.integrations.django import aenqueue_on_commit, app, enqueue_on_commit

    async with harness(app) as h:
        with pytest.raises(SynchronousOnlyOperation, match="await aenqueue_on_commit"):
            enqueue_on_commit(ship, 1)
        block = transaction.atomic()
        await sync_to_async(block.__enter__)()
        await aenqueue_on_commit(ship, 1)
        await h.assert_enqueued(ship, count=0)
        await sync_to_async(block.__exit__)(None, None, None)
        await h.assert_enqueued(ship, 1, count=1)

        block = transaction.atomic()
        await sync_to_async(block.__enter__)()
        await aenqueue_on_commit(ship, 2)
        await sync_to_async(block.__exit__)(ZeroDivisionError, ZeroDivisionError(), None)
        await h.assert_enqueued(ship, 2, count=0)


def test_the_connection_of_a_thread_is_closed_after_each_job(jobs: SyncHarness) -> None:
    from tests.integrations.django.shop.tasks import is_open_before

    handles = is_open_before.sync.enqueue_many([is_open_before.job(), is_open_before.job()])
    jobs.drain()
    assert [handle.result("10s") for handle in handles] == [False, False]


async def test_the_connection_of_the_thread_of_asynchronous_queries_is_closed_after_each_job() -> None:
    from asgiref.sync import sync_to_async
    from django.db import connections

    from penstock.integrations.django import app
    from tests.integrations.django.shop.models import Order
    from tests.integrations.django.shop.tasks import aship

    def connect() -> None:
        # Looked up in the thread that runs queries: each thread has a connection of its own.
        connections["default"].ensure_connection()

    order = await Order.objects.acreate(item="tea")
    async with harness(app) as h:
        await sync_to_async(connect)()
        assert await sync_to_async(lambda: connections["default"].connection is not None)()
        job = await aship.enqueue(order.pk)
        await h.drain()
        assert await job.result("10s") == "tea"
        assert await sync_to_async(lambda: connections["default"].connection)() is None
