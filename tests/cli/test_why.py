"""Each tool names the cause that keeps a job from running."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path

import pytest
from textual.widgets import DataTable, Static

from penstock import App, ResultTimeout
from penstock.cli.connect import open_app
from penstock.cli.output import wrapped
from penstock.cli.parameters import Flags
from penstock.cli.settings import Settings
from penstock.cli.topdetails import Details
from penstock.cli.topscreen import TopScreen
from penstock.client.situation import command_context, command_line, worker_command
from penstock.core.job import NewJob
from penstock.core.outcome import Snooze
from penstock.storage.values import Settlement, Take
from tests.causes import CAUSES, Cause, plant
from tests.cli.conftest import Shell
from tests.cli.terminal import Terminal

# Each starts the script many times, which takes a while where the machine is busy.
pytestmark = pytest.mark.timeout(300)


def store_of(shell: Shell) -> str:
    return shell.environment.get("PENSTOCK_URL", f"sqlite:///{shell.folder}/penstock.db")


def in_a_column(cause: Cause) -> str:
    """Return how a list begins to say it: it reads each queue once, and so knows neither children nor old pauses."""
    words = {"paused": f"Queue {cause.queue} ", "group paused": "Group other is paused"}
    return words.get(cause.kind, "other jobs" if cause.kind == "children" else cause.words[0])[:40]


IN_SHORT = {
    "stopped": "paused",
    "rested": "paused until ",
    "orphan": "no worker",
    "second": "queue limit: capped/",
    "behind": "group limit: grouped/",
    "quiet": "group paused",
    "later": "rate limit until ",
    "poor": "budget",
    "parent": "waits for jobs",
    "asks": "waits for signal: paid",
    "foreign": "unknown task: other.task",
    "shy": "unknown task: new.task",
    "tomorrow": "not due until 20",
    "half": "write not complete",
}
"""What a narrow column says about each cause."""


@pytest.fixture
def planted(on_both: Shell) -> Shell:
    """A store with a job for each cause."""

    async def plant_all() -> None:
        async with App(store_of(on_both)) as app:
            await plant(app)

    asyncio.run(plant_all())
    return on_both


def test_why_names_each_cause_and_its_remedy(planted: Shell) -> None:
    for cause in CAUSES:
        text, remedy = planted.ok("why", cause.id).splitlines()
        assert all(words in text for words in cause.words), text
        assert cause.remedy in remedy
    why = planted.json("why", "second")
    assert (why["id"], why["queue"], why["state"]) == ("second", "capped", "waiting")
    assert (why["kind"], why["jobs"], why["until"]) == ("queue limit", ["capped/first-of-queue"], None)


def test_why_of_an_unknown_job_fails(on_both: Shell) -> None:
    on_both.ok("enqueue", "true")
    on_both.ok("why", on_both.json("list")[0]["id"])
    assert "job 'nobody' was not found" in on_both.refused("why", "nobody", code=3)


def test_show_and_list_name_each_cause(planted: Shell) -> None:
    listed = {(job["queue"], job["id"]): job["why"] for job in planted.json("list")}
    for cause in CAUSES:
        assert listed[cause.queue, cause.id]["kind"] == cause.kind
    table = {line.split()[0]: line for line in planted.ok("list").splitlines()[1:] if line.strip()}
    for cause in CAUSES:
        assert in_a_column(cause) in table[cause.id]
    for cause in CAUSES:
        shown = planted.ok("show", cause.id)
        assert all(words in shown for words in cause.words)
        assert cause.remedy in shown
        assert planted.json("show", cause.id)["why"]["kind"] == cause.kind


def test_status_names_every_cause_in_a_queue(planted: Shell) -> None:
    rows = planted.json("status")["queues"]
    causes = {(row["queue"], cause["kind"]): cause for row in rows for cause in row["causes"]}
    for cause in CAUSES:
        assert causes[cause.queue, cause.kind]["job"] == cause.id
        assert causes[cause.queue, cause.kind]["count"] == 1
    text = planted.ok("status")
    assert "\npaused, 1 job: Queue paused has been paused since 20" in text
    assert "\ntimed/tomorrow: It is not due until 20" in text
    assert "\ngrouped/behind: Group tenant 7 is at its limit" in text
    assert "\ngrouped/quiet: Group other has been paused since 20" in text
    assert "slots busy; none works on alone\n" in text
    assert "\nalone/orphan: No worker runs for queue alone. Start one with an app that has" in text


def test_doctor_warns_about_queues_without_a_worker_and_unknown_tasks(planted: Shell) -> None:
    found = {(one["what"], one["verdict"]): one for one in planted_doctor(planted)}
    alone = found["queue alone", "note"]
    assert alone["found"] == "holds back 1 job: No worker runs for queue alone."
    assert '@app.handler("alone")' in alone["advice"]
    assert found["task other.task", "problem"]["found"] == "not known to w-live"
    assert "The worker that took it last does not know" in found["task new.task", "problem"]["found"]


@pytest.mark.parametrize("task", ["send", "unheard"])
def test_an_app_is_proposed_only_for_the_tasks_that_it_defines(tmp_path: Path, task: str) -> None:
    url = f"sqlite:///{tmp_path}/penstock.db"
    (tmp_path / "jobs.py").write_text("from penstock import App\n\napp = App(include=['more'])\n")
    (tmp_path / "more.py").write_text("from jobs import app\n\n@app.task\ndef send() -> None: ...\n")
    asyncio.run(hand_back(url, task))
    shell = Shell(tmp_path, url)
    shell.environment["PENSTOCK_APP"] = "jobs:app"
    start = ", with `penstock worker jobs:app -q unk`" if task == "send" else ""
    remedy = f"Start a worker whose app defines the task{start}."

    assert shell.json("why", "unk/back")["remedy"] == remedy
    assert remedy in " ".join(shell.ok("status").split())
    [found] = [one for one in planted_doctor(shell) if one["what"] == f"task {task}"]
    assert found["advice"] == remedy


async def hand_back(url: str, task: str) -> None:
    """Put in a job that a worker handed back because it does not know the task."""
    async with App(url) as app:
        storage = await app.connect()
        await app.queue("unk").enqueue({}, id="back", task=task)
        [lease] = (await storage.claim("unk", Take("w-old", 1, 60_000))).leases
        await storage.settle("unk", [Settlement(lease.id, lease.token, Snooze(3_600_000, unknown=True))])


def planted_doctor(shell: Shell) -> list[dict[str, str]]:
    return list(json.loads(shell("doctor", "--json").stdout))


def test_remedies_repeat_the_options_that_chose_the_store(tmp_path: Path, penstock: Shell) -> None:
    url = f"sqlite:///{tmp_path}/far away.db"
    (tmp_path / "jobs.py").write_text("from penstock import App\n\napp = App()\n")
    given = ("--url", url, "--app", "jobs:app")
    id = penstock.ok("enqueue", "true", "--delay", "1d", *given).strip()

    remedy = penstock.ok("why", id, *given).splitlines()[1]
    promote = pasted(remedy)
    assert promote[-4:] == [*given]
    penstock.ok(*promote)

    remedy = penstock.ok("why", id, *given).splitlines()[1]
    assert pasted(remedy) == ["worker", "--commands", "-q", "default", *given]
    status = penstock.ok("status", *given)
    assert pasted(status)[:4] == ["worker", "--commands", "-q", "default"]
    assert penstock.json("why", id, *given)["remedy"] == remedy
    waited = penstock("enqueue", "true", "--wait", "--wait-timeout", "100ms", *given).stderr
    assert pasted(waited) == ["worker", "--commands", "-q", "default", *given]


def pasted(text: str) -> list[str]:
    """Return the first command of a text, as a shell would read it."""
    return shlex.split(text.split("`penstock ")[1].split("`", maxsplit=1)[0])


def test_a_remedy_has_no_password_and_works_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "valkey://default:s3cret@localhost?namespace=remedy"
    context = command_context.get()
    flags = Flags()
    flags.given["url"] = url
    try:
        open_app(Settings(flags))
        remedies = command_line("promote", "mail/1"), worker_command("mail")
        monkeypatch.setenv("PENSTOCK_URL", url)
        open_app(Settings(flags))
        short = command_line("promote", "mail/1"), worker_command("mail")
    finally:
        command_context.set(context)
    where = '--url "$PENSTOCK_URL"` (with the URL of the store in PENSTOCK_URL)'
    assert remedies == (f"`penstock promote mail/1 {where}", f"`penstock worker MODULE:APP -q mail {where}")
    assert short == ("`penstock promote mail/1`", "`penstock worker MODULE:APP -q mail`")


async def test_top_shows_each_cause(on_both: Shell) -> None:
    async with App(store_of(on_both)) as app:
        await plant(app)
        top = TopScreen(app, every=3600)
        async with top.run_test(size=(160, 50)) as pilot:
            table = top.query_one("#jobs", DataTable)
            rows = [[str(cell) for cell in table.get_row_at(at)] for at in range(table.row_count)]
            why = {row[0]: row[-1] for row in rows}
            for cause in CAUSES:
                assert why[cause.id].startswith(IN_SHORT[cause.id])
                # The telling word comes first, so that it is there at 80 columns.
                assert len(IN_SHORT[cause.id]) <= 24
            top.push_screen(Details(app, "flows/parent", every=3600))
            await pilot.pause()
            facts = str(top.screen.query_one("#facts-text", Static).render())
            assert "It waits for 2 jobs to finish: flows/child-1, flows/child-2." in facts


async def test_a_staged_job_is_counted_and_says_how_to_get_rid_of_it(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    async with App(f"sqlite:///{tmp_path}/penstock.db") as app:
        storage = await app.connect()
        await storage.enqueue("mail", [NewJob("a", staged=True, write_id="w1")])
    run = asyncio.to_thread
    assert "1 staged" in await run(shell.ok, "status")
    shown = await run(shell.ok, "show", "a")
    assert "due " not in shown
    assert "run `penstock remove mail/a`." in shown
    job = await run(shell.json, "show", "a")
    assert (job["staged"], job["run_at"]) == (True, None)
    assert "staged by a write" in await run(shell.refused, "promote", "a", code=4)
    assert await run(shell.ok, "remove", "a") == "a removed\n"


async def test_no_command_is_proposed_for_a_job_without_a_task(tmp_path: Path) -> None:
    async with App(f"sqlite:///{tmp_path}/penstock.db") as app:
        await app.queue("raw").enqueue({"to": "ada"}, id="a")
    said = await asyncio.to_thread(Shell(tmp_path).ok, "why", "a")
    assert "penstock worker" not in said
    assert '@app.handler("raw")' in said


@pytest.mark.parametrize(
    ("job", "remedy"),
    [
        (("true",), "`penstock worker --commands -q default`"),
        (("--task", "send", "{}"), "`penstock worker MODULE:APP -q default`"),
    ],
)
def test_each_tool_proposes_the_same_worker(penstock: Shell, job: tuple[str, ...], remedy: str) -> None:
    id = penstock.ok("enqueue", *job).strip()
    assert remedy in penstock.ok("why", id)
    assert f"no worker runs: {remedy} starts one" in penstock.ok("status")
    advice = [row["advice"] for row in json.loads(penstock("doctor", "--json").stdout) if row["advice"]]
    assert advice == [f"Start one with {remedy}."]


def test_a_worker_on_another_store_is_told_by_the_path_of_this_one(penstock: Shell, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/penstock.db, namespace default"
    penstock.environment["PENSTOCK_URL"] = "sqlite:///penstock.db"
    penstock.ok("enqueue", "true", "--id", "a")
    sentence = f"Start one with `penstock worker --commands -q default`. The store is {store}."
    assert sentence in penstock.ok("why", "a")
    assert sentence in " ".join(penstock.ok("show", "a").split())
    assert sentence in penstock.refused("wait", "a", "--timeout", "10ms", code=6)
    assert penstock.ok("status").startswith(f"store {store}\n")
    assert ["ok", "store", store] == list(json.loads(penstock("doctor", "--json").stdout)[2].values())[:3]
    with Terminal(penstock, "top", columns=200) as terminal:
        terminal.read_until(store)
        terminal.press("q")


async def test_the_footer_of_status_names_only_queues_that_its_worker_serves(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    await asyncio.to_thread(shell.ok, "enqueue", "true")
    async with App(store_of(shell)) as app:
        storage = await app.connect()
        await app.queue("mail").enqueue({}, id="a", task="send")
        lease = (await storage.claim("mail", Take("w", 1, 60_000))).leases[0]
        await storage.settle("mail", [Settlement(lease.id, lease.token, Snooze(0, unknown=True))])
    told = (await asyncio.to_thread(shell.ok, "status")).splitlines()
    assert told[-2].startswith("mail/a: The worker that took it last does not know task 'send'")
    assert told[-2].endswith("with `penstock worker MODULE:APP -q mail`.")
    assert told[-1] == "no worker runs: `penstock worker --commands -q default` starts one"


async def test_a_timeout_of_a_result_names_the_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/penstock.db"
    async with App(url) as app:
        job = await app.queue("mail").enqueue(1, task="send")
        with pytest.raises(ResultTimeout, match=re.escape(f"The store is {url}, namespace default.")):
            await job.result(timeout="10ms")


def test_jobs_that_need_different_workers_each_name_theirs(penstock: Shell) -> None:
    penstock.ok("enqueue", "true", "--id", "a")
    penstock.ok("enqueue", "--task", "send", "{}", "--id", "b")
    told = penstock.ok("status").splitlines()
    assert (
        "default/a: No worker runs for queue default. Start one with `penstock worker --commands -q default`."
        in told
    )
    assert (
        "default/b: No worker runs for queue default. Start one with `penstock worker MODULE:APP -q default`."
        in told
    )
    assert told[-1] == "no worker runs"


def test_a_terminal_of_80_columns_shows_all_counts_and_whole_words(penstock: Shell) -> None:
    penstock.ok("enqueue", "true", "--delay", "1h", "-q", "a-queue-with-a-long-name")
    penstock.ok("enqueue", "true", "-q", "limited", "--id", "late", "--delay", "2h")
    penstock.ok("pause", "limited", "--for", "1h")
    with Terminal(penstock, "status", columns=80) as terminal:
        terminal.wait()
        # The path of the store may be longer than a line.
        store, _, table = terminal.text.replace("\r", "").partition(", namespace default\n")
        shown = table.splitlines()
    assert store == f"store {store_of(penstock)}"
    assert "scheduled" in shown[0].split()
    assert max(map(len, shown)) <= 80
    assert "limited/late: It is not due until 20" in terminal.text
    with Terminal(penstock, "show", "late", columns=80) as terminal:
        terminal.wait()
        shown = terminal.text.replace("\r", "").splitlines()
    why = next(at for at, line in enumerate(shown) if line.startswith("why "))
    assert max(map(len, shown[why : why + 2])) <= 80
    assert f"{'':13}`penstock promote limited/late` to run it now." in shown


def test_sentences_wrap_between_words_and_keep_commands_whole() -> None:
    text = "Wait until a job finishes, or raise it with `penstock limit set -q mail --concurrency 2`."
    assert wrapped(text, 34).splitlines() == [
        "Wait until a job finishes, or",
        "raise it with",
        "`penstock limit set -q mail --concurrency 2`.",
    ]
    assert wrapped("one two", 6, indent=2) == "one\n  two"


def test_a_list_in_a_pipe_has_whole_texts(penstock: Shell) -> None:
    command = f"echo {'x' * 100}"
    penstock.ok("enqueue", "--id", "a", command)
    penstock.ok("pause", "default", "--for", "1h")
    listed = penstock.ok("list")
    assert command in listed
    assert "…" not in listed
