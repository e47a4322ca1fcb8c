"""Jobs that depend on others: in one queue, and across queues."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from penstock.core.flow import NOTHING_TO_WAIT_FOR, DependencyRecord, Node, link_nodes
from penstock.core.job import Dependency, Extras, Lease, NewJob, Options, Policy
from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import Await, Cancel, Complete, Fail, Failure, Release, Snooze
from penstock.errors import JobNotFound
from penstock.storage.values import Change, Settlement
from tests.contract.factories import BOOM, LEASE_MS, MINUTE_MS, Bench, Seen, redispatch

E, S = EventType, State


def after(bench: Bench, *ids: str, policy: Policy = "fail", flow: str = "flow") -> dict[str, Any]:
    return {
        "after": tuple(Dependency(bench.queue, id, policy) for id in ids),
        "extras": Extras(flow=flow, has_dependencies=True),
    }


async def put_flow(bench: Bench, *nodes: Node, flow: str = "flow") -> Any:
    [answer] = await bench.storage.enqueue_flows(bench.queue, [link_nodes(nodes, flow=flow)])
    await settle_down(bench)
    return answer


async def settle_down(*benches: Bench) -> None:
    """Everything is delivered, whoever was to do it."""
    for bench in benches:
        await bench.storage.sweep(bench.queue)


async def edges(bench: Bench, id: str = "parent") -> list[DependencyRecord]:
    return await bench.storage.dependencies(bench.queue, id)


async def ends(bench: Bench, id: str, *, fail: bool = False) -> None:
    """Claims the next job, which must be this one, and ends it."""
    lease = await bench.claim()
    assert lease.id == id
    await bench.settle(lease, Fail(BOOM, final=True) if fail else Complete(id.encode()))


def other(bench: Bench, name: str = "other") -> Bench:
    return Bench(bench.storage, f"{bench.queue}-{name}")


# One queue


async def test_a_job_is_blocked_until_all_it_waits_for_have_completed(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("b")
    answer = await bench.put("parent", **after(bench, "a", "b"))
    assert (answer.status, answer.state) == ("queued", S.BLOCKED)
    assert (await bench.job("parent")).blocked_by == "children"
    await ends(bench, "a")
    assert await bench.state("parent") is S.BLOCKED
    await bench.events()
    await ends(bench, "b")
    assert (await bench.seen())[1:] == [
        Seen(E.COMPLETED, "b", "completed"),
        Seen(E.UNBLOCKED, "parent", "waiting"),
    ]
    assert [(edge.id, edge.state, edge.result) for edge in await edges(bench)] == [
        ("a", "completed", b"a"),
        ("b", "completed", b"b"),
    ]
    job = await bench.job("parent")
    assert (job.state, job.blocked_by) == (S.WAITING, "")
    await ends(bench, "parent")


async def test_a_dependency_that_completed_earlier_counts_immediately_with_its_result(bench: Bench) -> None:
    await bench.bring(S.COMPLETED, "a")
    answer = await bench.put("parent", **after(bench, "a"))
    assert answer.state is S.WAITING
    [edge] = await edges(bench)
    assert (edge.state, edge.result) == ("completed", b"result")


async def test_a_long_result_is_copied_in_full(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("parent", **after(bench, "a"))
    lease = await bench.claim()
    await bench.settle(lease, Complete(b"x" * 100_000))
    [edge] = await edges(bench)
    assert edge.result == b"x" * 100_000
    await bench.put("late", **after(bench, "a"))
    assert (await edges(bench, "late"))[0].result == b"x" * 100_000


async def test_waiting_for_an_unknown_job_is_refused_and_writes_nothing(bench: Bench) -> None:
    before = await bench.picture()
    with pytest.raises(JobNotFound, match="nobody"):
        await bench.put_all([bench.new("fine"), bench.new("parent", **after(bench, "nobody"))])
    assert await bench.picture() == before
    await bench.bring(S.COMPLETED, "gone", result_ttl_ms=1000)
    await bench.shift(2000)
    with pytest.raises(JobNotFound, match="gone"):
        await bench.put("parent", **after(bench, "gone"))


async def test_a_job_may_wait_for_one_that_came_before_it_in_the_same_call(bench: Bench) -> None:
    await bench.put_all([bench.new("a"), bench.new("parent", **after(bench, "a"))])
    assert await bench.state("parent") is S.BLOCKED
    await ends(bench, "a")
    await ends(bench, "parent")


@pytest.mark.parametrize("how", ["fail", "cancel", "remove", "expire"])
async def test_a_dependency_that_ends_badly_fails_its_dependent_with_the_reason(
    bench: Bench, how: str
) -> None:
    await bench.put("a", ttl_ms=MINUTE_MS)
    await bench.put("parent", **after(bench, "a"))
    match how:
        case "fail":
            await ends(bench, "a", fail=True)
            reason, state = "failed: Boom: it went off", "failed"
        case "cancel":
            await bench.storage.cancel(bench.queue, ["a"])
            reason, state = "was cancelled", "cancelled"
        case "remove":
            await bench.storage.remove(bench.queue, ["a"])
            reason, state = "was removed", "removed"
        case _:
            await bench.shift(2 * MINUTE_MS)
            await bench.storage.sweep(bench.queue)
            reason, state = "failed: Expired: ", "failed"
    job = await bench.job("parent")
    assert job.state is S.FAILED
    assert job.failure is not None
    assert job.failure.type == "DependencyFailed"
    assert job.failure.message.startswith(f"dependency {bench.queue}/a {reason}")
    assert (await edges(bench))[0].state == state
    event = (await bench.events())[-1]
    assert (event.type, event.id, event.state) == (E.FAILED, "parent", "failed")
    assert (event.error_type, event.error) == ("DependencyFailed", job.failure.message)


async def test_a_failure_climbs_to_the_top_and_names_its_first_cause(bench: Bench) -> None:
    await bench.put("a")
    for child, parent in (("a", "b"), ("b", "c"), ("c", "d")):
        await bench.put(parent, **after(bench, child))
    await ends(bench, "a", fail=True)
    for id in "bcd":
        failure = (await bench.job(id)).failure
        assert failure is not None
        assert failure.message == f"dependency {bench.queue}/a failed: Boom: it went off"
    assert [seen.id for seen in (await bench.seen())[-4:]] == ["a", "b", "c", "d"]


async def test_a_long_chain_fails_to_its_end(bench: Bench) -> None:
    count = 3000
    await bench.put("0")
    await bench.put_all([bench.new(f"{n}", **after(bench, f"{n - 1}")) for n in range(1, count)])
    await ends(bench, "0", fail=True)
    assert await bench.counts() == {S.FAILED: count}


async def test_an_ignored_failure_counts_and_is_shown(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("parent", **after(bench, "a", policy="ignore"))
    await ends(bench, "a", fail=True)
    assert await bench.state("parent") is S.WAITING
    [edge] = await edges(bench)
    assert (edge.state, edge.failure) == ("failed", Failure("Boom", "it went off"))


async def test_a_parent_that_waits_goes_on_when_the_failed_child_was_retried(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("parent", **after(bench, "a", policy="wait"))
    await ends(bench, "a", fail=True)
    assert await bench.state("parent") is S.BLOCKED
    assert (await edges(bench))[0].state == "failed"
    await bench.storage.retry(bench.queue, ["a"])
    await ends(bench, "a")
    assert await bench.state("parent") is S.WAITING
    assert (await edges(bench))[0].result == b"a"


@pytest.mark.parametrize("how", ["remove", "clean", "prune", "replace", "at once"])
async def test_a_waiting_parent_fails_when_its_failed_child_is_removed(bench: Bench, how: str) -> None:
    await bench.put("a", failure_ttl_ms=0 if how == "at once" else MINUTE_MS)
    await bench.put("parent", **after(bench, "a", policy="wait"))
    await ends(bench, "a", fail=True)
    match how:
        case "remove":
            await bench.storage.remove(bench.queue, ["a"])
        case "clean":
            await bench.storage.clean(bench.queue, S.FAILED)
        case "prune":
            await bench.shift(2 * MINUTE_MS)
            await bench.storage.sweep(bench.queue)
        case "replace":
            await bench.put("a")
        case _:
            pass
    job = await bench.job("parent")
    assert job.failure is not None
    assert job.failure.message == f"dependency {bench.queue}/a was removed"


async def test_linking_to_one_that_failed_before_goes_by_the_policy(bench: Bench) -> None:
    await bench.bring(S.FAILED, "a")
    await bench.events()
    policies: list[Policy] = ["fail", "ignore", "wait"]
    states = [(await bench.put(policy, **after(bench, "a", policy=policy))).state for policy in policies]
    assert states == [S.FAILED, S.WAITING, S.BLOCKED]
    assert (await bench.seen())[:2] == [Seen(E.ENQUEUED, "fail", "waiting"), Seen(E.FAILED, "fail", "failed")]
    await bench.storage.retry(bench.queue, ["a"])
    await ends(bench, "ignore")
    await ends(bench, "a")
    assert await bench.state("wait") is S.WAITING


async def test_its_own_time_counts_when_it_is_unblocked(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("parent", delay_ms=MINUTE_MS, **after(bench, "a"))
    assert await bench.state("parent") is S.BLOCKED
    await ends(bench, "a")
    assert await bench.state("parent") is S.SCHEDULED
    assert (await bench.seen())[-1] == Seen(E.UNBLOCKED, "parent", "scheduled")
    await bench.shift(2 * MINUTE_MS)
    await ends(bench, "parent")


async def test_a_new_time_for_a_blocked_job_counts_when_it_is_unblocked(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("parent", **after(bench, "a"))
    await bench.put("parent", delay_ms=MINUTE_MS, conflict=redispatch())
    assert await bench.state("parent") is S.BLOCKED
    await ends(bench, "a")
    assert await bench.state("parent") is S.SCHEDULED


async def test_a_blocked_parent_expires_is_cancelled_and_is_removed_like_any_other(bench: Bench) -> None:
    await bench.put("a")
    for id in ("expires", "cancelled", "removed"):
        await bench.put(id, ttl_ms=MINUTE_MS if id == "expires" else 0, **after(bench, "a"))
    await bench.storage.cancel(bench.queue, ["cancelled"])
    await bench.storage.remove(bench.queue, ["removed"])
    await bench.shift(2 * MINUTE_MS)
    await bench.storage.sweep(bench.queue)
    await ends(bench, "a")
    assert await bench.state("expires") is S.FAILED
    assert await bench.state("cancelled") is S.CANCELLED
    assert await bench.state("removed") is None
    assert await edges(bench, "removed") == []
    assert (await edges(bench, "expires"))[0].state == "completed"


async def test_the_end_of_an_earlier_lifes_child_is_not_heard(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("b")
    await bench.put("parent", **after(bench, "a", flow="first"))
    await bench.storage.cancel(bench.queue, ["parent"])
    await bench.put("parent", **after(bench, "b", flow="second"))
    await ends(bench, "a")
    assert await bench.state("parent") is S.BLOCKED
    await ends(bench, "b")
    assert await bench.state("parent") is S.WAITING


async def test_one_job_may_have_many_dependents(bench: Bench) -> None:
    await bench.put("a")
    await bench.put_all([bench.new(f"{n:03}", **after(bench, "a")) for n in range(200)])
    await ends(bench, "a")
    assert await bench.ids(S.WAITING) == [f"{n:03}" for n in range(200)]


async def test_a_dependency_that_is_named_twice_stands_where_it_was_named_first(bench: Bench) -> None:
    for id in "ab":
        await bench.put(id)
    await bench.put("parent", **after(bench, "a", "b", "a"))
    assert [edge.id for edge in await edges(bench)] == ["a", "b"]


async def test_retry_waits_again_for_what_did_not_complete(bench: Bench) -> None:
    for id in "abc":
        await bench.put(id)
    await bench.put("parent", **after(bench, *"abc"))
    await ends(bench, "a")
    await ends(bench, "b", fail=True)
    assert await bench.state("parent") is S.FAILED
    assert await bench.storage.retry(bench.queue, ["b", "parent"]) == ["retried", "retried"]
    assert [edge.state for edge in await edges(bench)] == ["completed", "pending", "pending"]
    assert await bench.state("parent") is S.BLOCKED
    await ends(bench, "c")
    await ends(bench, "b")
    assert await bench.state("parent") is S.WAITING
    assert (await bench.job("parent")).failure is None


async def test_retry_of_a_parent_alone_fails_again(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("parent", **after(bench, "a"))
    await ends(bench, "a", fail=True)
    await bench.events()
    assert await bench.storage.retry(bench.queue, ["parent"]) == ["retried"]
    assert await bench.seen() == [Seen(E.RETRIED, "parent", "waiting"), Seen(E.FAILED, "parent", "failed")]


async def test_retry_all_brings_a_whole_flow_back(bench: Bench) -> None:
    await bench.put("a", failure_ttl_ms=MINUTE_MS)
    await bench.put("parent", failure_ttl_ms=2 * MINUTE_MS, **after(bench, "a"))
    await ends(bench, "a", fail=True)
    assert (await bench.storage.retry_all(bench.queue)).done == 2
    await ends(bench, "a")
    await ends(bench, "parent")


@pytest.mark.parametrize("limit", [1, 2, 100])
async def test_retry_all_brings_a_flow_back_though_the_dependents_come_first(
    bench: Bench, limit: int
) -> None:
    await bench.put("d")
    await bench.put("c", **after(bench, "d"))
    await bench.put("b", **after(bench, "d"))
    await bench.put("a", **after(bench, "b", "c"))
    await ends(bench, "d", fail=True)
    assert await bench.ids(S.FAILED) == ["a", "b", "c", "d"]
    await bench.events()
    done, cursor = 0, ""
    while not done or cursor:
        bulk = await bench.storage.retry_all(bench.queue, limit=limit, cursor=cursor)
        done, cursor = done + bulk.done, bulk.cursor
    assert done == 4
    assert await bench.seen() == [
        Seen(E.RETRIED, "d", "waiting"),
        Seen(E.RETRIED, "b", "blocked"),
        Seen(E.RETRIED, "c", "blocked"),
        Seen(E.RETRIED, "a", "blocked"),
    ]
    for id in "dcba":
        await ends(bench, id)


async def test_retry_all_leaves_alone_what_was_cancelled_so_its_dependents_fail_again_once(
    bench: Bench,
) -> None:
    await bench.put("b")
    await bench.put("a", **after(bench, "b"))
    await bench.storage.cancel(bench.queue, ["b"])
    await bench.events()
    done, cursor, calls = 0, "", 0
    while calls == 0 or cursor:
        bulk = await bench.storage.retry_all(bench.queue, limit=1, cursor=cursor)
        done, cursor, calls = done + bulk.done, bulk.cursor, calls + 1
        assert calls < 9, "retry_all does not end"
    assert done == 1
    assert await bench.seen() == [Seen(E.RETRIED, "a", "waiting"), Seen(E.FAILED, "a", "failed")]


async def test_retry_of_a_dependent_before_its_dependency_is_retry_of_both(bench: Bench) -> None:
    await bench.put("c")
    await bench.put("b", **after(bench, "c"))
    await bench.put("a", **after(bench, "b"))
    await bench.storage.cancel(bench.queue, ["c"])
    await bench.events()
    answers = await bench.storage.retry(bench.queue, ["a", "nobody", "b", "c", "c"])
    assert answers == ["retried", "not_found", "retried", "retried", "not_failed"]
    assert await bench.seen() == [
        Seen(E.RETRIED, "c", "waiting"),
        Seen(E.RETRIED, "b", "blocked"),
        Seen(E.RETRIED, "a", "blocked"),
    ]


async def test_retry_does_not_go_on_to_what_it_does_not_name(bench: Bench) -> None:
    await bench.put("c")
    await bench.put("b", **after(bench, "c"))
    await bench.put("a", **after(bench, "b"))
    await bench.storage.cancel(bench.queue, ["c"])
    assert await bench.storage.retry(bench.queue, ["a", "c"]) == ["retried", "retried"]
    assert await bench.counts() == {S.FAILED: 2, S.WAITING: 1}


async def test_a_long_chain_is_retried_whole(bench: Bench) -> None:
    ids = [f"{n:04}" for n in range(1200, 0, -1)]
    await bench.put(ids[0])
    await bench.put_all([bench.new(id, **after(bench, before)) for before, id in pairwise(ids)])
    await ends(bench, ids[0], fail=True)
    assert (await bench.storage.retry_all(bench.queue, limit=10)).done == 1200
    assert await bench.counts() == {S.BLOCKED: 1199, S.WAITING: 1}


async def test_a_rerun_of_a_child_notifies_its_parent_only_once(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("parent", **after(bench, "a"))
    lease = await bench.claim()
    await bench.put("a", conflict=redispatch())
    await bench.settle(lease, Complete(b"first"))
    assert await bench.state("parent") is S.WAITING
    lease = await bench.claim()
    assert lease.id == "parent"
    await ends(bench, "a", fail=True)
    assert await bench.state("parent") is S.ACTIVE
    assert (await edges(bench))[0].result == b"first"
    await bench.settle(lease, Snooze(0))
    assert await bench.state("parent") is S.WAITING


async def test_dependencies_are_paged_in_the_order_they_were_given(bench: Bench) -> None:
    ids = [f"{(n * 37) % 101:03}" for n in range(101)]
    await bench.put_all([bench.new(id) for id in ids])
    await bench.put("parent", **after(bench, *ids))
    found: list[str] = []
    while page := await bench.storage.dependencies(bench.queue, "parent", start=len(found), limit=40):
        found += [edge.id for edge in page]
    assert found == ids
    assert await bench.storage.dependencies(bench.queue, "nobody") == []


async def test_a_dependency_named_twice_is_one(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("parent", **after(bench, "a", "a"))
    await ends(bench, "a")
    assert await bench.state("parent") is S.WAITING
    assert len(await edges(bench)) == 1


async def test_what_hangs_on_a_flow_goes_with_its_records(bench: Bench) -> None:
    await bench.put("a", result_ttl_ms=1000)
    await bench.put("parent", result_ttl_ms=1000, **after(bench, "a"))
    await ends(bench, "a")
    await ends(bench, "parent")
    await bench.shift(5000)
    await bench.storage.sweep(bench.queue)
    assert await edges(bench) == []
    assert not any((await bench.storage.check(bench.queue)).problems.values())


async def test_obliterate_leaves_nothing_of_a_flow(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("parent", **after(bench, "a"))
    assert await bench.storage.obliterate(bench.queue) == 2
    assert await edges(bench) == []
    await bench.put("a")
    await bench.put("parent", **after(bench, "a", flow="second"))
    await ends(bench, "a")
    assert await bench.state("parent") is S.WAITING


# Whole flows


def tree(bench: Bench, child: Bench, grandchild: Bench) -> list[Node]:
    """A root with two children, the first of which has a child of its own."""
    return [
        Node(
            bench.queue,
            NewJob("root", after=(Dependency(child.queue, "one"), Dependency(child.queue, "two"))),
        ),
        Node(child.queue, NewJob("one", after=(Dependency(grandchild.queue, "leaf"),))),
        Node(child.queue, NewJob("two")),
        Node(grandchild.queue, NewJob("leaf")),
    ]


@pytest.mark.parametrize("spread", ["one queue", "two queues", "three queues"])
async def test_a_flow_runs_from_its_leaves_to_its_root(bench: Bench, spread: str) -> None:
    child = bench if spread == "one queue" else other(bench, "child")
    leaf = bench if spread != "three queues" else other(bench, "leaf")
    benches = (bench, child, leaf)
    answer = await put_flow(bench, *tree(*benches))
    assert (answer.id, answer.status, answer.state) == ("root", "queued", S.BLOCKED)
    order: list[str] = []
    for _ in range(4):
        for each in benches:
            for lease in await each.claim_all():
                order.append(lease.id)
                await each.settle(lease, Complete(lease.id.encode()))
        await settle_down(*benches)
    assert sorted(order) == ["leaf", "one", "root", "two"]
    assert order[-1] == "root"
    assert order.index("leaf") < order.index("one")
    assert [edge.result for edge in await edges(bench, "root")] == [b"one", b"two"]
    assert [edge.result for edge in await edges(child, "one")] == [b"leaf"]


async def test_a_failure_crosses_queues_up_to_the_root(bench: Bench) -> None:
    child, leaf = other(bench, "child"), other(bench, "leaf")
    await put_flow(bench, *tree(bench, child, leaf))
    await settle_down(bench, child, leaf)
    await ends(leaf, "leaf", fail=True)
    await settle_down(leaf, child, bench)
    failure = (await bench.job("root")).failure
    assert failure is not None
    assert failure.message == f"dependency {leaf.queue}/leaf failed: Boom: it went off"
    assert (await child.job("one")).failure == failure


async def test_a_flow_whose_root_exists_is_not_enqueued_again(bench: Bench) -> None:
    child = other(bench)
    nodes = [
        Node(bench.queue, NewJob("root", after=(Dependency(child.queue, "a"),))),
        Node(child.queue, NewJob("a")),
    ]
    await put_flow(bench, *nodes, flow="first")
    await ends(child, "a")
    await settle_down(child)
    again = await put_flow(bench, *nodes, flow="second")
    assert (again.status, again.state) == ("duplicate", S.WAITING)
    assert (await child.job("a")).state is S.COMPLETED
    await ends(bench, "root")
    assert (await put_flow(bench, *nodes, flow="third")).status == "completed"


@pytest.mark.parametrize("state", [S.WAITING, S.ACTIVE, S.SCHEDULED])
@pytest.mark.parametrize("where", ["here", "there"])
async def test_a_child_that_is_there_and_open_is_waited_for(bench: Bench, state: State, where: str) -> None:
    child = bench if where == "here" else other(bench)
    lease = await child.bring(state, "a")
    await put_flow(
        bench,
        Node(bench.queue, NewJob("root", after=(Dependency(child.queue, "a"),))),
        Node(child.queue, NewJob("a", b"not this one")),
    )
    assert (await child.job("a")).payload == b""
    if state is S.SCHEDULED:
        await child.storage.promote(child.queue, ["a"])
    lease = lease or await child.claim()
    await child.settle(lease, Complete(b"once"))
    await settle_down(child)
    assert [edge.result for edge in await edges(bench, "root")] == [b"once"]
    assert await bench.state("root") is S.WAITING


@pytest.mark.parametrize("where", ["here", "there"])
async def test_a_child_that_completed_earlier_counts_immediately(bench: Bench, where: str) -> None:
    child = bench if where == "here" else other(bench)
    await child.bring(S.COMPLETED, "a")
    await put_flow(
        bench,
        Node(bench.queue, NewJob("root", after=(Dependency(child.queue, "a"),))),
        Node(child.queue, NewJob("a")),
    )
    assert await bench.state("root") is S.WAITING
    assert [edge.result for edge in await edges(bench, "root")] == [b"result"]


async def test_a_job_may_wait_for_one_in_another_queue(bench: Bench) -> None:
    child = other(bench)
    await child.put("a")
    await bench.put("parent", **after(child, "a"))
    await settle_down(bench)
    await ends(child, "a")
    await settle_down(child)
    assert await bench.state("parent") is S.WAITING


async def test_an_unknown_job_of_another_queue_fails_its_dependents(bench: Bench) -> None:
    child = other(bench)
    await bench.put("parent", **after(child, "nobody"))
    await settle_down(bench)
    job = await bench.job("parent")
    assert job.failure is not None
    assert job.failure.message == f"dependency {child.queue}/nobody is not known"
    [edge] = await edges(bench)
    assert edge.state == "removed"
    assert edge.failure is not None
    assert edge.failure.type == "DependencyNotFound"


async def test_a_flow_that_waits_for_an_unknown_job_of_its_own_queue_is_refused(bench: Bench) -> None:
    child = other(bench)
    before = await bench.picture()
    with pytest.raises(JobNotFound, match="nobody"):
        await put_flow(
            bench,
            Node(
                bench.queue,
                NewJob("root", after=(Dependency(child.queue, "a"), Dependency(bench.queue, "nobody"))),
            ),
            Node(child.queue, NewJob("a")),
        )
    assert await bench.picture() == before
    assert await child.find("a") is None


async def test_a_diamond_runs_its_tip_once(bench: Bench) -> None:
    left, right = other(bench, "left"), other(bench, "right")
    await put_flow(
        bench,
        Node(bench.queue, NewJob("join", after=(Dependency(left.queue, "l"), Dependency(right.queue, "r")))),
        Node(left.queue, NewJob("l", after=(Dependency(bench.queue, "tip"),))),
        Node(right.queue, NewJob("r", after=(Dependency(bench.queue, "tip"),))),
        Node(bench.queue, NewJob("tip")),
    )
    await ends(bench, "tip")
    await settle_down(bench)
    await ends(left, "l")
    await settle_down(left)
    assert await bench.state("join") is S.BLOCKED
    await ends(right, "r")
    await settle_down(right)
    await ends(bench, "join")
    assert [seen.type for seen in await bench.seen()].count(E.UNBLOCKED) == 1


async def test_many_flows_are_enqueued_with_one_call(bench: Bench) -> None:
    child = other(bench)
    flows = [
        link_nodes(
            [
                Node(bench.queue, NewJob(f"root-{n}", after=(Dependency(child.queue, f"leaf-{n}"),))),
                Node(child.queue, NewJob(f"leaf-{n}", f"{n}".encode(), Options(task="leaf"))),
            ],
            flow=f"flow-{n}",
        )
        for n in range(50)
    ]
    answers = await bench.storage.enqueue_flows(bench.queue, flows)
    assert [answer.state for answer in answers] == [S.BLOCKED] * 50
    await settle_down(bench)
    leases = await child.claim_all()
    assert [(lease.id, lease.payload, lease.options.task) for lease in leases[:2]] == [
        ("leaf-0", b"0", "leaf"),
        ("leaf-1", b"1", "leaf"),
    ]
    for lease in leases:
        await child.settle(lease, Complete(lease.payload))
    await settle_down(child)
    assert len(await bench.ids(S.WAITING)) == 50
    assert child.queue in await bench.storage.queues()


# Children of a job that is there


async def attach(
    bench: Bench, parent: str, *nodes: Node, policy: Policy = "fail", link: tuple[str, ...] = ()
) -> str:
    edges_ = [Dependency(node.queue, node.job.id, policy) for node in nodes]
    edges_ += [Dependency(bench.queue, id, policy) for id in link]
    answer = await bench.storage.attach(bench.queue, parent, edges_, nodes=nodes, flow="attached")
    await settle_down(bench)
    return answer


@pytest.mark.parametrize("where", ["here", "there"])
async def test_a_running_job_waits_for_children_it_adds(bench: Bench, where: str) -> None:
    child = bench if where == "here" else other(bench)
    await bench.put("parent", attempts=1)
    lease = await bench.claim()
    assert (
        await attach(bench, "parent", Node(child.queue, NewJob("a")), Node(child.queue, NewJob("b")))
        == "attached"
    )
    settled = await bench.settle(lease, Await())
    assert (settled.applied, settled.state) == (True, S.BLOCKED)
    job = await bench.job("parent")
    assert (job.blocked_by, job.failures) == ("children", 0)
    assert Seen(E.SUSPENDED, "parent", "blocked") in await bench.seen()
    await ends(child, "a")
    await ends(child, "b")
    await settle_down(child)
    again = await bench.claim()
    assert (again.id, again.run, again.failures) == ("parent", 2, 0)
    assert [edge.result for edge in await edges(bench)] == [b"a", b"b"]
    await bench.settle(again, Complete(b"done"))


async def test_a_job_whose_children_have_ended_resumes_immediately(bench: Bench) -> None:
    await bench.put("parent")
    lease = await bench.claim()
    await attach(bench, "parent", Node(bench.queue, NewJob("a")))
    await ends(bench, "a")
    assert (await bench.settle(lease, Await())).state is S.WAITING
    assert (await bench.settle(lease, Await())).state is S.WAITING
    assert (await bench.seen())[-1] == Seen(E.SUSPENDED, "parent", "waiting")


@pytest.mark.parametrize("state", [S.WAITING, S.SCHEDULED])
async def test_a_pending_job_is_blocked_by_children_it_is_given(bench: Bench, state: State) -> None:
    await bench.bring(state, "parent")
    await bench.events()
    await attach(bench, "parent", Node(bench.queue, NewJob("a")))
    assert (await bench.seen())[0] == Seen(E.CHANGED, "parent", "blocked")
    await ends(bench, "a")
    assert await bench.state("parent") is state


async def test_more_children_may_be_given_to_a_parent_that_waits(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("parent", **after(bench, "a"))
    await attach(bench, "parent", Node(bench.queue, NewJob("b")), link=("a",))
    await ends(bench, "a")
    assert await bench.state("parent") is S.BLOCKED
    await ends(bench, "b")
    assert await bench.state("parent") is S.WAITING
    assert [edge.id for edge in await edges(bench)] == ["a", "b"]


async def test_a_pending_job_linked_to_one_that_completed_stays_where_it_is(bench: Bench) -> None:
    await bench.bring(S.COMPLETED, "a")
    await bench.put("parent")
    await attach(bench, "parent", link=("a",))
    assert await bench.state("parent") is S.WAITING
    assert [edge.state for edge in await edges(bench)] == ["completed"]


async def test_children_are_for_jobs_that_are_open(bench: Bench) -> None:
    await bench.bring(S.COMPLETED, "parent")
    before = await bench.picture()
    assert await attach(bench, "parent", Node(bench.queue, NewJob("a"))) == "ended"
    assert await attach(bench, "nobody", Node(bench.queue, NewJob("a"))) == "not_found"
    assert await bench.picture() == before


@pytest.mark.parametrize("outcome", [Await(), Snooze(0), Snooze(1000), Release(), Fail(BOOM)])
async def test_a_child_that_fails_while_its_parent_runs_fails_it_when_it_is_put_back(
    bench: Bench, outcome: Any
) -> None:
    await bench.put("parent")
    lease = await bench.claim()
    await attach(bench, "parent", Node(bench.queue, NewJob("a")))
    await ends(bench, "a", fail=True)
    assert await bench.state("parent") is S.ACTIVE
    assert (await bench.settle(lease, outcome)).state is S.FAILED
    job = await bench.job("parent")
    assert job.failure is not None
    assert job.failure.type == "DependencyFailed"
    event = (await bench.events())[-1]
    assert (event.type, event.error_type, event.token) == (E.FAILED, "DependencyFailed", lease.token)


async def test_a_parent_that_completes_does_not_care_about_its_failed_child(bench: Bench) -> None:
    await bench.put("parent")
    lease = await bench.claim()
    await attach(bench, "parent", Node(bench.queue, NewJob("a")))
    await ends(bench, "a", fail=True)
    assert (await bench.settle(lease, Complete(b""))).state is S.COMPLETED


async def test_a_rescued_parent_waits_for_its_children_or_fails_with_them(bench: Bench) -> None:
    await bench.put("parent")
    await bench.claim()
    await attach(bench, "parent", Node(bench.queue, NewJob("a")), Node(bench.queue, NewJob("b")))
    await bench.shift(2 * LEASE_MS)
    await bench.storage.sweep(bench.queue)
    assert (await bench.job("parent")).blocked_by == "children"
    assert Seen(E.STALLED, "parent", "blocked") in await bench.seen()
    await ends(bench, "a")
    await ends(bench, "b", fail=True)
    assert await bench.state("parent") is S.FAILED


async def test_a_parent_asked_to_stop_is_cancelled_instead_of_waiting(bench: Bench) -> None:
    await bench.put("parent")
    lease = await bench.claim()
    await attach(bench, "parent", Node(bench.queue, NewJob("a")))
    await bench.storage.cancel(bench.queue, ["parent"])
    assert (await bench.settle(lease, Await())).state is S.CANCELLED


async def awaits_in_vain(bench: Bench, lease: Lease) -> bool:
    await bench.events()
    settled = await bench.settle(lease, Await())
    failure, event = (await bench.job(lease.id)).failure, (await bench.events())[-1]
    assert (settled.state is S.FAILED) == (failure == NOTHING_TO_WAIT_FOR) == (event.type is E.FAILED)
    assert event.token == lease.token
    return settled.state is S.FAILED


async def test_a_job_without_children_that_waits_for_them_fails(bench: Bench) -> None:
    await bench.put("plain")
    assert await awaits_in_vain(bench, await bench.claim())


async def test_a_job_that_has_waited_for_all_its_children_may_not_wait_for_them_again(bench: Bench) -> None:
    await bench.put("parent")
    lease = await bench.claim()
    await attach(bench, "parent", Node(bench.queue, NewJob("a")))
    assert not await awaits_in_vain(bench, lease)
    await ends(bench, "a")
    assert await awaits_in_vain(bench, await bench.claim())


async def test_children_that_ended_while_their_parent_ran_are_worth_one_more_run(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("parent", **after(bench, "a"))
    await ends(bench, "a")
    assert not await awaits_in_vain(bench, await bench.claim())
    lease = await bench.claim()
    await attach(bench, "parent", Node(bench.queue, NewJob("b")))
    await ends(bench, "b")
    assert not await awaits_in_vain(bench, lease)
    lease = await bench.claim()
    await attach(bench, "parent", link=("a", "b"))
    assert await awaits_in_vain(bench, lease)


async def test_a_retried_job_may_wait_for_its_children_again(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("parent", **after(bench, "a"))
    await ends(bench, "a")
    for _ in range(2):
        assert not await awaits_in_vain(bench, await bench.claim())
        assert await awaits_in_vain(bench, await bench.claim())
        assert await bench.storage.retry(bench.queue, ["parent"]) == ["retried"]


async def test_a_job_that_waits_in_vain_is_cancelled_first_if_it_is_to_be(bench: Bench) -> None:
    await bench.put("plain")
    lease = await bench.claim()
    await bench.storage.cancel(bench.queue, ["plain"])
    assert (await bench.settle(lease, Await())).state is S.CANCELLED


async def test_a_cancelled_child_fails_a_parent_in_another_queue(bench: Bench) -> None:
    child = other(bench)
    await put_flow(
        bench,
        Node(bench.queue, NewJob("root", after=(Dependency(child.queue, "a"),))),
        Node(child.queue, NewJob("a")),
    )
    lease = await child.claim()
    await child.settle(lease, Cancel())
    await settle_down(child)
    assert await bench.state("root") is S.FAILED


async def test_retry_asks_another_queue_again(bench: Bench) -> None:
    child = other(bench)
    await put_flow(
        bench,
        Node(bench.queue, NewJob("root", after=(Dependency(child.queue, "a"),))),
        Node(child.queue, NewJob("a")),
    )
    await ends(child, "a", fail=True)
    await settle_down(child)
    assert await bench.state("root") is S.FAILED
    await child.storage.retry(child.queue, ["a"])
    await bench.storage.retry(bench.queue, ["root"])
    await settle_down(bench)
    assert await bench.state("root") is S.BLOCKED
    await ends(child, "a")
    await settle_down(child)
    assert await bench.state("root") is S.WAITING


async def test_a_flow_node_keeps_what_the_user_said_of_it(bench: Bench) -> None:
    child = other(bench)
    await put_flow(
        bench,
        Node(bench.queue, NewJob("root", after=(Dependency(child.queue, "a"),))),
        Node(
            child.queue,
            NewJob(
                "a", b"payload", Options(task="t", attempts=7), priority=3, ttl_ms=MINUTE_MS, run_id="run",
                extras=Extras(headers={"x": "y"}),
            ),
        ),
    )  # fmt: skip
    job = await child.job("a")
    assert (job.payload, job.options.task, job.options.attempts) == (b"payload", "t", 7)
    assert (job.priority, job.run_id, job.expires_at_ms - job.enqueued_at_ms) == (3, "run", MINUTE_MS)
    assert job.extras is not None
    assert job.extras.headers == {"x": "y"}
    await child.storage.change(child.queue, "a", Change(priority=1))
    assert (await child.job("a")).priority == 1


async def test_a_parent_and_child_that_expire_together_end_once_each(bench: Bench) -> None:
    await bench.put("a", ttl_ms=MINUTE_MS)
    await bench.put("parent", ttl_ms=MINUTE_MS, **after(bench, "a"))
    await bench.shift(2 * MINUTE_MS)
    await bench.events()
    await bench.storage.sweep(bench.queue)
    assert await bench.seen() == [Seen(E.EXPIRED, "a", "failed"), Seen(E.FAILED, "parent", "failed")]


async def test_obliterate_tells_dependents_in_other_queues(bench: Bench) -> None:
    child = other(bench)
    await put_flow(
        bench,
        Node(bench.queue, NewJob("root", after=(Dependency(child.queue, "a"),))),
        Node(child.queue, NewJob("a")),
    )
    await bench.storage.obliterate(child.queue)
    await settle_down(child)
    failure = (await bench.job("root")).failure
    assert failure is not None
    assert failure.message == f"dependency {child.queue}/a was removed"


async def test_retry_of_a_parent_whose_child_was_removed_fails_again(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("parent", **after(bench, "a"))
    await bench.storage.remove(bench.queue, ["a"])
    assert await bench.storage.retry(bench.queue, ["parent", "parent"]) == ["retried", "retried"]
    job = await bench.job("parent")
    assert job.failure is not None
    assert job.failure.message == f"dependency {bench.queue}/a is not known"


async def test_a_claim_that_unblocks_others_on_its_way_names_the_right_tokens(bench: Bench) -> None:
    child = Node(bench.queue, bench.new("child", ttl_ms=MINUTE_MS))
    waits = Dependency(bench.queue, "child", "ignore")
    parent = Node(bench.queue, bench.new("parent", after=(waits,)))
    await put_flow(bench, parent, child)
    await bench.put("plain")
    await bench.put("grouped", extras=Extras(group="g"))
    await bench.shift(MINUTE_MS)

    leases = await bench.claim_all(10)

    assert {lease.id for lease in leases} == {"plain", "grouped", "parent"}
    for lease in leases:
        assert (await bench.job(lease.id)).token == lease.token
        assert (await bench.settle(lease, Complete(b""))).applied


async def test_many_jobs_tell_their_parents_in_one_settle(bench: Bench) -> None:
    ids = [f"{parent}{n}" for parent in "ab" for n in range(3)]
    for parent in "ab":
        children = [Node(bench.queue, bench.new(id)) for id in ids if id[0] == parent]
        waits = tuple(Dependency(bench.queue, node.job.id) for node in children)
        root = Node(bench.queue, bench.new(parent, after=waits))
        await put_flow(bench, root, *children, flow=parent)
    leases = await bench.claim_all(10)
    outcomes = [Settlement(lease.id, lease.token, Complete(lease.id.encode())) for lease in leases]

    await bench.storage.settle(bench.queue, outcomes)

    assert [lease.id for lease in leases] == ids
    assert [await bench.state(parent) for parent in "ab"] == [S.WAITING, S.WAITING]
    results = [edge.result for parent in "ab" for edge in await edges(bench, parent)]
    assert results == [id.encode() for id in ids]
    assert (await bench.storage.check(bench.queue)).problems == {}


async def test_a_job_that_was_attached_to_nothing_has_nothing_to_wait_for(bench: Bench) -> None:
    await bench.put("lonely")
    assert await bench.storage.attach(bench.queue, "lonely", [], flow="flow") == "attached"

    await bench.settle(await bench.claim(), Await())

    lonely = await bench.job("lonely")
    assert lonely.state is S.FAILED
    assert lonely.failure == NOTHING_TO_WAIT_FOR
