"""Hooks and middleware of an app, and the chain of its enqueue middleware.

An enqueue middleware is code around every enqueue:

::

    @app.enqueue_middleware
    async def tenants_first(call: EnqueueCall, call_next: EnqueueNext) -> Answers:
        return await call_next(call.changed(priority=-1) if tenant.get() == "big" else call)

A layer sees the jobs of one call: one job of ``enqueue`` and ``call``, all jobs of ``enqueue_many``. The jobs of
flows, and added children, arrive in one call per queue. A layer may change payloads, priorities, delays and so on,
read the answers, or raise: then nothing is written. The first registered layer is the outermost.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from penstock.client.options import refuse_unknown
from penstock.core.flow import Node
from penstock.core.job import EMPTY_EXTRAS, Enqueued, NewJob
from penstock.core.text import get_logger, shown
from penstock.core.units import describe_size
from penstock.errors import InvalidOption, PayloadTooLarge

if TYPE_CHECKING:
    from penstock.worker.context import JobContext
    from penstock.worker.middleware import AfterExecution, CallNext, Hook, Middleware


Answers: TypeAlias = Sequence[Enqueued]
SyncMiddleware: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Takes ``call_next``, and returns what that returns."""
_EXTRAS: Final = frozenset({"group", "cost", "headers"})
_FIELDS: Final = _EXTRAS.union(NewJob.__struct_fields__)
_log = get_logger("penstock.worker")


class EnqueueCall(msgspec.Struct, frozen=True):
    """The jobs of one call to ``queue``. ``job.options.task`` is the task, ``job.payload`` the encoded arguments."""

    queue: str
    jobs: tuple[NewJob, ...]

    def changed(self, **fields: Any) -> EnqueueCall:
        """Return the same call with these fields set in every job.

        Fields are those of ``NewJob``, such as ``payload`` (bytes), ``priority``, ``delay_ms``, ``ttl_ms`` and
        ``options``, and of its extras: ``group``, ``cost`` and ``headers``, which replace the headers of the job.

        Raises:
            InvalidOption: a field that jobs do not have.
        """
        refuse_unknown(fields, _FIELDS, where="a job in an enqueue middleware")
        extras = {name: fields.pop(name) for name in _EXTRAS & fields.keys()}

        def change(job: NewJob) -> NewJob:
            changed = msgspec.structs.replace(job, **fields)
            if not extras:
                return changed
            merged = msgspec.structs.replace(changed.extras or EMPTY_EXTRAS, **extras)
            return msgspec.structs.replace(changed, extras=merged)

        return self.each(change)

    def each(self, change: Callable[[NewJob], NewJob]) -> EnqueueCall:
        """Return the same call with every job replaced by ``change(job)``."""
        return EnqueueCall(self.queue, tuple(map(change, self.jobs)))


EnqueueNext: TypeAlias = Callable[[EnqueueCall], Awaitable[Answers]]
EnqueueMiddleware: TypeAlias = Callable[[EnqueueCall, EnqueueNext], Awaitable[Answers]]


class EnqueueChain:
    """The enqueue middleware of an app. Apps without any bypass it."""

    __slots__ = ("_max_payload", "layers")

    def __init__(self, *, max_payload: int) -> None:
        self.layers: list[EnqueueMiddleware] = []
        self._max_payload = max_payload

    def add(self, layer: EnqueueMiddleware) -> None:
        """Add an innermost layer. Raise ``InvalidOption`` unless it is a coroutine function of two parameters."""
        check_layer(layer, what="enqueue_middleware", form="async def f(call, call_next)")
        self.layers.append(layer)

    async def enqueue(
        self, queue: str, jobs: Sequence[NewJob], send: Callable[[Sequence[NewJob]], Awaitable[Answers]]
    ) -> Answers:
        """Pass ``jobs`` through all layers, and send them.

        Raises:
            InvalidOption: a layer changed the queue, an id, or the number of jobs. Handles use them already.
            PayloadTooLarge: a layer made a payload that is too large.
        """

        async def innermost(call: EnqueueCall) -> Answers:
            self._check(call, original)
            return await send(call.jobs)

        call_next: EnqueueNext = innermost
        for layer in reversed(self.layers):
            call_next = _around(layer, call_next)
        original = EnqueueCall(queue, tuple(jobs))
        answers = await call_next(original)
        if len(answers) != len(jobs):
            raise InvalidOption(
                f"an enqueue middleware returned {len(answers)} answers for {len(jobs)} jobs. "
                "Return what call_next returned."
            )
        return answers

    async def enqueue_nodes(
        self, nodes: Sequence[Node], send: Callable[[Sequence[Node]], Awaitable[Answers]]
    ) -> Answers:
        """Pass jobs of several queues through all layers, one call per queue, and send them together.

        Raises as ``enqueue`` does, and ``InvalidOption`` if a layer does not call ``call_next``: a flow is sent as a
        whole.
        """
        places: dict[str, list[int]] = {}
        for place, node in enumerate(nodes):
            places.setdefault(node.queue, []).append(place)
        changed, answers = list(nodes), list[Enqueued]()

        async def go_through(queues: Sequence[str]) -> None:
            if not queues:
                answers[:] = await send(changed)
                return
            queue, *others = queues

            async def go_on(jobs: Sequence[NewJob]) -> Answers:
                for place, job in zip(places[queue], jobs, strict=True):
                    changed[place] = Node(queue, job)
                await go_through(others)
                return [answers[place] for place in places[queue]]

            await self.enqueue(queue, [nodes[place].job for place in places[queue]], go_on)

        await go_through(list(places))
        if not answers:
            raise InvalidOption(
                "an enqueue middleware did not call call_next for jobs of a flow. Nothing was written. "
                "Return what call_next returns, or raise."
            )
        return answers

    def _check(self, call: EnqueueCall, original: EnqueueCall) -> None:
        if call.queue != original.queue or [job.id for job in call.jobs] != [job.id for job in original.jobs]:
            raise InvalidOption(
                "an enqueue middleware changed the queue or the ids of jobs, or their number. It may change only "
                "other fields: use call.changed(...) or call.each(...)."
            )
        for job in call.jobs:
            if len(job.payload) > self._max_payload:
                raise PayloadTooLarge(
                    f"an enqueue middleware made a payload of {describe_size(len(job.payload))} for job {job.id!r}, "
                    f"more than the limit of {describe_size(self._max_payload)}."
                )


def _around(layer: EnqueueMiddleware, inner: EnqueueNext) -> EnqueueNext:
    def call_next(call: EnqueueCall) -> Awaitable[Answers]:
        return layer(call, inner)

    return call_next


def check_layer(layer: object, *, what: str, form: str) -> None:
    """Raise ``InvalidOption`` unless ``layer`` is a coroutine function that can be called with two arguments."""
    if not callable(layer):
        raise InvalidOption(f"{what}={shown(layer)} cannot be called. Give {form}.")
    function: Any = layer
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    if not inspect.isroutine(function):  # an object that can be called
        function = type(function).__call__
    if not inspect.iscoroutinefunction(function):
        raise InvalidOption(f"{what}={shown(layer)} is not a coroutine function. Give {form}.")
    try:
        inspect.signature(layer).bind(None, None)
    except TypeError as error:
        raise InvalidOption(f"{what}={shown(layer)} must take two arguments: {error}. Give {form}.") from None


def check_sync_layer(layer: object) -> None:
    """Raise ``InvalidOption`` unless ``layer`` is a function that is not async and takes one argument."""
    form = "def f(call_next)"
    if not callable(layer):
        raise InvalidOption(f"sync_middleware={shown(layer)} cannot be called. Give {form}.")
    if inspect.iscoroutinefunction(layer):
        raise InvalidOption(
            f"sync_middleware={shown(layer)} is a coroutine function, and it runs in threads. Give {form}, or use "
            "middleware."
        )
    try:
        inspect.signature(layer).bind(None)
    except TypeError as error:
        raise InvalidOption(
            f"sync_middleware={shown(layer)} must take one argument: {error}. Give {form}."
        ) from None


def around(layers: Sequence[SyncMiddleware], call: Callable[[], Any]) -> Any:
    """Call ``call`` inside all of ``layers``, and return its result."""
    for layer in reversed(layers):
        call = partial(layer, call)
    return call()


def _watched(layer: Middleware) -> Middleware:
    """Return ``layer`` with a warning for the first run that it completes without ``call_next``."""
    has_warned = False

    async def watched(context: JobContext, call_next: CallNext) -> Any:
        nonlocal has_warned
        has_called = False

        def note_call() -> Awaitable[Any]:
            nonlocal has_called
            has_called = True
            return call_next()

        result = await layer(context, note_call)
        if not has_called and not has_warned:
            has_warned = True
            _log.warning(
                "The middleware %s completed job %r without calling call_next: the task did not run. "
                "Add `return await call_next()`, unless you skip runs on purpose",
                getattr(layer, "__qualname__", layer),
                context.id,
            )
        return result

    return watched


class AppHooks:
    """The hooks and middleware of ``App``. Each method returns its argument, so it can be used as a decorator."""

    def __init__(self, *, max_payload: int) -> None:
        self.start_hooks: list[Hook] = []
        self.stop_hooks: list[Hook] = []
        self.middlewares: list[Middleware] = []
        self.sync_middlewares: list[SyncMiddleware] = []
        self.after_hooks: list[AfterExecution] = []
        self.enqueue_chain = EnqueueChain(max_payload=max_payload)
        """The chain that new jobs pass through. Internal."""
        self.preloaded: tuple[str, ...] = ()
        """The modules that other processes import before that of the app, to set up a framework."""
        self.served: set[str] = set()
        """Queues that workers of the app serve besides those of its tasks, unless they are given queues."""

    def on_start(self, hook: Hook) -> Hook:
        """Call ``hook`` when a worker of this app starts, before its first claim.

        A hook with a parameter gets the worker. If it raises, the worker does not start.
        """
        self.start_hooks.append(hook)
        return hook

    def on_stop(self, hook: Hook) -> Hook:
        """Call ``hook`` when a worker of this app has stopped, after its last job, in reverse order of registration."""
        self.stop_hooks.append(hook)
        return hook

    def middleware(self, layer: Middleware) -> Middleware:
        """Call ``async def layer(context, call_next) -> result`` around every run of this app's workers.

        Call the task with ``return await call_next()``. The first registered layer is the outermost; those of a worker
        are inside.
        """
        check_layer(layer, what="middleware", form="async def f(context, call_next)")
        self.middlewares.append(_watched(layer))
        return layer

    def sync_middleware(self, layer: SyncMiddleware) -> SyncMiddleware:
        """Call ``def layer(call_next) -> result`` around every call of a function that is not async, where it runs.

        That is the function's own thread, or its process: the place for what belongs to a thread, such as the
        connections of Django. Call the function with ``return call_next()``; ``current_job()`` is its job. A function
        that takes a batch is called once for all of its jobs. The first registered layer is the outermost.
        """
        check_sync_layer(layer)
        self.sync_middlewares.append(layer)
        return layer

    def enqueue_middleware(self, layer: EnqueueMiddleware) -> EnqueueMiddleware:
        """Call ``async def layer(call, call_next) -> answers`` around every enqueue of this app, async or sync.

        The first registered layer is the outermost. See the module.
        """
        self.enqueue_chain.add(layer)
        return layer

    def after_execution(self, hook: AfterExecution) -> AfterExecution:
        """Call ``hook(execution)`` after every run that completed or failed, before the outcome is stored.

        It may set ``execution.result``, ``error`` and ``ttl``; see ``Execution``. Hooks are called in the order of
        registration; those of a worker come last.
        """
        self.after_hooks.append(hook)
        return hook
