"""``penstock worker -i``, and commands that need the tasks of several modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Shell

pytestmark = pytest.mark.timeout(300)

JOBS = "from penstock import App\n\napp = App({})\n"
MAIL = """
from jobs import app

@app.task(queue="mail")
def send(to: str) -> str:
    return f"sent to {to}"
"""


def write(folder: Path, include: str = "") -> None:
    (folder / "jobs.py").write_text(JOBS.format(include))
    (folder / "mail.py").write_text(MAIL)


@pytest.mark.parametrize(
    ("include", "options"),
    [("include=['mail']", ()), ("", ("-i", "mail")), ("", ("--include", "mail", "-p", "2"))],
)
def test_a_worker_runs_the_tasks_of_other_modules(
    penstock: Shell, tmp_path: Path, include: str, options: tuple[str, ...]
) -> None:
    write(tmp_path, include)
    id = penstock.ok("enqueue", "--task", "send", '{"to": "ada"}', "-q", "mail").strip()

    penstock.ok("worker", "jobs:app", *options, "--burst")

    assert penstock.json("show", id)["result"] == "sent to ada"


def test_a_worker_in_the_background_keeps_its_modules_when_it_is_restarted(
    penstock: Shell, tmp_path: Path
) -> None:
    write(tmp_path)
    try:
        penstock.ok("worker", "start", "jobs:app", "-i", "mail")
        penstock.ok("worker", "restart")
        assert penstock.json("worker", "status")[0]["options"] == "jobs:app --include=mail"
    finally:
        penstock("worker", "stop", "--timeout", "10")


def test_arguments_are_checked_by_a_task_of_an_included_module(penstock: Shell, tmp_path: Path) -> None:
    write(tmp_path, "include=['mail']")
    penstock.ok("config", "set", "app", "jobs:app")

    penstock.ok("enqueue", "--task", "send", '{"to": "ada"}')
    assert "whom" in penstock.refused("enqueue", "--task", "send", '{"whom": "ada"}', code=2)
    assert [job["queue"] for job in penstock.json("list")] == ["mail"]


def test_a_module_that_is_missing_or_raises_is_named_in_one_line(penstock: Shell, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "broken.py").write_text("import jobs\n\n1 / 0\n")

    assert "module 'nothing' is neither in" in penstock.refused("worker", "jobs:app", "-i", "nothing", code=3)
    said = penstock.refused("worker", "jobs:app", "-i", "broken", code=1)
    assert "module broken cannot be imported: ZeroDivisionError: division by zero" in said
    assert "broken.py, line 3)" in said
    assert "is not the name of a module" in penstock.refused("worker", "jobs:app", "-i", "mail.py/x", code=2)
    assert "--include needs the app" in penstock.refused("worker", "-i", "mail", code=2)


@pytest.mark.parametrize("options", [(), ("-p", "2"), ("-q", "mail")])
def test_a_worker_whose_app_has_no_tasks_does_not_start_even_on_a_local_store(
    penstock: Shell, tmp_path: Path, options: tuple[str, ...]
) -> None:
    write(tmp_path)

    said = penstock.refused("worker", "jobs:app", "--burst", *options, code=2)

    assert "nothing to run: its app has no tasks" in said
    assert "`penstock worker -i myproject.mail`" in said


def test_a_worker_whose_app_has_no_tasks_runs_commands_if_asked_to(penstock: Shell, tmp_path: Path) -> None:
    write(tmp_path)
    id = penstock.ok("enqueue", "true").strip()

    penstock.ok("worker", "jobs:app", "--commands", "--burst")

    assert penstock.json("show", id)["state"] == "completed"


def test_an_app_in_a_module_of_the_package_is_proposed(penstock: Shell) -> None:
    package = penstock.folder / "bazaar"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "jobs.py").write_text("from penstock import App\n\nqueue: App = App()\n")

    for target, code in (("bazaar", 2), ("bazaar:app", 3)):
        assert "bazaar.jobs:queue" in penstock.refused("worker", "--app", target, "--burst", code=code)
