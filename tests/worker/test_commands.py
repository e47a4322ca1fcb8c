"""Command jobs: process groups, output, timeouts, cancel, and the death of the worker or of the supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from asyncio.base_subprocess import BaseSubprocessTransport
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock import App, InvalidInput, InvalidOption, JobHandle
from penstock.core.command import COMMAND_TASK, CommandLine, check_command, decode_command, encode_command
from penstock.worker import run as run_module
from penstock.worker.runners import command, supervise
from penstock.worker.runners.command import _end_group
from tests.processes import is_alive
from tests.worker.conftest import exceed_timeouts, until, working

ROOT = Path(__file__).parents[2]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a command that is told to stop more time than any machine needs, and settle no run without its end."""
    monkeypatch.setattr(command, "_GRACE_S", 30.0)
    monkeypatch.setattr(run_module, "PATIENCE_S", 3600.0)


async def put(app: App, command: str, **options: Any) -> JobHandle[Any]:
    fields = {name: options.pop(name) for name in ("cwd", "env") if name in options}
    options.setdefault("attempts", 1)
    return await app.queue("default").enqueue(CommandLine(command, **fields), task=COMMAND_TASK, **options)


async def ended(handle: JobHandle[Any]) -> Any:
    async def is_over() -> Any:
        info = await handle.get()
        return info if info.state in ("completed", "failed", "cancelled") else None

    return await until(is_over)


async def pids_in(path: Path, count: int) -> list[int]:
    await until(lambda: path.exists() and len(path.read_text().split()) == count)
    return [int(text) for text in path.read_text().split()]


def leaving_a_grandchild(path: Path) -> str:
    """A command with a shell and a sleep below it; both write down who they are."""
    return f"echo $$ >> {path}; (sleep 60 & echo $! >> {path}; wait); wait"


@contextmanager
def leaving_a_daemon(path: Path, doing: str = "exec sleep 60") -> Iterator[str]:
    """A command that starts a process in a session of its own, which keeps the output open. It is killed at the end."""
    try:
        yield f"setsid sh -c 'echo $$ > {path}; {doing}' & "
    finally:
        for pid in path.read_text().split() if path.exists() else ():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


async def test_a_command_that_ends_with_0_completes_with_its_output_in_the_log(app: App) -> None:
    async with working(app, commands=True):
        job = await put(app, "echo out; echo err >&2; printf rest")
        result = await job.result(timeout="20s")

    assert result["exit_code"] == 0
    assert await job.logs() == ["out", "err", "rest"]


async def test_any_other_exit_code_fails_the_run_and_is_reported(app: App) -> None:
    async with working(app, commands=True):
        job = await put(app, "echo reason; exit 9")
        killed = await put(app, "kill -SEGV $$")
        info, other = await ended(job), await ended(killed)

    assert (info.failure.type, info.failure.message) == ("CommandFailed", "exit code 9: reason")
    assert info.progress["exit_code"] == 9
    assert "SIGSEGV" in other.failure.message
    assert other.progress["exit_code"] == 128 + signal.SIGSEGV


async def test_a_command_has_its_folder_its_variables_and_no_input(memory_app: App, tmp_path: Path) -> None:
    async with working(memory_app, commands=True):
        job = await put(
            memory_app,
            'pwd; echo "$A"; echo "$PENSTOCK_JOB_ID"; cat; trap',
            cwd=str(tmp_path),
            env={"A": "b c"},
        )
        await job.result(timeout="20s")
        nowhere = await ended(await put(memory_app, "true", cwd=f"{tmp_path}/missing"))

    assert await job.logs() == [str(tmp_path), "b c", job.id]
    assert "does not exist on this machine" in nowhere.failure.message


async def test_a_command_may_be_ended_by_a_closed_pipe_as_in_any_shell(memory_app: App) -> None:
    async with working(memory_app, commands="/bin/bash"):
        job = await put(memory_app, "yes | head -1; echo ${PIPESTATUS[0]}")
        await job.result(timeout="20s")

    assert await job.logs() == ["y", str(128 + signal.SIGPIPE)]


async def test_a_timeout_kills_the_whole_group(memory_app: App, tmp_path: Path) -> None:
    async with working(memory_app, commands=True) as worker:
        job = await put(memory_app, leaving_a_grandchild(tmp_path / "pids"), timeout="10m")
        pids = await pids_in(tmp_path / "pids", 2)
        exceed_timeouts(worker)
        info = await ended(job)

    assert info.failure.type == "Timeout"
    await until(lambda: not any(map(is_alive, pids)))  # the kernel ends the grandchild in its own time


async def test_a_timeout_while_a_command_starts_kills_the_whole_group(
    memory_app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command runs already, but asyncio has not connected its pipes yet."""
    connect, goes_on = BaseSubprocessTransport._connect_pipes, asyncio.Event()

    async def connect_late(self: BaseSubprocessTransport, waiter: asyncio.Future[None]) -> None:
        await goes_on.wait()
        await connect(self, waiter)

    monkeypatch.setattr(BaseSubprocessTransport, "_connect_pipes", connect_late)
    async with working(memory_app, commands=True) as worker:
        job = await put(memory_app, leaving_a_grandchild(tmp_path / "pids"), timeout="10m")
        pids = await pids_in(tmp_path / "pids", 2)
        exceed_timeouts(worker)
        await asyncio.sleep(0)
        goes_on.set()
        info = await ended(job)

    assert info.failure.type == "Timeout"
    await until(lambda: not any(map(is_alive, pids)))  # the kernel ends the grandchild in its own time


async def test_a_command_that_ignores_sigterm_is_killed(memory_app: App, tmp_path: Path) -> None:
    async with working(memory_app, commands=True) as worker:
        job = await put(
            memory_app,
            f"trap 'echo no' TERM; echo $$ > {tmp_path}/pids; while :; do sleep 0.1; done",
            timeout="10m",
        )
        [pid] = await pids_in(tmp_path / "pids", 1)
        exceed_timeouts(worker)
        info = await ended(job)

    assert info.failure.type == "Timeout"
    assert "no" in await job.logs()
    assert not is_alive(pid)


@pytest.mark.usefixtures("patient")
async def test_a_cancel_stops_a_command_and_what_it_says_on_its_way_out_is_kept(
    app: App, tmp_path: Path
) -> None:
    async with working(app, commands=True, heartbeat="100ms"):
        job = await put(
            app, f"trap 'echo bye; exit 0' TERM; echo $$ > {tmp_path}/pids; while :; do sleep 0.05; done"
        )
        [pid] = await pids_in(tmp_path / "pids", 1)
        assert await job.cancel() == "requested"
        info = await ended(job)

    assert info.state == "cancelled"
    assert "bye" in await job.logs()
    assert not is_alive(pid)


async def test_what_a_command_leaves_behind_ends_with_it(memory_app: App, tmp_path: Path) -> None:
    async with working(memory_app, commands=True):
        job = await put(memory_app, f"sleep 60 & echo $! > {tmp_path}/pids")
        await job.result(timeout="20s")

    [pid] = await pids_in(tmp_path / "pids", 1)
    await until(lambda: not is_alive(pid))  # the kernel ends a killed process in its own time


async def test_a_command_ends_without_a_daemon_that_keeps_its_output_open(
    memory_app: App, tmp_path: Path
) -> None:
    with leaving_a_daemon(tmp_path / "daemon") as daemon:
        async with working(memory_app, commands=True):
            job = await put(memory_app, f"{daemon} echo said; sleep 0.3; printf rest")
            result = await job.result(timeout="20s")
        [pid] = await pids_in(tmp_path / "daemon", 1)
        assert is_alive(pid)

    assert result["exit_code"] == 0
    assert await job.logs() == ["said", "rest"]


def test_so_it_does_on_the_loop_that_a_worker_of_the_command_line_has(tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def run(command: str) -> list[str]:
        async with App("memory://") as app, working(app, commands=True):
            job = await put(app, command)
            await job.result(timeout="20s")
            return await job.logs()

    with (
        leaving_a_daemon(tmp_path / "daemon") as daemon,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        assert runner.run(run(f"{daemon} echo said; sleep 0.3; printf rest")) == ["said", "rest"]


@pytest.mark.usefixtures("patient")
async def test_a_cancel_ends_a_command_without_its_daemon(memory_app: App, tmp_path: Path) -> None:
    with leaving_a_daemon(tmp_path / "daemon") as daemon:
        async with working(memory_app, commands=True, heartbeat="100ms"):
            job = await put(memory_app, f"{daemon} trap 'printf bye; exit 0' TERM; sleep 60 & wait")
            [pid] = await pids_in(tmp_path / "daemon", 1)
            assert await job.cancel() == "requested"
            info = await ended(job)
        assert is_alive(pid)

    assert info.state == "cancelled"
    assert await job.logs() == ["bye"]


async def test_the_output_of_a_daemon_is_not_read_any_longer(memory_app: App, tmp_path: Path) -> None:
    with leaving_a_daemon(tmp_path / "daemon", "while :; do echo more; sleep 0.05; done") as daemon:
        async with working(memory_app, commands=True):
            job = await put(memory_app, f"{daemon} sleep 0.3")
            await job.result(timeout="20s")
            [pid] = await pids_in(tmp_path / "daemon", 1)
            await until(lambda: not is_alive(pid))  # by SIGPIPE

    assert "more" in await job.logs()


async def test_a_stopping_worker_hands_its_commands_back(memory_app: App, tmp_path: Path) -> None:
    async with working(memory_app, commands=True, grace=0):
        job = await put(memory_app, leaving_a_grandchild(tmp_path / "pids"))
        pids = await pids_in(tmp_path / "pids", 2)

    assert await job.refresh() == "waiting"
    await until(lambda: not any(map(is_alive, pids)))  # the kernel ends the grandchild in its own time


async def test_a_supervisor_that_is_killed_takes_the_command_with_it(memory_app: App, tmp_path: Path) -> None:
    async with working(memory_app, commands=True):
        job = await put(
            memory_app,
            f"echo $PPID >> {tmp_path}/pids; echo $$ >> {tmp_path}/pids; exec sleep 60 > /dev/null 2>&1",
        )
        supervisor, command = await pids_in(tmp_path / "pids", 2)
        os.kill(supervisor, signal.SIGKILL)
        info = await ended(job)
        await until(lambda: not is_alive(command))

    assert info.state == "failed"


async def test_a_supervisor_killed_before_it_reports_its_command_leaves_no_orphan() -> None:
    # Job control gives the command a group of its own, as the supervisor does.
    shell = await asyncio.create_subprocess_exec(
        "/bin/sh",
        "-c",
        "set -m; sleep 60 > /dev/null 2>&1 & echo $!; wait",
        stdout=PIPE,
        start_new_session=True,
    )
    assert shell.stdout is not None
    command = int(await shell.stdout.readline())
    shell.kill()
    await shell.wait()
    status, theirs = os.pipe()
    os.close(theirs)
    _end_group(shell, status)
    os.close(status)
    await until(lambda: not is_alive(command))


async def test_a_worker_that_is_killed_leaves_no_orphan(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    async with App(url) as app:
        await put(app, leaving_a_grandchild(tmp_path / "pids"), id="x")
        code = "import sys, penstock; penstock.App(sys.argv[1]).worker(commands=True).run_sync()"
        worker = subprocess.Popen([sys.executable, "-c", code, url], cwd=ROOT)
        try:
            pids = await pids_in(tmp_path / "pids", 2)
            assert all(map(is_alive, pids))
        finally:
            worker.kill()
            worker.wait()
        await until(lambda: not any(map(is_alive, pids)))


async def test_a_command_ends_if_its_worker_dies_before_it_learns_of_the_group(tmp_path: Path) -> None:
    status, theirs = os.pipe()
    lifeline, ours = os.pipe()
    os.close(status)
    os.close(ours)  # The worker is dead.
    text = leaving_a_grandchild(tmp_path / "pids")
    supervisor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", supervise.__file__, "/bin/sh", text, "5", str(theirs)),
        stdin=lifeline,
        pass_fds=[theirs],
        start_new_session=True,
    )
    os.close(theirs)
    os.close(lifeline)

    assert await asyncio.wait_for(supervisor.wait(), 30) == 128 + signal.SIGKILL


async def test_a_lot_of_output_holds_nothing_up_and_its_end_is_kept(memory_app: App) -> None:
    async with working(memory_app, commands=True):
        job = await put(memory_app, "seq 300000; echo the end")
        await job.result(timeout="60s")
        lines = await job.logs()

    assert lines[-2:] == ["300000", "the end"]
    assert len(lines) <= 1000


async def test_long_lines_are_cut_and_bytes_that_are_not_text_are_shown(memory_app: App) -> None:
    async with working(memory_app, commands=True):
        job = await put(memory_app, r"printf 'a\377b\r\n'; head -c 5000 /dev/zero | tr '\0' x")
        await job.result(timeout="20s")
        first, second = await job.logs()

    assert first == "a\N{REPLACEMENT CHARACTER}b"
    assert (len(second), second[-1]) == (2002, "…")


async def test_a_worker_that_runs_no_commands_says_so(memory_app: App) -> None:
    async with working(memory_app, queues=["default"], unknown_after=0):
        info = await ended(await put(memory_app, "true"))

    assert info.failure.type == "UnknownTask"
    assert "penstock worker --commands" in info.failure.message


async def test_a_payload_that_is_not_a_command_fails_without_retries(memory_app: App) -> None:
    async with working(memory_app, commands=True):
        job = await memory_app.queue("default").enqueue({"line": "x"}, task=COMMAND_TASK, attempts=5)
        info = await ended(job)

    assert "not a command" in info.failure.message
    assert info.failures == 1


async def test_a_missing_shell_is_reported(memory_app: App) -> None:
    async with working(memory_app, commands="/no/such/shell"):
        info = await ended(await put(memory_app, "true"))

    assert info.failure.message == "exit code 127: /no/such/shell: No such file or directory"
    with pytest.raises(InvalidOption, match="path of a shell"):
        memory_app.worker(commands="sh")


def test_a_command_survives_its_payload() -> None:
    line = CommandLine("echo 'ä'", cwd="/tmp", env={"A": "1"})

    assert decode_command(encode_command(line)) == line
    assert json.loads(encode_command(CommandLine("true"))) == {"command": "true"}


@pytest.mark.parametrize(
    "line",
    [
        CommandLine(""),
        CommandLine(" \n"),
        CommandLine("a\0b"),
        CommandLine("x" * 200_000),
        CommandLine("x", env={"": "1"}),
        CommandLine("x", env={"a=b": "1"}),
        CommandLine("x", env={"a": "\0"}),
    ],
)
def test_what_no_shell_can_run_is_refused(line: CommandLine) -> None:
    with pytest.raises(InvalidInput):
        check_command(line)


async def test_many_commands_run_at_a_time(memory_app: App) -> None:
    async with working(memory_app, commands=True, concurrency=20):
        jobs = [await put(memory_app, f"echo {n}") for n in range(60)]
        await asyncio.gather(*(job.result(timeout="60s") for job in jobs))
        logs = [await job.logs() for job in jobs]

    assert logs == [[str(n)] for n in range(60)]


@pytest.mark.parametrize("stop", ["", "t"])
def test_without_pidfd_the_supervisor_polls_for_the_end(tmp_path: Path, stop: str) -> None:
    without = (
        "import os, runpy, sys; del os.pidfd_open; sys.argv = sys.argv[1:];"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    ours, theirs = os.pipe()
    command = (
        f"trap 'exit 5' TERM; touch {tmp_path}/begun; while :; do sleep 0.05; done" if stop else "exit 4"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", without, supervise.__file__, "/bin/sh", command, "5", str(theirs)],
        stdin=subprocess.PIPE,
        pass_fds=[theirs],
    )
    os.close(theirs)
    if stop:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
        assert process.stdin is not None
        process.stdin.write(stop.encode())
        process.stdin.flush()
    code = process.wait(30)
    group = int(os.read(ours, 32))
    os.close(ours)
    process.communicate()

    assert code == (5 if stop else 4)
    assert not is_alive(group)
