"""The app: the store, the tasks, and the default options of jobs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Self, TypeVar, Unpack, cast, overload

from penstock import client
from penstock.client.codec import JobCodec, Serde, resolve_serde
from penstock.client.decorators import (
    BatchDecorator,
    HandlerDecorator,
    TaskDecorator,
    handle_dead_letters,
)
from penstock.client.events import EventTypes, Filter, Offsets, app_events, offset_of
from penstock.client.flow.handle import FlowHandle, add_children, enqueue_flows
from penstock.client.hints import ATTRIBUTES, Hinting
from penstock.client.imports import check_module, import_named, is_typed_in, source_of
from penstock.client.middleware import AppHooks
from penstock.client.options import (
    DEFAULT_WAIT,
    DEFAULTS,
    HANDLER,
    TASK,
    BatchHandlerOptions,
    DefaultOptions,
    HandlerOptions,
    TaskOptions,
    placement,
    refuse_unknown,
    with_policy,
)
from penstock.client.parsers import check_wait, listed
from penstock.client.queue import Queue
from penstock.client.schedules import AppSchedulers
from penstock.client.session import (
    Sessions,
    StorageFactory,
    StoreName,
    check_url,
    chosen_store,
    from_environment,
)
from penstock.client.subscription import Subscription, SubscriptionOptions
from penstock.client.task import FunctionTask, Task
from penstock.core.job import Options, Policy
from penstock.core.names import check_namespace, check_queue, check_task, split_ref
from penstock.core.retry import BackoffFunction, custom_name
from penstock.core.text import shown
from penstock.core.units import Size, byte_count
from penstock.errors import InvalidInput, InvalidOption, UnknownTask

if TYPE_CHECKING:
    from penstock.client.flow import Ending, Part
    from penstock.client.handle import JobHandle
    from penstock.client.session import Session
    from penstock.core.event import Event
    from penstock.core.flow import DeadLetter
    from penstock.storage.contract import Storage
    from penstock.worker.options import WorkerOptions
    from penstock.worker.worker import Worker


P = ParamSpec("P")
R = TypeVar("R")
_OWN_OPTIONS: Final = frozenset({"url", "namespace", "serde", "result_serde", "max_payload", "include"})


class App(Hinting, AppHooks, AppSchedulers):
    """An application: its store, its tasks, and their defaults. It connects when it is first used.

    ``url`` names the store: ``sqlite:///path``, ``memory://``, ``valkey://host`` and others. The default is the
    environment variable ``PENSTOCK_URL``, else ``sqlite:///penstock.db`` in the working directory. You may pass an
    open storage instead; you close it, and it serves only the event loop that opened it.
    ``namespace`` separates several systems in one store; the default is the variable ``PENSTOCK_NAMESPACE``.
    ``include`` names the modules that define tasks. Workers import them when they start, so these modules
    may import the app. Further options are defaults for all tasks.

    Several event loops and threads may use an app: each loop gets its own connection. All loops
    of one app share one ``memory://``. ``close()``, ``async with app`` or the end of ``asyncio.run``
    closes the connections. After a fork, the child opens its own.
    """

    hints_for = "app"

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: object) -> None:
            if name in ATTRIBUTES["app"]:
                getattr(self, name)  # Raises with what to use instead.
            super().__setattr__(name, value)

    def __init__(
        self,
        url: str | Storage | None = None,
        *,
        namespace: str | None = None,
        serde: str | Serde = "json",
        result_serde: str | Serde | None = None,
        max_payload: Size = "1MiB",
        include: list[str] | tuple[str, ...] = (),
        **defaults: Unpack[DefaultOptions],
    ) -> None:
        refuse_unknown(defaults, DEFAULTS | _OWN_OPTIONS, where="an app")
        if isinstance(url, str) and url:
            check_url(url)
        named = None if namespace is None else check_namespace(namespace)
        is_open = url is not None and not isinstance(url, str)
        self.named = StoreName(getattr(url, "url", None) if is_open else str(url) if url else None, named)
        """The store and the namespace named in the code."""
        chosen, place = chosen_store([self.named] if is_open else [self.named, from_environment()])
        self.namespace = None if place is None else check_namespace(place)
        opening = StorageFactory(chosen if url is None else url, namespace=self.namespace)
        self.url = opening.url
        """The URL of the store. It may contain a password: display the URL of the storage instead."""
        self.moved_to: tuple[str, str | None] | None = None
        """The URL and the namespace of the last ``move_to``, for processes that import the app again."""
        self.included = tuple(map(check_module, listed("include", include, of="module names")))
        """The modules that ``load()`` imports."""
        self.max_payload = byte_count(max_payload, what="max_payload")
        self.serde = resolve_serde(serde)
        self.result_serde = self.serde if result_serde is None else resolve_serde(result_serde)
        self.backoffs: dict[str, BackoffFunction] = {}
        """Backoff functions by name. Jobs carry only the name."""
        self.defaults = self.with_policy(Options(), defaults)
        self.fields = placement(defaults)
        self.wait = check_wait(defaults.get("wait", DEFAULT_WAIT))
        """The time that a call waits for its result, unless its task or its options say otherwise."""
        self._tasks: dict[str, Task[..., Any]] = {}
        self._handlers: dict[str, Task[..., Any]] = {}
        AppHooks.__init__(self, max_payload=self.max_payload)
        AppSchedulers.__init__(self)
        self._sessions = Sessions(
            opening.open, enqueue_chain=self.enqueue_chain, close_storage=opening.is_ours
        )
        self.session: Callable[[], Coroutine[Any, Any, Session]] = self._sessions.get
        """Return the ``Session`` of the running loop. Internal."""

    # Tasks and queues

    @property
    def task(self) -> TaskDecorator:
        """Return the decorator that makes a function a task: ``@app.task``, ``@app.task(queue="mail", attempts=5)``."""
        return TaskDecorator(self.add_task)

    @overload
    def handler(self, queue: str, /, **options: Unpack[BatchHandlerOptions]) -> BatchDecorator: ...
    @overload
    def handler(self, queue: str, /, **options: Unpack[HandlerOptions]) -> HandlerDecorator: ...
    def handler(self, queue: str, /, **options: Any) -> Any:
        """Make a function the handler of a queue's jobs without a task: ``@app.handler("mail")``.

        It takes the decoded payload, in the type of its parameter's annotation, and optionally a ``JobContext``.
        Workers of the app run it as they run tasks. ``enqueue(payload)`` of the function or the queue makes a job.
        """
        if callable(queue):
            raise InvalidOption('@app.handler needs the name of a queue: @app.handler("mail").')
        refuse_unknown(options, HANDLER, where="a handler")
        kind = BatchDecorator if "batch" in options else HandlerDecorator
        return kind(self.add_handler, {"queue": check_queue(queue), **options})

    def dead_letter(
        self, of: str, /, *, queue: str | None = None, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[[DeadLetter], Any]], Task[..., Any]]:
        """Make a function the handler of the jobs of a queue that failed for good: ``@app.dead_letter("mail")``.

        For each failed job, the function gets a ``DeadLetter`` in a new job with these options. That job goes to
        ``queue`` (default: the name with ``.dead`` appended). A worker with an explicit list of queues must include
        it. The failed job itself is kept. Workers of the app set this up when they start;
        ``queue.configure(dead_letter=...)`` does so without a worker.
        """
        if callable(of):
            raise InvalidOption('@app.dead_letter needs the name of a queue: @app.dead_letter("mail").')
        into = check_queue(queue if queue is not None else f"{check_queue(of)}.dead")
        refuse_unknown(options, TASK, where="a dead letter")
        return lambda func: handle_dead_letters(self, of, func, into=into, options=options)

    @property
    def tasks(self) -> Mapping[str, Task[..., Any]]:
        """Return the tasks by name."""
        return MappingProxyType(self._tasks)

    @property
    def handlers(self) -> Mapping[str, Task[..., Any]]:
        """Return the handlers of ``@app.handler`` by queue."""
        return MappingProxyType(self._handlers)

    def load(self, *modules: str) -> None:
        """Import the modules of ``include``, and add ``modules`` to them, so that their tasks are registered.

        Workers and the command line call it. Call it yourself before you look up tasks by name.

        Raises:
            InvalidOption: a module does not exist, or raises while it is imported.
        """
        self.included = tuple(dict.fromkeys([*self.included, *map(check_module, modules)]))
        for module in self.included:
            import_named(module)

    def task_named(self, name: str) -> Task[..., Any]:
        """Return the task with that name. Raise ``UnknownTask`` if there is none."""
        try:
            found = self._tasks.get(name)
        except TypeError:  # not hashable
            found = None
        if found is None:
            known = ", ".join(sorted(self._tasks)) or "no tasks"
            raise UnknownTask(
                f"no task {shown(name)} is registered in this app, which has {known}. "
                "Import the module that defines it before the worker starts."
            )
        return found

    def queue(
        self,
        name: str,
        *,
        serde: str | Serde | None = None,
        result_serde: str | Serde | None = None,
        payload_type: Any = Any,
        result_type: Any = Any,
    ) -> Queue:
        """Return the queue with that name, to enqueue payloads without a task, and to inspect and operate it.

        Payloads and results are decoded to ``payload_type`` and ``result_type``.
        """
        source = JobCodec(
            self,
            check_queue(name),
            serde=self.serde if serde is None else resolve_serde(serde),
            result_serde=self.result_serde if result_serde is None else resolve_serde(result_serde),
            payload_type=payload_type,
            result_type=result_type,
        )
        return Queue(source)

    def job(self, ref: str) -> JobHandle[Any]:
        """Return a handle for a job by its ``ref``, ``"queue/id"``, without a request to the store.

        Raises ``InvalidName``. If you have the queue and the id separately, use ``app.queue(name).job(id)``.
        """
        queue, id = split_ref(ref)
        return self.queue(queue).job(id)

    def flow(self, ref: str | list[str] | tuple[str, ...]) -> FlowHandle[Any]:
        """Return a handle for the flow whose last job has this ``ref``, without a request to the store.

        A group has several last jobs: give the list of their refs, ``[job.ref for job in flow.ends]``.
        """
        if not isinstance(ref, list | tuple):
            return FlowHandle(self, [self.job(ref)])
        ends = [self.job(each) for each in ref]
        if not ends:
            raise InvalidInput("a flow needs at least one ref: app.flow([job.ref for job in flow.ends]).")
        return FlowHandle(self, ends, is_group=True)

    async def enqueue_flow(self, flow: Ending[R]) -> FlowHandle[R]:
        """Enqueue a flow: ``Flow``, ``chain``, ``group``, ``chord``, ``Dag``, or a single ``task.job(...)``.

        The whole flow is written in one step to the queue of its root, or not at all. Jobs of other queues are
        delivered from there, immediately and reliably. If the id of the root is known, nothing is enqueued; see
        the ``status`` of the handle.

        Raises:
            InvalidInput: a cycle (the message names it), or invalid arguments or options.
            JobNotFound: the flow waits for a job that the queue of the root does not have.
        """
        [handle] = await self.enqueue_flows([cast("Part", flow)])
        return handle

    async def enqueue_flows(self, flows: Iterable[Part]) -> list[FlowHandle[Any]]:
        """Enqueue many flows, hundreds per round trip. All are checked before the first is written."""
        return await enqueue_flows(self, flows)

    async def add_children(
        self, source: JobCodec, id: str, children: Iterable[Part], *, on_failure: Policy
    ) -> list[JobHandle[Any]]:
        """Add jobs that an open job waits for; see ``Parent.add_children``. Internal."""
        return await add_children(source, id, children, on_failure=on_failure)

    def worker(self, **options: Unpack[WorkerOptions]) -> Worker:
        """Return a worker for the tasks of this app; see ``penstock.worker.worker.Worker`` for the options."""
        from penstock.worker.worker import Worker

        return Worker(self, **options)

    # The store

    async def connect(self) -> Storage:
        """Return the open storage of the running event loop. The first call opens it.

        Raises:
            StorageError: the store cannot be reached, refuses access, or has an unsupported version.
            InvalidOption: no engine serves the URL.
        """
        return (await self.session()).storage

    def move_to(self, url: str, *, namespace: str | None = None) -> None:
        """Use another store, as ``penstock worker --url`` does.

        Call it before the app connects: connected loops keep their connections. The app does not close a storage
        that was passed to it. Processes of its workers use the new store, too.
        """
        self.namespace = check_namespace(namespace) if namespace is not None else None
        opening = StorageFactory(url, namespace=self.namespace)
        self.url = opening.url
        self.moved_to = (self.url, self.namespace)
        self.exchange_sessions(
            Sessions(opening.open, enqueue_chain=self.enqueue_chain, close_storage=opening.is_ours)
        )

    async def close(self) -> None:
        """Close the connections of all event loops. The app may be used again: it reconnects."""
        await self._sessions.close()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def queues(self) -> list[str]:
        """Return the names of all queues that ever had a job."""
        return await (await self.connect()).queues()

    def events(
        self,
        *queues: str,
        after: Offsets = 0,
        follow: bool = True,
        types: EventTypes = None,
        id: str | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Return the events of these queues, or of all current ones; see ``Queue.events``. ``after`` may be a mapping.

        Events of one queue are in order; the order between queues is undefined.
        """
        names = tuple(dict.fromkeys(check_queue(name) for name in queues))
        wanted = Filter.of(types, id)
        for name in names:
            offset_of(after, name, 0)
        return app_events(self, names, after=after, follow=follow, wanted=wanted)

    def subscribe(self, *queues: str, **options: Unpack[SubscriptionOptions]) -> Subscription:
        """Return a ``Subscription``, which calls functions by type of event: for these queues, or all when it runs.

        It begins at ``after`` (default: now). A named ``consumer`` resumes where it stopped; its position, and the
        events after it, are kept for ``hold`` after its last visit. ``id`` selects one job. ``on_error="log"``
        continues after an error of a handler.
        """
        return Subscription(self, queues, **options)

    @property
    def sync(self) -> client.SyncApp:
        """Return the same interface for synchronous code."""
        return client.SyncApp(self)

    # Internal

    def with_policy(self, base: Options, given: Mapping[str, Any]) -> Options:
        """Return ``base`` with the job policy in ``given``, and register its backoff function."""
        backoff = given.get("backoff")
        if callable(backoff):
            self.backoffs[custom_name(backoff)] = backoff
        return with_policy(base, given)

    def add_task(
        self, func: Callable[..., Any], name: str | None, queue: str, given: Mapping[str, Any]
    ) -> Task[..., Any]:
        """Register a function as a task, as ``@app.task`` does."""
        if not callable(func):
            raise InvalidOption(
                f"app.task takes a function, got {shown(func)}. Options go by name: @app.task(queue=..., name=...)."
            )
        name = check_task(getattr(func, "__name__", "") if name is None else name)
        # A notebook cell that runs again defines its tasks again.
        if name in self._tasks and not (is_typed_in(self._tasks[name].func) and is_typed_in(func)):
            raise InvalidOption(
                f"a task {shown(name)} is registered already, {source_of(self._tasks[name].func)}, and a job carries "
                f"only the name. Give the one {source_of(func)} another name: @app.task(name=...)."
            )
        self._tasks[name] = FunctionTask[..., Any, ..., Any](self, func, name, queue, given)
        return self._tasks[name]

    def add_handler(
        self, func: Callable[..., Any], name: str | None, queue: str, given: Mapping[str, Any]
    ) -> Task[..., Any]:
        """Register a function for the payloads of a queue, as ``@app.handler`` does."""
        other = self._handlers.get(queue)
        if other is not None and not (is_typed_in(other.func) and is_typed_in(func)):
            raise InvalidOption(
                f"queue {shown(queue)} has a handler already, {source_of(other.func)}. Remove it, or the one "
                f"{source_of(func)}."
            )
        name = getattr(func, "__name__", "handler")
        handler = FunctionTask[..., Any, ..., Any](self, func, name, queue, given, takes_payload=True)
        self._handlers[queue] = handler
        return handler

    def exchange_sessions(self, sessions: Sessions) -> Sessions:
        """Replace the sessions, and with them the store. Return the old ones."""
        before, self._sessions = self._sessions, sessions
        self.session = sessions.get
        return before
