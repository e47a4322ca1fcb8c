"""The settings of the project: the variables STORE and DATABASE say where its data are."""

from __future__ import annotations

import os

import django

SECRET_KEY = "not secret"
USE_TZ = True
ROOT_URLCONF = "tests.integrations.django.shop.urls"
INSTALLED_APPS = ["penstock.integrations.django", "tests.integrations.django.shop"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("DATABASE", ":memory:"),
        "CONN_MAX_AGE": 0,
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PENSTOCK = {"URL": os.environ.get("STORE", "memory://shop"), "OPTIONS": {"attempts": 2, "backoff": "1ms"}}
if django.VERSION >= (6, 0):
    TASKS = {
        "default": {
            "BACKEND": "penstock.integrations.django.PenstockBackend",
            "QUEUES": ["default", "slow"],
        }
    }
