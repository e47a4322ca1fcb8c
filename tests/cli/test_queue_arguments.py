"""``pause``, ``resume`` and ``drain`` take queues as arguments, and refuse a queue that does not exist."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Shell


def paused(shell: Shell) -> set[str]:
    return {row["queue"] for row in shell.json("status")["queues"] if row["paused"]}


def test_queues_are_arguments_or_options(on_both: Shell) -> None:
    for name in ("mail", "reports", "films"):
        on_both.ok("enqueue", "true", "-q", name)
    assert on_both.ok("pause", "mail", "reports") == "paused: mail, reports\n"
    assert paused(on_both) == {"mail", "reports"}
    on_both.ok("pause", "mail", "-q", "films")
    assert paused(on_both) == {"mail", "reports", "films"}
    assert on_both.ok("resume", "mail") == "resumed: mail\n"
    assert paused(on_both) == {"reports", "films"}
    assert on_both.ok("drain", "mail", "-q", "films", "--yes") == "2 jobs removed\n"
    assert [job["queue"] for job in on_both.json("list")] == ["reports"]


@pytest.mark.parametrize("command", [["pause"], ["resume"], ["drain", "--yes"], ["clear", "--yes"]])
def test_a_queue_that_does_not_exist_is_refused_with_the_nearest_names(
    penstock: Shell, command: list[str]
) -> None:
    penstock.ok("enqueue", "true", "-q", "mail")
    typo = ["-q", "mial"] if command[0] == "clear" else ["mail", "mial"]
    said = penstock.refused(*command, *typo, code=3)
    assert "the queue 'mial' does not exist. Did you mean 'mail'?" in said
    assert paused(penstock) == set()
    assert len(penstock.json("list")) == 1
    assert "Did you mean 'mail'?" in penstock.refused("clean", "done", "--yes", "-q", "typo", code=3)


def test_a_queue_can_be_paused_before_its_first_job(on_both: Shell) -> None:
    on_both.ok("enqueue", "true", "-q", "mail")
    assert "Add --create" in on_both.refused("pause", "new", code=3)
    assert on_both.ok("pause", "new", "--create") == "paused: new\n"
    assert on_both.ok("resume", "new") == "resumed: new\n"
    on_both.ok("pause", "new", "--create")
    on_both.ok("enqueue", "true", "-q", "new")
    assert paused(on_both) == {"new"}
    on_both.ok("resume", "new")
    assert paused(on_both) == set()
    on_both.ok("pause", "groups", "--group", "ada", "--create")
    assert on_both.ok("resume", "groups", "--group", "ada") == "resumed: groups\n"
