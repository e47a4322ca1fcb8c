"""Words of other tools, and what they are called here: one list for commands, one for options, one for states.

A key is what somebody types behind ``penstock``. Add a row, and ``tests/cli/test_synonyms.py`` checks it.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "INSTEAD",
    "KEY_ADVICE",
    "SAME",
    "STATES_BY_SYNONYM",
    "advice",
    "known_command",
    "with_known_option",
]

SAME: Final[dict[str, str]] = {
    # Commands of RQ, Celery, kubectl, docker, systemctl, git.
    "add": "enqueue",
    "push": "enqueue",
    "put": "enqueue",
    "send": "enqueue",
    "submit": "enqueue",
    "ls": "list",
    "jobs": "list",
    "job": "show",
    "describe": "show",
    "inspect": "show",
    "result": "show",
    "explain": "why",
    "log": "logs",
    "tail": "logs",
    "find": "search",
    "grep": "search",
    "query": "search",
    "abort": "cancel",
    "kill": "cancel",
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
    "info": "status",
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
    "rate-limit": "limit",
    "quiet": "pause",
    "suspend": "pause",
    "continue": "resume",
    "unpause": "resume",
    "obliterate": "clear",
    "consume": "worker",
    "ps": "workers",
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
    "limit list": "limit show",
    "limit ls": "limit show",
    "limit add": "limit set",
    "schedule create": "schedule add",
    "schedule delete": "schedule remove",
    "schedule ls": "schedule list",
    "schedule rm": "schedule remove",
    "schedule set": "schedule add",
    "worker --restart": "worker restart",
    "worker --start": "worker start",
    "worker --status": "worker status",
    "worker --stop": "worker stop",
    "worker list": "worker status",
    "worker ls": "worker status",
    # Options. Those of `worker run` are given to `worker` and `worker start`, too.
    "* -A": "* --app",
    "* --broker": "* --url",
    "* --database": "* --url",
    "* --db": "* --url",
    "* --store": "* --url",
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
    "worker stop --all": "worker stop",
    "workers --all": "workers",
}
"""Words that work: what is typed, and the command it stands for. ``*`` stands for every command."""

INSTEAD: Final[dict[str, str]] = {
    "apply": "Add a job with `penstock enqueue`, a repeated one with `penstock schedule add`.",
    "beat": "Every worker fires schedules, so no other process is needed. Add one with `penstock schedule add`.",
    "call": "Run `penstock enqueue --wait --task NAME '{\"argument\": 1}'`.",
    "create": "Add a job with `penstock enqueue`, a repeated one with `penstock schedule add`.",
    "empty": "`penstock drain` removes the jobs that wait, `penstock clear` all jobs.",
    "flower": "`penstock top` shows queues, workers and jobs live; `penstock history report` writes a page.",
    "flush": "`penstock drain` removes the jobs that wait, `penstock clear` all jobs.",
    "get": "`penstock list` shows jobs, `penstock show ID` one of them, `penstock config get KEY` a setting.",
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
    "worker kill": "Run `penstock worker stop --timeout 0`.",
    "* --format": "Add --json to print JSON.",
    "* --output": "Add --json to print JSON.",
    "* --password": "Put it into the URL, or into PENSTOCK_URL: valkey://:PASSWORD@host.",
    "* --port": "Put it into the URL: --url valkey://host:6379.",
    "* --host": "Put it into the URL: --url valkey://host:6379.",
    "* --quiet": "Redirect the output: > /dev/null.",
    "cancel --all": "`penstock drain` removes all jobs that wait; `penstock list active` shows those to cancel by id.",
    "drain --all": "Without a queue, `penstock drain` is for all. `penstock clear` removes jobs of every state.",
    "dlq list --all": "Give a larger --limit.",
    "enqueue --args": "Run `penstock enqueue --task NAME '{\"argument\": 1}'`.",
    "enqueue --cron": "Run `penstock schedule add NAME --cron '0 3 * * *' JOB`.",
    "enqueue --every": "Run `penstock schedule add NAME --every 10m JOB`.",
    "enqueue --kwargs": "Run `penstock enqueue --task NAME '{\"argument\": 1}'`.",
    "enqueue --repeat": "Run `penstock schedule add NAME --every 10m JOB`.",
    "enqueue --unique": "Give the job an --id: a known id is not added twice.",
    "remove --all": "`penstock clear` removes all jobs, `penstock clean STATE` those that ended.",
    "promote --all": "Give ids: `penstock list scheduled --json | jq -r '.[].id'`.",
    "reset --all": "Run `penstock reset --all-active`.",
    "retry --all": "Run `penstock dlq retry --all`.",
    "search --all": "Give a larger --limit.",
    "worker run --autoscale": "A worker claims only what it can run: give --concurrency and --processes.",
    "worker run --background": "Run `penstock worker start`.",
    "worker run --beat": "Every worker fires schedules: leave it out.",
    "worker run --daemon": "Run `penstock worker start`.",
    "worker run --detach": "Run `penstock worker start`.",
    "worker run --log-level": "Add --verbose to log completed jobs, too.",
    "worker run --loglevel": "Add --verbose to log completed jobs, too.",
    "worker run --pool": 'Each task has its own runner: @app.task(runner="process").',
    "worker run --with-scheduler": "Every worker fires schedules: leave it out.",
    "worker run -B": "Every worker fires schedules: leave it out.",
    "worker run -d": "Run `penstock worker start`.",
    "worker run -l": "Add --verbose to log completed jobs, too.",
}
"""Words that are not clear enough to act on, or would need more: what is typed, and what the error says."""

STATES_BY_SYNONYM: Final[dict[str, str]] = {
    "pending": "waiting",
    "queued": "waiting",
    "ready": "waiting",
    "delayed": "scheduled",
    "retrying": "scheduled",
    "busy": "active",
    "processing": "active",
    "running": "active",
    "started": "active",
    "complete": "completed",
    "done": "completed",
    "finished": "completed",
    "succeeded": "completed",
    "success": "completed",
    "successful": "completed",
    "dead": "failed",
    "error": "failed",
    "errored": "failed",
    "failure": "failed",
    "aborted": "cancelled",
    "canceled": "cancelled",
    "revoked": "cancelled",
}

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
"""Keys of a configuration that have another name here."""


def known_command(path: str, name: str) -> list[str]:
    """Return the words that ``name`` stands for as a command of ``path`` (``""``, ``"dlq"``); none if unknown."""
    meant = SAME.get(f"{path} {name}".strip(), "")
    return meant.removeprefix(path).split()


def with_known_option(path: str, args: list[str], option: str) -> list[str] | None:
    """Return ``args`` with an unknown option of the command ``path`` replaced by ours, or ``None``."""
    for command in (path, "*"):
        meant = SAME.get(f"{command} {option}")
        if meant is not None:
            return _replaced(args, option, meant.removeprefix(command).strip())
    return None


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
