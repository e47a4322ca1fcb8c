"""Damage to the file itself, and to values that only this engine has."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from penstock.core.job import Extras, NewJob
from penstock.core.limits import Limit
from penstock.core.outcome import Complete
from penstock.errors import StorageDamaged
from penstock.storage.sqlite.engine import SqliteStorage
from penstock.storage.values import QueueSettings, Settlement, Take
from tests.contract.damage import database
from tests.contract.factories import Bench
from tests.storage.sqlite.conftest import Opener


async def test_damaged_pages_are_an_error_that_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "penstock.db"
    storage = SqliteStorage.from_url(f"sqlite:///{path}")
    await storage.open()
    await storage.enqueue("q", [NewJob(f"job-{n}", payload=bytes(500)) for n in range(500)])
    await storage.close()
    content = bytearray(path.read_bytes())
    for at in range(4096 * 4, len(content) - 64, 4096):
        content[at : at + 64] = b"\xa5" * 64
    path.write_bytes(content)

    with pytest.raises(StorageDamaged, match=r"penstock\.db.*\.recover") as caught:
        await claim_from(path)
    # A sqlite3 program that cannot recover must not leave an empty store behind.
    remedy = re.findall(r"`(sqlite3 .*?)`", str(caught.value))[0]
    done = subprocess.run(["sh", "-c", remedy], cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode == 0) == (tmp_path / "new.db").exists()


async def claim_from(path: Path) -> None:
    storage = SqliteStorage.from_url(f"sqlite:///{path}")
    try:
        await storage.open()
        await storage.claim("q", Take("worker", 100, 60_000))
    finally:
        await storage.close()


@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE queues SET settings = '{'",
        "UPDATE queues SET minute = x'c1'",
        "UPDATE queues SET waiting = 17, active = 3",
        "UPDATE memo SET answer = x'c1'",
    ],
)
async def test_damage_beside_the_records_does_not_stop_the_queue(storage: SqliteStorage, harm: str) -> None:
    await storage.configure("q", QueueSettings(keep_completed=1000))
    await storage.enqueue("q", [NewJob(f"job-{n}") for n in range(20)])
    database(storage).execute(harm)

    await storage.sweep("q")
    done = 0
    while leases := (await storage.claim("q", Take("worker", 6, 60_000))).leases:
        batch = await storage.settle("q", [Settlement(one.id, one.token, Complete()) for one in leases])
        done += sum(answer.applied for answer in batch.answers)

    assert done == 20
    assert (await storage.counts("q")).open == 0
    assert await storage.metrics("q")
    assert not (await storage.check("q")).problems


async def test_a_job_without_a_payload_does_not_spin(storage: SqliteStorage) -> None:
    await storage.enqueue("q", [NewJob("bare"), NewJob("whole")])
    database(storage).execute("DELETE FROM payloads WHERE job = 1")

    first = await storage.claim("q", Take("worker", 1, 60_000))
    second = await storage.claim("q", Take("worker", 1, 60_000))

    assert [lease.id for lease in first.leases] == ["whole"]
    assert (second.leases, second.wait_ms) == ([], None)
    [bare] = await storage.get("q", ["bare"])
    assert bare is not None
    assert bare.damaged


async def test_counters_that_went_back_are_mended(storage: SqliteStorage) -> None:
    await storage.enqueue("q", [NewJob(f"job-{n}") for n in range(5)])
    database(storage).execute("UPDATE queues SET seq = 1, events = 2")

    found = await storage.check("q", repair=True)

    assert found.problems["wrong_counters"] == 2
    assert not (await storage.check("q")).problems
    [answer] = await storage.enqueue("q", [NewJob("next")])
    assert answer.incarnation == 6


async def test_an_id_that_is_not_utf_8_is_given_a_name(storage: SqliteStorage) -> None:
    await storage.enqueue("q", [NewJob("bad"), NewJob("good")])
    database(storage).execute("UPDATE jobs SET id = CAST(x'62ff' AS TEXT) WHERE id = 'bad'")

    [lease] = (await storage.claim("q", Take("worker", 5, 60_000))).leases

    assert lease.id == "good"
    [job] = await storage.get("q", ["b\ufffd"])
    assert job is not None
    assert job.damaged is not None
    assert b"b\xff" in job.damaged


async def test_a_flipped_byte_in_an_id_is_repaired_at_the_first_try(tmp_path: Path) -> None:
    path = tmp_path / "penstock.db"
    storage = SqliteStorage.from_url(f"sqlite:///{path}")
    await storage.open()
    await storage.enqueue("q", [NewJob("good"), NewJob("job-to-harm")])
    await storage.close()
    whole = path.read_bytes()
    places = [found.start() for found in re.finditer(b"job-to-harm", whole)]
    assert len(places) > 1
    for place in places:
        content = bytearray(whole)
        content[place] ^= 0x80
        path.write_bytes(content)
        storage = SqliteStorage.from_url(f"sqlite:///{path}")
        await storage.open()
        try:
            assert (await storage.check("q", repair=True)).problems
            assert not (await storage.check("q")).problems
            leases = (await storage.claim("q", Take("worker", 5, 60_000))).leases
            assert "good" in [lease.id for lease in leases]
        finally:
            await storage.close()


async def test_a_completed_job_does_not_run_again_because_its_entry_stayed_in_the_line_of_its_group(
    opened: Opener,
) -> None:
    storage = await opened("memory://")
    bench = Bench(storage, "orders")
    await storage.limit("orders", "strict", Limit(concurrency=1))
    await bench.put_all([bench.new(id, extras=Extras(group="strict")) for id in ("one", "two", "three")])
    # The entry of "two" has another place than the job.
    database(storage).execute("UPDATE group_lines SET place = place - 1 WHERE id = 'two'")

    ran = [await complete_next(bench) for _ in range(2)]
    assert ran == ["one", "two"]
    assert await bench.claim_all() == []
    assert (await storage.check("orders", repair=True)).problems
    assert await complete_next(bench) == "three"


async def complete_next(bench: Bench) -> str:
    lease = await bench.claim()
    assert (await bench.settle(lease, Complete(b"1"))).applied
    return lease.id
