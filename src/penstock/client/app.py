"""The app: where the store is, which tasks there are, and how jobs are treated unless said otherwise."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar, Unpack, cast, overload

from msgspec.structs import replace

from penstock.client.batching import batch_signature, parse_batching
from penstock.client.codec import Serde, resolve_serde
from penstock.client.decorators import BatchDecorator, Other, TaskDecorator
from penstock.client.events import EventTypes, Filter, Offsets, app_events, offset_of
from penstock.client.hints import Hinting
from penstock.client.imports import check_module, import_named, is_typed_in, source_of
from penstock.client.middleware import AppHooks
from penstock.client.options import (
    DEFAULTS,
    PLACEMENT,
    TASK,
    BatchOptions,
    DefaultOptions,
    TaskOptions,
    placed,
    placement,
    refuse_unknown,
    treatment,
)
from penstock.client.optionvalues import listed
from penstock.client.queue import Queue
from penstock.client.schedules import AppSchedulers
from penstock.client.session import Opening, Sessions, StoreName, check_url, chosen_store, from_environment
from penstock.client.signature import Signature
from penstock.client.task import FunctionTask, Task, resolve_limits, resolve_retry_on, resolve_runner
from penstock.core.job import Options
from penstock.core.names import check_namespace, check_queue, check_task, split_ref
from penstock.core.retry import BackoffFunction, custom_name
from penstock.core.text import shown
from penstock.core.units import Size, byte_count
from penstock.errors import InvalidOption, UnknownTask

if TYPE_CHECKING:
    from penstock.client.flow.handle import FlowHandle
    from penstock.client.flow.parts import Ending, Part
    from penstock.client.handle import JobHandle
    from penstock.client.session import Session
    from penstock.client.subscription import Subscription, SubscriptionOptions
    from penstock.client.sync import SyncApp
    from penstock.core.deadletter import DeadLetter
    from penstock.core.event import Event
    from penstock.storage.contract import Storage
    from penstock.worker.context import JobContext
    from penstock.worker.options import WorkerOptions
    from penstock.worker.worker import Worker


P = ParamSpec("P")
R = TypeVar("R")
_OWN_OPTIONS: Final = frozenset({"url", "namespace", "serde", "result_serde", "max_payload", "include"})


class App(Hinting, AppHooks, AppSchedulers):
    """Everything begins here. Light to make: it connects when it is first used.

    ``url`` is the store's: ``sqlite:///path``, ``memory://``, ``valkey://host`` and others; without it the
    environment's ``PENSTOCK_URL``; without that ``sqlite:///penstock.db`` in the working directory. A storage that
    is open already may be given instead; it stays the caller's to close, and serves its own event loop only.
    ``namespace`` keeps several systems apart in one store; without it the environment's ``PENSTOCK_NAMESPACE``.
    ``include`` names the modules that define tasks for this app: workers import them when they start, so these modules
    may import the app. Further options are defaults for all tasks.

    An app may be used from several event loops and threads: each loop gets a connection of its own. All loops
    of one app share one ``memory://``. Connections are closed by ``close()``, by ``async with app``, or when
    ``asyncio.run`` ends their loop. After a fork the child makes its own.
    """

    hints_for = "app"

    def __init__(
        self,
        url: str | Storage | None = None,
        *,
        namespace: str | None = None,
        serde: str | Serde = "json",
        result_serde: str | Serde | None = None,
        max_payload: Size = "1MiB",
        include: Sequence[str] = (),
        **defaults: Unpack[DefaultOptions],
    ) -> None:
        refuse_unknown(defaults, DEFAULTS | _OWN_OPTIONS, where="an app")
        if isinstance(url, str) and url:
            check_url(url)
        named = None if namespace is None else check_namespace(namespace)
        is_open = url is not None and not isinstance(url, str)
        self.named = StoreName(getattr(url, "url", None) if is_open else str(url) if url else None, named)
        """The store and the namespace that the code names."""
        chosen, part = chosen_store([self.named] if is_open else [self.named, from_environment()])
        self.namespace = None if part is None else check_namespace(part)
        opening = Opening(chosen if url is None else url, namespace=self.namespace)
        self.url = opening.url
        """Where the store is. It may hold a password: show the url of the storage instead."""
        self.moved_to: tuple[str, str | None] | None = None
        """The URL and the namespace of the last ``move_to``, for processes that import the app anew."""
        self.included = tuple(map(check_module, listed("include", include, of="module names")))
        """The modules that ``load()`` imports."""
        self.max_payload = byte_count(max_payload, what="max_payload")
        self.serde = resolve_serde(serde)
        self.result_serde = self.serde if result_serde is None else resolve_serde(result_serde)
        self.backoffs: dict[str, BackoffFunction] = {}
        """Backoff functions by the name that jobs carry, for whoever settles their failures."""
        self._defaults = self.treatment(Options(), defaults)
        self._fields = placement(defaults)
        self._tasks: dict[str, Task[..., Any]] = {}
        AppHooks.__init__(self, max_payload=self.max_payload)
        AppSchedulers.__init__(self)
        self._sessions = Sessions(
            opening.open, enqueue_chain=self.enqueue_chain, close_storage=opening.is_ours
        )
        self.session: Callable[[], Coroutine[Any, Any, Session]] = self._sessions.get
        """The running loop's ``Session``: for the parts of Penstock, not for its users."""

    # Tasks and queues

    @overload
    def task(
        self, func: Callable[Concatenate[Other, ...], Coroutine[Any, Any, R]], /
    ) -> FunctionTask[..., R, ..., Coroutine[Any, Any, R]]: ...
    @overload
    def task(
        self, func: Callable[Concatenate[JobContext, P], Coroutine[Any, Any, R]], /
    ) -> FunctionTask[P, R, Concatenate[JobContext, P], Coroutine[Any, Any, R]]: ...
    @overload
    def task(  # type: ignore[overload-overlap]  # as in TaskDecorator, which has the same overloads
        self, func: Callable[P, Coroutine[Any, Any, R]], /
    ) -> FunctionTask[P, R, P, Coroutine[Any, Any, R]]: ...
    @overload
    def task(self, func: Callable[Concatenate[Other, ...], R], /) -> FunctionTask[..., R, ..., R]: ...
    @overload
    def task(
        self, func: Callable[Concatenate[JobContext, P], R], /
    ) -> FunctionTask[P, R, Concatenate[JobContext, P], R]: ...
    @overload
    def task(self, func: Callable[P, R], /) -> FunctionTask[P, R, P, R]: ...
    @overload
    def task(
        self,
        func: None = None,
        /,
        *,
        name: str | None = None,
        queue: str = "default",
        **options: Unpack[BatchOptions],
    ) -> BatchDecorator: ...
    @overload
    def task(
        self,
        func: None = None,
        /,
        *,
        name: str | None = None,
        queue: str = "default",
        **options: Unpack[TaskOptions],
    ) -> TaskDecorator: ...
    def task(
        self,
        func: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        queue: str = "default",
        **options: Any,
    ) -> Any:
        """Make a function a task: ``@app.task`` or ``@app.task(queue="mail", attempts=5)``.

        Its name is the function's unless given. With ``batch=50`` the function takes a list: see ``BatchOptions``.
        Raises ``InvalidOption`` for an option nobody knows, a value it
        cannot have, or a name that is taken.
        """
        refuse_unknown(options, TASK | {"name", "queue"}, where="a task")
        kind = BatchDecorator if "batch" in options else TaskDecorator
        decorator = kind(self, name, check_queue(queue), options)
        return decorator if func is None else decorator(func)

    def dead_letter(
        self, of: str, /, *, queue: str | None = None, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[[DeadLetter], Any]], Task[..., Any]]:
        """Make a function the handler of jobs of a queue that have failed for good: ``@app.dead_letter("mail")``.

        It gets a ``DeadLetter``, as a job of its own, treated as the app and these options say, in ``queue``, which is
        the queue's name with ``.dead`` behind it unless given. A worker that was told its queues has to consume that
        one, too. The failed job itself stays where it is. Workers of the app set this up as they start;
        ``queue.configure(dead_letter=...)`` does so without one.
        """
        from penstock.client.decorators import handle_dead_letters

        if callable(of):
            raise InvalidOption('@app.dead_letter needs the name of a queue: @app.dead_letter("mail").')
        into = check_queue(queue if queue is not None else f"{check_queue(of)}.dead")
        refuse_unknown(options, TASK, where="a dead letter")
        return lambda func: handle_dead_letters(self, of, func, into=into, options=options)

    @property
    def tasks(self) -> Mapping[str, Task[..., Any]]:
        """The tasks by name."""
        return MappingProxyType(self._tasks)

    def load(self, *modules: str) -> None:
        """Import the modules named by ``include``, and ``modules`` from now on, so that their tasks are registered.

        Workers and the command line do this by themselves. Call it where you look for tasks by name.

        Raises:
            InvalidOption: a module does not exist, or raises while it is imported.
        """
        self.included = tuple(dict.fromkeys([*self.included, *map(check_module, modules)]))
        for module in self.included:
            import_named(module)

    def task_named(self, name: str) -> Task[..., Any]:
        """The task of that name. Raises ``UnknownTask``."""
        try:
            found = self._tasks.get(name)
        except TypeError:  # It cannot be a key.
            found = None
        if found is None:
            known = ", ".join(sorted(self._tasks)) or "none at all"
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
        """The queue of that name: to put payloads in without a task, to look at it and to operate it.

        ``payload_type`` and ``result_type`` are what payloads and results are decoded to.
        """
        return Queue(
            self,
            check_queue(name),
            serde=self.serde if serde is None else resolve_serde(serde),
            result_serde=self.result_serde if result_serde is None else resolve_serde(result_serde),
            payload_type=payload_type,
            result_type=result_type,
            defaults=self._defaults,
            fields=self._fields,
        )

    def job(self, ref: str) -> JobHandle[Any]:
        """Return a handle for a job by its ``ref``, ``"queue/id"``. The store is not asked yet.

        Raises ``InvalidName``. If you have queue and id apart, use ``app.queue(name).job(id)``.
        """
        queue, id = split_ref(ref)
        return self.queue(queue).job(id)

    def flow(self, ref: str) -> FlowHandle[Any]:
        """Return a handle for the flow that leads to the job of this ``ref``. The store is not asked yet."""
        from penstock.client.flow.handle import FlowHandle

        return FlowHandle(self, [self.job(ref)])

    async def enqueue_flow(self, flow: Ending[R]) -> FlowHandle[R]:
        """Put a flow in: ``Flow``, ``chain``, ``group``, ``chord``, ``Dag``, or a single ``task.job(...)``.

        The whole of it is written in one step, in the queue of its root, or nothing. Jobs of other queues are
        delivered from there, at once and surely. If the root's id is known, nothing is put in; the handle's
        ``status`` says so.

        Raises:
            InvalidInput: a cycle, which is named; arguments or options that cannot be.
            JobNotFound: a job of the root's queue that is waited for is not known.
        """
        [handle] = await self.enqueue_flows([cast("Part", flow)])
        return handle

    async def enqueue_flows(self, flows: Iterable[Part]) -> list[FlowHandle[Any]]:
        """Put many flows in, hundreds per round trip. All are checked before the first is written."""
        from penstock.client.flow.enqueue import enqueue_flows

        return await enqueue_flows(self, flows)

    def worker(self, **options: Unpack[WorkerOptions]) -> Worker:
        """A worker for this app's tasks; see ``penstock.worker.worker.Worker`` for the options."""
        from penstock.worker.worker import Worker

        return Worker(self, **options)

    # The store

    async def connect(self) -> Storage:
        """The open storage of the running event loop; the first call opens it.

        Raises:
            StorageError: the store is not there, does not let us in, or is of a version we cannot use.
            InvalidOption: a URL that names no engine.
        """
        return (await self.session()).storage

    def move_to(self, url: str, *, namespace: str | None = None) -> None:
        """Have it use another store than the one it was made with: what ``penstock worker --url`` does.

        To be called before it connects: loops that have connected keep what they have, and a storage that it was given
        stays its giver's. The processes of its workers go along.
        """
        self.namespace = check_namespace(namespace) if namespace is not None else None
        opening = Opening(url, namespace=self.namespace)
        self.url = opening.url
        self.moved_to = (self.url, self.namespace)
        self.exchange_sessions(
            Sessions(opening.open, enqueue_chain=self.enqueue_chain, close_storage=opening.is_ours)
        )

    async def close(self) -> None:
        """Close the connections of all event loops. The app may be used again: it connects anew."""
        await self._sessions.close()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def queues(self) -> list[str]:
        """The names of all queues that jobs were ever put into."""
        return await (await self.connect()).queues()

    def events(
        self,
        *queues: str,
        after: Offsets = 0,
        follow: bool = True,
        types: EventTypes = None,
        id: str | None = None,
    ) -> AsyncGenerator[Event, None]:
        """The events of these queues, or of all there are by now, see ``Queue.events``; ``after`` may be by queue.

        Within a queue they are in order; between queues no order is promised.
        """
        names = tuple(dict.fromkeys(check_queue(name) for name in queues))
        wanted = Filter.of(types, id)
        for name in names:
            offset_of(after, name, 0)
        return app_events(self, names, after=after, follow=follow, wanted=wanted)

    def subscribe(self, *queues: str, **options: Unpack[SubscriptionOptions]) -> Subscription:
        """Call functions by type of event, see ``Subscription``: for these queues, or all there are when it runs.

        ``after`` is where to begin, from now on unless given. A ``consumer`` begins where it was before; its place
        is kept, and events behind it, for ``hold`` after it was last seen. ``id`` is one job's. ``on_error="log"``
        goes on after an error of a handler.
        """
        from penstock.client.subscription import Subscription

        return Subscription(self, queues, **options)

    @property
    def sync(self) -> SyncApp:
        """The same for synchronous code."""
        from penstock.client.sync import SyncApp

        return SyncApp(self)

    # For the parts of Penstock

    def treatment(self, base: Options, given: Mapping[str, Any]) -> Options:
        """``base`` with the treatment in ``given``; a backoff function among it becomes known here."""
        backoff = given.get("backoff")
        if callable(backoff):
            self.backoffs[custom_name(backoff)] = backoff
        return treatment(base, given)

    def add_task(
        self, func: Callable[..., Any], name: str | None, queue: str, given: Mapping[str, Any]
    ) -> Task[..., Any]:
        """Register a function as a task, as ``@app.task`` does."""
        if not callable(func):
            raise InvalidOption(
                f"app.task takes a function, got {shown(func)}. Options go by name: @app.task(queue=..., name=...)."
            )
        name = check_task(getattr(func, "__name__", "") if name is None else name)
        # A cell of a notebook that is run again defines its tasks again.
        if name in self._tasks and not (is_typed_in(self._tasks[name].func) and is_typed_in(func)):
            raise InvalidOption(
                f"a task {shown(name)} is registered already, {source_of(self._tasks[name].func)}, and a job carries "
                f"only the name. Give the one {source_of(func)} another name: @app.task(name=...)."
            )
        runner = resolve_runner(name, func, given.get("runner", "auto"))
        takes_context = given.get("takes_context", False)
        batching = parse_batching(given.get("batch"), given.get("batch_wait"), where=f"task {shown(name)}")
        if batching is None:
            signature = Signature.of(func, takes_context=takes_context)
        else:
            signature, batching = batch_signature(func, batching, runner=runner, takes_context=takes_context)
        serde = self.serde if "serde" not in given else resolve_serde(given["serde"])
        result_serde = self.result_serde if "serde" not in given else serde
        task: Task[..., Any] = FunctionTask(
            self,
            func,
            name=name,
            queue=queue,
            runner=runner,
            limits=resolve_limits(name, runner, given),
            serde=serde,
            result_serde=resolve_serde(given.get("result_serde", result_serde)),
            signature=signature,
            defaults=self.treatment(replace(self._defaults, task=name), given),
            fields=placed(self._fields, {k: v for k, v in given.items() if k in PLACEMENT}),
            batching=batching,
            retry_on=resolve_retry_on(name, given.get("retry_on")),
        )
        self._tasks[name] = task
        return task

    def exchange_sessions(self, sessions: Sessions) -> Sessions:
        """Use other sessions, and so another store, from now on; gives those it had, to be put back."""
        before, self._sessions = self._sessions, sessions
        self.session = sessions.get
        return before
