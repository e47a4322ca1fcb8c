"""The table of the project."""

from __future__ import annotations

from django.db import models


class Order(models.Model):  # type: ignore[misc]  # Django has no types
    """An order, and the reference of the job that ships it."""

    item = models.TextField()
    job = models.TextField(default="")
    shipped = models.BooleanField(default=False)

    class Meta:
        app_label = "shop"
