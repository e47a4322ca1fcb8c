"""Tasks: functions whose calls can be enqueued."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import update_wrapper
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    NoReturn,
    ParamSpec,
    TypeVar,
    Unpack,
    cast,
)

import msgspec
from msgspec.structs import replace

from penstock import client
from penstock.client.codec import JobCodec, Raw, resolve_serde, too_large
from penstock.client.definition import signature_of
from penstock.client.execution import resolve_limits, resolve_retries, resolve_runner
from penstock.client.handle import JobHandle, call, enqueue_many
from penstock.client.hints import SAME_OPTION, Hinting
from penstock.client.options import (
    DISPATCH,
    PLACEMENT,
    TIMES,
    DispatchOptions,
    overridden,
    placed,
    refuse_unknown,
)
from penstock.client.parsers import check_wait, listed
from penstock.client.rules import Rules, task_rules
from penstock.core.job import NewJob, Options
from penstock.core.names import check_queue, uuid7
from penstock.core.schedule import When
from penstock.core.text import shown
from penstock.errors import InvalidInput, InvalidOption

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.schedules import SchedulerInfo


P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
C = TypeVar("C")
R_co = TypeVar("R_co", covariant=True)


class JobSpec(Hinting, Generic[R_co]):
    """A job that is not enqueued yet. Its arguments are checked and encoded, and it has an id.

    ``task.job(...)`` makes one for ``enqueue_many`` and for flows. A spec that is enqueued twice is a duplicate
    the second time. ``task.partial(...)`` makes one whose first argument is the result of the job before it in a
    flow; then ``takes_result`` is true.
    """

    __slots__ = ("_job", "dispatch", "given", "id", "queue", "rules", "source", "takes_result")
    hints_for = "job spec"

    def __init__(
        self,
        source: JobCodec,
        job: NewJob,
        dispatch: Dispatch[..., Any] | None = None,
        *,
        takes_result: bool = False,
        given: Mapping[str, Any] = MappingProxyType({}),
        rules: Rules | None = None,
    ) -> None:
        self.id = job.id
        self.queue = source.queue
        self.source = source
        self.dispatch = dispatch
        self.given = given if dispatch is None else dispatch.given
        self.rules = rules if dispatch is None else dispatch.rules
        self.takes_result = takes_result
        self._job = job

    def __repr__(self) -> str:
        return f"<JobSpec {self.queue}/{self.id}>"

    if not TYPE_CHECKING:

        def __or__(self, other: object) -> NoReturn:
            raise TypeError("jobs are not joined with |. Use chain(first.job(...), next.partial()).")

    @property
    def job(self) -> NewJob:
        """The job to enqueue. Raises ``InvalidInput`` if its first argument is missing."""
        if self.takes_result:
            assert self.dispatch is not None
            name = self.dispatch.task.name
            raise InvalidInput(
                f"{name}.partial(...) takes its first argument from the job before it, and there is no such job here. "
                f"Use {name}.job(...) with all arguments."
            )
        return self._job

    def passing(self) -> NewJob:
        """Return the job without its first argument, which a result supplies."""
        return self._job


class Dispatch(Hinting, Generic[P, R]):
    """A task with options for its next jobs: ``send.options(id="x", priority=-1).enqueue(...)``.

    ``enqueue``, ``call``, ``job`` and ``partial`` take only the arguments of the function, so they have the types of
    the function, and a parameter may have the same name as an option.
    """

    __slots__ = ("_fields", "_max_payload", "_options", "_source", "given", "rules", "task")

    def __init__(
        self,
        task: Task[P, R],
        source: JobCodec,
        options: Options,
        fields: Mapping[str, Any],
        given: DispatchOptions,
        *,
        rules: Rules | None,
    ) -> None:
        self.task = task
        self.given = given
        """The options that ``options(...)`` has set."""
        self.rules = rules if rules is not None and rules.computed else None
        """The rules of the task that apply beside these options, and depend on arguments."""
        self._source = source
        self._options = options
        self._fields = fields
        self._max_payload = source.app.max_payload

    def options(self, **options: Unpack[DispatchOptions]) -> Dispatch[P, R]:
        """Return the task with these options for the next jobs, besides those set before; see ``DispatchOptions``."""
        refuse_unknown(options, DISPATCH, where=f"task {shown(self.task.name)}")
        check_wait(options.get("wait"))
        given = overridden(self.given, options)
        queue, task = options.get("queue"), self.task
        return Dispatch(
            task,
            self._source if queue is None else self._source.on(check_queue(queue)),
            task.app.with_policy(task.defaults, given),
            placed(task.fields, given),
            given,
            rules=task.rules_beside(given),
        )

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Enqueue one call of the function. Concurrent calls are sent together.

        Takes exactly the function's arguments. Options of the job go to ``options``:
        ``send.options(id="welcome-ada", delay="5m").enqueue("ada@example.org")``.

        Raises:
            InvalidInput: the arguments do not fit the function, or the payload is too large or cannot be
                serialised. Nothing was written.
            StorageError: the store did not accept the job.
        """
        source = self._source
        job = self._build(args, kwargs, "enqueue")
        session = await source.app.session()
        answer = await session.enqueue(source.queue, job)
        if self.rules is not None:
            self.rules.refuse_duplicate(answer, source.queue)
        return JobHandle(source, answer.id, answer)

    async def call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Enqueue one call and wait for its result: ``enqueue`` and ``result`` in one.

        It waits for 30 s, unless the task, the app or the option ``wait`` say otherwise:
        ``add.options(wait="5s").call(1, 2)``; ``wait=None`` waits without a limit. A duplicate waits for the existing
        job; a cached result returns immediately. Raises what ``enqueue`` and ``JobHandle.result`` raise.
        """
        wait = self.given.get("wait", self.task.wait)
        refuse = None if self.rules is None else self.rules.refuse_duplicate
        result: R = await call(self._source, self._build(args, kwargs, "call"), wait, refuse)
        return result

    async def enqueue_many(self, jobs: Iterable[JobSpec[R]]) -> list[JobHandle[R]]:
        """Enqueue many jobs: ``send.enqueue_many([send.job("ada"), send.options(delay="5m").job("bob")])``.

        Options of a single job win. All jobs are checked before the first is written. Each chunk of them is then
        written as a whole or not at all. Raises what ``enqueue`` raises; a note says how many jobs were written.
        """
        return await enqueue_many(self._source, self._new_jobs(jobs))

    async def schedule(self, name: str, /, *args: P.args, **kwargs: P.kwargs) -> SchedulerInfo:
        """Repeat a call: ``report.options(cron="0 3 * * *", tz="Europe/Berlin").schedule("nightly", "sales")``.

        Takes the name of the scheduler, then exactly the function's arguments. The times are options; see ``When``.
        See ``app.schedule``.
        """
        given = cast(When, {option: value for option, value in self.given.items() if option in TIMES})
        job = JobSpec[R](self._source, self._build(args, kwargs, "schedule"), self)
        return await self._source.app.schedule(name, job, **given)

    def job(self, *args: P.args, **kwargs: P.kwargs) -> JobSpec[R]:
        """Make one job, for ``enqueue_many``, flows and schedules, without enqueueing it."""
        return JobSpec(self._source, self._build(args, kwargs, "job"), self)

    def partial(self: Dispatch[Concatenate[Any, Q], R], *args: Q.args, **kwargs: Q.kwargs) -> JobSpec[R]:
        """Make one job of a flow whose first argument is the result of the job before it.

        Takes the function's other arguments: ``chain(fetch.job(url), resize.partial(width=200))``.
        """
        task = self.task
        if not task.signature.takes_first or isinstance(task.serde, Raw):
            raise InvalidInput(
                f"{task.name} has no first argument that a result can be passed as. Use {task.name}.job(...)."
            )
        job = self._build((msgspec.UNSET, *args), kwargs, "partial")
        return JobSpec(self._source, job, self, takes_result=True)

    @property
    def sync(self) -> client.SyncDispatch[P, R]:
        """Return the same interface for synchronous code."""
        return client.SyncDispatch(self)

    def _build(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], method: str) -> NewJob:
        task = self.task
        try:
            payload = task.signature.encode(args, kwargs, serde=task.serde)
        except InvalidInput as error:
            _explain(error, task, kwargs, method)
            raise
        if self.given and method != "schedule":
            _refuse_times(self.given, task, method)
        if len(payload) > self._max_payload:
            raise too_large(f"payload of task {shown(task.name)}", payload, self._max_payload)
        if self.rules is None and not self._fields:
            return NewJob(uuid7(), payload, self._options)
        return self._place(payload)

    def _place(self, payload: bytes) -> NewJob:
        fields = self._fields
        if self.rules is not None:
            fields = placed(fields, self.rules.options(payload, self.task.serde))
        if "id" not in fields:
            fields = {**fields, "id": uuid7()}
        return NewJob(payload=payload, options=self._options, **fields)

    def _new_jobs(self, specs: Iterable[JobSpec[R]]) -> list[NewJob]:
        if "id" in self.given:
            name = self.task.name
            raise InvalidOption(
                "id belongs to a single job. Give each job its own: "
                f"{name}.enqueue_many([{name}.options(id=...).job(...), ...])."
            )
        jobs: list[NewJob] = []
        merged: dict[Dispatch[..., Any], Dispatch[..., Any]] = {}
        try:
            for spec in listed("jobs", specs, of=f"{self.task.name}.job(...)"):
                jobs.append(self._new_job(spec, merged))
        except InvalidInput as error:
            error.add_note(f"item {len(jobs)} of the list; nothing was written")
            raise
        return jobs

    def _new_job(self, spec: Any, merged: dict[Dispatch[..., Any], Dispatch[..., Any]]) -> NewJob:
        name = self.task.name
        if not isinstance(spec, JobSpec):
            raise InvalidInput(f"enqueue_many takes a list of {name}.job(...), got {shown(spec)} in it.")
        made_by: Dispatch[..., Any] | None = spec.dispatch
        if made_by is None or made_by.task is not self.task:
            other = "no task" if made_by is None else f"task {shown(made_by.task.name)}"
            raise InvalidInput(
                f"{name}.enqueue_many takes a list of {name}.job(...), got {shown(spec)} of {other} in it. "
                "Use group([...]).enqueue() for jobs of several tasks."
            )
        if made_by is not self and self.given:
            if made_by not in merged:
                merged[made_by] = made_by.task.options(**overridden(self.given, made_by.given))
            made_by = merged[made_by]
            spec = JobSpec(made_by._source, replace(made_by._place(spec.job.payload), id=spec.id), made_by)
        if spec.queue != self._source.queue:
            raise InvalidInput(
                f"{shown(spec)} is a job of queue {shown(spec.queue)}, and this call enqueues jobs of queue "
                f"{shown(self._source.queue)}. Use group([...]).enqueue() for jobs of several queues."
            )
        job: NewJob = spec.job
        return job


class Task(Dispatch[P, R]):
    """A function that you can call as usual, or enqueue for a worker to run.

    ``@app.task`` makes it. ``func`` is the function, ``defaults`` are the options of its jobs, unless ``options(...)``
    sets others.
    """

    def __init__(
        self,
        app: App,
        func: Callable[..., Any],
        name: str,
        queue: str,
        given: Mapping[str, Any],
        *,
        takes_payload: bool = False,
    ) -> None:
        """Define a task with the options ``given``. With ``takes_payload`` its jobs have no task, and its parameter is
        the payload: it is a handler.

        Raises:
            InvalidOption: an invalid value, or a function that does not suit its options.
        """
        update_wrapper(self, func)
        self.app = app
        self.func = func
        self.name = name
        self.queue = queue
        self.runner = resolve_runner(name, func, given.get("runner", "auto"))
        self.limits = resolve_limits(name, self.runner, given)
        self.retries = resolve_retries(f"task {shown(name)}", given.get("retry_on"), given.get("give_up_on"))
        self.wait = check_wait(given.get("wait", app.wait))
        self.serde = app.serde if "serde" not in given else resolve_serde(given["serde"])
        result_serde = app.result_serde if "serde" not in given else self.serde
        self.result_serde = resolve_serde(given.get("result_serde", result_serde))
        self.signature, self.batching = signature_of(
            func, name, given, runner=self.runner, takes_payload=takes_payload
        )
        self.declared_rules = None if takes_payload else task_rules(name, given, self.signature)
        self.defaults = app.with_policy(replace(app.defaults, task="" if takes_payload else name), given)
        self.fields = placed(app.fields, _fixed(given, self.declared_rules))
        self.source = JobCodec(
            app,
            queue,
            serde=self.serde,
            result_serde=self.result_serde,
            result_type=self.signature.result_type,
        )
        super().__init__(self, self.source, self.defaults, self.fields, {}, rules=self.rules_beside({}))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function here and now; no queue is involved."""
        return self.func(*args, **kwargs)

    def rules_beside(self, given: Mapping[str, Any]) -> Rules | None:
        """Return the rules that apply beside these options of a job, which win. Internal."""
        rules = self.declared_rules
        if rules is None and given.get("unique"):
            rules = Rules(self.name, {}, self.signature.fields, self.signature)
        return None if rules is None else rules.beside(given)

    def __repr__(self) -> str:
        return f"<Task {self.name} on {self.queue}>"

    def __reduce__(self) -> str:
        # Unpickling imports it by name, like the function.
        return getattr(self.func, "__qualname__", self.name)


class FunctionTask(Task[P, R], Generic[P, R, Q, C]):
    """A task whose function is known to type checkers. ``@app.task`` returns it.

    ``Q`` are the parameters of the function, with its ``JobContext``. ``C`` is what a call returns: a coroutine
    for a coroutine function.
    """

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> C:
        """Run the function here and now; no queue is involved."""
        returned: C = self.func(*args, **kwargs)
        return returned


def _fixed(given: Mapping[str, Any], rules: Rules | None) -> dict[str, Any]:
    """Return the placement options of a task that are the same for all its jobs."""
    ruled = frozenset() if rules is None else rules.given.keys()
    fixed = {key: value for key, value in given.items() if key in PLACEMENT and key not in ruled}
    return fixed if rules is None else {**fixed, **rules.constants}


def _explain(error: InvalidInput, task: Task[..., Any], kwargs: Mapping[str, Any], method: str) -> None:
    """Raise a better error for an argument that is probably an option; add a note on how flows pass a result."""
    name, parameters = task.name, task.signature.parameters
    for key in kwargs:
        if key in parameters or task.signature.takes_any_name:
            continue
        if key == "timeout" and method == "call":
            raise InvalidOption(
                f"{name}.call(...) takes only the arguments of {name}. Use {name}.options(wait=...).call(...) to "
                f"limit how long the call waits, or options(timeout=...) to limit how long a run takes."
            ) from error
        options = DISPATCH.difference(parameters)
        meant = (
            [SAME_OPTION[key]] if key in SAME_OPTION else get_close_matches(key, [*options, *parameters], n=1)
        )
        if key in options or (meant and meant[0] in options):
            option = key if key in options else meant[0]
            if option in TIMES and method != "schedule":
                raise InvalidOption(
                    f"{shown(key)} is not a parameter of {name}. Use {name}.options({option}=...).schedule(name, ...) "
                    "to repeat the job."
                ) from error
            raise InvalidOption(
                f"{shown(key)} is not a parameter of {name}. Options go to options(...): "
                f"{name}.options({option}=...).{method}(...)."
            ) from error
    if method == "job" and "Missing" in str(error):
        error.add_note(f"If a flow is to pass a result as the first argument, use {name}.partial(...).")


def _refuse_times(given: Mapping[str, Any], task: Task[..., Any], method: str) -> None:
    """Raise ``InvalidOption`` if the options have the times of a schedule, for a method that makes a single job."""
    for name in TIMES & given.keys():
        raise InvalidOption(
            f"{name}={shown(given[name])} says when the jobs of a schedule are due, and {method} makes one job. Use "
            f"{task.name}.options({name}=...).schedule(name, ...); for one job later, options(delay=...)."
        )
