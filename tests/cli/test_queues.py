"""Looking at queues, and operating them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import App, Queue
from penstock.cli.errors import ExitCode, explained
from penstock.cli.output import exact
from penstock.cli.queues import done_by_queue
from penstock.cli.status import read_status, workers_line
from penstock.cli.workers import read_workers
from penstock.core.job import NewJob
from penstock.errors import StorageError
from penstock.storage.values import Take
from tests.cli.conftest import Shell, until

# Each starts the script many times, which takes a while where the machine is busy.
pytestmark = pytest.mark.timeout(300)


def test_status_counts_jobs_by_queue_and_state(on_both: Shell) -> None:
    on_both.ok("enqueue", "true", "-q", "a")
    on_both.ok("enqueue", "true", "-q", "a", "--delay", "1h")
    on_both.ok("enqueue", "true", "-q", "b")
    on_both.ok("worker", "-q", "b", "--burst", "--commands")

    told = on_both.json("status")
    rows = {row["queue"]: row for row in told["queues"]}
    assert (rows["a"]["waiting"], rows["a"]["scheduled"], rows["b"]["completed"]) == (1, 1, 1)
    assert rows["b"]["completed_per_minute"] == 0.2
    assert (told["workers"], told["unattended"]) == (0, ["a"])
    table = on_both.ok("status", "-q", "a")
    store, columns, *_ = table.splitlines()
    assert store == f"store {told['store']}"
    assert columns.split()[:3] == ["queue", "scheduled", "waiting"]
    assert "no worker runs" in table


def test_looking_does_not_create_a_missing_store(penstock: Shell, tmp_path: Path) -> None:
    assert "does not exist" in penstock.refused("status", code=3)
    assert not (tmp_path / "penstock.db").exists()


def test_status_is_watched(penstock: Shell) -> None:
    penstock.ok("enqueue", "true")
    watching = penstock.start("status", "--watch", "--every", "0.1", "--json")
    try:
        assert watching.stdout is not None
        looks = [json.loads(watching.stdout.readline()) for _ in range(3)]
        assert all(look["queues"][0]["waiting"] == 1 for look in looks)
        watching.send_signal(2)
        assert watching.wait(20) == 130
    finally:
        watching.kill()
        watching.communicate()


def test_a_paused_queue_gives_nothing_until_it_is_resumed(on_both: Shell, tmp_path: Path) -> None:
    on_both.ok("enqueue", f"touch {tmp_path}/out")
    assert on_both.ok("pause", "-q", "default") == "paused: default\n"
    on_both.ok("worker", "--burst", "--commands")
    assert not (tmp_path / "out").exists()
    assert on_both.json("status")["queues"][0]["paused"]
    assert on_both.ok("resume") == "resumed: default\n"
    on_both.ok("worker", "--burst", "--commands")
    assert (tmp_path / "out").exists()


def test_jobs_are_drained_cleaned_and_cleared(on_both: Shell) -> None:
    on_both.ok(
        "enqueue",
        "-",
        input='true\ntrue\nexit 1\n{"command": "true", "delay": "1h"}\n',
        env={"PENSTOCK_ATTEMPTS": "1"},
    )
    assert "Cannot ask without a terminal: add --yes" in on_both.refused("drain", code=4)
    assert on_both.json("status")["queues"][0]["waiting"] == 3
    assert on_both.ok("drain", "--yes") == "3 jobs removed\n"
    assert on_both.json("drain", "--yes", "--scheduled") == {"default": 1}
    on_both.ok("enqueue", "-", input="true\ntrue\n")
    on_both.ok("worker", "--burst", "--commands")
    assert on_both.ok("clean", "completed", "--older-than", "1h") == "0 jobs removed\n"
    assert on_both.ok("clean", "completed", "-n", "1", "--yes") == "1 job removed\n"
    assert "add --yes" in on_both.refused("clear", code=4)
    assert on_both.ok("clear", "-y") == "1 job removed\n"
    assert sum(on_both.json("status")["queues"][0][s] for s in ("waiting", "completed", "scheduled")) == 0


async def test_nothing_is_cleared_while_a_job_of_any_queue_is_active(penstock: Shell, tmp_path: Path) -> None:
    async with App(f"sqlite:///{tmp_path}/penstock.db") as app:
        for queue in ("a", "b"):
            await app.queue(queue).enqueue({})
        await app.queue("b").claim_one(lease="1h")

    said = penstock.refused("clear", "--yes", code=4)

    assert "nothing was removed: jobs are active in b" in said
    assert "--force" in said
    assert "force=True" not in said
    assert {row["queue"]: row["waiting"] + row["active"] for row in penstock.json("status")["queues"]} == {
        "a": 1,
        "b": 1,
    }
    assert penstock.ok("clear", "--yes", "-q", "a") == "1 job removed\n"
    assert penstock.ok("clear", "--yes", "--force") == "1 job removed\n"


async def test_a_verb_that_fails_at_a_queue_says_of_which_it_was_done(tmp_path: Path) -> None:
    async def act(queue: Queue) -> int:
        if queue.name == "c":
            raise StorageError("the store is away.")
        return 1

    async with App(f"sqlite:///{tmp_path}/penstock.db") as app:
        queues = [app.queue(name) for name in ("a", "b", "c", "d")]
        with pytest.raises(StorageError) as refused:
            await done_by_queue(queues, act)

    assert explained(refused.value) == ("the store is away. It is done for: a, b.", ExitCode.STORE)


def test_schedulers_are_added_listed_paused_and_removed(on_both: Shell, tmp_path: Path) -> None:
    said = on_both.ok(
        "schedule", "add", "often", "--every", "300ms", f"echo x >> {tmp_path}/out", "--limit", "2"
    )
    assert "every 300ms" in said
    on_both.ok(
        "schedule", "add", "nightly", "--cron", "0 3 * * *", "--tz", "Europe/Berlin", "-q", "other", "true"
    )
    rows = {row["name"]: row for row in on_both.json("schedule", "list")}
    assert rows["nightly"]["when"] == "cron 0 3 * * * Europe/Berlin"
    assert rows["often"]["task"] == "penstock.command"
    assert "nightly" in on_both.ok("schedule", "list", "-q", "other")
    worker = on_both.start("worker", "--commands")
    try:
        until(lambda: (tmp_path / "out").exists() and (tmp_path / "out").read_text() == "x\nx\n")
    finally:
        worker.terminate()
        worker.communicate(timeout=30)
    on_both.ok(
        *("schedule", "add", "sale", "--every", "1h", "--tz", "Europe/Berlin", "true"),
        *("--start", "2099-12-01", "--end", "2099-12-24 12:00+00:00"),
    )
    [sale] = [row for row in on_both.json("schedule", "list") if row["name"] == "sale"]
    assert (sale["start"], sale["end"]) == ("2099-11-30T23:00:00Z", "2099-12-24T12:00:00Z")
    assert sale["next"] == sale["start"]
    bad = ("schedule", "add", "bad", "--every", "1h", "true")
    assert "is not a time" in on_both.refused(*bad, "--start", "soon", code=2)
    assert "is before start=" in on_both.refused(*bad, "--start", "2099-01-02", "--end", "2099-01-01", code=2)
    assert "is not a time zone" in on_both.refused(*bad, "--start", "2099-01-02", "--tz", "Moon/Base", code=2)
    on_both.ok("schedule", "pause", "nightly")
    assert {row["name"]: row["paused"] for row in on_both.json("schedule", "list")}["nightly"]
    on_both.ok("schedule", "resume", "nightly")
    assert on_both.ok("schedule", "remove", "nightly") == "nightly removed\n"
    assert "unknown scheduler 'nightly'" in on_both.refused("schedule", "remove", "nightly", code=3)
    assert "give the times with --cron" in on_both.refused("schedule", "add", "never", "true", code=2)
    assert "cron" in on_both.refused("schedule", "add", "bad", "--cron", "61 * * * *", "true", code=2)


def test_a_scheduler_that_several_queues_have_needs_the_queue(penstock: Shell) -> None:
    for queue in ("a", "b"):
        penstock.ok("schedule", "add", "report", "--every", "1h", "true", "-q", queue)

    for verb in ("pause", "resume", "remove"):
        said = penstock.refused("schedule", verb, "report", code=2)
        assert "several queues have a scheduler 'report': a, b. Choose one with --queue." in said
    assert [row["paused"] for row in penstock.json("schedule", "list")] == [False, False]
    penstock.ok("schedule", "pause", "report", "-q", "b")
    assert {row["queue"]: row["paused"] for row in penstock.json("schedule", "list")} == {
        "a": False,
        "b": True,
    }
    penstock.ok("schedule", "remove", "report", "-q", "b")
    penstock.ok("schedule", "remove", "report")
    assert penstock.json("schedule", "list") == []


def test_limits_are_set_shown_and_taken_away(on_both: Shell) -> None:
    on_both.ok("limit", "set", "--concurrency", "2", "--rate", "100/s")
    assert [row["group"] for row in on_both.json("limit", "show")] == [""]
    assert "concurrency 3, rate 100/s" in on_both.ok("limit", "set", "--concurrency", "3")
    assert on_both.ok("limit", "set", "--rate", "none").strip().endswith("concurrency 3")
    on_both.ok("limit", "set", "--concurrency", "2", "--rate", "100/s")
    on_both.ok("limit", "set", "--group", "*", "--concurrency", "1")
    on_both.ok("limit", "set", "--group", "ada", "--bucket", "10:5/1h")
    on_both.ok("enqueue", "true", "--group", "x")
    on_both.ok("enqueue", "true", "--group", "x")
    rows = {row["group"]: row for row in on_both.json("limit", "show")}
    assert (rows[""]["concurrency"], rows[""]["rate"]) == (2, "100/s")
    assert rows["*"]["concurrency"] == 1
    assert rows["ada"]["bucket"] == "10:5/h"
    assert rows["x"]["blocked"] == 1
    on_both.ok("limit", "set", "--none")
    assert "" not in {row["group"] for row in on_both.json("limit", "show")}
    assert "give an integer" in on_both.refused("limit", "set", "--concurrency", "many", code=2)
    assert "give --concurrency" in on_both.refused("limit", "set", code=2)
    assert "give a count and a period, such as 100/s" in on_both.refused(
        "limit", "set", "--rate", "fast", code=2
    )


def test_events_are_read_and_followed(on_both: Shell) -> None:
    on_both.ok("enqueue", "true", "--id", "x")
    lines = [json.loads(line) for line in on_both.ok("events", "--json").splitlines()]
    assert [(line["type"], line["id"]) for line in lines] == [("enqueued", "x")]
    assert "enqueued" in on_both.ok("events", "--type", "enqueued", "--id", "x")
    assert on_both.ok("events", "--type", "failed") == ""
    following = on_both.start("events", "--follow", "--since", "now", "--json", "-q", "default")
    try:
        import threading

        heard: list[str] = []
        reader = threading.Thread(target=lambda: heard.extend(following.stdout or []), daemon=True)
        reader.start()

        def cancelled_is_heard() -> bool:
            on_both("cancel", on_both.ok("enqueue", "true").strip())
            return any('"cancelled"' in line for line in heard)

        until(cancelled_is_heard)
    finally:
        following.send_signal(2)
        following.wait(20)
        reader.join(10)
        if following.stdout is not None:
            following.stdout.close()
    assert following.returncode == 130


def test_the_doctor_finds_nothing_wrong_with_a_store_in_a_file(penstock: Shell) -> None:
    penstock.ok("enqueue", "true")
    penstock.ok("pause")

    found = {(row["what"], row["verdict"]): row for row in penstock.json("doctor")}

    assert found["queue default", "ok"]["found"] == "1 record, all indexes agree"
    assert "resume" in found["queue default", "note"]["advice"]
    assert found["workers", "note"]["found"] == "none"
    assert "libraries" in penstock.ok("doctor")


def test_the_doctor_says_what_is_wrong_with_a_server(valkey_url: str, tmp_path: Path) -> None:
    shell = Shell(tmp_path, f"{valkey_url}?namespace=doctor")
    shell.ok("enqueue", "true")
    run = shell("doctor", "--json")

    found = {row["what"]: row for row in json.loads(run.stdout)}
    assert found["server"]["found"].startswith("Valkey ")
    assert found["clock"]["verdict"] == "ok"
    assert found["eviction"]["verdict"] == "ok"
    assert (found["persistence"]["verdict"], run.returncode) in (("problem", 1), ("ok", 0))
    assert found["persistence"]["verdict"] == "ok" or "appendonly yes" in found["persistence"]["advice"]


async def test_the_doctor_names_tasks_that_a_worker_does_not_know(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/penstock.db"
    async with App(url) as app:
        storage = await app.connect()
        await app.queue("default").enqueue(1, task="fresh")
        for worker, unknown in (("old-1", "fresh"), ("old-2", "fresh"), ("old-2", "gone")):
            names = sorted({unknown, "fresh"})
            info = json.dumps({"state": "running", "queues": ["default"], "unknown": names}).encode()
            await storage.extend("default", [], worker=worker, lease_ms=600_000, info=info)
    run = await asyncio.to_thread(Shell(tmp_path, url), "doctor", "--json")
    found = {row["what"]: row for row in json.loads(run.stdout)}
    assert found["task fresh"]["verdict"] == "problem"
    assert sorted(found["task fresh"]["found"].removeprefix("not known to ").split(", ")) == [
        "old-1",
        "old-2",
    ]
    assert (found["task gone"]["verdict"], found["task gone"]["advice"]) == ("note", "")
    assert run.returncode == ExitCode.FAILED


async def test_a_worker_that_is_gone_is_not_listed_as_running_a_job(tmp_path: Path) -> None:
    async with App(f"sqlite:///{tmp_path}/penstock.db") as app:
        storage = await app.connect()
        await app.queue("mail").enqueue(1, task="send")
        info = b'{"state": "running", "queues": ["mail"], "active": 1, "concurrency": 100}'
        await storage.extend("mail", [], worker="w", lease_ms=1, info=info)
        assert " 1/100 " in await asyncio.to_thread(Shell(tmp_path).ok, "workers")
        await storage.shift_clock("mail", 120_000)
    listed = await asyncio.to_thread(Shell(tmp_path).ok, "workers")
    assert listed.splitlines()[1].split()[-4:-2] == ["mail", "-"]


async def test_jobs_of_dead_workers_and_blocked_jobs_need_a_worker(tmp_path: Path) -> None:
    async with App(f"sqlite:///{tmp_path}/penstock.db") as app:
        storage = await app.connect()
        await app.queue("lost").enqueue(1, id="a", task="send")
        info = b'{"state": "running", "queues": ["lost"]}'
        await storage.extend("lost", [], worker="w", lease_ms=600_000, info=info)
        await storage.claim("lost", Take("w", 1, 30_000))
        await storage.shift_clock("lost", 120_000)
        await app.queue("grouped").pause(group="g")
        await app.queue("grouped").enqueue(1, id="b", task="send", group="g")
        await app.queue("grouped").resume(group="g")
        status = await read_status(app, None)
    [cause] = next(row["causes"] for row in status["queues"] if row["queue"] == "lost")
    assert (cause["kind"], cause["job"], cause["count"]) == ("worker died", "a", 1)
    assert status["unattended"] == ["grouped", "lost"]

    found = await asyncio.to_thread(Shell(tmp_path).json, "doctor")
    lost = next(row for row in found if row["found"].startswith("lost/a: Its worker w has been silent"))
    assert lost["verdict"] == "note"
    assert "`penstock worker MODULE:APP -q lost`" in lost["advice"]


async def test_the_doctor_notes_spent_budgets_and_staged_jobs(tmp_path: Path) -> None:
    async with App(f"sqlite:///{tmp_path}/penstock.db") as app:
        queue, storage = app.queue("mail"), await app.connect()
        await queue.set_budget("usd", 2)
        await queue.enqueue(1, id="rich")
        job = await queue.claim_one(worker="w")
        assert job is not None
        await job.use(usd=3)
        await job.complete()
        await storage.enqueue("mail", [NewJob("half", staged=True, write_id="w-1")])

    found = await asyncio.to_thread(Shell(tmp_path).json, "doctor")
    notes = [(row["found"], row["advice"]) for row in found if row["what"] == "queue mail"][1:]
    assert notes[0][0] == "The budget 'usd' of queue mail is spent: 3 of 2."
    assert "`penstock budget set usd 6 -q mail`" in notes[0][1]
    assert notes[1][0] == "1 staged job, such as mail/half: It is staged: its write 'w-1' is not complete."
    assert "`penstock remove mail/half`" in notes[1][1]


async def test_the_doctor_says_how_far_a_queue_is_from_its_clock(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/penstock.db"
    async with App(url) as app:
        await app.queue("default").enqueue({})
        storage = await app.connect()
        await storage.shift_clock("default", -3 * 3_600_000, jump=True)
        await app.queue("default").enqueue({})

    found = await asyncio.to_thread(Shell(tmp_path, url).json, "doctor")
    notes = [row["found"] for row in found if (row["what"], row["verdict"]) == ("queue default", "note")]
    assert any(note.startswith("its time is ") and "ahead of the store's clock" in note for note in notes)


async def test_a_worker_that_has_not_been_heard_of_is_not_counted_as_one_that_runs(tmp_path: Path) -> None:
    async with App(f"sqlite:///{tmp_path}/penstock.db") as app:
        storage = await app.connect()
        await app.queue("default").enqueue({})
        info = b'{"state": "running", "queues": ["default"]}'
        await storage.extend("default", [], worker="w", lease_ms=600_000, info=info)
        told = await read_status(app, None)
        assert (told["workers"], told["silent_workers"], told["unattended"]) == (1, 0, [])
        await storage.shift_clock("default", 61_000)
        told = await read_status(app, None)
        assert (told["workers"], told["silent_workers"], told["unattended"]) == (0, 1, ["default"])


def test_pauses_that_end_by_themselves_and_pauses_of_groups_are_shown(on_both: Shell) -> None:
    """Even while no job is held back by them."""
    for group in ("g", "h"):
        on_both.ok("enqueue", "--group", group, "true")
    on_both.ok("worker", "--commands", "--burst")
    on_both.ok("pause", "default", "--for", "1h")
    on_both.ok("pause", "-q", "default", "--group", "g", "--create")
    on_both.ok("pause", "-q", "default", "--group", "h", "--for", "1h", "--create")

    [row] = on_both.json("status")["queues"]
    assert row["paused"] is True
    assert row["paused_until"] > exact(time.time_ns() // 1_000_000)
    groups = {one["group"]: one["until"] for one in row["paused_groups"]}
    assert groups["g"] is None
    assert groups["h"] > exact(time.time_ns() // 1_000_000)
    shown = on_both.ok("status")
    assert "paused until 2" in shown
    assert "2 groups paused" in shown

    notes = [row for row in json.loads(on_both("doctor", "--json").stdout) if "paused" in row["found"]]
    assert [row["found"].split(" until")[0] for row in notes] == [
        "is paused",
        "group g is paused",
        "group h is paused",
    ]
    assert "resume -q default --group h" in notes[2]["advice"]
    on_both.ok("resume", "default")
    [row] = on_both.json("status")["queues"]
    assert (row["paused"], row["paused_until"]) == (False, None)


async def test_the_status_says_how_busy_workers_are_even_of_queues_without_jobs(tmp_path: Path) -> None:
    async with App(f"sqlite:///{tmp_path}/penstock.db") as app:
        storage = await app.connect()
        info = json.dumps({"state": "running", "queues": ["new"], "active": 3, "concurrency": 4}).encode()
        await storage.extend("new", [], worker="w", lease_ms=60_000, info=info)
        assert [worker["worker"] for worker in await read_workers(app, None)] == ["w"]
        told = await read_status(app, None)
        assert workers_line(told) == "1 worker, 3 of 4 slots busy"
        await app.queue("mail").enqueue({}, task="send")
        told = await read_status(app, None)
        assert workers_line(told).endswith("none works on mail: `penstock worker MODULE:APP -q mail`")


async def test_slots_that_filled_up_since_the_heartbeat_count_as_busy(tmp_path: Path) -> None:
    async with App(f"sqlite:///{tmp_path}/penstock.db") as app:
        storage = await app.connect()
        info = json.dumps({"state": "running", "queues": ["mail"], "active": 0, "concurrency": 4}).encode()
        await app.queue("mail").enqueue_many([{"payload": n} for n in range(9)])
        await storage.extend("mail", [], worker="w", lease_ms=60_000, info=info)
        await storage.claim("mail", Take("w", 2, 60_000))
        assert workers_line(await read_status(app, None)) == "1 worker, 2 of 4 slots busy"
        await storage.claim("mail", Take("v", 7, 60_000))
        assert workers_line(await read_status(app, "mail")) == "1 worker, 4 of 4 slots busy"


@pytest.mark.parametrize("order", ["ab", "ba"])
async def test_a_worker_is_shown_as_the_queue_that_heard_of_it_last_knows_it(
    tmp_path: Path, order: str
) -> None:
    async with App(f"sqlite:///{tmp_path}/penstock.db") as app:
        storage = await app.connect()
        for active, queue in enumerate(order, start=1):
            await app.queue(queue).enqueue(1)
            info = json.dumps({"active": active}).encode()
            await storage.extend(queue, [], worker="w", lease_ms=60_000, info=info)
        await storage.shift_clock(order[0], 1_000)
        [worker] = await read_workers(app, None)

    assert worker["active"] == 2


def test_budgets_are_set_raised_shown_and_removed(on_both: Shell) -> None:
    assert on_both.ok("budget", "set", "usd", "2.5", "--per", "1d").endswith("0 of 2.5 spent per 1d\n")
    assert on_both.ok("budget", "set", "usd", "5").endswith("0 of 5 spent per 1d\n")
    assert on_both.ok("budget", "set", "usd", "5", "--per", "none").endswith("0 of 5 spent\n")
    [row] = on_both.json("budget", "show")
    assert (row["queue"], row["budget"], row["amount"], row["spent"]) == ("default", "usd", 5.0, 0.0)
    assert "usd" in on_both.ok("limit", "show")
    assert [row["budget"] for row in on_both.json("limit", "show")] == ["usd"]
    on_both.ok("budget", "remove", "usd")
    assert on_both.json("budget", "show") == []
    assert "queue default has no budget 'usd'" in on_both.refused("budget", "remove", "usd", code=3)
    assert "not a valid float" in on_both.refused("budget", "set", "usd", "much", code=2)


def test_top_names_no_command_for_a_worker_whose_jobs_it_has_not_read() -> None:
    row = {"queue": "other"}
    status: dict[str, Any] = {
        "queue": None, "queues": [row], "workers": [], "running": 0, "slots": 0, "silent": [], "dead": [],
        "unattended": ["other"],
    }  # fmt: skip
    assert workers_line(status) == "no worker runs"
    row_with_causes: dict[str, Any] = {**row, "causes": []}
    assert "penstock worker MODULE:APP -q other" in workers_line({**status, "queues": [row_with_causes]})
