"""The columns of Spark's tables agree with the fields of jobs and events."""

from __future__ import annotations

from penstock.core.event import Event
from penstock.core.job import JOB_FIELDS
from penstock.core.lifecycle import EventType
from penstock.spark.history.tables import COUNTED
from penstock.spark.schemas import schema_of
from penstock.storage.metrics import Minute


def test_the_table_of_events_has_every_field_of_an_event() -> None:
    fields = {name.replace("at_ms", "at") for name in Event.__struct_fields__}

    assert set(schema_of("events").fieldNames()) == fields | {"epoch"}


def test_the_table_of_jobs_has_every_field_of_a_job() -> None:
    fields = {field.name for field in JOB_FIELDS if field.in_tables and field.kind != "failure"}

    assert set(schema_of("jobs").fieldNames()) == fields | {"error_type", "error", "traceback"}


def test_the_history_counts_events_that_exist_and_all_that_a_queue_counts() -> None:
    counted = {name for name in Minute.__struct_fields__ if not name.endswith("_ms")}

    assert {name for types in COUNTED.values() for name in types} <= {event.value for event in EventType}
    assert counted <= COUNTED.keys()
