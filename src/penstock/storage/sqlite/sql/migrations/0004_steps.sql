-- The recorded steps of jobs, in the order of their numbers. body: MessagePack of core.step.StepBody. result: a result
-- that is too large for the body. until_ms: when a step that waits is over (0: never).
CREATE TABLE steps (
    job INTEGER NOT NULL,
    name TEXT NOT NULL,
    number INTEGER NOT NULL,
    status TEXT NOT NULL,
    at_ms INTEGER NOT NULL,
    until_ms INTEGER NOT NULL,
    body BLOB NOT NULL,
    result BLOB,
    PRIMARY KEY (job, name)
) STRICT, WITHOUT ROWID;
