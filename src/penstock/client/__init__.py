"""What user code holds: apps, tasks, queues, handles of jobs, flows, schedules and searches."""
