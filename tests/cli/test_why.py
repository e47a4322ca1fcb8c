"""Each tool names the cause that keeps a job from running."""

from __future__ import annotations

import asyncio

import pytest
from textual.widgets import DataTable, Static

from penstock import App
from penstock.cli.topscreen import Details, TopScreen
from tests.causes import CAUSES, Cause, plant
from tests.cli.conftest import Shell

# Each starts the script many times, which takes a while where the machine is busy.
pytestmark = pytest.mark.timeout(300)


def store_of(shell: Shell) -> str:
    return shell.environment.get("PENSTOCK_URL", f"sqlite:///{shell.folder}/penstock.db")


def in_a_column(cause: Cause) -> str:
    """Return how a list begins to say it: it reads each queue once, and so knows neither children nor old pauses."""
    words = {"paused": f"Queue {cause.queue} is paused", "group paused": "Group other is paused"}
    return words.get(cause.kind, "other jobs" if cause.kind == "children" else cause.words[0])[:40]


@pytest.fixture
def planted(on_both: Shell) -> Shell:
    """A store with a job for each cause."""

    async def put_in() -> None:
        async with App(store_of(on_both)) as app:
            await plant(app)

    asyncio.run(put_in())
    return on_both


def test_why_names_each_cause_and_its_remedy(planted: Shell) -> None:
    for cause in CAUSES:
        text, remedy = planted.ok("why", cause.id).splitlines()
        assert all(words in text for words in cause.words), text
        assert cause.remedy in remedy
    told = planted.json("why", "second")
    assert (told["id"], told["queue"], told["state"]) == ("second", "capped", "waiting")
    assert (told["kind"], told["jobs"], told["until"]) == ("queue limit", ["capped/first-of-queue"], None)


def test_why_of_an_unknown_job_fails(on_both: Shell) -> None:
    on_both.ok("enqueue", "true")
    on_both.ok("why", on_both.json("list")[0]["id"])
    assert "job 'nobody' was not found" in on_both.refused("why", "nobody", code=3)


def test_show_and_list_name_each_cause(planted: Shell) -> None:
    listed = {(job["queue"], job["id"]): job["why"] for job in planted.json("list")}
    for cause in CAUSES:
        assert listed[cause.queue, cause.id]["kind"] == cause.kind
    table = {line.split()[0]: line for line in planted.ok("list").splitlines()[1:] if line.strip()}
    for cause in CAUSES:
        assert in_a_column(cause) in table[cause.id]
    for cause in (CAUSES[0], CAUSES[3], CAUSES[8]):
        shown = planted.ok("show", cause.id)
        assert all(words in shown for words in cause.words)
        assert cause.remedy in shown
        assert planted.json("show", cause.id)["why"]["kind"] == cause.kind


def test_status_says_why_a_queue_stands_still(planted: Shell) -> None:
    told = {row["queue"]: row["why"] for row in planted.json("status")["queues"]}
    for cause in CAUSES:
        if cause.id not in ("quiet", "parent"):
            assert told[cause.queue]["kind"] == cause.kind
    assert told["grouped"]["job"] == "behind"
    text = planted.ok("status")
    assert "\npaused: Queue paused is paused since 20" in text
    assert "\ntimed/tomorrow: It is not due until 20" in text
    assert "none works on alone: `penstock worker [MODULE:APP] -q alone`" in text
    assert "No worker runs" not in text


async def test_top_shows_each_cause(on_both: Shell) -> None:
    async with App(store_of(on_both)) as app:
        await plant(app)
        top = TopScreen(app, "default", every=3600)
        async with top.run_test(size=(160, 50)) as pilot:
            table = top.query_one("#jobs", DataTable)
            rows = [[str(cell) for cell in table.get_row_at(at)] for at in range(table.row_count)]
            why = {row[0]: row[-1] for row in rows}
            for cause in CAUSES:
                assert in_a_column(cause) in why[cause.id]
            top.push_screen(Details(app, "flows/parent", every=3600))
            await pilot.pause()
            facts = str(top.screen.query_one("#facts-text", Static).render())
            assert "It waits for 2 jobs to end: flows/child-1, flows/child-2." in facts
