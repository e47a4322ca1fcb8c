"""read_entries: the log as it is stored."""

from __future__ import annotations

from penstock.core.event import NAMES, Gap, columns, unpack
from penstock.storage.values import QueueSettings
from tests.contract.factories import Bench


async def test_entries_are_what_events_are_unpacked_from(bench: Bench) -> None:
    await bench.bring_all()
    page = await bench.storage.read_events(bench.queue, after=0)

    entries = await bench.storage.read_entries(bench.queue, after=0)

    unpacked = [
        event for seq, entry in entries.entries for event in unpack(entry, last_seq=seq, queue=bench.queue)
    ]
    assert unpacked == page.events
    assert len(entries.entries) > 1
    assert (entries.next, entries.last, entries.epoch, entries.gap) == (
        page.next,
        page.last,
        page.epoch,
        None,
    )
    table = columns(entries.entries, queue=bench.queue)
    assert table == {name: [getattr(event, name) for event in page.events] for name in NAMES}


async def test_an_entry_is_given_whole_even_from_an_offset_within(bench: Bench) -> None:
    await bench.put_all([bench.new(str(i)) for i in range(10)])

    page = await bench.storage.read_entries(bench.queue, after=4, limit=1)

    [(last_seq, entry)] = page.entries
    assert (last_seq, page.next, page.last) == (10, 10, 10)
    assert columns([(last_seq, entry)], queue=bench.queue, after=4, names=["id"]) == {"id": list("456789")}


async def test_pages_join_and_end_when_the_limit_is_reached(bench: Bench) -> None:
    for i in range(3):
        await bench.put_all([bench.new(f"{i}-{k}") for k in range(5)])

    first = await bench.storage.read_entries(bench.queue, after=0, limit=6)
    rest = await bench.storage.read_entries(bench.queue, after=first.next, limit=6)

    assert [seq for seq, _ in first.entries] == [5, 10]
    assert [seq for seq, _ in rest.entries] == [15]
    assert (first.next, rest.next, rest.last) == (10, 15, 15)


async def test_an_empty_log_and_the_end_of_one_give_nothing(bench: Bench) -> None:
    empty = await bench.storage.read_entries(bench.queue, after=0)
    await bench.put()
    end = await bench.storage.read_entries(bench.queue, after=1)

    assert (empty.entries, empty.next, empty.last, empty.gap) == ([], 0, 0, None)
    assert (end.entries, end.next, end.last, end.gap) == ([], 1, 1, None)
    assert end.epoch


async def test_trimmed_events_are_reported(bench: Bench) -> None:
    await bench.storage.configure(bench.queue, QueueSettings(events_count=2))
    for i in range(5):
        await bench.put(str(i))
    await bench.storage.sweep(bench.queue)

    page = await bench.storage.read_entries(bench.queue, after=1)

    assert page.gap == Gap(2, 4)
    assert [seq for seq, _ in page.entries] == [5, 6]
