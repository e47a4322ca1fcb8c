"""``process``: a table in, a table out, paid for once."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

import penstock.spark as ps
from penstock.client.job_verbs import end_leases
from penstock.core.outcome import Fail, Failure
from penstock.errors import (
    FleetFailed,
    InvalidInput,
    InvalidOption,
    OutputBusy,
    OutputLost,
    StorageError,
    TooManyFailures,
)
from penstock.spark import driver_lease
from penstock.spark.driver_lease import OutputLease, output_identity, output_name
from penstock.spark.processing import collector, running
from penstock.spark.processing.enqueue import Batch, cancel_rows, enqueue_rows
from penstock.spark.processing.workers import RunWorkers
from penstock.spark.store import Store
from penstock.storage.values import Budget, Settlement, Take
from tests.spark import table_tasks


@pytest.fixture
def tasks(file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_tasks(file_url, tmp_path, monkeypatch)


def load_tasks(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("PENSTOCK_TABLES_URL", url)
    monkeypatch.setenv("PENSTOCK_TABLES_CALLS", str(tmp_path / "calls"))
    return importlib.reload(table_tasks)


def users(spark: SparkSession, count: int = 10) -> DataFrame:
    return spark.range(count).selectExpr("id AS user_id", "concat('user', id) AS name", "id % 2 AS odd")


def numbers(spark: SparkSession, *values: int) -> DataFrame:
    return spark.createDataFrame([(f"k{value}", value) for value in values], "k string, n long")


def calls(tmp_path: Path) -> list[str]:
    log = tmp_path / "calls"
    return log.read_text().split() if log.exists() else []


def rows_of(spark: SparkSession, output: Path) -> dict[Any, Row]:
    rows = ps.latest(spark.read.option("mergeSchema", "true").parquet(str(output))).collect()
    return {row[0]: row for row in rows}


def do(df: DataFrame, task: Any, output: Path, **options: Any) -> ps.Processed:
    given = {"key": df.columns[0], "output": output, "workers": 1, "progress": "none", **options}
    return ps.process(df, task, **given)


def test_every_row_has_a_result_or_an_error_and_a_second_run_pays_nothing(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = load_tasks(url, tmp_path, monkeypatch)
    first = do(users(spark), tasks.score, tmp_path / "scores")
    assert (first.plan.new, first.completed, first.failed) == (10, 9, 1)
    assert first.cost == pytest.approx(0.12)
    rows = rows_of(spark, tmp_path / "scores")
    assert rows[4]["penstock_value"].asDict() == {"points": 6.0, "label": "USER4"}
    assert (rows[3]["penstock_state"], rows[3]["penstock_error_type"], rows[3]["penstock_error"]) == (
        "failed",
        "RuntimeError",
        "no score for user3",
    )
    assert (rows[5]["penstock_state"], rows[5]["penstock_runs"], rows[5]["penstock_error"]) == (
        "completed",
        2,
        None,
    )
    paid = len(calls(tmp_path))
    assert paid == 12

    again = do(users(spark, 12), tasks.score, tmp_path / "scores")
    assert (again.plan.new, again.plan.done, again.plan.failed) == (2, 9, 1)
    assert len(calls(tmp_path)) == paid + 2
    assert not (tmp_path / "scores" / "_penstock" / first.run_id).exists()


def test_changed_rows_are_run_again_kept_or_an_error_as_asked(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / "doubles"
    do(numbers(spark, 1, 2), tasks.double, output)
    changed = spark.createDataFrame([("k1", 1), ("k2", 20)], "k string, n long")
    with pytest.raises(InvalidInput, match="1 keys have results for another payload"):
        do(changed, tasks.double, output, on_change="error")
    assert do(changed, tasks.double, output, on_change="keep").plan.todo == 0
    assert do(changed, tasks.double, output).completed == 1
    assert {key: row["penstock_value"] for key, row in rows_of(spark, output).items()} == {"k1": 2, "k2": 40}
    assert sorted(calls(tmp_path)) == ["1", "2", "20"]


def test_an_instant_is_the_same_payload_and_key_in_every_time_zone(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    # In 1874 the clocks of Berlin were 53 minutes and 28 seconds ahead, which no offset in JSON says.
    at = "SELECT timestamp_seconds(id - 3000000000) AS k FROM range(2)"
    df = spark.sql(
        "SELECT k, k AS at, named_struct('at', k) AS one, array(named_struct('at', k)) AS many, map('at', k) AS named "
        f"FROM ({at})"
    )
    output, zone = tmp_path / "counts", "spark.sql.session.timeZone"
    before = str(spark.conf.get(zone))
    try:
        spark.conf.set(zone, "Europe/Berlin")
        assert do(df, tasks.count, output).completed == 2
        spark.conf.set(zone, "UTC")
        assert do(df, tasks.count, output).plan.todo == 0
    finally:
        spark.conf.set(zone, before)
    known = spark.read.parquet(str(output)).selectExpr("unix_seconds(k)").collect()
    assert sorted(row[0] for row in known) == [-3000000000, -2999999999]


def test_a_dry_run_says_what_there_is_to_do_and_what_it_may_cost_and_limit_does_a_part(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    df = (
        spark.range(4)
        .selectExpr("id AS n", "id + 0 AS unused")
        .unionByName(spark.range(1).selectExpr("id AS n", "9L AS unused"))
    )
    plan = do(df, tasks.spend, tmp_path / "spent", key="n", dry_run=True).plan
    assert (plan.new, plan.duplicate, plan.todo, plan.estimated_cost) == (4, 1, 4, None)
    assert plan.cost_text("usd") == ", at an unknown cost: the output has no finished rows. Set row_cost"
    planned = do(df, tasks.spend, tmp_path / "spent", dry_run=True, row_cost=0.5)
    assert (planned.plan.estimated_cost, planned.plan.estimated_from) == (2.0, "row_cost")
    assert "4 to do, for about 2 usd" in str(planned)
    assert calls(tmp_path) == []
    assert do(df, tasks.spend, tmp_path / "spent", limit=1).completed == 1
    plan = do(df, tasks.spend, tmp_path / "spent", dry_run=True, row_cost=0.5).plan
    assert (plan.new, plan.done, plan.todo, plan.estimated_cost) == (3, 1, 3, 3.0)
    assert plan.estimated_from == "output"
    with pytest.raises(InvalidOption, match="row_cost must be >= 0, got -1"):
        do(df, tasks.spend, tmp_path / "spent", dry_run=True, row_cost=-1)


def test_a_run_in_json_goes_on_from_one_that_has_written_nothing(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / "doubles"
    assert do(numbers(spark, 1), tasks.double, output, format="json", dry_run=True).plan.new == 1
    assert do(numbers(spark, 1), tasks.double, output, format="json").completed == 1
    assert do(numbers(spark, 1, 2), tasks.double, output, format="json").plan.done == 1
    assert calls(tmp_path) == ["1", "2"]


def test_a_cost_cap_stops_further_jobs_and_the_next_run_goes_on(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    df = spark.range(30).selectExpr("id AS n")
    part = do(df, tasks.spend, tmp_path / "spent", max_cost=5, concurrency=2)
    assert part.stopped == "max_cost"
    assert 5 <= part.completed <= 7
    assert part.cost == part.completed == len(calls(tmp_path))
    rest = do(df, tasks.spend, tmp_path / "spent")
    assert (rest.completed, rest.stopped) == (30 - part.completed, "")
    assert sorted(calls(tmp_path), key=int) == [str(n) for n in range(30)]


def test_the_cap_can_be_on_anything_that_tasks_use(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    df = spark.range(30).selectExpr("id AS n")
    part = do(df, tasks.spend, tmp_path / "spent", max_cost=50, cost_name="tokens", concurrency=2)
    assert part.stopped == "max_cost"
    assert 5 <= part.completed <= 7
    assert part.cost == 10 * part.completed
    assert {row["penstock_cost"] for row in rows_of(spark, tmp_path / "spent").values()} == {10}


def test_columns_say_priority_delay_group_and_cost_and_which_are_the_payload(
    spark: SparkSession, tasks: ModuleType, file_url: str, tmp_path: Path
) -> None:
    df = spark.range(2).selectExpr(
        "id AS n",
        "'x' AS note",
        "-id AS urgency",
        "INTERVAL '0.3' SECOND AS rest",
        "id AS account",
        "id + 1 AS price",
    )
    placement = {"priority": "urgency", "delay": "rest", "group": "account", "cost": "price"}
    done = do(df, tasks.count, tmp_path / "counts", payload=["n", "note"], **placement)
    assert done.completed == 2
    assert {row["penstock_value"] for row in rows_of(spark, tmp_path / "counts").values()} == {2}
    jobs = (
        spark.read.format("penstock")
        .options(url=file_url, queue="tables")
        .load()
        .where("task LIKE '%count'")
        .selectExpr(
            "priority",
            "group",
            "cost",
            "payload",
            "claimed_at - enqueued_at >= INTERVAL '0.3' SECOND AS late",
        )
    )
    assert sorted(map(tuple, jobs.collect())) == [
        (-1, "1", 2, '{"row":{"n":1,"note":"x"}}', True),
        (0, "0", 1, '{"row":{"n":0,"note":"x"}}', True),
    ]


def test_too_many_failures_end_the_run_with_what_was_done_in_the_output(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    failing = spark.range(0, 200, 10).selectExpr("id + 3 AS user_id", "'x' AS name")
    with pytest.raises(TooManyFailures, match="more than max_failures=2"):
        do(failing, tasks.score, tmp_path / "scores", max_failures=2, concurrency=1)
    states = [row["penstock_state"] for row in rows_of(spark, tmp_path / "scores").values()]
    assert 3 <= states.count("failed") <= len(states) <= 20
    once = do(failing.limit(1), tasks.score, tmp_path / "scores", retry_failed=True)
    assert once.failed == 1


def test_rows_that_cannot_be_jobs_are_rows_of_the_output(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    df = spark.sql("SELECT 1L AS id, 1.5D AS x UNION ALL SELECT 2L, double('NaN')")
    done = do(df, tasks.count, tmp_path / "counts")
    assert (done.plan.rejected, done.completed) == (1, 1)
    rows = rows_of(spark, tmp_path / "counts")
    assert rows[1]["penstock_value"] == 2
    assert rows[2]["penstock_state"] == "rejected"
    assert "column 'x' is nan" in rows[2]["penstock_error"]
    mended = spark.sql("SELECT 1L AS id, 1.5D AS x UNION ALL SELECT 2L, 2.5D")
    assert do(mended, tasks.count, tmp_path / "counts").completed == 1


def test_an_output_has_one_writer_at_a_time(
    spark: SparkSession, tasks: ModuleType, file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "doubles"
    # Whoever waits sees the sooner that the holder lives.
    monkeypatch.setattr(driver_lease, "_BEAT_S", 0.2)
    with (
        OutputLease(file_url, str(output), "another"),
        pytest.raises(OutputBusy, match="run: another, process"),
    ):
        do(numbers(spark, 1), tasks.double, output)
    assert do(numbers(spark, 1), tasks.double, output).completed == 1


def test_an_output_is_one_by_any_spelling_and_another_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    here = output_identity("scores", is_path=True)
    whole = str(tmp_path / "a" / "scores")
    spellings = ("./scores/", whole, f"file:{whole}", f"file://{whole}/")
    assert {output_identity(name, is_path=True) for name in spellings} == {here}
    monkeypatch.chdir(tmp_path)
    others = [output_identity("scores", is_path=True), output_identity("scores", is_path=False)]
    assert here not in others
    assert output_identity("s3://lake/scores/", is_path=True) == "s3://lake/scores"


def test_a_run_that_fails_keeps_its_rows_until_they_are_no_longer_read(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_failing, found = Event(), []

    def enqueue(rows: DataFrame, _: Any) -> int:
        assert is_failing.wait(60)
        time.sleep(0.5)
        found.append(rows.count())
        return 0

    def fail(_: Any) -> None:
        is_failing.set()
        raise FleetFailed("all have ended")

    monkeypatch.setattr(running, "enqueue_rows", enqueue)
    monkeypatch.setattr(RunWorkers, "check", fail)
    with pytest.raises(FleetFailed, match="all have ended"):
        do(numbers(spark, 1, 2), tasks.double, tmp_path / "doubles", workers=0)
    assert found == [2]


def until_taken(url: str, output: Path, batch: Batch) -> None:
    """Wait until what has ended is in the ledger, and in the store no longer."""
    deadline = time.monotonic() + 60
    with Store(url) as store:
        while (
            not list(output.glob("*.parquet"))
            or store.run(store.storage.held(batch.queue, batch.consumer)).jobs
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_rows_whose_jobs_are_gone_are_enqueued_again_until_all_are_in_the_ledger_once(
    spark: SparkSession, tasks: ModuleType, file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, put = tmp_path / "doubles", []

    def lose_one(rows: DataFrame, batch: Batch) -> int:
        put.append(rows.count())
        assert len(put) < 3, "the same rows are put in again and again"
        count = enqueue_rows(rows if len(put) > 1 else rows.where("key_json NOT LIKE '%k3%'"), batch)
        until_taken(file_url, output, batch)
        return count

    monkeypatch.setattr(running, "enqueue_rows", lose_one)
    monkeypatch.setattr(running, "_IDLE_S", 0.5)
    assert do(numbers(spark, 1, 2, 3), tasks.double, output).completed == 3
    assert put == [3, 1]
    assert sorted(row["k"] for row in spark.read.parquet(str(output)).collect()) == ["k1", "k2", "k3"]
    assert sorted(calls(tmp_path)) == ["1", "2", "3"]


@pytest.mark.parametrize("longest_s", [600.0, 1.0])
def test_slow_rows_are_enqueued_again_only_after_a_long_time(
    spark: SparkSession,
    tasks: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    longest_s: float,
) -> None:
    output, put = tmp_path / "doubles", []

    def count(rows: DataFrame, batch: Batch) -> int:
        put.append(rows.count())
        return enqueue_rows(rows, batch)

    monkeypatch.setattr(running, "enqueue_rows", count)
    monkeypatch.setattr(running, "_IDLE_S", 0.5)
    monkeypatch.setattr(running, "_LONGEST_IDLE_S", longest_s)
    late = numbers(spark, 1).selectExpr("*", "5.0 AS late")
    assert do(late, tasks.double, output, delay="late").completed == 1
    assert (len(put) == 1) == (longest_s == 600)
    assert [row["k"] for row in spark.read.parquet(str(output)).collect()] == ["k1"]
    assert calls(tmp_path) == ["1"]


def test_rows_enqueued_twice_are_in_the_ledger_once(
    spark: SparkSession, tasks: ModuleType, file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when Spark repeats what an executor that was lost had done."""
    output = tmp_path / "doubles"

    def repeat(rows: DataFrame, batch: Batch) -> int:
        first = enqueue_rows(rows.where("key_json LIKE '%k1%'"), batch)
        until_taken(file_url, output, batch)
        return first + enqueue_rows(rows, batch)

    monkeypatch.setattr(running, "enqueue_rows", repeat)
    assert do(numbers(spark, 1, 2), tasks.double, output).completed == 2
    assert sorted(row["k"] for row in spark.read.parquet(str(output)).collect()) == ["k1", "k2"]
    assert sorted(calls(tmp_path)) == ["1", "2"]


def leave(monkeypatch: pytest.MonkeyPatch, df: DataFrame, task: Any, output: Path, **options: Any) -> None:
    """A run that ends as soon as its rows are in, and leaves them to the next; with ``cancelled``, as after Ctrl-C."""

    def put(rows: DataFrame, batch: Batch) -> int:
        enqueue_rows(rows, batch)
        if options.get("cancelled"):
            cancel_rows(rows, batch)
        raise RuntimeError("it has ended")

    with monkeypatch.context() as patch:
        patch.setattr(running, "enqueue_rows", put)
        with pytest.raises(RuntimeError, match="it has ended"):
            do(df, task, output, workers=0)


def consumer_of(output: Path) -> str:
    return f"output-{output_name(output_identity(str(output), is_path=True))}"


def test_rows_that_wait_since_an_earlier_run_are_run_once_if_failed_ones_are_to_be_retried(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "doubles"
    leave(monkeypatch, numbers(spark, 1, 2), tasks.double, output)
    assert do(numbers(spark, 1, 2, 3), tasks.double, output, retry_failed=True).completed == 3
    assert sorted(calls(tmp_path)) == ["1", "2", "3"]


def test_rows_that_wait_for_another_output_are_done_for_both(
    spark: SparkSession, tasks: ModuleType, file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch, numbers(spark, 1, 2), tasks.double, tmp_path / "one")
    with Store(file_url) as store:
        store.run(store.storage.pause("tables"))

    def put_and_resume(rows: DataFrame, batch: Batch) -> int:
        """Put the rows in before a worker can take what waits."""
        count = enqueue_rows(rows, batch)
        with Store(file_url) as store:
            store.run(store.storage.resume("tables"))
        return count

    monkeypatch.setattr(running, "enqueue_rows", put_and_resume)
    # Nobody is to wait for what is not held.
    monkeypatch.setattr(running, "_IDLE_S", 3600)
    changed = spark.createDataFrame([("k1", 1), ("k2", 20)], "k string, n long")
    assert do(changed, tasks.double, tmp_path / "two").completed == 2
    assert do(changed, tasks.double, tmp_path / "one").plan.done == 2
    assert sorted(calls(tmp_path)) == ["1", "20"]


def test_rows_that_an_earlier_run_had_cancelled_are_cancelled_when_the_next_stops(
    spark: SparkSession, tasks: ModuleType, file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, df = tmp_path / "doubles", numbers(spark, 1, 2, 3)
    leave(monkeypatch, df, tasks.double, output, cancelled=True)

    def put_and_fail_one(rows: DataFrame, batch: Batch) -> int:
        count = enqueue_rows(rows, batch)
        with Store(file_url) as store:
            (lease,) = store.run(store.storage.claim(batch.queue, Take("worker", 1, 60_000))).leases
            failed = Settlement(lease.id, lease.token, Fail(Failure("ValueError", "no"), final=True))
            store.run(store.storage.settle(batch.queue, [failed]))
        return count

    monkeypatch.setattr(running, "enqueue_rows", put_and_fail_one)
    with pytest.raises(TooManyFailures):
        do(df, tasks.double, output, workers=0, max_failures=0)
    with Store(file_url) as store:
        assert store.run(store.storage.counts("tables")).open == 0


def test_a_budget_is_of_its_own_run_and_binds_all_rows_of_that(
    spark: SparkSession, tasks: ModuleType, file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, df = tmp_path / "spent", spark.range(6).selectExpr("id AS n")
    leave(monkeypatch, df, tasks.spend, output, cancelled=True)
    capped = do(df, tasks.spend, output, max_cost=1, concurrency=1)
    assert capped.stopped == "max_cost"
    assert 1 <= capped.completed < 6

    with Store(file_url) as store:
        # As a run leaves it that was killed.
        store.run(store.storage.set_budget("tables", Budget("usd", 0, flow=consumer_of(output))))
        assert do(df, tasks.spend, output).completed == 6 - capped.completed
        assert store.run(store.storage.budgets("tables")) == []


def test_a_run_that_was_away_leaves_the_budget_of_the_one_that_took_over(
    spark: SparkSession, tasks: ModuleType, file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "spent"

    def put_and_lose(rows: DataFrame, batch: Batch) -> int:
        lease = f"penstock.output.{output_name(output_identity(str(output), is_path=True))}"
        with Store(file_url) as store:
            # It tries again if a heartbeat of the first run comes between the end of the lease and the sweep.
            store.run(end_leases(store.storage, lease, ["run"]))
            assert store.run(store.storage.claim(lease, Take("another", 1, 60_000))).leases
        return enqueue_rows(rows, batch)

    monkeypatch.setattr(driver_lease, "_BEAT_S", 0.1)
    monkeypatch.setattr(running, "enqueue_rows", put_and_lose)
    with pytest.raises(OutputLost):
        do(spark.range(2).selectExpr("id AS n"), tasks.spend, output, max_cost=5)
    with Store(file_url) as store:
        budgets = store.run(store.storage.budgets("tables"))
    assert [(budget.name, budget.flow) for budget in budgets] == [("usd", consumer_of(output))]


def test_a_key_may_have_any_name(spark: SparkSession, tasks: ModuleType, tmp_path: Path) -> None:
    names = ["user id", "a.b", "größe", "b`c"]
    df = spark.createDataFrame([("1", "2", "3", "4", 5)], [*names, "n"])
    assert do(df, tasks.double, tmp_path / "doubles", key=names).completed == 1
    (row,) = spark.read.parquet(str(tmp_path / "doubles")).collect()
    assert [row[name] for name in names] == ["1", "2", "3", "4"]
    assert do(df, tasks.double, tmp_path / "doubles", key=names).plan.done == 1


def test_nothing_but_the_run_s_own_files_is_removed(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "others").write_text("of somebody else")
    do(numbers(spark, 1), tasks.double, tmp_path / "run", scratch=str(scratch))
    do(numbers(spark, 1, 2), tasks.double, tmp_path / "run#2", scratch=str(scratch))
    do(numbers(spark, 1, 2, 3), tasks.double, tmp_path / "run%202")
    assert (scratch / "others").exists()
    assert [path for path in scratch.rglob("*") if path.is_file()] == [scratch / "others"]
    for name, count in (("run", 1), ("run#2", 2), ("run%202", 3)):
        assert len(rows_of(spark, tmp_path / name)) == count


def test_bad_input_is_reported_before_any_job_is_enqueued(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    good = numbers(spark, 1)
    null = spark.sql("SELECT CAST(NULL AS string) AS k, 1L AS n")
    torn = spark.sql("SELECT 'a' AS k, 1L AS n UNION ALL SELECT 'a', 2L UNION ALL SELECT 'b', 1L")
    spark.range(1).write.parquet(str(tmp_path / "other"))
    cases: list[tuple[DataFrame, Any, dict[str, Any], str]] = [
        (good, tasks.double, {"key": "nobody"}, "no column 'nobody'"),
        (good, tasks.double, {"key": []}, "key is empty"),
        (good, tasks.double, {"payload": ["k", "n"]}, "column 'k' is not a parameter"),
        (good, tasks.double, {"group": "team"}, "no column 'team'"),
        (good, tasks.double, {"on_change": "maybe"}, "on_change must be rerun, keep or error, got 'maybe'"),
        (good, tasks.double, {"limit": 0}, "limit must be >= 1, or None for all rows, got 0"),
        (
            good,
            tasks.double,
            {"progress": "loud"},
            "progress must be auto, bar, notebook, lines or none, got 'loud'",
        ),
        (good, tasks.double, {"output": tmp_path / "other"}, "does not hold results of process"),
        (
            good,
            tasks.double,
            {"output": tmp_path / "out?"},
            "would treat it as a pattern for several folders",
        ),
        (good.withColumnRenamed("n", "m"), tasks.double, {}, "needs 'n', but the table has no such column"),
        (good.selectExpr("k", "'x' AS n"), tasks.double, {}, "column 'n' has type string"),
        (
            good.withColumnRenamed("k", "penstock_state"),
            tasks.double,
            {},
            "has the same name as a column of the output",
        ),
        (good, "tests.spark.table_tasks:nothing", {}, "cannot be found"),
        (good, "tests.spark.table_tasks:app", {}, "not a task"),
        (null, tasks.double, {}, "1 rows have an invalid key"),
        (torn, tasks.double, {}, "1 keys have rows with different payloads"),
    ]
    for df, task, options, said in cases:
        with pytest.raises(InvalidInput, match=said):
            do(df, task, options.pop("output", output), **options)
    assert calls(tmp_path) == []
    assert not output.exists() or spark_files(output) == []


def spark_files(output: Path) -> list[Path]:
    return [path for path in output.glob("*.parquet") if not path.name.startswith("_")]


def test_results_of_another_type_are_refused_and_a_store_in_memory_too(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do(numbers(spark, 1), tasks.double, tmp_path / "out")
    with pytest.raises(InvalidInput, match=r"penstock_value as bigint, but the task's hints now say string"):
        do(numbers(spark, 1), tasks.spell, tmp_path / "out")
    alone = load_tasks("memory://", tmp_path, monkeypatch)
    with pytest.raises(InvalidInput, match="in the memory of this process"):
        do(numbers(spark, 1), alone.double, tmp_path / "out")
    away = load_tasks("valkey://127.0.0.1:1", tmp_path, monkeypatch)
    with pytest.raises(StorageError, match=r"127\.0\.0\.1"):
        do(numbers(spark, 1), away.double, tmp_path / "new")


def test_the_last_rows_are_written_as_soon_as_the_queue_is_drained(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than a page, which is all that the run looks at for each poll.
    rows = collector._PAGE + 100
    monkeypatch.setattr(running, "_COMMIT_S", (120.0, 120.0))
    table = spark.range(rows).selectExpr("concat('k', id) AS k", "id AS n")
    done = do(table, tasks.double, tmp_path / "doubles")
    assert done.completed == rows
    assert done.seconds < 120
    assert len(list((tmp_path / "doubles").glob("*.parquet"))) == 1
