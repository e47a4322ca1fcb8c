"""A task with steps for processes, which find it here by name. Processes cannot share a store in memory."""

from __future__ import annotations

import os

from penstock import App, JobContext

app = App(os.environ["STEP_TASKS_URL"], backoff="1ms")


@app.task(queue="steps", runner="process", attempts=2)
def in_steps(context: JobContext, path: str) -> list[object]:
    """Record a step, fail, and wait for a while and a signal."""

    def write() -> str:
        with open(path, "a") as file:
            file.write("ran\n")
        return context.step_key

    key = context.sync.step("write", write)
    if context.failures == 0:
        raise ValueError(key)
    context.sync.sleep("150ms")
    return [context.sync.wait_for("approved", timeout="1d"), len(key)]
