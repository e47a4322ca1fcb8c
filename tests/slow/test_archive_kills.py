"""``archive`` killed between its steps: every job is in the store or in the table, and in the table once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.slow.drivers import Driver, let_leases_end
from tests.spark.stores import ask, fill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUEUE, JOBS = "mail", 20_000


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Driver]]:
    drivers: list[Driver] = []

    def start() -> Driver:
        arguments = (f"sqlite:///{tmp_path}/jobs.db", QUEUE, str(tmp_path / "kept"))
        log = tmp_path / f"driver-{len(drivers)}.log"
        drivers.append(Driver("tests.slow.archive_run", *arguments, log=log))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.end()


def test_an_archive_that_is_killed_loses_no_job_and_copies_none_twice(
    tmp_path: Path, start: Callable[[], Driver]
) -> None:
    url, output = f"sqlite:///{tmp_path}/jobs.db", tmp_path / "kept"
    fill(url, QUEUE, completed=JOBS)

    def stored() -> int:
        return ask(url, lambda storage: storage.counts(QUEUE)).completed

    def tabled() -> list[str]:
        found = sorted(output.glob("*.parquet"))
        return [id for path in found for id in pq.read_table(path, columns=["id"])["id"].to_pylist()]

    def is_copied() -> bool:
        return any((output / "_penstock_archive").glob("*/*/*.parquet"))

    steps: list[Callable[[], bool]] = [
        # Written to the journal and about to be compared; some are freed; all are, and some are in the table.
        is_copied,
        lambda: stored() < JOBS,
        lambda: bool(list(output.glob("*.parquet"))),
    ]
    standby = start()
    for is_reached in steps:
        driver, standby = standby, start()
        driver.go()
        driver.wait_until(is_reached)
        driver.kill_all()
        assert len(tabled()) == len(set(tabled()))
        assert len(tabled()) + stored() <= JOBS, "a job is in the store and in the table"
        let_leases_end(url, output)
    standby.go()
    standby.finish()
    assert sorted(tabled()) == sorted(f"c{n}" for n in range(JOBS))
    assert stored() == 0
