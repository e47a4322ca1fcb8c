"""From the options of a write to where its jobs go."""

from __future__ import annotations

from typing import Any

import msgspec
from pyspark.sql.types import StructType

from penstock.core.ids import uuid7
from penstock.core.job import DEFAULT_OPTIONS, Options
from penstock.errors import InvalidOption
from penstock.importing import find
from penstock.spark.columntypes import check_columns
from penstock.spark.options import WriteOptions, namespace_of
from penstock.spark.rows import Layout
from penstock.spark.sink import Target
from penstock.spark.store import Store
from penstock.task import Task

__all__ = ["target_of"]


def target_of(given: WriteOptions, schema: StructType, *, overwrite: bool) -> Target:
    """Raises ``InvalidOption`` for what does not fit the table, or cannot be done; ``StorageError`` for a store that
    does not answer: better here, once, than in every task. Nothing is written."""
    if overwrite:
        raise InvalidOption(
            "mode('overwrite') would empty a queue. Use mode('append'), and queue.obliterate() for that."
        )
    task = find(given.task, Task) if ":" in given.task else None
    write_id = given.write_id or uuid7()
    layout = _layout(given, schema, task, write_id)
    layout.check(schema.fieldNames())
    check_columns(schema, (*layout.payload, *layout.placement.values()), key=layout.key)
    with Store(given.url):
        pass
    return Target(
        url=given.url,
        queue=given.queue or (task.queue if task else "default"),
        layout=layout,
        batch_size=given.batch_size,
        write_id=write_id,
        staged=given.release == "onCommit",
        skip_bad_rows=given.bad_rows == "skip",
    )


def _layout(given: WriteOptions, schema: StructType, task: Task[..., Any] | None, write_id: str) -> Layout:
    placement = {
        option: column
        for option, column in {
            "priority": given.priority_column,
            "delay": given.delay_column,
            "group": given.group_column,
            "cost": given.cost_column,
        }.items()
        if column
    }
    key = _names(given.key_columns)
    payload = _names(given.payload_columns) or tuple(
        name for name in schema.fieldNames() if name not in placement.values() or name in key
    )
    fields: dict[str, Any] = {"write_id": write_id, "run_id": given.run_id}
    if given.release == "onCommit":
        fields["staged"] = True
    return Layout(
        namespace=namespace_of(given.url),
        task=task.name if task else given.task,
        key=key,
        payload=payload,
        placement=placement,
        options=_treatment(given, task),
        fields=fields,
    )


def _treatment(given: WriteOptions, task: Task[..., Any] | None) -> Options:
    return task.defaults if task else msgspec.structs.replace(DEFAULT_OPTIONS, task=given.task)


def _names(columns: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in columns.split(",") if name.strip())
