"""Tasks of ``django.tasks``."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

from django.tasks import TaskContext, task

from penstock import Snooze, current_job
from tests.integrations.django.shop.models import Order

ran: list[Any] = []
released = threading.Event()


@task
def add(a: int, b: int) -> int:
    ran.append((a, b))
    return a + b


@task
async def add_async(a: int, b: int) -> int:
    return a + b


@task(queue_name="slow", takes_context=True)
def fail_until(context: TaskContext, attempt: int) -> Any:
    """Fail before this attempt, and return what the context says."""
    result = context.task_result
    assert len(result.errors) == context.attempt - 1
    if context.attempt < attempt:
        raise LookupError(f"attempt {context.attempt}")
    return context.attempt


@task(takes_context=True)
async def fail_until_async(context: TaskContext, attempt: int) -> Any:
    if context.attempt < attempt:
        raise LookupError(f"attempt {context.attempt}")
    return context.attempt


@task
def wait() -> None:
    ran.append("waiting")
    assert released.wait(30)


@task
async def wait_forever() -> None:
    ran.append("waiting")
    await asyncio.Event().wait()


@task
def snooze_once() -> str:
    if current_job().run == 1:
        raise Snooze("1ms")
    return "awake"


@task
def set_of() -> Any:
    ran.append("set")
    return {1, 2}


@task
def ship(order: int) -> list[Any]:
    return [Order.objects.get(pk=order).item, os.getpid()]
