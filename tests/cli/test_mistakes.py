"""Mistakes at the prompt: the answer names what was wrong, and what to type instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.synonyms import did_you_mean, nearest
from tests.cli.conftest import Shell
from tests.cli.terminal import Terminal

LOOKING = [
    ["list"],
    ["search", "waiting"],
    ["events"],
    ["status"],
    ["workers"],
    ["dlq", "list"],
    ["dlq", "retry", "--all"],
    ["dlq", "clear"],
    ["schedule", "list"],
    ["schedule", "pause", "nightly"],
    ["limit", "show"],
    ["limit", "set", "--concurrency", "1"],
    ["limit", "set", "--none"],
    ["budget", "show"],
    ["budget", "set", "usd", "5"],
    ["budget", "remove", "usd"],
    ["signal", "a", "approved"],
    ["show", "a"],
    ["cancel", "a", "b"],
    ["reset", "--all-active"],
    ["reset-stale", "--older-than", "1s"],
    ["drain"],
    ["clean", "completed"],
    ["clear"],
]


@pytest.mark.timeout(180)
def test_every_command_refuses_a_queue_that_does_not_exist(penstock: Shell) -> None:
    penstock.ok("enqueue", "true", "-q", "mail", "--id", "a")
    for command in LOOKING:
        said = penstock.refused(*command, "-q", "mial", code=3)
        assert "the queue 'mial' does not exist. Did you mean 'mail'?" in said, command
    assert penstock.json("limit", "show") == []


def test_a_queue_that_was_set_up_before_its_first_job_exists(on_both: Shell) -> None:
    on_both.ok("enqueue", "true", "-q", "mail")
    assert "Add --create" in on_both.refused("limit", "set", "-q", "new", "--concurrency", "1", code=3)
    on_both.ok("limit", "set", "-q", "new", "--concurrency", "1", "--create")
    assert [row["queue"] for row in on_both.json("limit", "show", "-q", "new")] == ["new"]
    assert on_both.json("list", "-q", "new") == []
    on_both.ok("schedule", "add", "nightly", "--every", "1h", "true", "-q", "reports")
    assert on_both.json("status", "-q", "reports")["queues"][0]["waiting"] == 0


def test_looking_at_a_store_without_jobs_is_not_an_error(penstock: Shell) -> None:
    penstock.ok("enqueue", "true", "--id", "a")
    penstock.ok("clear", "--yes")
    assert penstock.json("list") == []
    assert penstock.json("list", "-q", "default") == []


def test_a_truncated_list_says_how_many_more_there_are(penstock: Shell) -> None:
    penstock.ok("enqueue", "-", input="true\n" * 73)
    run = penstock("list")
    assert run.stdout.count("waiting") == 50
    assert run.stderr == "50 of 73 jobs; add --all to see the rest\n"
    assert "50 of 73" in penstock("list", "waiting", "--json").stderr
    assert penstock("list", "--all").stderr == ""
    assert penstock("list", "-n", "73").stderr == ""
    assert penstock("list", "--task", "penstock.command").stderr == (
        "the first 50 jobs; add --all to see the rest\n"
    )
    assert penstock("search", "waiting", "-n", "3").stderr == "the first 3 jobs; add --limit 30 to see more\n"
    assert penstock("search", "waiting", "-n", "1").stderr == "the first job; add --limit 10 to see more\n"
    assert penstock("search", "waiting", "-n", "73").stderr == ""


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        (["len", "--json"], ""),
        (["pause", "--for-long"], "unknown option '--for-long'. See: penstock pause --help"),
        (["drain", "nosuch"], "the queue 'nosuch' does not exist. There is: mail."),
        (["limit", "set", "--rate", "5"], "--rate 5: give a count and a period, such as 100/s"),
        (["limit", "set", "--group", "a", "--bucket", "5"], "--bucket 5: give a capacity and a rate"),
        (["workers", "urgent"], "unexpected argument 'urgent'. (See: penstock workers --help)"),
        (["search", "waiting", "mail"], "unexpected argument 'mail'. For that queue, give -q mail."),
        (["workers", "start"], "Did you mean `penstock worker start`?"),
        (["clean", "completed", "7d"], "Did you mean --older-than 7d?"),
        (["clean", "active"], "only jobs that have ended can be cleaned: cancelled, completed, failed."),
        (["schedule", "remove", "a", "b"], "Give one name at a time."),
        (["schedule", "add", "x", "*/5 * * * *", "true"], "Give the times with --cron '*/5 * * * *'."),
        (["schedule", "add", "x", "true", "--every", "1h", "--cron", "@daily"], "Give only one of them."),
        (["events", "--tail", "3"], "--since 5m"),
        (["search", "echo"], "penstock dlq list --matching echo"),
        (["enqueue", "{ echo x; }"], "A job that begins with { is JSON; write ( … ) for a shell group."),
        (["enqueue", "-p", "5", "true"], "Give --priority."),
        (["frobnicate"], "Commands: enqueue, list"),
        (["list", "waitng"], "'waitng' is not a state. Did you mean 'waiting'?"),
        (["list", "all"], "Leave it out for jobs of every state, and add --all to list all of them."),
        (["list", "mail"], "'mail' is not a state. For that queue, give -q mail."),
        (["enqueue", "ls", "-la"], "put -- before the command, or quote it"),
        (["enqueue", "--at", "5min", "true"], "'5min' is a duration. Give --delay 5min"),
        (["enqueue", '{"command": "true", "at": "5min"}'], "'5min' is a duration. Give delay"),
        (
            ["enqueue", '{"command": "true", "retries": 5}'],
            "a job has no key 'retries'. Did you mean 'max_retries'?",
        ),
        (["enqueue", '{"command": "true", "timout": 5}'], "Did you mean 'timeout'?"),
        (["schedule", "add", "n", "--every", "1h", "make", "report"], "Quote the command."),
        (["config", "get", "atempts"], "Did you mean 'attempts'?"),
        (["worker", "--concurency", "3"], "Did you mean '--concurrency'?"),
    ],
)
def test_the_answer_names_the_remedy(penstock: Shell, command: list[str], remedy: str) -> None:
    penstock.ok("enqueue", "true", "-q", "mail")
    run = penstock(*command)
    assert remedy in run.stderr
    assert run.returncode in ((2, 3) if remedy else (0,))
    assert run.stderr.count("\n") == (1 if remedy else 0)


def test_only_names_that_look_alike_are_offered() -> None:
    known = ["clean", "drain", "list", "status", "default", "--url", "--concurrency"]
    assert nearest("len", known) == []
    assert nearest("--for", known) == []
    assert nearest("nosuch", known) == []
    assert nearest("--concurency", known) == ["--concurrency"]
    assert nearest("stauts", known) == ["status"]
    assert nearest("drian", known) == ["drain"]
    assert did_you_mean("x", [f"queue{n}" for n in range(14)]).endswith("queue11 and 2 more.")


def test_no_to_a_question_says_that_nothing_was_removed(penstock: Shell) -> None:
    penstock.ok("enqueue", "true")
    for command in (["drain"], ["clear"], ["clean", "completed"], ["dlq", "clear"]):
        with Terminal(penstock, *command) as terminal:
            terminal.read_until("[y/N]")
            terminal.press("n\n")
            assert terminal.wait() == 4
            assert "penstock: nothing was removed." in terminal.text
            assert "interrupted" not in terminal.text
    assert len(penstock.json("list")) == 1


def test_an_invalid_url_is_named_with_its_origin(penstock: Shell) -> None:
    said = penstock.refused("status", code=2, env={"PENSTOCK_URL": "ops.db"})
    assert "PENSTOCK_URL in the environment: url cannot be 'ops.db'" in said
    assert "Give a URL such as sqlite:///ops.db." in said
    said = penstock.refused("status", "--url", "localhost:6379", code=2)
    assert "--url: url cannot be 'localhost:6379'. Give a URL such as valkey://localhost:6379." in said
    said = penstock.refused("status", "--url", "ada:secret@host:6379", code=2)
    assert "secret" not in said
    assert "Give a URL such as valkey://***@host:6379." in said
    assert "Give a URL" in penstock.refused("config", "set", "url", "nonsense", code=2)


def test_a_store_without_jobs_is_named_with_its_namespace(penstock: Shell, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/penstock.db"
    penstock.ok("enqueue", "true")
    for command in ("status", "list"):
        run = penstock(command, "--namespace", "shpo")
        assert run.stderr == f"no jobs yet in the store {store}, namespace shpo\n"
    found = {row["what"]: row for row in penstock.json("doctor", "--namespace", "shpo")}
    assert found["queues"]["found"] == "none: no job was ever enqueued here"
    assert penstock.json("status")["store"] == f"{store}, namespace default"


def test_a_refused_connection_names_the_remedy(penstock: Shell) -> None:
    said = penstock.refused("status", "--url", "valkey://127.0.0.1:1", code=5)
    assert "cannot connect to 127.0.0.1:1: connection refused. Start the server, or check the host" in said


def test_words_of_other_tools_and_misspelt_words_have_remedies(penstock: Shell, tmp_path: Path) -> None:
    penstock.ok("enqueue", "--id", "bad", "--attempts", "1", "exit 1")
    penstock.ok("worker", "--burst")

    def said(*words: str) -> str:
        return penstock.refused(*words, code=2)

    assert "Did you mean `penstock worker start`?" in said("worker", "strat")
    (penstock.folder / "strat.py").write_text("")
    assert "worker start" not in said("worker", "strat")
    assert "with -n 4." in said("worker", "start", "4")
    assert "give -c 4." in said("worker", "4")
    assert "`penstock drain` removes jobs that wait" in said("clean", "waiting")
    assert "If it is a queue" not in said("clean", "waiting")
    assert "--every 10m" in said("schedule", "add", "x", "true")
    assert "there is no such name" in said("schedule", "add", "x", "--cron", "@dayly", "true")
    assert "looks like seconds since 1970" in said("enqueue", "--at", "1700000000", "true")
    (tmp_path / "text").write_text("hello")
    assert "text is not a backup" in penstock.refused("restore", "text", "--yes", code=2)
    penstock.ok("backup", "--output", "copy.db")
    said_of_class = penstock("search", "failed", "--error", "Nope").stderr
    assert "; there are: CommandFailed (1)" in said_of_class
    assert (
        "the program /bin/nosh does not exist here" in penstock("config", "set", "shell", "/bin/nosh").stderr
    )
    penstock.ok("config", "set", "shell", "")
    (tmp_path / "penstock.toml").write_text('quue = "x"\n')
    assert f"{tmp_path}/penstock.toml: the key 'quue' does not exist" in penstock.refused("status", code=2)


def test_a_shorter_pause_says_that_the_longer_one_goes_on(penstock: Shell) -> None:
    penstock.ok("pause", "default", "--for", "1h", "--create")
    assert "as it was before" in penstock.ok("pause", "default", "--for", "1s", "--create")


def test_events_of_the_last_minutes(penstock: Shell) -> None:
    penstock.ok("enqueue", "--id", "a", "true")
    assert "enqueued" in penstock.ok("events", "--since", "5m")
    assert penstock.ok("events", "--since", "0s") == ""
    assert "a duration such as 5m" in penstock.refused("events", "--since", "yesterday", code=2)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("grep", "-q", "foo", "jobs.txt"), "-q"),
        (("echo", "--wait", "hi"), "--wait"),
        (("wget", "-t", "3", "http://localhost"), "-t"),
        (("sh", "--countdown", "3", "x"), "--countdown"),
    ],
)
def test_an_option_between_the_words_of_a_command_is_refused(
    penstock: Shell, words: tuple[str, ...], option: str
) -> None:
    refused = penstock.refused("enqueue", *words, code=2)
    assert f"'{option}' stands between the words of the command" in refused
    assert "put -- before the command" in refused


def test_options_before_and_behind_a_command_and_after_two_dashes_are_fine(penstock: Shell) -> None:
    penstock("enqueue", "-q", "mail", "make", "report", "--delay", "1h", "--id", "a")
    penstock("enqueue", "--id", "b", "--", "grep", "-q", "foo", "jobs.txt")
    assert penstock.json("show", "a", "--json")["queue"] == "mail"
    assert penstock.json("show", "b", "--json")["payload"]["command"] == "grep -q foo jobs.txt"


def test_a_second_or_an_empty_queue_is_refused(penstock: Shell) -> None:
    assert "-q takes one queue here, got a and b." in penstock.refused("list", "-q", "a", "-q", "b", code=2)
    assert "-q is empty." in penstock.refused("enqueue", "-q", "", "true", code=2)
