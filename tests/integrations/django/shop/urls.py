"""The views of the project."""

from __future__ import annotations

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import path

from penstock.integrations.django import aenqueue_on_commit, enqueue_on_commit
from tests.integrations.django.shop.models import Order
from tests.integrations.django.shop.tasks import aship, ship


class Refused(Exception):
    """The view changes its mind after it has enqueued."""


@transaction.atomic
def create(request: HttpRequest, item: str) -> HttpResponse:
    order = Order.objects.create(item=item)
    order.job = enqueue_on_commit(ship, order.pk).ref
    order.save()
    if "refuse" in request.GET:
        raise Refused
    return HttpResponse(order.job)


async def acreate(request: HttpRequest, item: str) -> HttpResponse:
    order = await Order.objects.acreate(item=item)
    return HttpResponse((await aenqueue_on_commit(aship, order.pk)).ref)


urlpatterns = [path("orders/<item>", create), path("async-orders/<item>", acreate)]
