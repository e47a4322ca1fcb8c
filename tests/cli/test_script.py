"""The script itself: help, errors, exit codes, completion."""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.commands import COMMANDS
from tests.cli.conftest import Shell, script


def test_help_lists_every_command_and_imports_none() -> None:
    watch = (
        "import sys; from penstock.cli.main import run; run(['--help']);"
        "print(*sorted(name for name in sys.modules), file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True, check=True)

    assert all(f"  {name} " in run.stdout for name in COMMANDS)
    loaded = set(run.stderr.split())
    targets = {f"penstock.cli.{row.target.partition(':')[0]}" for row in COMMANDS.values()}
    targets.remove("penstock.cli.commands")  # the list itself, which has a short command beside it
    assert loaded.isdisjoint(targets | {"asyncio", "msgspec", "rich", "penstock.client.app"})


def test_help_takes_at_most_a_quarter_of_a_second_longer_than_python_itself(tmp_path: Path) -> None:
    # Compiled once, as what is installed is.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path)

    # Processor time: what the clock on the wall says depends on whatever else the machine does.
    def seconds(*command: str) -> float:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return used.ru_utime + used.ru_stime

    pairs = [(seconds(*script(), "--help"), seconds(sys.executable, "-c", "pass")) for _ in range(11)][1:]
    shown, bare = (statistics.median(times) for times in zip(*pairs, strict=True))
    assert shown - bare <= 0.25, (shown, bare)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_says_what_it_does(penstock: Shell, name: str) -> None:
    shown = penstock.ok(name, "--help", fresh=True)

    assert f"Usage: penstock {name}" in shown
    assert len(shown.splitlines()) > 4


def test_commands_import_what_they_need(on_both: Shell) -> None:
    """Most other tests run commands in processes that have imported everything already."""
    for words in (
        ("enqueue", "false", "--id", "job-one", "--attempts", "1"),
        ("worker", "--burst", "--commands"),
        ("status",),
        ("list",),
        ("show", "job-one"),
        ("why", "job-one"),
        ("events",),
        ("search", "failed"),
        ("dlq", "retry", "--all"),
        ("schedule", "list"),
    ):
        on_both.ok(*words, fresh=True)


def test_ctrl_c_while_modules_are_imported_prints_no_traceback(penstock: Shell) -> None:
    (penstock.folder / "click.py").write_text("import signal\n\nsignal.raise_signal(signal.SIGINT)\n")
    path = f"{penstock.folder}{os.pathsep}{penstock.environment['PYTHONPATH']}"

    run = penstock("status", env={"PYTHONPATH": path}, fresh=True)

    assert (run.returncode, run.stdout, run.stderr) == (130, "", "penstock: interrupted\n")


def test_without_a_command_there_is_help(penstock: Shell) -> None:
    run = penstock()

    assert run.returncode == 2
    assert "Usage: penstock" in run.stderr


def test_an_unknown_command_is_refused_with_a_suggestion(penstock: Shell) -> None:
    assert "Did you mean 'config'?" in penstock.refused("conifg", code=2)


def test_an_error_has_a_traceback_with_debug_only(penstock: Shell) -> None:
    assert "Traceback" not in penstock.refused("config", "get", "nothing", code=2)
    run = penstock("config", "get", "nothing", "--debug")
    assert run.returncode == 2
    assert "Traceback" in run.stderr


def test_the_version_is_printed(penstock: Shell) -> None:
    from penstock import __version__

    assert penstock.ok("--version") == f"penstock {__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_the_usual_shells(penstock: Shell, shell: str) -> None:
    assert "_PENSTOCK_COMPLETE" in penstock.ok("completion", shell)


def test_commands_and_keys_are_completed(penstock: Shell) -> None:
    asked = {"_PENSTOCK_COMPLETE": "bash_complete", "COMP_WORDS": "penstock conf", "COMP_CWORD": "1"}
    assert "config" in penstock("", env=asked).stdout
    asked = {
        "_PENSTOCK_COMPLETE": "bash_complete",
        "COMP_WORDS": "penstock config get att",
        "COMP_CWORD": "3",
    }
    assert "attempts" in penstock("", env=asked).stdout


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        (("con",), "config"),
        (("worker", "sta"), "start status"),
        (("worker", "--bu"), "--burst"),
        (("worker", "start", "--bu"), "--burst"),
        (("dlq", "re"), "retry"),
        (("list", "wai"), "waiting"),
        (("config", "get", "att"), "attempts"),
        (("show", "job-"), "job-one"),
        (("retry", "job-"), ""),
        (("list", "--queue", "rep"), "reports"),
        (("--url", "sqlite:///none.db", "show", "job-"), ""),
    ],
)
def test_bash_completes_commands_options_states_queues_and_ids(
    penstock: Shell, tmp_path: Path, typed: tuple[str, ...], completed: str
) -> None:
    penstock.ok("enqueue", "true", "--id", "job-one", "-q", "reports")
    program = tmp_path / "bin" / "penstock"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {" ".join(script())} "$@"\n')
    program.chmod(0o755)
    steps = (
        'eval "$(penstock completion bash)"\n'
        'COMP_WORDS=(penstock "$@"); COMP_CWORD=$#; _penstock_completion penstock; echo "${COMPREPLY[*]}"'
    )
    run = subprocess.run(
        ["bash", "-c", steps, "bash", *typed],
        cwd=penstock.folder,
        env=penstock.environment | {"PATH": f"{program.parent}:{penstock.environment['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.stdout.strip(), run.stderr) == (completed, "")


def test_a_family_refuses_a_wrong_name_and_takes_the_store_wherever_it_is_said(penstock: Shell) -> None:
    assert "Did you mean 'retry'?" in penstock.refused("dlq", "retrry", code=2)
    penstock.ok("--url", "sqlite:///other.db", "enqueue", "exit 1", "--attempts", "1", "--id", "x")
    penstock.ok("worker", "--url", "sqlite:///other.db", "--burst")
    for said in (
        ("--url", "sqlite:///other.db", "dlq", "list"),
        ("dlq", "--url", "sqlite:///other.db", "list"),
        ("dlq", "list", "--url", "sqlite:///other.db"),
    ):
        assert [job["id"] for job in penstock.json(*said)] == ["x"]


def test_the_module_is_the_script(penstock: Shell) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "penstock", "--version"],
        env=penstock.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == penstock.ok("--version")


def test_without_click_it_is_said_what_to_install() -> None:
    blocked = "import sys; sys.modules['click'] = None; from penstock.cli.main import main; main()"
    run = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False)

    assert run.returncode == 1
    assert run.stderr == (
        "penstock: the command line needs click, which is not installed: pip install 'penstock[cli]'\n"
    )


def test_a_command_works_with_a_closed_standard_output(penstock: Shell, tmp_path: Path) -> None:
    command = f"{shlex.join(script())} enqueue --id quiet true >&-"
    run = subprocess.run(
        ["sh", "-c", command],
        cwd=tmp_path,
        env=penstock.environment,
        stderr=subprocess.PIPE,
        check=False,
        text=True,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert penstock.json("show", "quiet")["state"] == "waiting"


def test_events_end_quietly_when_their_reader_does(penstock: Shell, tmp_path: Path) -> None:
    for n in range(20):
        penstock.ok("enqueue", "--id", f"job-{n}", "true")
    command = f"{shlex.join(script())} events | head -n 2"
    run = subprocess.run(
        ["sh", "-c", command],
        cwd=tmp_path,
        env=penstock.environment,
        capture_output=True,
        check=True,
        text=True,
    )
    assert len(run.stdout.splitlines()) == 2
    assert run.stderr == ""
