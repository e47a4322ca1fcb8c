"""The decorators ``@app.task(...)`` and ``@app.dead_letter(...)``, and tasks that take batches.

``@app.task(batch=50, batch_wait="200ms")`` on ``async def embed(texts: list[str]) -> list[Vector]``: each job has one
item, as in ``embed.enqueue("one text")``, and the function gets a list. Each job has its own id, retries and result.
With ``rows: pyarrow.Table`` (or ``RecordBatch``) the items are rows, enqueued as dicts, and the function gets a table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from inspect import Parameter
from types import MappingProxyType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    ParamSpec,
    TypeVar,
    Union,
    Unpack,
    cast,
    get_args,
    get_origin,
    overload,
)

import msgspec
from msgspec.structs import replace

from penstock.client.options import PLACEMENT, RULES, TASK, BatchOptions, TaskOptions, refuse_unknown
from penstock.client.parsers import whole_number
from penstock.client.signature import Signature, is_context, resolved
from penstock.core.flow import DeadLetter, encode_options
from penstock.core.names import check_queue
from penstock.core.text import get_logger, shown
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidOption

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.task import FunctionTask, Task
    from penstock.worker.context import JobContext
    from penstock.worker.worker import Worker


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class _Decorator:
    """A decorator that makes a function a task. ``add`` registers it: ``App.add_task`` or ``App.add_handler``."""

    def __init__(self, add: Callable[..., Any], given: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._add = add
        self._given = given

    def _make(self, func: Callable[..., Any]) -> Any:
        options = dict(self._given)
        return self._add(func, options.pop("name", None), options.pop("queue", "default"), options)


class Other:
    """A marker for type checkers: a parameter that accepts it accepts anything, so it is not for the context."""


class TaskDecorator(_Decorator):
    """Makes a function a task: ``@app.task`` or ``@app.task(queue="mail", attempts=5)``. It takes a job's arguments.

    The default name is that of the function. A first parameter for the ``JobContext`` is not an argument of the job.
    If the first parameter accepts anything, type checkers cannot tell it from the context: they know the result type,
    but do not check arguments. With ``batch=50`` the function takes a list: see ``BatchOptions``.

    Raises:
        InvalidOption: an unknown option, an invalid value, or a name that another task has.
    """

    @overload
    def __call__(
        self, func: Callable[Concatenate[Other, ...], Coroutine[Any, Any, R]], /
    ) -> FunctionTask[..., R, ..., Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[JobContext, P], Coroutine[Any, Any, R]], /
    ) -> FunctionTask[P, R, Concatenate[JobContext, P], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # a coroutine is also an R; the first overload wins
        self, func: Callable[P, Coroutine[Any, Any, R]], /
    ) -> FunctionTask[P, R, P, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, func: Callable[Concatenate[Other, ...], R], /) -> FunctionTask[..., R, ..., R]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[JobContext, P], R], /
    ) -> FunctionTask[P, R, Concatenate[JobContext, P], R]: ...
    @overload
    def __call__(self, func: Callable[P, R], /) -> FunctionTask[P, R, P, R]: ...
    @overload
    def __call__(
        self,
        func: None = None,
        /,
        *,
        name: str | None = None,
        queue: str = "default",
        **options: Unpack[BatchOptions],
    ) -> BatchDecorator: ...
    @overload
    def __call__(
        self,
        func: None = None,
        /,
        *,
        name: str | None = None,
        queue: str = "default",
        **options: Unpack[TaskOptions],
    ) -> TaskDecorator: ...
    def __call__(
        self,
        func: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        queue: str = "default",
        **options: Any,
    ) -> Any:
        if func is not None and not options and (name, queue) == (None, "default"):
            return self._make(func)
        refuse_unknown(options, TASK | {"name", "queue"}, where="a task")
        kind = BatchDecorator if "batch" in options else TaskDecorator
        decorator = kind(self._add, {"name": name, "queue": check_queue(queue), **options})
        return decorator if func is None else decorator._make(func)


class HandlerDecorator(_Decorator):
    """The decorator for a function that takes the payload of one job, and optionally its context."""

    @overload
    def __call__(
        self, func: Callable[[JobContext, T], Coroutine[Any, Any, R]]
    ) -> FunctionTask[[T], R, [JobContext, T], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, func: Callable[[T], Coroutine[Any, Any, R]]
    ) -> FunctionTask[[T], R, [T], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, func: Callable[[JobContext, T], R]) -> FunctionTask[[T], R, [JobContext, T], R]: ...
    @overload
    def __call__(self, func: Callable[[T], R]) -> FunctionTask[[T], R, [T], R]: ...
    def __call__(self, func: Callable[..., Any]) -> Any:
        return self._make(func)


class BatchDecorator(_Decorator):
    """The decorator for a function that takes a list. Each job has one item and one result."""

    @overload
    def __call__(
        self, func: Callable[[list[T]], Coroutine[Any, Any, Sequence[R]]]
    ) -> FunctionTask[[T], R, [list[T]], Coroutine[Any, Any, Sequence[R]]]: ...
    @overload
    def __call__(
        self, func: Callable[[list[T]], Sequence[R]]
    ) -> FunctionTask[[T], R, [list[T]], Sequence[R]]: ...
    @overload
    def __call__(self, func: Callable[[list[T]], R]) -> FunctionTask[[T], Any, [list[T]], R]: ...
    @overload
    def __call__(self, func: Callable[P, R]) -> FunctionTask[..., Any, P, R]: ...
    def __call__(self, func: Callable[..., Any]) -> Any:
        return self._make(func)


# ``@app.dead_letter``

logger = get_logger("penstock.worker")
_letter_fields: Final = msgspec.structs.fields(DeadLetter)
# The store enqueues dead letters, in JSON: it has no rules, and places all of them alike.
_NOT_FOR_LETTERS: Final = PLACEMENT | {*RULES, "serde", "takes_context", "batch", "batch_wait"}


def handle_dead_letters(
    app: App, queue: str, func: Callable[[DeadLetter], Any], *, into: str, options: Mapping[str, Any]
) -> Task[..., Any]:
    """Make ``func`` the task for the dead letters of ``queue``, which go to the queue ``into``.

    Workers of the app configure the queue when they start.
    """
    for name in sorted(_NOT_FOR_LETTERS & options.keys()):
        raise InvalidOption(f"{name}={shown(options[name])} does not apply to dead letters. Leave it out.")
    as_json = {"result_serde": app.result_serde, **options, "serde": "json"}
    task = app.add_task(_taking_fields(func), f"{queue}.dead_letter", into, as_json)

    async def set_up(worker: Worker) -> None:
        consumed = worker.options.queues
        if queue in consumed and into not in consumed:
            logger.info(
                "This worker consumes queue %s, but not %s, which has its dead letters. Add -q %s, or start "
                "another worker for it",
                *(queue, into, into),
            )
        storage = await app.connect()
        current = await storage.settings(queue)
        settings = replace(
            current,
            dead_letter=into,
            dead_letter_task=task.name,
            dead_letter_options=encode_options(task.defaults),
        )
        if settings != current:
            await storage.configure(queue, settings)

    app.on_start(set_up)
    return task


def _taking_fields(func: Callable[[DeadLetter], Any]) -> Callable[..., Any]:
    """Return a function with the fields of a ``DeadLetter`` as parameters: payloads are objects by parameter name."""

    async def handle(**fields: Any) -> Any:
        return await func(DeadLetter(**fields))

    def handle_in_thread(**fields: Any) -> Any:
        return func(DeadLetter(**fields))

    handler: Any = handle if inspect.iscoroutinefunction(func) else handle_in_thread
    handler.__name__ = handler.__qualname__ = getattr(func, "__name__", "dead_letter")
    handler.__signature__ = inspect.Signature(
        [Parameter(field.name, Parameter.KEYWORD_ONLY, annotation=field.type) for field in _letter_fields]
    )
    return cast(Callable[..., Any], handler)


# Batches


_DEFAULT_WAIT: Final = "100ms"
_MOST: Final = 10_000
_TABLES: Final = ("Table", "RecordBatch")
_LISTS: Final = (list, Sequence, Collection, Iterable)


class Batching(msgspec.Struct, frozen=True):
    """Calls of up to ``size`` jobs, which start at most ``wait_ms`` after the first job.

    ``contexts`` names the parameter that gets a ``JobContext`` for each item, if any. ``table`` is the Arrow type of
    the items: ``Table``, ``RecordBatch``, or empty.
    """

    size: int
    wait_ms: int
    contexts: str = ""
    table: str = ""


def parse_batching(batch: int | None, batch_wait: Duration | None, *, where: str) -> Batching | None:
    """Return the batching for these options, or ``None`` without ``batch``. Raise ``InvalidOption``."""
    if batch is None:
        if batch_wait is not None:
            raise InvalidOption(f"batch_wait of {where} needs batch=..., too.")
        return None
    wait_ms = milliseconds(_DEFAULT_WAIT if batch_wait is None else batch_wait, what="batch_wait")
    return Batching(whole_number("batch", batch, least=1, most=_MOST), wait_ms)


def batch_signature(
    function: Callable[..., Any],
    batching: Batching,
    *,
    runner: str,
    takes_context: bool,
    kind: type[Signature] = Signature,
) -> tuple[Signature, Batching]:
    """Return the signature of one job of a batch function: one parameter, with the type of an item.

    The function takes a list of items and, optionally, a list of ``JobContext``s in the same order.

    Raises:
        InvalidOption: the function has other parameters, or runs in a process or sandbox.
        SerializationError: payloads cannot be decoded to the type of the items.
    """
    signature, hints = resolved(function)
    name = getattr(function, "__qualname__", repr(function))
    if runner in ("process", "sandbox"):
        raise InvalidOption(
            f"{name} cannot take batches in a {runner}: its jobs would share it, and none of them could be stopped "
            "alone. Use a coroutine function, or runner='thread'."
        )
    if takes_context:
        raise InvalidOption(
            f"takes_context does not suit {name}, which takes batches: there is a context for each job. "
            "Annotate a second parameter with list[JobContext]."
        )
    contexts = [key for key, hint in hints.items() if _is_list_of_contexts(hint)]
    items = [p for p in signature.parameters.values() if p.name not in contexts]
    if (
        len(items) != 1
        or len(contexts) > 1
        or items[0].kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    ):
        raise InvalidOption(
            f"{name} cannot take batches: it needs one parameter for the list of items, and may have one more, "
            "annotated with list[JobContext]."
        )
    item = Parameter(
        items[0].name,
        Parameter.POSITIONAL_OR_KEYWORD,
        annotation=_item_type(name, items[0], hints[items[0].name]),
    )
    one = _OneJob(function, inspect.Signature([item], return_annotation=_result_type(hints["return"])))
    return kind.of(one), msgspec.structs.replace(
        batching, contexts=contexts[0] if contexts else "", table=_table(hints[items[0].name])
    )


class _OneJob:
    """A stand-in for a batch function, with the signature of one job."""

    def __init__(self, function: Callable[..., Any], signature: inspect.Signature) -> None:
        self.__signature__ = signature
        self.__wrapped__ = function
        self.__qualname__ = getattr(function, "__qualname__", repr(function))

    def __call__(self, item: Any) -> Any:
        raise NotImplementedError


def _item_type(name: str, parameter: Parameter, hint: Any) -> Any:
    if hint is Any or hint in _LISTS:
        return Any
    if _table(hint):
        return dict[str, Any]
    if get_origin(hint) in _LISTS:
        return get_args(hint)[0]
    raise InvalidOption(
        f"{name} cannot take batches: its parameter {parameter.name!r} is annotated with {hint!r}, and gets a list. "
        "Write list[...] of the item of one job, or pyarrow.Table if it is a row."
    )


def _table(hint: Any) -> str:
    """Return the name of an Arrow type, or an empty string, without importing Arrow."""
    name = getattr(hint, "__name__", "")
    return name if name in _TABLES and getattr(hint, "__module__", "").split(".")[0] == "pyarrow" else ""


def _result_type(hint: Any) -> Any:
    """Return the type of one job's result: an item of the list or a value of the mapping, without exceptions."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in _LISTS:
        return _without_exceptions(args[0])
    if origin in (dict, Mapping):
        return _without_exceptions(args[1])
    return Any


def _without_exceptions(hint: Any) -> Any:
    if get_origin(hint) not in (Union, UnionType):
        return hint
    rest = tuple(
        arm for arm in get_args(hint) if not (isinstance(arm, type) and issubclass(arm, BaseException))
    )
    return Union[rest] if rest else Any  # noqa: UP007 (the arms are values here)


def _is_list_of_contexts(hint: Any) -> bool:
    return get_origin(hint) in _LISTS and is_context(get_args(hint)[0])
