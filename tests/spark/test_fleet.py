"""Spark's executors as workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock.spark as ps
from penstock import App, InvalidOption, StorageError
from penstock.core.job import Job
from penstock.core.lifecycle import State
from penstock.errors import FleetFailed
from penstock.spark import executors
from penstock.spark.driver_lease import LEASE_MS, LeaseCheck
from penstock.spark.executor_task import Assignment, work
from penstock.spark.executors import FLEETS, _FleetJob
from penstock.spark.store import Store
from tests.spark.fleet_tasks import (
    app,
    die_often,
    die_once,
    double,
    lengths,
    oversleep,
    process_id,
    refuse,
    square,
)
from tests.spark.stores import ask


@pytest.fixture(autouse=True)
def store(url: str) -> Iterator[None]:
    """The driver's app has the store of the test; the executors import an app that knows nothing of it."""
    was = app.url
    app.move_to(url)
    yield
    app.sync.close()
    app.move_to(was)


def jobs(url: str, queue: str, ids: list[str]) -> list[Job]:
    found = ask(url, lambda storage: storage.get(queue, ids))
    return [job for job in found if job is not None]


def test_executors_run_every_kind_of_task_and_end_when_the_queues_are_drained(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    doubled = double.sync.enqueue_many([double.job(n) for n in range(50)])
    refused = refuse.sync.enqueue_many([refuse.job(n) for n in range(3)])
    processed = process_id.sync.enqueue(1)
    measured = lengths.sync.enqueue_many([lengths.job({"text": "x" * n}) for n in range(20)])
    survivor = die_once.sync.enqueue(str(tmp_path / "died"))

    report = ps.fleet(spark, app, size=2, lease="2s", time_budget="100s").wait("100s")

    assert [job.result for job in jobs(url, "mixed", [handle.id for handle in doubled])] == [
        str(2 * n).encode() for n in range(50)
    ]
    assert {job.state for job in jobs(url, "mixed", [handle.id for handle in refused])} == {State.FAILED}
    assert [job.result for job in jobs(url, "mixed", [handle.id for handle in measured])] == [
        str(n).encode() for n in range(20)
    ]
    assert processed.result("1s") > 0
    (job,) = jobs(url, "mixed", [survivor.id])
    assert (job.state, job.stalls) == (State.COMPLETED, 1)
    assert len(report.workers) == 2
    assert all(worker.worker.startswith("spark-") for worker in report.workers)
    assert ask(url, lambda storage: storage.counts("mixed")).open == 0


@pytest.mark.parametrize("url", ["valkey"], indirect=True)
def test_a_fleet_that_is_stopped_ends_and_leaves_what_it_had_not_begun(spark: SparkSession, url: str) -> None:
    with ps.fleet(
        spark, "tests.spark.fleet_tasks:app", size=1, queues=["rows"], until_drained=False
    ) as fleet:
        first = square.sync.enqueue(7)
        assert first.result("60s") == 49
        assert fleet.is_running
    assert not fleet.is_running
    assert fleet.wait().completed == 1
    later = square.sync.enqueue(8)
    assert [job.state for job in jobs(url, "rows", [later.id])] == [State.WAITING]


def test_a_worker_ends_when_its_fleet_is_abandoned(url: str) -> None:
    """As if the driver had been killed, and the executor lived on."""
    job = square.sync.enqueue(7)
    with Store(url) as store:
        lease = store.run(_FleetJob(url, "fleet", "tests.spark.fleet_tasks:app").take(store))
    assignment = Assignment(
        app="tests.spark.fleet_tasks:app",
        modules=[],
        lease_check=LeaseCheck(url, FLEETS, lease.id, lease.token),
        options={"queues": ["rows"], "burst": False},
    )
    executor = threading.Thread(target=lambda: list(work(assignment)(iter(()))))
    executor.start()
    wait_until(lambda: jobs(url, "rows", [job.id])[0].state is State.COMPLETED)
    assert executor.is_alive()
    ask(url, lambda storage: storage.shift_clock(FLEETS, LEASE_MS + 1000))
    executor.join(30)
    assert not executor.is_alive()
    assert [held.state for held in jobs(url, FLEETS, ["fleet"])] == [State.FAILED]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("until_drained", [True, False])
def test_a_fleet_reports_that_it_lost_its_spark_job(
    spark: SparkSession, url: str, until_drained: bool
) -> None:
    """As if the driver had been asleep. Its queue is not drained: a job is scheduled for later."""
    square.options(delay="1h").sync.enqueue(8)
    fleet = ps.fleet(spark, app, size=1, queues=["rows"], until_drained=until_drained)
    first = square.sync.enqueue(7)
    assert first.result("60s") == 49
    fleet.check()
    ask(url, lambda storage: storage.shift_clock(FLEETS, LEASE_MS + 1000))
    with pytest.raises(FleetFailed, match="lost its lease"):
        fleet.wait("60s")
    with pytest.raises(FleetFailed, match="lost its lease"):
        fleet.check()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_fleet_is_started_again_when_a_task_has_died_too_often(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    (tmp_path / "deaths").mkdir()
    job = die_often.sync.enqueue(str(tmp_path / "deaths"), 4)
    report = ps.fleet(spark, app, size=1, queues=["mixed"], lease="1s").wait("100s")
    assert (report.starts, report.completed) == (2, 1)
    assert job.result("1s") == 4


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_fleet_is_not_started_for_ever(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "_MAX_STARTS", 1)
    (tmp_path / "deaths").mkdir()
    die_often.sync.enqueue(str(tmp_path / "deaths"), 4)
    with pytest.raises(FleetFailed, match=r"^Spark gave up fleet .* Job aborted"):
        ps.fleet(spark, app, size=1, queues=["mixed"], lease="1s").wait("100s")


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_fleet_that_does_not_stop_is_interrupted_and_has_not_failed(
    spark: SparkSession, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "_STOP_MARGIN_S", 1.0)
    monkeypatch.setattr(executors, "work", lambda assignment: oversleep)
    fleet = ps.fleet(spark, app, size=1, queues=["rows"], until_drained=False, grace="0s")
    wait_until(lambda: bool(spark.sparkContext.statusTracker().getActiveJobsIds()))
    fleet.stop()
    report = fleet.wait()
    assert (report.workers, report.starts) == ((), 1)
    assert report.seconds < 40


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_job_is_extended_as_soon_as_its_store_is_back(url: str) -> None:
    done: list[str] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            done.append("wait")
            return super().wait(0)

    class Interrupted(_FleetJob):
        async def _extend(self, store: Store) -> None:
            done.append("extend")
            if done.count("extend") == 2:
                raise StorageError("away")
            self.is_lost = done.count("extend") == 4

    job = Interrupted(url, "fleet", "tests.spark.fleet_tasks:app")
    job._stop = Stop()
    job._beat()
    assert done == ["wait", "extend"] * 4


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_executors_do_the_rows_of_a_run(spark: SparkSession, url: str, tmp_path: Path) -> None:
    table = spark.range(40).selectExpr("id AS n")
    done = ps.process(
        table, square, key="n", output=tmp_path / "squares", fleet="spark", fleet_size=1, progress="none"
    )
    assert (done.completed, done.failed) == (40, 0)
    rows = spark.read.parquet(str(tmp_path / "squares")).select("n", "penstock_value").collect()
    assert {row["n"]: row["penstock_value"] for row in rows} == {n: n * n for n in range(40)}


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_run_whose_fleet_has_lost_its_job_ends(spark: SparkSession, url: str, tmp_path: Path) -> None:
    ask(url, lambda storage: storage.pause("rows"))

    def lose() -> None:
        wait_until(lambda: ask(url, lambda storage: storage.counts(FLEETS)).active == 1)
        ask(url, lambda storage: storage.shift_clock(FLEETS, LEASE_MS + 1000))

    loser = threading.Thread(target=lose)
    loser.start()
    with pytest.raises(FleetFailed, match="lost its lease"):
        ps.process(
            spark.range(4).selectExpr("id AS n"),
            square,
            key="n",
            output=tmp_path / "squares",
            fleet="spark",
            fleet_size=1,
            progress="none",
        )
    loser.join()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_cannot_work_is_said_before_anything_is_started(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidOption, match="other processes cannot import the app"):
        ps.fleet(spark, App(url))
    with pytest.raises(InvalidOption, match="no option"):
        ps.fleet(spark, app, probe="9100")  # type: ignore[call-arg]
    with pytest.raises(InvalidOption, match="needs one for itself"):
        ps.process(
            spark.range(2).selectExpr("id AS n"),
            square,
            key="n",
            output=tmp_path / "o",
            fleet="spark",
            fleet_size=2,
        )
    app.url = "memory://x"
    with pytest.raises(InvalidOption, match="in the memory of this process"):
        ps.fleet(spark, app)
