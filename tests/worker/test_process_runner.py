"""Handlers in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import JobCancelled, JobFailed
from penstock.core.job import Lease, NewJob, Options
from penstock.core.outcome import Abort
from penstock.errors import InvalidOption
from penstock.worker.run import Run
from penstock.worker.runners import process
from penstock.worker.runners.child import Done, Raised, Request
from penstock.worker.runners.process import ChildProcess
from tests.worker import process_tasks as tasks
from tests.worker.conftest import until, working


async def test_a_handler_runs_in_another_process_and_the_process_is_used_again() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        assert await tasks.square.call(7) == 49
        first, second = await tasks.whoami.call(), await tasks.whoami.call()
    assert first == second != os.getpid()


async def test_a_function_that_is_a_task_under_another_name_is_found() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        assert await tasks.renamed.call(1) == 2


async def test_an_exception_arrives_with_its_name_message_and_traceback() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        job = await tasks.fail.enqueue()
        with pytest.raises(JobFailed, match="in another process") as caught:
            await job.result(timeout="20s")
        assert caught.value.error_type == "ZeroDivisionError"
        assert "process_tasks.py" in caught.value.traceback


async def test_a_process_that_dies_fails_its_job_and_is_replaced() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        with pytest.raises(JobFailed, match="exit code 7") as caught:
            await tasks.die.call(7)
        assert caught.value.error_type == "ProcessDied"
        assert await tasks.square.call(3) == 9


async def test_a_death_is_noticed_though_another_process_holds_the_pipe_open() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        job = await tasks.die_and_leave_another.enqueue(7)
        try:
            with pytest.raises(JobFailed, match="exit code 7"):
                await job.result(timeout="20s")
        finally:
            [other] = await job.logs()
            os.kill(int(other), signal.SIGKILL)
        assert await tasks.square.call(3) == 9


@pytest.mark.parametrize("leave_another", [False, True])
async def test_a_death_amid_a_message_is_noticed(leave_another: bool) -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        job = await tasks.die_amid_the_result.enqueue(leave_another=leave_another)
        try:
            with pytest.raises(JobFailed, match="exit code -9"):
                await job.result(timeout="20s")
        finally:
            for other in await job.logs():
                os.kill(int(other), signal.SIGKILL)
        assert await tasks.square.call(3) == 9


async def test_a_large_request_to_one_that_died_does_not_block(tmp_path: Path) -> None:
    other = tmp_path / "other"
    child = ChildProcess(tasks.leave_another_behind, str(other))
    lease = Lease("a", 1, 1, 1, 0, 0, b"x" * 8_000_000, Options(), 0, 0, 0)
    await until(lambda: other.exists() and other.read_text().endswith("\n"))
    try:
        with pytest.raises(EOFError):
            await asyncio.wait_for(asyncio.to_thread(child.send, Request("m", "f", "q", lease)), 20)
    finally:
        os.kill(int(other.read_text()), signal.SIGKILL)
        assert child.close() == 7


async def test_a_request_of_any_size_arrives_whole() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        for size in (0, 1, 65_536, 500_000):
            assert await tasks.measure.call("x" * size) == size


async def test_a_result_of_any_size_arrives_whole() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        for size in (0, 1, 65_536, 500_000):
            assert await tasks.repeat.call(size) == "é" * size


async def test_a_kill_that_comes_late_does_not_hit_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop decides to kill a run's process while the run's thread reads its answer."""
    last_message = process._last_message
    late: list[Callable[[], None]] = []

    def answer_after_abort(child: ChildProcess, run: Run) -> Done | Raised:
        last = last_message(child, run)
        if not late:
            assert run.kill is not None
            late.append(run.kill)
            run.abort = Abort.CANCEL
        return last

    monkeypatch.setattr(process, "_last_message", answer_after_abort)
    async with tasks.app, working(tasks.app, child_processes=1):
        assert await tasks.square.call(2) == 4
        job = await tasks.wait_for.enqueue(str(tmp_path / "flag"))
        await until(job.logs)  # it runs
        late[0]()
        (tmp_path / "flag").touch()
        assert await job.result(timeout="20s") == "there"
        info = await job.get()
        assert info.failures == 0


def test_a_process_that_another_thread_is_reaping_is_closed_with_its_code() -> None:
    child = ChildProcess(tasks.leave_with_seven)
    popen: Any = child.process._popen  # type: ignore[attr-defined]
    os.waitpid(popen.pid, 0)

    def note() -> None:
        popen.returncode = 7

    noting = threading.Timer(0.2, note)
    noting.start()
    assert child.close() == 7
    noting.join()


async def test_a_timeout_kills_the_process_and_no_other() -> None:
    async with tasks.app, working(tasks.app, child_processes=2):
        other = await tasks.whoami.call()
        with pytest.raises(JobFailed) as caught:
            await tasks.hang_with_timeout.call()
        assert caught.value.error_type == "Timeout"
        assert isinstance(other, int)
        assert await tasks.square.call(4) == 16


async def test_a_cancel_kills_the_process() -> None:
    async with tasks.app, working(tasks.app, child_processes=1, heartbeat="200ms"):
        job = await tasks.hang.enqueue()
        await until(job.logs)
        assert await job.cancel() == "requested"
        with pytest.raises(JobCancelled):
            await job.result(timeout="20s")
        assert await tasks.square.call(5) == 25


async def test_progress_and_log_lines_arrive_before_the_end() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        job = await tasks.talk.enqueue()
        assert await job.result(timeout="20s") == job.id
        info = await job.get()
        assert info.progress == {"done": 0.5}
        assert await job.logs() == ["one", "two"]


async def test_threads_of_a_handler_may_report_concurrently() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        job = await tasks.talk_at_once.enqueue(4, 25)
        await job.result(timeout="20s")
        assert sorted(await job.logs()) == sorted(
            str(number) * 20_000 for number in range(4) for _ in range(25)
        )


@pytest.mark.parametrize(("kind", "answer"), [("snooze", [2, 0]), ("rate limit", [2, 0]), ("retry", [2, 1])])
async def test_verdicts_count_as_they_do_elsewhere(kind: str, answer: list[int]) -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        assert await tasks.verdict.call(kind) == answer


@pytest.mark.parametrize("kind", ["unrecoverable", "discard"])
async def test_verdicts_that_end_a_job_end_it(kind: str) -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        with pytest.raises(JobFailed, match="never"):
            await tasks.verdict.call(kind)


async def test_a_payload_that_cannot_be_decoded_is_final() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        storage = await tasks.app.connect()
        await storage.enqueue("cpu", [NewJob("undecodable", b"[]", tasks.verdict.defaults)])
        handle = tasks.app.job("cpu/undecodable")
        with pytest.raises(JobFailed) as caught:
            await handle.result(timeout="20s")
        assert caught.value.error_type == "SerializationError"


async def test_a_function_inside_a_function_fails_with_the_reason() -> None:
    from penstock import App

    async with App("memory://") as app:

        @app.task(runner="process", attempts=1)
        def local() -> None: ...

        async with working(app):
            with pytest.raises(JobFailed, match="inside a function") as caught:
                await local.call()
    assert caught.value.error_type == InvalidOption.__name__


async def test_a_process_may_suspend_its_job_and_gets_the_signal() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        job = await tasks.ask.enqueue()
        await job.signal("answer", {"is": 42})
        assert await job.result(timeout="20s") == ["asked", {"is": 42}]


async def test_a_handler_of_the_app_may_run_in_a_process() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        half, pid = await tasks.halve.call(5)
        assert half == 2.5
        assert pid != os.getpid()


async def test_an_error_in_a_process_has_a_backoff_of_its_own() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        retried, final = [await tasks.choosy_about_delays.enqueue(kind) for kind in ("retried", "final")]
        with pytest.raises(JobFailed, match="KeyError"):
            await final.result(timeout="20s")
        assert (await final.get()).failures == 1
        async with asyncio.timeout(20):
            while (info := await retried.get()).failures == 0:
                await asyncio.sleep(0.01)
        assert info.run_at is not None
        assert info.claimed_at is not None
        assert info.failure is not None
        assert info.failure.type == "ConnectionResetError"
        assert 7000 < (info.run_at - info.claimed_at).total_seconds() < 7300
        await retried.remove()


async def test_a_process_knows_which_errors_are_retried() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        for kind, failures, error_type in [("retried", 3, "ConnectionResetError"), ("final", 1, "KeyError")]:
            job = await tasks.choosy.enqueue(kind)
            with pytest.raises(JobFailed) as failed:
                await job.result(timeout="20s")
            assert failed.value.error_type == error_type
            assert "in choosy" in failed.value.traceback
            assert (await job.get()).failures == failures
