"""Commands, options and states of other tools, with their names in Penstock.

A key is what a user types after ``penstock``. ``tests/cli/test_synonyms.py`` checks each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from penstock.client.hints import SAME_STATE

_MOST_NEAR: Final = 3
_MOST_NAMED: Final = 12

SAME: Final[dict[str, str]] = {
    # Commands of RQ, Celery, kubectl, docker, systemctl, git, at, nq, Grid Engine.
    "add": "enqueue",
    "nq": "enqueue",
    "push": "enqueue",
    "put": "enqueue",
    "qsub": "enqueue",
    "send": "enqueue",
    "submit": "enqueue",
    "tsp": "enqueue",
    "ls": "list",
    "jobs": "list",
    "qstat": "list",
    "job": "show",
    "describe": "show",
    "result": "show",
    "explain": "why",
    "log": "logs",
    "tail": "logs",
    "find": "search",
    "grep": "search",
    "query": "search",
    "abort": "cancel",
    "atrm": "cancel",
    "kill": "cancel",
    "qdel": "cancel",
    "revoke": "cancel",
    "replay": "retry",
    "requeue": "retry",
    "rerun": "retry",
    "del": "remove",
    "delete": "remove",
    "rm": "remove",
    "dead": "dlq list",
    "dead-letters": "dlq list",
    "errors": "dlq list",
    "failures": "dlq list",
    "count": "status",
    "info": "status",
    "len": "status",
    "queue": "status",
    "queues": "status",
    "stat": "status",
    "stats": "status",
    "dashboard": "top",
    "monitor": "top",
    "watch": "top",
    "cron": "schedule",
    "crontab": "schedule",
    "periodic": "schedule",
    "scheduler": "schedule",
    "schedulers": "schedule",
    "schedules": "schedule",
    "limits": "limit",
    "budgets": "budget",
    "rate-limit": "limit",
    "quiet": "pause",
    "suspend": "pause",
    "continue": "resume",
    "unpause": "resume",
    "obliterate": "clear",
    "consume": "worker",
    "daemon": "worker start",
    "ps": "workers",
    "output": "logs",
    "atq": "list scheduled",
    "report": "history report",
    "check": "doctor",
    "health": "doctor",
    "ping": "doctor",
    "conf": "config",
    "settings": "config",
    "completions": "completion",
    # States as commands.
    "active": "list active",
    "completed": "list completed",
    "failed": "list failed",
    "pending": "list pending",
    "running": "list running",
    "scheduled": "list scheduled",
    "waiting": "list waiting",
    # Commands of a family.
    "config ls": "config list",
    "config show": "config list",
    "dlq delete": "dlq clear",
    "dlq empty": "dlq clear",
    "dlq inspect": "dlq show",
    "dlq ls": "dlq list",
    "dlq purge": "dlq clear",
    "dlq remove": "dlq clear",
    "dlq requeue": "dlq retry",
    "limit get": "limit show",
    "budget get": "budget show",
    "budget list": "budget show",
    "budget ls": "budget show",
    "budget add": "budget set",
    "budget raise": "budget set",
    "budget rm": "budget remove",
    "budget delete": "budget remove",
    "limit list": "limit show",
    "limit ls": "limit show",
    "limit add": "limit set",
    "schedule create": "schedule add",
    "schedule delete": "schedule remove",
    "schedule disable": "schedule pause",
    "schedule enable": "schedule resume",
    "schedule ls": "schedule list",
    "schedule fire": "schedule run",
    "schedule trigger": "schedule run",
    "schedule rm": "schedule remove",
    "schedule set": "schedule add",
    "worker --restart": "worker restart",
    "worker --start": "worker start",
    "worker --status": "worker status",
    "worker --stop": "worker stop",
    "worker list": "worker status",
    "worker ps": "worker status",
    "worker ls": "worker status",
    # Options. `worker` and `worker start` also have those of `worker run`.
    "* -A": "* --app",
    "* --broker": "* --url",
    "* --database": "* --url",
    "* --db": "* --url",
    "* --store": "* --url",
    "backup --file": "backup",
    "backup --output": "backup",
    "clean --age": "clean --older-than",
    "clear --all": "clear",
    "enqueue --chdir": "enqueue --cwd",
    "enqueue --countdown": "enqueue --delay",
    "enqueue --depends-on": "enqueue --after",
    "enqueue --directory": "enqueue --cwd",
    "enqueue --eta": "enqueue --at",
    "enqueue --expires": "enqueue --ttl",
    "enqueue --in": "enqueue --delay",
    "enqueue --job-id": "enqueue --id",
    "enqueue --job-timeout": "enqueue --timeout",
    "enqueue --max-attempts": "enqueue --attempts",
    "enqueue --name": "enqueue --id",
    "enqueue --queue-name": "enqueue --queue",
    "enqueue --queues": "enqueue --queue",
    "enqueue --retries": "enqueue --max-retries",
    "enqueue --retry": "enqueue --max-retries",
    "enqueue --retry-delay": "enqueue --backoff",
    "enqueue --retry-interval": "enqueue --backoff",
    "enqueue --run-at": "enqueue --at",
    "enqueue --schedule-at": "enqueue --at",
    "enqueue --schedule-in": "enqueue --delay",
    "enqueue --sync": "enqueue --wait",
    "enqueue --task-id": "enqueue --id",
    "enqueue --time-limit": "enqueue --timeout",
    "enqueue --when": "enqueue --at",
    "enqueue --workdir": "enqueue --cwd",
    "events --tail": "events --follow",
    "events --watch": "events --follow",
    "list --status": "list --state",
    "logs --lines": "logs --tail",
    "logs --watch": "logs --follow",
    "pause --all": "pause",
    "resume --all": "resume",
    "schedule add --interval": "schedule add --every",
    "schedule add --max-attempts": "schedule add --attempts",
    "schedule add --repeat": "schedule add --limit",
    "schedule add --retries": "schedule add --max-retries",
    "schedule add --timezone": "schedule add --tz",
    "status --all": "status",
    "status --follow": "status --watch",
    "status --live": "status --watch",
    "worker run --exit-when-done": "worker run --burst",
    "worker run --hostname": "worker run --name",
    "worker run --max-concurrency": "worker run --concurrency",
    "worker run --once": "worker run --burst",
    "worker run --pidfile": "worker run --pid-file",
    "worker run --queue": "worker run --queues",
    "worker run --threads": "worker run --concurrency",
    "worker run --worker-name": "worker run --name",
    "worker run -Q": "worker run --queues",
    "worker run -b": "worker run --url",
    "worker run -j": "worker run --concurrency",
    "worker stop --all": "worker stop",
    "workers --all": "workers",
}
"""Words that work, with the command or option that they stand for. ``*`` stands for every command."""

INSTEAD: Final[dict[str, str]] = {
    "apply": "Add a job with `penstock enqueue`, a repeated one with `penstock schedule add`.",
    "at": "Run `penstock enqueue --at 18:30 COMMAND`.",
    "batch": "Run `penstock enqueue -f FILE`, with a command on each line.",
    "exec": "`penstock enqueue --wait COMMAND` runs a command on a worker, and prints its output.",
    "beat": "Every worker fires schedules. Add one with `penstock schedule add`.",
    "call": "Run `penstock enqueue --wait --task NAME '{\"argument\": 1}'`.",
    "control": "Run `penstock cancel`, `penstock drain`, `penstock limit set` or `penstock worker stop`.",
    "create": "Add a job with `penstock enqueue`, a repeated one with `penstock schedule add`.",
    "empty": "`penstock drain` removes the jobs that wait, `penstock clear` all jobs.",
    "flower": "`penstock top` shows queues, workers and jobs live; `penstock history report` writes a page.",
    "flush": "`penstock drain` removes the jobs that wait, `penstock clear` all jobs.",
    "get": "`penstock list` shows jobs, `penstock show ID` one of them, `penstock config get KEY` a setting.",
    "inspect": "Run `penstock show ID` for a job, `penstock list active` for all that run, or `penstock workers`.",
    "init": "There is nothing to set up: the first `penstock enqueue` creates the store.",
    "migrate": "There is nothing to migrate: Penstock updates a store when it opens it.",
    "multi": "Run `penstock worker start --count 4`.",
    "purge": "`penstock drain` removes the jobs that wait, `penstock clear` all jobs.",
    "restart": "Run `penstock worker restart`.",
    "run": "`penstock worker` runs jobs, `penstock enqueue COMMAND` adds one.",
    "set": "Run `penstock config set KEY VALUE`.",
    "setup": "There is nothing to set up: the first `penstock enqueue` creates the store.",
    "shell": "In Python, `app.sync` has every call.",
    "start": "Run `penstock worker start`, or `penstock resume` after a pause.",
    "stop": "Run `penstock worker stop`, or `penstock cancel ID` for one job.",
    "undo": "A removed job cannot be brought back; `penstock retry ID` runs a failed or cancelled one again.",
    "web": "`penstock top` shows queues, workers and jobs live; `penstock history report` writes a page.",
    "config delete": "Run `penstock config set KEY ''`.",
    "config edit": "Run `penstock config set KEY VALUE`; `penstock config path` names the files.",
    "config remove": "Run `penstock config set KEY ''`.",
    "config rm": "Run `penstock config set KEY ''`.",
    "config unset": "Run `penstock config set KEY ''`.",
    "limit delete": "Run `penstock limit set -q QUEUE --none`.",
    "limit remove": "Run `penstock limit set -q QUEUE --none`.",
    "limit rm": "Run `penstock limit set -q QUEUE --none`.",
    "schedule show": "`penstock schedule list` shows all schedulers, with --json in full.",
    "worker logs": "`penstock worker status` names the log file of each worker; `penstock logs ID` is for jobs.",
    "worker kill": "Run `penstock worker stop --timeout 0`.",
    "* --format": "Add --json to print JSON.",
    "* --output": "Add --json to print JSON.",
    "* --password": "Put it in the URL, or in PENSTOCK_URL: valkey://:PASSWORD@host.",
    "* --port": "Put it in the URL: --url valkey://host:6379.",
    "* --host": "Put it in the URL: --url valkey://host:6379.",
    "* --quiet": "Redirect the output: > /dev/null.",
    "cancel --terminate": 'Leave it out. A plain function is stopped only if its task has runner="process".',
    "cancel --all": "`penstock drain` removes all jobs that wait; `penstock list active` shows those to cancel by id.",
    "drain --all": "Without a queue, `penstock drain` is for all. `penstock clear` removes jobs of every state.",
    "dlq list --all": "Give a larger --limit.",
    "enqueue --args": "Run `penstock enqueue --task NAME '{\"argument\": 1}'`.",
    "enqueue --cmd": "Give the command itself: `penstock enqueue 'make report'`.",
    "enqueue --command": "Give the command itself: `penstock enqueue 'make report'`.",
    "enqueue --cron": "Run `penstock schedule add NAME --cron '0 3 * * *' JOB`.",
    "enqueue --every": "Run `penstock schedule add NAME --every 10m JOB`.",
    "enqueue --kwargs": "Run `penstock enqueue --task NAME '{\"argument\": 1}'`.",
    "enqueue -p": "Give --priority. If -p is part of the command, put -- before the command, or quote it.",
    "enqueue --repeat": "Run `penstock schedule add NAME --every 10m JOB`.",
    "enqueue --unique": "Give the job an --id: an id is not enqueued twice.",
    "remove --all": "`penstock clear` removes all jobs, `penstock clean STATE` those that have ended.",
    "promote --all": "Give ids: `penstock list scheduled --json | jq -r '.[].id'`.",
    "reset --all": "Run `penstock reset --all-active`.",
    "retry --all": "Run `penstock dlq retry --all`.",
    "search --all": "Give a larger --limit.",
    "search --matching": "Give a field of the payload and its value: --where 'command=make report'.",
    "search --text": "Give a field of the payload and its value: --where 'command=make report'.",
    "worker run --autoscale": "A worker claims only what it can run: give --concurrency and --processes.",
    "worker run --background": "Run `penstock worker start`.",
    "worker run --beat": "Every worker fires schedules: leave it out.",
    "worker run --daemon": "Run `penstock worker start`.",
    "worker run --detach": "Run `penstock worker start`.",
    "worker run --log-level": "Add --verbose to log completed jobs, too.",
    "worker run --loglevel": "Add --verbose to log completed jobs, too.",
    "worker run --pool": 'Each task has its own runner: @app.task(runner="process").',
    "worker run --with-scheduler": "Every worker fires schedules: leave it out.",
    "worker run --max-tasks-per-child": 'Use a fresh process for each run: @app.task(runner="sandbox").',
    "worker run --max-memory-per-child": 'Use a fresh process for each run: @app.task(runner="sandbox", memory=...).',
    "worker run --time-limit": "Give it to the task: @app.task(timeout=...).",
    "worker run --soft-time-limit": "Give it to the task: @app.task(timeout=...).",
    "worker run --prefetch-multiplier": "A worker claims only what it can run: leave it out.",
    "worker run --without-gossip": "Workers do not talk to each other: leave it out.",
    "worker run --without-mingle": "Workers do not talk to each other: leave it out.",
    "worker run --task-events": "Every job writes its events: leave it out.",
    "worker run -E": "Every job writes its events: leave it out.",
    "worker run -O": "A worker claims only what it can run: leave it out.",
    "worker run -P": 'Each task has its own runner: @app.task(runner="process").',
    "worker run -B": "Every worker fires schedules: leave it out.",
    "worker run -d": "Run `penstock worker start`.",
    "worker run -l": "Add --verbose to log completed jobs, too.",
}
"""Words that have no exact counterpart, with the advice in the error."""

_EXTRA_WORDS: Final[dict[str, str]] = {
    "events": "`--since 5m` shows the events of the last minutes.",
    "schedule pause": "Give one name at a time.",
    "schedule remove": "Give one name at a time.",
    "schedule resume": "Give one name at a time.",
    "schedule run": "Give one name at a time.",
    "workers restart": "Did you mean `penstock worker restart`?",
    "workers start": "Did you mean `penstock worker start`?",
    "workers status": "Did you mean `penstock worker status`?",
    "workers stop": "Did you mean `penstock worker stop`?",
}
"""Advice on an argument too many, by command, or by command and argument."""

STATES_BY_SYNONYM: Final = SAME_STATE

KEY_ADVICE: Final[dict[str, str]] = {
    "broker": "Did you mean 'url'?",
    "broker_url": "Did you mean 'url'?",
    "database": "Did you mean 'url'?",
    "db": "Did you mean 'url'?",
    "default_queue": "Did you mean 'queue'?",
    "job_timeout": "Did you mean 'timeout'?",
    "jobtimeout": "Did you mean 'timeout'?",
    "max_attempts": "Did you mean 'attempts'?",
    "max_retries": "Set 'attempts', which is max_retries + 1.",
    "maxretries": "Set 'attempts', which is max_retries + 1.",
    "retries": "Set 'attempts', which is retries + 1.",
    "store": "Did you mean 'url'?",
}
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
    return None if meant is None else _replaced(args, option, meant)


def _replaced(args: list[str], option: str, meant: str) -> list[str]:
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
