-- The first format. Times are epoch milliseconds of the queue's clock; 0 means never.

CREATE TABLE meta (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- One row per queue, read and written once per transaction: its counters, its clock, and the number of jobs by state.
-- uses has a bit for each feature that costs a query: 1 limits of the queue, 2 groups, 4 staged jobs, 8 jobs due at a wall
-- time. regroup: the last group that a changed default has reached.
CREATE TABLE queues (
    key INTEGER PRIMARY KEY,
    namespace TEXT NOT NULL,
    name TEXT NOT NULL,
    seq INTEGER NOT NULL DEFAULT 0,
    events INTEGER NOT NULL DEFAULT 0,
    event_bytes INTEGER NOT NULL DEFAULT 0,
    now_ms INTEGER NOT NULL DEFAULT 0,
    shift_ms INTEGER NOT NULL DEFAULT 0,
    paused INTEGER NOT NULL DEFAULT 0,
    used INTEGER NOT NULL DEFAULT 0,
    has_budgets INTEGER NOT NULL DEFAULT 0,
    settings TEXT NOT NULL DEFAULT '{}',
    uses INTEGER NOT NULL DEFAULT 0,
    regroup TEXT NOT NULL DEFAULT '',
    scheduled INTEGER NOT NULL DEFAULT 0,
    waiting INTEGER NOT NULL DEFAULT 0,
    blocked INTEGER NOT NULL DEFAULT 0,
    active INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0,
    held_completed INTEGER NOT NULL DEFAULT 0,
    held_failed INTEGER NOT NULL DEFAULT 0,
    minute BLOB,
    UNIQUE (namespace, name)
) STRICT;

-- The metrics of all minutes but the current one (queues.minute), under the number of the minute modulo 1440.
CREATE TABLE minutes (
    queue INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    minute BLOB NOT NULL,
    PRIMARY KEY (queue, slot)
) STRICT, WITHOUT ROWID;

-- All jobs of a task share one value.
CREATE TABLE options (
    key INTEGER PRIMARY KEY,
    value BLOB NOT NULL UNIQUE
) STRICT;

-- The parts of a job that change. place: its number in line, negated if it is LIFO. wake_at: the timeout of a suspended
-- job. held_until: the end of the longest hold on a finished job. error_type: the error class of a failed job.
-- Three columns keep older names than the code: annex has the extras (Extras in core/job.py), binds says that the job
-- has links to others, and grip is Record.slot_hold.
CREATE TABLE jobs (
    key INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    id TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    state TEXT NOT NULL,
    priority INTEGER NOT NULL,
    place INTEGER NOT NULL,
    options INTEGER NOT NULL,
    ttl_ms INTEGER NOT NULL,
    run_id TEXT NOT NULL,
    write_id TEXT NOT NULL,
    blocked_by TEXT NOT NULL,
    runs INTEGER NOT NULL,
    failures INTEGER NOT NULL,
    stalls INTEGER NOT NULL,
    ready_at INTEGER NOT NULL,
    run_at INTEGER NOT NULL,
    enqueued_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    claimed_at INTEGER NOT NULL,
    finished_at INTEGER NOT NULL,
    kept_until INTEGER NOT NULL,
    token INTEGER NOT NULL,
    settled_as TEXT NOT NULL,
    worker TEXT NOT NULL,
    lease_until INTEGER NOT NULL,
    cancelling INTEGER NOT NULL,
    failure BLOB,
    result BLOB,
    progress BLOB,
    rerun BLOB,
    annex BLOB,
    binds INTEGER NOT NULL DEFAULT 0,
    wake_at INTEGER NOT NULL DEFAULT 0,
    held_until INTEGER NOT NULL DEFAULT 0,
    error_type TEXT NOT NULL DEFAULT '',
    grip INTEGER NOT NULL DEFAULT 0
) STRICT;

-- The order of each state has its own index, so no verb ever walks past jobs of another state. An index includes the id,
-- which breaks ties, only where many jobs may have the same time.
CREATE UNIQUE INDEX jobs_by_id ON jobs (queue, id);
CREATE INDEX jobs_waiting ON jobs (queue, priority, place) WHERE state = 'waiting';
CREATE INDEX jobs_scheduled ON jobs (queue, run_at, id) WHERE state = 'scheduled';
CREATE INDEX jobs_blocked ON jobs (queue, place) WHERE state = 'blocked';
CREATE INDEX jobs_suspended ON jobs (queue, wake_at) WHERE wake_at > 0;
CREATE INDEX jobs_held ON jobs (queue, held_until) WHERE held_until > 0;
CREATE INDEX jobs_errors ON jobs (queue, error_type, finished_at, id) WHERE error_type <> '';
CREATE INDEX jobs_active ON jobs (queue, lease_until) WHERE state = 'active';
CREATE INDEX jobs_finished ON jobs (queue, state, kept_until) WHERE kept_until > 0;
CREATE INDEX jobs_expiring ON jobs (queue, expires_at)
    WHERE expires_at > 0 AND kept_until = 0 AND lease_until = 0;

-- Separate from the jobs, because a transition must not rewrite a large payload.
CREATE TABLE payloads (
    job INTEGER PRIMARY KEY,
    payload BLOB NOT NULL
) STRICT;

-- Limits by group: the empty key is the queue itself, * every group without a limit of its own.
CREATE TABLE limits (
    queue INTEGER NOT NULL,
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (queue, key)
) STRICT, WITHOUT ROWID;

-- The groups that have members, or starts that still count. queuerow.Group describes the columns.
CREATE TABLE job_groups (
    queue INTEGER NOT NULL,
    key TEXT NOT NULL,
    waiting INTEGER NOT NULL,
    active INTEGER NOT NULL,
    held INTEGER NOT NULL,
    blocked INTEGER NOT NULL,
    cost INTEGER NOT NULL,
    parked_until INTEGER NOT NULL,
    paused INTEGER NOT NULL,
    starts INTEGER NOT NULL,
    level INTEGER NOT NULL,
    level_at INTEGER NOT NULL,
    level_per INTEGER NOT NULL,
    look_at INTEGER NOT NULL,
    over_at INTEGER NOT NULL,
    PRIMARY KEY (queue, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX job_groups_parked ON job_groups (queue, look_at, key) WHERE look_at > 0;
CREATE INDEX job_groups_fading ON job_groups (queue, over_at, key) WHERE over_at > 0;

-- The members that a group blocks, in its order. Separate from the jobs, because a verb reads it after writing to it.
CREATE TABLE group_lines (
    queue INTEGER NOT NULL,
    key TEXT NOT NULL,
    rank INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    place INTEGER NOT NULL,
    id TEXT NOT NULL,
    PRIMARY KEY (queue, key, rank, priority, place, id)
) STRICT, WITHOUT ROWID;

-- The starts in a group's window, or in the queue's.
CREATE TABLE starts (
    queue INTEGER NOT NULL,
    key TEXT NOT NULL,
    at_ms INTEGER NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (queue, key, at_ms)
) STRICT, WITHOUT ROWID;

CREATE TABLE logs (
    job INTEGER NOT NULL,
    number INTEGER NOT NULL,
    line TEXT NOT NULL,
    PRIMARY KEY (job, number)
) STRICT, WITHOUT ROWID;

-- Number 0 is the signal that ended the job's last suspension; the others came early, in this order.
CREATE TABLE signals (
    job INTEGER NOT NULL,
    number INTEGER NOT NULL,
    name TEXT NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (job, number)
) STRICT;

-- The finished jobs that each consumer holds.
CREATE TABLE holds (
    queue INTEGER NOT NULL,
    consumer TEXT NOT NULL,
    finished_at INTEGER NOT NULL,
    id TEXT NOT NULL,
    job INTEGER NOT NULL,
    PRIMARY KEY (queue, consumer, finished_at, id)
) STRICT, WITHOUT ROWID;

CREATE INDEX holds_by_job ON holds (job);

CREATE TABLE waiters (
    job INTEGER NOT NULL,
    listener TEXT NOT NULL,
    PRIMARY KEY (job, listener)
) STRICT, WITHOUT ROWID;

-- AUTOINCREMENT: a listener continues after the last key that it has seen, so keys must not repeat.
CREATE TABLE news (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    queue INTEGER NOT NULL,
    listener TEXT NOT NULL,
    at_ms INTEGER NOT NULL,
    body BLOB NOT NULL
) STRICT;

CREATE INDEX news_by_listener ON news (queue, listener, key);
CREATE INDEX news_by_age ON news (queue, at_ms);

-- The last answer of each stream (lane), for calls that are repeated (replay.py).
CREATE TABLE memo (
    queue INTEGER NOT NULL,
    lane TEXT NOT NULL,
    number INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    answer BLOB NOT NULL,
    PRIMARY KEY (queue, lane)
) STRICT, WITHOUT ROWID;

-- The job that holds each dedup key. expires_at 0: for as long as the job is open.
CREATE TABLE dedup (
    queue INTEGER NOT NULL,
    key TEXT NOT NULL,
    id TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (queue, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX dedup_by_expiry ON dedup (queue, expires_at) WHERE expires_at > 0;

-- Sums of usage, in millionths. scope: '' the queue, t:<task>, g:<group>, f:<flow>.
CREATE TABLE usage (
    queue INTEGER NOT NULL,
    scope TEXT NOT NULL,
    name TEXT NOT NULL,
    micros INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    PRIMARY KEY (queue, scope, name)
) STRICT, WITHOUT ROWID;

-- scope as in usage. base: the sum at the beginning of the period; since: the time of that.
CREATE TABLE budgets (
    queue INTEGER NOT NULL,
    scope TEXT NOT NULL,
    name TEXT NOT NULL,
    micros INTEGER NOT NULL,
    per_ms INTEGER NOT NULL,
    base INTEGER NOT NULL,
    since INTEGER NOT NULL,
    PRIMARY KEY (queue, scope, name)
) STRICT, WITHOUT ROWID;

CREATE INDEX usage_by_age ON usage (queue, at_ms);

-- next_at 0: no slot is known. repeat_ms -1: not after completion. awaits: the incarnation of the job from whose end the
-- next slot is counted.
CREATE TABLE schedulers (
    queue INTEGER NOT NULL,
    name TEXT NOT NULL,
    spec BLOB NOT NULL,
    next_at INTEGER NOT NULL,
    paused INTEGER NOT NULL,
    fired INTEGER NOT NULL,
    slots_limit INTEGER NOT NULL,
    end_at INTEGER NOT NULL,
    repeat_ms INTEGER NOT NULL,
    last_id TEXT NOT NULL,
    awaits INTEGER NOT NULL,
    PRIMARY KEY (queue, name)
) STRICT, WITHOUT ROWID;

CREATE INDEX schedulers_by_slot ON schedulers (queue, next_at, name) WHERE paused = 0 AND next_at > 0;
CREATE INDEX schedulers_awaiting ON schedulers (queue) WHERE awaits > 0;

CREATE TABLE workers (
    queue INTEGER NOT NULL,
    id TEXT NOT NULL,
    info BLOB NOT NULL,
    seen_at INTEGER NOT NULL,
    PRIMARY KEY (queue, id)
) STRICT, WITHOUT ROWID;

CREATE TABLE events (
    key INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    last_seq INTEGER NOT NULL,
    first_seq INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    entry BLOB NOT NULL
) STRICT;

CREATE UNIQUE INDEX events_by_seq ON events (queue, last_seq);

CREATE TABLE consumers (
    queue INTEGER NOT NULL,
    name TEXT NOT NULL,
    position INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (queue, name)
) STRICT, WITHOUT ROWID;

-- Flows. A job that depends on others has a row in parents: the number of its dependencies, the number of those that do
-- not count yet, the first one that fails it, and how many there were when the job last waited for them. Rows name the
-- id, because a job has no key before it is written.
CREATE TABLE parents (
    queue INTEGER NOT NULL,
    id TEXT NOT NULL,
    flow TEXT NOT NULL,
    given INTEGER NOT NULL,
    pending INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    awaited INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (queue, id)
) STRICT, WITHOUT ROWID;

CREATE TABLE dependencies (
    key INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    parent TEXT NOT NULL,
    number INTEGER NOT NULL,
    on_queue TEXT NOT NULL,
    on_id TEXT NOT NULL,
    policy TEXT NOT NULL,
    state TEXT NOT NULL,
    result BLOB,
    failure BLOB
) STRICT;

CREATE UNIQUE INDEX dependencies_by_job ON dependencies (queue, parent, on_queue, on_id);
CREATE UNIQUE INDEX dependencies_in_order ON dependencies (queue, parent, number);

-- Jobs to notify of a job's end, besides the dependents in its extras.
CREATE TABLE later_dependents (
    key INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    id TEXT NOT NULL,
    to_queue TEXT NOT NULL,
    to_id TEXT NOT NULL,
    flow TEXT NOT NULL
) STRICT;

CREATE INDEX later_dependents_by_job ON later_dependents (queue, id);
