-- Jobs that are due at an instant of the wall clock, and the queue time that was last computed for it (schedules.py).
-- A row no longer counts if its run_at is not that of its job.
CREATE TABLE instants (
    queue INTEGER NOT NULL,
    id TEXT NOT NULL,
    wall_at INTEGER NOT NULL,
    run_at INTEGER NOT NULL,
    PRIMARY KEY (queue, id)
) STRICT, WITHOUT ROWID;

CREATE INDEX instants_in_order ON instants (queue, wall_at);
