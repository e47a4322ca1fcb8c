"""The history of queues: bronze that grows exactly once, and the tables that follow from it."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.core.event import Event as LogEvent
from penstock.errors import InvalidOption
from penstock.spark import history
from penstock.spark.history import folding, syncing
from penstock.spark.history.bronze import bronze_state
from penstock.spark.history.tables import BronzeState, History, open_history
from penstock.spark.store import Store
from penstock.storage.values import QueueSettings
from tests.spark.busywork import happen

QUEUES = ("mail", "report")


def events_of(url: str, queue: str) -> list[LogEvent]:
    with Store(url) as store:
        return store.run(store.storage.read_events(queue, after=0, limit=100_000)).events


def bronze_of(path: Path) -> tuple[History, BronzeState]:
    opened = open_history(path, create=False)
    return opened, bronze_state(opened, opened.bronze.load())


def numbers(path: Path) -> Iterator[tuple[str, str, int]]:
    """What is in the table, read without Spark."""
    bronze = open_history(path, create=False).bronze
    for file in bronze.load().files:
        for row in bronze.read(file, ["queue", "epoch", "seq"]).to_pylist():
            yield row["queue"], row["epoch"], row["seq"]


def rows(frame: DataFrame) -> list[str]:
    return sorted(str(row) for row in frame.collect())


def all_numbers(url: str) -> Counter[tuple[str, int]]:
    return Counter((queue, event.seq) for queue in QUEUES for event in events_of(url, queue))


def without_epochs(path: Path) -> Counter[tuple[str, int]]:
    return Counter((queue, seq) for queue, _, seq in numbers(path))


def test_every_event_is_in_bronze_once_and_the_log_is_held_back_up_to_it(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    happen(url, seed=1, steps=60, queues=QUEUES)
    out = tmp_path / "history"
    report = history.sync(url, out, spark=spark, upto="bronze")
    assert without_epochs(out) == all_numbers(url)
    assert report.events == len(all_numbers(url))
    opened, bronze = bronze_of(out)
    with Store(url) as store:
        for queue in QUEUES:
            (consumer,) = store.run(store.storage.consumers(queue))
            assert (consumer.name, consumer.offset) == (opened.consumer, bronze.places[queue].seq)
    happen(url, seed=2, steps=20, queues=QUEUES)
    history.sync(url, out, spark=spark, upto="bronze")
    assert without_epochs(out) == all_numbers(url)
    again = history.sync(url, out, spark=spark, upto="bronze")
    assert (again.events, again.bronze) == (0, 2)
    columns = [
        row.asDict()
        for row in history.tables(spark, out).bronze.where("queue = 'mail'").orderBy("seq").collect()
    ]
    for row, event in zip(columns, events_of(url, "mail"), strict=True):
        assert (row["type"], row["id"], row["token"], row["error"]) == (
            event.type,
            event.id,
            event.token,
            event.error,
        )


def test_queues_are_chosen_by_name_or_pattern(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    happen(url, seed=1, steps=20, queues=QUEUES)
    history.sync(url, tmp_path / "one", spark=spark, queues=["mail"], upto="bronze")
    history.sync(url, tmp_path / "two", spark=spark, pattern="re.*", upto="bronze")
    assert {queue for queue, _ in without_epochs(tmp_path / "one")} == {"mail"}
    assert {queue for queue, _ in without_epochs(tmp_path / "two")} == {"report"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": "history#1"}, "does not support names with #"),
        ({"path": "histories[1]"}, "a pattern for several folders"),
        ({"queues": ["mail"], "pattern": "m.*"}, "queues or pattern, not both"),
        ({"pattern": "("}, "not a valid regular expression"),
        ({"max_events": 0}, "max_events must be >= 1, got 0"),
        ({"url": "memory://"}, "in the memory of this process"),
    ],
)
def test_bad_options_are_refused(
    spark: SparkSession, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    url, path = options.pop("url", f"sqlite:///{tmp_path}/jobs.db"), options.pop("path", tmp_path / "out")
    with pytest.raises(InvalidOption, match=said):
        history.sync(url, path, spark=spark, **options)


def test_a_folder_with_something_else_in_it_is_left_alone(
    spark: SparkSession, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InvalidOption, match="is not a history"):
        history.sync(f"sqlite:///{elsewhere}/jobs.db", tmp_path, spark=spark)
    with pytest.raises(InvalidOption, match="is not a history"):
        history.tables(spark, tmp_path)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_syncs_at_the_same_time_put_nothing_in_twice(spark: SparkSession, tmp_path: Path) -> None:
    url, out = f"sqlite:///{tmp_path}/jobs.db", tmp_path / "history"
    happen(url, seed=3, steps=60, queues=QUEUES)

    def one() -> int:
        return history.sync(url, out, spark=spark, max_events=100, upto="bronze").events

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(one) for _ in range(3)]
        added = sum(future.result() for future in futures)
    read = without_epochs(out)
    assert len(read) == added
    assert set(read.values()) == {1}


def test_silver_folded_bit_by_bit_equals_silver_made_from_scratch(
    spark: SparkSession, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    choice = random.Random(7)
    for part in range(3):
        happen(url, seed=part, steps=100, queues=QUEUES)
        history.sync(
            url,
            tmp_path / "bits",
            spark=spark,
            max_events=choice.randint(50, 200),
            upto="silver" if part == 1 else "gold",
        )
    history.sync(url, tmp_path / "bits", spark=spark)
    history.sync(url, tmp_path / "whole", spark=spark)
    bits, whole = history.tables(spark, tmp_path / "bits"), history.tables(spark, tmp_path / "whole")
    assert rows(bits.silver) == rows(whole.silver)
    assert rows(bits.gold) == rows(whole.gold)
    check_silver(url, whole.silver)
    check_gold(url, whole)


def noting(read: Callable[..., pa.Table], held: list[int]) -> Callable[..., pa.Table]:
    def noted(*args: Any) -> pa.Table:
        events = read(*args)
        held.append(events.num_rows)
        return events

    return noted


def test_silver_and_gold_made_in_small_slices_equal_those_made_at_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    happen(url, seed=11, steps=80, queues=QUEUES)
    with Store(url) as store:
        store.run(store.storage.configure("mail", QueueSettings(events_count=100, events_hard_cap=100)))
        while store.run(store.storage.sweep("mail")).more:
            pass
        store.run(store.storage.obliterate("report", force=True))
    happen(url, seed=12, steps=40, queues=QUEUES)
    history.sync(url, tmp_path / "bits", spark=spark, upto="bronze")
    shutil.copytree(tmp_path / "bits", tmp_path / "whole")
    whole = history.sync(url, tmp_path / "whole", spark=spark)
    held: list[int] = []
    monkeypatch.setattr(folding, "new_events", noting(folding.new_events, held))
    monkeypatch.setattr(folding, "_PER_SLICE", 30)
    bits = history.sync(url, tmp_path / "bits", spark=spark)
    assert (whole.silver, whole.gold) == (1, 1)
    assert bits.silver == bits.gold > 3
    assert 0 < max(held) <= 30
    pairs = zip(
        history.tables(spark, tmp_path / "bits"), history.tables(spark, tmp_path / "whole"), strict=True
    )
    for made, expected in pairs:
        assert rows(made) == rows(expected)
    assert history.sync(url, tmp_path / "bits", spark=spark).silver == bits.silver


def test_a_history_is_whole_in_a_folder_of_any_name(spark: SparkSession, tmp_path: Path) -> None:
    url, out = f"sqlite:///{tmp_path}/jobs.db", tmp_path / "my größe history, 100"
    happen(url, seed=8, steps=60, queues=QUEUES)
    history.sync(url, out, spark=spark)
    tables = history.tables(spark, out)
    check_silver(url, tables.silver)
    check_gold(url, tables)
    assert "Ours" in history.report(out, tmp_path / "page.html", title="Ours").read_text()


def check_silver(url: str, silver: DataFrame) -> None:
    """By what the events say, told one after the other."""
    told: dict[tuple[str, str, int], dict[str, Any]] = {}
    for queue in QUEUES:
        for event in events_of(url, queue):
            if event.type == "obliterated":
                for key, job in told.items():
                    if key[0] == queue and job["state"] in ("waiting", "scheduled", "blocked", "active"):
                        job["state"] = "removed"
            if not event.id:
                continue
            job = told.setdefault(
                (queue, event.id, event.incarnation), {"state": "", "runs": 0, "run_ms": 0, "usd": 0}
            )
            if event.state:
                job["state"] = event.state
            elif job["state"] not in ("completed", "failed", "cancelled"):
                job["state"] = "removed"
            job["runs"] += event.type == "claimed"
            job["run_ms"] += event.run_ms
            job["usd"] += 1500 * (event.type == "used")
    found = {
        (row.queue, row.id, row.incarnation): {
            "state": row.state, "runs": row.runs, "run_ms": row.run_ms, "usd": row.usd_micros
        }
        for row in silver.collect()
    }  # fmt: skip
    assert found == told


def check_gold(url: str, tables: history.Tables) -> None:
    days = tables.gold.where("grain = 'day' AND dimension = 'queue'").groupBy("queue")
    sums = {
        row.queue: row
        for row in days.agg(
            {"enqueued": "sum", "completed": "sum", "failed": "sum", "busy_ms": "sum"}
        ).collect()
    }
    open_jobs = Counter(row.queue for row in tables.silver.where("finished_at IS NULL").collect())
    last = {
        row.queue: row.backlog
        for row in tables.gold.where("grain = 'minute' AND backlog IS NOT NULL").orderBy("at").collect()
    }
    for queue in QUEUES:
        types = Counter(str(event.type) for event in events_of(url, queue))
        found = sums[queue]
        assert found["sum(enqueued)"] == types["enqueued"]
        assert found["sum(completed)"] == types["completed"]
        assert found["sum(failed)"] == types["failed"] + types["expired"]
        assert found["sum(busy_ms)"] == sum(event.run_ms for event in events_of(url, queue) if event.worker)
        assert last[queue] == open_jobs[queue]
    causes = tables.causes.where("grain = 'hour'").agg({"failed": "sum", "retried": "sum"}).first()
    assert causes is not None
    every = Counter(
        str(event.type) for queue in QUEUES for event in events_of(url, queue) if event.error_type
    )
    assert causes["sum(retried)"] == every["retrying"]


def test_following_goes_on_until_it_is_stopped(spark: SparkSession, tmp_path: Path) -> None:
    url, out = f"sqlite:///{tmp_path}/jobs.db", tmp_path / "history"
    happen(url, seed=1, steps=20)
    stop = Event()
    added: list[int] = []

    def note(report: history.SyncReport) -> None:
        added.append(report.events)
        if len(added) == 2:
            stop.set()
        happen(url, seed=2, steps=20)

    history.follow(url, out, spark=spark, upto="bronze", every="10ms", stop=stop, on_sync=note)
    assert len(added) == 2
    assert all(added)
    assert len(without_epochs(out)) == sum(added)


def test_trimmed_events_are_a_loss_that_is_recorded_and_marks_jobs(
    spark: SparkSession, tmp_path: Path
) -> None:
    url, out = f"sqlite:///{tmp_path}/jobs.db", tmp_path / "history"
    happen(url, seed=5, steps=60)
    first = history.sync(url, out, spark=spark, upto="silver")
    assert first.losses == ()
    happen(url, seed=6, steps=60)
    with Store(url) as store:
        store.run(store.storage.configure("mail", QueueSettings(events_count=20, events_hard_cap=20)))
        while store.run(store.storage.sweep("mail")).more:
            pass
    report = history.sync(url, out, spark=spark, upto="silver")
    (loss,) = report.losses
    assert loss.first == first.events + 1
    assert sorted(seq for _, seq in without_epochs(out)) == [
        *range(1, loss.first),
        *range(loss.last + 1, events_of(url, "mail")[-1].seq + 1),
    ]
    jobs = history.tables(spark, out).silver.collect()
    assert all(job.incomplete for job in jobs if job.first_type != "enqueued")
    assert all(job.incomplete for job in jobs if job.place < loss.first and job.finished_at is None)
    assert not any(job.incomplete for job in jobs if job.place < loss.first and job.finished_at is not None)


def test_a_store_that_went_back_in_time_is_a_new_epoch_that_begins_where_they_part(
    spark: SparkSession, tmp_path: Path
) -> None:
    database = tmp_path / "jobs.db"
    url, out = f"sqlite:///{database}", tmp_path / "history"
    happen(url, seed=5, steps=30)
    saved = len(events_of(url, "mail"))
    for file in tmp_path.glob("jobs.db*"):
        shutil.copy(file, tmp_path / f"saved-{file.name}")
    happen(url, seed=6, steps=20)
    before = history.sync(url, out, spark=spark, upto="silver")
    for file in tmp_path.glob("jobs.db*"):
        file.unlink()
    for file in tmp_path.glob("saved-*"):
        file.rename(tmp_path / file.name.removeprefix("saved-"))
    happen(url, seed=7, steps=20)
    report = history.sync(url, out, spark=spark, upto="silver")
    (change,) = report.changes
    assert (change.common, change.read) == (saved, before.events)
    read = Counter(numbers(out))
    assert set(read.values()) == {1}
    assert sorted(seq for _, epoch, seq in read if epoch == change.after) == [
        event.seq for event in events_of(url, "mail") if event.seq > saved
    ]
    undone = {
        row.id
        for row in history.tables(spark, out)
        .bronze.where(f"epoch = '{change.before}' AND seq > {saved} AND id <> ''")
        .collect()
    }
    marked = {row.id for row in history.tables(spark, out).silver.where("incomplete").collect()}
    assert undone
    assert undone == marked


def test_many_small_files_become_few_with_the_same_events(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, out = f"sqlite:///{tmp_path}/jobs.db", tmp_path / "history"
    happen(url, seed=8, steps=60, queues=QUEUES)
    for _ in range(3):
        history.sync(url, out, spark=spark, max_events=20, upto="bronze")
    history.sync(url, out, spark=spark, max_events=20, upto="silver")
    monkeypatch.setattr(syncing, "_MANY", 5)
    history.sync(url, out, spark=spark, upto="silver")
    assert len(open_history(out, create=False).bronze.load().files) == 1
    assert without_epochs(out) == all_numbers(url)
    check_silver(url, history.tables(spark, out).silver)
