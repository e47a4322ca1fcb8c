"""The events of bronze, each with its place in the order of its queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.delta import DataFile, Table
from penstock.spark.history.state import BronzeState, Place

__all__ = ["Placing", "new_events", "pending_files", "piles_of", "place_number", "placing_between"]

# Sequences of an epoch come before all those of the next one.
_PER_EPOCH: Final = 1 << 48
_PILE: Final = 250_000


class Placing(msgspec.Struct, frozen=True):
    """Tells the places of events. Those up to ``done`` are left out, and those after ``upto``."""

    epochs: dict[str, tuple[str, ...]]
    done: dict[str, int]
    upto: dict[str, int]

    def placed(self, events: pa.Table) -> pa.Table:
        """Return the events that count, with their ``place``."""
        place = events["seq"]
        for queue, epochs in self.epochs.items():
            for number, epoch in enumerate(epochs[1:], 1):
                is_then = pc.and_(pc.equal(events["queue"], queue), pc.equal(events["epoch"], epoch))
                place = pc.if_else(is_then, pc.add(events["seq"], number * _PER_EPOCH), place)
        return events.append_column("place", place).filter(self.covers(events["queue"], place))

    def covers(self, queues: Any, places: Any) -> Any:
        """Return whether each place, of the queue beside it, counts."""
        after, upto = (
            pc.fill_null(
                pc.take(pa.array(bounds.values(), pa.int64()), pc.index_in(queues, _names(bounds))), 0
            )
            for bounds in (self.done, self.upto)
        )
        return pc.and_(pc.greater(places, after), pc.less_equal(places, upto))


def _names(bounds: Mapping[str, int]) -> pa.Array:
    return pa.array(bounds, pa.string())


def place_number(bronze: BronzeState, queue: str, epoch: str, seq: int) -> int:
    """Return a place among all events of a queue, whatever their epochs."""
    return bronze.epochs[queue].index(epoch) * _PER_EPOCH + seq


def placing_between(bronze: BronzeState, done: Mapping[str, Place], upto: Mapping[str, Place]) -> Placing:
    """Place the events after some places, up to others."""
    numbers = [
        {queue: place_number(bronze, queue, place.epoch, place.seq) for queue, place in places.items()}
        for places in (done, upto)
    ]
    return Placing(bronze.epochs, *numbers)


def pending_files(files: Sequence[DataFile], number: int) -> list[DataFile]:
    """Return the files that may hold events of commits after that number."""
    return [file for file in files if file.number > number]


def new_events(
    bronze: Table, files: Sequence[DataFile], placing: Placing, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return the events of these files that count, with their ``place``; all columns of them, or some."""
    empty = bronze.schema.empty_table()
    tables = [bronze.read(file, columns) for file in files]
    return placing.placed(
        pa.concat_tables(tables or [empty if columns is None else empty.select(list(columns))])
    )


def piles_of(files: Sequence[DataFile]) -> list[list[DataFile]]:
    """Return as many files in a pile as are worth a task, and fit into its memory."""
    piles: list[list[DataFile]] = []
    room = 0
    for file in files:
        if file.rows > room or not piles:
            piles.append([])
            room = _PILE
        piles[-1].append(file)
        room -= file.rows
    return piles
