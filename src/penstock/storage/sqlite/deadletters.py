"""The ``dead_letter`` queue: a job that has failed for good is put into it as well."""

from __future__ import annotations

from penstock.core.deadletter import dead_letter_job
from penstock.storage.sqlite.messages import Put
from penstock.storage.sqlite.records import Record, unpack_failure
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.step import Step

__all__ = ["bury"]

_UNSET = '"dead_letter":null'
_sql = statements("records")


def bury(step: Step, record: Record) -> None:
    """The job has failed: send its letter, if the queue has where to."""
    if step.queue.settings_json == "{}" or _UNSET in step.queue.settings_json:
        return
    settings = step.queue.settings
    if settings.dead_letter is None:
        return
    payload = record.payload
    if payload is None:
        payload = step.sql.execute(_sql["payload"], (record.key,)).fetchone()[0]
    letter = dead_letter_job(
        queue=step.queue.name,
        id=record.id,
        incarnation=record.incarnation,
        task=record.options.task,
        payload=payload,
        failure=unpack_failure(record.failure),
        failures=record.failures,
        failed_at_ms=step.now_ms,
        handled_by=settings.dead_letter_options or settings.dead_letter_task,
    )
    step.outbox.append((settings.dead_letter, Put(letter)))
