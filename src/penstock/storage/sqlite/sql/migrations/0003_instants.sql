-- Jobs that are due at an instant of the wall clock, and the queue time that it stood for when it was last computed
-- (clock.py). A row whose run_at is not that of its job has no meaning any more.
CREATE TABLE instants (
    queue INTEGER NOT NULL,
    id TEXT NOT NULL,
    wall_at INTEGER NOT NULL,
    run_at INTEGER NOT NULL,
    PRIMARY KEY (queue, id)
) STRICT, WITHOUT ROWID;

CREATE INDEX instants_in_order ON instants (queue, wall_at);
