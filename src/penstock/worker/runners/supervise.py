"""Between a worker and a command: runs the command in a process group of its own, and sees to its end.

    python -I -S supervise.py SHELL COMMAND GRACE_S STATUS_FD

Standard input is the worker's lifeline. A byte on it: stop the command, with SIGTERM first and SIGKILL after the grace.
Its end: the worker is dead, the command is killed at once. Either way, and also when the command ends by itself,
whatever is left of its group is killed before this process ends, with the command's exit code (128 + the number of the
signal that ended it). The number of the group is told on STATUS_FD, for a worker that has to do our work.

It is a script, and imports nothing of Penstock, nor what takes long: it is started for every command. ``signal``
would double the time, so its numbers stand here.
"""

import os
import select
import sys
import time

SIGINT, SIGKILL, SIGPIPE, SIGTERM, SIGXFSZ = 2, 9, 13, 15, 25
NEVER = float("inf")
# Where nothing tells us of the end, we look; where something does, this is as good as for ever.
POLL_S, LONG_S = 0.05, 86_400


def supervise(shell: str, command: str, grace_s: float, status: int) -> int:
    """Run ``command`` to its end, whoever brings it about; its exit code."""
    try:
        child = os.posix_spawn(
            shell,
            [shell, "-c", command],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            setpgroup=0,
            # What Python ignores, and what one of several worker processes does, programs do not expect to be ignored.
            setsigdef=[SIGINT, SIGPIPE, SIGXFSZ],
        )
    except OSError as error:
        print(f"{shell}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    os.write(status, str(child).encode())
    os.close(status)
    _let_go_of_output()
    ended = _watch(child, grace_s)
    _kill(child, SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1] if ended is None else ended)
    return code if code >= 0 else 128 - code


def _let_go_of_output() -> None:
    """So that its end comes when the last process of the command is gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _watch(child: int, grace_s: float) -> "int | None":
    """Returns when the command has ended, by itself or because it was told to; its status, if it was asked for.

    Where there is a pidfd it need not be: as long as it is not reaped, the number of its group is its own.
    """
    ended = os.pidfd_open(child) if hasattr(os, "pidfd_open") else None
    sources = [0] if ended is None else [ended, 0]
    deadline = NEVER
    while True:
        rest = min(max(deadline - time.monotonic(), 0), LONG_S if ended is not None else POLL_S)
        ready = select.select(sources, [], [], rest)[0]
        if ended is not None and ended in ready:
            return None
        if ended is None and (status := os.waitpid(child, os.WNOHANG))[0]:
            return status[1]
        asked = os.read(0, 1) if 0 in ready else None
        if asked:
            _kill(child, SIGTERM)
            deadline = min(deadline, time.monotonic() + grace_s)
        elif asked == b"":
            sources.remove(0)
            deadline = 0
        if time.monotonic() >= deadline:
            _kill(child, SIGKILL)
            deadline = NEVER


def _kill(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass


if __name__ == "__main__":
    _, shell, command, grace_s, status = sys.argv
    os._exit(supervise(shell, command, float(grace_s), int(status)))
