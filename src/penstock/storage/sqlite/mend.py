"""Going on after a call could not read what it found: what is damaged is put aside, and the call is repeated.

Few records are put aside by themselves within a minute. Many damaged records have a cause in common, and a worker
that cannot read any record must not bury a whole queue.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from penstock.core.display import get_logger
from penstock.errors import PenstockError, StorageDamaged
from penstock.storage.sqlite.check import check_counts, check_groups, check_pages, check_values
from penstock.storage.sqlite.damage import (
    Found,
    find_among,
    find_any,
    has_unknown_states,
    quarantine,
    recent,
    walk,
)
from penstock.storage.sqlite.deliver import deliver
from penstock.storage.sqlite.step import Step
from penstock.storage.sqlite.transaction import Transaction

__all__ = ["AT_MOST", "is_damage", "mend_all", "repeat_mended"]

AT_MOST: Final = 10
"""Records that are put aside within a minute without anybody asking for it."""
_ROUNDS: Final = AT_MOST + 2

Answer = TypeVar("Answer")
Place = tuple[str, str]

logger = get_logger("penstock.storage")


def is_damage(error: Exception) -> bool:
    """Return whether an error may mean that stored values cannot be read."""
    if isinstance(error, sqlite3.Error):
        return isinstance(error, sqlite3.OperationalError) and "decode to UTF-8" in str(error)
    return not isinstance(error, PenstockError)


def repeat_mended(
    transaction: Transaction,
    place: Place,
    attempt: Callable[[Transaction, int], Answer],
    *,
    error: Exception,
    ids: Sequence[str],
) -> Answer:
    """Repeat a call that failed with ``error``, after the damaged records were put aside.

    ``ids`` are those the call is about: they are looked at first, and put aside however many they are. Raises the
    error if nothing is damaged, and ``StorageDamaged`` if too much is.
    """
    mended = 0
    for _ in range(_ROUNDS + len(ids)):
        transaction.roll_back_call()
        found = _mend(transaction, place, ids)
        if found is None:
            raise error
        mended += found
        try:
            return attempt(transaction, mended)
        except Exception as again:
            if not is_damage(again):
                raise
            error = again
    raise error


def mend_all(transaction: Transaction, place: Place) -> dict[str, int]:
    """Put all damaged records of a queue aside, and rebuild its indexes if they differ; how much there was of each."""
    # The indexes first: a record cannot be changed if its index says something else of it.
    pages = check_pages(transaction.step(*place), repair=True)
    total = _mend_values(transaction, place)
    for found in list(walk(transaction.step(*place))):
        for one in found:
            _put_aside(transaction, place, one)
        total += len(found)
    if total:
        _recount(transaction, place)
    counts = {"damaged_jobs": total, "damaged_pages": pages}
    return {kind: count for kind, count in counts.items() if count}


def _mend(transaction: Transaction, place: Place, ids: Sequence[str]) -> int | None:
    """Mend the queue of the call or, if nothing is wrong there, one that the call had something to say to; how many
    records were put aside, ``None`` if nothing was wrong."""
    for one in (place, *(other for other in transaction.places() if other != place)):
        mended = _mend_queue(transaction, one, ids if one == place else ())
        if mended is not None:
            return mended
    return None


def _mend_queue(transaction: Transaction, place: Place, ids: Sequence[str]) -> int | None:
    values = _mend_values(transaction, place)
    found = _find(transaction, place, ids)
    for one in found:
        _put_aside(transaction, place, one)
    wrong = _recount(transaction, place)
    return len(found) if found or values or wrong else None


def _find(transaction: Transaction, place: Place, ids: Sequence[str]) -> list[Found]:
    step = transaction.step(*place)
    found = find_among(step, ids) if ids else []
    if found:
        return found
    allowed = AT_MOST - recent(step)
    found = find_any(step, limit=max(allowed, 1))
    if found and allowed <= 0:
        raise _too_many(place, found[0])
    return found


def _put_aside(transaction: Transaction, place: Place, found: Found) -> None:
    logger.warning(
        "queue %s: the record of job %r cannot be read and was put aside as failed (Damaged): %s",
        place[1],
        found.record.id.encode("utf-8", "backslashreplace").decode(),
        found.why,
    )
    try:
        _quarantine(transaction, place, found, alone=False)
    except Exception as error:
        if not is_damage(error):
            raise
        # A job that it is tied to is damaged as well. That one frees itself when its turn comes.
        transaction.roll_back_call()
        _quarantine(transaction, place, found, alone=True)


def _quarantine(transaction: Transaction, place: Place, found: Found, *, alone: bool) -> None:
    step = transaction.step(*place)
    quarantine(step, found, alone=alone)
    _accept(transaction, step)


def _accept(transaction: Transaction, step: Step) -> None:
    """Take over what was mended, so that it stays even if the call fails after all."""
    if step.outbox:
        deliver(transaction, step)
    transaction.accept(step)
    transaction.keep_call()


def _mend_values(transaction: Transaction, place: Place) -> int:
    step = transaction.step(*place)
    found = {kind: count for kind, count in check_values(step, repair=True).items() if count}
    for kind, count in found.items():
        logger.warning("queue %s: mended %s: %d", place[1], kind, count)
    _accept(transaction, step)
    return sum(found.values())


def _recount(transaction: Transaction, place: Place) -> int:
    """Make the counts agree with the records; how many did not. Damaged members of groups have their turn later.

    While there are records of unknown states, the counts by state are left alone: they tell that jobs are missing.
    """
    step = transaction.step(*place)
    wrong = check_groups(step, repair=True)
    if not has_unknown_states(step):
        wrong += check_counts(step, repair=True)
    _accept(transaction, step)
    return wrong


def _too_many(place: Place, found: Found) -> StorageDamaged:
    return StorageDamaged(
        f"queue {place[1]!r}: {AT_MOST} records that cannot be read were put aside within a minute, and there are more "
        f"(job {found.record.id!r}: {found.why}). The rest stay where they are, because damage to many records "
        "has a common cause: find it, then run `penstock doctor --repair`, which puts all of them aside"
    )
