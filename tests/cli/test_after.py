"""``penstock enqueue --after``: where an id is looked up, and what is said of an unknown one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Shell

pytestmark = pytest.mark.timeout(300)

APP = """
from penstock import App

app = App()

@app.task(queue="mail")
async def send(to: str) -> str:
    return to
"""
SEND = ("enqueue", "--task", "send", '{"to": "ada"}')


@pytest.fixture
def mail(on_both: Shell) -> Shell:
    (on_both.folder / "tasks.py").write_text(APP)
    on_both.environment["PENSTOCK_APP"] = "tasks:app"
    return on_both


def test_a_bare_id_is_looked_up_in_the_queue_of_the_task(mail: Shell) -> None:
    mail.ok(*SEND, "--id", "first")
    mail.ok(*SEND, "--id", "second", "--after", "first")

    shown = mail.json("show", "mail/second")
    assert (shown["state"], shown["blocked_by"]) == ("blocked", "children")


@pytest.mark.parametrize("after", ["nope", "default/nope"])
def test_a_job_of_a_task_after_an_unknown_one_is_refused(mail: Shell, after: str) -> None:
    mail.ok("enqueue", "--id", "base", "true")
    queue = "default" if "/" in after else "mail"

    said = mail.refused(*SEND, "--id", "second", "--after", after, code=3)

    assert f"job 'nope' was not found in queue '{queue}'" in said
    assert "nothing was written" in said
    mail.refused("show", "mail/second", code=3)


def test_a_command_after_an_unknown_job_of_another_queue_is_refused(on_both: Shell) -> None:
    said = on_both.refused("enqueue", "--after", "mail/nope", "true", code=3)
    assert "job 'nope' was not found in queue 'mail'" in said


def test_a_line_after_an_unknown_job_of_another_queue_is_refused(on_both: Shell, tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text('{"command": "true", "id": "late", "after": "mail/nope"}\n')

    said = on_both.refused("enqueue", "-f", "jobs", code=3)

    assert "job 'nope' was not found in queue 'mail'" in said


def test_a_job_waits_for_one_of_another_queue(mail: Shell) -> None:
    mail.ok("enqueue", "--id", "base", "true")
    mail.ok(*SEND, "--id", "second", "--after", "default/base")

    assert mail.json("show", "mail/second")["state"] == "blocked"
