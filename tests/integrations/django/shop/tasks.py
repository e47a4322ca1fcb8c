"""The tasks of the project, found because the file has this name."""

from __future__ import annotations

import os
from typing import Any

import django
from django.db import connection

from penstock.integrations.django import app
from tests.integrations.django.shop.models import Order


@app.task(queue="orders")
def ship(order: int) -> Any:
    Order.objects.filter(pk=order).update(shipped=True)
    return Order.objects.get(pk=order).item


@app.task(queue="orders")
async def aship(order: int) -> Any:
    await Order.objects.filter(pk=order).aupdate(shipped=True)
    return (await Order.objects.aget(pk=order)).item


@app.task(queue="orders", runner="process")
def count(minimum: int) -> list[int]:
    return [Order.objects.filter(pk__gte=minimum).count(), os.getpid()]


@app.task(queue="orders")
def is_open_before() -> bool:
    """Return whether the thread has a connection from the job before, and open one."""
    was_open = connection.connection is not None
    connection.ensure_connection()
    return was_open


if django.VERSION >= (6, 0):
    import tests.integrations.django.shop.background  # noqa: F401
