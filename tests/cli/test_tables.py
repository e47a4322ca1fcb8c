"""``penstock spark`` and ``penstock history`` as processes: what they need, and that they leave nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.sparksession import _interrupts_first
from penstock.core.lifecycle import State
from penstock.spark.store import Store
from tests.cli.conftest import Shell, until
from tests.cli.terminal import Terminal

# Each that starts Spark does so in a process of its own, which takes a while where the machine is busy.
pytestmark = pytest.mark.timeout(400)

SMALL = ("--cores", "2", "--memory", "1g")
TASKS = """
import asyncio
from itertools import count
from pathlib import Path
from penstock import App

app = App("sqlite:///elsewhere.db")
calls = count()

@app.task(queue="slow", attempts=1)
async def slow(n: int) -> int:
    if next(calls) >= 20:
        while not (Path(__file__).parent / "interrupted").exists():
            await asyncio.sleep(0.02)
    return n

@app.task(queue="stuck", attempts=1)
async def stuck(n: int) -> int:
    await asyncio.sleep(3600)
    return n
"""


def alive(session: int) -> list[str]:
    """The processes of a session, by what they were started with."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(of) == session and state != "Z":
                    found.append((entry / "cmdline").read_text().replace("\0", " ")[:200])
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def test_without_the_extra_it_is_said_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pyspark'] = None; from penstock.cli.main import run;"
        "sys.exit(run(['history', 'report']))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert run.returncode == 1
    assert (
        run.stderr == "penstock: this needs pyspark, which is not installed: pip install 'penstock[spark]'\n"
    )


def test_what_looks_refuses_a_store_and_a_history_that_are_not_there(penstock: Shell) -> None:
    assert "does not exist" in penstock.refused("history", "sync", code=3)
    assert "does not exist" in penstock.refused("archive", "mail", "archive", code=3)
    assert "is not a history" in penstock.refused("history", "report", code=2)
    assert "--task" in penstock.refused("spark", "process", "a.csv", "b", "--key", "n", code=2)


def test_an_archive_of_an_unknown_queue_is_refused(on_both: Shell) -> None:
    on_both.ok("enqueue", "-q", "paid", "true")

    said = on_both.refused("archive", "paidd", "old", code=3)

    assert "the queue 'paidd' does not exist. Did you mean 'paid'?" in said
    assert not (on_both.folder / "old").exists()


def test_the_queues_that_guard_outputs_are_not_proposed(on_both: Shell) -> None:
    on_both.ok("enqueue", "-q", "penstock.output.0a1b", "true")
    assert "The store has no queues yet." in on_both.refused("status", "zz", code=3)
    on_both.ok("enqueue", "-q", "paid", "true")

    for name in ("zz", "penstock.output.0a1"):
        assert "There is: paid." in on_both.refused("status", name, code=3)
        assert "There is: paid." in on_both.refused("show", f"{name}/x", code=3)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ctrl_c_ends_a_run_with_its_results_kept_and_no_process_left(penstock: Shell) -> None:
    (penstock.folder / "slowly.py").write_text(TASKS)
    (penstock.folder / "numbers.csv").write_text("n\n" + "\n".join(map(str, range(500))))
    url = f"sqlite:///{penstock.folder}/given.db"
    process = ["spark", "process", "numbers.csv", "out", "--task", "slowly:slow", "--key", "n", "--url", url]
    process += ["--workers", "1", "--concurrency", "10", *SMALL]
    with Terminal(penstock, *process) as terminal:
        shown = terminal.read_until("/500", seconds=300)
        assert "━" in shown
        assert "incubator" not in shown
        with Store(url) as store:
            until(lambda: store.run(store.storage.counts("slow")).completed >= 10, seconds=120)
        terminal.press("\x03")
        terminal.read_until("stopping: interrupted", seconds=60)
        (penstock.folder / "interrupted").touch()
        assert terminal.wait(seconds=120) == 130
        assert alive(terminal.process.pid) == []
    with Store(url) as store:
        counts = store.run(store.storage.counts("slow"))
        assert (counts.waiting, counts.active) == (0, 0)
        assert counts.completed + counts.cancelled == 500
        (lease,) = [name for name in store.run(store.storage.queues()) if name.startswith("penstock.output.")]
        (job,) = store.run(store.storage.get(lease, ["run"]))
        assert job is not None
        assert job.state is State.CANCELLED
    import pyarrow.dataset as ds

    rows = ds.dataset(penstock.folder / "out", format="parquet").count_rows()
    assert rows == counts.completed > 0
    assert not (penstock.folder / "elsewhere.db").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_second_ctrl_c_hands_back_running_jobs_and_exits(penstock: Shell) -> None:
    (penstock.folder / "slowly.py").write_text(TASKS)
    (penstock.folder / "numbers.csv").write_text("n\n1\n2\n3\n")
    url = f"sqlite:///{penstock.folder}/given.db"
    process = ["spark", "process", "numbers.csv", "out", "--task", "slowly:stuck", "--key", "n", "--url", url]
    run = penstock.start(*process, "--workers", "1", "--concurrency", "2", *SMALL, start_new_session=True)
    assert run.stdout is not None
    try:
        with Store(url) as store:
            until(lambda: store.run(store.storage.counts("stuck")).active == 2, seconds=300)
            run.send_signal(signal.SIGINT)
            until(lambda: store.run(store.storage.counts("stuck")).cancelled == 1, seconds=60)
            run.send_signal(signal.SIGINT)
            *_, last = run.stdout
            assert last == "penstock: interrupted\n"
            assert run.wait() == 130
            assert alive(run.pid) == []
            counts = store.run(store.storage.counts("stuck"))
            assert (counts.active, counts.waiting) == (0, 2)
    finally:
        run.kill()
        run.wait()
        run.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_following_a_history_continues_until_it_is_stopped(penstock: Shell) -> None:
    penstock.ok("enqueue", "true")
    follow = ["history", "sync", "--follow", "--every", "200ms", "--upto", "bronze", "--json", *SMALL]
    process = penstock.start(*follow, start_new_session=True)
    assert process.stdout is not None
    try:
        first = json.loads(process.stdout.readline())
        assert first["events"] > 0
        penstock.ok("enqueue", "true")
        until(lambda: json.loads(process.stdout.readline())["events"], seconds=120)  # type: ignore[union-attr]
        process.send_signal(signal.SIGTERM)
        *_, last = process.stdout
        assert last == "penstock: interrupted\n"
        assert process.wait() == 130
        assert alive(process.pid) == []
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_failure_caused_by_ctrl_c_is_reported_as_an_interrupt() -> None:
    def clean_up() -> None:
        raise OSError("the answer from Java is empty")

    def be_interrupted() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            clean_up()

    with pytest.raises(KeyboardInterrupt), _interrupts_first():
        be_interrupted()
    with pytest.raises(OSError, match="empty"), _interrupts_first():
        clean_up()
