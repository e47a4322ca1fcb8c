"""Looking at jobs, and doing something with them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from penstock import App, Snooze, current_job
from penstock.core import outcome
from penstock.storage.values import Settlement, Take
from tests.cli.conftest import Shell, until
from tests.processes import is_alive

# Each starts the script many times, which takes a while where the machine is busy.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def failed(on_both: Shell) -> Shell:
    """Two jobs that failed, one that completed, one that waits."""
    lines = [
        {"command": "echo why; exit 3", "id": "bad", "attempts": 1},
        {"command": "sleep 60", "id": "slow", "attempts": 1, "timeout": "300ms"},
        {"command": "echo fine", "id": "good"},
    ]
    on_both.ok("enqueue", "-", input="\n".join(map(json.dumps, lines)))
    on_both.ok("worker", "--burst", "--commands")
    on_both.ok("enqueue", "true", "--id", "later", "--priority", "3")
    return on_both


def test_jobs_are_listed_by_state(failed: Shell) -> None:
    assert {job["id"]: job["state"] for job in failed.json("list")} == {
        "bad": "failed",
        "slow": "failed",
        "good": "completed",
        "later": "waiting",
    }
    assert [job["id"] for job in failed.json("list", "waiting")] == ["later"]
    assert len(failed.json("list", "failed", "-n", "1")) == 1
    assert failed.json("list", "--task", "other") == []
    table = failed.ok("list", "failed").splitlines()
    assert table[0].split()[:3] == ["id", "queue", "state"]
    assert "exit code 3: why" in "".join(table)
    assert "Timeout" in json.dumps(failed.json("list", "failed"))


def test_a_job_is_shown_with_its_life(failed: Shell) -> None:
    told = failed.json("show", "bad")
    assert [event["type"] for event in told["timeline"]] == ["enqueued", "claimed", "progressed", "failed"]
    assert told["failure"] == {"type": "CommandFailed", "message": "exit code 3: why"}
    ended = told["timeline"][-1]
    assert (ended["error_type"], ended["error"]) == ("CommandFailed", "exit code 3: why")
    assert ended["worker"]
    assert ended["run_ms"] >= 0
    text = failed.ok("show", "bad", "--traceback")
    assert "echo why; exit 3" in text
    assert "claimed" in text
    assert "Traceback" not in text  # A command has none but ours.
    assert "job 'nobody' was not found" in failed.refused("show", "nobody", code=3)


def test_the_output_of_a_command_is_kept(failed: Shell) -> None:
    assert failed.ok("logs", "good") == "fine\n"
    assert failed.ok("logs", "good", "--json") == '"fine"\n'
    assert failed.ok("logs", "good", "--tail", "0") == ""
    assert "job 'nobody' was not found" in failed.refused("logs", "nobody", code=3)


def test_output_is_followed_until_the_job_ends(on_both: Shell, tmp_path: Path) -> None:
    on_both.ok(
        "enqueue", "--id", "x", f"echo one; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; echo two"
    )
    worker = on_both.start("worker", "--commands")
    follower = on_both.start("logs", "x", "--follow")
    try:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "one\n"
        (tmp_path / "go").touch()
        assert follower.stdout.read() == "two\n"
        assert follower.wait(30) == 0
    finally:
        worker.terminate()
        worker.communicate(timeout=30)
        follower.kill()
        follower.communicate()


def test_jobs_are_found_by_what_they_are_like(failed: Shell) -> None:
    assert [job["id"] for job in failed.json("search", "failed", "--error", "CommandFailed")] == ["bad"]
    assert [job["id"] for job in failed.json("search", "completed", "--where", "command=echo fine")] == [
        "good"
    ]
    assert failed.json("search", "failed", "--before", "1h") == []
    assert len(failed.json("search", "failed", "--since", "1h")) == 2
    assert "give a field and its value" in failed.refused("search", "failed", "--where", "x", code=2)


def test_failed_jobs_are_listed_shown_retried_and_cleared(failed: Shell) -> None:
    assert {job["id"] for job in failed.json("dlq", "list")} == {"bad", "slow"}
    assert [job["id"] for job in failed.json("dlq", "list", "--error", "Timeout")] == ["slow"]
    said = failed("dlq", "list", "--error", "Time").stderr
    assert said == "no jobs\nno jobs failed with 'Time'; there are: CommandFailed (1), Timeout (1)\n"
    assert failed("dlq", "list", "--error", "Timeout", "--before", "1h").stderr == "no jobs\n"
    assert failed("search", "failed", "--error", "Timeout", "--before", "1h").stderr == "no jobs\n"
    assert [job["id"] for job in failed.json("dlq", "list", "--matching", "exit 3")] == ["bad"]
    assert "exit code 3: why" in failed.ok("dlq", "show", "bad")
    assert "has not failed" in failed.refused("dlq", "show", "good", code=4)
    assert failed.ok("dlq", "retry", "--all", "--matching", "exit 3") == "1 job waits again\n"
    assert failed.ok("dlq", "retry", "slow") == "slow waits again\n"
    assert "nothing to retry" in failed.refused("dlq", "retry", "good", code=4)
    assert "was not found" in failed.refused("dlq", "retry", "nobody", code=3)
    assert "give either ids or --all" in failed.refused("dlq", "retry", code=2)
    assert "need --all instead of ids" in failed.refused("dlq", "retry", "bad", "--matching", "x", code=2)
    failed.ok("worker", "--burst", "--commands")
    assert failed.json("dlq", "retry", "--all") == {"retried": 2}
    failed.ok("worker", "--burst", "--commands")
    assert "add --yes" in failed.refused("dlq", "clear", code=4)
    assert failed.ok("dlq", "clear", "--yes", "--matching", "exit code 3") == "1 job removed\n"
    assert failed.ok("dlq", "clear", "--yes") == "1 job removed\n"
    assert failed.json("dlq", "list") == []


@pytest.mark.parametrize("option", ["--task", "--error", "--matching"])
def test_an_empty_filter_is_refused_rather_than_fitting_all(penstock: Shell, option: str) -> None:
    penstock.ok("enqueue", "exit 3", "--id", "bad", "--attempts", "1")
    penstock.ok("worker", "--burst")
    # A variable of a script that is not set.
    for verb in (("clear", "--yes"), ("retry", "--all"), ("list",)):
        said = penstock.refused("dlq", *verb, option, "", code=2)
        assert f"'{option}': it is empty" in said
        assert "leave the option out" in said
    assert [job["id"] for job in penstock.json("dlq", "list")] == ["bad"]


def test_verbs_on_jobs_say_what_became_of_each(failed: Shell) -> None:
    assert failed.ok("retry", "bad") == "bad waits again\n"
    assert failed.ok("cancel", "bad", "later") == "bad cancelled\nlater cancelled\n"
    assert "completed already" in failed.refused("cancel", "good", code=4)
    assert "was not found" in failed.refused("cancel", "nobody", code=3)
    assert failed.ok("remove", "good") == "good removed\n"
    assert failed.json("remove", "later") == [{"id": "later", "ref": "default/later", "answer": "removed"}]
    failed.ok("enqueue", "true", "--id", "late", "--delay", "1h")
    assert failed.ok("promote", "late") == "late waits now\n"
    assert "not scheduled" in failed.refused("promote", "late", code=4)
    run = failed("cancel", "late", "nobody", "slow")
    assert (run.returncode, run.stdout) == (3, "late cancelled\n")


def test_an_id_that_several_queues_have_needs_the_queue(penstock: Shell) -> None:
    penstock.ok("enqueue", "true", "--id", "x", "-q", "a")
    penstock.ok("enqueue", "true", "--id", "x", "-q", "b")

    assert "it names a/x, b/x" in penstock.refused("show", "x", code=2)
    assert penstock.json("show", "a/x")["queue"] == "a"
    assert penstock.json("show", "x", "-q", "b")["queue"] == "b"


def test_an_id_that_cannot_be_found_keeps_no_verb_from_the_others(penstock: Shell) -> None:
    for id, queue in (("first", "a"), ("x", "a"), ("x", "b"), ("second", "a"), ("third", "a"), ("last", "a")):
        penstock.ok("enqueue", "true", "--id", id, "-q", queue)

    run = penstock("remove", "first", "x", " ", "nobody", "second")
    assert (run.returncode, run.stdout) == (2, "first removed\nsecond removed\n")
    several, refused, unknown = run.stderr.splitlines()
    assert several.startswith("penstock: 'x' is ambiguous: it names a/x, b/x. Give one of these refs")
    assert "is not allowed as id" in refused
    assert "job 'nobody' was not found" in unknown
    run = penstock("cancel", "third", "x", "\udcff", "last", "--json")
    answers = [row["answer"] for row in json.loads(run.stdout)]
    assert (run.returncode, answers) == (2, ["cancelled", "ambiguous", "not_allowed", "cancelled"])
    assert "as queue name" in penstock.refused("remove", "last", "-q", "a/b", code=2)


def hang(pid: int, database: Path) -> None:
    """Stop a process, but not amid a transaction of a database that is there: nobody else could write to it."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        if not database.exists():
            return
        with closing(sqlite3.connect(database, timeout=1)) as sql:
            try:
                sql.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError:
                os.kill(pid, signal.SIGCONT)


def test_the_rerun_of_an_active_job_is_shown_and_cancelled_alone(on_both: Shell) -> None:
    url = on_both.environment.get("PENSTOCK_URL") or f"sqlite:///{on_both.folder / 'penstock.db'}"
    with App(url).sync as app:
        queue = app.queue("default")
        queue.enqueue("x", id="a")
        job = queue.claim_one(wait=0)
        assert job is not None
        queue.enqueue("y", id="a", on_conflict="redispatch")

        assert on_both.json("show", "a")["has_rerun"] is True
        assert "rerun        waits" in on_both.ok("show", "a")
        assert "not run again" in on_both.ok("cancel", "--rerun-only", "a")
        assert "no waiting rerun" in on_both.refused("cancel", "--rerun-only", "a", code=4)
        assert on_both.json("show", "a")["state"] == "active"


def test_a_killed_worker_is_shown_as_dead(on_both: Shell) -> None:
    on_both.ok("enqueue", "sleep 60")
    worker = on_both.start("worker", "--commands", "--lease", "3s")  # It reports its jobs every second.
    until(lambda: [row["active"] for row in on_both.json("workers")] == [1])

    worker.kill()
    worker.communicate(timeout=60)

    # At the same time: each of them takes 2 s to be sure that a connection to the server is gone.
    with ThreadPoolExecutor() as threads:
        workers, status = threads.submit(on_both.json, "workers"), threads.submit(on_both.json, "status")
        workers_text, status_text = threads.map(on_both.ok, ("workers", "status"))
    [listed] = workers.result()
    assert listed["state"] == "dead"
    assert "dead" in workers_text
    counts = status.result()
    assert (counts["workers"], counts["dead_workers"], counts["silent_workers"]) == (0, 1, 0)
    assert counts["dead"] == [listed["worker"]]
    assert f"1 died: {listed['worker']}" in status_text


def test_active_jobs_are_cancelled_or_taken_from_a_worker_that_hangs(on_both: Shell, tmp_path: Path) -> None:
    on_both.ok(
        "enqueue", "-", input=f'{{"command": "echo $$ >> {tmp_path}/pids; sleep 60", "id": "x"}}\nsleep 60\n'
    )
    worker = on_both.start("worker", "--commands", "-c", "2", "--lease", "1s", "--grace", "0s")
    try:
        until(lambda: on_both.json("status")["queues"][0]["active"] == 2)
        # A worker says so with its next heartbeat.
        until(lambda: [row["state"] for row in on_both.json("workers")] == ["running"])
        [listed] = on_both.json("workers")
        assert listed["pid"] == worker.pid
        assert "is active" in on_both.refused("remove", "x", code=4)
        assert "asked to stop" in on_both.ok("cancel", "x")
        until(lambda: on_both.json("show", "x")["state"] == "cancelled")
        [pid] = (tmp_path / "pids").read_text().split()
        assert not is_alive(int(pid))
        assert on_both.ok("reset-stale", "--older-than", "10m") == "0 jobs wait again\n"
        assert "config set stale_after" in on_both.refused("reset-stale", code=2)
        hang(worker.pid, tmp_path / "penstock.db")
        assert on_both.ok("reset", "--all-active") == "1 job waits again\n"
        assert on_both.json("status")["queues"][0]["waiting"] == 1
        assert "not active" in on_both.refused("reset", "x", code=4)
        assert "give either ids or --all-active" in on_both.refused("reset", code=2)
    finally:
        os.kill(worker.pid, signal.SIGCONT)
        worker.terminate()
        worker.communicate(timeout=30)


def test_a_signal_resumes_a_job_or_is_kept(on_both: Shell) -> None:
    store = on_both.environment.get("PENSTOCK_URL", f"sqlite:///{on_both.folder}/penstock.db")

    async def suspend() -> None:
        async with App(store) as app:
            for id in ("order-7", "order-8"):
                await app.queue("orders").enqueue(1, id=id)
            job = await app.queue("orders").claim_one(wait=0)
            assert job is not None
            await job.suspend("paid")

    asyncio.run(suspend())
    assert on_both.ok("signal", "orders/order-7", "paid", '{"usd": 3}') == "orders/order-7 goes on\n"
    kept = on_both.ok("signal", "orders/order-8", "paid")
    assert kept == "orders/order-8 keeps the signal, because it does not wait for 'paid' yet\n"
    assert on_both.json("signal", "order-8", "paid") == {"ref": "orders/order-8", "answer": "kept"}
    assert "not valid JSON" in on_both.refused("signal", "order-8", "paid", "{", code=2)
    assert "was not found" in on_both.refused("signal", "nobody", "paid", code=3)
    on_both.ok("cancel", "order-8")
    assert "has ended" in on_both.refused("signal", "order-8", "paid", code=4)

    async def received() -> object:
        async with App(store) as app:
            job = await app.queue("orders").claim_one(wait=0)
            assert job is not None
            return job.signal

    assert "usd" in str(asyncio.run(received()))


async def test_a_python_task_is_shown_with_its_traceback_and_without_old_errors(
    tmp_path: Path, penstock: Shell
) -> None:
    url = f"sqlite:///{tmp_path}/python.db"
    async with App(url, backoff=0) as app:

        @app.task(queue="mail")
        def flaky(n: int) -> int:
            if n < 0 or current_job().run == 1:
                raise KeyError("ada")
            return n

        await flaky.options(id="mended-job").enqueue(1)
        await flaky.options(id="broken-job", attempts=1).enqueue(-1)
        await app.worker(burst=True).run()

    rows = {line.split()[0]: line for line in penstock.ok("list", "--url", url).splitlines()}
    assert "ada" not in rows["mended-job"]
    assert "KeyError: 'ada'" in rows["broken-job"]
    assert "in flaky" in penstock.json("show", "broken-job", "--url", url)["failure"]["traceback"]
    assert "--traceback" in penstock.ok("show", "broken-job", "--url", url)
    assert "in flaky" in penstock.ok("show", "broken-job", "--traceback", "--url", url)
    assert "context.log(line) keeps a line" in penstock("logs", "mended-job", "--url", url).stderr


async def test_a_job_that_is_handed_back_often_has_a_short_timeline(tmp_path: Path, penstock: Shell) -> None:
    url = f"sqlite:///{tmp_path}/python.db"
    async with App(url) as app:

        @app.task(queue="mail")
        def patient() -> None:
            if current_job().run <= 6:
                raise Snooze(0.001)

        await patient.options(id="job").enqueue()
        await app.worker(burst=True).run()

    timeline = penstock.ok("show", "job", "--url", url).partition("\n\n")[2]
    words = [line[21:].split()[0] for line in timeline.splitlines()]
    assert words == [
        *("enqueued", "claimed", "snoozed", "promoted", "claimed", "snoozed", "snoozed"),
        *("promoted", "claimed", "completed"),
    ]
    assert "snoozed 4 more times, last at " in timeline
    assert len(penstock.json("show", "job", "--url", url)["timeline"]) == 21


async def test_a_timeline_says_that_a_worker_did_not_know_the_task(tmp_path: Path, penstock: Shell) -> None:
    url = f"sqlite:///{tmp_path}/python.db"
    async with App(url) as app:
        await app.queue("mail").enqueue({}, id="job", task="send")
        storage = await app.connect()
        [lease] = (await storage.claim("mail", Take("w", 1, 60_000))).leases
        await storage.settle(
            "mail", [Settlement(lease.id, lease.token, outcome.Snooze(60_000, unknown=True))]
        )
    shown = penstock.ok("show", "job", "--url", url).splitlines()
    [snoozed] = [line for line in shown if "snoozed " in line]
    assert snoozed.endswith("  handed back: the worker does not know its task")


def test_the_job_that_ended_last_is_listed_first(on_both: Shell) -> None:
    on_both.ok("enqueue", "-", input="".join(f'{{"command": "true", "id": "n{n}"}}\n' for n in range(3)))
    on_both.ok("worker", "--commands", "--burst", "-c", "1")
    assert [job["id"] for job in on_both.json("list", "completed")] == ["n2", "n1", "n0"]
    assert [job["id"] for job in on_both.json("list", "completed", "-n", "1")] == ["n2"]
    assert [job["id"] for job in on_both.json("list", "completed", "-r")] == ["n0", "n1", "n2"]


def test_the_refusal_to_retry_names_what_fits_the_state(penstock: Shell) -> None:
    penstock.ok("enqueue", "--id", "done", "true")
    penstock.ok("worker", "--burst")
    refused = penstock.refused("retry", "done", code=4)
    assert "To run it again, run `penstock remove done`, then enqueue it again." in refused
    assert "promote" not in refused
    penstock.ok("enqueue", "--id", "later", "--delay", "1h", "true")
    assert "`penstock promote later`" in penstock.refused("retry", "later", code=4)
