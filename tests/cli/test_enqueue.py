"""``penstock enqueue``, and what a worker makes of it."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.cli.conftest import Shell, script, until

# Each starts the script many times, which takes a while where the machine is busy.
pytestmark = pytest.mark.timeout(300)

APP = """
from penstock import App

app = App()

@app.task(queue="mail", attempts=1)
async def send(to: str, copies: int = 1) -> str:
    return f"{copies} to {to}"
"""


def state_of(shell: Shell, id: str) -> str:
    state: str = shell.json("show", id)["state"]
    return state


RULED = """
from penstock import App

app = App()

@app.task(queue="mail", group="to-{to}", cost="{copies}", unique="to")
async def send(to: str, copies: int = 1) -> None: ...
"""


def test_an_app_applies_the_rules_of_its_tasks(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "ruled.py").write_text(RULED)
    id = penstock.ok("enqueue", "--app", "ruled:app", "--task", "send", '{"to": "ada", "copies": 3}').strip()
    again = penstock("enqueue", "--app", "ruled:app", '{"task": "send", "args": ["ada"]}')
    assert again.stdout.strip() == id
    assert "nothing was enqueued" in again.stderr
    shown = penstock.json("show", id)
    assert (shown["group"], shown["cost"]) == ("to-ada", 3)


def test_a_command_is_enqueued_and_run(on_both: Shell, tmp_path: Path) -> None:
    id = on_both.ok("enqueue", f"echo done > {tmp_path}/out").strip()
    assert not (tmp_path / "out").exists()

    on_both.ok("worker", "--burst", "--commands")

    assert (tmp_path / "out").read_text() == "done\n"
    assert state_of(on_both, id) == "completed"


def test_waiting_prints_the_output_and_ends_with_the_code_of_the_command(on_both: Shell) -> None:
    worker = on_both.start("worker", "--commands")
    try:
        run = on_both("enqueue", "--wait", "--attempts", "1", "echo out; echo err >&2; exit 7")
        assert (run.returncode, run.stdout) == (7, "out\nerr\n")
        assert "exit code 7: err" in run.stderr
        run = on_both("enqueue", "--wait", "--", "printf", "%s|", "a b", "c")
        assert (run.returncode, run.stdout) == (0, "a b|c|\n")
        waited = on_both("enqueue", "--wait", "--json", "exit 3", "--attempts", "1")
        assert waited.returncode == 3
        assert json.loads(waited.stdout)["state"] == "failed"
    finally:
        worker.terminate()
        worker.communicate(timeout=30)
    assert worker.returncode == 0


def test_a_wait_that_is_over_leaves_the_job_alone(penstock: Shell) -> None:
    said = penstock("enqueue", "--id", "x", "--wait", "--wait-timeout", "100ms", "true")
    assert said.returncode == 6
    assert state_of(penstock, "x") == "waiting"


def test_json_says_what_options_say(on_both: Shell) -> None:
    job = {"command": "true", "id": "j", "attempts": 5, "priority": -2, "timeout": "30s", "delay": "1h"}
    answer = on_both.json("enqueue", json.dumps(job))
    assert answer == {
        "id": "j",
        "ref": "default/j",
        "queue": "default",
        "status": "queued",
        "state": "scheduled",
    }
    on_both.ok(
        *("enqueue", "true", "--id", "o", "--attempts", "5", "--priority", "-2"),
        *("--timeout", "30s", "--delay", "1h", "-q", "other", "--group", "g", "--backoff", "5s"),
    )

    told, other = on_both.json("show", "j"), on_both.json("show", "o")

    same = ("state", "attempts", "priority", "timeout_ms", "task")
    assert [told[name] for name in same] == ["scheduled", 5, -2, 30_000, "penstock.command"]
    assert [other[name] for name in same] == [told[name] for name in same]
    assert (other["queue"], other["group"]) == ("other", "g")


def test_the_id_is_the_dedup_key(penstock: Shell) -> None:
    penstock.ok("enqueue", "--id", "once", "true")
    again = penstock("enqueue", "--id", "once", "true")

    assert (again.returncode, again.stdout) == (0, "once\n")
    assert "there already, waiting" in again.stderr


def test_a_job_waits_for_another(penstock: Shell, tmp_path: Path) -> None:
    penstock.ok("enqueue", "--id", "first", "echo first >> out")
    penstock.ok("enqueue", "--id", "second", "--after", "first", "--priority", "-5", "echo second >> out")
    assert penstock.json("show", "second")["blocked_by"] == "children"

    penstock.ok("worker", "--burst")

    assert (tmp_path / "out").read_text() == "first\nsecond\n"


def test_a_command_has_its_folder_and_its_variables(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    here = Shell(tmp_path / "below", f"sqlite:///{tmp_path}/penstock.db")
    here.environment["COLOUR"] = "red"
    here.ok(
        "enqueue",
        "--env",
        "A=1 2",
        "--env",
        "COLOUR",
        'echo "$A $COLOUR $PENSTOCK_JOB_ID $PENSTOCK_JOB_RUN" > out',
    )
    here.ok("enqueue", "--cwd", "..", "pwd > above")

    penstock.ok("worker", "--burst")

    words = (tmp_path / "below" / "out").read_text().split()
    assert (words[:3], len(words[3]), words[4]) == (["1", "2", "red"], 32, "1")
    assert (tmp_path / "above").read_text().strip() == str(tmp_path)


def test_thousands_come_from_standard_input_or_a_file(on_both: Shell, tmp_path: Path) -> None:
    lines = "".join(f'{{"command": "true", "id": "n-{n}"}}\n' for n in range(3000))

    assert on_both.ok("enqueue", "-", input=lines) == "3000 jobs: 3000 queued\n"
    (tmp_path / "jobs").write_text(lines + "\necho plain\n")
    answer = on_both.json("enqueue", "--file", "jobs")
    assert answer == {"lines": 3002, "jobs": 3001, "refused": 0, "duplicate": 3000, "queued": 1}
    assert on_both.json("status")["queues"][0]["waiting"] == 3001


def test_tasks_are_enqueued_by_name(on_both: Shell, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(APP)
    on_both.ok("enqueue", "--task", "send", "-q", "mail", '{"to": "ada"}', "--id", "a")
    on_both.ok("enqueue", "--app", "tasks:app", "--task", "send", '["bob", 2]', "--id", "b")
    on_both.ok("enqueue", '{"task": "send", "queue": "mail", "args": {"to": "eve"}, "id": "c"}')

    on_both.ok("worker", "tasks:app", "--burst")

    results = [on_both.json("show", id)["result"] for id in "abc"]
    assert results == ["1 to ada", "2 to bob", "1 to eve"]


def test_the_store_that_is_said_goes_before_the_one_an_app_names(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(APP.replace("App()", 'App("sqlite:///own.db")'))
    said = ("--url", "sqlite:///other.db", "--namespace", "part")
    penstock.ok("enqueue", *said, "--app", "tasks:app", "--task", "send", '{"to": "ada"}', "--id", "a")
    assert not (tmp_path / "own.db").exists()

    penstock.ok("worker", "tasks:app", *said, "--burst")

    assert penstock.json("show", "a", *said)["result"] == "1 to ada"
    assert "job 'a' was not found" in penstock.refused("show", "a", *said[:2], code=3)
    penstock.ok("enqueue", "--app", "tasks:app", "--task", "send", '{"to": "bob"}', "--id", "b")
    assert penstock.json("show", "b", "--url", "sqlite:///own.db")["state"] == "waiting"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (('{"command": "x"',), "that is not valid JSON"),
        (('{"id": "x"}',), 'a job needs a "command" or a "task"'),
        (('{"comand": "x"}',), "a job has no key 'comand'. Did you mean 'command'?"),
        (('{"command": 7}',), "command must be a string, got 7."),
        (('{"command": "x", "attempts": 0}',), "attempts must be an integer"),
        (("   ",), "the command is empty"),
        ((), "give exactly one of: a command"),
        (("x", "--delay", "soon"), "'soon' is not a duration"),
        (("x", "--id", " "), "is not allowed as id"),
        (("x", "-q", "a/b"), "is not allowed as queue name"),
        (("x", "--env", "NO_SUCH_VARIABLE_HERE"), "NO_SUCH_VARIABLE_HERE is not set here"),
        (("--task", "send", "{"), "the arguments are not valid JSON"),
        (("--task", "send", "[1]"), "are a list"),
        (("-f", "missing.jsonl"), "missing.jsonl cannot be read"),
        (("-f", "missing.jsonl", "--id", "x"), "--id and --wait are for one job"),
        (("x", "--url", "memory://"), "memory:// is gone"),
        (("x", "--url", "nosql://h"), "No engine serves nosql://"),
        (("x", "--attempts", "few"), "'few' is not a valid int"),
        # Bytes that are no text, as Python hands them on.
        (("echo \udcff",), "'echo \\udcff' is not valid UTF-8"),
        (("--task", "send", '{"to": "\udcff"}'), "is not valid UTF-8"),
        (("x", "--env", "A=\udcff"), "cannot be encoded"),
        (("x", "--group", "\udcff"), "is not allowed as group"),
    ],
)
def test_an_invalid_job_is_refused_and_nothing_is_written(
    penstock: Shell, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    assert says in penstock.refused("enqueue", *arguments, code=2)
    assert not (tmp_path / "penstock.db").exists()


@pytest.mark.parametrize("input", ["", "# no job\n", '{"command": 1}\n'])
def test_input_without_a_job_creates_no_store(penstock: Shell, tmp_path: Path, input: str) -> None:
    penstock("enqueue", "-", input=input)
    assert not (tmp_path / "penstock.db").exists()


@pytest.mark.parametrize("arguments", [("pwd",), ("-",)])
def test_a_second_store_below_another_is_reported(
    penstock: Shell, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    assert penstock("enqueue", "pwd").stderr == ""
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    shell = Shell(below)
    assert shell("enqueue", *arguments, input="pwd\n").stderr == (
        f"created the store {below}/penstock.db (there is another one in {tmp_path})\n"
    )
    assert shell("enqueue", *arguments, input="pwd\n").stderr == ""


def test_a_bad_line_is_reported_with_the_count_enqueued_before_it(penstock: Shell) -> None:
    said = penstock.refused("enqueue", "-", input='echo a\n{"command": 1}\n', code=2)

    assert "line 2: command must be a string, got 1." in said
    assert "Nothing was enqueued." in said


def test_a_byte_order_mark_is_not_part_of_the_first_line(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text('{"command": "true", "id": "first"}\n', encoding="utf-8-sig")
    (tmp_path / "arguments").write_text('{"to": "ada"}\n', encoding="utf-8-sig")
    (tmp_path / "commands").write_text("make report\n", encoding="utf-8-sig")

    penstock.ok("enqueue", "-f", "jobs")
    assert penstock.json("show", "first")["payload"]["command"] == "true"
    penstock.ok("enqueue", "-f", "arguments", "--task", "send", "-q", "mail")
    assert [job["payload"] for job in penstock.json("list", "-q", "mail")] == [{"to": "ada"}]
    penstock.ok("enqueue", "-f", "commands", "-q", "made")
    assert [job["payload"]["command"] for job in penstock.json("list", "-q", "made")] == ["make report"]


def test_what_is_said_to_be_in_before_a_bad_line_is_in(penstock: Shell) -> None:
    good = "".join(f'{{"command": "true", "id": "n-{n}", "attempts": {n % 5 + 1}}}\n' for n in range(25_000))
    said = penstock.refused("enqueue", "-", input=good + "{\n", code=2)

    assert "line 25001: that is not valid JSON" in said
    before = int(said.split("The lines up to ")[1].split(" were")[0])
    assert 0 < before <= 25_000
    assert penstock.json("status")["queues"][0]["waiting"] == before


def test_an_unreachable_refusing_or_newer_store_is_reported(penstock: Shell, tmp_path: Path) -> None:
    import sqlite3

    assert "127.0.0.1:1" in penstock.refused("enqueue", "x", "--url", "valkey://127.0.0.1:1", code=5)
    (tmp_path / "text.db").write_text("this is no database, but a text that is long enough" * 20)
    assert "text.db" in penstock.refused("enqueue", "x", "--url", "sqlite:///text.db", code=5)
    penstock.ok("enqueue", "true")
    with sqlite3.connect(tmp_path / "penstock.db") as db:
        [(version,)] = db.execute("PRAGMA user_version")
        db.execute(f"PRAGMA user_version = {version + 1}")
    db.close()
    assert "Upgrade Penstock" in penstock.refused("enqueue", "true", code=5)


def test_a_failing_command_is_retried_with_backoff_and_then_failed(penstock: Shell, tmp_path: Path) -> None:
    penstock.ok("enqueue", "--id", "x", "--attempts", "3", "--backoff", "50ms", "echo run >> runs; exit 4")

    penstock.ok("worker", "--burst")

    assert (tmp_path / "runs").read_text() == "run\n" * 3
    told = penstock.json("show", "x")
    assert (told["state"], told["failures"], told["progress"]["exit_code"]) == ("failed", 3, 4)
    assert told["failure"]["type"] == "CommandFailed"


def test_a_worker_runs_commands_only_if_started_for_them(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(APP)
    penstock.ok("enqueue", "--id", "x", "--attempts", "1", "touch out")
    assert "has nothing to run" in penstock.refused("worker", "--burst", "--no-commands", code=2)
    assert state_of(penstock, "x") == "waiting"
    penstock.ok("worker", "tasks:app", "-q", "default", "--burst", "--no-commands")

    assert not (tmp_path / "out").exists()
    assert "does not run commands" in penstock.json("show", "x")["failure"]["message"]


def test_a_worker_on_a_server_runs_commands_only_if_asked_to(valkey_url: str, tmp_path: Path) -> None:
    shell = Shell(tmp_path, f"{valkey_url}?namespace=nocommands")
    (tmp_path / "tasks.py").write_text(APP)
    shell.ok("enqueue", "--id", "x", "--attempts", "1", f"touch {tmp_path}/out")
    assert "has nothing to run" in shell.refused("worker", "--burst", code=2)
    shell.ok("worker", "tasks:app", "-q", "default", "--burst")

    assert not (tmp_path / "out").exists()
    assert until(lambda: state_of(shell, "x") == "failed")


def test_a_full_disk_is_reported_and_confirmed_jobs_are_kept(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("".join(f'{{"command": "true", "id": "n-{n}"}}\n' for n in range(20_000)))
    (tmp_path / "disk").mkdir()
    mounted = "mount -t tmpfs -o size=2m tmpfs disk && cd disk"
    in_a_small_disk = ["unshare", "-rm", "sh", "-c"]
    if subprocess.run([*in_a_small_disk, mounted], cwd=tmp_path, capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody but its administrator mount a small disk")
    command = " ".join(script())
    steps = f"{mounted}; {command} enqueue -f ../jobs; echo code $?; {command} status --json; {command} doctor >&2"
    run = subprocess.run(
        [*in_a_small_disk, steps],
        cwd=tmp_path,
        env=penstock.environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert "no room to write" in run.stderr
    code, counts = run.stdout.split("\n", 1)
    assert code == "code 5"
    waiting = json.loads(counts)["queues"][0]["waiting"]
    assert 0 < waiting < 20_000
    assert f"{waiting} records, all indexes agree" in run.stderr


def test_json_nested_too_deeply_is_not_a_job(penstock: Shell, tmp_path: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    lines = [f'{{"task": "t", "args": {deep}}}', '{"command": "true"}', '{"args":' * 100_000]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    done = penstock("enqueue", "-k", "-f", "lines")
    assert done.returncode == 2
    assert done.stdout == "1 job: 1 queued; 2 lines are not jobs\n"
    assert done.stderr.count("nested too deeply") == 2
    assert "nested too deeply" in penstock.refused("enqueue", "-f", "lines", code=2)
    done = penstock("enqueue", "-k", "-t", "t", "-f", "-", input=f"{deep}\n{{}}\n")
    assert (done.returncode, done.stderr.count("nested too deeply")) == (2, 1)


@pytest.mark.parametrize("is_line", [True, False], ids=["line", "argument"])
def test_json_that_names_a_task_uses_the_configured_app(
    penstock: Shell, tmp_path: Path, is_line: bool
) -> None:
    (tmp_path / "jobs.py").write_text(
        "from penstock import App\n"
        "app = App()\n"
        "@app.task(queue='mail', attempts=1)\n"
        "def send(to: str) -> None: ...\n"
    )
    env = {"PENSTOCK_APP": "jobs:app"}

    def enqueue(text: str, code: int = 0) -> str:
        ran = (
            penstock("enqueue", "-", input=f"{text}\n", env=env)
            if is_line
            else penstock("enqueue", text, env=env)
        )
        assert ran.returncode == code, ran.stderr
        return str(ran.stderr)

    enqueue('{"task": "send", "args": {"to": "ada"}, "id": "a"}')
    job = penstock.json("show", "mail/a", env=env)
    assert (job["queue"], job["attempts"]) == ("mail", 1)
    assert "to" in enqueue('{"task": "send", "args": {"bad": 1}}', code=2)
    assert "nothing" in enqueue('{"task": "nothing", "args": {}}', code=2)


def test_what_is_most_likely_not_meant_is_said(penstock: Shell, tmp_path: Path) -> None:
    said = penstock("enqueue", "echo", "a", "&&", "echo", "b").stderr
    assert "'&&' is an argument of echo here" in said
    assert "penstock enqueue 'echo a && echo b'" in said
    said = penstock("enqueue", "--at", "2020-01-01 10:00", "true").stderr
    assert said == "--at 2020-01-01 10:00:00 is in the past, so the job is due now\n"
    said = penstock("enqueue", "--cwd", "nowhere", "true").stderr
    assert said == f"the folder {tmp_path}/nowhere does not exist: the command fails until it does\n"
    assert penstock("enqueue", "echo", "a b").stderr == ""


def test_a_duration_in_two_words_is_not_taken_for_a_command(penstock: Shell) -> None:
    said = penstock.refused("enqueue", "--delay", "5", "minutes", "echo x", code=2)
    assert "Give --delay '5 minutes'." in said
    penstock.ok("enqueue", "--delay", "5 minutes", "echo x")
    penstock.ok("enqueue", "--delay", "5", "w", "-h")
    assert "Leave the option out" in penstock.refused("enqueue", "--timeout", "0", "true", code=2)
    assert "is not the name of a variable" in penstock.refused("enqueue", "--env", "A B=3", "true", code=2)


def test_a_time_may_be_counted_from_now(penstock: Shell) -> None:
    for text in ("now + 1h", "now + 60 minutes", "in 1h"):
        id = penstock.ok("enqueue", "--at", text, "true").strip()
        due = datetime.fromisoformat(penstock.json("show", id)["run_at"])
        assert timedelta(minutes=59) < due - datetime.now(UTC) <= timedelta(hours=1)
    assert penstock("enqueue", "--at", "now", "true").returncode == 0
    assert "is not a time" in penstock.refused("enqueue", "--at", "now + x", "true", code=2)


def test_lines_that_begin_with_a_hash_are_comments(penstock: Shell) -> None:
    said = penstock.ok("enqueue", "-", input="# nightly\n\ntrue\n  # later\nfalse # not this\n")
    assert said == "2 jobs: 2 queued\n"


def test_a_wait_says_that_the_queue_is_paused(penstock: Shell) -> None:
    penstock.ok("pause", "default", "--create")
    said = penstock("enqueue", "--id", "a", "true", "--wait-timeout", "3s").stderr
    assert "a waits. Queue default has been paused since" in said


def test_the_ids_of_a_file_can_be_waited_for(penstock: Shell) -> None:
    run = penstock("enqueue", "-", "--ids", input='true\n{"command": "true", "id": "named"}\n')
    first, second = run.stdout.splitlines()
    assert (second, run.stderr) == ("named", "2 jobs: 2 queued\n")
    penstock.ok("worker", "--burst")
    assert penstock("wait", first, second).returncode == 0


def test_a_known_id_with_another_command_is_reported(penstock: Shell) -> None:
    penstock.ok("enqueue", "--id", "n1", "echo old")
    again = penstock("enqueue", "--id", "n1", "echo different")
    assert again.stderr == (
        "nothing was enqueued: n1 is there already, waiting, and is another job: echo old\n"
    )
    assert penstock("enqueue", "--id", "n1", "echo old").stderr == (
        "nothing was enqueued: n1 is there already, waiting\n"
    )


def test_a_file_of_jobs_that_is_given_as_a_command_is_reported(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text('{"command": "true"}\n')
    assert "penstock enqueue -f jobs.jsonl" in penstock("enqueue", "jobs.jsonl").stderr


def test_a_value_of_the_wrong_type_is_shown(penstock: Shell) -> None:
    refused = penstock.refused(
        "enqueue", "-", input='true\n{"command": "true", "priority": "high"}\n', code=2
    )
    assert "line 2: priority must be an integer, got 'high'." in refused
    refused = penstock.refused("enqueue", '{"command": "true", "env": {"A": 1}}', code=2)
    assert "env[...] must be a string, got an integer." in refused


def test_a_line_that_is_also_invalid_behind_a_wrong_value_is_skipped(penstock: Shell) -> None:
    lines = [
        r'{"command": 5, "id": "\udcff"}',
        '{"command": 5, "args":' + "[" * 100_000,
        '{"command": "true"}',
    ]
    done = penstock("enqueue", "-k", "-f", "-", input="\n".join(lines) + "\n")
    assert (done.returncode, done.stdout) == (2, "1 job: 1 queued; 2 lines are not jobs\n")
    assert done.stderr.count("command must be a string, got an integer.") == 2


def test_a_folder_with_a_nul_character_is_refused(penstock: Shell) -> None:
    refused = penstock.refused("enqueue", r'{"command": "true", "cwd": "a\u0000b"}', code=2)
    assert r"a\x00b' contains a NUL character" in refused


def test_several_quoted_commands_are_not_one(penstock: Shell) -> None:
    said = penstock.refused("enqueue", "echo 1", "echo 2", code=2)
    assert "the program 'echo 1' does not exist: several words are one command" in said
    assert "`printf '%s\\n' 'echo 1' 'echo 2' | penstock enqueue -`" in said
    assert not (penstock.folder / "penstock.db").exists()
    program = penstock.folder / "my program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    penstock.ok("enqueue", "./my program", "a b")
    penstock.ok("enqueue", "ls", "my file")
