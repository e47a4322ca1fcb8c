"""The supervisor between a worker and a command: runs the command in a process group and makes sure that it ends.

    python -I -S supervise.py SHELL COMMAND GRACE_S STATUS_FD

Standard input is the worker's lifeline. A byte on it means: stop the command, with SIGTERM first and SIGKILL after the
grace. End of file means: the worker is dead, so kill the command. In either case, and also when the command ends by
itself, the rest of its group is killed before this process exits with the command's exit code (128 + the number of the
signal that ended it). The id of the group is written to STATUS_FD, for a worker that must take over.

This script starts for every command, so it imports nothing of Penstock and no slow module. ``signal`` would double the
start time, so its numbers are copied here.
"""

import os
import select
import sys
import time

SIGINT, SIGKILL, SIGPIPE, SIGTERM, SIGXFSZ = 2, 9, 13, 15, 25
NEVER = float("inf")
# Without a pidfd the child is polled at the first interval; with one, the second is only an upper bound.
POLL_S, LONG_S = 0.05, 86_400


def supervise(shell: str, command: str, grace_s: float, status: int) -> int:
    """Run ``command`` until it ends or is stopped; return its exit code."""
    try:
        child = os.posix_spawn(
            shell,
            [shell, "-c", command],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            setpgroup=0,
            # Programs do not expect the signals to be ignored that Python and worker processes ignore.
            setsigdef=[SIGINT, SIGPIPE, SIGXFSZ],
        )
    except OSError as error:
        print(f"{shell}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    try:
        os.write(status, str(child).encode())
    except BrokenPipeError:
        pass  # The worker has died; _watch kills the command.
    os.close(status)
    _close_output()
    ended = _watch(child, grace_s)
    _kill(child, SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1] if ended is None else ended)
    return code if code >= 0 else 128 - code


def _close_output() -> None:
    """Close our end of the output, so that it ends with the last process of the command."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _watch(child: int, grace_s: float) -> "int | None":
    """Wait until the command has ended, by itself or stopped; return its status if it was reaped.

    With a pidfd it is not reaped here: until then the id of its group cannot be reused.
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
        byte = os.read(0, 1) if 0 in ready else None
        if byte:
            _kill(child, SIGTERM)
            deadline = min(deadline, time.monotonic() + grace_s)
        elif byte == b"":
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
