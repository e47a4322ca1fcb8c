"""Names from other job queues, and what to use here instead.

None of them works as an alias. They only make errors more helpful. ``tests/client/test_hints.py`` checks each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NoReturn, TypeAlias

Kind: TypeAlias = Literal[
    "task", "app", "job", "job context", "job spec", "queue", "flow", "flow handle", "worker info"
]


def _by_name(ours: Mapping[str, str]) -> dict[str, str]:
    """Return our name for each of the names that others use."""
    return {name: own for own, names in ours.items() for name in names.split()}


SAME_OPTION: Final = _by_name({
    "delay": "countdown",
    "run_at": "eta",
    "ttl": "expires",
    "id": "task_id job_id",
    "timeout": "job_timeout soft_time_limit time_limit",
    "backoff": "default_retry_delay min_backoff max_backoff retry_delay",
    "retry_on": "autoretry_for retry_when",
    "give_up_on": "dont_autoretry_for",
    "max_retries": "retries retry",
    "include": "imports",
    "result_ttl": "result_expires keep_result",
    "after": "depends_on",
    "queue": "routing_key queue_name",
    "serde": "serializer",
    "url": "broker broker_url",
    "lifo": "at_front",
    "attempts": "max_tries",
})  # fmt: skip
"""Options of Celery, RQ, arq, Dramatiq and Huey that have another name here."""

_RETRIES: Final = "Use retry_on to name the exceptions that are retried, or raise Unrecoverable."
_ONE_STORE: Final = "One store holds jobs and results: App('valkey://localhost')."
_AFTER_RUN: Final = "A job always ends after its run, and runs again if its worker dies: leave it out."
_CONTEXT: Final = "Annotate the first parameter with JobContext to get the job."
OTHER_WAY: Final = {
    "bind": _CONTEXT,
    "throws": _RETRIES,
    "retry_backoff": "Use backoff=Exponential.of(base=1, cap=600, jitter=1).",
    "retry_backoff_max": "Use backoff=Exponential.of(cap=...).",
    "retry_jitter": "Use backoff=Exponential.of(jitter=...).",
    "backend": _ONE_STORE,
    "result_backend": _ONE_STORE,
    "timezone": "Give it to each schedule: @app.scheduled(cron=..., tz=...).",
    "enable_utc": "Times are instants with a zone; give tz to each schedule: @app.scheduled(cron=..., tz=...).",
    "beat_schedule": "Use @app.scheduled(cron=...) above @app.task, or app.schedule(name, task.job(...), every=...).",
    "task_routes": "Give the queue to each task: @app.task(queue=...).",
    "task_default_queue": "Give the queue to each task: @app.task(queue=...).",
    "task_always_eager": "Use penstock.testing.harness(app, mode='inline') in tests.",
    "worker_concurrency": "Use app.worker(concurrency=...).",
    "ignore_result": "Use result_ttl=0.",
    "store_results": "Results are stored for an hour; use result_ttl=0 to store none.",
    "acks_late": _AFTER_RUN,
    "reject_on_worker_lost": _AFTER_RUN,
    "track_started": "A job that runs is always shown as active: leave it out.",
    "retry_kwargs": "Use max_retries and backoff.",
    "base": "Use @app.middleware for code around all runs.",
    "main": "An app has no name; namespace=... keeps several apart in one store.",
    "rate_limit": "Use queue.limit(rate=...) for all workers, or app.worker(limits={...}) for one.",
    "concurrency": "Use queue.limit(concurrency=...) for all workers, or app.worker(concurrency=...) for one.",
    "link": "Use chain(first.job(...), next.partial()).",
    "link_error": "Use @app.dead_letter(queue).",
    "on_success": "Use chain(first.job(...), next.partial()).",
    "on_failure": "Use @app.dead_letter(queue).",
}
"""Options of other queues that have no counterpart here, and what to do instead."""

_CLAIMS_LITTLE: Final = "A worker claims only what it can run: leave it out."
WORKER_OPTIONS: Final[Mapping[str, str]] = {
    "pool": "Each task has its own runner: @app.task(runner='process').",
    "prefetch_multiplier": _CLAIMS_LITTLE,
    "prefetch": _CLAIMS_LITTLE,
    "autoscale": "A worker claims only what it can run: give concurrency and processes.",
    "max_tasks_per_child": "Use a fresh process for each run: @app.task(runner='sandbox').",
    "max_memory_per_child": "Use a fresh process for each run: @app.task(runner='sandbox', memory=...).",
    "loglevel": "Use logging.getLogger('penstock').setLevel(...).",
    "log_level": "Use logging.getLogger('penstock').setLevel(...).",
    "time_limit": "Give it to the task: @app.task(timeout=...).",
    "soft_time_limit": "Give it to the task: @app.task(timeout=...).",
    "beat": "Every worker fires schedules: leave it out.",
    "with_scheduler": "Every worker fires schedules: leave it out.",
}
"""Options of the workers of other queues, and what to do instead."""

_GROUP: Final = "Use app.flow(refs), with [job.ref for job in flow.ends] of the handle that enqueue returned."
_ASK_STATE: Final = "Use job.refresh(), which returns the state."
_SETTINGS: Final = "Give settings to App(...), and options of jobs to @app.task(...)."
_FLOW_STATE: Final = "Use flow.tree(), which has the state of each job."
ATTRIBUTES: Final[Mapping[Kind, Mapping[str, str]]] = {
    "task": {
        "delay": "Use task.enqueue(...), or task.sync.enqueue(...) in synchronous code.",
        "apply_async": "Use task.options(delay=...).enqueue(...), or task.sync.options(...) in synchronous code.",
        "send": "Use task.enqueue(...), or task.sync.enqueue(...) in synchronous code.",
        "send_with_options": "Use task.options(delay=...).enqueue(...).",
        "kiq": "Use task.enqueue(...).",
        "apply": "Call task(...) to run the function here.",
        "s": "Use task.job(...), or task.partial(...) if a flow passes the first argument.",
        "si": "Use task.job(...).",
        **dict.fromkeys(["map", "starmap", "chunks"], "Use task.enqueue_many([task.job(...), ...])."),
        "subtask": "Use task.job(...), or task.partial(...) if a flow passes the first argument.",
        "AsyncResult": "Use app.job(ref), with the ref of the handle that enqueue returned.",
        "retry": "Raise Retry(delay=...) in the function.",
        "request": _CONTEXT,
        "update_state": "Use context.progress(...); annotate the first parameter with JobContext to get the context.",
    },
    "app": {
        "conf": _SETTINGS,
        "config_from_object": _SETTINGS,
        "control": "Use job.cancel(), queue.drain(), queue.pause() and queue.workers().",
        "send_task": "Use app.queue(name).enqueue({...}, task=...), with the arguments by name.",
        "AsyncResult": "Use app.job(ref), with the ref of the handle that enqueue returned.",
        "GroupResult": _GROUP,
        "autodiscover_tasks": "Name the modules that define tasks: App(include=[...]).",
        "add_periodic_task": "Use app.schedule(name, task.job(...), every=...).",
        "periodic_task": "Use @app.scheduled(every=...) above @app.task.",
        "on_after_configure": "Use @app.on_start.",
        "on_after_finalize": "Use @app.on_start.",
        "worker_main": "Use app.worker().run_sync(), or the command penstock worker MODULE:APP.",
        "start": "Use app.worker().run_sync(), or the command penstock worker MODULE:APP.",
        "actor": "Use @app.task.",
        "signature": "Use task.job(...), or task.partial(...) if a flow passes the first argument.",
        "Task": "Use @app.middleware for code around all runs.",
        "enqueue": "Use task.enqueue(...), or app.queue(name).enqueue(payload).",
    },
    "job": {
        **dict.fromkeys(
            ["ready", "successful", "failed", "is_finished", "is_failed", "get_status"], _ASK_STATE
        ),
        "forget": "Use job.remove().",
        "delete": "Use job.remove().",
        "revoke": "Use job.cancel().",
        "abort": "Use job.cancel().",
        "requeue": "Use job.retry().",
        "wait": "Use job.result(timeout=...).",
        "return_value": "Use job.result().",
        "traceback": "Use job.get(), whose failure has the traceback.",
        "info": "Use job.get(), whose progress is the last value of context.progress(...).",
        "task_id": "Use job.id, or job.ref to find the job again.",
    },
    "job context": {
        "request": "The context has these fields: context.id, context.queue, context.task, context.headers.",
        "retry": "Raise Retry(delay=...) in the function.",
        "max_retries": "Use context.attempts, which is max_retries + 1.",
        "retries": "Use context.failures.",
        "update_state": "Use context.progress(...).",
        "replace": "Use await context.add_children([...]) and raise WaitForChildren().",
        "name": "Use context.task.",
    },
    "job spec": {
        "delay": "Use task.enqueue(...); a job of task.job(...) goes to enqueue_many, chain, group or chord.",
        "apply_async": "Use task.options(delay=...).enqueue(...).",
        "set": "Options go before the arguments: task.options(delay=...).job(...).",
        "link": "Use chain(first.job(...), next.partial()).",
        "link_error": "Use @app.dead_letter(queue).",
    },
    "queue": {
        "purge": "Use queue.drain(), or queue.drain(scheduled=True) to remove scheduled jobs as well.",
        "empty": "Use queue.drain(), or queue.drain(scheduled=True) to remove scheduled jobs as well.",
        "delete": "Use queue.obliterate().",
        "rate_limit": "Use queue.limit(rate=...).",
        "add": "Use queue.enqueue(payload).",
        "send": "Use queue.enqueue(payload).",
        "enqueue_in": "Use queue.enqueue(payload, delay=...).",
        "enqueue_at": "Use queue.enqueue(payload, run_at=...).",
        "fetch_job": "Use queue.get(id).",
        "get_jobs": "Use queue.list_jobs(state).",
        "count": "Use queue.counts().",
    },
    "flow": {
        "delay": "Use flow.enqueue().",
        "apply_async": "Use flow.enqueue(); options go to the jobs: task.options(delay=...).job(...).",
        "set": "Options go to the jobs: task.options(delay=...).job(...).",
        "link": "Use chain(flow, next.partial()).",
        "link_error": "Use @app.dead_letter(queue).",
        "get": "Use flow.enqueue(), whose handle has result().",
    },
    "flow handle": {
        "get": "Use flow.result().",
        "join": "Use flow.result().",
        **dict.fromkeys(["ready", "successful", "completed_count"], _FLOW_STATE),
        "revoke": "Use flow.cancel().",
        "results": "Use flow.jobs, the handles of its jobs.",
    },
    "worker info": {
        "name": "Use worker.id, which begins with the name.",
        **dict.fromkeys(["state", "status"], "Use worker.dead, and worker.info['state']."),
        **dict.fromkeys(
            ["queues", "concurrency", "version"], "Use worker.info, a dict with all that it reports."
        ),
        "hostname": "Use worker.host.",
        "last_heartbeat": "Use worker.seen_at, or worker.age.",
    },
}
"""Attributes that objects of other queues have, by our kind of object, and what to use instead."""

MODULE: Final[Mapping[str, str]] = {
    "Celery": "Use App(url).",
    "current_task": "Use current_job().",
    "Ignore": "Return from the function, or raise Unrecoverable.",
    "Reject": "Raise Unrecoverable.",
    "signals": "Use @app.middleware, @app.after_execution, @app.on_start and @app.on_stop.",
    "shared_task": "Import your app, and use @app.task.",
    "get_task_logger": "Use logging.getLogger(__name__), or context.log(line) to keep a line with the job.",
    **dict.fromkeys(["task_prerun", "task_postrun"], "Use @app.middleware."),
    **dict.fromkeys(["task_success", "task_failure", "task_retry"], "Use @app.after_execution."),
    "task_revoked": "Use worker.on('cancelled', ...).",
    "before_task_publish": "Use @app.enqueue_middleware.",
    **dict.fromkeys(["worker_init", "worker_ready", "worker_process_init"], "Use @app.on_start."),
    "worker_shutdown": "Use @app.on_stop.",
    "crontab": "Use @app.scheduled(cron='30 7 * * mon') above @app.task.",
    "AsyncResult": "Use app.job(ref), with the ref of the handle that enqueue returned.",
    "GroupResult": _GROUP,
}
"""Names that users of other queues import, and what to use instead."""

_OUR_STORES: Final = (
    "Penstock keeps jobs in SQLite or on a Valkey or Redis server: sqlite:///jobs.db, valkey://host"
)
_MESSAGE_QUEUES: Final = ("amqp", "amqps", "pyamqp", "sqs", "kafka", "rpc")
_DATABASES: Final = ("mongodb", "sqla", "db+sqlite", "postgresql", "postgres", "mysql")
FOREIGN_STORES: Final[Mapping[str, str]] = {
    **dict.fromkeys((*_MESSAGE_QUEUES, *_DATABASES), _OUR_STORES),
    "redis+socket": "Use redis+unix:///path/of/the/socket",
}
"""Schemes of URLs that other queues take, and what to use instead."""

SAME_STATE: Final = _by_name({
    "waiting": "pending queued ready received",
    "scheduled": "delayed retrying",
    "blocked": "deferred",
    "active": "busy processing running started",
    "completed": "complete done finished succeeded success successful",
    "failed": "dead error errored failure",
    "cancelled": "aborted canceled revoked",
})  # fmt: skip
"""States of other queues, in lower case, and ours."""


def option_hint(name: str, known: Collection[str], of_jobs: Collection[str]) -> str:
    """Return what to write for an option of another queue; empty without a hint.

    ``known`` are the options accepted here, ``of_jobs`` those of ``task.options(...)``.
    """
    option = SAME_OPTION.get(name)
    if option == "url":
        return _ONE_STORE
    if option is None:
        if hint := OTHER_WAY.get(name):
            return hint
        return _setting_hint(name, known, of_jobs)
    if option in known:
        return f"Use {option!r} instead."
    if option == "include":
        return "Name the modules that define tasks: App(include=[...])."
    return f"Use task.options({option}=...)." if option in of_jobs else f"Use @app.task({option}=...)."


def _setting_hint(name: str, known: Collection[str], of_jobs: Collection[str]) -> str:
    """Return a hint for a setting of Celery, such as ``task_time_limit`` or ``worker_prefetch_multiplier``."""
    for prefix in ("task_", "worker_"):
        if name.startswith(prefix):
            option = name.removeprefix(prefix)
            if option in known:
                return f"Use {option!r} instead."
            worker = WORKER_OPTIONS.get(option, "") if prefix == "worker_" else ""
            return worker or option_hint(option, known, of_jobs)
    return ""


class Hinting:
    """A base class whose ``AttributeError`` says what to use instead of an attribute from another queue."""

    __slots__ = ()
    hints_for: ClassVar[Kind] = "task"

    if not TYPE_CHECKING:  # Type checkers would accept every attribute.

        def __getattr__(self, name: str) -> object:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if hint := ATTRIBUTES[type(self).hints_for].get(name):
                # Without the object, Python does not add the name of a similar attribute.
                raise AttributeError(f"{message}. {hint}", name=name, obj=None)
            raise AttributeError(message, name=name, obj=self)


class NotCalled:
    """A base class whose error for a call says what to use instead of ``task.signature(...)``."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __call__(self, *_: object, **__: object) -> NoReturn:
            raise TypeError(
                "a signature cannot be called. Use task.job(...), or task.partial(...) if a flow passes the first "
                "argument."
            )


def refuse_keywords(unknown: Mapping[str, object], hints: Mapping[str, str], *, where: str) -> None:
    """Raise ``TypeError`` for an unknown keyword argument of a method, with what to use instead."""
    for name in unknown:
        hint = hints.get(name)
        raise TypeError(f"{where} takes no argument {name!r}.{f' {hint}' if hint else ''}")
