"""Short ids in tables, and every way to name a job: its id, its ref, the end of its id."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock import App, uuid7
from penstock.cli import jobview
from penstock.cli.errors import CommandLineError, NotFound
from penstock.cli.jobview import find_job, short_ids
from tests.cli.conftest import Shell
from tests.cli.terminal import Terminal

pytestmark = pytest.mark.timeout(300)


def test_a_generated_id_is_shortened_to_its_end_and_a_chosen_one_is_not() -> None:
    id = uuid7()
    assert short_ids([id, "report-2026-11"]) == {id: id[-8:], "report-2026-11": "report-2026-11"}


def test_short_ids_are_longer_where_they_would_be_alike() -> None:
    one, two, three = "0" * 32, "1" + "0" * 31, "2" * 22 + "0" * 10
    assert short_ids([one, two, three]) == {one: one, two: two, three: "2" + "0" * 10}
    assert short_ids([three, "chosen-" + "0" * 8]) == {
        three: "0" * 9,
        "chosen-" + "0" * 8: "chosen-" + "0" * 8,
    }


def test_ten_thousand_ids_are_shortened_together() -> None:
    ids = [uuid7() for _ in range(10_000)]
    assert len(set(short_ids(ids).values())) == 10_000


@pytest.fixture(params=["sqlite", "valkey"])
async def app(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[App]:
    url = (
        f"sqlite:///{tmp_path}/jobs.db"
        if request.param == "sqlite"
        else request.getfixturevalue("valkey_url")
    )
    async with App(url, namespace=f"ids-{uuid7()}") as app:
        yield app


async def test_a_job_is_found_by_its_id_its_ref_and_its_end(app: App) -> None:
    job = await app.queue("mail").enqueue("x")
    await app.queue("other").enqueue("y")

    for text in (job.id, job.ref, job.id[-8:], f"mail/{job.id[-8:]}", job.id[-20:]):
        assert (await find_job(app, text, None)).ref == job.ref
    for text in (job.id, job.id[-8:]):
        assert (await find_job(app, text, "mail")).ref == job.ref
        with pytest.raises(NotFound, match="queue 'other'"):
            await find_job(app, text, "other")
    with pytest.raises(NotFound, match="any queue"):
        await find_job(app, f"other/{job.id[-8:]}", None)


async def test_an_end_that_is_too_short_is_not_looked_for(app: App) -> None:
    job = await app.queue("mail").enqueue("x")

    with pytest.raises(NotFound, match="at least the last 8 characters"):
        await find_job(app, job.id[-7:], None)


async def test_an_exact_id_goes_before_an_end(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue("x", id="invoice-12345678")
    await queue.enqueue("y", id="12345678")

    assert (await find_job(app, "12345678", None)).payload == "y"


async def test_what_names_several_jobs_is_refused_with_their_refs(app: App) -> None:
    for queue, id in (
        ("mail", "a-12345678"),
        ("mail", "b-12345678"),
        ("other", "c-12345678"),
        ("other", "mail/x"),
    ):
        await app.queue(queue).enqueue("x", id=id)
    await app.queue("mail").enqueue("x", id="x")

    with pytest.raises(CommandLineError) as ends:
        await find_job(app, "12345678", None)
    assert all(f"{letter}-12345678" in str(ends.value) for letter in ("mail/a", "mail/b", "other/c"))
    with pytest.raises(CommandLineError, match="other/mail/x, mail/x"):
        await find_job(app, "mail/x", None)
    assert (await find_job(app, "other/mail/x", None)).id == "mail/x"
    assert (await find_job(app, "mail/x", "other")).id == "mail/x"


async def test_of_a_large_queue_both_ends_of_each_state_are_searched(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobview, "SCANNED_WHOLE", 5)
    monkeypatch.setattr(jobview, "SCANNED_OF_STATE", 2)
    queue = app.queue("mail")
    await queue.enqueue_many(range(6), ids=[f"number-{n:08}" for n in range(6)])

    for n in (0, 1, 4, 5):
        assert (await find_job(app, f"{n:08}", None)).payload == n
    with pytest.raises(NotFound, match="more than 5 jobs, give the whole id"):
        await find_job(app, f"{2:08}", None)
    assert (await find_job(app, f"number-{2:08}", None)).payload == 2


async def test_a_ref_with_an_unknown_queue_names_the_likely_one(app: App) -> None:
    await app.queue("mail").enqueue(1, id="x")
    with pytest.raises(NotFound, match=r"the queue 'mial' does not exist\. Did you mean 'mail'\?"):
        await find_job(app, "mial/x", None)
    for name in ("mail/missing", "missing-job"):
        with pytest.raises(NotFound, match=r"the job is no longer kept\.$"):
            await find_job(app, name, None)


def test_commands_take_short_ids_and_print_whole_ones(on_both: Shell) -> None:
    told = on_both.json("enqueue", "true")
    id, ref = told["id"], told["ref"]
    assert ref == f"default/{id}"

    assert on_both.json("show", id[-8:])["ref"] == ref
    assert on_both.json("why", ref)["ref"] == ref
    assert on_both.json("list")[0]["ref"] == ref
    assert on_both.ok("list").split()[7] == id, "a script gets whole ids"
    assert on_both.ok("cancel", id[-8:]) == f"{id} cancelled\n"
    assert on_both.json("retry", ref, id[-8:]) == [{"id": id, "ref": ref, "answer": "retried"}]
    events = [json.loads(line) for line in on_both.ok("events", "--id", id[-10:], "--json").splitlines()]
    assert {event["ref"] for event in events} == {ref}
    assert "was not found" in on_both.refused("remove", "0" * 8, code=3)
    assert on_both.ok("logs", id[-8:]) == ""


def test_a_shell_completes_ids_refs_and_ends(penstock: Shell) -> None:
    told = penstock.json("enqueue", "true")
    id, ref = told["id"], told["ref"]

    def completed(typed: str) -> str:
        words = {"COMP_WORDS": f"penstock show {typed}", "COMP_CWORD": "2"}
        return str(penstock.ok(env={"_PENSTOCK_COMPLETE": "bash_complete", **words})).strip()

    assert completed(id[:4]) == completed(id[-8:]) == f"plain,{id}"
    assert completed(ref[:10]) == f"plain,{ref}"
    assert completed(id[-7:]) == ""


def test_a_table_at_a_terminal_has_short_ids(penstock: Shell) -> None:
    id = penstock.ok("enqueue", "true").strip()

    with Terminal(penstock, "list") as terminal:
        shown = terminal.read_until(id[-8:])
        assert id not in shown


def test_the_beginning_of_an_id_is_answered_with_a_hint(penstock: Shell) -> None:
    id = penstock.ok("enqueue", "true").strip()
    said = penstock.refused("show", id[:10], code=3)
    assert "Of an id, only the end can stand for the whole: give its last 8 characters or more." in said
