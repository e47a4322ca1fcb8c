"""The client API: apps, tasks, queues, job handles, flows, schedules and searches."""
