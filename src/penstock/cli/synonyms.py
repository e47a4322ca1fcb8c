"""Commands, options and states of other tools, with their names in Penstock.

The tables have a row for each name in Penstock. ``tests/cli/test_synonyms.py`` checks each word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from penstock.client.hints import SAME_STATE

_MOST_NEAR: Final = 3
_MOST_NAMED: Final = 12

_COMMANDS: Final = {
    "enqueue": "add nq push put qsub send submit tsp",
    "list": "ls jobs qstat",
    "show": "job describe result",
    "why": "explain",
    "logs": "log tail output",
    "search": "find grep query",
    "cancel": "abort atrm kill qdel revoke",
    "retry": "replay requeue rerun",
    "remove": "del delete rm",
    "dlq list": "dead dead-letters errors failures",
    "status": "count info len queue queues stat stats",
    "top": "dashboard monitor watch",
    "schedule": "cron crontab periodic scheduler schedulers schedules",
    "limit": "limits rate-limit",
    "budget": "budgets",
    "pause": "quiet suspend",
    "resume": "continue unpause",
    "clear": "obliterate",
    "worker": "consume",
    "worker start": "daemon",
    "workers": "ps",
    "list scheduled": "atq",
    "history report": "report",
    "doctor": "check health ping",
    "config": "conf settings",
    "completion": "completions",
}
"""Commands, with their names in RQ, Celery, kubectl, docker, systemctl, git, at, nq, Grid Engine."""

_TWO_WORDS: Final = {
    "enqueue": "job add, job create, job enqueue",
    "list": "job list, job ls, jobs list, jobs ls",
    "show": "job show",
    "cancel": "job cancel",
    "retry": "job retry",
    "remove": "job delete, job remove",
    "status": "queue list, queue ls, queue show, queue status, queues list, queues ls",
    "pause": "queue pause",
    "resume": "queue resume",
    "drain": "queue drain, queue empty, queue purge",
    "clear": "queue clear",
}
"""Commands, with their names in tools that put the noun first."""

_MEMBERS: Final = {
    "config list": "ls show",
    "dlq clear": "delete empty purge remove",
    "dlq show": "inspect",
    "dlq list": "ls",
    "dlq retry": "requeue",
    "limit show": "get list ls",
    "budget show": "get list ls",
    "budget set": "add raise",
    "budget remove": "rm delete",
    "limit set": "add",
    "schedule add": "create set",
    "schedule remove": "delete rm",
    "schedule pause": "disable",
    "schedule resume": "enable",
    "schedule list": "ls",
    "schedule run": "fire trigger",
    "worker restart": "--restart",
    "worker start": "--start",
    "worker status": "--status list ps ls",
    "worker stop": "--stop",
}
"""Commands of a family, with other names for their last word."""

_OPTIONS: Final = {
    "* --app": "-A",
    "* --url": "--broker --database --db --store",
    "backup": "--file --output",
    "clean --older-than": "--age",
    "clear": "--all",
    "enqueue --cwd": "--chdir --directory --workdir",
    "enqueue --delay": "--countdown --in --schedule-in",
    "enqueue --after": "--depends-on",
    "enqueue --at": "--eta --run-at --schedule-at --when",
    "enqueue --ttl": "--expires",
    "enqueue --id": "--job-id --name --task-id",
    "enqueue --timeout": "--job-timeout --time-limit",
    "enqueue --attempts": "--max-attempts",
    "enqueue --queue": "--queue-name --queues",
    "enqueue --max-retries": "--retries --retry",
    "enqueue --backoff": "--retry-delay --retry-interval",
    "enqueue --wait": "--sync",
    "events --follow": "--tail --watch",
    "list --state": "--status",
    "logs --tail": "--lines",
    "logs --follow": "--watch",
    "pause": "--all",
    "resume": "--all",
    "schedule add --every": "--interval",
    "schedule add --attempts": "--max-attempts",
    "schedule add --limit": "--repeat",
    "schedule add --max-retries": "--retries",
    "schedule add --tz": "--timezone",
    "status": "--all",
    "status --watch": "--follow --live",
    "worker run --burst": "--exit-when-done --once",
    "worker run --name": "--hostname --worker-name",
    "worker run --concurrency": "--max-concurrency --threads -j",
    "worker run --pid-file": "--pidfile",
    "worker run --queues": "--queue -Q",
    "worker run --url": "-b",
    "worker stop": "--all",
    "workers": "--all",
}
"""Options, with their other names. ``*`` stands for every command; some commands need no option for a name.

``worker`` and ``worker start`` also have the options of ``worker run``.
"""

SAME: Final[dict[str, str]] = {
    **{name: meant for meant, names in _TWO_WORDS.items() for name in names.split(", ")},
    **{name: meant for meant, names in _COMMANDS.items() for name in names.split()},
    **{f"{meant.split()[0]} {name}": meant for meant, names in _MEMBERS.items() for name in names.split()},
    **{
        f"{meant.partition(' -')[0]} {name}": meant
        for meant, names in _OPTIONS.items()
        for name in names.split()
    },
    **{
        state: f"list {state}"
        for state in ("active", "completed", "failed", "pending", "running", "scheduled", "waiting")
    },
}
"""Words that work, with the command or option that they stand for."""


def _each(advice: dict[str, str]) -> dict[str, str]:
    """Return the advice on each of the words that share it."""
    return {word: text for words, text in advice.items() for word in words.split(", ")}


_INSTEAD: Final = {
    "apply, create": "Add a job with `penstock enqueue`, a repeated one with `penstock schedule add`.",
    "at": "Run `penstock enqueue --at 18:30 COMMAND`.",
    "batch": "Run `penstock enqueue -f FILE`, with a command on each line.",
    "exec": "`penstock enqueue --wait COMMAND` runs a command on a worker, and prints its output.",
    "beat": "Every worker fires schedules. Add one with `penstock schedule add`.",
    "call": "Run `penstock enqueue --wait --task NAME '{\"argument\": 1}'`.",
    "control": "Run `penstock cancel`, `penstock drain`, `penstock limit set` or `penstock worker stop`.",
    "empty, flush, purge": "`penstock drain` removes the jobs that wait, `penstock clear` all jobs.",
    "flower, web": "`penstock top` shows queues, workers and jobs live; `penstock history report` writes a page.",
    "get": "`penstock list` shows jobs, `penstock show ID` one of them, `penstock config get KEY` a setting.",
    "inspect": "Run `penstock show ID` for a job, `penstock list active` for all that run, or `penstock workers`.",
    "init, setup": "There is nothing to set up: the first `penstock enqueue` creates the store.",
    "migrate": "There is nothing to migrate: Penstock updates a store when it opens it.",
    "multi": "Run `penstock worker start --count 4`.",
    "restart": "Run `penstock worker restart`.",
    "run": "`penstock worker` runs jobs, `penstock enqueue COMMAND` adds one.",
    "set": "Run `penstock config set KEY VALUE`.",
    "shell": "In Python, `app.sync` has every call.",
    "start": "Run `penstock worker start`, or `penstock resume` after a pause.",
    "stop": "Run `penstock worker stop`, or `penstock cancel ID` for one job.",
    "undo": "A removed job cannot be brought back; `penstock retry ID` runs a failed or cancelled one again.",
    "config delete, config remove, config rm, config unset": "Run `penstock config set KEY ''`.",
    "config edit": "Run `penstock config set KEY VALUE`; `penstock config path` names the files.",
    "limit delete, limit remove, limit rm": "Run `penstock limit set -q QUEUE --none`.",
    "schedule show": "`penstock schedule list` shows all schedulers, with --json in full.",
    "worker logs": "`penstock worker status` names the log file of each worker; `penstock logs ID` is for jobs.",
    "worker kill": "Run `penstock worker stop --timeout 0`.",
    "* --format, * --output": "Add --json to print JSON.",
    "* --password": "Put it in the URL, or in PENSTOCK_URL: valkey://:PASSWORD@host.",
    "* --port, * --host": "Put it in the URL: --url valkey://host:6379.",
    "* --quiet": "Redirect the output: > /dev/null.",
    "cancel --terminate": 'Leave it out. A plain function is stopped only if its task has runner="process".',
    "cancel --all": "`penstock drain` removes all jobs that wait; `penstock list active` shows those to cancel by id.",
    "drain --all": "Without a queue, `penstock drain` is for all. `penstock clear` removes jobs of every state.",
    "dlq list --all, search --all": "Give a larger --limit.",
    "enqueue --args, enqueue --kwargs": "Run `penstock enqueue --task NAME '{\"argument\": 1}'`.",
    "enqueue --cmd, enqueue --command": "Give the command itself: `penstock enqueue 'make report'`.",
    "enqueue --cron": "Run `penstock schedule add NAME --cron '0 3 * * *' JOB`.",
    "enqueue --every, enqueue --repeat": "Run `penstock schedule add NAME --every 10m JOB`.",
    "enqueue -p": "Give --priority. If -p is part of the command, put -- before the command, or quote it.",
    "enqueue --unique": "Give the job an --id: an id is not enqueued twice.",
    "remove --all": "`penstock clear` removes all jobs, `penstock clean STATE` those that have ended.",
    "promote --all": "Give ids: `penstock list scheduled --json | jq -r '.[].id'`.",
    "reset --all": "Run `penstock reset --all-active`.",
    "retry --all": "Run `penstock dlq retry --all`.",
    "search --matching, search --text": "Give a field of the payload and its value: --where 'command=make report'.",
    "worker run --autoscale": "A worker claims only what it can run: give --concurrency and --processes.",
    "worker run --background, worker run --daemon": "Run `penstock worker start`.",
    "worker run --detach, worker run -d": "Run `penstock worker start`.",
    "worker run --beat, worker run --with-scheduler, worker run -B": "Every worker fires schedules: leave it out.",
    "worker run --log-level, worker run --loglevel, worker run -l": "Add --verbose to log completed jobs, too.",
    "worker run --pool, worker run -P": 'Each task has its own runner: @app.task(runner="process").',
    "worker run --max-tasks-per-child": 'Use a fresh process for each run: @app.task(runner="sandbox").',
    "worker run --max-memory-per-child": 'Use a fresh process for each run: @app.task(runner="sandbox", memory=...).',
    "worker run --time-limit, worker run --soft-time-limit": "Give it to the task: @app.task(timeout=...).",
    "worker run --prefetch-multiplier, worker run -O": "A worker claims only what it can run: leave it out.",
    "worker run --without-gossip, worker run --without-mingle": "Workers do not talk to each other: leave it out.",
    "worker run --task-events, worker run -E": "Every job writes its events: leave it out.",
}
INSTEAD: Final = _each(_INSTEAD)
"""Words that have no exact counterpart, with the advice in the error."""

_EXTRA_WORDS: Final = _each(
    {
        "events": "`--since 5m` shows the events of the last minutes.",
        "schedule pause, schedule remove, schedule resume, schedule run": "Give one name at a time.",
        "workers restart": "Did you mean `penstock worker restart`?",
        "workers start": "Did you mean `penstock worker start`?",
        "workers status": "Did you mean `penstock worker status`?",
        "workers stop": "Did you mean `penstock worker stop`?",
    }
)
"""Advice on an argument too many, by command, or by command and argument."""

STATES_BY_SYNONYM: Final = SAME_STATE

KEY_ADVICE: Final = _each(
    {
        "broker, broker_url, database, db, store": "Did you mean 'url'?",
        "default_queue": "Did you mean 'queue'?",
        "job_timeout, jobtimeout": "Did you mean 'timeout'?",
        "max_attempts": "Did you mean 'attempts'?",
        "max_retries, maxretries": "Set 'attempts', which is max_retries + 1.",
        "retries": "Set 'attempts', which is retries + 1.",
    }
)
"""Configuration keys of other tools, with the advice in the error."""


def known_command(path: str, name: str) -> list[str]:
    """Return the words for which ``name`` stands as a command of ``path`` (``""``, ``"dlq"``); none if unknown."""
    meant = SAME.get(f"{path} {name}".strip(), "")
    return meant.removeprefix(path).split()


def option_for(path: str, option: str) -> str | None:
    """Return the option of ``path`` for ``option`` of another tool: ``""`` if it needs none, ``None`` if unknown."""
    for command in (path, "*"):
        meant = SAME.get(f"{command} {option}")
        if meant is not None:
            return meant.removeprefix(command).strip()
    return None


def with_known_option(path: str, args: list[str], option: str) -> list[str] | None:
    """Return ``args`` with the option of another tool replaced by that of ``path``, or ``None`` if it is unknown."""
    meant = option_for(path, option)
    if meant is None:
        return None
    renamed: list[str] = []
    for word in args:
        name, equals, value = word.partition("=")
        if name != option:
            renamed.append(word)
        elif meant:
            renamed.append(f"{meant}{equals}{value}")
    return renamed


def advice(path: str, word: str) -> str | None:
    """Return what to do instead of the command or option ``word`` of ``path``."""
    return INSTEAD.get(f"{path} {word}".strip()) or (
        INSTEAD.get(f"* {word}") if word.startswith("-") else None
    )


def advice_on_word(path: str, word: str) -> str:
    """Return the advice on the argument ``word``, which is one too many for the command ``path``."""
    return _EXTRA_WORDS.get(f"{path} {word}") or _EXTRA_WORDS.get(path, "")


def did_you_mean(word: str, known: Sequence[str], *, otherwise: str = "", label: str = "") -> str:
    """Return a sentence that suggests known names like ``word``, or else lists all ``known`` names after ``label``.

    ``otherwise`` replaces the list.
    """
    close = nearest(word, known)
    if close:
        return f"Did you mean {' or '.join(map(repr, close))}?"
    if otherwise or not known:
        return otherwise
    more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    label = label or f"There {'are' if len(known) > 1 else 'is'}"
    return f"{label}: {', '.join(known[:_MOST_NAMED])}{more}."


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return up to three ``known`` names that resemble ``word``, the nearest first.

    A name is near if it begins with ``word``, or differs from it by at most one typing error in three letters.
    """
    typed = word.lower().strip("-")
    allowed = max(len(typed) // 3, 1)
    near = []
    for name in known:
        right = name.lower().strip("-")
        is_beginning = len(typed) > 2 and right.startswith(typed)
        distance = 0 if is_beginning else _typing_errors(typed, right)
        if distance <= allowed and distance < len(right):
            near.append((distance, name))
    return [name for _, name in sorted(near)[:_MOST_NEAR]]


def _typing_errors(typed: str, right: str) -> int:
    """Return the number of letters that are missing, extra, replaced, or swapped with the next one."""
    rows = [list(range(len(right) + 1))]
    for i, letter in enumerate(typed, 1):
        row = [i]
        for j, other in enumerate(right, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != other)))
            if i > 1 and j > 1 and letter == right[j - 2] and typed[i - 2] == other:
                row[j] = min(row[j], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]
