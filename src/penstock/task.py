"""Tasks: functions whose calls can be put into a queue."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, ParamSpec, TypeAlias, TypeVar, Unpack

import msgspec
from msgspec.structs import replace

from penstock.batching import Batching
from penstock.bulk import enqueue_many
from penstock.core.display import shown
from penstock.core.duration import Duration
from penstock.core.ids import uuid7
from penstock.core.job import NewJob, Options
from penstock.core.names import check_queue
from penstock.core.sandbox import SandboxLimits, sandbox_limits
from penstock.errors import InvalidInput, InvalidOption
from penstock.handle import JobHandle, call
from penstock.options import PLACEMENT, TREATMENT, JobOptions, placed, refuse_unknown
from penstock.optionvalues import listed
from penstock.serde import Raw
from penstock.signature import Signature
from penstock.source import Source, too_large

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.serde import Serde
    from penstock.sync import SyncDispatch, SyncTask

__all__ = ["Dispatch", "JobSpec", "Runner", "Task", "resolve_limits", "resolve_runner"]

P = ParamSpec("P")
R = TypeVar("R")

Runner: TypeAlias = Literal["async", "thread", "process", "sandbox"]

_DISPATCH: Final = TREATMENT | PLACEMENT | {"queue"}


class JobSpec:
    """One job that is not in a queue yet: its arguments are checked and encoded, and it has its id.

    Made by ``task.job(...)`` for ``enqueue_many`` and for flows. To put the same one in twice is to put in a
    duplicate. One whose first argument is missing is for flows alone: a result can take its place.
    """

    __slots__ = ("_build", "_error", "_job", "id", "queue", "source", "takes_result")

    def __init__(
        self, source: Source, build: Callable[[bool], NewJob], *, takes_result: bool = False
    ) -> None:
        self.queue = source.queue
        self.source = source
        self.takes_result = takes_result
        """Whether a result can be passed to it."""
        self._build = build
        self._job: NewJob | None = None
        self._error: InvalidInput | None = None
        try:
            self._job = job = build(False)
        except InvalidInput as error:
            if not takes_result:
                raise
            job, self._error = self._without_first(error), error
        self.id = job.id

    def __repr__(self) -> str:
        return f"<JobSpec {self.queue}/{self.id}>"

    @property
    def job(self) -> NewJob:
        """Raises ``InvalidInput`` if its first argument is missing."""
        if self._job is None:
            assert self._error is not None
            raise self._error
        return self._job

    def passing(self) -> NewJob:
        """The job without its first argument, for a result to be that; the arguments given come after it."""
        return replace(self._build(True), id=self.id)

    def _without_first(self, error: InvalidInput) -> NewJob:
        try:
            return self._build(True)
        except InvalidInput:
            raise error from None


class Dispatch(Generic[P, R]):
    """A task with options for the jobs it is about to make: ``send.options(id="x", priority=-1).enqueue(...)``.

    Its methods take the function's own arguments and nothing else, so they are typed as the function is, and a
    parameter may be called what an option is called.
    """

    __slots__ = ("_fields", "_max_payload", "_options", "_source", "task")

    def __init__(self, task: Task[P, R], source: Source, options: Options, fields: Mapping[str, Any]) -> None:
        self.task = task
        self._source = source
        self._options = options
        self._fields = fields
        self._max_payload = source.app.max_payload

    def options(self, *, queue: str | None = None, **options: Unpack[JobOptions]) -> Dispatch[P, R]:
        """A copy with these options set as well."""
        refuse_unknown(options, _DISPATCH, where=f"task {shown(self.task.name)}")
        return Dispatch(
            self.task,
            self._source if queue is None else self._source.on(check_queue(queue)),
            self.task.app.treatment(self._options, options),
            placed(self._fields, options),
        )

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Put one call in. See ``Task.enqueue``."""
        return await self._enqueue(self._build(args, kwargs))

    async def call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Put one call in and wait for its result, for as long as it takes. See ``Task.call``."""
        return await self._call(self._build(args, kwargs), None)

    async def enqueue_many(
        self, jobs: Iterable[tuple[Any, ...] | Mapping[str, Any] | JobSpec]
    ) -> list[JobHandle[R]]:
        """Put many calls in, all with these options. See ``Task.enqueue_many``."""
        return await enqueue_many(self._source, _new_jobs(jobs, self._build, self._source))

    def job(self, *args: Any, **kwargs: Any) -> JobSpec:
        """One call, for ``enqueue_many`` and flows. The first argument may be missing if a result is to be it."""
        return self._spec(lambda first: self._build((*first, *args), kwargs))

    def _spec(self, build: Callable[[tuple[Any, ...]], NewJob]) -> JobSpec:
        return JobSpec(
            self._source,
            lambda passing: build((msgspec.UNSET,) if passing else ()),
            takes_result=self.task.signature.takes_first and not isinstance(self.task.serde, Raw),
        )

    @property
    def sync(self) -> SyncDispatch[P, R]:
        """The same for synchronous code."""
        from penstock.sync import SyncDispatch

        return SyncDispatch(self)

    async def _enqueue(self, job: NewJob) -> JobHandle[R]:
        source = self._source
        session = await source.app.session()
        answer = await session.enqueue(source.queue, job)
        return JobHandle(source, answer.id, answer)

    async def _call(self, job: NewJob, timeout: Duration | None) -> R:
        result: R = await call(self._source, job, timeout)
        return result

    def _build(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], fields: Mapping[str, Any] | None = None
    ) -> NewJob:
        task = self.task
        payload = task.signature.encode(args, kwargs, serde=task.serde)
        if len(payload) > self._max_payload:
            raise too_large(f"payload of task {shown(task.name)}", payload, self._max_payload)
        if fields is None:
            fields = self._fields
        if not fields:
            return NewJob(uuid7(), payload, self._options)
        if "id" in fields:
            return NewJob(payload=payload, options=self._options, **fields)
        return NewJob(uuid7(), payload, self._options, **fields)


class Task(Generic[P, R]):
    """A function that can be called here, as ever, or put into a queue and run by a worker.

    Made by ``@app.task``. ``func`` is the function, ``defaults`` how its jobs are treated; the worker reads these,
    ``queue``, ``signature``, ``serde``, ``result_serde``, ``runner``, ``limits`` and ``batching``.
    """

    def __init__(
        self,
        app: App,
        func: Callable[P, Any],
        *,
        name: str,
        queue: str,
        runner: Runner,
        limits: SandboxLimits,
        serde: Serde,
        result_serde: Serde,
        signature: Signature,
        defaults: Options,
        fields: Mapping[str, Any],
        batching: Batching | None = None,
    ) -> None:
        update_wrapper(self, func)
        self.app = app
        self.func = func
        self.name = name
        self.queue = queue
        self.runner = runner
        self.limits = limits
        self.serde = serde
        self.result_serde = result_serde
        self.signature = signature
        self.defaults = defaults
        self.batching = batching
        self.source = Source(
            app, queue, serde=serde, result_serde=result_serde, result_type=signature.result_type
        )
        self._plain: Dispatch[P, R] = Dispatch(self, self.source, defaults, fields)
        self._option_names = PLACEMENT.difference(signature.parameters)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run the function here and now; no queue is involved."""
        return self.func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Task {self.name} on {self.queue}>"

    def __reduce__(self) -> str:
        # Found again by import, like the function it stands for.
        return getattr(self.func, "__qualname__", self.name)

    def options(self, *, queue: str | None = None, **options: Unpack[JobOptions]) -> Dispatch[P, R]:
        """The task with options for the next jobs: all of ``enqueue``'s, those of ``@app.task``, and ``queue``."""
        return self._plain.options(queue=queue, **options)

    async def enqueue(self, *args: Any, **kwargs: Any) -> JobHandle[R]:
        """Put one call of the function in. Concurrent calls travel together.

        The function's arguments and the job's options (``id, delay, run_at, priority, lifo, ttl, on_conflict,
        dedup, unchecked``, see ``Placement``) share the call. A name that is a parameter of the function goes to the
        function: give that option by ``task.options(...)``.

        Raises:
            InvalidInput: arguments that do not fit the function, an option nobody knows, a name that is not
                allowed, a payload too large or not serialisable. Nothing was written.
            StorageError: the store did not take it.
        """
        return await self._plain._enqueue(self._build(args, kwargs))

    async def call(self, *args: Any, **kwargs: Any) -> R:
        """Put one call in and wait for its result: ``enqueue`` and ``result`` in one.

        Takes what ``enqueue`` takes, and ``timeout``: how long to wait. A duplicate waits for the job that is
        there; a cached result returns at once. Raises what both of them raise.
        """
        timeout = None if "timeout" in self.signature.parameters else kwargs.pop("timeout", None)
        return await self._plain._call(self._build(args, kwargs), timeout)

    def job(self, *args: Any, **kwargs: Any) -> JobSpec:
        """One job for ``enqueue_many`` and flows; takes what ``enqueue`` takes. The first argument may be missing if
        a result is to be it."""
        return self._plain._spec(lambda first: self._build((*first, *args), dict(kwargs)))

    async def enqueue_many(
        self, jobs: Iterable[tuple[Any, ...] | Mapping[str, Any] | JobSpec]
    ) -> list[JobHandle[R]]:
        """Put many calls in: tuples of positional arguments, dicts of what ``enqueue`` takes by name, or ``job()``s.

        All of them are checked before the first is written. Then they go in chunks, each of which is written as
        a whole or not at all. Raises what ``enqueue`` raises; a note says how far it got.
        """
        return await enqueue_many(self.source, _new_jobs(jobs, self._build, self.source))

    @property
    def sync(self) -> SyncTask[P, R]:
        """The same for synchronous code."""
        from penstock.sync import SyncTask

        return SyncTask(self)

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NewJob:
        plain = self._plain
        try:
            if not kwargs or self._option_names.isdisjoint(kwargs):
                return plain._build(args, kwargs)
            given = {name: kwargs.pop(name) for name in self._option_names.intersection(kwargs)}
            return plain._build(args, kwargs, placed(plain._fields, given))
        except InvalidInput:
            self._refuse_unknown(kwargs)
            raise

    def _refuse_unknown(self, kwargs: Mapping[str, Any]) -> None:
        """After a refusal: an argument that is no parameter was most likely meant as an option."""
        if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(self.func).parameters.values()):
            return
        for name in kwargs:
            if name in TREATMENT | {"queue"} and name not in self.signature.parameters:
                raise InvalidOption(
                    f"{shown(name)} is an option of the task, not of one job. "
                    f"Use {self.name}.options({name}=...).enqueue(...)."
                )
        refuse_unknown(
            kwargs, self._option_names.union(self.signature.parameters), where=f"task {shown(self.name)}"
        )


def _new_jobs(
    items: Iterable[tuple[Any, ...] | Mapping[str, Any] | JobSpec],
    build: Callable[[tuple[Any, ...], dict[str, Any]], NewJob],
    source: Source,
) -> list[NewJob]:
    jobs: list[NewJob] = []
    try:
        for item in listed("jobs", items, of="tuples, dicts or job()s"):
            if isinstance(item, tuple):
                jobs.append(build(item, {}))
            elif isinstance(item, Mapping):
                jobs.append(build((), dict(item)))
            elif getattr(item, "queue", None) == source.queue:
                jobs.append(item.job)
            else:
                raise InvalidInput(
                    f"{shown(item)} is no job for enqueue_many. Give a tuple of arguments, a dict of arguments by "
                    f"name, or a job() for queue {shown(source.queue)}."
                )
    except InvalidInput as error:
        error.add_note(f"item {len(jobs)} of the list; nothing was written")
        raise
    return jobs


def resolve_runner(name: str, func: Callable[..., Any], asked: str) -> Runner:
    """Where the function is run. Raises ``InvalidOption`` if it cannot be run there."""
    is_async = inspect.iscoroutinefunction(func)
    match asked:
        case "auto":
            return "async" if is_async else "thread"
        case "async" if is_async:
            return "async"
        case "thread" if not is_async:
            return "thread"
        case "process" if not is_async:
            return "process"
        case "sandbox":
            return "sandbox"
        case "async" | "thread" | "process":
            kind = "a coroutine function" if is_async else "not a coroutine function"
            raise InvalidOption(
                f"runner={shown(asked)} does not suit task {shown(name)}: it is {kind}. Leave it at 'auto'."
            )
        case _:
            raise InvalidOption(
                f"runner={shown(asked)} is not known. Give 'auto', 'async', 'thread', 'process' or 'sandbox'."
            )


def resolve_limits(name: str, runner: Runner, given: Mapping[str, Any]) -> SandboxLimits:
    """What a run may use. Raises ``InvalidOption`` if it cannot be limited where it runs."""
    for option in ("memory", "cpu_time"):
        if given.get(option) is not None and runner != "sandbox":
            raise InvalidOption(
                f"{option}={shown(given[option])} cannot be kept for task {shown(name)}, whose runs share a process. "
                "Add runner='sandbox'."
            )
    return sandbox_limits(memory=given.get("memory"), cpu_time=given.get("cpu_time"))
