"""``penstock.spark.retry`` and ``cancel``: verbs on jobs whose ids are in a table. The executors call the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Literal, TypeAlias

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from penstock.core.names import check_queue
from penstock.errors import InvalidInput
from penstock.spark.store import Store, url_for_executors
from penstock.storage.contract import Storage

_Verb: TypeAlias = Literal["retry", "cancel"]

_CHUNK: Final = 1000
_COUNTS: Final = "answer string, count bigint"
_ARROW: Final = pa.schema([("answer", pa.string()), ("count", pa.int64())])


class Retried(msgspec.Struct, frozen=True, kw_only=True):
    """Counts by outcome. ``not_failed`` jobs are open or completed."""

    retried: int = 0
    not_failed: int = 0
    not_found: int = 0


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """Counts by outcome. ``cancelled`` jobs had not started, ``requested`` ones are running and receive the request;
    the others had finished, or do not exist."""

    cancelled: int = 0
    requested: int = 0
    completed: int = 0
    failed: int = 0
    already_cancelled: int = 0
    not_found: int = 0


def retry(df: DataFrame, url: str, queue: str, *, id: str = "id") -> Retried:
    """Retry the failed and cancelled jobs whose ids are in the column ``id``. Each id counts once.

    A repeated call leaves jobs alone that are already waiting. If Spark repeats a task, jobs that its first attempt
    retried count as ``not_failed``.

    Raises:
        InvalidInput: the table has no such column, or an id is null.
        StorageError: the store does not answer.
    """
    return Retried(**_operate(df, url, queue, id, "retry"))


def cancel(df: DataFrame, url: str, queue: str, *, id: str = "id") -> Cancelled:
    """Cancel the jobs whose ids are in the column ``id``; each id counts once. The call can be repeated.

    Raises:
        InvalidInput: the table has no such column, or an id is null.
        StorageError: the store does not answer.
    """
    return Cancelled(**_operate(df, url, queue, id, "cancel"))


def _operate(df: DataFrame, url: str, queue: str, id: str, verb: _Verb) -> dict[str, int]:
    check_queue(queue)
    url = url_for_executors(url)
    if id not in df.columns:
        raise InvalidInput(
            f"the table has no column {id!r}. Its columns are: {', '.join(df.columns)}. Set id='...'."
        )
    with Store(url):
        pass
    ids = df.select(F.col(f"`{id}`").cast("string").alias("id")).distinct()
    if not ids.where("id IS NULL").isEmpty():
        raise InvalidInput(
            f"column {id!r} has nulls, which identify no job. Filter them out: df.where('{id} IS NOT NULL'). No job "
            "was changed."
        )
    counts: Counter[str] = Counter()
    for row in ids.mapInArrow(_operator(url, queue, verb), _COUNTS).collect():
        counts[row["answer"]] += row["count"]
    return dict(counts)


def _operator(
    url: str, queue: str, verb: _Verb
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def operate(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        answers: Counter[str] = Counter()
        with Store(url) as store:
            for batch in batches:
                ids = batch.column("id").to_pylist()
                for start in range(0, len(ids), _CHUNK):
                    answers += store.run(_answers(store.storage, queue, verb, ids[start : start + _CHUNK]))
        rows = {"answer": list(answers), "count": list(answers.values())}
        yield pa.RecordBatch.from_pydict(rows, schema=_ARROW)

    return operate


async def _answers(storage: Storage, queue: str, verb: _Verb, ids: Sequence[str]) -> Counter[str]:
    call: Callable[[str, Sequence[str]], Awaitable[Sequence[str]]]
    call = storage.retry if verb == "retry" else storage.cancel
    return Counter(await call(queue, ids))
