"""Operating on jobs from tables: retry, cancel, and moving finished jobs out of the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.functions import col, when

import penstock.spark as ps
from penstock.core.job import NewJob, Options
from penstock.core.lifecycle import State
from penstock.core.outcome import Complete
from penstock.errors import ArchiveTorn, InvalidInput, InvalidOption, OutputLost
from penstock.spark import archiving, operate, publishing
from penstock.spark.archiving import ArchiveTable, Journal
from penstock.storage.contract import Storage
from penstock.storage.values import Settlement, Take, Unchanged
from tests.slow.drivers import let_leases_end
from tests.spark.stores import ask, fill


def test_jobs_are_retried_and_cancelled_by_a_table_of_ids(spark: SparkSession, url: str) -> None:
    fill(url, "mail", waiting=3, completed=2, failed=3)
    failed = spark.read.format("penstock").options(url=url, queue="mail", kind="failed").load()
    assert ps.retry(failed, url, "mail") == ps.Retried(retried=3)
    named = spark.createDataFrame([("c0",), ("f0",), ("w1",), ("nobody",), ("w1",)], "job string")
    assert ps.retry(named, url, "mail", id="job") == ps.Retried(not_failed=3, not_found=1)
    assert ps.cancel(named, url, "mail", id="job") == ps.Cancelled(cancelled=2, completed=1, not_found=1)
    counts = ask(url, lambda storage: storage.counts("mail"))
    assert (counts.waiting, counts.failed, counts.cancelled, counts.completed) == (4, 0, 2, 2)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_table_that_names_no_jobs_is_refused_before_anything_is_done(spark: SparkSession, url: str) -> None:
    fill(url, "mail", failed=1)
    with pytest.raises(InvalidInput, match="no column 'id'"):
        ps.retry(spark.createDataFrame([("f0",)], "job string"), url, "mail")
    with pytest.raises(InvalidInput, match="has nulls"):
        ps.retry(spark.createDataFrame([("f0",), (None,)], "id string"), url, "mail")
    assert ask(url, lambda storage: storage.counts("mail")).failed == 1


def archived(spark: SparkSession, path: Path) -> dict[str, Any]:
    rows = spark.read.parquet(str(path)).collect()
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows), "a reader sees a job twice"
    return found


class Killed(BaseException):
    """As good as a SIGKILL to what runs in this process."""


def die(*_: Any) -> None:
    raise Killed


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Between the copy and the free."""
    real = archiving._Transfer.finish

    def finish(self: Any) -> tuple[int, int]:
        act()
        return real(self)

    monkeypatch.setattr(archiving._Transfer, "finish", finish)


def test_finished_jobs_move_into_a_table_but_for_those_that_change_meanwhile(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(url, "mail", waiting=2, completed=3, failed=4)
    ask(url, lambda storage: storage.hold("mail", "ledger", ["c2"], ttl_ms=60_000))
    ask(url, lambda storage: storage.hold("mail", "archive", ["c1"], ttl_ms=60_000))

    async def change(storage: Storage) -> None:
        """One waits again; one has failed anew; one has gone and come back under its id, and waits."""
        await storage.retry("mail", ["f0"])
        await storage.cancel("mail", ["f0"])
        await storage.retry("mail", ["f1"])
        await storage.remove("mail", ["f2"])
        await storage.enqueue("mail", [NewJob("f2", b'{"n":22}', Options(task="double"))])

    with monkeypatch.context() as patch:
        meanwhile(patch, lambda: ask(url, change))
        done = ps.archive(spark, url, "mail", tmp_path / "kept", older_than=0, consumer="archive")
    assert (done.archived, done.kept, done.recovered) == (4, 3, 0)
    rows = archived(spark, tmp_path / "kept")
    assert set(rows) == {"c0", "c1", "f2", "f3"}
    assert (rows["c1"]["payload"], rows["c1"]["result"], rows["c1"]["payload_bytes"]) == (
        '{"n":1}',
        "2",
        None,
    )
    assert (rows["f3"]["state"], rows["f3"]["error_type"]) == ("failed", "ValueError")
    assert rows["f2"]["payload"] == '{"n":2}'
    left = ask(url, lambda storage: storage.get("mail", ["c0", "c1", "c2", "f0", "f1", "f2", "f3", "w0"]))
    assert [None if job is None else job.state for job in left] == [
        None, None, State.COMPLETED, State.CANCELLED, State.WAITING, State.WAITING, None, State.WAITING,
    ]  # fmt: skip

    again = ps.archive(spark, url, "mail", tmp_path / "kept", older_than=0, states=["cancelled"])
    assert (again.archived, again.kept) == (1, 0)
    assert archived(spark, tmp_path / "kept")["f0"]["state"] == "cancelled"


def test_an_archive_that_is_killed_loses_nothing_and_copies_nothing_twice(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(url, "mail", completed=6)
    output = tmp_path / "kept"

    # The journal is written, and nothing freed.
    with monkeypatch.context() as patch:
        patch.setattr(archiving, "count_verdicts", die)
        with pytest.raises(Killed):
            ps.archive(spark, url, "mail", output, older_than=0)
    assert ask(url, lambda storage: storage.counts("mail")).completed == 6

    # Some are freed, and none archived; one of them has come back since, and completed.
    async def free(storage: Storage) -> None:
        await storage.remove("mail", ["c0", "c1"])
        await storage.enqueue("mail", [NewJob("c1", b'{"n":7}', Options(task="double"))])
        (lease,) = (await storage.claim("mail", Take("w", 1, 60_000))).leases
        await storage.settle("mail", [Settlement(lease.id, lease.token, Complete(b"14"))])

    ask(url, free)
    # All are archived, and the journal is not cleared.
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "clear_left", die)
        with pytest.raises(Killed):
            ps.archive(spark, url, "mail", output, older_than=0)
    assert set(archived(spark, output)) == {f"c{n}" for n in range(6)}

    done = ps.archive(spark, url, "mail", output, older_than=0, states=["failed"])
    assert (done.archived, done.recovered) == (0, 0)
    rows = archived(spark, output)
    assert rows["c1"]["result"] == "2"
    assert ask(url, lambda storage: storage.counts("mail")).completed == 1
    last = ps.archive(spark, url, "mail", output, older_than=0)
    assert (last.archived, last.recovered) == (1, 0)
    lives = spark.read.parquet(str(output)).where("id = 'c1'").select("incarnation", "result").collect()
    assert sorted(row["result"] for row in lives) == ["14", "2"]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_torn_row_that_a_killed_archive_has_left_is_copied_anew(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(url, "mail", completed=3)
    output = tmp_path / "kept"

    with monkeypatch.context() as patch:
        patch.setattr(archiving, "count_verdicts", die)
        with pytest.raises(Killed):
            ps.archive(spark, url, "mail", output, older_than=0)
    (journal,) = (str(path) for path in (output / "_penstock_archive").glob("*/*"))
    rows = spark.read.parquet(journal)
    torn = rows.withColumn("result_bytes", when(col("id") == "c1", b"3").otherwise(col("result_bytes")))
    spark.createDataFrame(torn.collect(), rows.schema).write.mode("overwrite").parquet(journal)

    done = ps.archive(spark, url, "mail", output, older_than=0)
    assert (done.archived, done.recovered, done.kept) == (3, 2, 0)
    assert {id: row["result"] for id, row in archived(spark, output).items()} == {
        "c0": "0",
        "c1": "2",
        "c2": "4",
    }
    assert archived(spark, output)["c1"]["result_bytes"] is None
    assert ask(url, lambda storage: storage.counts("mail")).completed == 0


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("place", "step", "is_other_killed"),
    [
        (archiving._Transfer, "begin", False),
        (archiving._Transfer, "finish", False),
        (ArchiveTable, "append", False),
        (ArchiveTable, "append", True),
        (publishing, "_link", False),
    ],
)
def test_an_archive_that_was_away_while_another_took_over_copies_nothing_twice(
    spark: SparkSession,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    step: str,
    is_other_killed: bool,
) -> None:
    """Away before it copies; before it frees; after its last look at the lease; when all is freed and written. The
    other may be killed when it has published what the first has copied."""
    fill(url, "mail", completed=4, failed=2)
    output = tmp_path / "kept"
    real = getattr(place, step)

    def away(*arguments: Any) -> Any:
        monkeypatch.setattr(place, step, real)
        let_leases_end(url, output)
        with monkeypatch.context() as patch:
            if is_other_killed:
                patch.setattr(Journal, "clear_left", die)
                with pytest.raises(Killed):
                    ps.archive(spark, url, "mail", output, older_than=0, states=["completed"])
            else:
                ps.archive(spark, url, "mail", output, older_than=0, states=["completed"])
        return real(*arguments)

    monkeypatch.setattr(place, step, away)
    with pytest.raises(OutputLost, match="another has taken over"):
        ps.archive(spark, url, "mail", output, older_than=0)
    ps.archive(spark, url, "mail", output, older_than=0)
    assert set(archived(spark, output)) == {f"c{n}" for n in range(4)} | {"f0", "f1"}
    counts = ask(url, lambda storage: storage.counts("mail"))
    assert (counts.completed, counts.failed) == (0, 0)
    assert list((output / "_penstock_archive").glob("*/*")) == []


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_cannot_be_archived_is_refused_and_what_was_not_copied_well_is_not_freed(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(url, "mail", completed=2)
    with pytest.raises(InvalidOption, match="only finished jobs"):
        ps.archive(spark, url, "mail", tmp_path / "kept", states=["waiting"])
    with pytest.raises(InvalidOption, match="Set scratch"):
        ps.archive(spark, url, "mail", "table:warehouse.kept")
    spark.range(1).write.parquet(str(tmp_path / "other"))
    with pytest.raises(InvalidInput, match="is not a table of archived jobs"):
        ps.archive(spark, url, "mail", tmp_path / "other")
    young = ps.archive(spark, url, "mail", tmp_path / "kept", older_than="1h")
    assert (young.archived, young.kept) == (0, 0)
    monkeypatch.setattr(archiving, "count_verdicts", lambda *_: Counter(same=1, torn=1))
    with pytest.raises(ArchiveTorn, match="removed and archived nothing"):
        ps.archive(spark, url, "mail", tmp_path / "kept", older_than=0)
    assert ask(url, lambda storage: storage.counts("mail")).completed == 2


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_row_that_is_not_what_the_store_has_is_torn(url: str) -> None:
    fill(url, "mail", completed=1)
    (job,) = ask(url, lambda storage: storage.get("mail", ["c0"]))
    assert job is not None
    copy = Unchanged(job.id, job.incarnation, job.finished_at_ms)
    assert operate._verdict(job, copy, job.payload, job.result) == "same"
    assert operate._verdict(job, copy, job.payload, b"3") == "torn"
    assert operate._verdict(job, copy._replace(finished_at_ms=1), job.payload, b"3") == "changed"
    assert operate._verdict(job, copy._replace(incarnation=99), job.payload, job.result) == "gone"
    assert operate._verdict(None, copy, job.payload, job.result) == "gone"
