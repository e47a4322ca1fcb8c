"""``pause``, ``resume`` and ``drain`` take queues as arguments, and refuse a queue that does not exist."""

from __future__ import annotations

import asyncio
import re

import pytest

from penstock import App
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
    assert "There is: mail." in penstock.refused("clean", "done", "--yes", "-q", "typo", code=3)


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
    assert on_both.ok("resume", "groups", "--group", "ada") == "resumed: group ada of groups\n"


def test_a_group_that_does_not_exist_is_refused(on_both: Shell) -> None:
    on_both.ok("enqueue", "true", "--group", "ada", "-q", "mail")
    on_both.ok("enqueue", "true", "-q", "reports")
    assert on_both.ok("pause", "--group", "ada") == "paused: group ada of mail\n"
    said = on_both.refused("resume", "--group", "adda", code=3)
    assert "the group 'adda' does not exist in mail, reports. Did you mean 'ada'?" in said
    assert "Add --create" in on_both.refused("pause", "mail", "--group", "bob", code=3)
    assert on_both.ok("resume", "--group", "ada") == "resumed: group ada of mail\n"


def test_a_pause_ends_by_itself(on_both: Shell) -> None:
    on_both.ok("enqueue", "true", "--id", "a")
    said = on_both.ok("pause", "default", "--for", "1h")
    assert re.fullmatch(r"paused until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d: default\n", said)
    assert re.match(r"Queue \w+ has been paused since 20.*, until 20", on_both.ok("why", "a"))
    on_both.ok("resume", "default")
    assert on_both.ok("pause", "--until", "2099-01-01 00:00") == "paused until 2099-01-01 00:00:00: default\n"
    # The longer one stays.
    assert on_both.ok("pause", "--for", "1h").startswith("paused until 2099-01-01 00:00:00, as it was before")
    on_both.ok("resume")
    on_both.ok("pause")
    assert "until it is resumed, as it was before" in on_both.ok("pause", "--for", "1h")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--until", "5min"], "'5min' is a duration. Give --for 5min"),
        (["--until", "2020-01-01"], "--until 2020-01-01 00:00 is in the past"),
        (["--until", "18:00", "--for", "1h"], "Give one"),
    ],
)
def test_the_end_of_a_pause_is_checked(penstock: Shell, options: list[str], reason: str) -> None:
    penstock.ok("enqueue", "true")
    assert reason in penstock.refused("pause", *options, code=2)
    assert paused(penstock) == set()


def test_status_takes_a_queue_as_an_argument(penstock: Shell) -> None:
    for name in ("mail", "reports"):
        penstock.ok("enqueue", "true", "-q", name)
    assert [row["queue"] for row in penstock.json("status", "mail")["queues"]] == ["mail"]
    assert [row["queue"] for row in penstock.json("status", "mail", "-q", "mail")["queues"]] == ["mail"]
    assert "give one queue, got mail and reports" in penstock.refused(
        "status", "mail", "-q", "reports", code=2
    )
    assert "Did you mean 'mail'? For a job, run: penstock show mial" in penstock.refused(
        "status", "mial", code=3
    )


def test_clear_takes_queues_as_arguments(penstock: Shell) -> None:
    for name in ("mail", "reports", "films"):
        penstock.ok("enqueue", "true", "-q", name)
    assert penstock.ok("clear", "mail", "-q", "films", "--yes") == "2 jobs removed\n"
    assert [job["queue"] for job in penstock.json("list")] == ["reports"]


def test_resume_names_the_queues_that_were_not_paused(on_both: Shell) -> None:
    for name in ("mail", "reports"):
        on_both.ok("enqueue", "true", "-q", name)
    on_both.ok("pause", "mail", "--for", "1h")
    assert on_both.ok("resume") == "resumed: mail\nnot paused: reports\n"
    assert on_both.ok("resume", "mail") == "not paused: mail\n"


def test_limits_and_budgets_take_the_queue_as_an_argument(on_both: Shell) -> None:
    on_both.ok("enqueue", "true", "-q", "mail")
    assert on_both.ok("limit", "set", "mail", "--concurrency", "5") == "mail: concurrency 5\n"
    assert [row["queue"] for row in on_both.json("limit", "show", "mail")] == ["mail"]
    assert on_both.json("budget", "show", "mail") == []
    assert "got mail and films" in on_both.refused("limit", "show", "mail", "-q", "films", code=2)
    assert "Did you mean --concurrency 5?" in on_both.refused("limit", "set", "mail", "5", code=2)
    assert "Did you mean --rate 5/s?" in on_both.refused("limit", "set", "mail", "5/s", code=2)


async def test_a_limit_shows_what_it_holds_back(on_both: Shell) -> None:
    run = asyncio.to_thread
    await run(on_both.ok, "enqueue", "true", "-q", "slow")
    await run(on_both.ok, "enqueue", "true", "-q", "slow")
    await run(on_both.ok, "limit", "set", "slow", "--concurrency", "1")
    url = on_both.environment.get("PENSTOCK_URL", f"sqlite:///{on_both.folder}/penstock.db")
    async with App(url) as app:
        assert await app.queue("slow").claim_one(wait=0) is not None
        [row] = await run(on_both.json, "limit", "show", "slow")
    assert (row["waiting"], row["active"], row["why"]) == (1, 1, "concurrency")
