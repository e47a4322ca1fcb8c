"""The independent check of a storm: ledgers, calls, records, results, event log, counts and ``check()`` must agree.

It knows the plan (``plan.py``), the files (``journal.py``) and the table of transitions. It only reads from the store,
and shares no code with the engines that wrote it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from penstock.core.job import Job
from penstock.core.lifecycle import OPEN, State
from penstock.storage.contract import Storage
from tests.storm.history import Claim, History
from tests.storm.journal import Answer, Call, read_answers, read_calls, read_faults, sessions
from tests.storm.plan import LEASE_S, QUEUES, Planned, number_of, planned

SHOWN = 5
"""Examples to print of each kind of violation."""

ENQUEUES_LOST = frozenset({"job lost", "job queued twice", "wrong answer", "job never ended"})
CLAIMS_LOST = frozenset({"call without a claim", "epoch changed"})
"""Kinds that a failover by a crash explains: asynchronous replication may lose writes that were acknowledged. A store
that waits for a replica (``?replicas=1``) may lose claims, but no accepted job."""


@dataclass
class Verdict:
    """Everything the checker found. ``lost`` are the violations that a lossy failover explains."""

    violations: dict[str, list[str]] = field(default_factory=dict)
    lost: dict[str, list[str]] = field(default_factory=dict)
    figures: Counter[str] = field(default_factory=Counter)

    @property
    def holds(self) -> bool:
        return not self.violations

    def lines(self) -> Iterator[str]:
        for title, found in (("VIOLATION", self.violations), ("lost by failover", self.lost)):
            for kind, details in sorted(found.items()):
                yield f"{title}: {kind} ({len(details)})"
                yield from (f"    {detail}" for detail in details[:SHOWN])


async def check_storm(
    storage: Storage,
    folder: Path,
    *,
    jobs: int,
    excused: frozenset[str] = frozenset(),
    calm: bool = False,
) -> Verdict:
    """Compare everything there is. ``excused`` are the kinds that a failover explains. ``calm``: only processes were
    disturbed, so a worker that was not killed or suspended keeps its finished jobs, as long as it reaches the store."""
    checker = _Checker(storage, folder, jobs=jobs, excused=excused, calm=calm)
    await checker.run()
    return checker.verdict


def longest_silence_ms(times_ms: Iterable[int], first_ms: int, last_ms: int) -> int:
    """Return the longest time without any of these between two moments."""
    within = sorted(at for at in times_ms if first_ms < at < last_ms)
    return max(later - earlier for earlier, later in pairwise([first_ms, *within, last_ms]))


class _Checker:
    def __init__(
        self, storage: Storage, folder: Path, *, jobs: int, excused: frozenset[str], calm: bool
    ) -> None:
        self.verdict = Verdict()
        self._storage = storage
        self._folder = folder
        self._jobs = jobs
        self._excused = excused
        self._calm = calm
        self._robbed: set[str] = set()
        self._stops_ms: dict[str, int] = {}
        self._writes: dict[str, list[int]] = {}
        self._repeated: list[tuple[Call, Claim]] = []
        self._treatment = self._read_treatment()

    async def run(self) -> None:
        answers = self._read_ledgers()
        ids: set[str] = set()
        for queue in QUEUES:
            found = await self._scan(queue)
            ids |= found.keys()
            await self._check_counts(queue, found)
            history = await self._read_log(queue)
            self._check_records(found, history)
            self._check_calls(queue, history)
        self._check_repeated()
        self._check_ledger(answers, ids)
        self._check_processes()
        killed = {worker for worker in self._robbed if self._treatment.get(worker) == "killed"}
        self.verdict.figures["killed while they held jobs"] = len(killed)

    def found(self, kind: str, detail: str) -> None:
        place = self.verdict.lost if kind in self._excused else self.verdict.violations
        place.setdefault(kind, []).append(detail)

    # The ledger

    def _read_ledgers(self) -> list[Answer]:
        answers = [
            answer for path in sorted((self._folder / "ledgers").glob("*")) for answer in read_answers(path)
        ]
        self.verdict.figures["accepted"] = len(
            {answer.id for answer in answers if answer.answered == answer.id}
        )
        self.verdict.figures["deduplicated"] = sum(answer.answered != answer.id for answer in answers)
        self.verdict.figures["asked again"] = sum(answer.again for answer in answers)
        return answers

    def _check_ledger(self, answers: list[Answer], ids: set[str]) -> None:
        queued = Counter(answer.id for answer in answers if answer.status == "queued")
        for id, times in queued.items():
            if times > 1:
                self.found("job queued twice", f"{id}: answered 'queued' {times} times")
        for answer in answers:
            n = number_of(answer.answered)
            if answer.answered not in ids:
                self.found("job lost", f"{answer.answered}: answered {answer.status!r}, has no record")
            elif answer.again and answer.status not in ("duplicate", "completed"):
                self.found("wrong answer", f"{answer.id}: known, but answered {answer.status!r}")
            elif n is None or answer.result not in ("-", str(planned(n).result)):
                self.found("wrong answer", f"{answer.id}: answered with the result {answer.result}")

    # Records and results

    async def _scan(self, queue: str) -> dict[str, Job]:
        found: dict[str, Job] = {}
        cursor = ""
        while True:
            page = await self._storage.scan_jobs(queue, cursor=cursor)
            found |= {job.id: job for job in page.jobs}
            cursor = page.cursor
            if not cursor:
                return found

    async def _check_counts(self, queue: str, records: dict[str, Job]) -> None:
        counts = await self._storage.counts(queue)
        states = Counter(job.state for job in records.values())
        for state in State:
            if getattr(counts, state) != states[state]:
                self.found(
                    "wrong counts", f"{queue}: {state} {getattr(counts, state)}, records {states[state]}"
                )
        checked = await self._storage.check(queue)
        for problem, times in checked.problems.items():
            self.found("check() complains", f"{queue}: {problem} {times} times")

    def _check_records(self, records: dict[str, Job], history: History) -> None:
        for id, job in records.items():
            n = number_of(id)
            if n is None or n >= self._jobs + 20 or planned(n).queue != job.queue:
                self.found("unknown job", f"{id} in {job.queue}")
                continue
            self._check_end(planned(n), job)
            self._check_against_log(job, history)
        for id in history.trails.keys() - records.keys():
            self.found("record missing", f"{id}: the log has it, {history.queue} does not")

    def _check_end(self, plan: Planned, job: Job) -> None:
        expected = State.FAILED if plan.result is None else State.COMPLETED
        if job.state in OPEN:
            self.found("job never ended", f"{job.id} is {job.state} {job.blocked_by}")
        elif job.state is not expected:
            self.found("wrong end", f"{job.id} is {job.state}, not {expected}: {job.failure}")
        elif job.state is State.COMPLETED and job.result != str(plan.result).encode():
            self.found("wrong result", f"{job.id}: {job.result!r}, expected {plan.result}")

    def _check_against_log(self, job: Job, history: History) -> None:
        trail = history.trails.get(job.id)
        if trail is None:
            self.found("no enqueue event", job.id)
            return
        logged = (trail.state, len(trail.claims), trail.failures, trail.stalls)
        stored = (job.state, job.runs, job.failures, job.stalls)
        if logged != stored:
            self.found("log and record differ", f"{job.id}: log {logged}, record {stored}")

    # The log

    async def _read_log(self, queue: str) -> History:
        history = History(queue, self.found)
        after = 0
        while True:
            page = await self._storage.read_events(queue, after=after)
            history.read(page)
            if page.next in (after, page.last):
                break
            after = page.next
        history.close()
        self.verdict.figures += history.figures
        for worker, times in history.writes.items():
            self._writes.setdefault(worker, []).extend(times)
        self._robbed |= {claim.worker for claim in history.claims.values() if claim.end == "stalled"}
        return history

    # Calls

    def _check_calls(self, queue: str, history: History) -> None:
        called: dict[int, Call] = {}
        ends: Counter[str] = Counter()
        for call in read_calls(self._folder, queue):
            ends["calls"] += 1
            ends["calls cut off"] += not call.ended_ns
            claim = history.claims.get(call.token)
            if claim is None or claim.id != call.id or (claim.run, claim.worker) != (call.run, call.session):
                self.found("call without a claim", f"{call}; claim {claim}")
            elif call.token in called:
                self.found("call repeated", f"{call.id}: two calls under token {call.token}")
            else:
                called[call.token] = call
                self._check_outcome(call, claim, ends)
            self._check_late(call, history)
        self._check_claims(called, history)
        self.verdict.figures += ends

    def _check_outcome(self, call: Call, claim: Claim, ends: Counter[str]) -> None:
        settled = {"completed": "completed", "failed": "failed", "retrying": "failed", "snoozed": "snoozed"}
        expected = settled.get(claim.end)
        if expected is not None:
            if call.outcome != expected:
                self.found("outcome differs", f"{call}; the log says {claim.end}")
        elif call.outcome in settled.values():
            self._repeated.append((call, claim))

    def _check_repeated(self) -> None:
        """A finished call is repeated only if its worker was killed or suspended, or could not reach the store for half
        a lease: on a machine that is too busy, it waits that long for the write lock of a SQLite file."""
        all_writes = [at for times in self._writes.values() for at in times]
        for call, claim in self._repeated:
            treatment = self._treatment.get(call.session, "left alone")
            kind, writes = "lease lost by a live worker", self._writes.get(call.session, [])
            if treatment == "stopped" and claim.ended_ms >= self._stops_ms[call.session]:
                kind, writes = "stop repeats finished work", all_writes  # It has nothing else to write.
            if treatment in ("stopped", "left alone"):
                silence_ms = longest_silence_ms(writes, _wall_ms(call.ended_ns), claim.ended_ms)
                if silence_ms >= LEASE_S * 500:
                    treatment = "out of reach"
                elif self._calm:
                    self.found(
                        kind, f"{call}; the log says {claim.end}, at most {silence_ms} ms without a write"
                    )
            self.verdict.figures[f"finished calls repeated ({treatment})"] += 1

    def _check_late(self, call: Call, history: History) -> None:
        """A job is not called under a newer token once it has completed."""
        trail = history.trails.get(call.id)
        if trail is not None and trail.completed_token and call.token > trail.completed_token:
            self.found("call repeated", f"{call.id}: called after it completed, {call}")

    def _check_claims(self, called: dict[int, Call], history: History) -> None:
        for trail in history.trails.values():
            before: tuple[Call, Claim] | None = None
            for token in trail.claims:
                claim, call = history.claims[token], called.get(token)
                if call is None:
                    if claim.end not in ("stalled", "released"):
                        self.found("settled without a call", f"{claim}")
                    continue
                if before is not None:
                    self._check_apart(*before, call)
                before = (call, claim)

    def _check_apart(self, earlier: Call, claim: Claim, later: Call) -> None:
        """A settled run ends before the next begins. Only a rescue or a release may have two run at a time."""
        if claim.end not in ("stalled", "released") and later.begun_ns < earlier.ended_ns:
            self.found("ran in two places", f"{earlier}; {later}")

    # Processes

    def _read_treatment(self) -> dict[str, str]:
        """The worst that happened to each worker session, and when it was stopped."""
        begun = sorted(sessions(self._folder), key=lambda session: session.begun_ns)
        met: dict[str, dict[str, int]] = {session.worker: {} for session in begun}
        for fault in read_faults(self._folder):
            same = [session for session in begun if (session.name, session.pid) == (fault.name, fault.pid)]
            alive = [session for session in same if session.begun_ns <= fault.at_ns]
            if same:  # The newest that has begun, or the first if it was only starting.
                met[(alive or same[:1])[-1].worker][fault.kind] = fault.at_ns
        treatment = {}
        for worker, faults in met.items():
            self._stops_ms[worker] = _wall_ms(faults.get("stop", 0))
            for kind, word in (("kill", "killed"), ("pause", "paused"), ("stop", "stopped")):
                if kind in faults:
                    treatment[worker] = word
                    break
        return treatment

    def _check_processes(self) -> None:
        for fault in read_faults(self._folder):
            if fault.kind in ("stop hung", "died by itself", "cannot start", "not drained", "fault failed"):
                self.found(fault.kind, f"{fault.name} ({fault.pid}): {fault.detail}")


def _wall_ms(at_ns: int) -> int:
    """Return the wall time of a moment of the monotonic clock."""
    return (at_ns + time.time_ns() - time.monotonic_ns()) // 1_000_000
