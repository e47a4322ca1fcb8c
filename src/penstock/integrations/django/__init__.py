"""Django: settings, ``manage.py penstock``, enqueueing on commit, and a backend for ``django.tasks``.

::

    INSTALLED_APPS = [..., "penstock.integrations.django"]
    PENSTOCK = {"URL": "valkey://localhost"}

``app`` is the app of these settings; tasks are defined in the ``tasks.py`` of your applications. Names are imported
when they are first used, because Django imports this package before its settings are complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.integrations.django.backend import PenstockBackend as PenstockBackend
    from penstock.integrations.django.transactions import aenqueue_on_commit as aenqueue_on_commit
    from penstock.integrations.django.transactions import enqueue_on_commit as enqueue_on_commit

    app: App

__all__ = ["PenstockBackend", "aenqueue_on_commit", "app", "enqueue_on_commit"]


def __getattr__(name: str) -> object:
    if name == "app":
        from penstock.integrations.django.configuration import get_app

        return get_app()
    if name in ("enqueue_on_commit", "aenqueue_on_commit"):
        from penstock.integrations.django import transactions

        return getattr(transactions, name)
    if name == "PenstockBackend":
        from penstock.integrations.django.backend import PenstockBackend

        return PenstockBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
