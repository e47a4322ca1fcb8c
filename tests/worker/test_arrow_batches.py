"""Batch tasks that take and give Arrow tables."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from penstock import App, JobContext, JobFailed

ROWS = [{"name": "ada", "points": 3}, {"name": "bob", "points": 4.5}, {"name": "cy", "extra": True}]


async def results(app: App, task: Any) -> list[Any]:
    async with app:
        handles = await task.enqueue_many([task.job(row) for row in ROWS])
        await app.worker(burst=True).run()
        return [await handle.result() for handle in handles]


async def test_items_come_as_columns_and_each_job_gets_its_row_of_the_table_that_is_returned() -> None:
    app = App("memory://")
    seen: list[pa.Schema] = []

    @app.task(batch=10, batch_wait="20ms")
    async def score(rows: pa.Table) -> pa.Table:
        seen.append(rows.schema)
        return pa.table({"name": rows["name"], "twice": pc.multiply(rows["points"], 2)})

    assert await results(app, score) == [
        {"name": "ada", "twice": 6.0},
        {"name": "bob", "twice": 9.0},
        {"name": "cy", "twice": None},
    ]
    assert [field.name for field in seen[0]] == ["name", "points", "extra"]
    assert seen[0].field("points").type == pa.float64()


async def test_a_record_batch_a_context_for_each_row_and_an_array_as_the_answer() -> None:
    app = App("memory://")

    @app.task(batch=10, batch_wait="20ms")
    def score(rows: pa.RecordBatch, *, jobs: list[JobContext]) -> pa.Array:
        assert isinstance(rows, pa.RecordBatch)
        assert len(jobs) == rows.num_rows
        return pc.utf8_length(rows["name"])

    assert await results(app, score) == [3, 3, 2]


async def test_a_list_may_be_returned_in_which_an_exception_fails_one_job() -> None:
    app = App("memory://")

    @app.task(batch=10, batch_wait="20ms", attempts=1)
    def score(rows: pa.Table) -> list[Any]:
        return [1, ValueError("not bob"), 3]

    async with app:
        handles = await score.enqueue_many([score.job(row) for row in ROWS])
        await app.worker(burst=True).run()
        assert await handles[0].result() == 1
        with pytest.raises(JobFailed, match="not bob"):
            await handles[1].result()


async def test_a_table_of_another_length_fails_the_batch() -> None:
    app = App("memory://")

    @app.task(batch=10, batch_wait="20ms", attempts=1)
    def score(rows: pa.Table) -> pa.Table:
        return rows.slice(1)

    async with app:
        handles = await score.enqueue_many([score.job(row) for row in ROWS])
        await app.worker(burst=True).run()
        with pytest.raises(JobFailed, match="2 results for a batch of 3 jobs"):
            await handles[0].result()


async def test_an_item_that_is_not_a_row_fails_alone() -> None:
    app = App("memory://")

    @app.task(batch=10, batch_wait="20ms", attempts=1)
    def score(rows: pa.Table) -> list[int]:
        return [1] * rows.num_rows

    async with app:
        good = await score.enqueue({"name": "ada"})
        bad = await app.queue("default").enqueue({"rows": "no row"}, task="score", attempts=1)
        await app.worker(burst=True).run()
        assert await good.result() == 1
        with pytest.raises(JobFailed, match="object"):
            await bad.result()
