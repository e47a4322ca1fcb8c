"""A project of Django with real worker processes: views, commands, and tasks of ``tasks.py``."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from penstock import App, uuid7
from tests.integrations.django.conftest import Manage

VISIT = """
import django
django.setup()
from django.test import Client
client = Client()
print(client.get("/orders/tea").content.decode())
print(client.get("/async-orders/milk").content.decode())
from tests.integrations.django.shop.tasks import count
print(count.sync.enqueue(0).ref)
"""


@pytest.mark.parametrize(("engine", "processes"), [("sqlite", "1"), ("sqlite", "2"), ("valkey", "1")])
def test_a_worker_process_runs_the_jobs_of_views(
    engine: str, processes: str, manage: Manage, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    stores = {"STORE": f"sqlite:///{tmp_path}/jobs.db"}
    if engine == "valkey":
        stores["STORE"] = f"{request.getfixturevalue('valkey_url')}?namespace=django-{uuid7()}"
    visit = manage("-c", VISIT, **stores, DJANGO_SETTINGS_MODULE="tests.integrations.django.shop.settings")
    refs = visit.stdout.split()
    assert len(refs) == 3, visit.stderr

    options = ["--burst", "--no-live", "--processes", processes]
    worked = manage("penstock", "worker", *options, **stores)
    assert worked.returncode == 0, worked.stderr

    with App(stores["STORE"]).sync as store:
        tea, milk, (count, _) = [store.job(ref).result("10s") for ref in refs]
    assert (tea, milk, count) == ("tea", "milk", 2)
    with closing(sqlite3.connect(tmp_path / "db.sqlite3")) as database:
        orders = database.execute("SELECT item, shipped FROM shop_order ORDER BY id").fetchall()
    assert orders == [("tea", 1), ("milk", 1)]


def test_commands_take_options_of_django_and_of_penstock(manage: Manage) -> None:
    settings = "tests.integrations.django.shop.settings"
    first = manage("penstock", "enqueue", "--queue", "orders", "--settings", settings, "--", "true")
    assert first.returncode == 0, first.stderr
    status = manage(
        "penstock", "status", "--json", f"--settings={settings}", DJANGO_SETTINGS_MODULE="unknown"
    )
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)


def test_the_help_and_the_exit_codes_are_those_of_penstock(manage: Manage) -> None:
    shown = manage("penstock", "--help")
    assert shown.returncode == 0, shown.stderr
    assert "Usage: penstock" in shown.stdout
    missing = manage("penstock", "show", "unknown")
    assert missing.returncode == 3
    assert "does not exist" in missing.stderr


def test_a_worker_does_not_start_with_settings_that_are_not_valid(manage: Manage) -> None:
    run = manage("penstock", "worker", "--burst", STORE="postgres://localhost")
    assert run.returncode == 1
    assert "(penstock.E003) PENSTOCK['URL'] is not valid" in run.stderr
    assert "HINT: Give the URL of a store" in run.stderr


def test_a_plain_command_finds_the_project_by_its_module(manage: Manage) -> None:
    target = "penstock.integrations.django.project:app"
    run = manage(
        "-c",
        f"import sys; sys.argv = ['penstock', 'worker', '{target}', '--burst', '--no-live']; "
        "from penstock.cli.main import main; main()",
        DJANGO_SETTINGS_MODULE="tests.integrations.django.shop.settings",
    )
    assert run.returncode == 0, run.stderr
    assert "works on" in run.stderr
    assert "orders" in run.stderr


CALL = """
import django
django.setup()
from django.core.management import call_command

try:
    call_command("penstock", "config", "--help")
except SystemExit as end:
    print("ended with", end.code)
"""


def test_call_command_takes_the_words_of_the_command(manage: Manage) -> None:
    run = manage("-c", CALL, DJANGO_SETTINGS_MODULE="tests.integrations.django.shop.settings")
    assert run.returncode == 0, run.stderr
    assert "Usage: penstock config" in run.stdout
    assert run.stdout.endswith("ended with 0\n")


def test_the_app_of_the_settings_is_an_app() -> None:
    from penstock.integrations.django import app

    assert isinstance(app, App)
    assert app.defaults.attempts == 2
