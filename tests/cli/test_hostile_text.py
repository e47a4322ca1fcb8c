"""No text of a job reaches the terminal as a control character: every command, in a pipe and at a terminal.

The store is filled below the checks for names, as anyone with access to it can.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.command import COMMAND_TASK
from penstock.core.job import Extras, Lease, NewJob, Options
from penstock.core.limits import Limit
from penstock.core.outcome import Complete, Fail, Failure
from penstock.core.schedule import Every, Schedule, ScheduleSpec, pack_spec
from penstock.core.step import NewStep
from penstock.storage import open_storage
from penstock.storage.contract import Storage
from penstock.storage.values import NewScheduler, Report, Settlement, Take
from tests.cli.conftest import Shell
from tests.cli.terminal import Terminal
from tests.cli.test_every_command import ALL, ELSEWHERE

# Each starts the script many times, which takes a while where the machine is busy.
pytestmark = pytest.mark.timeout(300)

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\x00\x08\x0b\r\u202e\u2066end"
ESCAPED = r"\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\x00\x08\x0b\x0d\u202e\u2066end"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffd]")
# What rich writes: styles, moves of the cursor, the cursor and the other screen switched on and off. No title, no link.
STYLING = re.compile(r"\x1b\[[0-9;]*m|\x1b\[[0-9;]*[AGHK]|\x1b\[2J\x1b\[H|\x1b\[\?(25|1049)[hl]|\r")

CSI = re.compile(r"\x1b\[[0-9;:?<>=]*[ -/]*[@-~]|\x1b\]22;[a-z]*\x07|\x1bP[ -~]*\x1b\\|\r")

LINES: dict[str, list[list[str]]] = {
    "enqueue": [
        ["enqueue", EVIL.replace("\x00", ""), "--id", "new"],
        ["enqueue", "true", "--id", EVIL.replace("\x00", "")],
        ["enqueue", "true", "-q", EVIL.replace("\x00", "")],
        ["enqueue", f'{{"command": "true", "id": "{ESCAPED}"}}'],
        ["enqueue", "-k", "-f", "lines"],
    ],
    "list": [["list"], ["list", "--json"], ["list", "failed", "--task", "\x1b[2J"]],
    "show": [["show", "failed"], ["show", "failed", "--traceback"], ["show", "active"], ["show", "active", "--json"],
             ["show", "\x1b[2J"]],
    "why": [["why", "failed"], ["why", "active"], ["why", "active", "--json"], ["why", "cmd"], ["why", "\x1b[2J"]],
    "logs": [["logs", "active"], ["logs", "active", "--json"], ["logs", "\x1b[2J"]],
    "wait": [["wait", "failed", "completed"], ["wait", "failed", "--json"], ["wait", "\x1b[2J"]],
    "search": [["search", "failed"], ["search", "failed", "--where", f"to={EVIL[:30].replace(chr(0), '')}"]],
    "events": [["events"], ["events", "--json"], ["events", "--since", "\x1b[2J"]],
    "status": [["status"], ["status", "--json"], ["status", "-q", "\x1b[2J"]],
    "workers": [["workers"], ["workers", "--json"]],
    "dlq list": [["dlq", "list"], ["dlq", "list", "--matching", "\x1b[2J"]],
    "dlq show": [["dlq", "show", "failed"], ["dlq", "show", "active"], ["dlq", "show", "\x1b[2J"]],
    "dlq retry": [["dlq", "retry", "failed"], ["dlq", "retry", "\x1b[2J"]],
    "dlq clear": [["dlq", "clear"], ["dlq", "clear", "--yes", "--matching", "\x1b[2J"]],
    "cancel": [["cancel", "\x1b[2J", "active"], ["cancel", "\x1b[2J", "--json"]],
    "retry": [["retry", "\x1b[2J", "failed"]],
    "promote": [["promote", "\x1b[2J", "active"]],
    "remove": [["remove", "\x1b[2J", "active"]],
    "signal": [["signal", "\x1b[2J", "go"], ["signal", "active", "\x1b[2J"], ["signal", "active", "go", "\x1b[2J"]],
    "reset": [["reset", "\x1b[2J", "failed"]],
    "reset-stale": [["reset-stale", "--older-than", "\x1b[2J"], ["reset-stale", "--older-than", "1h"]],
    "schedule list": [["schedule", "list"], ["schedule", "list", "--json"]],
    "schedule add": [
        ["schedule", "add", "\x1b[2J", "--every", "1h", "true"],
        ["schedule", "add", "nightly", "--cron", "\x1b[2J", "true"],
        ["schedule", "add", "nightly", "--start", "\x1b[2J", "--every", "1h", "true"],
    ],
    "schedule remove": [["schedule", "remove", "\x1b[2J"]],
    "schedule pause": [["schedule", "pause", "\x1b[2J"]],
    "schedule run": [["schedule", "run", "\x1b[2J"]],
    "schedule resume": [["schedule", "resume", "\x1b[2J"]],
    "limit set": [["limit", "set", "--rate", "\x1b[2J"], ["limit", "set", "--group", "\x1b[2J", "--rate", "1/s"]],
    "budget set": [["budget", "set", "\x1b[2J", "1"], ["budget", "set", "usd", "1", "--per", "\x1b[2J"]],
    "budget show": [["budget", "show"], ["budget", "show", "--json"]],
    "budget remove": [["budget", "remove", "usd\x1b[2J"], ["budget", "remove", "usd", "--flow", "\x1b[2J"]],
    "limit show": [["limit", "show"], ["limit", "show", "--json"]],
    "pause": [["pause", "-q", "\x1b[2J"], ["pause", "--group", "\x1b[2J"], ["pause", "--until", "\x1b[2J"]],
    "resume": [["resume", "-q", "\x1b[2J"], ["resume", "--group", "\x1b[2J"]],
    "drain": [["drain", "-q", "\x1b[2J"]],
    "clean": [["clean", "\x1b[2J"], ["clean", "failed", "-q", "\x1b[2J"]],
    "clear": [["clear"], ["clear", "--yes", "-q", "\x1b[2J"]],
    "worker run": [
        ["worker", "--burst", "--no-live", "-v", "-q", "commands"],
        ["worker", "\x1b[2J:app"],
        ["worker", "-q", "x=\x1b[2J"],
    ],
    "worker start": [["worker", "start", "\x1b[2J:app"]],
    "worker stop": [["worker", "stop", "--timeout", "\x1b[2J"]],
    "worker restart": [["worker", "restart"]],
    "worker status": [["worker", "status"]],
    "doctor": [["doctor"], ["doctor", "--json"]],
    "config get": [["config", "get", "\x1b[2J"], ["config", "get", "url", "--url", "\x1b[2J"]],
    "config set": [["config", "set", "queue", "\x1b[2J"], ["config", "set", "\x1b[2J", "x"]],
    "config list": [["config", "list"], ["config", "list", "--json"]],
    "config path": [["config", "path"]],
    "completion": [["completion", "\x1b[2J"]],
    "backup": [["backup", "missing\x1b[2J/copy.db"], ["backup", "copy\x1b[2J.db"]],
    "restore": [["restore", "--yes", "missing\x1b[2J.db"]],
    # Live: tests of their own, below.
    "top": [["top", "--every", "\x1b[2J"]],
}  # fmt: skip

DRIVER = """
import json, os, sys
from penstock.cli.main import run
for arguments in json.load(open("commands.json")):
    code = run(arguments)
    sys.stdout.flush(); sys.stderr.flush()
    os.write(1, f"<<{code}>>\\n".encode())
"""


async def fill(storage: Storage) -> None:
    """One job in every state that shows text, a worker, a scheduler, a limit: all of them hostile."""
    evil = Extras(group=EVIL, headers={EVIL: EVIL})
    tasks = Options(task=f"task{EVIL}", attempts=1)
    payload = json.dumps({"to": EVIL}).encode()
    await storage.enqueue("default", [NewJob("active", payload, tasks, extras=evil)])
    [lease] = (await storage.claim("default", Take(f"worker{EVIL}", 1, 3_600_000))).leases
    progress = json.dumps({"at": EVIL}).encode()
    await storage.report("default", [Report(lease.id, lease.token, progress, (f"line {EVIL}",))])
    failure = Failure(f"Error{EVIL}", f"message {EVIL}\nstate     completed", f"Traceback {EVIL}")
    await storage.record_steps("default", _steps(lease, failure))
    info = {"host": EVIL, "state": EVIL, "queues": [EVIL], "running": [EVIL], "pid": 1}
    await storage.extend(
        "default", [], worker=f"worker{EVIL}", lease_ms=60_000, info=json.dumps(info).encode()
    )
    for id, outcome in (("failed", Fail(failure, final=True)), ("completed", Complete(payload))):
        await storage.enqueue("default", [NewJob(id, payload, tasks)])
        [lease] = (await storage.claim("default", Take(f"worker{EVIL}", 1, 3_600_000))).leases
        await storage.settle("default", [Settlement(lease.id, lease.token, outcome)])
    await storage.enqueue("default", [NewJob(f"id{EVIL}", payload, tasks)])
    await storage.limit("default", EVIL, Limit(concurrency=1))
    spec = ScheduleSpec(Schedule(Every(3_600_000)), NewJob("", payload, tasks))
    await storage.put_scheduler("default", NewScheduler(EVIL, pack_spec(spec), 4_000_000_000_000))
    command = json.dumps({"command": f"echo '{EVIL.replace(chr(0), '')}'; exit 3"}).encode()
    await storage.enqueue("commands", [NewJob("cmd", command, Options(task=COMMAND_TASK, attempts=1))])


def _steps(lease: Lease, failure: Failure) -> list[NewStep]:
    """A step in every state. The last one is under way, as a stall would name it."""
    return [
        NewStep(
            lease.id, lease.token, f"done{EVIL}", result=json.dumps(EVIL).encode(), arguments=EVIL.encode()
        ),
        NewStep(lease.id, lease.token, f"failed{EVIL}", "failed", failures=1, failure=failure),
        NewStep(
            lease.id, lease.token, f"retrying{EVIL}", "retrying", failures=1, failure=failure, delay_ms=60_000
        ),
        NewStep(lease.id, lease.token, f"waiting{EVIL}", "waiting"),
        NewStep(lease.id, lease.token, f"started{EVIL}", "started"),
    ]


@pytest.fixture
def hostile(tmp_path: Path) -> Shell:
    async def put() -> None:
        storage = open_storage(f"sqlite:///{tmp_path / 'penstock.db'}")
        await storage.open()
        try:
            await fill(storage)
        finally:
            await storage.close()

    asyncio.run(put())
    (tmp_path / "lines").write_text(f'{{"command": 5, "{EVIL}": 1}}\n{{"command\x1b[2J\n')
    (tmp_path / "commands.json").write_text(json.dumps([line for lines in LINES.values() for line in lines]))
    return Shell(tmp_path)


def test_every_command_is_walked() -> None:
    assert LINES.keys() == set(ALL)
    assert {"spark", "history", "archive"} == ELSEWHERE


def check(text: str) -> list[str]:
    """The output of each command, in which no control character is left."""
    outputs = re.split(r"<<\d+>>\n", text)
    assert len(outputs) - 1 == sum(map(len, LINES.values()))
    lines = [line for lines in LINES.values() for line in lines]
    for arguments, output in zip(lines, outputs, strict=False):
        assert not CONTROLS.findall(output), (arguments, output)
        assert "Traceback (most recent" not in output, (arguments, output)
        if "--json" in arguments and arguments[0] != "events":
            json.loads(output.split("\npenstock: ")[0])
    return outputs


def test_in_a_pipe(hostile: Shell) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=hostile.folder,
        env=hostile.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
    )
    outputs = check(done.stdout.decode("utf-8", "replace"))
    text = "".join(outputs)
    for part in ("task", "id", "worker", "line ", "message ", "Traceback "):
        assert f"{part}{ESCAPED}" in text, part
    # As JSON says it, and as the log of the worker says it.
    assert r"\u001b]0;owned\u0007" in text
    assert r"CommandFailed: exit code 3: \x1b]0;owned" in text


@pytest.mark.parametrize("colours", [True, False])
def test_at_a_terminal(hostile: Shell, colours: bool) -> None:
    if not colours:
        hostile.environment["NO_COLOR"] = "1"
    with Terminal(hostile, columns=250, command=[sys.executable, "-c", DRIVER]) as terminal:
        # To the questions of `dlq clear`, `drain`, `clean` and `clear`.
        terminal.press("n\n" * 4)
        assert terminal.wait(seconds=120) == 0
        text = STYLING.sub("", terminal.raw)
        assert ("\x1b[3" in terminal.raw) == colours
        outputs = check(text)
    assert f"line {ESCAPED}" in "".join(outputs)
    for state in ("done", "failed", "retrying", "waiting", "started"):
        assert f"{state}{ESCAPED}" in "".join(outputs)


def test_the_log_of_a_job_is_printed_as_it_is_if_asked_for(hostile: Shell) -> None:
    assert hostile.ok("logs", "active", "--raw", text=False) == f"line {EVIL}\n".encode()
    assert "either --raw or --json" in hostile.refused("logs", "active", "--raw", "--json", code=2)


def test_a_status_that_is_watched(hostile: Shell) -> None:
    with Terminal(hostile, "status", "--watch", "--every", "0.1", columns=250) as terminal:
        seen = terminal.read_raw_until("default")
        terminal.press("\x03")
        terminal.wait()
        assert not CONTROLS.findall(STYLING.sub("", seen + terminal.raw))


def test_top(hostile: Shell) -> None:
    with Terminal(hostile, "top", "--every", "0.1", columns=250) as terminal:
        seen = terminal.read_raw_until("default")
        terminal.press("q")
        terminal.wait()
        # It draws with many sequences of its own. Of the hostile ones, those that are no CSI would be left.
        assert not CONTROLS.findall(CSI.sub("", seen + terminal.raw))


def test_the_live_view_of_a_worker(hostile: Shell) -> None:
    with Terminal(hostile, "worker", "-q", "commands", "-q", "default", columns=250) as terminal:
        seen = terminal.read_raw_until("exit code 3")
        terminal.press("\x03")
        terminal.wait()
        assert not CONTROLS.findall(STYLING.sub("", seen + terminal.raw))


def test_a_script_of_several_lines_cannot_forge_a_fact(hostile: Shell) -> None:
    hostile.ok("enqueue", "true\nstate        completed", "--id", "forged")
    states = [line for line in hostile.ok("show", "forged").splitlines() if line.startswith("state")]
    assert [line.split() for line in states] == [["state", "waiting"]]
    # An error that has a line end is one line of the events.
    assert not [
        line for line in hostile.ok("events").splitlines() if not line.startswith(("default", "commands"))
    ]


def test_a_traceback_shown_by_debug_is_visible(hostile: Shell) -> None:
    run = hostile("show", "\x1b[2J", "--debug")
    assert "Traceback" in run.stderr
    assert not CONTROLS.findall(run.stderr)


def test_a_terminal_that_is_not_in_utf_8_gets_escapes(hostile: Shell) -> None:
    hostile.ok("enqueue", "echo ümläut", "--id", "umlaut")
    shown = hostile.ok("show", "umlaut", env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert r"echo \xfcml\xe4ut" in shown
