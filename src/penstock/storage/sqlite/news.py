"""News of jobs' ends: ``watch`` asks for them, ``listen`` reads them.

News stay in their table until a sweep finds them a minute old; a listener goes on from the last it has seen.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from penstock.core.lifecycle import State
from penstock.errors import JobNotFound
from penstock.storage.sqlite.records import CANCELLED, COMPLETED, FAILED, Record, shown_failure
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.step import Step
from penstock.storage.values import Finished

__all__ = ["news_after", "watch"]

_sql = statements("news")
_news = msgspec.msgpack.Decoder(Finished)


def watch(step: Step, ids: Sequence[str], *, listener: str) -> list[Finished | None]:
    """Register for the ends of these jobs; those that have ended are answered at once."""
    known = step.find(ids)
    for id_ in ids:
        record = known.get(id_)
        if record is None or step.is_over(record):
            raise JobNotFound.in_queue(step.queue.name, id_)
    answers = [_ended(known[id_]) for id_ in ids]
    for id_, answer in zip(ids, answers, strict=True):
        if answer is None:
            step.listen(known[id_], listener)
    step.save(())
    return answers


def _ended(record: Record) -> Finished | None:
    if record.state not in (COMPLETED, FAILED, CANCELLED):
        return None
    failure = shown_failure(record, record.state)
    return Finished(record.id, record.incarnation, State(record.state), record.result, failure)


def news_after(
    sql: sqlite3.Connection, namespace: str, queue: str, listener: str, *, key: int
) -> tuple[int, list[Finished]]:
    """The listener's news after that key, and the key of the last."""
    rows = sql.execute(_sql["after"], (namespace, queue, listener, key)).fetchall()
    told = (_read(body) for _, body in rows)
    return (rows[-1][0] if rows else key), [news for news in told if news is not None]


def _read(body: bytes) -> Finished | None:
    """The news of these bytes; ``None`` if they are damaged. Who waits looks at the job itself from time to time."""
    try:
        return _news.decode(body)
    except msgspec.DecodeError:
        return None
