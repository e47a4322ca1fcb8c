"""The project of docs/django.md, as a reader follows it: write the files, run the commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import django
import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "django.md").read_text()

# What the reader has already.
MANAGE = (ROOT / "tests" / "integrations" / "django" / "manage.py").read_text()
MODELS = """
from django.db import models


class Order(models.Model):
    item = models.TextField()
    state = models.TextField(default="new")
"""
VISIT = """
import django
django.setup()
from django.test import Client

print(Client().get("/orders/tea").json()["job"])
"""
READ = """
import sys
import django
django.setup()
from django.test import Client

print(Client().get(f"/jobs/{sys.argv[1]}").json())
"""
GREET = """
import django
django.setup()
from shop.letters import welcome

print(welcome.enqueue("ada@example.org").id)
"""
GREETED = """
import sys
import django
django.setup()
from shop.letters import welcome

print(welcome.get_result(sys.argv[1]).return_value)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The project with the files of the page."""
    shop = tmp_path / "shop"
    shop.mkdir()
    files = dict(re.findall(r'^```python title="(\w+\.py)"\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE))
    assert set(files) == {"settings.py", "tasks.py", "views.py", "tasks_settings.py", "letters.py"}
    for name, text in (files | {"__init__.py": "", "models.py": MODELS}).items():
        (shop / name).write_text(text)
    (tmp_path / "manage.py").write_text(MANAGE.replace("tests.integrations.django.shop", "shop"))
    _run(tmp_path, "manage.py", "migrate", "--run-syncdb", "--verbosity=0")
    return tmp_path


def test_the_project_of_the_page_runs_the_job_of_its_view(folder: Path) -> None:
    assert "python manage.py penstock worker\n" in PAGE
    ref = _run(folder, "-c", VISIT)
    assert _run(folder, "-c", READ, ref) == "{'state': 'waiting', 'result': None}"
    _run(folder, "manage.py", "penstock", "worker", "--burst", "--no-live")
    assert _run(folder, "-c", READ, ref) == "{'state': 'completed', 'result': 'tea is on its way'}"


@pytest.mark.skipif(django.VERSION < (6, 0), reason="Django 6 has django.tasks")
def test_the_task_of_django_runs(folder: Path) -> None:
    settings = "shop.tasks_settings"
    id = _run(folder, "-c", GREET, settings=settings)
    worker = ["penstock", "worker", "--include", "shop.letters", "--burst", "--no-live"]
    _run(folder, "manage.py", *worker, settings=settings)
    assert _run(folder, "-c", GREETED, id, settings=settings) == "letter for ada@example.org, attempt 1"


def test_the_page_has_the_capabilities_and_the_number_of_tests_that_are_left_out() -> None:
    pytest.importorskip("django.tasks")
    from penstock.integrations.django import PenstockBackend
    from tests.integrations.django.upstream import NOT_OURS

    names = re.findall(r"`(supports_\w+)`", PAGE)
    assert [getattr(PenstockBackend, name) for name in names] == [True] * 4
    assert len(NOT_OURS) == 6
    assert "except six:" in PAGE


def _run(folder: Path, *arguments: str, settings: str = "shop.settings") -> str:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "DATABASE"))
    }
    run = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder,
        env={**kept, "DJANGO_SETTINGS_MODULE": settings},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()
