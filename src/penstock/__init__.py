"""Penstock: a reliable job queue for Python whose data pipeline runs on Spark.

Begin with ``App``. ``penstock.errors`` has all errors and their tree. Names are imported when they are first used, so
that a command that only prints its help starts quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.causes import Reason
    from penstock.client.claim import Claim, ClaimedJob, Signal
    from penstock.client.codec import Serde, register_serde
    from penstock.client.flow import Dag, Flow, FlowHandle, FlowNode, chain, chord, group
    from penstock.client.handle import JobHandle
    from penstock.client.info import Child, JobInfo, WorkerInfo
    from penstock.client.middleware import EnqueueCall, EnqueueMiddleware, EnqueueNext
    from penstock.client.options import BatchOptions, CallOptions, DispatchOptions, JobOptions, TaskOptions
    from penstock.client.queue import Queue
    from penstock.client.schedules import SchedulerInfo
    from penstock.client.search import SearchPage
    from penstock.client.subscription import Subscription
    from penstock.client.task import Dispatch, FunctionTask, JobSpec, Task
    from penstock.core.dedup import Dedup
    from penstock.core.event import Event
    from penstock.core.flow import DeadLetter
    from penstock.core.job import Conflict, Enqueued
    from penstock.core.lifecycle import EventType, State
    from penstock.core.limits import Bucket, GroupState, Limit, Rate
    from penstock.core.names import content_id, uuid7
    from penstock.core.retry import Custom, Exponential, Fixed
    from penstock.errors import (
        CommandFailed,
        CostTooHigh,
        CpuLimitExceeded,
        EventsLost,
        InvalidInput,
        InvalidName,
        InvalidOption,
        JobCancelled,
        JobError,
        JobExpired,
        JobFailed,
        JobNotFound,
        LeaseLost,
        MemoryLimitExceeded,
        NotReplicated,
        PayloadTooLarge,
        PenstockError,
        RateLimited,
        ResultTimeout,
        Retry,
        SandboxCrashed,
        SandboxError,
        SerializationError,
        Snooze,
        StorageDamaged,
        StorageError,
        StorageFull,
        StorageReadOnly,
        StorageRefused,
        StorageReplaced,
        StorageUnavailable,
        StorageVersion,
        Suspend,
        UnknownTask,
        Unrecoverable,
        Verdict,
        WaitForChildren,
    )
    from penstock.storage.sqlite.backup import backup, restore
    from penstock.worker.context import JobContext, current_job
    from penstock.worker.middleware import AfterExecution, CallNext, Execution, Hook, Middleware
    from penstock.worker.options import WorkerOptions
    from penstock.worker.worker import Worker

__version__ = "0.1.0"

__all__ = [
    "AfterExecution",
    "App",
    "BatchOptions",
    "Bucket",
    "CallNext",
    "CallOptions",
    "Child",
    "Claim",
    "ClaimedJob",
    "CommandFailed",
    "Conflict",
    "CostTooHigh",
    "CpuLimitExceeded",
    "Custom",
    "Dag",
    "DeadLetter",
    "Dedup",
    "Dispatch",
    "DispatchOptions",
    "EnqueueCall",
    "EnqueueMiddleware",
    "EnqueueNext",
    "Enqueued",
    "Event",
    "EventType",
    "EventsLost",
    "Execution",
    "Exponential",
    "Fixed",
    "Flow",
    "FlowHandle",
    "FlowNode",
    "FunctionTask",
    "GroupState",
    "Hook",
    "InvalidInput",
    "InvalidName",
    "InvalidOption",
    "JobCancelled",
    "JobContext",
    "JobError",
    "JobExpired",
    "JobFailed",
    "JobHandle",
    "JobInfo",
    "JobNotFound",
    "JobOptions",
    "JobSpec",
    "LeaseLost",
    "Limit",
    "MemoryLimitExceeded",
    "Middleware",
    "NotReplicated",
    "PayloadTooLarge",
    "PenstockError",
    "Queue",
    "Rate",
    "RateLimited",
    "Reason",
    "ResultTimeout",
    "Retry",
    "SandboxCrashed",
    "SandboxError",
    "SchedulerInfo",
    "SearchPage",
    "Serde",
    "SerializationError",
    "Signal",
    "Snooze",
    "State",
    "StorageDamaged",
    "StorageError",
    "StorageFull",
    "StorageReadOnly",
    "StorageRefused",
    "StorageReplaced",
    "StorageUnavailable",
    "StorageVersion",
    "Subscription",
    "Suspend",
    "Task",
    "TaskOptions",
    "UnknownTask",
    "Unrecoverable",
    "Verdict",
    "WaitForChildren",
    "Worker",
    "WorkerInfo",
    "WorkerOptions",
    "__version__",
    "backup",
    "chain",
    "chord",
    "content_id",
    "current_job",
    "group",
    "register_serde",
    "restore",
    "uuid7",
]

_NAMES = {
    "penstock.client.app": "App",
    "penstock.client.claim": "Claim ClaimedJob Signal",
    "penstock.client.codec": "Serde register_serde",
    "penstock.client.flow": "Dag Flow FlowHandle FlowNode chain chord group",
    "penstock.client.handle": "JobHandle",
    "penstock.client.info": "Child JobInfo WorkerInfo",
    "penstock.client.middleware": "EnqueueCall EnqueueMiddleware EnqueueNext",
    "penstock.client.options": "BatchOptions CallOptions DispatchOptions JobOptions TaskOptions",
    "penstock.client.queue": "Queue",
    "penstock.client.schedules": "SchedulerInfo",
    "penstock.client.search": "SearchPage",
    "penstock.client.subscription": "Subscription",
    "penstock.client.task": "Dispatch FunctionTask JobSpec Task",
    "penstock.client.why": "Reason",
    "penstock.core.dedup": "Dedup",
    "penstock.core.event": "Event",
    "penstock.core.flow": "DeadLetter",
    "penstock.core.job": "Conflict Enqueued",
    "penstock.core.lifecycle": "EventType State",
    "penstock.core.limits": "Bucket GroupState Limit Rate",
    "penstock.core.names": "content_id uuid7",
    "penstock.core.retry": "Custom Exponential Fixed",
    "penstock.errors": (
        "CommandFailed CostTooHigh CpuLimitExceeded EventsLost InvalidInput InvalidName InvalidOption "
        "JobCancelled JobError JobExpired JobFailed JobNotFound LeaseLost MemoryLimitExceeded "
        "NotReplicated PayloadTooLarge PenstockError RateLimited ResultTimeout Retry SandboxCrashed "
        "SandboxError SerializationError Snooze StorageDamaged StorageError StorageFull StorageReadOnly "
        "StorageRefused StorageReplaced StorageUnavailable StorageVersion Suspend UnknownTask "
        "Unrecoverable Verdict WaitForChildren"
    ),
    "penstock.storage.sqlite.backup": "backup restore",
    "penstock.worker.context": "JobContext current_job",
    "penstock.worker.middleware": "AfterExecution CallNext Execution Hook Middleware",
    "penstock.worker.options": "WorkerOptions",
    "penstock.worker.worker": "Worker",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    from importlib import import_module
    from importlib.util import find_spec

    if name in _HOMES:
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    from penstock.client.hints import MODULE

    if name in MODULE:
        # An import statement would replace the message of an AttributeError.
        raise ImportError(f"{__name__} has no {name!r}. {MODULE[name]}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
