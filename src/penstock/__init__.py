"""Penstock: a reliable job queue for Python whose data pipeline runs on Spark.

Begin with ``App``. ``penstock.errors`` has all errors and their tree. Names are imported when they are first used, so
that a command that only prints its help starts quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.client.app import App as App
    from penstock.client.causes import Reason as Reason
    from penstock.client.claim import Claim as Claim, ClaimedJob as ClaimedJob, Signal as Signal
    from penstock.client.codec import Serde as Serde, register_serde as register_serde
    from penstock.client.flow import Dag as Dag, Flow as Flow, chain as chain, chord as chord, group as group
    from penstock.client.flow.handle import FlowHandle as FlowHandle, FlowNode as FlowNode
    from penstock.client.handle import JobHandle as JobHandle
    from penstock.client.info import Child as Child, JobInfo as JobInfo, WorkerInfo as WorkerInfo
    from penstock.client.middleware import (
        EnqueueCall as EnqueueCall,
        EnqueueMiddleware as EnqueueMiddleware,
        EnqueueNext as EnqueueNext,
        SyncMiddleware as SyncMiddleware,
    )
    from penstock.client.options import (
        BatchOptions as BatchOptions,
        CallOptions as CallOptions,
        DispatchOptions as DispatchOptions,
        JobOptions as JobOptions,
        TaskOptions as TaskOptions,
    )
    from penstock.client.queue import Queue as Queue
    from penstock.client.rules import Unique as Unique
    from penstock.client.schedules import SchedulerInfo as SchedulerInfo
    from penstock.client.search import SearchPage as SearchPage
    from penstock.client.steps import StepInfo as StepInfo
    from penstock.client.subscription import Subscription as Subscription
    from penstock.client.task import (
        Dispatch as Dispatch,
        FunctionTask as FunctionTask,
        JobSpec as JobSpec,
        Task as Task,
    )
    from penstock.core.event import Event as Event
    from penstock.core.flow import DeadLetter as DeadLetter
    from penstock.core.job import Conflict as Conflict, Dedup as Dedup, Enqueued as Enqueued
    from penstock.core.lifecycle import EventType as EventType, State as State
    from penstock.core.limits import Bucket as Bucket, GroupState as GroupState, Limit as Limit, Rate as Rate
    from penstock.core.names import content_id as content_id, uuid7 as uuid7
    from penstock.core.retry import Custom as Custom, Exponential as Exponential, Fixed as Fixed
    from penstock.errors import *
    from penstock.storage.sqlite.backup import backup as backup, restore as restore
    from penstock.worker.context import JobContext as JobContext, current_job as current_job
    from penstock.worker.middleware import (
        AfterExecution as AfterExecution,
        CallNext as CallNext,
        Execution as Execution,
        Hook as Hook,
        Middleware as Middleware,
    )
    from penstock.worker.options import WorkerOptions as WorkerOptions
    from penstock.worker.worker import Worker as Worker

__version__ = "0.1.0"

_NAMES = {
    "penstock.client.app": "App",
    "penstock.client.causes": "Reason",
    "penstock.client.claim": "Claim ClaimedJob Signal",
    "penstock.client.codec": "Serde register_serde",
    "penstock.client.flow": "Dag Flow chain chord group",
    "penstock.client.flow.handle": "FlowHandle FlowNode",
    "penstock.client.handle": "JobHandle",
    "penstock.client.info": "Child JobInfo WorkerInfo",
    "penstock.client.middleware": "EnqueueCall EnqueueMiddleware EnqueueNext SyncMiddleware",
    "penstock.client.options": "BatchOptions CallOptions DispatchOptions JobOptions TaskOptions",
    "penstock.client.queue": "Queue",
    "penstock.client.rules": "Unique",
    "penstock.client.schedules": "SchedulerInfo",
    "penstock.client.search": "SearchPage",
    "penstock.client.steps": "StepInfo",
    "penstock.client.subscription": "Subscription",
    "penstock.client.task": "Dispatch FunctionTask JobSpec Task",
    "penstock.core.event": "Event",
    "penstock.core.flow": "DeadLetter",
    "penstock.core.job": "Conflict Dedup Enqueued",
    "penstock.core.lifecycle": "EventType State",
    "penstock.core.limits": "Bucket GroupState Limit Rate",
    "penstock.core.names": "content_id uuid7",
    "penstock.core.retry": "Custom Exponential Fixed",
    "penstock.errors": (
        "ArchiveTorn BadKey BadRow CommandFailed CostTooHigh CpuLimitExceeded Directive EventsLost "
        "FleetFailed InvalidInput InvalidName InvalidOption JobCancelled JobError JobExists JobExpired "
        "JobFailed JobNotFound LeaseLost MemoryLimitExceeded NotReplicated OutputBusy OutputLost "
        "PayloadTooLarge PenstockError RateLimited ResultTimeout Retry SandboxCrashed SandboxError "
        "SerializationError Snooze StepError StepFailed StorageDamaged StorageError StorageFull "
        "StorageReadOnly StorageRefused StorageReplaced StorageUnavailable StorageVersion Suspend Suspension "
        "TooManyFailures UnknownTask Unrecoverable WaitForChildren"
    ),
    "penstock.storage.sqlite.backup": "backup restore",
    "penstock.worker.context": "JobContext current_job",
    "penstock.worker.middleware": "AfterExecution CallNext Execution Hook Middleware",
    "penstock.worker.options": "WorkerOptions",
    "penstock.worker.worker": "Worker",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
if not TYPE_CHECKING:  # Type checkers read it from the imports above.
    __all__ = sorted([*_HOMES, "__version__"])


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
