"""``df.write.format("penstock")``: every row a job, once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from penstock.core.job import Job
from penstock.core.lifecycle import State
from penstock.spark import write_report
from penstock.spark.rows import row_id_maker
from penstock.spark.schemas import namespace_of
from penstock.storage import open_storage

QUEUE = "scores"


def save(df: DataFrame, url: str, /, **options: Any) -> None:
    given = {"url": url, "queue": QUEUE, "task": "score", "keyColumns": "user_id", **options}
    df.write.format("penstock").mode("append").options(**given).save()


def jobs_of(url: str, state: State = State.WAITING) -> list[Job]:
    async def read() -> list[Job]:
        storage = open_storage(url)
        await storage.open()
        try:
            return (await storage.list_jobs(QUEUE, state, limit=1000)).jobs
        finally:
            await storage.close()

    return asyncio.run(read())


def users(spark: SparkSession, count: int = 5) -> DataFrame:
    return spark.range(count).selectExpr("id AS user_id", "concat('user', id) AS name")


def test_every_row_becomes_a_job_whose_payload_is_the_row(spark: SparkSession, url: str) -> None:
    save(users(spark), url)
    jobs = jobs_of(url)
    assert sorted(msgspec.json.decode(job.payload)["name"] for job in jobs) == [f"user{n}" for n in range(5)]
    assert {job.options.task for job in jobs} == {"score"}
    id_of = row_id_maker(namespace_of(url), "score")
    assert {job.id for job in jobs} == {id_of((n,)) for n in range(5)}


def test_the_payload_can_be_some_of_the_columns(spark: SparkSession, url: str) -> None:
    save(users(spark, 2).selectExpr("*", "'a note' AS note"), url, payloadColumns="name, note")
    payloads = sorted((msgspec.json.decode(job.payload) for job in jobs_of(url)), key=str)
    assert payloads == [{"name": f"user{n}", "note": "a note"} for n in range(2)]
    with pytest.raises(PySparkException, match="'colour'"):
        save(users(spark), url, payloadColumns="name, colour")


def test_an_int_and_a_long_of_the_same_value_are_one_key(spark: SparkSession, url: str) -> None:
    save(users(spark), url)
    save(users(spark).selectExpr("CAST(user_id AS int) AS user_id", "name"), url)
    assert len(jobs_of(url)) == 5


def test_a_save_that_is_repeated_puts_nothing_in_twice(spark: SparkSession, url: str) -> None:
    save(users(spark), url, writeId="monday")
    assert write_report(url, "monday").accepted == 5
    save(users(spark, 7), url, writeId="monday")
    report = write_report(url, "monday")
    assert (report.accepted, report.duplicate, report.refused) == (2, 5, 0)


@pytest.mark.parametrize(
    ("columns", "group"),
    [
        ("-3 AS urgency, 60 AS rest, 'acme' AS account, 2 AS price", "acme"),
        ("-3BD AS urgency, 60.0 AS rest, 17L AS account, 2BD AS price", "17"),
        ("-3 AS urgency, INTERVAL '1' MINUTE AS rest, 17BD AS account, 2S AS price", "17"),
        ("-3 AS urgency, '1m' AS rest, 'acme' AS account, 2 AS price", "acme"),
    ],
)
def test_columns_say_priority_delay_group_and_cost(
    spark: SparkSession, url: str, columns: str, group: str
) -> None:
    rows = spark.sql(f"SELECT 1 AS user_id, {columns}")
    save(
        rows,
        url,
        priorityColumn="urgency",
        delayColumn="rest",
        groupColumn="account",
        costColumn="price",
        runId="r1",
    )
    (job,) = jobs_of(url, State.SCHEDULED)
    assert job.extras is not None
    assert (job.priority, job.extras.group, job.extras.cost, job.run_id) == (-3, group, 2, "r1")
    assert 55_000 < job.run_at_ms - job.enqueued_at_ms <= 60_000
    assert msgspec.json.decode(job.payload) == {"user_id": 1}


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        (
            "SELECT CAST(NULL AS long) AS user_id",
            r"the row with user_id=None cannot become a job: the key is null",
        ),
        ("SELECT 7L AS user_id, double('NaN') AS score", r"the row with user_id=7 .* column 'score' is nan"),
    ],
)
def test_a_row_that_cannot_be_a_job_fails_the_write_and_is_named(
    spark: SparkSession, url: str, sql: str, said: str
) -> None:
    with pytest.raises(PySparkException, match=said):
        save(spark.sql(sql), url)
    assert jobs_of(url) == []


def test_bad_rows_are_skipped_and_reported_if_asked(spark: SparkSession, url: str) -> None:
    rows = spark.sql("SELECT * FROM VALUES (1L), (NULL), (2L) AS t(user_id)")
    save(rows, url, badRows="skip", writeId="some")
    report = write_report(url, "some")
    assert (report.accepted, report.refused) == (2, 1)
    assert "null" in report.examples[0].why
    assert len(jobs_of(url)) == 2


def test_a_number_that_is_too_large_for_its_option_is_refused_with_its_row_alone(
    spark: SparkSession, url: str
) -> None:
    rows = spark.sql(
        "SELECT * FROM VALUES (1L, 1BD), (2L, 123456789012345678901234567890BD) AS t(user_id, urgency)"
    )
    save(rows, url, badRows="skip", writeId="some", priorityColumn="urgency")
    report = write_report(url, "some")
    assert (report.accepted, report.refused) == (1, 1)
    assert "123456789012345678901234567890" in report.examples[0].why
    (job,) = jobs_of(url)
    assert job.priority == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keyColumns": "nobody"}, "no column 'nobody'"),
        ({"keyColumns": ""}, "keyColumns is missing"),
        ({"batchSise": "10"}, "Did you mean 'batchSize'"),
        ({"batchSize": "0"}, "batchSize must be from 1 to 10000, got 0"),
        ({"batchSize": "many"}, "batchSize='many' is invalid"),
        ({"release": "never"}, "release='never' is invalid"),
        ({"task": "tests.spark.nowhere:score"}, "cannot be found"),
        ({"url": "valkey://127.0.0.1:1"}, "127.0.0.1:1"),
        ({"url": "nonsense"}, "no scheme"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    spark: SparkSession, url: str, options: dict[str, str], said: str
) -> None:
    with pytest.raises(PySparkException, match=said):
        save(users(spark), url, **options)
    assert jobs_of(url) == []


def test_overwrite_is_refused(spark: SparkSession, url: str) -> None:
    with pytest.raises(PySparkException, match="is not supported"):
        users(spark).write.format("penstock").mode("overwrite").options(
            url=url, queue=QUEUE, keyColumns="name"
        ).save()


def test_a_write_released_on_commit_is_seen_as_a_whole_or_not_at_all(spark: SparkSession, url: str) -> None:
    save(users(spark), url, release="onCommit")
    assert len(jobs_of(url)) == 5
    torn = users(spark, 8).selectExpr("IF(user_id = 7, NULL, user_id) AS user_id", "name").repartition(2)
    with pytest.raises(PySparkException, match="the key is null"):
        save(torn, url, release="onCommit", task="other")
    assert len(jobs_of(url)) == 5
    assert jobs_of(url, State.SCHEDULED) == []
