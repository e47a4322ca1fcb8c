"""``penstock worker``: in the foreground, detached, reloading, at a terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer

import psutil
import pytest

from penstock.cli import background, main
from penstock.cli.errors import ExitCode
from penstock.cli.pidfiles import Surroundings, held
from tests.cli.conftest import Shell, until
from tests.cli.terminal import Terminal
from tests.preloaded import run_script
from tests.processes import is_alive

# Each starts the script many times, which takes a while where the machine is busy.
pytestmark = pytest.mark.timeout(300)

APP = """
from penstock import App

app = App()

@app.task(queue="mail")
def answer() -> str:
    return "{}"
"""

ONCE = """
from pathlib import Path

if not Path("tried").exists():
    Path("tried").touch()
    raise RuntimeError("not yet")
""" + APP.format("done")


@pytest.fixture
def stopped(tmp_path: Path) -> object:
    """Workers in the background do not outlive the test."""
    yield
    Shell(tmp_path)("worker", "stop", "--timeout", "10")


@pytest.mark.usefixtures("stopped")
def test_workers_are_started_looked_at_restarted_and_stopped(on_both: Shell, tmp_path: Path) -> None:
    assert "no worker runs" in on_both("worker", "status").stderr
    on_both.ok("config", "set", "workers", "2")
    said = on_both.ok("worker", "start", "-c", "3", "--lease", "5s", "--commands")
    assert said.count("runs (process") == 2
    rows = on_both.json("worker", "status")
    assert [row["name"] for row in rows] == ["worker-1", "worker-2"]
    assert {worker["concurrency"] for worker in on_both.json("workers")} == {3}
    on_both.ok("enqueue", "true", "-q", "reports")
    assert "slots busy; none works on reports: `penstock worker --commands -q reports`" in on_both.ok(
        "status"
    )
    assert "is already running" in on_both.refused("worker", "start", code=4)
    run = on_both("enqueue", "--wait", "echo by $PENSTOCK_JOB_ID", "--id", "x")
    assert (run.returncode, run.stdout) == (0, "by x\n")
    on_both.ok("worker", "restart")
    again = on_both.json("worker", "status")
    assert {row["pid"] for row in again}.isdisjoint({row["pid"] for row in rows})
    assert again[0]["options"] == "--concurrency=3 --commands --lease=5s"
    assert on_both.ok("worker", "stop").count("has stopped") == 2
    assert not any(is_alive(row["pid"]) for row in rows + again)
    assert on_both("worker", "status").returncode == 3
    assert "has stopped" in (tmp_path / ".penstock" / "workers" / "worker-1.log").read_text()
    assert "no worker runs" in on_both.refused("worker", "restart", code=4)


@pytest.mark.usefixtures("stopped")
def test_a_count_of_workers_includes_those_that_run(penstock: Shell, tmp_path: Path) -> None:
    store, default = (f"sqlite:///{tmp_path}/{name}.db" for name in ("other", "penstock"))
    assert f"store {store}" in penstock.ok("worker", "start", "--url", "sqlite:///other.db")
    said = penstock.refused("worker", "start", code=4)
    assert f", store {store}" in said
    assert "Nothing was started. Give -n 2 to start another one" in said
    said = penstock.ok("worker", "start", "-n", "3").splitlines()
    assert [line.partition(" (")[0] for line in said] == [
        "worker-1 is already running",
        "worker-2 runs",
        "worker-3 runs",
    ]
    stores = [row["store"].partition(",")[0] for row in penstock.json("worker", "status")]
    assert stores == [store, default, default]
    assert "Running: worker-1, worker-2, worker-3." in penstock.refused("worker", "stop", "nosuch", code=3)
    penstock.ok("worker", "stop")
    assert f"no worker runs in the background of {tmp_path}" in penstock("worker", "stop").stderr


@pytest.mark.usefixtures("stopped")
def test_a_worker_that_does_not_stop_in_time_is_killed_with_its_command(
    penstock: Shell, tmp_path: Path
) -> None:
    penstock.ok("worker", "start")
    penstock.ok("enqueue", "trap '' TERM; echo $$ > pid; while :; do sleep 0.1; done")
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    [row] = penstock.json("worker", "status")

    assert "was killed" in penstock.ok("worker", "stop", "--timeout", "0.5")

    until(lambda: not is_alive(int((tmp_path / "pid").read_text())))
    assert not is_alive(row["pid"])


UNTIL_GO = "echo $$ >> running; while [ ! -e go ]; do sleep 0.05; done"


@pytest.mark.usefixtures("stopped")
def test_a_worker_that_is_stopped_has_the_grace_it_was_started_with(
    penstock: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    penstock.ok("worker", "start", "--grace", "1m")
    penstock.ok("enqueue", UNTIL_GO, "--id", "x")
    until((tmp_path / "running").exists)

    # With the grace of the shell that stops it, the worker would be killed before the job ends.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_GRACE", "0s")
    monkeypatch.setattr(background, "_BEYOND_GRACE_S", 0.2)
    go = Timer(1, (tmp_path / "go").touch)
    go.start()
    try:
        assert main.run(["worker", "stop"]) == 0
    finally:
        go.join()

    assert "worker-1 has stopped" in capfd.readouterr().out
    assert penstock.json("show", "x")["state"] == "completed"


@pytest.mark.usefixtures("stopped")
def test_stop_signals_all_workers_before_it_waits_for_any(penstock: Shell, tmp_path: Path) -> None:
    penstock.ok("worker", "start", "--count", "2", "-c", "1", "--grace", "2m")
    penstock.ok("enqueue", "-", input=f"{UNTIL_GO}\n" * 2)
    until(lambda: (tmp_path / "running").exists() and len((tmp_path / "running").read_text().split()) == 2)
    logs = [tmp_path / ".penstock" / "workers" / f"worker-{number}.log" for number in (1, 2)]

    stop = penstock.start("worker", "stop")
    try:
        # A worker that is signalled later could start again what another has handed back.
        until(lambda: all("stopping" in log.read_text() for log in logs))
    finally:
        (tmp_path / "go").touch()
        said, _ = stop.communicate(timeout=60)

    assert said.count("has stopped") == 2
    assert len((tmp_path / "running").read_text().split()) == 2


@pytest.mark.usefixtures("stopped")
def test_a_worker_restarted_from_elsewhere_stays_on_its_store(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "jobs").mkdir()
    below = Shell(tmp_path / "jobs")
    below.ok("worker", "start")

    penstock.ok("worker", "restart", env={"PENSTOCK_URL": "sqlite:///other.db", "PENSTOCK_QUEUE": "other"})

    assert below("enqueue", "--wait", "--wait-timeout", "30s", "pwd").stdout == f"{below.folder}\n"
    assert not list(tmp_path.glob("*.db"))


@pytest.mark.usefixtures("stopped")
def test_a_worker_restarted_from_another_shell_keeps_its_variables(penstock: Shell, tmp_path: Path) -> None:
    variables = {"PENSTOCK_URL": "sqlite:///chosen.db", "PENSTOCK_NAMESPACE": "apart"}
    penstock.ok("worker", "start", env=variables)

    for _ in range(2):
        penstock.ok("worker", "restart")

    run = penstock("enqueue", "--wait", "--wait-timeout", "30s", "echo done", env=variables)
    assert run.stdout == "done\n"
    assert not (tmp_path / "penstock.db").exists()


@pytest.mark.usefixtures("stopped")
def test_one_that_does_not_start_again_keeps_no_other_from_it(penstock: Shell, tmp_path: Path) -> None:
    penstock.ok("config", "set", "workers", "2")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "tasks.py").write_text(APP.format("done"))
    Shell(tmp_path / "below").ok("worker", "start", "tasks:app")
    (tmp_path / "below" / "tasks.py").write_text(ONCE)

    run = penstock("worker", "restart")

    assert run.returncode == 1
    assert "worker-1 did not start: module tasks cannot be imported: RuntimeError: not yet" in run.stderr
    assert "worker-2 runs" in run.stdout
    assert [row["name"] for row in penstock.json("worker", "status")] == ["worker-2"]


@pytest.mark.usefixtures("stopped")
def test_only_the_owner_can_read_what_a_worker_leaves_whatever_the_umask(
    penstock: Shell, tmp_path: Path
) -> None:
    # The pid file has the variables of the worker, and a URL may have a password. Jobs write to the log.
    said, _ = penstock.start("worker", "start", umask=0).communicate(timeout=60)

    assert "worker-1 runs" in said
    workers = tmp_path / ".penstock" / "workers"
    locks = tmp_path / "penstock.db-workers"
    until(locks.exists)  # The worker announces itself once it runs.
    assert oct(locks.stat().st_mode & 0o777) == "0o700"
    files = [tmp_path / f"penstock.db{suffix}" for suffix in ("", "-wal", "-shm")]
    private = [workers / "worker-1.pid", workers / "worker-1.log", *files]
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in private} == dict.fromkeys(
        ("worker-1.pid", "worker-1.log", "penstock.db", "penstock.db-wal", "penstock.db-shm"), "0o600"
    )


@pytest.mark.usefixtures("stopped")
def test_a_log_that_exists_keeps_its_mode(penstock: Shell, tmp_path: Path) -> None:
    log = tmp_path / ".penstock" / "workers" / "worker-1.log"
    log.parent.mkdir(parents=True)
    log.touch()
    log.chmod(0o644)

    penstock.ok("worker", "start")

    assert log.stat().st_mode & 0o777 == 0o644


def test_the_password_of_a_url_is_not_shown(penstock: Shell, tmp_path: Path) -> None:
    place = tmp_path / ".penstock" / "workers" / "worker-1.pid"
    given = ["jobs:app", "--queues=a=3", "--url=valkey://me:secret@host:1?namespace=x"]
    with held(place, given, grace_ms=0, surroundings=Surroundings.here()):
        [row] = penstock.json("worker", "status")
        said = penstock.ok("worker", "status")

    assert row["options"] == "jobs:app --queues=a=3 --url=valkey://me:***@host:1?namespace=x"
    assert "secret" not in said


@pytest.mark.usefixtures("stopped")
def test_a_pid_file_left_by_a_crash_does_no_harm(penstock: Shell) -> None:
    penstock.ok("worker", "start")
    [row] = penstock.json("worker", "status")
    os.kill(row["pid"], signal.SIGKILL)
    until(lambda: not is_alive(row["pid"]))

    assert penstock("worker", "status").returncode == 3
    assert "worker-1 runs" in penstock.ok("worker", "start")


def test_two_workers_with_one_pid_file_are_refused(penstock: Shell, tmp_path: Path) -> None:
    first = penstock.start("worker", "--pid-file", "one.pid")
    try:
        until(
            lambda: (tmp_path / "one.pid").exists() and '"ready":true' in (tmp_path / "one.pid").read_text()
        )
        assert "is the pid file of a running worker" in penstock.refused(
            "worker", "--pid-file", "one.pid", code=4
        )
    finally:
        first.terminate()
        first.communicate(timeout=30)
    assert not (tmp_path / "one.pid").exists()


def test_a_worker_that_cannot_start_says_why(penstock: Shell, tmp_path: Path) -> None:
    assert "module 'nothing' is neither in" in penstock.refused("worker", "nothing:app", code=3)
    assert "is neither a command nor an app" in penstock.refused("worker", "nothing", code=2)
    assert "such as shop.jobs:app" in penstock.refused("worker", "./shop/jobs.py", code=2)
    for path in ("shop/jobs.py:app", "./shop/jobs.py:app", "shop/jobs:app"):
        said = penstock.refused("worker", path, code=2)
        assert "is the path of a file. Give the module and the name in it: shop.jobs:app" in said
    for app in ("shop", "shop:app"):
        said = penstock.refused("worker", "-A", app, "worker", code=2)
        assert "unexpected argument 'worker'. Use `penstock worker shop:app`." in said
    said = penstock.refused("worker", "MODULE:APP", "-q", "mail", code=2)
    assert "MODULE:APP stands for your app. Give its module and its variable, such as jobs:app" in said
    assert "did not start: module 'nothing' is" in penstock.refused("worker", "start", "nothing:app", code=3)
    assert "Did you mean '--concurrency'?" in penstock.refused("worker", "--concurency", "3", code=2)
    (tmp_path / "tasks.py").write_text("app = 7\n")
    assert "tasks:app is not an app, but of type int" in penstock.refused("worker", "tasks:app", code=3)
    assert "got 0" in penstock.refused("worker", "-c", "0", code=2)
    assert "is not a weight" in penstock.refused("worker", "-q", "a=b", code=2)


def test_several_processes_share_the_work(penstock: Shell, tmp_path: Path) -> None:
    penstock.ok("enqueue", "-", input="ps -o ppid= -p $PPID >> out; sleep 0.2\n" * 12)
    penstock.ok("worker", "--processes", "2", "--burst", "-c", "2")

    workers = (tmp_path / "out").read_text().split()
    assert len(workers) == 12
    assert len(set(workers)) == 2


def test_the_store_of_the_flag_goes_before_that_of_the_code(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(APP.replace("App()", 'App("sqlite:///own.db")').format("done"))
    given = ("--url", "sqlite:///given.db", "--namespace", "apart")
    job = penstock.ok("enqueue", "--task", "answer", "{}", "-q", "mail", *given).strip()
    penstock.ok("worker", "jobs:app", "--burst", "--no-live", *given)
    assert penstock.json("show", job, *given)["state"] == "completed"
    assert not (tmp_path / "own.db").exists()


FOLLOWED = """
import os
from penstock import App

app = App("sqlite:///own.db")

@app.task(queue="mail", runner="{runner}")
def first(n: int) -> None:
    second.sync.enqueue(n)

@app.task(queue="mail")
def second(n: int) -> int:
    return os.getppid()
"""


@pytest.mark.parametrize("runner", ["thread", "process", "sandbox"])
def test_the_store_of_the_flag_is_that_of_all_processes_of_the_worker(
    penstock: Shell, tmp_path: Path, runner: str
) -> None:
    (tmp_path / "jobs.py").write_text(FOLLOWED.format(runner=runner))
    given = ("--url", "sqlite:///given.db", "--namespace", "apart")
    penstock.ok("enqueue", "--task", "first", "-q", "mail", '{"n": 1}', *given)
    worker = penstock.start("worker", "jobs:app", "-p", "2", "--no-live", *given)
    try:
        until(lambda: len(penstock.json("list", "completed", "-q", "mail", *given)) == 2)
    finally:
        worker.terminate()
        worker.communicate(timeout=30)
    assert not (tmp_path / "own.db").exists()
    [parent] = {job["result"] for job in penstock.json("list", "completed", "-q", "mail", *given)} - {None}
    assert parent == worker.pid


@pytest.mark.usefixtures("stopped")
def test_a_worker_of_several_processes_runs_in_the_background(penstock: Shell, tmp_path: Path) -> None:
    assert "worker-1 runs" in penstock.ok("worker", "start", "--processes", "2", "--lease", "5s")
    assert len(penstock.json("workers")) == 2
    run = penstock("enqueue", "--wait", "--attempts", "1", "exit 5")
    assert run.returncode == 5
    assert "worker-1 has stopped" in penstock.ok("worker", "stop")
    log = (tmp_path / ".penstock" / "workers" / "worker-1.log").read_text()
    assert "works on default, in 2 processes" in log
    assert "CommandFailed: exit code 5" in log
    assert "Traceback" not in log


IMPATIENT = """
from penstock.cli.main import main
from penstock.worker import recovery

assert recovery._START_PATIENCE_S == 30
recovery._START_PATIENCE_S = 1.0
main()
"""


def test_several_processes_end_with_a_line_if_the_store_stays_away(penstock: Shell, tmp_path: Path) -> None:
    """They wait for it as any call does, which tests/worker/test_start.py has the time of, and say so."""
    impatient = tmp_path / "impatient.py"
    impatient.write_text(IMPATIENT)
    arguments = ("worker", "-p", "2", "--commands", "--url", "valkey://127.0.0.1:1")
    run = run_script(str(impatient), *arguments, cwd=tmp_path, env=penstock.environment)
    warning, last = run.stderr.decode().splitlines()
    assert "cannot connect to 127.0.0.1:1" in warning
    assert re.search(r"Trying again for \d s", warning)
    assert last.startswith("penstock: cannot connect to 127.0.0.1:1")
    assert run.returncode == ExitCode.STORE


def test_queues_have_weights_and_others_are_left_alone(penstock: Shell) -> None:
    for queue in ("a", "b", "c"):
        penstock.ok("enqueue", "true", "-q", queue)
    penstock.ok("worker", "-q", "a", "-q", "b=3", "--burst")

    counts = {row["queue"]: (row["completed"], row["waiting"]) for row in penstock.json("status")["queues"]}
    assert counts == {"a": (1, 0), "b": (1, 0), "c": (0, 1)}


def test_a_reloading_worker_runs_the_code_that_was_written_last(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(APP.format("old"))
    worker = penstock.start("worker", "tasks:app", "--reload")
    try:
        wait = ("enqueue", "--task", "answer", "-q", "mail", "--wait", "--wait-timeout", "30s")
        assert penstock.ok(*wait) == '"old"\n'
        (tmp_path / "tasks.py").write_text(APP.format("new, and longer"))
        until(lambda: penstock.ok(*wait) == '"new, and longer"\n')
    finally:
        worker.terminate()
        said, _ = worker.communicate(timeout=30)
    assert "tasks.py has changed" in said
    assert worker.returncode == 0


def test_a_reloading_worker_that_is_stopped_twice_hands_its_jobs_back(
    penstock: Shell, tmp_path: Path
) -> None:
    penstock.ok("enqueue", "echo $$ > pid; sleep 60", "--id", "x")
    worker = penstock.start("worker", "--reload")
    try:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        worker.terminate()
        assert worker.stdout is not None
        while "stopping" not in worker.stdout.readline():
            pass
        worker.terminate()
        assert worker.wait(25) == 0
    finally:
        worker.kill()
        worker.communicate()
    assert not is_alive(int((tmp_path / "pid").read_text()))
    assert penstock.json("show", "x")["state"] == "waiting"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGHUP, 0), (signal.SIGKILL, -signal.SIGKILL)], ids=["hangup", "kill"]
)
def test_a_worker_whose_reloader_is_gone_stops_gracefully(
    penstock: Shell, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    penstock.ok("enqueue", "touch began; while [ ! -e go ]; do sleep 0.05; done", "--id", "x")
    # The tests themselves may run with nohup, which a worker would heed.
    reloader = penstock.start(
        "worker", "--reload", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)
    )
    workers: list[psutil.Process] = []
    try:
        until((tmp_path / "began").exists)
        workers = psutil.Process(reloader.pid).children()
        assert len(workers) == 1
        reloader.send_signal(number)
        assert reloader.stdout is not None
        while "stopping" not in reloader.stdout.readline():
            pass
        # The shell and the kernel both hang up when a terminal is closed: that is no second Ctrl-C.
        reloader.send_signal(number)
        (tmp_path / "go").touch()
        # The worker has this pipe, too: its end comes when both let go of it.
        said, _ = reloader.communicate(timeout=30)
        until(lambda: not is_alive(workers[0].pid))
    finally:
        reloader.kill()
        for worker in workers:
            if worker.is_running():
                worker.kill()
    assert reloader.returncode == code
    assert "has stopped" in said
    assert penstock.json("show", "x")["state"] == "completed"


def test_a_reloading_worker_outlives_its_terminal_if_asked_to(penstock: Shell) -> None:
    reloader = penstock.start(
        "worker", "--reload", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    try:
        assert penstock.ok("enqueue", "--wait", "echo here") == "here\n"
        reloader.send_signal(signal.SIGHUP)
        assert penstock.ok("enqueue", "--wait", "echo still here") == "still here\n"
        assert reloader.poll() is None
    finally:
        reloader.terminate()
        reloader.communicate(timeout=30)


def test_a_worker_reloads_in_the_foreground_only(penstock: Shell, tmp_path: Path) -> None:
    said = penstock.refused("worker", "start", "-n", "2", "tasks:app", "--reload", code=2)
    assert "--reload is for a worker in the foreground" in said
    assert "`penstock worker restart`" in said
    said = penstock.refused("worker", "tasks:app", "--reload", "--pid-file", "one.pid", code=2)
    assert "--reload and --pid-file" in said
    assert list(tmp_path.iterdir()) == []


def test_at_a_terminal_there_is_a_live_view_until_ctrl_c(penstock: Shell, tmp_path: Path) -> None:
    penstock.ok("enqueue", "echo fast", "--id", "quick-one")
    penstock.ok("enqueue", f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done", "--id", "slow-one")
    with Terminal(penstock, "worker") as terminal:
        terminal.read_until("completed  quick-one  echo fast")
        terminal.read_until("slow-one")
        terminal.press("\x03")
        terminal.read_until("stopping")
        (tmp_path / "go").touch()
        assert terminal.wait() == 0
    assert penstock.json("show", "slow-one")["state"] == "completed"


def test_the_live_view_of_several_processes_shows_the_jobs_of_all(penstock: Shell, tmp_path: Path) -> None:
    penstock.ok("enqueue", "exit 3", "--id", "bad-one", "--attempts", "1")
    penstock.ok("enqueue", f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done", "--id", "slow-one")
    with Terminal(penstock, "worker", "--processes", "2", "-c", "1") as terminal:
        terminal.read_until("slow-one", seconds=60)
        terminal.read_until("failed 1", seconds=60)
        terminal.read_until("running 1/2")
        terminal.read_until("failed  bad-one  exit 3")
        assert "2 processes" in terminal.read_until("2 processes")
        terminal.press("\x03")
        (tmp_path / "go").touch()
        terminal.read_until("completed 1")
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.text
    assert penstock.json("show", "slow-one")["state"] == "completed"


def test_ctrl_c_twice_hands_the_jobs_back_and_leaves_nothing_behind(penstock: Shell, tmp_path: Path) -> None:
    penstock.ok("enqueue", "echo $$ > pid; sleep 60", "--id", "x")
    with Terminal(penstock, "worker", "--no-live") as terminal:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        terminal.press("\x03")
        terminal.read_until("stopping")
        terminal.press("\x03")
        assert terminal.wait() == 0
    assert not is_alive(int((tmp_path / "pid").read_text()))
    assert penstock.json("show", "x")["state"] == "waiting"


def test_the_live_view_counts_a_job_that_is_handed_back(penstock: Shell, tmp_path: Path) -> None:
    penstock.ok("enqueue", "touch begun; sleep 60", "--id", "handed-one")
    with Terminal(penstock, "worker") as terminal:
        until((tmp_path / "begun").exists)
        terminal.read_until("twice hands them back")
        terminal.press("\x03")
        terminal.read_until("Ctrl-C hands the running jobs back.")
        terminal.press("\x03")
        assert terminal.wait() == 0
        last = terminal.text.rpartition("penstock worker ")[2]
    assert " stopped\r" in last or " stopped\n" in last
    assert "handed back 1" in last
    assert "handed back  handed-one" in last
    assert "Ctrl-C" not in last


HANDLER = """
from penstock import App

app = App()

@app.handler("raw")
async def handle(payload: dict[str, str]) -> str:
    return f"got {payload}"
"""


def test_a_worker_runs_the_handler_of_a_queue(on_both: Shell, tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(HANDLER)
    (tmp_path / "produce.py").write_text(
        "import asyncio\nfrom jobs import app\n\nasync def main():\n    async with app:\n"
        "        await app.queue('raw').enqueue({'to': 'ada'}, id='a')\n\nasyncio.run(main())\n"
    )
    subprocess.run(
        [sys.executable, "produce.py"], cwd=tmp_path, env=on_both.environment, check=True, timeout=60
    )
    said = on_both.ok("why", "a")
    assert '@app.handler("raw")' in said
    on_both.ok("worker", "jobs:app", "--burst")
    shown = on_both.json("show", "a")
    assert (shown["state"], shown["result"]) == ("completed", "got {'to': 'ada'}")


FAILING = """
from penstock import App, JobContext, Retry

app = App()

@app.task(queue="mail")
def fail(to: str) -> None:
    raise ValueError(f"no address {to}")

@app.task(queue="mail")
async def again(context: JobContext) -> None:
    if context.run == 1:
        raise Retry("busy", delay="10ms")
"""


def _failing(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(FAILING)
    twice = ("--attempts", "2", "--backoff", "10ms")
    penstock.ok("enqueue", "--task", "fail", "-q", "mail", "--id", "f1", '{"to": "ada"}', *twice)
    penstock.ok("enqueue", "--task", "again", "-q", "mail", "--id", "a1", "{}")


@pytest.mark.parametrize("processes", ["1", "2"])
def test_each_failed_run_is_one_record_of_the_log(penstock: Shell, tmp_path: Path, processes: str) -> None:
    _failing(penstock, tmp_path)
    run = penstock("worker", "jobs:app", "--burst", "-p", processes)
    assert run.returncode == 0
    lines = [line for line in run.stderr.splitlines() if "no address ada" in line and "f1" in line]
    retry, end = lines
    assert (
        " WARNING job 'f1' of queue 'mail' (task 'fail') failed in run 1 of 2 and is retried in 10ms" in retry
    )
    assert (
        " ERROR job 'f1' of queue 'mail' (task 'fail') failed for good in run 2: ValueError: no address ada"
        in end
    )
    assert run.stderr.count("Traceback (most recent call last)") == 2
    [asked] = [line for line in run.stderr.splitlines() if "busy" in line]
    assert " INFO " in asked
    assert "a1" in asked


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_log_can_be_json(penstock: Shell, tmp_path: Path, processes: str) -> None:
    _failing(penstock, tmp_path)
    penstock.ok("config", "set", "log_format", "json")
    run = penstock("worker", "jobs:app", "--burst", "-v", "-p", processes)
    records = [json.loads(line) for line in run.stderr.splitlines()]
    retry, end = (record for record in records if record.get("id") == "f1")
    assert (retry["level"], end["level"]) == ("WARNING", "ERROR")
    assert {name: end[name] for name in ("logger", "queue", "task", "run")} == {
        "logger": "penstock.worker",
        "queue": "mail",
        "task": "fail",
        "run": 2,
    }
    assert end["exception"].endswith("ValueError: no address ada")
    assert all(record["worker"] for record in records)
    assert end["worker"] in [
        record["message"].split()[1] for record in records if "starts" in record["message"]
    ] or (processes == "2")
    assert any(record.get("id") == "a1" and record["message"].startswith("completed") for record in records)
    text = penstock("worker", "jobs:app", "--burst", "--log-format", "text").stderr
    assert " INFO worker " in text


@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize("processes", ["1", "2"])
def test_what_a_task_logs_is_in_the_log_of_the_worker_once(
    penstock: Shell, tmp_path: Path, processes: str, format: str
) -> None:
    (tmp_path / "jobs.py").write_text(
        "import logging\n"
        "from penstock import App\n"
        "app = App()\n"
        "@app.task(queue='mail')\n"
        "def send() -> None: logging.getLogger('shop').info('sending to ada')\n"
    )
    penstock.ok("enqueue", "--app", "jobs:app", "--task", "send")
    run = penstock("worker", "jobs:app", "--burst", "-p", processes, "--log-format", format)
    assert run.stderr.count("sending to ada") == 1
    assert run.stderr.count("starts: store") == 1


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_live_view_shows_a_failure_in_its_table_alone(
    penstock: Shell, tmp_path: Path, processes: str
) -> None:
    _failing(penstock, tmp_path)
    with Terminal(penstock, "worker", "jobs:app", "-p", processes) as terminal:
        terminal.read_until("failed 1", seconds=60)
        terminal.press("\x03")
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.text, terminal.text
        assert "is retried in" not in terminal.text


@pytest.mark.usefixtures("stopped")
def test_one_worker_of_several_is_stopped_or_restarted(penstock: Shell) -> None:
    penstock.ok("worker", "start", "-n", "2")
    pids = {row["name"]: row["pid"] for row in penstock.json("worker", "status")}
    assert "worker-2 runs" in penstock.ok("worker", "restart", "worker-2")
    again = {row["name"]: row["pid"] for row in penstock.json("worker", "status")}
    assert again["worker-1"] == pids["worker-1"]
    assert again["worker-2"] != pids["worker-2"]
    assert penstock.ok("worker", "stop", "worker-1") == "worker-1 has stopped\n"
    assert [row["name"] for row in penstock.json("worker", "status") if row["pid"]] == ["worker-2"]
    assert "Did you mean 'worker-2'?" in penstock.refused("worker", "stop", "worker-3", code=3)


def test_a_command_that_takes_too_long_has_no_traceback(penstock: Shell) -> None:
    penstock.ok("enqueue", "--timeout", "100ms", "--attempts", "1", "sleep 60")
    assert "no worker runs: `penstock worker --commands -q default` starts one" in penstock.ok("status")
    said = penstock("worker", "--burst").stderr
    assert "Timeout: the run took longer than its timeout of 100ms" in said
    assert "Traceback" not in said
