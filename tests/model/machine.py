"""A state machine that makes the same calls to an engine and to the model, and compares what can be seen.

Calls with a ticket are now and then made again: at once, as after a lost reply, or later.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.flow import Node, link_nodes
from penstock.core.job import Conflict, Dependency, Extras, Job, Lease, NewJob, Policy
from penstock.core.lifecycle import State
from penstock.core.limits import Limit
from penstock.core.step import NewStep
from penstock.errors import JobNotFound, StorageError
from penstock.storage.contract import Storage
from penstock.storage.values import (
    Change,
    Claimed,
    Held,
    NewScheduler,
    QueueSettings,
    Report,
    Settlement,
    Take,
    Ticket,
    Unchanged,
)
from tests.model import strategies as draw
from tests.model.model import Model
from tests.model.sight import Sight
from tests.model.strategies import CLOCKS, GROUPS, IDS, KEYS, UNIT

__all__ = ["Machine"]

LISTENERS = ("ear", "eye")
OPERATING = ("cancel", "retry", "promote", "remove")
QUEUE_VERBS = ("pause", "resume", "sweep", "retry_all", "drain", "clean", "configure", "obliterate")
repeats = st.sampled_from(["", "", "ticket", "lost"])
active = precondition(lambda self: self.model.in_state(State.ACTIVE))
claimed_before = precondition(lambda self: self.leases)


class Machine(RuleBasedStateMachine):
    """``storage`` and ``runner`` are set by a subclass; every example has a queue of its own."""

    storage: ClassVar[Storage]
    runner: ClassVar[asyncio.Runner]

    @initialize()
    def start(self) -> None:
        self.queue = f"q{uuid.uuid4().hex}"
        self.model = Model()
        self.model.now = 100 * UNIT  # 0 means never, and the clock may be set back
        self.leases: list[Held] = []
        self.repeatable: tuple[Callable[[], Awaitable[Any]], Callable[[], Any]] | None = None
        self.tickets = 0
        self.flows = 0
        self.read = 0
        self.do(self.storage.configure(self.queue, QueueSettings()))
        self.model.configure(QueueSettings())
        first = self.do(self.storage.read_events(self.queue, after=0)).events[0]
        self.sight, self.model_sight = Sight(first.at_ms), Sight(self.model.now)

    # The way of a job

    @rule(jobs=st.lists(draw.new_jobs(), min_size=1, max_size=4), repeat=repeats)
    def enqueue(self, jobs: list[NewJob], repeat: str) -> None:
        ours = [self.sight.placed(job) for job in jobs]
        theirs = [self.model_sight.placed(job) for job in jobs]
        self.ticketed(
            lambda ticket: self.storage.enqueue(self.queue, ours, ticket=ticket),
            lambda ticket: self.model.enqueue(theirs, ticket),
            repeat,
        )

    @rule(
        data=st.data(),
        jobs=st.lists(draw.new_jobs(), min_size=1, max_size=4),
        take=draw.takes,
        between=st.sampled_from(["", "again", "again", "again and not", "cancel", "time"]),
    )
    def work_off(self, data: st.DataObject, jobs: list[NewJob], take: Take, between: str) -> None:
        """Several verbs in a sensible order: picked one by one they seldom get a job to its end."""
        self.same(self.storage.resume(self.queue), self.model.resume)
        self.enqueue(jobs, "")
        self.claim(take, "")
        if not self.model.in_state(State.ACTIVE):
            return
        match between:
            case "again":
                self.dispatch_again_what_is_active(data, "")
            case "again and not":
                self.dispatch_again_what_is_active(data, "")
                ids = [record.id for record in self.model.in_state(State.ACTIVE)]
                self.same(
                    self.storage.cancel(self.queue, ids, rerun_only=True),
                    lambda: self.model.cancel_rerun(ids),
                )
            case "cancel":
                ids = [record.id for record in self.model.in_state(State.ACTIVE)][:1]
                self.same(self.storage.cancel(self.queue, ids), lambda: self.model.cancel(ids))
            case "time":
                self.let_time_pass(1, data.draw(st.sampled_from(["sweep", ""])))
            case _:
                pass
        self.settle(data, None, "")
        self.operate(data, data.draw(st.sampled_from(OPERATING)))

    @active
    @rule(data=st.data(), repeat=repeats)
    def dispatch_again_what_is_active(self, data: st.DataObject, repeat: str) -> None:
        active = [record.id for record in self.model.in_state(State.ACTIVE)]
        self.enqueue(data.draw(st.lists(draw.redispatches(active), min_size=1, max_size=2)), repeat)

    @rule(job=draw.new_jobs())
    def enqueue_unchecked(self, job: NewJob) -> None:
        known = self.model.records.get(job.id)
        if known is not None and (known.waiters or known.slot or known.extras):
            return  # whom a broken promise leaves waiting is not for the contract to say
        job = msgspec.structs.replace(job, unchecked=True)
        ours, theirs = self.sight.placed(job), self.model_sight.placed(job)
        self.same(self.storage.enqueue(self.queue, [ours]), lambda: self.model.enqueue([theirs]))

    @rule(
        data=st.data(),
        consumer=st.sampled_from(["", *draw.CONSUMERS]),
        is_right=st.lists(st.booleans(), min_size=3, max_size=3),
    )
    def remove_what_is_unchanged(self, data: st.DataObject, consumer: str, is_right: list[bool]) -> None:
        """Of jobs as they are, and of such as are not any more."""
        ids = data.draw(st.lists(self.known_ids(), min_size=1, max_size=3))
        seen = {job.id: job for job in self.do(self.storage.get(self.queue, ids)) if job}
        ours, theirs = [], []
        for id, wrong in zip(ids, map(int, is_right), strict=False):
            job, record = seen.get(id), self.model.records.get(id)
            ours.append(
                Unchanged(id, job.incarnation + wrong if job else 1, job.finished_at_ms if job else 1)
            )
            at = record.finished_at if record else 1
            theirs.append(Unchanged(id, record.incarnation + wrong if record else 1, at))
        self.same(
            self.storage.remove_unchanged(self.queue, ours, consumer=consumer),
            lambda: self.model.remove_unchanged(theirs, consumer),
        )

    @rule(jobs=st.lists(draw.staged_jobs(), min_size=1, max_size=4), repeat=repeats)
    def stage(self, jobs: list[NewJob], repeat: str) -> None:
        self.ticketed(
            lambda ticket: self.storage.enqueue(self.queue, jobs, ticket=ticket),
            lambda ticket: self.model.enqueue(jobs, ticket),
            repeat,
        )

    @precondition(lambda self: any(record.is_staged for record in self.model.records.values()))
    @rule(write_id=st.sampled_from(draw.WRITES), discard=st.sampled_from([False, False, True]))
    def unstage(self, write_id: str, discard: bool) -> None:
        self.same(
            _done(self.storage.unstage(self.queue, write_id, discard=discard)),
            lambda: self.model.unstage(write_id, discard=discard),
        )

    @rule(key=st.sampled_from(KEYS), clear=st.booleans())
    def ask_for_a_dedup_key(self, key: str, clear: bool) -> None:
        self.same(self.storage.dedup_of(self.queue, key), lambda: self.model.dedup_of(key))
        if clear:
            self.same(self.storage.clear_dedup(self.queue, key), lambda: self.model.clear_dedup(key))

    @rule(new=draw.schedulers)
    def put_scheduler(self, new: NewScheduler) -> None:
        clock = self.model.clocks.get(new.name)
        if clock is not None and clock.new.repeat_ms != new.repeat_ms:
            # Who keeps the next slot keeps the rule it comes from.
            new = msgspec.structs.replace(new, keep_next=False)
        ours, theirs = self.sight.put(new), self.model_sight.put(new)
        self.same(self.storage.put_scheduler(self.queue, ours), lambda: self.model.put_scheduler(theirs))

    @precondition(lambda self: self.model.clocks)
    @rule(
        name=st.sampled_from(CLOCKS), job=draw.new_jobs(), next_ms=draw.instants, is_right=st.integers(0, 9)
    )
    def fire(self, name: str, job: NewJob, next_ms: int, is_right: int) -> None:
        """Mostly the slot that is next: the others must change nothing."""
        clock = self.model.clocks.get(name)
        repeats = clock is not None and clock.new.repeat_ms is not None
        job = msgspec.structs.replace(job, extras=Extras(scheduler=name, repeats=repeats))
        ours, theirs = self.sight.placed(job), self.model_sight.placed(job)
        known = self.do(self.storage.schedulers(self.queue, [name])).schedulers
        slot = (known[0].next_ms if known else 1) + (is_right == 0)
        model_slot = (clock.next if clock else 1) + (is_right == 0)
        self.same(
            self.storage.fire(self.queue, name, slot_ms=slot, next_ms=self.sight.instant(next_ms), job=ours),
            lambda: self.model.fire(name, model_slot, self.model_sight.instant(next_ms), theirs),
        )

    @precondition(lambda self: self.model.clocks)
    @rule(
        name=st.sampled_from(CLOCKS),
        verb=st.sampled_from(["pause", "resume", "remove"]),
        next_ms=draw.instants,
    )
    def operate_a_scheduler(self, name: str, verb: str, next_ms: int) -> None:
        if verb != "resume":
            call = getattr(self.storage, f"{verb}_scheduler")(self.queue, name)
            self.same(call, lambda: getattr(self.model, f"{verb}_scheduler")(name))
            return
        ours, theirs = self.sight.instant(next_ms), self.model_sight.instant(next_ms)
        self.same(
            self.storage.resume_scheduler(self.queue, name, next_ms=ours or None),
            lambda: self.model.resume_scheduler(name, theirs or None),
        )

    @rule(data=st.data(), jobs=st.lists(draw.new_jobs(), min_size=1, max_size=3), repeat=repeats)
    def enqueue_behind_others(self, data: st.DataObject, jobs: list[NewJob], repeat: str) -> None:
        """Some of the jobs wait for others, which are there, or come first in the same call, or are not there."""
        tied = [self.behind(job, data.draw(draw.after)) for job in jobs]
        ours = [self.sight.placed(self.here(job)) for job in tied]
        theirs = [self.model_sight.placed(job) for job in tied]
        self.ticketed(
            lambda ticket: _none_if(JobNotFound, self.storage.enqueue(self.queue, ours, ticket=ticket)),
            lambda ticket: self.model.enqueue(theirs, ticket),
            repeat,
        )

    @rule(data=st.data(), size=st.integers(2, 4))
    def enqueue_a_flow(self, data: st.DataObject, size: int) -> None:
        """Each node waits for some of those behind it, and perhaps for a job that is there."""
        jobs = data.draw(
            st.lists(draw.new_jobs(), min_size=size, max_size=size, unique_by=lambda job: job.id)
        )
        flow, nodes = self.new_flow(), []
        for n, job in enumerate(jobs):
            later = [other.id for other in jobs[n + 1 :]]
            ids = data.draw(st.lists(st.sampled_from([*later, *IDS]), max_size=2)) if later else []
            earlier = {other.id for other in jobs[: n + 1]}
            after = tuple(Dependency("", id, "fail") for id in ids if id not in earlier)
            nodes.append(Node("", msgspec.structs.replace(job, after=after, dedup=None)))
        tied = [node.job for node in link_nodes(nodes, flow=flow)]
        ours = [self.sight.placed(self.here(job)) for job in tied]
        theirs = [self.model_sight.placed(job) for job in tied]
        flows = [[Node(self.queue, job) for job in ours]]
        self.same(
            _none_if(JobNotFound, self.storage.enqueue_flows(self.queue, flows)),
            lambda: self.model.enqueue_flow(theirs),
        )

    @rule(data=st.data(), after=draw.after, new=st.none() | draw.new_jobs())
    def attach(self, data: st.DataObject, after: list[Dependency], new: NewJob | None) -> None:
        id, flow = data.draw(self.known_ids()), self.new_flow()
        nodes = [msgspec.structs.replace(new, dedup=None)] if new is not None and new.id != id else []
        after = [one for one in after if one.id != id] + [Dependency("", job.id) for job in nodes]
        ours = [Node(self.queue, self.sight.placed(job)) for job in nodes]
        theirs = [self.model_sight.placed(job) for job in nodes]
        there = [one._replace(queue=self.queue) for one in after]
        self.same(
            _none_if(JobNotFound, self.storage.attach(self.queue, id, there, nodes=ours, flow=flow)),
            lambda: self.model.attach(id, after, theirs, flow),
        )

    @rule(
        data=st.data(),
        policy=st.sampled_from(["fail", "ignore", "wait"]),
        jobs=st.lists(draw.new_jobs(), min_size=2, max_size=3, unique_by=lambda job: job.id),
        between=st.sampled_from(["", "attach", "time", "operate"]),
    )
    def run_a_flow(self, data: st.DataObject, policy: Policy, jobs: list[NewJob], between: str) -> None:
        """Several verbs in a sensible order: parents that have a chance to be unblocked."""
        self.same(self.storage.resume(self.queue), self.model.resume)
        *children, parent = [msgspec.structs.replace(job, conflict=Conflict(), write_id="") for job in jobs]
        self.enqueue([msgspec.structs.replace(job, delay_ms=0, run_at_ms=None) for job in children], "")
        tied = self.behind(parent, [Dependency("", job.id, policy) for job in children])
        self.same(
            _none_if(JobNotFound, self.storage.enqueue(self.queue, [self.sight.placed(self.here(tied))])),
            lambda: self.model.enqueue([self.model_sight.placed(tied)]),
        )
        for _ in range(2):
            self.claim(Take("ada", 10, 3 * UNIT), "")
            match between:
                case "attach":
                    self.attach(data, data.draw(draw.after), None)
                case "time":
                    self.let_time_pass(1, "sweep")
                case "operate":
                    self.operate(data, data.draw(st.sampled_from(OPERATING)))
                case _:
                    pass
            self.settle_all(data)

    def settle_all(self, data: st.DataObject) -> None:
        held = [Held(record.id, record.token) for record in self.model.in_state(State.ACTIVE)]
        items = [Settlement(*one, data.draw(draw.outcomes_of_flows)) for one in held]
        if items:
            self.same(self.storage.settle(self.queue, items), lambda: self.model.settle(items))

    def new_flow(self) -> str:
        self.flows += 1
        return f"flow-{self.flows}"

    def behind(self, job: NewJob, after: list[Dependency]) -> NewJob:
        others = tuple(one for one in after if one.id != job.id)
        extras = Extras(flow=self.new_flow(), has_dependencies=True) if others else None
        return msgspec.structs.replace(job, after=others, extras=extras)

    def here(self, job: NewJob) -> NewJob:
        """The job as the engine gets it: with the queue's name where the model needs none."""
        extras = job.extras
        if extras is not None and extras.dependents:
            extras = msgspec.structs.replace(
                extras, dependents=[one._replace(queue=self.queue) for one in extras.dependents]
            )
        after = tuple(one._replace(queue=self.queue) for one in job.after)
        return msgspec.structs.replace(job, after=after, extras=extras)

    @rule(take=draw.takes, repeat=repeats)
    def claim(self, take: Take, repeat: str) -> None:
        claimed = self.ticketed(
            lambda ticket: self.storage.claim(self.queue, take, ticket=ticket),
            lambda ticket: self.model.claim(take, ticket),
            repeat,
        )
        self.remember(claimed)

    @claimed_before
    @rule(data=st.data(), take=st.none() | draw.takes, repeat=repeats)
    def settle(self, data: st.DataObject, take: Take | None, repeat: str) -> None:
        held = data.draw(self.some_leases())
        items = [Settlement(id, token, data.draw(draw.outcomes)) for id, token in held]
        batch = self.ticketed(
            lambda ticket: self.storage.settle(self.queue, items, take=take, ticket=ticket),
            lambda ticket: self.model.settle(items, take, ticket),
            repeat,
        )
        if batch.claimed:
            self.remember(batch.claimed)

    @active
    @rule(data=st.data(), repeat=repeats)
    def settle_what_is_held(self, data: st.DataObject, repeat: str) -> None:
        self.settle(data, None, repeat)

    @claimed_before
    @rule(data=st.data(), lease_ms=draw.units(1, 2))
    def extend(self, data: st.DataObject, lease_ms: int) -> None:
        held = data.draw(self.some_leases())
        self.same(
            self.storage.extend(self.queue, held, worker="ada", lease_ms=lease_ms),
            lambda: self.model.extend(held, lease_ms),
        )

    @claimed_before
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        parts = (draw.progress, draw.lines, draw.new_payloads)
        reports = [
            data.draw(st.builds(Report, st.just(id), st.just(token), *parts))
            for id, token in data.draw(self.some_leases())
        ]
        self.same(self.storage.report(self.queue, reports), lambda: self.model.report(reports))

    @claimed_before
    @rule(data=st.data(), lease_ms=st.just(0) | draw.units(1, 2))
    def record_steps(self, data: st.DataObject, lease_ms: int) -> None:
        held = data.draw(self.some_leases())
        steps = [
            NewStep(id, token, *data.draw(draw.steps), delay_ms=data.draw(draw.units(0, 2)))
            for id, token in held
        ]
        self.same(
            self.storage.record_steps(self.queue, steps, lease_ms=lease_ms),
            lambda: self.model.record_steps(steps, lease_ms),
        )

    @rule(data=st.data(), name=st.sampled_from(draw.STEPS), reset=st.booleans())
    def read_or_reset_steps(self, data: st.DataObject, name: str, reset: bool) -> None:
        id = data.draw(self.known_ids())
        self.same(self.storage.steps(self.queue, id), lambda: self.model.steps(id))
        if reset:
            self.same(self.storage.reset_step(self.queue, id, name), lambda: self.model.reset_step(id, name))

    @rule(data=st.data(), before=st.sampled_from(["load", "charge"]))
    def copy_steps(self, data: st.DataObject, before: str) -> None:
        id, to = data.draw(self.known_ids()), data.draw(self.known_ids())
        self.same(
            self.storage.copy_steps(self.queue, id, to, before=before),
            lambda: self.model.copy_steps(id, to, before),
        )

    @rule(count=st.integers(1, 3), then=st.sampled_from(["sweep", "sweep", ""]))
    def let_time_pass(self, count: int, then: str) -> None:
        self.do(self.storage.shift_clock(self.queue, count * UNIT))
        self.model.now += count * UNIT
        self.repeatable = None  # tickets are known for a minute
        if then == "sweep":
            self.same(self.storage.sweep(self.queue), self.model.sweep)

    @rule(wrong=st.integers(1, 3))
    def set_the_clock_back_or_put_it_right(self, wrong: int) -> None:
        """What a jump forward means differs: SQLite has another clock to go by. See tests/contract/test_clock.py."""
        ahead = 0 if self.model.ahead else wrong * UNIT
        self.same(
            self.storage.sweep(self.queue), self.model.sweep
        )  # leases that ran out would get another term
        self.do(self.storage.shift_clock(self.queue, self.model.ahead - ahead, jump=True))
        self.model.set_clock(ahead)
        self.same(self.storage.sweep(self.queue), self.model.sweep)

    @precondition(lambda self: self.repeatable is not None)
    @rule()
    def repeat_the_last_ticket(self) -> None:
        assert self.repeatable is not None
        call, expected = self.repeatable
        self.same(call(), expected)

    # Operating

    @rule(ids=st.lists(st.sampled_from(IDS), min_size=1, max_size=2), listener=draw.listeners)
    def watch(self, ids: list[str], listener: str) -> None:
        self.same(
            _none_if(JobNotFound, self.storage.watch(self.queue, ids, listener=listener)),
            lambda: self.model.watch(ids, listener),
        )

    @rule(data=st.data(), verb=st.sampled_from(OPERATING))
    def operate(self, data: st.DataObject, verb: str) -> None:
        ids = data.draw(st.lists(self.known_ids(), min_size=1, max_size=3))
        self.same(getattr(self.storage, verb)(self.queue, ids), lambda: getattr(self.model, verb)(ids))

    @rule(data=st.data(), name=draw.signals, what=st.sampled_from([b"", b"\xff\x00"]))
    def signal(self, data: st.DataObject, name: str, what: bytes) -> None:
        suspended = [record.id for record in self.model.in_state(State.BLOCKED)]
        id = data.draw(st.sampled_from([*suspended, *suspended, *self.model.records, "nobody"]))
        self.same(self.storage.signal(self.queue, id, name, what), lambda: self.model.signal(id, name, what))

    @rule(data=st.data(), consumer=st.sampled_from(draw.CONSUMERS), ttl_ms=st.none() | draw.units(1, 4))
    def hold_or_release(self, data: st.DataObject, consumer: str, ttl_ms: int | None) -> None:
        ids = data.draw(st.lists(self.known_ids(), min_size=1, max_size=3))
        storage, model, queue = self.storage, self.model, self.queue
        if ttl_ms is None:
            self.same(storage.release(queue, consumer, ids), lambda: model.release(consumer, ids))
        else:
            self.same(
                storage.hold(queue, consumer, ids, ttl_ms=ttl_ms), lambda: model.hold(consumer, ids, ttl_ms)
            )

    @rule(data=st.data(), change=draw.changes)
    def change(self, data: st.DataObject, change: Change) -> None:
        id = data.draw(self.known_ids())
        self.same(self.storage.change(self.queue, id, change), lambda: self.model.change(id, change))

    @rule(data=st.data(), verb=st.sampled_from(QUEUE_VERBS))
    def use_queue_verb(self, data: st.DataObject, verb: str) -> None:
        storage, model, queue = self.storage, self.model, self.queue
        match verb:
            case "pause" | "resume":
                self.same(getattr(storage, verb)(queue), getattr(model, verb))
            case "sweep":
                self.same(storage.sweep(queue), model.sweep)
            case "retry_all":
                self.same(_done(storage.retry_all(queue)), model.retry_all)
            case "drain":
                scheduled = data.draw(st.booleans())
                self.same(
                    _done(storage.drain(queue, scheduled=scheduled)), lambda: model.drain(scheduled=scheduled)
                )
            case "clean":
                state, age_ms = data.draw(st.tuples(draw.terminal_states, draw.units(0, 1)))
                self.same(
                    _done(storage.clean(queue, state, older_than_ms=age_ms)),
                    lambda: model.clean(state, age_ms),
                )
            case "configure":
                settings = data.draw(draw.settings)
                self.same(storage.configure(queue, settings), lambda: model.configure(settings))
            case _:
                self.obliterate(force=data.draw(st.booleans()))

    @rule(key=st.sampled_from([*GROUPS, *GROUPS, "*"]), limit=draw.limits)
    def limit_groups(self, key: str, limit: Limit | None) -> None:
        self.same(self.storage.limit(self.queue, key, limit), lambda: self.model.limit(key, limit))

    @rule(limit=draw.queue_limits)
    def limit_the_queue(self, limit: Limit | None) -> None:
        self.same(self.storage.limit(self.queue, "", limit), lambda: self.model.limit("", limit))

    @rule(key=st.sampled_from(GROUPS), paused=st.booleans())
    def pause_a_group(self, key: str, paused: bool) -> None:
        verb = self.storage.pause if paused else self.storage.resume
        self.same(verb(self.queue, group=key), lambda: self.model.pause_group(key, paused))

    @rule(key=st.sampled_from(("", *GROUPS)), duration_ms=st.sampled_from([UNIT, 2 * UNIT, 4 * UNIT]))
    def pause_for_a_time(self, key: str, duration_ms: int) -> None:
        call = self.storage.pause(self.queue, group=key, duration_ms=duration_ms)
        self.same(call, lambda: self.model.pause_for(key, duration_ms))

    def obliterate(self, force: bool) -> None:
        self.repeatable = None
        self.same(
            _none_if(StorageError, self.storage.obliterate(self.queue, force=force)),
            lambda: self.model.obliterate(force=force),
        )

    # What must hold after every call

    @invariant()
    def the_log_says_the_same(self) -> None:
        page = self.do(self.storage.read_events(self.queue, after=self.read))
        expected = self.model.events[self.read :]
        assert [event.seq for event in page.events] == list(range(self.read + 1, len(self.model.events) + 1))
        for event, happened in zip(page.events, expected, strict=True):
            assert self.sight.happened(event, with_token=bool(happened.token)) == happened
        self.read = page.next

    @invariant()
    def the_jobs_are_the_same_in_the_same_order(self) -> None:
        counts = self.do(self.storage.counts(self.queue))
        listed: list[Job] = []
        for state in State:
            if not getattr(counts, state) and not self.model.in_state(state):
                continue
            staged = counts.staged if state is State.SCHEDULED else 0
            jobs = self.do(self.storage.list_jobs(self.queue, state)).jobs
            seen, wanted = [job.id for job in jobs], [record.id for record in self.model.in_state(state)]
            assert seen == wanted, f"{state}: the engine has {seen}, the model {wanted}"
            assert getattr(counts, state) + staged == len(jobs)
            assert staged == sum(job.is_staged for job in jobs)
            listed += jobs
        assert len({job.id for job in listed}) == len(listed), "an id in two states"
        for job in listed:
            ours, theirs = self.sight.job(job), self.model_sight.record(self.model.records[job.id])
            assert ours == theirs, f"the engine has {ours}, the model {theirs}"
        for job in self.do(self.storage.get(self.queue, IDS)):
            assert job is None or job in listed, f"got {job}, listed {listed}"

    @invariant()
    def the_groups_are_the_same(self) -> None:
        self.same(self.storage.groups(self.queue), self.model.list_groups)
        self.same(self.storage.groups(self.queue, keys=[""]), lambda: self.model.read_groups(""))

    @invariant()
    def the_schedulers_are_the_same(self) -> None:
        if self.model.clocks:
            seen = self.sight.answer(self.do(self.storage.schedulers(self.queue)))
            wanted = self.model_sight.answer(self.model.all_schedulers())
            assert seen == wanted, f"the engine has {seen}, the model {wanted}"

    @invariant()
    def the_same_jobs_are_held(self) -> None:
        for consumer in draw.CONSUMERS:
            page = self.do(self.storage.held(self.queue, consumer))
            assert [job.id for job in page.jobs] == self.model.held(consumer)

    @invariant()
    def the_same_errors_are_counted(self) -> None:
        failures = [record.failure for record in self.model.in_state(State.FAILED)]
        expected = Counter(failure.type for failure in failures if failure)
        assert self.do(self.storage.errors(self.queue)) == expected

    @invariant()
    def who_waits_knows_the_same(self) -> None:
        for record in self.model.records.values():
            if record.entries:
                edges = self.sight.edges(self.do(self.storage.dependencies(self.queue, record.id)))
                entries = self.model_sight.entries(record)
                assert edges == entries, f"{record.id}: the engine has {edges}, the model {entries}"

    @invariant()
    def the_news_are_the_same(self) -> None:
        for listener in LISTENERS:
            expected = self.model.news.pop(listener, [])
            heard: list[Any] = []
            while len(heard) < len(expected):
                news = self.do(self.storage.listen(self.queue, listener, timeout_ms=5000))
                assert news, f"{listener} was not told all of {expected}, only {heard}"
                heard += news
            ours, theirs = self.sight.news(heard), self.model_sight.news(expected)
            assert ours == theirs, f"{listener} was told {ours}, not {theirs}"

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            checked = self.do(self.storage.check(self.queue))
            assert not any(checked.problems.values()), checked
            for listener in LISTENERS:
                assert self.do(self.storage.listen(self.queue, listener, timeout_ms=1)) == []

    # How calls are made and compared

    def do(self, call: Awaitable[Any]) -> Any:
        return self.runner.run(_awaited(call))

    def same(self, call: Awaitable[Any], expected: Callable[[], Any]) -> Any:
        """Make the call to both, a millisecond after the one before; compare the answers."""
        self.do(self.storage.shift_clock(self.queue, 1))
        self.model.now += 1
        answer = self.do(call)
        seen, wanted = self.sight.answer(answer), self.model_sight.answer(expected())
        self.model.forget_instants()
        assert seen == wanted, f"the engine says {seen}, the model {wanted}"
        return answer

    def ticketed(
        self,
        call: Callable[[Ticket | None], Awaitable[Any]],
        expected: Callable[[Ticket | None], Any],
        repeat: str,
    ) -> Any:
        if not repeat:
            return self.same(call(None), lambda: expected(None))
        self.tickets += 1
        ticket = Ticket("stream", self.tickets)
        self.repeatable = (lambda: call(ticket), lambda: expected(ticket))
        answer = self.same(call(ticket), lambda: expected(ticket))
        if repeat == "lost":  # the caller saw no answer, and asks again
            answer = self.same(call(ticket), lambda: expected(ticket))
        return answer

    def remember(self, claimed: Claimed) -> None:
        for lease in claimed.leases:
            assert isinstance(lease, Lease)
            self.leases.append(Held(lease.id, lease.token))
        active = [held for held in self.leases if self.model._held(*held)]
        assert len({held.id for held in active}) == len(active), "an id active twice"

    def known_ids(self) -> st.SearchStrategy[str]:
        return st.sampled_from([*self.model.records, *self.model.records, "nobody"])

    def some_leases(self) -> st.SearchStrategy[list[Held]]:
        """Mostly such as are held; the others, lost long ago, must change nothing."""
        held = [Held(record.id, record.token) for record in self.model.in_state(State.ACTIVE)]
        known = [*held, *held, *held, *self.leases[-5:], Held("a", 999_999)]
        return st.lists(st.sampled_from(known), min_size=1 if held else 0, max_size=3)


async def _awaited(call: Awaitable[Any]) -> Any:
    return await call


async def _done(call: Awaitable[Any]) -> int:
    bulk = await call
    assert bulk.cursor == ""
    return int(bulk.done)


async def _none_if(error: type[Exception], call: Awaitable[Any]) -> Any:
    try:
        return await call
    except error:
        return None
