"""The history of durable steps."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock import App, JobContext, StepFailed
from penstock.spark import history

COLUMNS = ("name", "key", "status", "run", "attempt", "task", "error_type", "error", "unused")


def shop(url: str) -> App:
    app = App(url, backoff="1ms")
    calls: list[str] = []

    def fail_once(name: str) -> str:
        calls.append(name)
        if calls.count(name) == 1:
            raise ConnectionError("declined")
        return "paid"

    def refuse() -> None:
        raise LookupError("gone")

    @app.task(queue="mail", name="sell", attempts=2)
    async def sell(context: JobContext, order: int) -> None:
        if context.run == 1:
            await context.step("quote", lambda: 1)
        await context.step("charge", fail_once, f"{order}", attempts=2)
        for sku in ("lamp", "chair"):
            await context.step("reserve", lambda sku: f"{sku} {order}", sku, key=sku)
        if context.run == 1:
            raise RuntimeError("once more")
        with pytest.raises(StepFailed):
            await context.step("ship", refuse, attempts=1)

    return app


def sell(app: App, order: int) -> None:
    async def enqueue_and_work() -> None:
        async with app:
            await app.queue("mail").enqueue({"order": order}, task="sell")
            await app.worker(burst=True).run()

    asyncio.run(enqueue_and_work())


def test_each_recorded_step_is_a_row_with_its_last_attempt(spark: SparkSession, tmp_path: Path) -> None:
    app, out = shop(f"sqlite:///{tmp_path}/jobs.db"), tmp_path / "history"
    sell(app, 7)
    assert history.sync(app.url, out, spark=spark, upto="silver").events > 0
    rows = history.tables(spark, out).steps.orderBy("name", "key").collect()
    assert [tuple(row[name] for name in COLUMNS) for row in rows] == [
        ("charge", "", "completed", 1, 2, "sell", "", "", False),
        ("quote", "", "completed", 1, 1, "sell", "", "", True),
        ("reserve", "chair", "completed", 1, 1, "sell", "", "", False),
        ("reserve", "lamp", "completed", 1, 1, "sell", "", "", False),
        ("ship", "", "failed", 2, 1, "sell", "LookupError", "gone", False),
    ]
    for row in rows:
        assert row.enqueued_at <= row.started_at <= row.recorded_at
        assert row.recorded_at - row.started_at >= timedelta(milliseconds=row.last_run_ms)
        assert row.run_ms >= row.last_run_ms
        assert row.worker
    assert [row.result_size for row in rows] == [6, 1, 9, 8, 0]


def test_steps_folded_bit_by_bit_equal_those_made_at_once(spark: SparkSession, tmp_path: Path) -> None:
    app = shop(f"sqlite:///{tmp_path}/jobs.db")
    for order in (1, 2):
        sell(app, order)
        while history.sync(app.url, tmp_path / "bits", spark=spark, max_events=7, upto="silver").events:
            pass
    history.sync(app.url, tmp_path / "whole", spark=spark, upto="silver")
    made, expected = (
        sorted(str(row) for row in history.tables(spark, tmp_path / name).steps.collect())
        for name in ("bits", "whole")
    )
    assert made == expected
    assert len(made) == 10
