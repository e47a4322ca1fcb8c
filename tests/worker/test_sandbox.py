"""Handlers in sandboxes: what they give back, what they may use, how they end."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from penstock import App, InvalidOption, JobCancelled, JobContext, JobFailed, MemoryLimitExceeded, Task
from penstock.worker.middleware import CallNext
from penstock.worker.run import Run
from penstock.worker.runners import process, sandbox
from tests.processes import is_alive
from tests.worker import sandbox_tasks as tasks
from tests.worker.conftest import until, working

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


async def failure_of(task: Task, *args: object) -> JobFailed:
    with pytest.raises(JobFailed) as caught:
        await task.options(wait="60s").call(*args)
    return caught.value


async def pids_in(path: Path) -> list[int]:
    text = await until(lambda: path.exists() and path.read_text(), seconds=30)
    return [int(pid) for pid in text.split()]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids of the processes that sandboxes have started, in this order."""
    pids: list[int] = []
    new = sandbox.SandboxRunner._new

    def note(runner: sandbox.SandboxRunner) -> sandbox._Sandbox:
        box = new(runner)
        pids.append(box._pid)
        return box

    monkeypatch.setattr(sandbox.SandboxRunner, "_new", note)
    return pids


# What travels


async def test_results_come_back_from_plain_and_from_coroutine_functions() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        assert await tasks.square.call(7) == 49
        job = await tasks.square_later.enqueue(8)
        assert await job.result(timeout="30s") == 64
        assert await job.logs() == ["later"]


async def test_every_run_has_a_process_of_its_own_and_leaks_end_with_it() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        first, second = await tasks.leak.call(), await tasks.leak.call()
    assert first[1] == second[1] == 1
    assert len({first[0], second[0], os.getpid()}) == 3
    assert not is_alive(first[0])
    assert not is_alive(second[0])


async def test_an_exception_arrives_with_its_name_message_and_traceback() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        failure = await failure_of(tasks.fail)
    assert (failure.error_type, str(failure).count("in a sandbox")) == ("ZeroDivisionError", 1)
    assert "sandbox_tasks.py" in failure.traceback


async def test_verdicts_progress_and_payloads_travel() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        assert (await failure_of(tasks.give_up)).error_type == "Unrecoverable"
        assert await tasks.come_again.call() == 2
        job = await tasks.change.enqueue(1)
        assert await job.result(timeout="30s") == 2
        info = await job.get()
        assert info.progress == 2


async def test_a_result_that_cannot_be_encoded_fails_the_run() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        assert (await failure_of(tasks.unencodable)).error_type == "SerializationError"


async def test_what_was_registered_for_the_exit_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_EXIT_S", 30.0)
    async with tasks.app, working(tasks.app, child_processes=1):
        await tasks.register_exit.call(str(tmp_path / "left"))
        assert (tmp_path / "left").exists()


# Crashes


@pytest.mark.parametrize(
    ("task", "args", "words"),
    [
        (tasks.crash, (), "killed by SIGSEGV"),
        (tasks.leave, (7,), "exit code 7"),
        (tasks.kill_itself, (), "killed by SIGKILL"),
    ],
    ids=["segmentation fault", "os._exit", "SIGKILL"],
)
async def test_a_crash_fails_its_run_and_no_other(task: Task, args: tuple, words: str) -> None:
    async with tasks.app, working(tasks.app, child_processes=2):
        others = [await tasks.square.enqueue(n) for n in range(4)]
        failure = await failure_of(task, *args)
        assert failure.error_type == "SandboxCrashed"
        assert words in str(failure)
        assert [await job.result(timeout="30s") for job in others] == [0, 1, 4, 9]


async def test_a_crash_leaves_its_output_and_where_it_was() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        job = await tasks.crash.enqueue()
        with pytest.raises(JobFailed):
            await job.result(timeout="30s")
        log = await job.logs()
    assert log[0] == "before the crash"
    assert "Fatal Python error: Segmentation fault" in log
    assert any("sandbox_tasks.py" in line and "in crash" in line for line in log)


# Limits


async def test_more_memory_than_allowed_fails_the_run_by_name() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        failure = await failure_of(tasks.hoard)
        assert failure.error_type == "MemoryLimitExceeded"
        assert "96.0 MiB" in str(failure)
        assert "in hoard" in failure.traceback
        assert await tasks.take.call(32) == 32
        assert (await failure_of(tasks.take, 96)).error_type == "MemoryLimitExceeded"


async def test_middleware_can_tell_the_limit_that_was_exceeded() -> None:
    async def forgiving(context: JobContext, call_next: CallNext) -> object:
        try:
            return await call_next()
        except MemoryLimitExceeded:
            return "too big"

    async with tasks.app, working(tasks.app, child_processes=1, middleware=[forgiving]):
        job = await tasks.hoard.enqueue()
        assert str(await job.result(timeout="30s")) == "too big"


async def test_more_processor_time_than_allowed_fails_the_run_by_name() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        job = await tasks.burn.enqueue()
        with pytest.raises(JobFailed, match="300ms") as caught:
            await job.result(timeout="60s")
        assert caught.value.error_type == "CpuLimitExceeded"
        assert any("in burn" in line for line in await job.logs())
        assert await tasks.rest.call() == "rested"


@pytest.mark.parametrize(
    "options",
    [{"memory": "1KiB"}, {"memory": "much"}, {"cpu_time": 0}, {"cpu_time": "soon"}, {"cpu_time": -1}],
)
def test_limits_that_cannot_be_kept_are_refused(options: dict) -> None:
    with pytest.raises(InvalidOption):
        App("memory://").task(runner="sandbox", **options)(tasks.hang_here)


@pytest.mark.parametrize("options", [{"memory": "1GiB"}, {"cpu_time": "1s", "runner": "process"}])
def test_limits_without_a_sandbox_are_refused(options: dict) -> None:
    with pytest.raises(InvalidOption, match="runner='sandbox'"):
        App("memory://").task(**options)(tasks.hang_here)


# Being stopped


async def test_a_run_that_hangs_in_the_middle_of_a_message_is_killed() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        job = await tasks.hang_amid_a_message.enqueue()
        with pytest.raises(JobFailed):
            await job.result(timeout="30s")
        assert await tasks.square.options(wait="30s").call(3) == 9


async def test_a_timeout_ends_the_run_and_the_log_says_where_it_hung() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        job = await tasks.hang_with_timeout.enqueue()
        with pytest.raises(JobFailed) as caught:
            await job.result(timeout="30s")
        assert caught.value.error_type == "Timeout"
        assert any("in hang_here" in line for line in await job.logs())
        assert await tasks.square.call(4) == 16


@pytest.mark.parametrize("task", [tasks.hang, tasks.hang_on_loop], ids=["plain", "coroutine"])
async def test_a_cancelled_run_may_clean_up(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_GRACE_S", 30.0)
    async with tasks.app, working(tasks.app, child_processes=1, heartbeat="100ms"):
        job = await task.enqueue(str(tmp_path / "ready"))
        [pid] = await pids_in(tmp_path / "ready")
        assert await job.cancel() == "requested"
        with pytest.raises(JobCancelled):
            await job.result(timeout="20s")
        assert (tmp_path / "ready.cleaned").exists()
        assert not is_alive(pid)


async def test_a_run_that_ignores_the_request_to_stop_is_killed(tmp_path: Path) -> None:
    async with tasks.app, working(tasks.app, child_processes=1, heartbeat="100ms"):
        job = await tasks.ignore_sigterm.enqueue(str(tmp_path / "ready"))
        [pid] = await pids_in(tmp_path / "ready")
        await job.cancel()
        with pytest.raises(JobCancelled):
            await job.result(timeout="20s")
        assert not is_alive(pid)


async def test_a_run_that_returns_when_asked_to_stop_has_not_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_GRACE_S", 30.0)
    async with tasks.app, working(tasks.app, child_processes=1, heartbeat="100ms"):
        job = await tasks.return_after_sigterm.enqueue(str(tmp_path / "ready"))
        await pids_in(tmp_path / "ready")
        await job.cancel()
        with pytest.raises(JobCancelled):
            await job.result(timeout="20s")
        assert "cancelled: [True]" in await job.logs()


@pytest.mark.parametrize("end", ["return", "exit", "cancel"])
async def test_what_a_run_has_started_ends_with_it(end: str, tmp_path: Path) -> None:
    async with tasks.app, working(tasks.app, child_processes=1, heartbeat="100ms"):
        job = await tasks.start_another.enqueue(str(tmp_path / "ready"), end)
        pids = await pids_in(tmp_path / "ready")
        if end == "cancel":
            assert all(map(is_alive, pids))
            await job.cancel()
        else:
            with pytest.raises(JobFailed, match="exit code 3") if end == "exit" else nullcontext():
                assert await job.result(timeout="20s") == 1
        # Those it started are reaped by whoever adopts them, a moment later.
        await until(lambda: not any(map(is_alive, pids)))
        assert await tasks.square.call(2) == 4


async def test_runs_end_where_the_system_has_no_pidfd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_pidfd", lambda pid: None)
    async with tasks.app, working(tasks.app, child_processes=1, heartbeat="100ms"):
        assert "exit code 7" in str(await failure_of(tasks.leave, 7))
        job = await tasks.start_another.enqueue(str(tmp_path / "ready"), "exit")
        pids = await pids_in(tmp_path / "ready")
        with pytest.raises(JobFailed, match="exit code 3"):
            await job.result(timeout="20s")
        await until(lambda: not any(map(is_alive, pids)))
        hanging = await tasks.hang.enqueue(str(tmp_path / "hangs"))
        await pids_in(tmp_path / "hangs")
        await hanging.cancel()
        with pytest.raises(JobCancelled):
            await hanging.result(timeout="20s")


async def test_a_spare_process_that_died_is_passed_over(started: list[int]) -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        await tasks.square.call(1)
        [_, spare] = started
        os.kill(spare, signal.SIGKILL)
        await until(lambda: not is_alive(spare))
        assert await tasks.square.call(2) == 4


async def test_a_spare_process_that_dies_as_it_is_taken_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, started: list[int]
) -> None:
    receive = sandbox._Sandbox._receive_from
    killed: list[int] = []

    def receive_when_dead(box: sandbox._Sandbox, *args: Any) -> object:
        if not killed:
            assert box.process.pid is not None
            killed.append(box.process.pid)
            os.kill(box.process.pid, signal.SIGKILL)
            box.process.join(20)
        return receive(box, *args)

    async with tasks.app, working(tasks.app, child_processes=1):
        await tasks.square.call(1)
        [_, spare] = started
        monkeypatch.setattr(sandbox._Sandbox, "_receive_from", receive_when_dead)
        assert await tasks.square.call(2) == 4
    assert killed == [spare]


async def test_a_module_that_cannot_be_imported_fails_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(
        "import multiprocessing\n"
        "assert multiprocessing.parent_process() is None, 'not in a child'\n"
        "def run() -> None: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    async with App("memory://", attempts=1) as app:
        task = app.task(runner="sandbox")(importlib.import_module("only_here").run)
        async with working(app):
            failure = await failure_of(task)
    assert (failure.error_type, "not in a child" in str(failure)) == ("AssertionError", True)


async def test_a_stopping_worker_hands_the_run_back_and_ends_it(tmp_path: Path) -> None:
    async with tasks.app:
        async with working(tasks.app, child_processes=1):
            job = await tasks.hang.enqueue(str(tmp_path / "ready"))
            [pid] = await pids_in(tmp_path / "ready")
        assert await job.refresh() == "waiting"
        assert not is_alive(pid)
        await job.remove()


# Output


async def test_output_keeps_its_order_across_processes() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        job = await tasks.talk.enqueue()
        await job.result(timeout="30s")
        log = await job.logs()
    assert log[:4] == ["out 1", "err 2", "raw 3", "child 4"]
    assert log[4:] == ["nicht lateinisch: żółw \\udcff\0", "no end of line"]


@pytest.mark.parametrize("pidfd", [True, False])
async def test_an_answer_is_read_though_its_process_is_gone(
    pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the run prints first keeps the worker busy until the run has answered and its process has left."""
    read = sandbox._Sandbox._log_some
    found_dead: list[bool] = []

    def read_late(box: sandbox._Sandbox, run: Run) -> None:
        deadline = time.monotonic() + 20
        while not found_dead and time.monotonic() < deadline and box.alive:
            time.sleep(0.005)
        found_dead.append(True)
        read(box, run)

    monkeypatch.setattr(sandbox._Sandbox, "_log_some", read_late)
    if not pidfd:
        monkeypatch.setattr(sandbox, "_pidfd", lambda pid: None)
    async with tasks.app, working(tasks.app, child_processes=1):
        job = await tasks.talk.enqueue()
        await job.result(timeout="40s")
        log = await job.logs()
    assert log[:4] == ["out 1", "err 2", "raw 3", "child 4"]


async def test_output_before_an_exit_is_kept() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        job = await tasks.leave.enqueue(1)
        with pytest.raises(JobFailed):
            await job.result(timeout="30s")
        assert await job.logs() == ["leaving now"]


async def test_of_too_much_output_the_beginning_and_the_end_are_kept() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        job = await tasks.shout.enqueue(200_000)
        await job.result(timeout="60s")
        log = await job.logs()
    assert len(log) < 1000
    assert log[0].startswith("line 0 ")
    assert log[-1] == "the last words"
    assert log[-2] == "y" * 2_000 + " …"
    left_out = [line for line in log if line.endswith("left out …")]
    assert len(left_out) == 1
    shown = [int(line.split()[1]) for line in log if line.startswith("line ")]
    assert shown == sorted(shown)
    assert int(left_out[0].split()[1]) + len(shown) in (200_000, 200_001), "the one cut in two may be both"


async def test_a_function_may_close_its_streams() -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        assert await tasks.close_streams.call() == "closed"


# Time and again


async def test_many_runs_leave_no_file_open_and_no_process_behind(started: list[int]) -> None:
    async with tasks.app, working(tasks.app, child_processes=2):
        await asyncio.gather(*(tasks.square.call(n) for n in range(3)))
        before = len(os.listdir("/proc/self/fd"))
        answers = await asyncio.gather(*(tasks.square.call(n) for n in range(12)), failure_of(tasks.leave, 1))
        assert answers[:12] == [n * n for n in range(12)]
        assert len(os.listdir("/proc/self/fd")) <= before + 4, "but for another spare"
        assert len([pid for pid in started if is_alive(pid)]) <= 3
    assert not any(map(is_alive, started))


async def test_the_next_run_finds_a_process_that_was_started_before(started: list[int]) -> None:
    async with tasks.app, working(tasks.app, child_processes=1):
        await tasks.square.call(1)
        [_, spare] = started
        assert (await tasks.leak.call())[0] == spare


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.worker import sandbox_tasks as tasks
from penstock import App

if __name__ == "__main__":
    app = App(sys.argv[1])
    app.task(queue="box", runner="sandbox")(tasks.start_another.func)
    app.task(queue="box", runner="sandbox")(tasks.hold_the_lock.func)
    app.worker(lease="1s", child_processes=1).run_sync()
"""


@pytest.mark.parametrize("task", ["start_another", "hold_the_lock"])
async def test_nothing_is_left_of_a_run_when_its_worker_is_killed(task: str, tmp_path: Path) -> None:
    """Not what it started, and not if the interpreter's lock keeps every thread of it from looking."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    async with App(url) as app:
        await app.queue("box").enqueue({"ready": str(tmp_path / "ready"), "end": "hang"}, task=task)
        with subprocess.Popen([sys.executable, script, url, str(Path(__file__).parents[2])]) as worker:
            pids = await pids_in(tmp_path / "ready")
            assert all(map(is_alive, pids))
            worker.kill()
        await until(lambda: not any(map(is_alive, pids)))
