"""The store of a read or a write is the same for processes in other folders: executors are, and Spark's own are."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from penstock import InvalidOption
from penstock.spark.schemas import schema_of
from penstock.spark.source import PenstockSource
from tests.spark.stores import ask, fill
from tests.spark.versions import needs_streams

QUEUE = "numbers"
RELATIVE = "sqlite:///there/numbers.db"
NUMBERS = StructType([StructField("n", LongType())])


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """We are in a folder in which the relative URL names a store with three waiting jobs; this is its absolute URL."""
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    fill(RELATIVE, QUEUE, waiting=3)
    return f"sqlite:///{tmp_path}/there/numbers.db"


def elsewhere(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the driver made, as an executor gets it, in a folder of its own."""
    sent = pickle.dumps(made)
    (tmp_path / "executor").mkdir()
    monkeypatch.chdir(tmp_path / "executor")
    return pickle.loads(sent)


@pytest.mark.parametrize("kind", ["jobs", "events"])
def test_a_read_by_a_relative_path_reads_the_same_file_in_another_folder(
    there: str, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = PenstockSource({"url": RELATIVE, "queue": QUEUE, "kind": kind}).reader(schema_of(kind))
    (part,) = reader.partitions()
    received = elsewhere(reader, tmp_path, monkeypatch)
    (batch,) = received.read(part)
    assert sorted(batch.column("id").to_pylist()) == ["w0", "w1", "w2"]


@needs_streams
def test_a_stream_by_a_relative_path_reads_the_same_file_in_another_folder(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = PenstockSource({"url": RELATIVE, "queue": QUEUE, "kind": "events"}).streamReader(
        schema_of("events")
    )
    stream = elsewhere(made, tmp_path, monkeypatch)
    (part,) = stream.partitions(stream.initialOffset(), stream.reportLatestOffset())
    (batch,) = stream.read(part)
    assert batch.column("seq").to_pylist() == [1, 2, 3]


def test_a_write_by_a_relative_path_writes_to_the_same_file_from_another_folder(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"url": RELATIVE, "queue": QUEUE, "keyColumns": "n"}
    writer = elsewhere(PenstockSource(options).writer(NUMBERS, False), tmp_path, monkeypatch)
    writer.commit([writer.write(iter([pa.RecordBatch.from_pydict({"n": [7, 8]})]))])
    assert ask(there, lambda storage: storage.counts(QUEUE)).waiting == 5
    assert not list((tmp_path / "executor").rglob("*.db"))


@needs_streams
def test_a_store_in_the_memory_of_a_process_is_refused() -> None:
    source = PenstockSource({"url": "memory://", "queue": QUEUE, "keyColumns": "n"})
    with pytest.raises(InvalidOption, match="in the memory of this process"):
        source.writer(NUMBERS, False)
    read = PenstockSource({"url": "memory://", "queue": QUEUE})
    with pytest.raises(InvalidOption, match="in the memory of this process"):
        read.reader(schema_of("jobs"))
    with pytest.raises(InvalidOption, match="in the memory of this process"):
        read.streamReader(schema_of("events"))
